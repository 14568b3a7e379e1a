"""One group's block tables, and what its kind of attention needs, keeps and can reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import ClassVar, Self

from kvproof_reference.block_pool import NULL_BLOCK, BlockPool, Copy
from kvproof_reference.events import BlockStored
from kvproof_reference.layout import Layout
from kvproof_reference.request import Request
from kvproof_spec.config import ceil_div

Find = Callable[[int, bytes], int | None]  # by group index and digest, as in the pool
Extent = tuple[int, int, int]  # tokens that get a place, by what a group follows:
WITH_LOOKAHEAD, WITHOUT_LOOKAHEAD, OF_THE_ENCODER = range(3)


class SingleTypeManager(ABC):
    """Block tables of one group; a position left of the window is null.

    `block_hashes` arguments are the request's digests, `hashes_per_block` of them to
    one block of this group.  Hits end every `boundary` tokens, which are several
    blocks or a part of one.
    """

    downward_closed: ClassVar[bool]  # whatever is shorter than a hit is a hit
    follows: ClassVar[int] = WITH_LOOKAHEAD

    __slots__ = (
        "block_size",
        "blocks_per_boundary",
        "boundary",
        "drops",
        "group",
        "group_index",
        "hash_block_size",
        "hashes_per_block",
        "hit_tails",
        "layout",
        "new_block_ids",
        "num_published",
        "pool",
        "tables",
    )

    def __init__(
        self, layout: Layout, group_index: int, pool: BlockPool, clears: bool = False
    ) -> None:
        self.layout = layout
        self.group_index = group_index
        self.group = layout.groups[group_index]
        self.drops = layout.drops(group_index)
        self.block_size = self.group.block_size
        self.hash_block_size = layout.hash_block_size
        self.hashes_per_block = self.block_size // self.hash_block_size
        self.boundary = layout.boundary
        self.blocks_per_boundary = max(1, self.boundary // self.block_size)
        self.pool = pool
        self.tables: dict[int, list[int]] = {}  # by request id
        # Leading table entries that publication is done with, hits included.  A
        # request that stands here is running: it gets no more hits.
        self.num_published: dict[int, int] = {}
        # By request id, the table index and block of a hit that ends inside it.
        self.hit_tails: dict[int, tuple[int, int]] = {}
        # Blocks to be cleared, handed out and not yet taken.
        self.new_block_ids: list[int] | None = [] if clears and self.is_cleared() else None

    def table(self, request_id: int) -> Sequence[int]:
        return self.tables.get(request_id, ())

    # Capacity

    def blocks_needed(
        self,
        request_id: int,
        num_blocks: int,
        hits: Sequence[int],
        num_computed_tokens: int,
        num_local_tokens: int,
    ) -> int:
        """Free blocks it takes to make the table `num_blocks` long: new ones and reclaimed hits.

        Of the computed tokens the first `num_local_tokens` are not external.
        """
        owned = len(self.table(request_id))
        if request_id in self.num_published:
            return max(num_blocks - owned, 0)
        skipped = self.group.first_needed_block(num_computed_tokens)
        new = max(num_blocks - max(skipped, owned + len(hits)), 0)
        reclaimed = self.reclaimed_hits(hits[max(skipped - owned, 0) :])
        return new + reclaimed + self.ends_inside(hits, num_local_tokens)

    def blocks_needed_for_whole(
        self,
        request_id: int,
        num_blocks: int,
        hits: Sequence[int],
        num_computed_tokens: int,
        num_local_tokens: int,
    ) -> int:
        """The same for a sequence that is computed piece by piece."""
        wanted = self.most_blocks_held(num_blocks)
        return self.blocks_needed(request_id, wanted, hits, num_computed_tokens, num_local_tokens)

    def reclaimed_hits(self, hits: Sequence[int]) -> int:
        """Hits that count as free now, and no longer will once they are held."""
        counts = self.pool.reference_counts
        return [counts[block] for block in hits].count(0) - hits.count(NULL_BLOCK)

    def ends_inside(self, hits: Sequence[int], num_local_tokens: int) -> bool:
        """Whether the last hit block is shared in part, so that it must be copied."""
        return len(hits) > 0 and num_local_tokens % self.block_size != 0

    def most_blocks_held(self, num_blocks: int) -> int:
        """Blocks that a table of `num_blocks` entries holds at most at any time."""
        return num_blocks

    # Allocation

    def adopt_hits(self, request_id: int, hits: Sequence[int], num_computed_tokens: int) -> None:
        """Hold the hits of a new request that a step after `num_computed_tokens` still reads."""
        skipped = self.group.first_needed_block(num_computed_tokens)
        kept = hits[skipped:]
        self.pool.touch(kept)
        self.tables[request_id] = [NULL_BLOCK] * skipped + list(kept)
        self.num_published[request_id] = skipped + len(kept)

    def note_hit_tail(
        self, request_id: int, hits: Sequence[int], num_computed_tokens: int, num_local_tokens: int
    ) -> None:
        """Have a held hit copied if the request is to write into it."""
        kept = hits[self.group.first_needed_block(num_computed_tokens) :]
        if self.ends_inside(kept, num_local_tokens):
            index = num_local_tokens // self.block_size
            self.hit_tails[request_id] = (index, kept[-1])
            self.num_published[request_id] = index

    def allocate_external(self, request_id: int, num_tokens: int, unordered: bool) -> None:
        """Extend the table for tokens that come from elsewhere.

        Blocks of an unordered load are not to be cleared: the load may come first.
        """
        new = self.extend(request_id, num_tokens)
        if not unordered:
            self.note_new_blocks(new)

    def allocate_new(self, request_id: int, num_tokens: int) -> Sequence[int]:
        """Extend the table to `num_tokens` tokens; the new blocks, the copy of a hit first."""
        copied = self.copy_hit_tail(request_id) if self.hit_tails else ()
        new = self.extend(request_id, num_tokens)
        if self.new_block_ids is not None:
            self.note_new_blocks(new)
        return (*copied, *new) if copied else new

    def extend(self, request_id: int, num_tokens: int) -> Sequence[int]:
        table = self.tables.setdefault(request_id, [])
        missing = ceil_div(num_tokens, self.block_size) - len(table)
        if missing <= 0:
            return ()
        new = self.pool.get_new_blocks(missing)
        table += new
        return new

    def copy_hit_tail(self, request_id: int) -> Sequence[int]:
        """Take a block of the request's own for a hit that ends inside one.

        Until the copy is taken it holds both blocks: the shared one by the hit's reference.
        """
        if request_id not in self.hit_tails:
            return ()
        index, source = self.hit_tails.pop(request_id)
        (own,) = self.pool.get_new_blocks(1)
        self.tables[request_id][index] = own
        self.pool.touch((own,))
        self.pool.copies.append(Copy(self.group_index, source, own))
        self.note_new_blocks((own,))
        return (own,)

    def is_cleared(self) -> bool:
        """Whether blocks must be zeroed when they are handed out, where that is done at all."""
        return True

    def note_new_blocks(self, blocks: Sequence[int]) -> None:
        if self.new_block_ids is not None:
            self.new_block_ids += blocks

    # Publication

    def cache_blocks(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """Publish the full blocks under the first `num_tokens` tokens, each one once."""
        start = self.num_published.get(request.request_id, 0)
        stop = num_tokens // self.block_size
        if start >= stop:
            return
        self.publish_between(request.request_id, block_hashes, start, stop)
        self.num_published[request.request_id] = stop
        if self.pool.events is not None:
            self.announce_stored(request, block_hashes, start, stop)

    def publish_between(
        self, request_id: int, block_hashes: Sequence[bytes], start: int, stop: int
    ) -> None:
        """Publish those of the table entries `start` to `stop` - 1 that can serve a hit."""
        table = self.tables[request_id]
        for index in range(start, stop):
            if table[index] != NULL_BLOCK and self.can_serve_hit(index):
                self.publish(table[index], block_hashes, (index + 1) * self.hashes_per_block)

    def idle_until(self, request_id: int) -> int:
        """Up to so many tokens an allocation for a running request has nothing to do."""
        return 0

    def publish(self, block: int, block_hashes: Sequence[bytes], num_hashes: int) -> bool:
        """Make `block` findable as the end of the prefix of `num_hashes` hash blocks."""
        digest = block_hashes[num_hashes - 1]
        return self.pool.cache_block(self.group_index, digest, block, num_hashes)

    def publish_inside(
        self, request: Request, block_hashes: Sequence[bytes], block: int, num_hashes: int
    ) -> None:
        """The same for a prefix that ends inside the block."""
        is_new = self.publish(block, block_hashes, num_hashes)
        if is_new and self.pool.events is not None:
            start, end = num_hashes - 1, num_hashes
            self.announce(request, block_hashes, start, end, block_hashes[start:end])

    def can_serve_hit(self, index: int) -> bool:
        """Whether a hit that ends on a boundary can need the block at `index`."""
        return True

    def announce_stored(
        self, request: Request, block_hashes: Sequence[bytes], start: int, stop: int
    ) -> None:
        """Announce the published among the blocks `start` to `stop` - 1."""
        table, step = self.table(request.request_id), self.hashes_per_block
        stored = [
            block_hashes[(index + 1) * step - 1]
            for index in range(start, stop)
            if table[index] != NULL_BLOCK and self.can_serve_hit(index)
        ]
        self.announce(request, block_hashes, start * step, stop * step, stored)

    def announce(
        self,
        request: Request,
        block_hashes: Sequence[bytes],
        start: int,
        stop: int,
        stored: Sequence[bytes],
    ) -> None:
        """Announce `stored`, which end in the hash blocks `start` to `stop` - 1."""
        assert self.pool.events is not None
        size = self.hash_block_size
        self.pool.events.append(
            BlockStored(
                block_hashes=tuple(stored),
                parent_block_hash=block_hashes[start - 1] if start else None,
                token_ids=tuple(request.tokens[start * size : stop * size]),
                block_size=min((stop - start) * size, self.block_size),
                lora_name=request.inputs.lora,
                group_idx=self.group_index,
            )
        )

    # Lookup

    @abstractmethod
    def find_longest_hit(
        self,
        block_hashes: Sequence[bytes],
        max_tokens: int,
        drop: bool = False,
        find: Find | None = None,
    ) -> tuple[list[int], int]:
        """Table and length of the longest hit of at most `max_tokens` tokens.

        With `drop` the last block, or the last piece that a hit can end with, is found and
        not given.  `find` looks further than into this group.
        """

    def dropped_tokens(self) -> int:
        """Tokens that are found beyond a hit where the end is dropped."""
        return min(self.boundary, self.block_size)

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

    def new_step_starts(self) -> None:
        return

    def pop_blocks(self, request_id: int) -> list[int]:
        """Forget the request; its blocks in table order, still counted as held."""
        self.num_published.pop(request_id, None)
        table = self.tables.pop(request_id, [])
        if self.new_block_ids:
            self.forget_new_blocks(table)
        return table

    def forget_new_blocks(self, blocks: Sequence[int]) -> None:
        """Do not clear what is given back before its step: by then a load may have filled it."""
        counts = self.pool.reference_counts
        gone = {block for block in blocks if counts[block] == 1}
        self.new_block_ids = [block for block in self.new_block_ids or () if block not in gone]

    def free(self, request_id: int) -> None:
        """Free the request's blocks, the last first: long prefixes are forgotten before short."""
        self.pool.free_blocks(reversed(self.pop_blocks(request_id)))

    def clone(self, pool: BlockPool) -> Self:
        twin = copy(self)
        twin.pool = pool
        twin.tables = {request_id: table.copy() for request_id, table in self.tables.items()}
        twin.num_published = self.num_published.copy()
        twin.hit_tails = self.hit_tails.copy()
        twin.new_block_ids = None if self.new_block_ids is None else self.new_block_ids.copy()
        return twin


