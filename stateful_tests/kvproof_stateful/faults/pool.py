"""Faults of the pool: who holds a block, and what is found in it."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_stateful.faults.fault import EXACT, VLLM, managers_with, seeded


@seeded("double-free-in-one-batch", "I1", f"{VLLM}/issues/42571")
class DoubleFreeInOneBatch(KVCacheManager):
    """A release gives its blocks back twice in one batch."""

    class Group(SingleTypeManager):
        def free(self, request_id: int) -> None:
            blocks = self.pop_blocks(request_id)
            self.pool.give_back([*reversed(blocks), *reversed(blocks)])

    class Pool(BlockPool):
        def refuse_what_is_free(self, counted_down: Sequence[int]) -> None:
            """Count on."""

    block_pool_class = Pool
    manager_classes = managers_with(Group)


@seeded("key-kept-on-reuse", "I2", "https://github.com/ovg-project/kvcached/issues/362")
class KeyKeptOnReuse(BlockPool):
    """A block that is handed out again is still found under its old key."""

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        blocks = list(self.free_order()[:num_blocks])
        self.touch(blocks)
        return blocks


@seeded("forward-order-free", "exact", f"{VLLM}/issues/48489", level=EXACT)
class ForwardOrderFree(SingleTypeManager):
    """A release gives its blocks back first to last: short prefixes are forgotten first."""

    def free(self, request_id: int) -> None:
        self.pool.free_blocks(self.pop_blocks(request_id))
