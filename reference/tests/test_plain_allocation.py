"""Allocation, refusal, trim, publication and release of the plain manager."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group

FULL = Group("full", 4)
WINDOW = Group("sliding", 4, 8)


def make(num_blocks: int, *groups: Group, enable_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        groups or (FULL,), num_blocks, max_model_len=256, enable_caching=enable_caching
    )


def admit(manager: KVCacheManager, request: Request) -> tuple[tuple[int, ...], ...] | None:
    hits, tokens = manager.get_computed_blocks(request)
    granted = manager.allocate_slots(request, request.num_tokens - tokens, tokens, hits)
    if granted is not None:
        request.num_computed_tokens = request.num_tokens
    return granted


def everything(manager: KVCacheManager, request_ids: Sequence[int]) -> object:
    pool = manager.block_pool
    return (
        pool.free_order(),
        list(pool.reference_counts),
        {key: tuple(copies) for key, copies in pool.index.items()},
        dict(pool.keys),
        [manager.get_block_ids(request_id) for request_id in request_ids],
        manager.deferred_blocks(),
    )


def test_a_refused_admission_changes_nothing() -> None:
    manager = make(8)
    old = Request(0, range(12))
    admit(manager, old)
    manager.free(old)
    admit(manager, Request(1, range(100, 116)))
    before = everything(manager, [0, 1, 2])
    # Two hits, both of them among the three free blocks, and two more blocks.
    new = Request(2, [*range(8), *range(50, 57)])
    assert manager.get_computed_blocks(new)[1] == 8
    assert admit(manager, new) is None
    assert everything(manager, [0, 1, 2]) == before


def test_a_free_hit_takes_the_place_of_a_free_block() -> None:
    manager = make(5)
    old = Request(0, range(12))
    admit(manager, old)
    manager.free(old)
    request = Request(1, [*range(12), 50, 51])
    hits, tokens = manager.get_computed_blocks(request)
    assert (tokens, manager.block_pool.get_num_free_blocks()) == (12, 4)
    assert manager.allocate_slots(request, 6, tokens, hits) is None
    assert manager.allocate_slots(request, 2, tokens, hits) == ((4,),)


def test_a_hit_leaves_a_token_to_compute() -> None:
    manager = make(8)
    admit(manager, Request(0, range(8)))
    assert manager.get_computed_blocks(Request(1, range(8))) == (((1,),), 4)
    assert manager.get_computed_blocks(Request(2, range(9))) == (((1, 2),), 8)


def test_reserved_blocks_stay_free() -> None:
    manager = make(5)
    request = Request(0, range(8))
    assert manager.allocate_slots(request, 8, reserved_blocks=3) is None
    assert manager.allocate_slots(request, 8, reserved_blocks=2) == ((1, 2),)


def test_the_whole_sequence_must_fit_where_that_is_asked() -> None:
    manager = make(4)
    request = Request(0, range(16))
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 4) == ((1,),)


def test_a_long_sequence_fits_a_window_that_slides() -> None:
    manager = KVCacheManager([WINDOW], 6, max_model_len=256, max_in_flight_tokens=8)
    request = Request(0, range(100))
    assert manager.allocate_slots(request, 8, full_sequence_must_fit=True) == ((1, 2),)


def test_lookahead_gets_blocks_and_no_keys() -> None:
    manager = make(8)
    request = Request(0, range(4))
    assert manager.allocate_slots(request, 4, num_lookahead_tokens=5) == ((1, 2, 3),)
    request.num_computed_tokens = 4
    request.append_tokens([4])
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=5) == ((),)
    assert set(manager.block_pool.keys) == {1}


def test_drafts_are_not_published() -> None:
    manager = make(8)
    request = Request(0, range(6))
    assert manager.allocate_slots(request, 9) == ((1, 2, 3),)
    assert set(manager.block_pool.keys) == {1}


def test_delayed_external_tokens_are_published_when_they_have_arrived() -> None:
    manager = make(8)
    request = Request(0, range(10))
    granted = manager.allocate_slots(
        request, 0, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    assert granted == ((),)
    assert manager.get_block_ids(0) == ((1, 2),)
    assert manager.block_pool.keys == {}
    manager.cache_blocks(request, 8)
    assert set(manager.block_pool.keys) == {1, 2}


def test_hits_of_every_group_are_held_before_any_external_block_is_taken() -> None:
    """A block of the window's hit was once taken for the full group (vLLM #33775)."""
    manager = make(14, FULL, Group("sliding", 4, 32))
    first, other = Request(0, range(16)), Request(1, range(100, 112))
    admit(manager, first)
    admit(manager, other)
    manager.free(first)
    manager.free(other)
    request = Request(2, [*range(16), *range(50, 59)])
    hits, tokens = manager.get_computed_blocks(request)
    assert tokens == 16
    assert manager.allocate_slots(
        request, 0, tokens, hits, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    held = [block for table in manager.get_block_ids(2) for block in table]
    assert len(held) == len(set(held)) == 12


def test_nothing_to_allocate_for_is_an_error() -> None:
    with pytest.raises(ValueError, match="request 3: no tokens"):
        make(4).allocate_slots(Request(3, [1]), 0)


def test_a_window_gives_back_what_is_processed_and_not_what_is_only_computed() -> None:
    manager = make(8, WINDOW)
    request = Request(0, range(12))
    admit(manager, request)
    request.append_tokens([12])
    request.num_in_flight_tokens = 2
    manager.allocate_slots(request, 1)  # 10 processed: position 3 is still needed
    assert manager.get_block_ids(0) == ((1, 2, 3, 4),)
    request.num_in_flight_tokens = 1
    manager.remove_skipped_blocks(0, 11)  # position 4 is the first one needed
    assert manager.get_block_ids(0) == ((0, 2, 3, 4),)
    assert manager.block_pool.free_order() == (5, 6, 7, 1)


def test_a_trim_goes_right_to_left_and_stops_at_the_first_null() -> None:
    manager = make(8, WINDOW)
    request = Request(0, range(20))
    manager.allocate_slots(request, 20, delay_cache_blocks=True)
    manager.remove_skipped_blocks(0, 11)
    manager.remove_skipped_blocks(0, 19)
    assert manager.get_block_ids(0) == ((0, 0, 0, 4, 5),)
    assert manager.block_pool.free_order() == (3, 2, 1, 6, 7)
    manager.free(request)
    assert manager.block_pool.free_order() == (5, 4, 3, 2, 1, 6, 7)


def test_a_refusal_may_have_trimmed_the_window_and_nothing_else() -> None:
    manager = make(6, WINDOW)
    request = Request(0, range(20))
    manager.allocate_slots(request, 20)
    request.num_computed_tokens = 20
    request.append_tokens(range(20, 60))
    assert manager.allocate_slots(request, 40) is None
    assert manager.get_block_ids(0) == ((0, 0, 0, 4, 5),)
    assert manager.block_pool.free_order() == (3, 2, 1)


def test_deferred_blocks_stay_held_until_their_step_has_completed() -> None:
    manager = make(8, FULL, WINDOW)
    request = Request(0, range(8))
    admit(manager, request)
    manager.free(request, in_use_until=3)
    assert manager.get_block_ids(0) == ((), ())
    assert manager.deferred_blocks() == (1, 2, 3, 4)
    assert manager.block_pool.free_order() == (5, 6, 7)
    assert not manager.reset_prefix_cache()
    manager.step_completed(2)
    assert manager.deferred_blocks() == (1, 2, 3, 4)
    manager.step_completed(4)
    assert manager.deferred_blocks() == ()
    # One batch over all groups: the window's blocks come first (vLLM #48489).
    assert manager.block_pool.free_order() == (5, 6, 7, 4, 3, 2, 1)


def test_without_a_deferral_every_group_is_a_batch_of_its_own() -> None:
    manager = make(8, FULL, WINDOW)
    request = Request(0, range(8))
    admit(manager, request)
    manager.free(request)
    assert manager.block_pool.free_order() == (5, 6, 7, 2, 1, 4, 3)


def test_a_hit_on_a_deferred_block_outlives_the_deferral() -> None:
    manager = make(8)
    first = Request(0, range(8))
    admit(manager, first)
    manager.free(first, in_use_until=1)
    assert admit(manager, Request(1, range(9))) == ((3,),)
    manager.step_completed(1)
    assert manager.block_pool.reference_counts[:4] == [0, 1, 1, 1]


def test_a_deferral_waits_for_the_one_before_it() -> None:
    manager = make(8)
    for request_id, step in ((0, 5), (1, 4)):
        request = Request(request_id, [request_id] * 4)
        admit(manager, request)
        manager.free(request, in_use_until=step)
    manager.step_completed(4)
    assert manager.deferred_blocks() == (1, 2)
    manager.step_completed(5)
    assert manager.deferred_blocks() == ()


def test_with_caching_off_nothing_is_found_and_the_last_freed_is_the_next_used() -> None:
    manager = make(8, FULL, WINDOW, enable_caching=False)
    first = Request(0, range(8))
    assert admit(manager, first) == ((1, 2), (3, 4))
    manager.free(first)
    assert manager.block_pool.free_order() == (4, 3, 2, 1, 5, 6, 7)
    assert manager.get_computed_blocks(Request(1, range(9))) == (((), ()), 0)


def test_an_evicted_prefix_is_not_found_and_still_held() -> None:
    manager = make(8)
    admit(manager, Request(0, range(8)))
    manager.evict_blocks([1])
    assert manager.get_computed_blocks(Request(1, range(9))) == (((),), 0)
    assert manager.get_block_ids(0) == ((1, 2),)


def test_a_clone_and_its_original_do_not_touch_each_other() -> None:
    manager = make(12, FULL, WINDOW)
    request, leaving = Request(0, range(8)), Request(1, [5] * 4)
    admit(manager, request)
    admit(manager, leaving)
    manager.free(leaving, in_use_until=1)
    before = everything(manager, [0, 2])
    twin = manager.clone()
    assert everything(twin, [0, 2]) == before

    twin.step_completed(1)
    admit(twin, Request(2, range(9)))
    twin.remove_skipped_blocks(0, 20)
    twin.evict_blocks(range(1, 12))
    twin.free(request)
    assert everything(manager, [0, 2]) == before

    after = everything(twin, [0, 2])
    manager.free(request)
    manager.step_completed(1)
    assert manager.reset_prefix_cache()
    assert everything(twin, [0, 2]) == after


def test_a_subclass_can_exchange_a_part_and_its_clones_keep_it() -> None:
    class OneDigest(KVCacheManager):
        @staticmethod
        def key_of(digest: bytes) -> bytes:
            return b"the same"

    manager = OneDigest([FULL], 8, max_model_len=64).clone()
    admit(manager, Request(0, range(8)))
    assert manager.get_computed_blocks(Request(1, [7] * 9)) == (((1, 1),), 8)