class FullAttentionManager(SingleTypeManager):
    """Every step reads all positions before it, so every block is kept."""

    downward_closed = True

    __slots__ = ()

    def find_longest_hit(
        self,
        block_hashes: Sequence[bytes],
        max_tokens: int,
        drop: bool = False,
        find: Find | None = None,
    ) -> tuple[list[int], int]:
        find, group_index = find or self.pool.cached_block, self.group_index
        hits: list[int] = []
        step = self.hashes_per_block
        for digest in block_hashes[step - 1 : max_tokens // self.block_size * step : step]:
            block = find(group_index, digest)
            if block is None:
                break
            hits.append(block)
        tokens = len(hits) * self.block_size
        if self.boundary < self.block_size:
            tokens = self.find_inside(block_hashes, max_tokens, find, hits)
        if drop and tokens:
            tokens -= self.dropped_tokens()
        tokens -= tokens % self.boundary
        return hits[: ceil_div(tokens, self.block_size)], tokens

    def find_inside(
        self, block_hashes: Sequence[bytes], max_tokens: int, find: Find, hits: list[int]
    ) -> int:
        """Add the block in which the hit ends, if it goes on after `hits`; its length in tokens."""
        full = len(hits) * self.hashes_per_block
        most = min(full + self.hashes_per_block - 1, max_tokens // self.hash_block_size)
        for num_hashes in range(min(most, len(block_hashes)), full, -1):
            block = find(self.group_index, block_hashes[num_hashes - 1])
            if block is not None:
                hits.append(block)
                return num_hashes * self.hash_block_size
        return full * self.hash_block_size

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

        Where hits end with blocks, no lookup asks for it, but vLLM 0.32 registers it, and
        after an eviction it can be the only key its block has.
        """
        num_hashes = (request.num_prompt_tokens - (not self.drops)) // self.hash_block_size
        index, inside = divmod(num_hashes, self.hashes_per_block)
        table = self.table(request.request_id)
        if inside and num_hashes * self.hash_block_size <= num_tokens and index < len(table):
            self.publish_inside(request, block_hashes, table[index], num_hashes)

    def publish_between(
        self, request_id: int, block_hashes: Sequence[bytes], start: int, stop: int
    ) -> None:
        """All of them: none is null, and each can serve a hit."""
        step = self.hashes_per_block
        lengths = range((start + 1) * step, stop * step + 1, step)
        digests = block_hashes[lengths.start - 1 : stop * step : step]
        self.pool.cache_blocks(
            self.group_index, digests, self.tables[request_id][start:stop], lengths
        )

    def idle_until(self, request_id: int) -> int:
        """The last block has room, and none gets full."""
        room = len(self.tables[request_id]) * self.block_size
        if not self.pool.enable_caching:
            return room
        if self.hashes_per_block > 1:
            return 0
        return min(room, (self.num_published.get(request_id, 0) + 1) * self.block_size - 1)

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        return


class SlidingWindowManager(SingleTypeManager):
    """A step reads the last `window` positions, so the left of the table becomes null."""

    downward_closed = False

    __slots__ = ()

    def blocks_for_hit(self, drop: bool) -> int:
        """Blocks left of a boundary that the step after it reads, and the one that is dropped."""
        return self.group.blocks_for(self.group.window - 1) + drop

    def most_blocks_held(self, num_blocks: int) -> int:
        tokens = self.group.window - 1 + self.layout.max_in_flight_tokens
        # One more, because a window may begin inside a block.
        most = self.group.blocks_for(min(tokens, self.layout.max_model_len)) + 1
        return min(num_blocks, most)

    def can_serve_hit(self, index: int) -> bool:
        wanted, period = self.blocks_for_hit(self.drops), self.blocks_per_boundary
        if wanted >= period:
            return True
        index -= self.drops  # the block after the boundary is found and dropped
        return index >= 0 and index % period >= period - wanted

    def find_longest_hit(
        self,
        block_hashes: Sequence[bytes],
        max_tokens: int,
        drop: bool = False,
        find: Find | None = None,
    ) -> tuple[list[int], int]:
        """From the right, the first run of blocks that fills a window left of a boundary.

        A run that reaches the start of the sequence may be shorter.
        """
        find = find or self.pool.cached_block
        wanted, period = self.blocks_for_hit(drop), self.blocks_per_boundary
        hits = [NULL_BLOCK] * (max_tokens // self.block_size)
        run = 0
        for index in range(len(hits) - 1, -1, -1):
            digest = block_hashes[(index + 1) * self.hashes_per_block - 1]
            block = find(self.group_index, digest)
            if block is None:
                run = 0
            elif run or (index + 1 - drop) % period == 0:
                hits[index] = block
                run += 1
                if run >= wanted:
                    return self.without_last(hits, index + run, drop)
        return self.without_last(hits, run - run % period, drop)

    def without_last(self, hits: list[int], num_blocks: int, drop: bool) -> tuple[list[int], int]:
        if drop and num_blocks:
            num_blocks -= 1
            num_blocks -= num_blocks % self.blocks_per_boundary
        return hits[:num_blocks], num_blocks * self.block_size


class ChunkedLocalAttentionManager(SingleTypeManager):
    """A step reads its own chunk, so everything left of the chunk becomes null."""

    downward_closed = False

    __slots__ = ()

    def most_blocks_held(self, num_blocks: int) -> int:
        tokens = self.group.window + self.layout.max_in_flight_tokens
        return min(num_blocks, self.group.blocks_for(min(tokens, self.layout.max_model_len)))

    def find_longest_hit(
        self,
        block_hashes: Sequence[bytes],
        max_tokens: int,
        drop: bool = False,
        find: Find | None = None,
    ) -> tuple[list[int], int]:
        """The last boundary whose chunk is there as far as it is before the boundary."""
        find = find or self.pool.cached_block
        tokens = max_tokens
        while True:
            tokens -= tokens % self.boundary
            first, wanted = self.group.first_needed_block(tokens), tokens // self.block_size
            hits = [NULL_BLOCK] * first
            for index in range(first, wanted):
                digest = block_hashes[(index + 1) * self.hashes_per_block - 1]
                block = find(self.group_index, digest)
                if block is None:
                    break
                hits.append(block)
            if len(hits) == wanted:
                return hits, tokens
            tokens = len(hits) * self.block_size


class CrossAttentionManager(SingleTypeManager):
    """The blocks of the encoder's tokens, which no other request ever reads."""

    downward_closed = False
    follows = OF_THE_ENCODER

    __slots__ = ()

    def allocate_external(self, request_id: int, num_tokens: int, unordered: bool) -> None:
        return

    def cache_blocks(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        return

    def find_longest_hit(
        self,
        block_hashes: Sequence[bytes],
        max_tokens: int,
        drop: bool = False,
        find: Find | None = None,
    ) -> tuple[list[int], int]:
        return [], 0
