"""Pages of the pool: what each cell holds, and writing several cells at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvproof_spec.config import Group
from kvproof_spec.prefix import Prefix

NULL_BLOCK = 0
"""The id set aside for ever: fills positions never read again, is never handed out."""

Table = tuple[int, ...]  # block ids, indexed by position // block_size
Tables = tuple[Table, ...]  # indexed by group
Page = tuple[int, tuple[Prefix | None, ...]]  # (group that wrote last, cells by offset)
Pages = tuple[Page | None, ...]  # indexed by block id
Cell = tuple[int, int, int, int]  # (block, group, offset in the block, position), in tokens


def cells(groups: tuple[Group, ...], tables: Tables, first: int, end: int) -> Iterator[Cell]:
    """The cells of positions `first` to `end - 1` that have a block other than null."""
    for group_id, table in enumerate(tables):
        size = groups[group_id].block_size
        for position in range(first, min(end, len(table) * size)):
            block = table[position // size]
            if block != NULL_BLOCK:
                yield block, group_id, position % size, position


def needed_cells(groups: tuple[Group, ...], tables: Tables, start: int, end: int) -> Iterator[Cell]:
    """The cells up to `end - 1` that each group still needs with `start` tokens restored."""
    for group_id, group in enumerate(groups):
        only = tuple(table if g == group_id else () for g, table in enumerate(tables))
        yield from cells(groups, only, group.first_needed(start), end)


def read_page(pages: Pages, block: int, group: int, offset: int) -> Prefix | None:
    """What `group` finds in a cell; another group's write has destroyed the page."""
    page = pages[block]
    return page[1][offset] if page is not None and page[0] == group else None


class PageWriter:
    """Cells written in one transition, before they become a new `Pages`."""

    def __init__(self, groups: tuple[Group, ...], pages: Pages) -> None:
        self._groups = groups
        self._pages = pages
        self._open: dict[int, tuple[int, list[Prefix | None]] | None] = {}

    def read(self, block: int, group: int, offset: int) -> Prefix | None:
        page = self._open[block] if block in self._open else self._pages[block]
        return page[1][offset] if page is not None and page[0] == group else None

    def write(self, block: int, group: int, offset: int, content: Prefix | None) -> None:
        page = self._open.get(block)
        if page is None or page[0] != group:
            old = None if block in self._open else self._pages[block]
            if old is not None and old[0] == group:
                page = (group, list(old[1]))
            else:
                page = (group, [None] * self._groups[group].block_size)
            self._open[block] = page
        page[1][offset] = content

    def write_all(self, where: Iterable[Cell], content: tuple[Prefix, ...]) -> None:
        """Write `content[position]` to each cell."""
        for block, group, offset, position in where:
            self.write(block, group, offset, content[position])

    def clear(self, block: int) -> None:
        self._open[block] = None

    def pages(self) -> Pages:
        if not self._open:
            return self._pages
        pages = list(self._pages)
        for block, page in self._open.items():
            pages[block] = None if page is None else (page[0], tuple(page[1]))
        return tuple(pages)
