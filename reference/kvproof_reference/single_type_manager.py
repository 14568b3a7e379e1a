"""One group's block tables, and what its kind of attention needs, keeps and can reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Self

from kvproof_reference.block_pool import NULL_BLOCK, BlockPool
from kvproof_reference.layout import Layout
from kvproof_reference.request import Request


class SingleTypeManager(ABC):
    """Block tables of one group; a position left of the window is null.

    `block_hashes` arguments are the request's digests, `hashes_per_block` of them to
    one block of this group.  A hit ends where groups can meet, every
    `blocks_per_boundary` blocks of this group.
    """

    downward_closed: ClassVar[bool]  # whatever is shorter than a hit is a hit

    __slots__ = (
        "block_size",
        "blocks_per_boundary",
        "group",
        "group_index",
        "hashes_per_block",
        "layout",
        "num_published",
        "pool",
        "tables",
    )

    def __init__(self, layout: Layout, group_index: int, pool: BlockPool) -> None:
        self.layout = layout
        self.group_index = group_index
        self.group = layout.groups[group_index]
        self.block_size = self.group.block_size
        self.hashes_per_block = self.block_size // layout.hash_block_size
        self.blocks_per_boundary = layout.common_block_size // self.block_size
        self.pool = pool
        self.tables: dict[int, list[int]] = {}  # by request id
        # Leading table entries that publication is done with, hits included.  A
        # request that stands here is running: it gets no more hits.
        self.num_published: dict[int, int] = {}

    def table(self, request_id: int) -> Sequence[int]:
        return self.tables.get(request_id, ())

    # Capacity

    def blocks_needed(
        self, request_id: int, num_blocks: int, hits: Sequence[int], num_computed_tokens: int
    ) -> int:
        """Free blocks it takes to make the table `num_blocks` long: new ones and reclaimed hits."""
        owned = len(self.table(request_id))
        if request_id in self.num_published:
            return max(num_blocks - owned, 0)
        skipped = self.group.first_needed_block(num_computed_tokens)
        new = max(num_blocks - max(skipped, owned + len(hits)), 0)
        return new + self.reclaimed_hits(hits[max(skipped - owned, 0) :])

    def reclaimed_hits(self, hits: Sequence[int]) -> int:
        """Hits that count as free now, and no longer will once they are held."""
        counts = self.pool.reference_counts
        return sum(1 for block in hits if counts[block] == 0 and block != NULL_BLOCK)

    @abstractmethod
    def most_blocks_held(self) -> int:
        """Blocks a request holds at most at any time, however long it is."""

    # Allocation

    def adopt_hits(self, request_id: int, hits: Sequence[int], num_computed_tokens: int) -> None:
        """Hold the hits of a new request that a step after `num_computed_tokens` still reads."""
        skipped = self.group.first_needed_block(num_computed_tokens)
        kept = hits[skipped:]
        self.pool.touch(kept)
        self.tables[request_id] = [NULL_BLOCK] * skipped + list(kept)
        self.num_published[request_id] = skipped + len(kept)

    def allocate_new(self, request_id: int, num_tokens: int) -> Sequence[int]:
        """Extend the table to `num_tokens` tokens; the new blocks."""
        table = self.tables.setdefault(request_id, [])
        missing = self.group.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return ()
        new = self.pool.get_new_blocks(missing)
        table += new
        return new

    # Publication and lookup

    def cache_blocks(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """Publish the full blocks under the first `num_tokens` tokens, each one once."""
        start = self.num_published.get(request.request_id, 0)
        stop = num_tokens // self.block_size
        if start >= stop:
            return
        table = self.tables[request.request_id]
        for index in range(start, stop):
            if table[index] != NULL_BLOCK and self.can_serve_hit(index):
                self.publish(table[index], block_hashes, (index + 1) * self.hashes_per_block)
        self.num_published[request.request_id] = stop

    def publish(self, block: int, block_hashes: Sequence[bytes], num_hashes: int) -> None:
        """Make `block` findable as the end of the prefix of `num_hashes` hash blocks."""
        self.pool.cache_block(self.group_index, block_hashes[num_hashes - 1], block, num_hashes)

    def can_serve_hit(self, index: int) -> bool:
        """Whether a hit that ends on a common boundary can need the block at `index`."""
        return True

    @abstractmethod
    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """Table of the longest hit of at most `max_tokens` tokens; it ends with its last block."""

    # Release

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        """Give back what no step reads once `processed_tokens` tokens are done.

        Right to left: left of the first null everything was given back before.
        """
        first_needed = self.group.first_needed_block(processed_tokens)
        if first_needed == 0 or request_id not in self.tables:
            return
        table = self.tables[request_id]
        skipped = []
        for index in range(min(first_needed, len(table)) - 1, -1, -1):
            if table[index] == NULL_BLOCK:
                break
            skipped.append(table[index])
            table[index] = NULL_BLOCK
        self.pool.free_blocks(skipped)

    def pop_blocks(self, request_id: int) -> list[int]:
        """Forget the request; its blocks in table order, still counted as held."""
        self.num_published.pop(request_id, None)
        return self.tables.pop(request_id, [])

    def free(self, request_id: int) -> None:
        """Free the request's blocks, the last first: long prefixes are forgotten before short."""
        self.pool.free_blocks(reversed(self.pop_blocks(request_id)))

    def clone(self, pool: BlockPool) -> Self:
        twin = copy(self)
        twin.pool = pool
        twin.tables = {request_id: table.copy() for request_id, table in self.tables.items()}
        twin.num_published = self.num_published.copy()
        return twin


