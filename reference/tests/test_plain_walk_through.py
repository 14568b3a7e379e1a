"""The article's walk-through: block size 4, ten blocks; ids one higher than there, 0 being null."""

from __future__ import annotations

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group

A_TO_O = list(range(15))
P, Q = 15, 16


def step(manager: KVCacheManager, request: Request) -> list[int] | None:
    """Allocate all tokens not yet computed; the new blocks of the only group."""
    tokens = request.num_tokens - request.num_computed_tokens
    granted = manager.allocate_slots(request, tokens)
    if granted is None:
        return None
    request.num_computed_tokens += tokens
    return list(granted[0])


def test_the_article_s_walk_through() -> None:
    manager = KVCacheManager([Group("full", 4)], 11, max_model_len=64)
    pool = manager.block_pool
    r0 = Request(0, A_TO_O)

    assert manager.get_computed_blocks(r0) == (((),), 0)
    assert step(manager, r0) == [1, 2, 3, 4]
    assert set(pool.keys) == {1, 2, 3}
    r0.append_tokens([P])
    assert step(manager, r0) == []
    assert set(pool.keys) == {1, 2, 3, 4}
    r0.append_tokens([Q])
    assert step(manager, r0) == [5]

    manager.free(r0)
    assert pool.free_order() == (5, 6, 7, 8, 9, 10, 4, 3, 2, 1)
    assert pool.reference_counts == [0] * 11

    r1 = Request(1, [*A_TO_O[:12], 112, 113])
    hits, tokens = manager.get_computed_blocks(r1)
    assert (hits, tokens) == (((1, 2, 3),), 12)
    assert manager.allocate_slots(r1, 2, tokens, hits) == ((5,),)
    assert manager.get_block_ids(1) == ((1, 2, 3, 5),)
    assert pool.free_order() == (6, 7, 8, 9, 10, 4)

    r2 = Request(2, range(200, 228))
    assert step(manager, r2) is None
    assert pool.free_order() == (6, 7, 8, 9, 10, 4)
    assert manager.get_block_ids(2) == ((),)
    a_to_p = r0.block_hashes(4)[3]
    assert pool.cached_block(0, a_to_p) == 4

    r3 = Request(3, range(300, 322))
    assert step(manager, r3) == [6, 7, 8, 9, 10, 4]
    assert pool.cached_block(0, a_to_p) is None
    assert [pool.cached_block(0, digest) for digest in r0.block_hashes(4)[:3]] == [1, 2, 3]
