"""Groups of states (Mamba and its like), as in vLLM's mode "align"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from kvproof_reference.block_pool import NULL_BLOCK, BlockPool, Copy, Key
from kvproof_reference.layout import Layout
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import (
    WITHOUT_LOOKAHEAD,
    Find,
    SingleTypeManager,
)


class StateManager(SingleTypeManager):
    """A block holds the state after its last position; a step reads one block and writes one.

    What a step has passed over is null.  A request may go on writing into the block in
    which its prompt ends while that is published: the index is then given a copy.
    """

    downward_closed = False
    follows = WITHOUT_LOOKAHEAD

    __slots__ = ("num_retired", "own_tails", "step_keys")

    def __init__(
        self, layout: Layout, group_index: int, pool: BlockPool, clears: bool = False
    ) -> None:
        super().__init__(layout, group_index, pool, clears)
        self.num_retired: dict[int, int] = {}  # leading table entries given back, by request id
        # By request id, the table index and block of a published state that is written next.
        self.own_tails: dict[int, tuple[int, int]] = {}
        self.step_keys: set[Key] = set()  # published since the step began

    def is_cleared(self) -> bool:
        """A state is written as a whole."""
        return False

    # Capacity

    def blocks_needed(
        self,
        request_id: int,
        num_blocks: int,
        hits: Sequence[int],
        num_computed_tokens: int,
        num_local_tokens: int,
    ) -> int:
        """What vLLM 0.32 announces, or if more, what it takes (#46892)."""
        needed = self.blocks_needed_for_whole(
            request_id, num_blocks, hits, num_computed_tokens, num_local_tokens
        )
        if num_computed_tokens > num_local_tokens:
            taken = self.blocks_taken_after_load(num_blocks, hits, num_computed_tokens)
            return max(needed, taken)
        return needed

    def blocks_needed_for_whole(
        self,
        request_id: int,
        num_blocks: int,
        hits: Sequence[int],
        num_computed_tokens: int,
        num_local_tokens: int,
    ) -> int:
        """At most the block of the running state and one for a copy, however long the table."""
        if hits and self.is_put_off(hits[-1]):
            return len(self.pool.reference_counts)
        copied = self.ends_inside(hits, num_local_tokens) or request_id in self.own_tails
        missing = max(num_blocks - len(hits) - len(self.table(request_id)), 0) + copied
        return min(missing, 1 + copied) + self.reclaimed_hits(hits)

    def is_put_off(self, hit: int) -> bool:
        """A state of the step that is being built does not exist before the step is over."""
        return self.pool.first_key(hit) in self.step_keys

    def blocks_taken_after_load(
        self, num_blocks: int, hits: Sequence[int], num_computed_tokens: int
    ) -> int:
        """The state that is loaded and the running one, if that has another block."""
        kept = hits[self.group.first_needed_block(num_computed_tokens) :]
        loaded = self.group.blocks_for(num_computed_tokens)
        return 1 - len(kept) + self.reclaimed_hits(kept) + (num_blocks > loaded)

    # Allocation

    def allocate_new(self, request_id: int, num_tokens: int) -> Sequence[int]:
        """Null up to the last block, and that one; the entries that were added."""
        copied = self.copy_hit_tail(request_id)
        if request_id in self.own_tails:
            self.save_own_tail(request_id)
        table = self.tables.setdefault(request_id, [])
        missing = self.group.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return copied
        new = [NULL_BLOCK] * (missing - 1) + self.pool.get_new_blocks(1)
        table += new
        return (*copied, *new)

    def save_own_tail(self, request_id: int) -> None:
        """Give the index a copy of the state in which the prompt ends.

        The request keeps its block, since a worker's row only grows.  The copy holds both.
        """
        _, source = self.own_tails.pop(request_id)
        (saved,) = self.pool.get_new_blocks(1)
        self.pool.move_keys(source, saved)
        self.pool.touch((source,))
        self.pool.copies.append(Copy(self.group_index, source, saved))
        self.note_step_key(saved)

    # Publication and lookup

    def cache_blocks(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        request_id = request.request_id
        start = self.num_published.get(request_id, 0)
        super().cache_blocks(request, block_hashes, num_tokens)
        for block in self.table(request_id)[start : self.num_published.get(request_id, 0)]:
            self.note_step_key(block)
        if num_tokens == self.last_boundary(request.num_prompt_tokens):
            self.publish_prompt_end(request, block_hashes, num_tokens)

    def note_step_key(self, block: int) -> None:
        key = self.pool.first_key(block)
        if key is not None:
            self.step_keys.add(key)

    def last_boundary(self, num_prompt_tokens: int) -> int:
        """Where the same prompt can be resumed: a token is left, and with a drafter a piece."""
        unit = self.hash_block_size
        if self.layout.has_drafter:
            return max(num_prompt_tokens // unit - 1, 0) * unit
        return (num_prompt_tokens - 1) // unit * unit

    def publish_prompt_end(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int
    ) -> None:
        """Publish the state after the prompt's last boundary, be it inside a block.

        It counts as published in this step whenever that is asked for.
        """
        table, index = self.table(request.request_id), self.group.blocks_for(num_tokens) - 1
        if not num_tokens or index >= len(table) or table[index] == NULL_BLOCK:
            return
        num_hashes = num_tokens // self.hash_block_size
        self.publish_inside(request, block_hashes, table[index], num_hashes)
        self.step_keys.add((self.group_index, block_hashes[num_hashes - 1]))
        if num_tokens % self.block_size:
            self.own_tails[request.request_id] = (index, table[index])
            self.num_published[request.request_id] = index

    def new_step_starts(self) -> None:
        self.step_keys.clear()

    def find_longest_hit(
        self,
        block_hashes: Sequence[bytes],
        max_tokens: int,
        drop: bool = False,
        find: Find | None = None,
    ) -> tuple[list[int], int]:
        """The last boundary whose state is there; drafters have none, so nothing is dropped."""
        find = find or self.pool.cached_block
        for tokens in range(max_tokens - max_tokens % self.boundary, 0, -self.boundary):
            digest = block_hashes[tokens // self.hash_block_size - 1]
            block = find(self.group_index, digest)
            if block is not None:
                return [NULL_BLOCK] * (self.group.blocks_for(tokens) - 1) + [block], tokens
        return [], 0

    def dropped_tokens(self) -> int:
        return 0

    # Release

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        """Right to left, over nulls, down to what was given back before."""
        table = self.tables.get(request_id, [])
        start = self.num_retired.get(request_id, 0)
        stop = min(self.group.first_needed_block(processed_tokens), len(table))
        if start >= stop:
            return
        self.pool.free_blocks(reversed(table[start:stop]))
        table[start:stop] = [NULL_BLOCK] * (stop - start)
        self.num_retired[request_id] = stop

    def pop_blocks(self, request_id: int) -> list[int]:
        self.num_retired.pop(request_id, None)
        self.own_tails.pop(request_id, None)
        return super().pop_blocks(request_id)

    def clone(self, pool: BlockPool) -> Self:
        twin = super().clone(pool)
        twin.num_retired = self.num_retired.copy()
        twin.own_tails = self.own_tails.copy()
        twin.step_keys = self.step_keys.copy()
        return twin
