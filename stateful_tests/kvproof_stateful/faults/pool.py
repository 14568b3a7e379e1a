"""Faults of the pool: who holds a block, and what is found in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_stateful.faults.fault import EXACT, SGLANG, VLLM, managers_with, seeded


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


@seeded("cache-keeps-its-reference", "I1", "https://github.com/EricLBuehler/mistral.rs/issues/1369")
class CacheKeepsItsReference(SingleTypeManager):
    """A release gives back only what no lookup can find; the rest is never free again."""

    def free(self, request_id: int) -> None:
        blocks = self.pop_blocks(request_id)
        self.pool.free_blocks([b for b in reversed(blocks) if self.pool.first_key(b) is None])


@seeded("shared-block-is-freed", "I1", f"{SGLANG}/issues/38355")
class SharedBlockIsFreed(BlockPool):
    """A release ends all references to a block, also those of other requests."""

    def give_back(self, blocks: Sequence[int]) -> None:
        super().give_back([block for block in blocks for _ in range(self.reference_counts[block])])


@seeded("key-kept-on-reuse", "I2", "https://github.com/ovg-project/kvcached/issues/362")
class KeyKeptOnReuse(BlockPool):
    """A block that is handed out again is still found under its old key."""

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        blocks = list(self.free_order()[:num_blocks])
        self.touch(blocks)
        return blocks


@seeded("evict-drops-wrong-copy", "I2", f"{VLLM}/issues/21400")
class EvictDropsWrongCopy(BlockPool):
    """Of several blocks with one key the oldest loses it, whichever of them is handed out."""

    def _remove_copy(self, group_index: int, digest: bytes, block: int) -> bool:
        copies = self._index[group_index][digest]
        oldest = next(iter(copies)) if isinstance(copies, dict) else copies
        return super()._remove_copy(group_index, digest, oldest)


@seeded("held-block-is-not-forgotten", "exact", level=EXACT)
class HeldBlockIsNotForgotten(KVCacheManager):
    """A block that somebody holds is found on, though it was to be forgotten."""

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        counts = self.block_pool.reference_counts
        super().evict_blocks([block for block in block_ids if counts[block] == 0])


@seeded("published-one-token-early", "I2")
class PublishedOneTokenEarly(KVCacheManager):
    """A block is found once its last token is known; the step that computes it comes after."""

    def certain_tokens(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens + 1, request.num_tokens)


@seeded("second-copy-not-inserted", "exact", f"{VLLM}/issues/53498", level=EXACT)
class SecondCopyNotInserted(BlockPool):
    """A second block of a prefix is marked as cached, and nothing leads to it."""

    def _add_copy(self, group_index: int, digest: bytes, block: int) -> None:
        self._index[group_index].setdefault(digest, block)

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            index = self._index[self._group[block]]
            for digest in self._digests.pop(block, ()):
                if index.get(digest) == block:
                    del index[digest]


@seeded("forward-order-free", "exact", f"{VLLM}/issues/48489", level=EXACT)
class ForwardOrderFree(SingleTypeManager):
    """A release gives its blocks back first to last: short prefixes are forgotten first."""

    def free(self, request_id: int) -> None:
        self.pool.free_blocks(self.pop_blocks(request_id))


@seeded("deferred-release-loses-order", "exact", f"{VLLM}/issues/48489", level=EXACT)
class DeferredReleaseLosesOrder(KVCacheManager):
    """Blocks whose return was deferred come back first to last."""

    def return_deferred(self, releases: Iterable[Sequence[int]]) -> None:
        for blocks in releases:
            self.block_pool.free_blocks(blocks)


@seeded("unfindable-blocks-wait-in-line", "exact", level=EXACT)
class UnfindableBlocksWaitInLine(BlockPool):
    """Blocks that no lookup can find are not reused first: what can be found goes for them."""

    def give_back(self, blocks: Sequence[int]) -> None:
        before = self.free_order()
        super().give_back(blocks)
        freed = [block for block in blocks if block in set(self.free_order()) - set(before)]
        for block in freed:
            self._free.remove(block)
        self._free.append(freed)
        self._free_order = None
