"""The pool alone: free order, references, keys."""

from __future__ import annotations

import pytest

from kvproof_reference.block_pool import NULL_BLOCK, BlockPool


def keyed(pool: BlockPool, *blocks: int) -> None:
    for block in blocks:
        pool.cache_block(0, bytes([block]), block, 1)


def test_the_null_block_is_never_handed_out_counted_or_freed() -> None:
    pool = BlockPool(4)
    assert pool.get_new_blocks(3) == [1, 2, 3]
    pool.touch([NULL_BLOCK])
    pool.free_blocks([NULL_BLOCK, 2, NULL_BLOCK])
    assert pool.free_order() == (2,)
    assert pool.reference_counts == [0, 1, 0, 1]


def test_more_blocks_than_are_free_is_an_error_and_takes_none() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 are free"):
        pool.get_new_blocks(4)
    assert pool.free_order() == (1, 2, 3)


def test_a_batch_keeps_its_order_in_front_without_keys_and_at_the_end_with_keys() -> None:
    pool = BlockPool(8)
    pool.get_new_blocks(6)
    keyed(pool, 2, 5)
    pool.free_blocks([6, 5, 4, 3, 2, 1])
    assert pool.free_order() == (6, 4, 3, 1, 7, 5, 2)


def test_with_caching_off_everything_freed_comes_first() -> None:
    pool = BlockPool(5, enable_caching=False)
    pool.get_new_blocks(3)
    keyed(pool, 2)
    pool.free_blocks([3, 2, 1])
    assert pool.free_order() == (3, 2, 1, 4)


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    pool.touch([1])
    pool.free_blocks([1])
    assert pool.free_order() == (2,)
    pool.free_blocks([1])
    assert pool.free_order() == (1, 2)


@pytest.mark.parametrize("references", [1, 2])
def test_a_block_freed_twice_in_one_batch_is_an_error_that_changes_nothing(references: int) -> None:
    """It once came to stand in the free order twice, or was lost for ever (vLLM #42571)."""
    pool = BlockPool(5)
    pool.get_new_blocks(3)
    pool.touch([2] * (references - 1))
    with pytest.raises(ValueError, match="block 2 is freed twice in one batch"):
        pool.free_blocks([3, 2, NULL_BLOCK, NULL_BLOCK, 2, 1])
    assert pool.reference_counts == [0, 1, references, 1, 0]
    assert pool.free_order() == (4,)


def test_several_nulls_in_a_batch_are_no_double_free() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(2)
    pool.free_blocks([NULL_BLOCK, 2, NULL_BLOCK, 1, NULL_BLOCK])
    assert pool.free_order() == (2, 1)


def test_a_touched_block_leaves_the_middle_of_the_free_order() -> None:
    pool = BlockPool(6)
    pool.touch([3])
    assert pool.free_order() == (1, 2, 4, 5)
    assert pool.get_new_blocks(3) == [1, 2, 4]


def test_a_block_that_is_handed_out_has_lost_its_key() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    keyed(pool, 1)
    pool.free_blocks([1])
    assert pool.cached_block(0, b"\x01") == 1
    pool.get_new_blocks(2)
    assert pool.cached_block(0, b"\x01") is None
    assert (pool.index, pool.keys) == ({}, {})


def test_the_oldest_copy_of_a_key_answers_and_the_next_one_follows() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(3)
    for block in (3, 1, 2, 1):
        pool.cache_block(0, b"key", block, 1)
    assert list(pool.index[0, b"key"]) == [3, 1, 2]
    pool.evict([3])
    assert pool.cached_block(0, b"key") == 1


def test_groups_do_not_answer_for_each_other() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    pool.cache_block(1, b"key", 1, 1)
    assert pool.cached_block(0, b"key") is None
    assert pool.cached_block(1, b"key") == 1


def test_a_longer_prefix_takes_the_place_of_the_keys_of_a_shorter_one() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    pool.cache_block(0, b"two", 1, 2)
    pool.cache_block(0, b"one", 1, 1)
    assert list(pool.index) == list(pool.keys[1]) == [(0, b"two"), (0, b"one")]
    pool.cache_block(0, b"three", 1, 3)
    assert list(pool.index) == list(pool.keys[1]) == [(0, b"three")]


def test_moved_keys_answer_with_the_other_block_after_those_that_answered_before() -> None:
    pool = BlockPool(5)
    pool.get_new_blocks(3)
    for block in (1, 2):
        pool.cache_block(0, b"two", block, 2)
    pool.cache_block(0, b"one", 1, 1)
    pool.move_keys(1, 3)
    assert {key: list(copies) for key, copies in pool.index.items()} == {
        (0, b"two"): [2, 3],
        (0, b"one"): [3],
    }
    assert pool.keys == {2: ((0, b"two"),), 3: ((0, b"two"), (0, b"one"))}
    pool.move_keys(1, 4)
    assert 4 not in pool.keys
    pool.cache_block(0, b"three", 3, 3)
    assert pool.keys[3] == ((0, b"three"),)


def test_eviction_takes_keys_and_leaves_references_and_order() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(2)
    keyed(pool, 1, 2)
    pool.free_blocks([1])
    pool.evict([1, 2, 3])
    assert pool.index == {}
    assert pool.free_order() == (3, 1)
    assert pool.reference_counts == [0, 0, 1, 0]


def test_a_reset_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    keyed(pool, 1)
    assert not pool.reset()
    assert pool.cached_block(0, b"\x01") == 1
    pool.free_blocks([1])
    assert pool.reset()
    assert pool.cached_block(0, b"\x01") is None
    assert pool.free_order() == (2, 1)
