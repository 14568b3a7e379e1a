"""Pages of the pool: what each cell holds, and writing several cells at once."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from kvproof_spec.config import Group
from kvproof_spec.prefix import Prefix

NULL_BLOCK = 0
"""The id set aside for ever: fills positions never read again, is never handed out."""

Table = tuple[int, ...]  # block ids, indexed by position // block_size
Tables = tuple[Table, ...]  # indexed by group
Page = tuple[int, tuple[Prefix | None, ...]]  # (group that wrote last, cells by offset)
Cell = tuple[int, int, int, int]  # (block, group, offset in the block, position), in tokens


@dataclass(frozen=True, slots=True)
class Copy:
    """A page to be copied before the next step's forward pass; both ends are pinned until then.

    A partial tail is taken by copy, or the cache is given the copy and the engine keeps
    the source.
    """

    group: int
    source: int  # block id
    destination: int  # block id


@cache
def normal_blocks(num_blocks: int) -> tuple[int, ...]:
    """Ids of the blocks besides the null block: one set of int objects, quick to compare."""
    return tuple(range(1, num_blocks))


def cells(groups: tuple[Group, ...], tables: Tables, first: int, end: int) -> Iterator[Cell]:
    """The cells that computing positions `first` to `end - 1` writes, of blocks other than null."""
    for group_id, table in enumerate(tables):
        group = groups[group_id]
        size, of_a_page = group.block_size, group.cells
        for position in group.written(first, min(end, len(table) * size)):
            block = table[position // size]
            if block != NULL_BLOCK:
                yield block, group_id, position % of_a_page, position


def needed_cells(groups: tuple[Group, ...], tables: Tables, start: int, end: int) -> Iterator[Cell]:
    """The cells that a step over `start` to `end - 1` reads, or (`end` = `start`) a hit needs."""
    for group_id, table in enumerate(tables):
        group = groups[group_id]
        size, of_a_page = group.block_size, group.cells
        for position in group.read(start, min(end, len(table) * size)):
            block = table[position // size]
            if block != NULL_BLOCK:
                yield block, group_id, position % of_a_page, position


def encoder_cells(groups: tuple[Group, ...], tables: Tables, tokens: int) -> Iterator[Cell]:
    """The cells of `tokens` encoder tokens, which each step reads."""
    for group_id, table in enumerate(tables):
        if not groups[group_id].reused:
            size = groups[group_id].block_size
            for position in range(min(tokens, len(table) * size)):
                if table[position // size] != NULL_BLOCK:
                    yield table[position // size], group_id, position % size, position


class Pages:
    """The pages that have been written, by block; a value, of which `PageWriter` makes others."""

    __slots__ = ("_hash", "_pages")

    def __init__(self, pages: dict[int, Page]) -> None:
        self._pages = pages
        self._hash: int | None = None

    def get(self, block: int) -> Page | None:
        """The page of a block, or None if nothing has been written."""
        return self._pages.get(block)

    def items(self) -> ItemsView[int, Page]:
        """(block, page) of every block that has been written."""
        return self._pages.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pages) and self._pages == other._pages

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._pages.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Pages({self._pages})"


def handed_out(before: Tables, after: Tables) -> list[tuple[int, int, int]]:
    """(group, index, block) of each block that `before` does not have at that place."""
    return [
        (group, index, block)
        for group, table in enumerate(after)
        for index, block in enumerate(table)
        if block != NULL_BLOCK and before[group][index : index + 1] != (block,)
    ]


def only_returned(old: Table, new: Table) -> bool:
    """Are they the same but for entries that have become null?"""
    if len(old) != len(new):
        return False
    return all(now in (NULL_BLOCK, was) for was, now in zip(old, new, strict=True))


def read_page(pages: Pages, block: int, group: int, offset: int) -> Prefix | None:
    """What `group` finds in a cell; another group's write has destroyed the page."""
    page = pages.get(block)
    return page[1][offset] if page is not None and page[0] == group else None


class PageWriter:
    """Cells written in one transition, before they become a new `Pages`."""

    def __init__(self, groups: tuple[Group, ...], pages: Pages) -> None:
        self.groups = groups
        self._pages = pages
        self._open: dict[int, tuple[int, list[Prefix | None]] | None] = {}

    def write(self, block: int, group: int, offset: int, content: Prefix | None) -> None:
        page = self._open.get(block)
        if page is None or page[0] != group:
            old = None if block in self._open else self._pages.get(block)
            if old is not None and old[0] == group:
                cells: list[Prefix | None] = list(old[1])
            else:
                cells = [None] * self.groups[group].cells
            page = self._open[block] = group, cells
        page[1][offset] = content

    def write_all(self, where: Iterable[Cell], content: tuple[Prefix, ...]) -> None:
        """Write `content[position]` to each cell."""
        for block, group, offset, position in where:
            self.write(block, group, offset, content[position])

    def write_known(self, where: Iterable[Cell], content: tuple[Prefix, ...], known: int) -> None:
        """Write what is among the first `known` tokens, nothing to the other cells."""
        for block, group, offset, position in where:
            self.write(block, group, offset, content[position] if position < known else None)

    def read(self, block: int, group: int, offset: int) -> Prefix | None:
        """What `group` would find in a cell, with what was written."""
        if block not in self._open:
            return read_page(self._pages, block, group, offset)
        page = self._open[block]
        return page[1][offset] if page is not None and page[0] == group else None

    def copy(self, source: int, destination: int) -> None:
        """The whole page of `source`, as it is now, to `destination`."""
        page = self._open[source] if source in self._open else self._pages.get(source)
        self._open[destination] = None if page is None else (page[0], list(page[1]))

    def clear(self, block: int) -> None:
        """Nothing is left of the page."""
        self._open[block] = None

    def pages(self) -> Pages:
        """The pages with what was written."""
        if not self._open:
            return self._pages
        pages = dict(self._pages.items())
        for block, page in self._open.items():
            if page is None or not any(page[1]):
                pages.pop(block, None)
            else:
                pages[block] = (page[0], tuple(page[1]))
        return Pages(pages)
