"""The pool of the plain manager, alone, for the scenarios."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof_reference.block_pool import BlockPool
from kvproof_spec.answers import Snapshot


class PlainPool:
    """A `BlockPool`, by block ids."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def take(self, count: int) -> list[int]:
        return list(self.pool.get_new_blocks(count))

    def touch(self, blocks: Sequence[int]) -> None:
        self.pool.touch(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self.pool.free_blocks(blocks)

    def publish(self, name: str, block: int) -> None:
        self.pool.cache_block(0, name.encode(), block, 1)

    def find(self, name: str) -> int | None:
        return self.pool.cached_block(0, name.encode())

    def evict(self, block: int) -> None:
        self.pool.evict((block,))

    def reset(self) -> bool:
        return self.pool.reset()

    def shown(self) -> Snapshot:
        pool = self.pool
        return Snapshot(
            free_order=pool.free_order(),
            free_blocks=pool.get_num_free_blocks(),
            reference_counts=pool.counts(),
        )
