"""Groups of states: one block is read and one written, and only where a step ended is a hit."""

from __future__ import annotations

from kvproof_reference import KVCacheManager, Request
from kvproof_reference.coordinator import BlockIds
from kvproof_spec.config import Group

FULL, STATE = Group("full", 4), Group("state", 4)


def make(num_blocks: int, *groups: Group) -> KVCacheManager:
    return KVCacheManager(groups, num_blocks, max_model_len=64)


def run(manager: KVCacheManager, request: Request, *steps: int) -> list[BlockIds | None]:
    """Compute tokens step by step; what each step was granted."""
    granted = []
    for tokens in steps:
        granted.append(manager.allocate_slots(request, tokens))
        request.num_computed_tokens += tokens
        manager.new_step_starts()
    return granted


def test_what_a_step_passes_over_is_null_and_what_the_next_does_not_read_comes_back() -> None:
    manager, request = make(12, STATE), Request(0, range(18))
    assert run(manager, request, 8, 4, 5) == [((0, 1),), ((2,),), ((0, 3),)]
    assert manager.get_block_ids(0) == ((0, 0, 2, 0, 3),)
    assert manager.block_pool.free_order() == (4, 5, 6, 7, 8, 9, 10, 11, 1)


def test_a_state_is_hit_only_where_a_step_ended_at_the_end_of_a_block() -> None:
    manager = make(12, STATE)
    run(manager, Request(0, range(18)), 8, 4, 5)
    found = [manager.get_computed_blocks(Request(1, range(tokens))) for tokens in (8, 9, 13, 18)]
    assert found == [(((),), 0), (((0, 1),), 8), (((0, 0, 2),), 12), (((0, 0, 2),), 12)]


def test_an_evicted_state_leaves_the_one_before_it() -> None:
    manager = make(12, FULL, STATE)
    run(manager, Request(0, range(13)), 8, 4)
    manager.evict_blocks([5])
    hits, tokens = manager.get_computed_blocks(Request(1, range(13)))
    assert (hits, tokens) == (((1, 2), (0, 3)), 8)


def test_only_the_hit_s_own_state_is_held() -> None:
    manager = make(12, STATE)
    first, second = Request(0, range(13)), Request(1, range(13))
    run(manager, first, 8, 4)
    hits, tokens = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 1, tokens, hits) == ((3,),)
    assert manager.get_block_ids(1) == ((0, 0, 2, 3),)
    assert manager.block_pool.reference_counts[:4] == [0, 1, 2, 1]


def test_a_state_of_this_step_cannot_be_hit_before_the_next_step() -> None:
    manager = make(20, FULL, STATE)
    first, second = Request(0, range(8)), Request(1, range(9))
    assert manager.allocate_slots(first, 8) == ((1, 2), (0, 3))
    hits, tokens = manager.get_computed_blocks(second)
    assert (hits, tokens) == (((1, 2), (0, 3)), 8)
    assert manager.allocate_slots(second, 1, tokens, hits) is None
    assert manager.get_block_ids(1) == ((), ())
    manager.new_step_starts()
    assert manager.allocate_slots(second, 1, tokens, hits) == ((4,), (5,))


def test_lookahead_gets_no_state() -> None:
    manager = make(12, FULL, STATE)
    granted = manager.allocate_slots(Request(0, range(4)), 4, num_lookahead_tokens=5)
    assert granted == ((1, 2, 3), (4,))


def test_a_step_needs_one_state_however_many_blocks_it_spans() -> None:
    manager = make(3, STATE)
    assert manager.allocate_slots(Request(0, range(40)), 40, reserved_blocks=2) is None
    assert manager.allocate_slots(Request(0, range(40)), 40, reserved_blocks=1) == (
        (0,) * 9 + (1,),
    )


def test_a_load_needs_the_state_that_it_brings_and_the_running_one() -> None:
    """Counted as one, it took every free block and then failed (vLLM #46892)."""
    manager, request = make(13, FULL, STATE), Request(0, range(41))
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=40) is None
    assert manager.get_block_ids(0) == ((), ())
    assert manager.block_pool.free_order() == tuple(range(1, 13))

    manager = make(14, FULL, STATE)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=40) == ((12,), (13,))
    assert manager.get_block_ids(0) == ((*range(1, 11), 12), (0,) * 9 + (11, 13))


def test_a_load_without_new_tokens_needs_one_state() -> None:
    manager, request = make(4, FULL, STATE), Request(0, range(9))
    granted = manager.allocate_slots(
        request, 0, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    assert granted == ((), ())
    assert manager.get_block_ids(0) == ((1, 2), (0, 3))


def test_states_are_put_off_group_by_group_and_hit_together() -> None:
    manager = make(20, STATE, STATE, FULL)
    run(manager, Request(0, range(9)), 8)
    hits, tokens = manager.get_computed_blocks(Request(1, range(9)))
    assert (hits, tokens) == (((0, 1), (0, 2), (3, 4)), 8)
    manager.evict_blocks([2])
    assert manager.get_computed_blocks(Request(1, range(9))) == (((), (), ()), 0)


def test_a_clone_knows_which_states_are_of_this_step() -> None:
    manager = make(12, STATE)
    manager.allocate_slots(Request(0, range(4)), 4)
    twin = manager.clone()
    manager.new_step_starts()
    second = Request(1, range(5))
    hits, tokens = twin.get_computed_blocks(second)
    assert twin.allocate_slots(second, 1, tokens, hits) is None
    assert manager.allocate_slots(second, 1, tokens, hits) == ((2,),)
    twin.remove_skipped_blocks(0, 9)
    assert manager.get_block_ids(0) == ((1,),)
