"""The order of free blocks: a stack in front of a queue, and removal from the middle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Self

GONE = 0
"""In the place of a block that was removed: the null block is never free."""


class FreeOrder:
    """Free block ids, the next one to be handed out first.

    Blocks that nothing can find go on the stack and are reused first; the others wait in
    the queue.  All operations take constant time, on average over those that came before.
    """

    __slots__ = ("_head", "_place", "_queue", "_stack")

    def __init__(self, blocks: Iterable[int]) -> None:
        self._stack: list[int] = []  # the last one is next
        self._queue: list[int] = list(blocks)
        self._head = 0  # everything before it has been handed out
        self._place = dict(zip(self._queue, range(len(self._queue)), strict=True))

    def __len__(self) -> int:
        return len(self._stack) + len(self._place)

    def pop(self) -> int:
        """Take the first block; `IndexError` if there is none."""
        if self._stack:
            return self._stack.pop()
        while self._queue[self._head] == GONE:
            self._head += 1
        block = self._queue[self._head]
        self._head += 1
        del self._place[block]
        return block

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put `blocks` in front of all others, the first of them first."""
        self._stack.extend(reversed(blocks))

    def append(self, blocks: Sequence[int]) -> None:
        if len(self._queue) > 2 * len(self._place) + 64:
            self._compact()
        start = len(self._queue)
        self._place.update(zip(blocks, range(start, start + len(blocks)), strict=True))
        self._queue += blocks

    def remove(self, block: int) -> None:
        """Take a block from anywhere; `ValueError` if it is not free."""
        place = self._place.pop(block, None)
        if place is None:
            self._stack.remove(block)  # findable again, which only a faulty manager does
        else:
            self._queue[place] = GONE

    def _compact(self) -> None:
        self._queue = list(self._place)  # in the order in which they were appended
        self._head = 0
        self._place = dict(zip(self._queue, range(len(self._queue)), strict=True))

    def as_tuple(self) -> tuple[int, ...]:
        queue = self._queue[self._head :]
        if len(queue) > len(self._place):
            queue = list(self._place)  # in the same order, without the gaps
        return (*reversed(self._stack), *queue)

    def clone(self) -> Self:
        twin = copy(self)
        twin._stack = self._stack.copy()
        twin._queue = self._queue.copy()
        twin._place = self._place.copy()
        return twin
