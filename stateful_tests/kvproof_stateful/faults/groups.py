"""Faults of the groups: windows, chunks, states, and the boundary that all can resume from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproof_reference.block_pool import NULL_BLOCK
from kvproof_reference.coordinator import BlockIds, HybridCoordinator, Search
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    SingleTypeManager,
    SlidingWindowManager,
)
from kvproof_reference.state_manager import StateManager
from kvproof_stateful.faults.fault import VLLM, seeded


@seeded("minimum-instead-of-common-boundary", "I3", without=("I2",))
class MinimumInsteadOfCommonBoundary(HybridCoordinator):
    """The shortest of the groups' hits is taken for one that every group can resume from."""

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        search = Search(self, self.block_hashes(request))
        shortest = min(search.ask(family, max_tokens) for family in self.families)
        return search.hits_up_to(shortest), shortest


@seeded("deepest-group-wins", "I3", f"{VLLM}/pull/46453")
class DeepestGroupWins(HybridCoordinator):
    """The longest of the groups' hits counts as computed in all of them."""

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        search = Search(self, self.block_hashes(request))
        longest = max(search.ask(family, max_tokens) for family in self.families)
        return search.hits_up_to(longest), longest


@seeded("drop-in-one-group-only", "I3", f"{VLLM}/pull/46281")
class DropInOneGroupOnly(HybridCoordinator):
    """A drafter's group gives its last hit block up, and the others' boundary stays."""

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        search, boundary = Search(self, self.block_hashes(request)), max_tokens
        for family in self.families:
            first = self.managers[family[0]]
            found = search.ask(family, boundary)
            boundary = found + first.dropped_tokens() * (first.drops and found > 0)
        return search.hits_up_to(boundary), boundary


@seeded(
    "hits-not-cut-to-common-length",
    "R4",
    "https://github.com/ModelEngine-Group/unified-cache-management/pull/1059",
)
class HitsNotCutToCommonLength(HybridCoordinator):
    """The first group's table has all its own hits, beyond what the groups have in common."""

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        hits, tokens = super().find_longest_hit(request, max_tokens)
        own, _ = self.managers[0].find_longest_hit(self.block_hashes(request), max_tokens)
        return (tuple(own), *hits[1:]), tokens


@seeded("window-block-returned-in-flight", "R7", f"{VLLM}/issues/47728")
class WindowBlockReturnedInFlight(KVCacheManager):
    """The window slides with what is scheduled; a step in flight still reads left of it."""

    def processed_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return num_computed_tokens


@seeded("window-block-returned-too-early", "I3")
class WindowBlockReturnedTooEarly(SlidingWindowManager):
    """A window's first block is given back when one more token will no longer need it."""

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        super().remove_skipped_blocks(request_id, processed_tokens + 1)


@seeded("window-hit-too-short", "I3")
class WindowHitTooShort(SlidingWindowManager):
    """A hit has one block less than the window before it needs."""

    def blocks_for_hit(self, drop: bool) -> int:
        return max(super().blocks_for_hit(drop) - 1, 1)


@seeded("chunk-hit-without-its-blocks", "I3")
class ChunkHitWithoutItsBlocks(ChunkedLocalAttentionManager):
    """A hit that ends inside a chunk has none of the blocks that the chunk begins with."""

    def find_longest_hit(self, *arguments: Any, **options: Any) -> tuple[list[int], int]:
        hits, tokens = super().find_longest_hit(*arguments, **options)
        return [NULL_BLOCK] * len(hits), tokens


@seeded("state-under-earlier-key", "I2")
class StateUnderEarlierKey(StateManager):
    """A state is found by the prefix one block before the one that it stands for."""

    def publish(self, block: int, block_hashes: Sequence[bytes], num_hashes: int) -> bool:
        earlier = num_hashes - self.hashes_per_block
        return super().publish(block, block_hashes, earlier if earlier > 0 else num_hashes)


@seeded("encoder-blocks-not-counted", "R2")
class EncoderBlocksNotCounted(CrossAttentionManager):
    """What an encoder's tokens need is taken without a look at what is free."""

    def blocks_needed(self, *arguments: Any, **options: Any) -> int:
        return 0


@seeded("hit-tail-not-copied", "R6", without=("I2", "R2"))
class HitTailNotCopied(SingleTypeManager):
    """A request that resumes inside a block writes on in the block that others hold."""

    def note_hit_tail(self, *arguments: Any, **options: Any) -> None:
        """Have nothing copied."""


@seeded("copy-not-sent", "R6")
class CopyNotSent(KVCacheManager):
    """A request gets its own block for a shared tail, and nobody is told to copy into it."""

    def take_block_copies(self, in_use_until: int | None = None) -> tuple[()]:
        super().take_block_copies(in_use_until)
        return ()
