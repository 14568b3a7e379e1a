"""What vLLM 0.32 does, exactly: block ids, free order, hits, keys and refusals.

Sources: vllm/v1/core/{block_pool,kv_cache_coordinator,single_type_kv_cache_manager,
kv_cache_manager}.py of vLLM 0.32.0.  The policy keeps its own state beside the core's: the
free order, the index with the copies of each key, tables, and published counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    Forget,
    Issue,
    Lookup,
    Publish,
    Release,
    Segments,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Forgotten,
    Granted,
    Hit,
    Refused,
    Returned,
    Snapshot,
    Trimmed,
)
from kvproof_spec.config import Config, Group, ceil_div
from kvproof_spec.derived import processed_tokens, tokens_in_flight, unissued_cells
from kvproof_spec.pages import NULL_BLOCK, Tables, normal_blocks
from kvproof_spec.prefix import Prefix
from kvproof_spec.state import Request, State

Key = tuple[int, Prefix]  # (group, content of the block's last position)


class UnknownToPolicy(ValueError):
    """The policy cannot predict this configuration; the message says why."""


class VllmPool:
    """Free order and index.  Unhashed blocks are reused first, hashed ones last."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.caching = caching
        self.free_order: tuple[int, ...] = normal_blocks(num_blocks)
        self.references = [0] * num_blocks
        self.key_of: dict[int, Key] = {}
        self.copies: dict[Key, dict[int, None]] = {}  # the first one is returned

    def take(self, count: int) -> list[int]:
        taken = list(self.free_order[:count])
        if count:
            self.free_order = self.free_order[count:]
        for block in taken:
            self.forget(block)
            self.references[block] += 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        reclaimed = [b for b in blocks if b != NULL_BLOCK and not self.references[b]]
        if reclaimed:
            free_order = list(self.free_order)
            for block in reclaimed:
                free_order.remove(block)
            self.free_order = tuple(free_order)
        for block in blocks:
            self.references[block] += block != NULL_BLOCK

    def free(self, batch: Iterable[int]) -> None:
        first: list[int] = []
        last: list[int] = []
        for block in batch:
            if block == NULL_BLOCK:
                continue
            self.references[block] -= 1
            if not self.references[block]:
                (last if self.caching and block in self.key_of else first).append(block)
        if first or last:
            self.free_order = (*first, *self.free_order, *last)

    def publish(self, key: Key, block: int) -> None:
        if self.key_of.get(block) != key:
            self.forget(block)
            self.key_of[block] = key
            self.copies.setdefault(key, {})[block] = None

    def forget(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.copies[key][block]
            if not self.copies[key]:
                del self.copies[key]

    def find(self, key: Key) -> int | None:
        return next(iter(self.copies.get(key, ())), None)


CORRECTIONS: dict[str, str] = {
    "withdraws unissued": "what a request leaves unissued is no longer findable",
    "restores last token": "a load of every known token keeps the window of the last one",
}
"""What vLLM 0.32 breaks, and an implementation that is otherwise equal may do right."""


class VllmPolicy:
    """vLLM 0.32's KVCacheManager over full attention and sliding window groups."""

    name = "vllm-0.32"

    def __init__(self, config: Config, corrections: Collection[str] = ()) -> None:
        if len({group.block_size for group in config.groups}) > 1:
            raise UnknownToPolicy(f"policy {self.name} knows only groups of one block size")
        self.config = config
        self.corrections = corrections
        self.groups = config.groups
        self.boundary = config.boundary
        self.pool = VllmPool(config.num_blocks, config.caching)
        self.tables: list[dict[int, list[int]]] = [{} for _ in config.groups]
        self.published: list[dict[int, int]] = [{} for _ in config.groups]  # full blocks
        self.deferred: list[tuple[int, list[int]]] = []  # (last step, blocks)

    def predict(self, state: State, action: Action) -> Answer | None:
        match action:
            case Lookup():
                return self._lookup(state.find(action.request))
            case Allocate():
                return self._allocate(state, action)
            case CompleteStep():
                return self._complete_step(action.step)
            case CompleteLoad():
                if action.tokens == 0:
                    self._free(action.request)
            case Publish():
                self._publish(state.find(action.request), action.tokens)
            case Trim():
                request = state.find(action.request)
                self._trim(request.id, processed_tokens(state, request))
                return Trimmed(self._tables_of(request.id))
            case Release():
                return self._release(state, action)
            case Forget():
                return self._forget(action)
            case Submit() | Issue():
                pass
        return None

    def snapshot(self) -> Snapshot:
        copies = self.pool.copies.items()
        keys = tuple(sorted((key[0], tuple(blocks)) for key, blocks in copies))
        return Snapshot(free_order=self.pool.free_order, keys=keys)

    def _tables_of(self, request: int) -> Tables:
        return tuple(tuple(table.get(request, ())) for table in self.tables)

    # Lookup

    def _lookup(self, request: Request) -> Hit:
        longest = request.known - 1
        if not self.config.caching:
            return Hit(0, self.config.no_tables)
        if len(self.groups) == 1:
            blocks = self._longest_hit(0, request, longest)
            return Hit(len(blocks) * self.groups[0].block_size, (tuple(blocks),))
        return self._common_hit(request, longest)

    def _common_hit(self, request: Request, longest: int) -> Hit:
        """Shrink the boundary, full attention first, until every group agrees."""
        order = sorted(range(len(self.groups)), key=lambda g: self.groups[g].kind != "full")
        found: dict[int, list[int]] = {}
        while True:
            boundary = longest
            for group_id in order:
                group = self.groups[group_id]
                if group.kind == "full" and group_id in found:
                    boundary = min(boundary, len(found[group_id]) * group.block_size)
                    continue
                found[group_id] = self._longest_hit(group_id, request, boundary)
                boundary = len(found[group_id]) * group.block_size
            if boundary >= longest:
                break
            longest = boundary
            if len(order) == 2 and self.groups[order[0]].kind == "full":
                break
        for group_id, blocks in found.items():
            if self.groups[group_id].kind == "full":
                del blocks[self.groups[group_id].blocks_for(longest) :]
        return Hit(longest, tuple(tuple(found[group_id]) for group_id in range(len(order))))

    def _longest_hit(self, group_id: int, request: Request, longest: int) -> list[int]:
        group = self.groups[group_id]
        entries = longest // group.block_size
        copies = (self._cached(group_id, request, entry) for entry in range(entries))
        if group.kind == "full":
            return self._cut_to_boundary(group, leading(copies))
        return self._longest_window_hit(group, list(copies))

    def _longest_window_hit(self, group: Group, copies: list[int | None]) -> list[int]:
        """The rightmost run of cached blocks that fills a window, or the run at the start."""
        wanted = ceil_div(group.window - 1, group.block_size)
        blocks, run = [NULL_BLOCK] * len(copies), 0
        for entry in reversed(range(len(copies))):
            block = copies[entry]
            if block is None:
                run = 0
                continue
            if run == 0 and (entry + 1) * group.block_size % self.boundary:
                continue
            blocks[entry] = block
            run += 1
            if run >= wanted:
                return blocks[: entry + run]
        return self._cut_to_boundary(group, blocks[:run])

    def _cut_to_boundary(self, group: Group, blocks: list[int]) -> list[int]:
        tokens = len(blocks) * group.block_size
        return blocks[: (tokens - tokens % self.boundary) // group.block_size]

    def _cached(self, group_id: int, request: Request, entry: int) -> int | None:
        return self.pool.find((group_id, self._last_content(group_id, request, entry)))

    def _last_content(self, group_id: int, request: Request, entry: int) -> Prefix:
        return request.content[(entry + 1) * self.groups[group_id].block_size - 1]

    # Allocate

    def _allocate(self, state: State, action: Allocate) -> Answer:
        request, ends = state.find(action.request), action.segments(state)
        hit = action.tables_before(state) if request.status != "running" else None
        if action.whole_sequence and self._needed(request, ends, hit, request.known) > len(
            self.pool.free_order
        ):
            return Refused(self._tables_of(request.id))
        self._trim(request.id, ends.processed)
        needed = self._needed(request, ends, hit, None)
        if needed + action.headroom > len(self.pool.free_order):
            return Refused(self._tables_of(request.id))
        if hit is not None:
            self._admit(request, ends, hit)
        new = tuple(
            tuple(self._grow(group_id, request, ends.reserved))
            for group_id in range(len(self.groups))
        )
        if not action.unordered:
            self._publish(request, min(ends.target, request.known))
        return Granted(self._tables_of(request.id), new)

    def _needed(
        self, request: Request, ends: Segments, hit: Tables | None, whole: int | None
    ) -> int:
        """Blocks over all groups, reclaimable hits included."""
        needed = 0
        for group_id, group in enumerate(self.groups):
            entries = group.blocks_for(ends.reserved if whole is None else whole)
            if whole is not None:
                limits = self.config.max_in_flight_tokens, self.config.max_model_len
                entries = min(entries, group.most_blocks(*limits))
            if hit is None:
                held = len(self.tables[group_id].get(request.id, ()))
                needed += max(entries - held, 0)
                continue
            first = group.first_needed_block(self._restart(ends))
            blocks = hit[group_id]
            needed += max(entries - max(first, len(blocks)), 0)
            needed += sum(b != NULL_BLOCK and not self.pool.references[b] for b in blocks[first:])
        return needed

    def _admit(self, request: Request, ends: Segments, hit: Tables) -> None:
        """Hold all groups' hits first, then take the external tokens' blocks."""
        for group_id, group in enumerate(self.groups):
            first = group.first_needed_block(self._restart(ends))
            kept = hit[group_id][first:]
            self.pool.hold(kept)
            has_content = any(hit) or ends.total > ends.local
            nulls = [NULL_BLOCK] * first if has_content else []
            self.tables[group_id][request.id] = [*nulls, *kept]
            if has_content:
                self.published[group_id][request.id] = len(nulls) + len(kept)
        if ends.total > ends.local:
            for group_id in range(len(self.groups)):
                self._grow(group_id, request, ends.total)

    def _restart(self, ends: Segments) -> int:
        return ends.restart if "restores last token" in self.corrections else ends.total

    def _grow(self, group_id: int, request: Request, tokens: int) -> list[int]:
        table = self.tables[group_id].setdefault(request.id, [])
        new = self.pool.take(max(self.groups[group_id].blocks_for(tokens) - len(table), 0))
        table += new
        return new

    # Publication

    def _publish(self, request: Request, tokens: int) -> None:
        if not self.config.caching:
            return
        if len(self.groups) > 1:
            tokens -= tokens % self.boundary
        for group_id, group in enumerate(self.groups):
            first = self.published[group_id].get(request.id, 0)
            end = tokens // group.block_size
            table = self.tables[group_id].get(request.id, [])
            for entry in self._worth_publishing(group, range(first, end)):
                if table[entry] != NULL_BLOCK:
                    content = self._last_content(group_id, request, entry)
                    self.pool.publish((group_id, content), table[entry])
            if first < end:
                self.published[group_id][request.id] = end

    def _worth_publishing(self, group: Group, entries: Sequence[int]) -> Iterator[int]:
        """A window needs only the tail before each common boundary."""
        per_boundary = self.boundary // group.block_size
        tail = ceil_div(group.window - 1, group.block_size)
        for entry in entries:
            if group.kind == "full" or entry % per_boundary >= per_boundary - tail:
                yield entry

    # Giving back

    def _trim(self, request: int, processed: int) -> None:
        """Right to left, stopping at the first null."""
        for group_id, group in enumerate(self.groups):
            table = self.tables[group_id].get(request, [])
            gone = []
            for entry in reversed(range(min(group.first_needed_block(processed), len(table)))):
                if table[entry] == NULL_BLOCK:
                    break
                gone.append(table[entry])
                table[entry] = NULL_BLOCK
            self.pool.free(gone)

    def _free(self, request: int) -> None:
        """Group by group, each from its end: longer prefixes are reused before shorter ones."""
        for tables, published in zip(self.tables, self.published, strict=True):
            self.pool.free(reversed(tables.pop(request, [])))
            published.pop(request, None)

    def _release(self, state: State, action: Release) -> Returned:
        request = state.find(action.request)
        if "withdraws unissued" in self.corrections:
            for block, _, _, _ in unissued_cells(state, request):
                self.pool.forget(block)
        if self.config.defers_returns and tokens_in_flight(state, request):
            kept = [block for tables in self.tables for block in tables.pop(request.id, ())]
            self.deferred.append((state.steps[-1].id, [b for b in kept if b != NULL_BLOCK]))
            for published in self.published:
                published.pop(request.id, None)
        else:
            self._free(request.id)
        return self._kept_back()

    def _complete_step(self, step: int) -> Returned:
        while self.deferred and self.deferred[0][0] <= step:
            self.pool.free(reversed(self.deferred.pop(0)[1]))
        return self._kept_back()

    def _kept_back(self) -> Returned:
        return Returned(tuple(block for _, blocks in self.deferred for block in blocks))

    def _forget(self, action: Forget) -> Forgotten:
        if action.blocks is not None:
            for block in action.blocks:
                self.pool.forget(block)
            return Forgotten(True)
        if any(self.pool.references):
            return Forgotten(False)
        self.pool.key_of.clear()
        self.pool.copies.clear()
        return Forgotten(True)


def leading(copies: Iterable[int | None]) -> list[int]:
    """The blocks before the first miss."""
    blocks = []
    for block in copies:
        if block is None:
            break
        blocks.append(block)
    return blocks