class FullAttentionManager(SingleTypeManager):
    """Every step reads all positions before it, so every block is kept."""

    downward_closed = True

    __slots__ = ()

    def most_blocks_held(self) -> int:
        return self.group.blocks_for(self.layout.max_model_len)

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        hits: list[int] = []
        step = self.hashes_per_block
        for digest in block_hashes[step - 1 : max_tokens // self.block_size * step : step]:
            block = self.pool.cached_block(self.group_index, digest)
            if block is None:
                break
            hits.append(block)
        return hits[: len(hits) - len(hits) % self.blocks_per_boundary]

    def cache_blocks(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        super().cache_blocks(request, block_hashes, num_tokens)
        if self.hashes_per_block > 1:
            self.publish_prompt_end(request, block_hashes, num_tokens)

    def publish_prompt_end(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """A further key for the block in which the prompt ends: the prompt's last hash block.

        No lookup of full or sliding groups asks for it, but vLLM 0.32 registers it, and
        after an eviction it can be the only key its block has.
        """
        hash_block_size = self.layout.hash_block_size
        num_hashes = (request.num_prompt_tokens - 1) // hash_block_size
        index, inside = divmod(num_hashes, self.hashes_per_block)
        table = self.table(request.request_id)
        if inside and num_hashes * hash_block_size <= num_tokens and index < len(table):
            self.publish(table[index], block_hashes, num_hashes)

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        return


class SlidingWindowManager(SingleTypeManager):
    """A step reads the last `window` positions, so the left of the table becomes null."""

    downward_closed = False

    __slots__ = ()

    @property
    def blocks_for_hit(self) -> int:
        """Blocks left of a boundary that the step after it reads."""
        return self.group.blocks_for(self.group.window - 1)

    def most_blocks_held(self) -> int:
        tokens = self.group.window - 1 + self.layout.max_in_flight_tokens
        # One more, because a window may begin inside a block.
        return self.group.blocks_for(min(tokens, self.layout.max_model_len)) + 1

    def can_serve_hit(self, index: int) -> bool:
        left_of_boundary = self.blocks_per_boundary - index % self.blocks_per_boundary
        return left_of_boundary <= self.blocks_for_hit

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        """From the right, the first run of blocks that fills a window left of a common boundary.

        A run that reaches the start of the sequence may be shorter.
        """
        wanted = self.blocks_for_hit
        hits = [NULL_BLOCK] * (max_tokens // self.block_size)
        run = 0
        for index in range(len(hits) - 1, -1, -1):
            digest = block_hashes[(index + 1) * self.hashes_per_block - 1]
            block = self.pool.cached_block(self.group_index, digest)
            if block is None:
                run = 0
            elif run or (index + 1) % self.blocks_per_boundary == 0:
                hits[index] = block
                run += 1
                if run >= wanted:
                    return hits[: index + run]
        return hits[:run]
