"""What is kept back for a store, and what is to be cleared before it is used."""

from __future__ import annotations

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group

FULL, WINDOW, STATE = Group("full", 4), Group("sliding", 4, 8), Group("state", 4)


def holding(manager: KVCacheManager, number: int) -> Request:
    """A request that was granted all its eight tokens."""
    request = Request(number, [number] * 8)
    assert manager.allocate_slots(request, 8)
    return request


def make(*groups: Group) -> KVCacheManager:
    return KVCacheManager(groups or (FULL, WINDOW), 10, max_model_len=64)


def test_stored_blocks_come_back_when_their_store_has_completed() -> None:
    manager = make()
    manager.free(holding(manager, 0), until_stored=True)
    assert manager.get_block_ids(0) == ((), ())
    assert manager.deferred_blocks() == (1, 2, 3, 4)
    manager.step_completed(9)
    manager.store_completed(1)
    assert manager.deferred_blocks() == (1, 2, 3, 4)
    manager.store_completed(0)
    assert manager.deferred_blocks() == ()
    # One batch over all groups, as with every release that was kept back.
    assert manager.block_pool.free_order() == (5, 6, 7, 8, 9, 4, 3, 2, 1)


def test_blocks_wait_for_their_step_and_their_store_whichever_is_last() -> None:
    for step_is_last in (True, False):
        manager = make()
        manager.free(holding(manager, 0), in_use_until=3, until_stored=True)
        if step_is_last:
            manager.store_completed(0)
            manager.step_completed(2)
        else:
            manager.step_completed(3)
        assert manager.deferred_blocks() == (1, 2, 3, 4)
        if step_is_last:
            manager.step_completed(3)
        else:
            manager.store_completed(0)
        assert manager.deferred_blocks() == ()
        assert manager.block_pool.get_num_free_blocks() == 9


def test_nothing_waits_for_somebody_else_s_store() -> None:
    manager = make(FULL)
    first, second = holding(manager, 0), holding(manager, 1)
    manager.free(first, in_use_until=3, until_stored=True)
    manager.free(second, in_use_until=3)
    manager.step_completed(3)
    assert manager.deferred_blocks() == (1, 2)
    assert manager.block_pool.free_order() == (5, 6, 7, 8, 9, 4, 3)


def test_a_step_gives_back_in_the_order_of_the_releases() -> None:
    manager = make(FULL)
    first, second = holding(manager, 0), holding(manager, 1)
    manager.free(first, in_use_until=3, until_stored=True)
    manager.free(second, in_use_until=3)
    manager.store_completed(0)
    manager.step_completed(3)
    assert manager.block_pool.free_order() == (5, 6, 7, 8, 9, 2, 1, 4, 3)


def test_a_request_may_leave_twice_before_its_store_has_completed() -> None:
    manager = make(FULL)
    for _ in range(2):
        manager.free(holding(manager, 0), until_stored=True)
    assert manager.deferred_blocks() == (1, 2, 3, 4)
    manager.store_completed(0)
    assert manager.block_pool.free_order() == (5, 6, 7, 8, 9, 2, 1, 4, 3)


def test_a_clone_keeps_back_on_its_own() -> None:
    manager = make(FULL)
    manager.free(holding(manager, 0), in_use_until=1, until_stored=True)
    twin = manager.clone()
    twin.store_completed(0)
    twin.step_completed(1)
    assert twin.deferred_blocks() == ()
    assert manager.deferred_blocks() == (1, 2)
    manager.step_completed(1)
    assert manager.deferred_blocks() == (1, 2)


def clearing(*groups: Group, partial_boundary: int | None = None) -> KVCacheManager:
    return KVCacheManager(
        groups, 20, max_model_len=64, clears=True, partial_boundary=partial_boundary
    )


def test_what_is_handed_out_is_to_be_cleared_once() -> None:
    manager = clearing(FULL, WINDOW)
    request = holding(manager, 0)
    assert manager.take_new_block_ids() == (1, 2, 3, 4)
    assert manager.take_new_block_ids() == ()
    request.num_computed_tokens = 8
    request.append_tokens([0])
    manager.allocate_slots(request, 1)
    assert manager.take_new_block_ids() == (5, 6)


def test_hits_and_states_are_not_cleared() -> None:
    manager = clearing(FULL, STATE)
    holding(manager, 0)
    assert manager.take_new_block_ids() == (1, 2)
    manager.new_step_starts()
    request = Request(1, [0] * 9)
    hits, tokens = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 1, tokens, hits) == ((4,), (5,))
    assert manager.take_new_block_ids() == (4,)


def test_a_page_that_an_unordered_load_fills_is_not_cleared() -> None:
    manager, request = clearing(FULL), Request(0, range(10))
    manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
    assert manager.take_new_block_ids() == ()
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 2)
    assert manager.take_new_block_ids() == (3,)
    manager.allocate_slots(Request(1, range(9)), 1, num_external_computed_tokens=8)
    assert manager.take_new_block_ids() == (4, 5, 6)


def test_the_copy_of_a_hit_is_among_the_blocks_handed_out() -> None:
    manager = clearing(FULL, STATE, partial_boundary=2)
    producer = Request(0, range(7))
    manager.allocate_slots(producer, 6)
    manager.new_step_starts()
    assert manager.take_new_block_ids() == (1, 2)
    request = Request(1, [*range(6), 70, 71, 72])
    hits, tokens = manager.get_computed_blocks(request)
    assert tokens == 6
    manager.allocate_slots(request, 3, tokens, hits)
    assert manager.take_new_block_ids() == (4, 5)
    assert manager.get_block_ids(1) == ((1, 4, 5), (0, 6, 7))


def test_nothing_is_to_be_cleared_where_that_is_not_done() -> None:
    manager = make()
    holding(manager, 0)
    assert manager.take_new_block_ids() == ()


def test_a_clone_clears_on_its_own() -> None:
    manager = clearing(FULL)
    holding(manager, 0)
    assert manager.clone().take_new_block_ids() == (1, 2)
    assert manager.take_new_block_ids() == (1, 2)
