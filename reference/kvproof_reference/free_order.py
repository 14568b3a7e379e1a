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

    __slots__ = ("_head", "_place", "_queue", "_queued", "_stack")

    def __init__(self, blocks: Iterable[int]) -> None:
        self._stack: list[int] = []  # the last one is next
        self._queue = [GONE, *blocks]
        self._head = 1  # everything before it has been handed out
        self._queued = len(self._queue) - 1
        self._place = [0] * (max(self._queue) + 1)  # in the queue, by block; 0 outside of it
        self._note_places()

    def _note_places(self) -> None:
        for place, block in enumerate(self._queue):
            self._place[block] = place

    def __len__(self) -> int:
        return len(self._stack) + self._queued

    def pop(self, count: int) -> list[int]:
        """Take the first blocks; `IndexError` if there are fewer."""
        taken = self._stack[: -count - 1 : -1]
        if taken:
            del self._stack[-len(taken) :]
        head, queue, place = self._head, self._queue, self._place
        from_stack = len(taken)
        while len(taken) < count:
            block = queue[head]
            head += 1
            if block != GONE:
                place[block] = 0
                taken.append(block)
        self._head = head
        self._queued -= count - from_stack
        return taken

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put `blocks` in front of all others, the first of them first."""
        self._stack.extend(reversed(blocks))

    def append(self, blocks: Sequence[int]) -> None:
        if len(self._queue) > 2 * self._queued + 64:
            self._compact()
        place = self._place
        for at, block in enumerate(blocks, len(self._queue)):
            place[block] = at
        self._queue += blocks
        self._queued += len(blocks)

    def remove(self, block: int) -> None:
        """Take a block from anywhere; `ValueError` if it is not free."""
        place = self._place[block]
        if place:
            self._place[block] = 0
            self._queue[place] = GONE
            self._queued -= 1
        else:
            self._stack.remove(block)  # findable again, which only a faulty manager does

    def _compact(self) -> None:
        self._queue = [GONE, *self._in_queue()]
        self._head = 1
        self._note_places()

    def _in_queue(self) -> list[int]:
        return [block for block in self._queue[self._head :] if block != GONE]

    def as_tuple(self) -> tuple[int, ...]:
        queue = self._queue[self._head :]
        if len(queue) > self._queued:
            queue = self._in_queue()
        return (*reversed(self._stack), *queue)

    def clone(self) -> Self:
        twin = copy(self)
        twin._stack = self._stack.copy()
        twin._queue = self._queue.copy()
        twin._place = self._place.copy()
        return twin
