"""Chunked local attention, cross attention, and drafters."""

from __future__ import annotations

import pytest

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group

FULL = Group("full", 4)
CHUNKED = Group("chunked", 4, 8)
CROSS = Group("cross", 4)


def filled(num_blocks: int, tokens: int, *groups: Group) -> KVCacheManager:
    """A manager whose request 0 computed `tokens` tokens and still holds them."""
    manager = KVCacheManager(groups, num_blocks, max_model_len=64)
    request = Request(0, range(tokens))
    assert manager.allocate_slots(request, tokens)
    return manager


def test_a_hit_needs_only_the_chunk_that_it_ends_in() -> None:
    manager = filled(20, 24, FULL, CHUNKED)
    found = [manager.get_computed_blocks(Request(1, range(tokens))) for tokens in (14, 17, 21)]
    assert found == [
        (((1, 2, 3), (0, 0, 9)), 12),
        (((1, 2, 3, 4), (0, 0, 0, 0)), 16),
        (((1, 2, 3, 4, 5), (0, 0, 0, 0, 11)), 20),
    ]


def test_a_missing_block_of_a_chunk_leaves_what_is_before_it() -> None:
    manager = filled(20, 24, FULL, CHUNKED)
    manager.evict_blocks([11])
    assert manager.get_computed_blocks(Request(1, range(24)))[1] == 16
    manager.evict_blocks([9, 4])
    assert manager.get_computed_blocks(Request(1, range(24)))[1] == 8


def test_a_chunk_may_begin_inside_a_block() -> None:
    """Then vLLM 0.32 gives a hit of 4 whose only block is null."""
    manager = filled(20, 9, Group("chunked", 4, 6))
    manager.evict_blocks([2])
    assert manager.get_computed_blocks(Request(1, range(10))) == (((1,),), 4)


def test_what_is_left_of_the_chunk_comes_back() -> None:
    manager, request = filled(9, 15, CHUNKED), Request(0, range(15))
    for computed in (15, 16, 17):
        request.num_computed_tokens = computed
        request.append_tokens([computed])
        assert manager.allocate_slots(request, 1)
    assert manager.get_block_ids(0) == ((0, 0, 0, 0, 5),)
    assert manager.block_pool.free_order() == (6, 7, 8, 2, 1, 4, 3)


def test_a_long_sequence_fits_chunks_that_are_given_back() -> None:
    manager = KVCacheManager([CHUNKED], 5, max_model_len=256, max_in_flight_tokens=8)
    request = Request(0, range(100))
    assert manager.allocate_slots(request, 8, full_sequence_must_fit=True) == ((1, 2),)
    manager = KVCacheManager([CHUNKED], 4, max_model_len=256, max_in_flight_tokens=8)
    assert manager.allocate_slots(request, 8, full_sequence_must_fit=True) is None


def test_a_chunked_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match="a drafter with chunked local attention"):
        KVCacheManager([Group("chunked", 4, 8, drafter=True)], 8, max_model_len=64)


def test_cross_attention_gets_blocks_for_the_encoder_s_tokens_once() -> None:
    manager = KVCacheManager([FULL, CROSS], 9, max_model_len=64, enable_caching=False)
    request = Request(0, range(6))
    assert manager.allocate_slots(request, 6, num_encoder_tokens=10) == ((1, 2), (3, 4, 5))
    request.num_computed_tokens = 6
    request.append_tokens(range(6, 9))
    assert manager.allocate_slots(request, 3) == ((6,), ())
    manager.free(request)
    assert manager.block_pool.free_order() == (5, 4, 3, 6, 2, 1, 7, 8)


def test_the_encoder_s_tokens_count_in_what_is_needed() -> None:
    manager = KVCacheManager([FULL, CROSS], 5, max_model_len=8, enable_caching=False)
    request = Request(0, range(8))
    assert manager.allocate_slots(request, 4, num_encoder_tokens=13) is None
    assert not manager.allocate_slots(
        request, 4, num_encoder_tokens=12, full_sequence_must_fit=True
    )
    assert manager.allocate_slots(request, 4, num_encoder_tokens=12) == ((1,), (2, 3, 4))


def test_external_tokens_are_none_of_the_encoder_s() -> None:
    manager = KVCacheManager([FULL, CROSS], 9, max_model_len=64, enable_caching=False)
    granted = manager.allocate_slots(
        Request(0, range(9)), 1, num_external_computed_tokens=8, num_encoder_tokens=4
    )
    assert granted == ((3,), (4,))


def test_cross_attention_needs_prefix_caching_off() -> None:
    with pytest.raises(ValueError, match="prefix caching off"):
        KVCacheManager([FULL, CROSS], 9, max_model_len=64)


def test_a_drafter_s_hit_leaves_its_last_block_out() -> None:
    manager = filled(9, 12, Group("full", 4, drafter=True))
    found = [manager.get_computed_blocks(Request(1, range(tokens))) for tokens in (8, 12, 13)]
    assert found == [(((),), 0), (((1,),), 4), (((1, 2),), 8)]


def test_a_drafter_s_window_must_reach_a_block_further_than_the_hit() -> None:
    manager = filled(20, 16, FULL, Group("sliding", 4, 5, drafter=True))
    assert manager.get_computed_blocks(Request(1, range(17))) == (((1, 2, 3), (0, 0, 7)), 12)
    manager.evict_blocks([8])
    assert manager.get_computed_blocks(Request(1, range(17))) == (((1, 2), (0, 6)), 8)


def test_what_a_drafter_drops_beyond_a_boundary_is_published() -> None:
    manager = filled(20, 21, Group("full", 8), Group("sliding", 4, 5, drafter=True))
    assert manager.get_block_ids(0) == ((1, 2, 3), (4, 5, 6, 7, 8, 9))
    assert sorted(manager.block_pool.keys) == [1, 2, 4, 5, 6, 7, 8]
    hits, tokens = manager.get_computed_blocks(Request(1, range(21)))
    assert (hits, tokens) == (((1, 2), (0, 0, 0, 7)), 16)


def test_a_group_like_a_drafter_s_is_treated_as_one() -> None:
    manager = filled(20, 12, FULL, Group("full", 4, drafter=True))
    assert manager.get_computed_blocks(Request(1, range(13))) == (((1, 2), (4, 5)), 8)


def test_a_state_s_last_boundary_is_a_piece_before_what_a_drafter_drops() -> None:
    groups = [Group("full", 4, drafter=True), Group("state", 4)]
    manager = KVCacheManager(groups, 20, max_model_len=64, partial_boundary=2)
    request = Request(0, range(9))
    manager.allocate_slots(request, 6)
    assert manager.get_computed_blocks(Request(1, range(9)))[1] == 0
    manager.new_step_starts()
    request.num_computed_tokens = 6
    assert manager.allocate_slots(request, 3)
    manager.new_step_starts()
    hits, tokens = manager.get_computed_blocks(Request(1, range(9)))
    assert tokens == 6
    assert hits == ((1, 2), (0, manager.pending_copies[0].destination))
