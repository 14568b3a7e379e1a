"""Faults of admission and allocation: what fits, and what is taken in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_stateful.faults.fault import NANO_VLLM, VLLM, seeded


@seeded("touch-after-allocation", "R3", f"{VLLM}/pull/10507")
class TouchAfterAllocation(KVCacheManager):
    """Hits are held only after the new blocks were taken, for which they were free."""

    class Pool(BlockPool):
        late: tuple[int, ...] = ()

        def touch(self, blocks: Iterable[int]) -> None:
            self.late += tuple(blocks)

    block_pool_class = Pool

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        new, pool = super().allocate_slots(*arguments, **options), self.block_pool
        assert isinstance(pool, self.Pool)
        BlockPool.touch(pool, pool.late)
        pool.late = ()
        return new


@seeded("hits-held-group-by-group", "R3", f"{VLLM}/issues/33775")
class HitsHeldGroupByGroup(SingleTypeManager):
    """A group takes its external tokens' blocks before the next one holds its hits."""

    def adopt_hits(self, request_id: int, hits: Sequence[int], num_computed_tokens: int) -> None:
        super().adopt_hits(request_id, hits, num_computed_tokens)
        self.allocate_new(request_id, num_computed_tokens)


@seeded("reclaimable-hits-not-counted", "R2", f"{VLLM}/pull/11565")
class ReclaimableHitsNotCounted(SingleTypeManager):
    """Hits that are free count as room for new blocks, though they are about to be held."""

    def reclaimed_hits(self, hits: Sequence[int]) -> int:
        return 0


@seeded("hit-of-all-tokens", "R4", f"{NANO_VLLM}/issues/114")
class HitOfAllTokens(KVCacheManager):
    """A hit may cover every known token, which leaves nothing to compute."""

    def longest_useful_hit(self, request: Request) -> int:
        return request.num_tokens
