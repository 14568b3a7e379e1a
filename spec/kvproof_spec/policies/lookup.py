"""The longest hit of each kind of group, and the one on which all groups agree."""

from __future__ import annotations

from collections.abc import Iterable

from kvproof_spec.answers import Hit
from kvproof_spec.config import Group, ceil_div
from kvproof_spec.pages import NULL_BLOCK, Tables
from kvproof_spec.policies.layout import Layout, Searched
from kvproof_spec.policies.pool import VllmPool
from kvproof_spec.state import Request

Blocks = tuple[int, ...]  # one of each group that is looked up as one
Found = tuple[list[Blocks], int]  # by table index; the hit's length in tokens


class HitFinder:
    """Looks up one request in all groups.

    `boundary` is where hits may end: at the ends of every group's blocks, or, if hits end
    inside blocks, at the ends of the pieces that are hashed.
    """

    def __init__(self, layout: Layout, pool: VllmPool) -> None:
        self.layout = layout
        self.pool = pool
        self.boundary = layout.boundary
        self.searched = layout.searched
        self.one_round = len(self.searched) == 2 and self.searched[0].group.kind == "full"

    def hit(self, request: Request) -> Hit:
        if not self.layout.config.caching:
            return Hit(0, self.layout.config.no_tables)
        if len(self.layout.config.groups) > 1:
            return self._common(request)
        (only,) = self.searched
        blocks, tokens = self._longest(only, request, request.known - 1, only.drops)
        return Hit(tokens, (tuple([one for (one,) in blocks]),))

    # All groups

    def _common(self, request: Request) -> Hit:
        """Shrink the hit, full attention first, until every group agrees."""
        found: dict[int, Found] = {}
        dropped: set[int] = set()  # groups whose extra block was found beyond this length
        longest = request.known - 1
        while True:
            agreed = longest
            for index in range(len(self.searched)):
                agreed = self._agree(index, request, agreed, found, dropped)
            if agreed >= longest:
                break
            longest = agreed
            if self.one_round:
                break
        return Hit(longest, self._tables(found, longest))

    def _agree(
        self,
        index: int,
        request: Request,
        agreed: int,
        found: dict[int, Found],
        dropped: set[int],
    ) -> int:
        """What one group makes of a length; full attention is looked up only once."""
        wanted = self.searched[index]
        if wanted.group.kind == "full" and index in found:
            return min(agreed, found[index][1])
        drop = wanted.drops and index not in dropped
        most = self._with_extra(wanted.group, request, agreed) if drop else agreed
        found[index] = self._longest(wanted, request, most, drop)
        tokens = found[index][1]
        if drop:
            dropped.add(index)
        elif tokens < agreed:
            dropped.clear()
        return tokens

    def _with_extra(self, group: Group, request: Request, tokens: int) -> int:
        """How far a drafter looks, so that it comes back to `tokens` when it has dropped."""
        if not self.layout.release.looks_past_limit:
            return min(tokens + group.block_size, request.known - 1)
        if group.kind == "state":
            return tokens
        inside = self.layout.hits_inside and group.kind == "full"
        extra = min(self.layout.unit, group.block_size) if inside else group.block_size
        return min(tokens + extra, request.known - request.known % self.layout.unit)

    def _tables(self, found: dict[int, Found], longest: int) -> Tables:
        tables: dict[int, tuple[int, ...]] = {}
        for index, (group, ids, _) in enumerate(self.searched):
            blocks = found[index][0]
            if group.kind == "full" and (index == 0 or self.layout.release.shortens_every_group):
                del blocks[group.blocks_for(longest) :]
            for place, group_id in enumerate(ids):
                tables[group_id] = tuple([each[place] for each in blocks])
        return tuple(tables[group_id] for group_id in range(len(self.layout.config.groups)))

    # One group

    def _longest(self, wanted: Searched, request: Request, most: int, drop: bool) -> Found:
        """The longest hit of at most `most` tokens, less its end with `drop`."""
        match wanted.group.kind:
            case "full":
                return self._full(wanted, request, most, drop)
            case "sliding":
                return self._sliding(wanted, request, most, drop)
            case "chunked":
                return self._chunked(wanted, request, most)
            case _:
                return self._state(wanted, request, most)

    def _full(self, wanted: Searched, request: Request, most: int, drop: bool) -> Found:
        group = wanted.group
        size = group.block_size
        blocks = leading(
            self._cached(wanted, request, (entry + 1) * size) for entry in range(most // size)
        )
        tokens = len(blocks) * size
        if self.boundary < size:
            tokens = self._inside(wanted, request, most, blocks)
        if drop and tokens:
            tokens -= min(self.boundary, size)
        tokens -= tokens % self.boundary
        del blocks[group.blocks_for(tokens) :]
        return blocks, tokens

    def _inside(self, wanted: Searched, request: Request, most: int, blocks: list[Blocks]) -> int:
        """Add the block in which the hit ends, if it goes on after `blocks`; its length."""
        whole, unit = len(blocks) * wanted.group.block_size, self.boundary
        last = min(whole + wanted.group.block_size - unit, most - most % unit)
        for tokens in range(last, whole, -unit):
            cached = self._cached(wanted, request, tokens)
            if cached is not None:
                blocks.append(cached)
                return tokens
        return whole

    def _sliding(self, wanted: Searched, request: Request, most: int, drop: bool) -> Found:
        """The rightmost run of cached blocks that fills a window, or the run at the start."""
        size = wanted.group.block_size
        needed = ceil_div(wanted.group.window - 1, size) + drop
        blocks, run = [null_blocks(wanted)] * (most // size), 0
        for entry in reversed(range(len(blocks))):
            cached = self._cached(wanted, request, (entry + 1) * size)
            if cached is None:
                run = 0
                continue
            if run == 0 and (entry + (not drop)) * size % self.boundary:
                continue
            blocks[entry] = cached
            run += 1
            if run >= needed:
                return self._dropped(wanted, blocks[: entry + run], drop)
        return self._dropped(wanted, self._aligned(wanted, blocks[:run]), drop)

    def _dropped(self, wanted: Searched, blocks: list[Blocks], drop: bool) -> Found:
        if drop and blocks:
            blocks = self._aligned(wanted, blocks[:-1])
        return blocks, len(blocks) * wanted.group.block_size

    def _aligned(self, wanted: Searched, blocks: list[Blocks]) -> list[Blocks]:
        size = wanted.group.block_size
        tokens = len(blocks) * size
        return blocks[: (tokens - tokens % max(self.boundary, size)) // size]

    def _chunked(self, wanted: Searched, request: Request, most: int) -> Found:
        """Null up to the chunk of the last token, then what is cached of that chunk."""
        group = wanted.group
        size, first = group.block_size, group.first_needed_block(most)
        cached = leading(
            self._cached(wanted, request, (entry + 1) * size)
            for entry in range(first, most // size)
        )
        blocks = [null_blocks(wanted)] * first + cached
        return blocks, len(blocks) * size

    def _state(self, wanted: Searched, request: Request, most: int) -> Found:
        """The last state that was saved at a boundary."""
        size = wanted.group.block_size
        unit = min(size, self.boundary)
        for tokens in range(most - most % unit, 0, -unit):
            if tokens % self.boundary:
                continue
            cached = self._cached(wanted, request, tokens)
            if cached is not None:
                entry = (tokens - 1) // size
                return [*[null_blocks(wanted)] * entry, cached], tokens
        return [], 0

    def _cached(self, wanted: Searched, request: Request, tokens: int) -> Blocks | None:
        """The block that answers for the first `tokens` tokens, in every group of `wanted`."""
        name = self.pool.names.of(request, tokens)
        found = []
        for group_id in wanted.ids:
            block = self.pool.find((group_id, name))
            if block is None:
                return None
            found.append(block)
        return tuple(found)


def null_blocks(wanted: Searched) -> Blocks:
    return (NULL_BLOCK,) * len(wanted.ids)


def leading(found: Iterable[Blocks | None]) -> list[Blocks]:
    """What is before the first miss."""
    blocks = []
    for each in found:
        if each is None:
            break
        blocks.append(each)
    return blocks
