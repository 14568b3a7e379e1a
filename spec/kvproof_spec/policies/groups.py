"""What vLLM keeps of each group, and does in it: needs, growth, publication, return."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Self

from kvproof_spec.actions import Segments
from kvproof_spec.config import ceil_div
from kvproof_spec.pages import NULL_BLOCK, Copy
from kvproof_spec.policies.layout import Layout
from kvproof_spec.policies.pool import VllmPool
from kvproof_spec.state import Request


class GroupPolicy:
    """Full, sliding and chunked attention; the other kinds differ where they say so.

    `published` counts the table entries that need not be published again.  `tails` are
    the hits that end inside a block, until the block is copied: (table index, block).
    `copies` go with the next step, which is when both of their ends lose a reference.
    """

    def __init__(self, group_id: int, layout: Layout, pool: VllmPool) -> None:
        self.group_id = group_id
        self.layout = layout
        self.pool = pool
        self.group = layout.config.groups[group_id]
        self.drops = layout.drops[group_id]
        self.tables: dict[int, list[int]] = {}  # by request, as are the next two
        self.published: dict[int, int] = {}
        self.tails: dict[int, tuple[int, int]] = {}
        self.copies: list[Copy] = []

    def table(self, request_id: int) -> list[int]:
        return self.tables.get(request_id, [])

    # Capacity

    def needed(self, request: Request, ends: Segments, hit: Sequence[int] | None) -> int:
        """Blocks that the next step takes, reclaimable hits included; no hit if it runs."""
        entries = self.group.blocks_for(self._reserved(request, ends))
        return self._missing(request, ends, hit, entries)

    def needed_for_whole(self, request: Request, ends: Segments, hit: Sequence[int] | None) -> int:
        """Blocks that all known tokens take: windows slide and chunks end meanwhile."""
        entries = self.group.blocks_for(request.known)
        if self.group.window:
            limits = self.layout.config.max_in_flight_tokens, self.layout.config.max_model_len
            entries = min(entries, self.group.most_blocks(*limits))
        return self._missing(request, ends, hit, entries)

    def _missing(
        self, request: Request, ends: Segments, hit: Sequence[int] | None, entries: int
    ) -> int:
        if hit is None:
            return max(entries - len(self.table(request.id)), 0)
        first = self.group.first_needed_block(ends.restart)
        new = max(entries - max(first, len(hit)), 0) + self._ends_inside(hit, ends)
        return new + self.pool.reclaimable(hit[first:])

    def _reserved(self, request: Request, ends: Segments) -> int:
        return ends.reserved

    def _ends_inside(self, hit: Sequence[int] | None, ends: Segments) -> bool:
        return bool(hit) and ends.local % self.group.block_size != 0

    # Allocation

    def adopt(self, request_id: int, ends: Segments, hit: Sequence[int]) -> None:
        """Hold what is still needed of the hit; what is left of that is null."""
        first = self.group.first_needed_block(ends.restart)
        kept = hit[first:]
        self.pool.hold(kept)
        table = self.tables[request_id] = [*[NULL_BLOCK] * first, *kept]
        self.published[request_id] = len(table)
        if self._ends_inside(kept, ends):
            index = ends.local // self.group.block_size
            self.tails[request_id] = index, kept[-1]
            self.published[request_id] = index

    def take_external(self, request_id: int, ends: Segments) -> None:
        table = self.tables.setdefault(request_id, [])
        table += self.pool.take(max(self.group.blocks_for(ends.total) - len(table), 0))

    def grow(self, request: Request, ends: Segments) -> list[int]:
        """Copy the end of a hit, take what is missing; the blocks taken."""
        copied = self._copy_tail(request.id) if request.id in self.tails else []
        table = self.tables.setdefault(request.id, [])
        missing = self.group.blocks_for(self._reserved(request, ends)) - len(table)
        new = self.pool.take(max(missing, 0))
        table += new
        return copied + new

    def _copy_tail(self, request_id: int) -> list[int]:
        index, source = self.tails.pop(request_id)
        taken = self.pool.take(1)
        self.redirect(request_id, index, source, taken[0])
        return taken

    def redirect(self, request_id: int, index: int, source: int, destination: int) -> None:
        """The request goes on in a copy; its reference to the source goes with the copy."""
        self.tables[request_id][index] = destination
        self.copies.append(Copy(self.group_id, source, destination))
        self.pool.references[destination] += 1

    # Publication

    def publish(self, request: Request, tokens: int) -> None:
        """Make findable what the first `tokens` tokens fill and is not yet."""
        tokens = self._reachable(tokens)
        table = self.table(request.id)
        first, end = self.published.get(request.id, 0), tokens // self.group.block_size
        for entry in self._worth_publishing(range(first, end)):
            if table[entry] != NULL_BLOCK:
                name = self.pool.names.of(request, (entry + 1) * self.group.block_size)
                self.pool.publish((self.group_id, name), table[entry])
        if first < end:
            self.published[request.id] = end
        if self.layout.release.publishes_prompt_end:
            self._publish_prompt_end(request, tokens)

    def _reachable(self, tokens: int) -> int:
        """A common boundary, or the block after it which a drafter finds and drops."""
        layout = self.layout
        alone = len(layout.config.groups) == 1 or not layout.release.publishes_reachable
        if alone or layout.hits_inside:
            return tokens
        reachable = tokens - tokens % layout.boundary
        if self.drops and reachable:
            return min(tokens, reachable + self.group.block_size)
        return reachable

    def _worth_publishing(self, entries: Sequence[int]) -> Iterator[int]:
        yield from entries

    def _publish_prompt_end(self, request: Request, tokens: int) -> None:
        """Only full attention and states have a key for it."""

    # Return

    def trim(self, request_id: int, processed: int) -> None:
        """Right to left, stopping at the first null."""
        table = self.table(request_id)
        end = min(self.group.first_needed_block(processed), len(table))
        self._give_back(table, self._held_before(table, end))

    def _held_before(self, table: Sequence[int], end: int) -> list[int]:
        held = []
        for entry in reversed(range(end)):
            if table[entry] == NULL_BLOCK:
                break
            held.append(entry)
        return held

    def _give_back(self, table: list[int], entries: Sequence[int]) -> None:
        gone = [table[entry] for entry in entries]
        for entry in entries:
            table[entry] = NULL_BLOCK
        if gone:
            self.pool.free(gone)

    def leave(self, request_id: int) -> list[int]:
        """Know nothing of the request any more; its blocks, still held."""
        self.published.pop(request_id, None)
        self.tails.pop(request_id, None)
        return self.tables.pop(request_id, [])

    def step_begins(self) -> list[int]:
        """The copies are on their way; the blocks that they have held."""
        ends = [block for copy in self.copies for block in (copy.source, copy.destination)]
        self.copies = []
        return ends

    # Copied

    def clone(self, pool: VllmPool) -> Self:
        twin = type(self)(self.group_id, self.layout, pool)
        twin.tables = {request: list(table) for request, table in self.tables.items()}
        twin.published = dict(self.published)
        twin.tails = dict(self.tails)
        twin.copies = list(self.copies)
        return twin

    def memory(self) -> Hashable:
        return (
            frozenset((request, tuple(table)) for request, table in self.tables.items()),
            frozenset(self.published.items()),
            frozenset(self.tails.items()),
            tuple(self.copies),
        )


class FullPolicy(GroupPolicy):
    """Where blocks are bigger than the pieces hashed, the prompt's end gets a key as well."""

    def _publish_prompt_end(self, request: Request, tokens: int) -> None:
        unit = self.layout.unit
        end = request.prompt_tokens - (not self.drops)
        end -= end % unit
        index, inside = divmod(end, self.group.block_size)
        table = self.table(request.id)
        if inside and end <= tokens and index < len(table):
            self.pool.publish((self.group_id, self.pool.names.of(request, end)), table[index])


class WindowPolicy(GroupPolicy):
    """A hit needs only the window left of a common boundary."""

    def _worth_publishing(self, entries: Sequence[int]) -> Iterator[int]:
        per_boundary = self.layout.boundary // self.group.block_size
        tail = ceil_div(self.group.window - 1, self.group.block_size) + self.drops
        if tail >= per_boundary or not self.layout.release.publishes_reachable:
            yield from entries
            return
        for entry in entries:
            last = entry - self.drops  # the block after the boundary is found and dropped
            if last >= 0 and last % per_boundary >= per_boundary - tail:
                yield entry


class CrossPolicy(GroupPolicy):
    """The encoder's tokens: blocks at admission, no hits, nothing external, no keys."""

    def needed_for_whole(self, request: Request, ends: Segments, hit: Sequence[int] | None) -> int:
        return self.needed(request, ends, hit)

    def _reserved(self, request: Request, ends: Segments) -> int:
        return len(request.encoder)

    def adopt(self, request_id: int, ends: Segments, hit: Sequence[int]) -> None:
        """There is never a hit."""

    def take_external(self, request_id: int, ends: Segments) -> None:
        """Nothing of an encoder comes from elsewhere."""
