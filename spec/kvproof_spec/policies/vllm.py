"""What vLLM does, exactly: block ids, free order, hits, keys, copies and refusals.

Sources: vllm/v1/core/{block_pool,kv_cache_coordinator,single_type_kv_cache_manager,
kv_cache_manager}.py of vLLM 0.32.0 and 0.20.2.  The policy keeps its own state beside the
core's: the free order, the index with the copies of each key, and what each group has.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from copy import copy
from typing import Self

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Publish,
    Release,
    Segments,
    Store,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Forgotten,
    Granted,
    Raised,
    Refused,
    Returned,
    Snapshot,
    Trimmed,
)
from kvproof_spec.config import Config, Kind
from kvproof_spec.derived import processed_tokens, transfer_of, unissued_cells
from kvproof_spec.pages import Copy, Tables
from kvproof_spec.policies.groups import CrossPolicy, FullPolicy, GroupPolicy, WindowPolicy
from kvproof_spec.policies.layout import Layout
from kvproof_spec.policies.lookup import HitFinder
from kvproof_spec.policies.pool import PoolExhausted, VllmPool
from kvproof_spec.policies.releases import VLLM_0_32
from kvproof_spec.policies.releases import Release as VllmRelease
from kvproof_spec.policies.returns import Returns, waiting
from kvproof_spec.policies.states import StatePolicy
from kvproof_spec.state import Request, State

OF_A_KIND: dict[Kind, type[GroupPolicy]] = {
    "full": FullPolicy,
    "sliding": WindowPolicy,
    "chunked": GroupPolicy,
    "state": StatePolicy,
    "cross": CrossPolicy,
}


class VllmPolicy:
    """One release's KVCacheManager, and the driver's deferred returns around it."""

    def __init__(
        self,
        config: Config,
        corrections: Collection[str] = (),
        release: VllmRelease = VLLM_0_32,
    ) -> None:
        self.config = config
        self.corrections = corrections
        self.release = release
        self.name = release.name
        self.layout = Layout(config, release, corrections)
        self.returns = Returns()
        self._build(VllmPool(config.num_blocks, release))

    def _build(self, pool: VllmPool, like: tuple[GroupPolicy, ...] = ()) -> None:
        self.pool = pool
        self.finder = HitFinder(self.layout, pool)
        self.groups = tuple(group.clone(pool) for group in like) or tuple(
            OF_A_KIND[group.kind](group_id, self.layout, pool)
            for group_id, group in enumerate(self.config.groups)
        )

    def clone(self) -> Self:
        """A policy that goes on from here by itself."""
        twin = copy(self)
        twin.returns = Returns(self.returns.kept)
        twin._build(self.pool.clone(), self.groups)
        return twin

    def memory(self) -> Hashable:
        """Everything that later answers may depend on."""
        groups = tuple(group.memory() for group in self.groups)
        return self.pool.memory(), groups, self.returns.kept

    def predict(self, state: State, action: Action) -> Answer | None:
        match action:
            case Lookup():
                return self.finder.hit(state.find(action.request))
            case Allocate():
                return self._allocate(state, action)
            case Issue():
                self._step_begins()
            case CompleteStep():
                return self._give_back(*self.returns.step_completed(action.step))
            case Publish():
                self._publish(state.find(action.request), action.tokens)
            case Trim():
                return self._trim(state, state.find(action.request))
            case Release():
                return self._release(state, state.find(action.request))
            case CompleteStore() | CompleteLoad():
                return self._transfer_completed(state, action)
            case Forget():
                return self._forget(action)
            case Submit():
                self.pool.names.submit(state.root, action)
            case Store():
                pass
        return None

    def snapshot(self) -> Snapshot:
        return self.pool.snapshot()

    def _tables_of(self, request: int) -> Tables:
        return tuple([tuple(group.table(request)) for group in self.groups])

    # Allocate

    def _allocate(self, state: State, action: Allocate) -> Answer:
        request, ends = state.find(action.request), action.segments(state)
        if "restores last token" not in self.corrections:
            ends = ends._replace(restart=ends.total)
        hit = action.tables_before(state) if request.status != "running" else None
        if not self._fits(request, ends, hit, action):
            return Refused(self._tables_of(request.id))
        try:
            new, copies = self._take(request, ends, hit)
        except PoolExhausted as error:
            return Raised(f"ValueError: {error}")
        if not action.unordered:
            self._publish(request, min(ends.target, request.known))
        return Granted(self._tables_of(request.id), new, copies)

    def _fits(self, request: Request, ends: Segments, hit: Tables | None, action: Allocate) -> bool:
        """Also gives back what has left the window, whether or not the rest fits."""
        hits: Tables | tuple[None, ...] = (None,) * len(self.groups) if hit is None else hit
        each = list(zip(self.groups, hits, strict=True))
        if action.whole_sequence:
            needed = sum([group.needed_for_whole(request, ends, own) for group, own in each])
            if needed > len(self.pool.free_order):
                return False
        for group in self.groups:
            group.trim(request.id, ends.processed if self.release.trims_processed else ends.total)
        needed = sum([group.needed(request, ends, own) for group, own in each])
        return needed + action.headroom <= len(self.pool.free_order)

    def _take(
        self, request: Request, ends: Segments, hit: Tables | None
    ) -> tuple[Tables, tuple[Copy, ...]]:
        """New blocks by group, and the copies made."""
        if hit is not None and (any(hit) or ends.total > ends.local):
            self._adopt(request.id, ends, hit)
        new, copies = [], []
        for group in self.groups:
            before = len(group.copies)
            new.append(tuple(group.grow(request, ends)))
            copies += group.copies[before:]
        return tuple(new), tuple(copies)

    def _adopt(self, request_id: int, ends: Segments, hit: Tables) -> None:
        """Hold all groups' hits first, then take the external tokens' blocks."""
        external = ends.total > ends.local
        for group, own in zip(self.groups, hit, strict=True):
            group.adopt(request_id, ends, own)
            if external and not self.release.holds_all_hits_first:
                group.take_external(request_id, ends)
        if external and self.release.holds_all_hits_first:
            for group in self.groups:
                group.take_external(request_id, ends)

    def _publish(self, request: Request, tokens: int) -> None:
        if self.config.caching:
            for group in self.groups:
                group.publish(request, tokens)

    def _step_begins(self) -> None:
        self.pool.free([block for group in self.groups for block in group.step_begins()])

    # Giving back

    def _trim(self, state: State, request: Request) -> Trimmed:
        processed = processed_tokens(state, request)
        for group in self.groups:
            group.trim(request.id, processed)
        return Trimmed(self._tables_of(request.id))

    def _transfer_completed(
        self, state: State, action: CompleteStore | CompleteLoad
    ) -> Returned | None:
        orphan = transfer_of(state, action.request, inbound=True) is not None
        if isinstance(action, CompleteStore) or orphan:
            return self._give_back(*self.returns.transfer_completed(action.request))
        if action.tokens == 0:
            self._free(action.request)
        return None

    def _release(self, state: State, request: Request) -> Returned:
        if "withdraws unissued" in self.corrections:
            for block, _, _, _ in unissued_cells(state, request):
                self.pool.forget(block)
        kept = waiting(state, request)
        if kept.waits:
            blocks = [block for group in self.groups for block in group.leave(request.id)]
            self.returns.keep(kept._replace(blocks=tuple(blocks)))
        else:
            self._free(request.id)
        return self._give_back()

    def _free(self, request_id: int) -> None:
        """Group by group, each from its end: longer prefixes are reused before shorter ones."""
        for group in self.groups:
            self.pool.free(reversed(group.leave(request_id)))

    def _give_back(self, *batches: tuple[int, ...]) -> Returned:
        for batch in batches:
            self.pool.free(batch)
        return Returned(self.returns.blocks())

    def _forget(self, action: Forget) -> Forgotten:
        if action.blocks is not None:
            for block in action.blocks:
                self.pool.forget(block)
            return Forgotten(True)
        if any(self.pool.references):
            return Forgotten(False)
        self.pool.forget_everything()
        return Forgotten(True)
