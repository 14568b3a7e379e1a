"""Hits that end inside blocks: who gets the copy, and how long its blocks are held."""

from __future__ import annotations

from kvproof_reference import Copy, KVCacheManager, Request
from kvproof_spec.config import Group

FULL, STATE = Group("full", 4), Group("state", 4)


def make(num_blocks: int = 20, *groups: Group) -> KVCacheManager:
    return KVCacheManager(groups or (FULL, STATE), num_blocks, max_model_len=64, partial_boundary=2)


def producer(manager: KVCacheManager) -> Request:
    """A request of seven tokens that stands at six, its prompt's last boundary."""
    request = Request(0, range(7))
    assert manager.allocate_slots(request, 6) == ((1, 2), (0, 3))
    request.num_computed_tokens = 6
    manager.new_step_starts()
    return request


def test_the_block_in_which_a_prompt_ends_is_published_at_its_last_boundary() -> None:
    manager = make()
    producer(manager)
    assert manager.get_computed_blocks(Request(1, range(9))) == (((1, 2), (0, 3)), 6)
    assert manager.get_computed_blocks(Request(1, range(6))) == (((), ()), 0)
    assert manager.pending_copies == ()


def test_who_published_inside_its_block_goes_on_in_it_and_the_index_gets_the_copy() -> None:
    manager = make()
    request = producer(manager)
    assert manager.allocate_slots(request, 1) == ((), ())
    assert manager.get_block_ids(0) == ((1, 2), (0, 3))
    assert manager.pending_copies == (Copy(group=1, source=3, destination=4),)
    assert manager.get_computed_blocks(Request(1, range(9))) == (((1, 2), (0, 4)), 6)
    assert manager.block_pool.reference_counts[:6] == [0, 1, 1, 2, 1, 0]


def test_a_copy_that_the_next_step_makes_cannot_be_hit_in_this_one() -> None:
    manager = make()
    manager.allocate_slots(producer(manager), 1)
    other = Request(1, range(9))
    hits, tokens = manager.get_computed_blocks(other)
    assert manager.allocate_slots(other, 3, tokens, hits) is None
    manager.new_step_starts()
    assert manager.allocate_slots(other, 3, tokens, hits)


def test_both_blocks_of_a_copy_are_held_until_it_is_taken() -> None:
    manager = make(8)
    request = producer(manager)
    manager.allocate_slots(request, 1)
    manager.free(request)
    assert manager.block_pool.free_order() == (5, 6, 7, 2, 1)
    assert manager.take_block_copies() == (Copy(1, 3, 4),)
    assert manager.take_block_copies() == ()
    assert manager.block_pool.free_order() == (3, 5, 6, 7, 2, 1, 4)


def test_who_hits_inside_a_block_gets_a_copy_in_every_group() -> None:
    manager = make()
    manager.allocate_slots(producer(manager), 1)
    manager.take_block_copies()
    manager.new_step_starts()
    other = Request(1, [*range(6), 70, 71])
    hits, tokens = manager.get_computed_blocks(other)
    assert (hits, tokens) == (((1, 2), (0, 4)), 6)
    assert manager.allocate_slots(other, 2, tokens, hits) == ((5,), (6,))
    assert manager.get_block_ids(1) == ((1, 5), (0, 6))
    assert manager.pending_copies == (Copy(0, 2, 5), Copy(1, 4, 6))
    assert manager.block_pool.reference_counts[:7] == [0, 2, 2, 1, 1, 2, 2]
    assert manager.take_block_copies() == (Copy(0, 2, 5), Copy(1, 4, 6))
    assert manager.block_pool.reference_counts[:7] == [0, 2, 1, 1, 0, 1, 1]
    end = other.block_hashes(2)[3]
    assert [manager.block_pool.keys[block][0] for block in (5, 6)] == [(0, end), (1, end)]


def test_copies_are_listed_as_they_were_made_and_taken_group_after_group() -> None:
    manager = make()
    manager.allocate_slots(producer(manager), 1)
    manager.take_block_copies()
    manager.new_step_starts()
    for request in (Request(1, [*range(6), 70]), Request(2, [*range(6), 80])):
        hits, tokens = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 1, tokens, hits)
    assert manager.pending_copies == (Copy(0, 2, 5), Copy(1, 4, 6), Copy(0, 2, 7), Copy(1, 4, 8))
    # Two copies have the same source, which is then given back twice at once.
    assert manager.take_block_copies() == (
        Copy(0, 2, 5),
        Copy(0, 2, 7),
        Copy(1, 4, 6),
        Copy(1, 4, 8),
    )
    assert manager.block_pool.reference_counts[:9] == [0, 3, 1, 1, 0, 1, 1, 1, 1]


def test_a_hit_inside_a_block_takes_a_block_more() -> None:
    manager = make(8)
    manager.allocate_slots(producer(manager), 1)
    manager.take_block_copies()
    manager.new_step_starts()
    other = Request(1, [*range(6), 70])
    hits, tokens = manager.get_computed_blocks(other)
    # The state's copy is free and is to be held; two more blocks are to be written.
    assert manager.block_pool.get_num_free_blocks() == 4
    assert manager.allocate_slots(other, 1, tokens, hits, reserved_blocks=2) is None
    assert manager.pending_copies == ()
    assert manager.allocate_slots(other, 1, tokens, hits, reserved_blocks=1) == ((5,), (6,))


def test_a_producer_at_its_boundary_needs_a_block_for_the_copy() -> None:
    manager = make(4)
    assert manager.allocate_slots(producer(manager), 1) is None
    assert manager.pending_copies == ()


def test_a_window_of_bigger_blocks_than_the_boundary_forbids_hits_inside_blocks() -> None:
    manager = make(20, FULL, STATE, Group("sliding", 4, 5))
    assert manager.allocate_slots(Request(0, range(7)), 6)
    assert manager.get_computed_blocks(Request(1, range(9)))[1] == 0


def test_a_clone_has_copies_of_its_own() -> None:
    manager = make()
    request = producer(manager)
    at_boundary = manager.clone()
    manager.allocate_slots(request, 1)
    twin = manager.clone()
    assert twin.take_block_copies() == manager.pending_copies == (Copy(1, 3, 4),)
    assert manager.block_pool.reference_counts[3:5] == [2, 1]
    assert at_boundary.block_pool.copies == []
    assert at_boundary.allocate_slots(request, 1) == ((), ())
    assert at_boundary.pending_copies == (Copy(1, 3, 4),)
