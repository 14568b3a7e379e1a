"""Groups of states: Mamba and its like, in vLLM's mode "align"."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Self

from kvproof_spec.actions import Segments
from kvproof_spec.pages import NULL_BLOCK, Copy
from kvproof_spec.policies.groups import GroupPolicy
from kvproof_spec.policies.layout import Layout
from kvproof_spec.policies.pool import Key, VllmPool
from kvproof_spec.state import Request


class StatePolicy(GroupPolicy):
    """A table is null but for the state that a step reads and the one that it writes.

    `retired` counts the table entries that were given back or, in releases that do not,
    `last` is the entry of the state that the last growth left behind.  `own_tails` are
    published states inside a block, which their request writes next: the index is then
    given a copy.  A state that was published since the step began does not exist before
    the step is over.
    """

    def __init__(self, group_id: int, layout: Layout, pool: VllmPool) -> None:
        super().__init__(group_id, layout, pool)
        self.retired: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.own_tails: dict[int, tuple[int, int]] = {}
        self.published_in_step: set[Key] = set()

    # Capacity

    def needed(self, request: Request, ends: Segments, hit: Sequence[int] | None) -> int:
        needed = super().needed(request, ends, hit)
        external = ends.total > ends.local
        if external and "refuses state shortage" in self.layout.corrections:
            return max(needed, self._taken_with_load(ends, hit or ()))
        return needed

    def _reserved(self, request: Request, ends: Segments) -> int:
        """Nothing is reserved ahead: no draft model has states."""
        return ends.target

    def _missing(
        self, request: Request, ends: Segments, hit: Sequence[int] | None, entries: int
    ) -> int:
        """At most one block and one for a copy, however long the table gets."""
        hit = hit or ()
        if hit and self.pool.first_key(hit[-1]) in self.published_in_step:
            return self.layout.config.num_blocks + 1
        copied = self._ends_inside(hit, ends) or request.id in self.own_tails
        new = entries - len(hit) - len(self.table(request.id))
        if copied:
            new = max(new, 0) + 1
        return min(new, 1 + copied) + self.pool.reclaimable(hit)

    def _taken_with_load(self, ends: Segments, hit: Sequence[int]) -> int:
        """The state that is loaded, and the running one if that has another block."""
        kept = hit[self.group.first_needed_block(ends.restart) :]
        loaded = self.group.blocks_for(ends.total)
        running = self.group.blocks_for(ends.target) > loaded
        return 1 - len(kept) + self.pool.reclaimable(kept) + running

    # Allocation

    def grow(self, request: Request, ends: Segments) -> list[int]:
        """Null up to the last block, and that one, after a copy if one is due."""
        table = self.tables.setdefault(request.id, [])
        before, missing = len(table), self.group.blocks_for(ends.target) - len(table)
        tail, own = self.tails.pop(request.id, None), self.own_tails.pop(request.id, None)
        copied = tail is not None or own is not None
        if missing <= 0 and not copied:
            return []
        if before and not self.layout.release.retires_states:
            self.last[request.id] = before - 1
        table += [NULL_BLOCK] * (missing - 1)
        taken = self.pool.take((missing > 0) + copied)
        table += taken[copied:]
        grown = table[before:]
        if tail is not None:
            self.redirect(request.id, *tail, taken[0])
            return [taken[0], *grown]
        if own is not None:
            self._save(own[1], taken[0])
        return grown

    def _save(self, source: int, saved: int) -> None:
        """The index gets a copy; the request keeps its block, since a worker's row only grows."""
        self.pool.move_keys(source, saved)
        self.copies.append(Copy(self.group_id, source, saved))
        self.pool.references[source] += 1
        self._note(saved)

    # Publication

    def publish(self, request: Request, tokens: int) -> None:
        first = self.published.get(request.id, 0)
        super().publish(request, tokens)
        end = self._reachable(tokens) // self.group.block_size
        for block in self.table(request.id)[first:end]:
            self._note(block)

    def _note(self, block: int) -> None:
        key = self.pool.first_key(block)
        if key is not None:
            self.published_in_step.add(key)

    def _publish_prompt_end(self, request: Request, tokens: int) -> None:
        """The state after the last boundary of the prompt, if that is where a step ends.

        It counts as published in this step whenever that is asked for.
        """
        table, index = self.table(request.id), self.group.blocks_for(tokens) - 1
        if tokens != self._prompt_end(request) or not 0 <= index < len(table):
            return
        if table[index] == NULL_BLOCK:
            return
        key = self.group_id, self.pool.names.of(request, tokens)
        self.pool.publish(key, table[index])
        self.published_in_step.add(key)
        if tokens % self.group.block_size:
            self.own_tails[request.id] = index, table[index]
            self.published[request.id] = index

    def _prompt_end(self, request: Request) -> int:
        """Where the same prompt can be resumed: a token is left, and with a drafter a piece."""
        unit = self.layout.unit
        if self.layout.has_drafter:
            return max(request.prompt_tokens // unit - 1, 0) * unit
        return (request.prompt_tokens - 1) // unit * unit

    # Return

    def trim(self, request_id: int, processed: int) -> None:
        if self.layout.release.retires_states:
            self._retire(request_id, processed)
            return
        super().trim(request_id, processed)
        table, last = self.table(request_id), self.last.get(request_id)
        passed = last is not None and last < self.group.blocks_for(processed) - 1
        if last is not None and passed and table[last] != NULL_BLOCK:
            self._give_back(table, [last])

    def _retire(self, request_id: int, processed: int) -> None:
        """Right to left, over nulls, down to what was given back before."""
        table, first = self.table(request_id), self.retired.get(request_id, 0)
        end = min(self.group.first_needed_block(processed), len(table))
        if first < end:
            held = [entry for entry in range(first, end) if table[entry] != NULL_BLOCK]
            self._give_back(table, held[::-1])
            self.retired[request_id] = end

    def leave(self, request_id: int) -> list[int]:
        for each in (self.retired, self.last):
            each.pop(request_id, None)
        self.own_tails.pop(request_id, None)
        return super().leave(request_id)

    def step_begins(self) -> list[int]:
        self.published_in_step.clear()
        return super().step_begins()

    # Copied

    def clone(self, pool: VllmPool) -> Self:
        twin = super().clone(pool)
        twin.retired, twin.last = dict(self.retired), dict(self.last)
        twin.own_tails = dict(self.own_tails)
        twin.published_in_step = set(self.published_in_step)
        return twin

    def memory(self) -> Hashable:
        return (
            super().memory(),
            frozenset(self.retired.items()),
            frozenset(self.last.items()),
            frozenset(self.own_tails.items()),
            frozenset(self.published_in_step),
        )
