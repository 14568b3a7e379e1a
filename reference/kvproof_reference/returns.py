"""Releases that wait: for a step in flight, for a store that reads the blocks, or for both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple, Self

from kvproof_reference.block_pool import NULL_BLOCK


class Kept(NamedTuple):
    """One release: its blocks, and what they still wait for."""

    blocks: list[int]  # of all groups, each in table order
    is_computed: bool  # no step in flight uses them
    is_stored: bool  # no store reads them


class DeferredReturns:
    """Blocks that their requests have left and that are not yet to be freed.

    Releases that end at once come back in the order in which they were asked for.
    """

    __slots__ = ("_kept", "_next", "_stepping", "_storing")

    def __init__(self) -> None:
        self._next = 0
        self._kept: dict[int, Kept] = {}  # by number
        self._stepping: deque[tuple[int, int]] = deque()  # the steps that releases wait for
        self._storing: dict[int, list[int]] = {}  # the releases that wait for a request's store

    def keep(
        self, request_id: int, blocks: list[int], step_id: int | None, until_stored: bool
    ) -> None:
        if not blocks:
            return
        number = self._keep(Kept(blocks, step_id is None, not until_stored), step_id)
        if until_stored:
            self._storing.setdefault(request_id, []).append(number)

    def _keep(self, kept: Kept, step_id: int | None) -> int:
        number, self._next = self._next, self._next + 1
        self._kept[number] = kept
        if step_id is not None:
            self._stepping.append((step_id, number))
        return number

    def keep_copy(self, ends: Sequence[int], step_id: int) -> None:
        """Keep what a copy reads and writes until its step has completed."""
        self._keep(Kept(list(ends), False, True), step_id)

    def step_completed(self, step_id: int) -> Iterator[list[int]]:
        """What comes back now; a later release waits for those before it, as in vLLM's queue."""
        while self._stepping and self._stepping[0][0] <= step_id:
            _, number = self._stepping.popleft()
            kept = self._kept.pop(number)
            if kept.is_stored:
                yield kept.blocks
            else:
                self._kept[number] = Kept(kept.blocks, True, False)

    def store_completed(self, request_id: int) -> Iterator[list[int]]:
        """What comes back now; the rest goes on waiting for its step."""
        for number in self._storing.pop(request_id, []):
            kept = self._kept.pop(number)
            if kept.is_computed:
                yield kept.blocks
            else:
                self._kept[number] = Kept(kept.blocks, False, True)

    def blocks(self) -> tuple[int, ...]:
        """Everything kept back, once for each reference."""
        kept = (block for number in sorted(self._kept) for block in self._kept[number].blocks)
        return tuple(block for block in kept if block != NULL_BLOCK)

    def clone(self) -> Self:
        twin = copy(self)
        twin._kept = self._kept.copy()
        twin._stepping = self._stepping.copy()
        twin._storing = {request_id: n.copy() for request_id, n in self._storing.items()}
        return twin
