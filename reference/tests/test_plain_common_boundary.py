"""Hits in several groups: where all of them can resume, and which blocks they need there."""

from __future__ import annotations

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group


def filled(num_blocks: int, tokens: int, *groups: Group) -> KVCacheManager:
    """A manager whose request 0 computed `tokens` tokens and left."""
    manager = KVCacheManager(groups, num_blocks, max_model_len=256)
    request = Request(0, range(tokens))
    assert manager.allocate_slots(request, tokens)
    manager.free(request)
    return manager


def test_a_window_needs_only_its_tail_and_the_rest_is_null() -> None:
    manager = filled(20, 16, Group("full", 4), Group("sliding", 4, 6))
    hits, tokens = manager.get_computed_blocks(Request(1, range(17)))
    assert (hits, tokens) == (((1, 2, 3, 4), (0, 0, 7, 8)), 16)


def test_the_boundary_is_one_that_every_group_can_resume_from() -> None:
    manager = filled(20, 16, Group("full", 4), Group("sliding", 4, 6))
    manager.evict_blocks([7])  # the window cannot resume at 16 or 12, but at 8
    hits, tokens = manager.get_computed_blocks(Request(1, range(17)))
    assert (hits, tokens) == (((1, 2), (5, 6)), 8)


def test_the_boundary_may_be_below_every_group_s_longest_hit() -> None:
    near, far = Group("sliding", 4, 5), Group("sliding", 4, 9)
    manager = filled(20, 16, near, far)
    manager.evict_blocks([4, 2])  # near resumes at 12 and 4
    manager.evict_blocks([7])  # far at 16 and 8, and at 4 from the start
    alone = [
        manager.coordinator.managers[group].find_longest_hit(
            Request(1, range(17)).block_hashes(4), 16
        )
        for group in (0, 1)
    ]
    assert [tokens for _, tokens in alone] == [12, 8]
    assert manager.get_computed_blocks(Request(1, range(17))) == (((1,), (5,)), 4)


def test_block_sizes_meet_at_their_common_multiple() -> None:
    manager = filled(20, 20, Group("full", 8), Group("sliding", 4, 6))
    hits, tokens = manager.get_computed_blocks(Request(1, range(20)))
    assert (hits, tokens) == (((1, 2), (0, 0, 6, 7)), 16)


def test_what_no_boundary_can_need_is_not_published() -> None:
    window = Group("sliding", 4, 5)  # one block left of a boundary, which lies on a multiple of 16
    manager = filled(20, 40, Group("full", 16), window)
    assert {block for block in manager.block_pool.keys if block > 3} == {7, 11}
    assert {block for block in manager.block_pool.keys if block <= 3} == {1, 2}


def test_a_prompt_s_end_is_a_further_key_of_the_block_it_ends_in() -> None:
    """As vLLM 0.32 does; no lookup asks for it."""
    manager = KVCacheManager([Group("full", 8), Group("sliding", 4, 6)], 20, max_model_len=256)
    request = Request(0, range(16), num_prompt_tokens=14)
    assert manager.allocate_slots(request, 16)
    eighth, end = request.block_hashes(4)[3], request.block_hashes(4)[2]
    assert list(manager.block_pool.keys[2]) == [(0, eighth), (0, end)]
    manager.evict_blocks([2])
    manager.cache_blocks(request, 16)
    assert list(manager.block_pool.keys[2]) == [(0, end)]


def test_three_groups_of_three_block_sizes_meet_too() -> None:
    manager = filled(30, 26, Group("full", 8), Group("sliding", 4, 5), Group("sliding", 2, 3))
    hits, tokens = manager.get_computed_blocks(Request(1, range(25)))
    assert tokens == 24
    assert hits == ((1, 2, 3), (0, 0, 0, 0, 0, 10), (0,) * 11 + (23,))


def test_groups_that_are_alike_are_looked_up_as_one() -> None:
    window = Group("sliding", 4, 9)
    manager = filled(30, 16, window, window, Group("full", 4))
    manager.evict_blocks([4, 6])  # one window's block up to 16, the other's up to 8
    assert manager.get_computed_blocks(Request(1, range(17))) == (((1,), (5,), (9,)), 4)


def test_groups_share_one_pool_and_one_capacity() -> None:
    manager = KVCacheManager([Group("full", 4), Group("sliding", 4, 8)], 6, max_model_len=64)
    assert manager.allocate_slots(Request(0, range(12)), 12) is None
    assert manager.allocate_slots(Request(1, range(8)), 8) == ((1, 2), (3, 4))
