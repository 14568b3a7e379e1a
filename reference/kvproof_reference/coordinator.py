"""All groups together: one pool, one boundary that every group can resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

from kvproof_reference.block_pool import NULL_BLOCK, BlockPool
from kvproof_reference.layout import Layout
from kvproof_reference.request import KeyInputs, KeyOf, Request, all_inputs
from kvproof_reference.single_type_manager import Extent, SingleTypeManager
from kvproof_spec.config import Kind, ceil_div

BlockIds = tuple[tuple[int, ...], ...]  # indexed by group, then by position in the table


class Coordinator(ABC):
    """Carries each question and each change to every group."""

    __slots__ = ("hash_block_size", "key_inputs", "key_of", "layout", "managers", "pool")

    def __init__(
        self,
        layout: Layout,
        pool: BlockPool,
        manager_classes: Mapping[Kind, type[SingleTypeManager]],
        key_of: KeyOf,
        key_inputs: KeyInputs = all_inputs,
        clears: bool = False,
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.managers = tuple(
            manager_classes[group.kind](layout, index, pool, clears)
            for index, group in enumerate(layout.groups)
        )
        self.key_of = key_of
        self.key_inputs = key_inputs
        self.hash_block_size = layout.hash_block_size

    def block_ids(self, request_id: int) -> BlockIds:
        return tuple(tuple(manager.table(request_id)) for manager in self.managers)

    def block_hashes(self, request: Request) -> list[bytes]:
        return request.block_hashes(self.hash_block_size, self.key_of, self.key_inputs)

    @abstractmethod
    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        """Hit blocks of every group, and the hit's length in tokens."""

    def blocks_needed(
        self,
        request_id: int,
        extent: Extent,
        hits: Sequence[Sequence[int]],
        num_computed_tokens: int,
        num_local_tokens: int,
    ) -> int:
        """Free blocks it takes to give every group its tokens of `extent`."""
        needed = 0
        for manager, hits_of in zip(self.managers, hits, strict=True):
            wanted = ceil_div(extent[manager.follows], manager.block_size)
            needed += manager.blocks_needed(
                request_id, wanted, hits_of, num_computed_tokens, num_local_tokens
            )
        return needed

    def blocks_needed_for_whole(
        self,
        request_id: int,
        extent: Extent,
        hits: Sequence[Sequence[int]],
        num_computed_tokens: int,
        num_local_tokens: int,
    ) -> int:
        """The same for a sequence that is computed piece by piece: windows slide meanwhile."""
        needed = 0
        for manager, hits_of in zip(self.managers, hits, strict=True):
            wanted = ceil_div(extent[manager.follows], manager.block_size)
            needed += manager.blocks_needed_for_whole(
                request_id, wanted, hits_of, num_computed_tokens, num_local_tokens
            )
        return needed

    def allocate_computed(
        self,
        request_id: int,
        hits: Sequence[Sequence[int]],
        num_local_tokens: int,
        num_computed_tokens: int,
        restart: int,
        unordered: bool,
    ) -> None:
        """Hold the hits of every group, and only then take blocks for external tokens.

        A block taken for one group could otherwise be the hit of a later one.  Nothing is
        held for tokens that a step which starts at `restart` does not read.
        """
        if any(request_id in manager.num_published for manager in self.managers):
            return
        for manager, hits_of in zip(self.managers, hits, strict=True):
            manager.adopt_hits(request_id, hits_of, restart)
        if num_computed_tokens > num_local_tokens:
            for manager in self.managers:
                manager.allocate_external(request_id, num_computed_tokens, unordered)
        if self.layout.partial_boundary is not None:
            for manager, hits_of in zip(self.managers, hits, strict=True):
                manager.note_hit_tail(request_id, hits_of, restart, num_local_tokens)

    def allocate_new(self, request_id: int, extent: Extent) -> BlockIds:
        return tuple(
            tuple(manager.allocate_new(request_id, extent[manager.follows]))
            for manager in self.managers
        )

    def idle_until(self, request_id: int) -> int:
        """Up to so many tokens an allocation for a running request has nothing to do."""
        return min([manager.idle_until(request_id) for manager in self.managers])

    def publishable_tokens(self, manager: SingleTypeManager, num_tokens: int) -> int:
        """The part of the first `num_tokens` tokens that a hit can need in a group."""
        return num_tokens

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        block_hashes = self.block_hashes(request)
        for manager in self.managers:
            publishable = self.publishable_tokens(manager, num_tokens)
            manager.cache_blocks(request, block_hashes, publishable)

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, processed_tokens)

    def withdraw(self, request_id: int, num_issued_tokens: int) -> None:
        """Forget the keys of blocks that reach beyond the issued tokens."""
        for manager in self.managers:
            self.pool.evict(manager.table(request_id)[num_issued_tokens // manager.block_size :])

    def pop_blocks(self, request_id: int) -> list[int]:
        """Forget the request; its blocks group after group, still counted as held."""
        return [block for manager in self.managers for block in manager.pop_blocks(request_id)]

    def free(self, request_id: int) -> None:
        for manager in self.managers:
            manager.free(request_id)

    def new_step_starts(self) -> None:
        for manager in self.managers:
            manager.new_step_starts()

    def take_new_block_ids(self) -> tuple[int, ...]:
        taken: list[int] = []
        for manager in self.managers:
            if manager.new_block_ids is not None:
                taken += manager.new_block_ids
                manager.new_block_ids = []
        return tuple(taken)

    def record_blocks_for_zeroing(self, request_id: int, start_token: int) -> None:
        for manager in self.managers:
            if manager.new_block_ids is not None:
                first = start_token // manager.block_size
                manager.new_block_ids += manager.table(request_id)[first:]

    def clone(self) -> Self:
        twin = copy(self)
        twin.pool = self.pool.clone()
        twin.managers = tuple(manager.clone(twin.pool) for manager in self.managers)
        return twin


class NoCacheCoordinator(Coordinator):
    """Prefix caching is off: nothing is published, nothing is found."""

    __slots__ = ()

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        return ((),) * len(self.managers), 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        return


class SingleGroupCoordinator(Coordinator):
    """One group, which has nobody to agree with."""

    __slots__ = ()

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        (manager,) = self.managers
        hashes = self.block_hashes(request)
        hits, tokens = manager.find_longest_hit(hashes, max_tokens, manager.drops)
        return (tuple(hits),), tokens


class HybridCoordinator(Coordinator):
    """Several groups, which must agree on one boundary."""

    __slots__ = ("common_block_size", "families", "is_settled_in_one_round", "partial_hits")

    def __init__(
        self,
        layout: Layout,
        pool: BlockPool,
        manager_classes: Mapping[Kind, type[SingleTypeManager]],
        key_of: KeyOf,
        key_inputs: KeyInputs = all_inputs,
        clears: bool = False,
    ) -> None:
        super().__init__(layout, pool, manager_classes, key_of, key_inputs, clears)
        self.common_block_size = layout.common_block_size
        self.partial_hits = layout.partial_hits
        families = dict.fromkeys(layout.alike(index) for index in range(len(layout.groups)))
        # Groups that are looked up as one, by index; the downward closed first: they
        # accept whatever is shorter, so they are asked once.
        self.families = sorted(families, key=lambda f: not self.managers[f[0]].downward_closed)
        self.is_settled_in_one_round = (
            len(self.families) == 2 and self.managers[self.families[0][0]].downward_closed
        )

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        """Lower the boundary family after family, until every group can resume from it."""
        search = Search(self, self.block_hashes(request))
        boundary, settled = max_tokens, False
        while not settled:
            lowered = search.lower(boundary)
            settled = lowered >= boundary or self.is_settled_in_one_round
            boundary = min(boundary, lowered)
        return search.hits_up_to(boundary), boundary

    def find_jointly(
        self, family: Sequence[int], block_hashes: Sequence[bytes], max_tokens: int, drop: bool
    ) -> tuple[list[list[int]], int]:
        """The longest hit that all groups of a family have, and their tables for it."""
        found = {NULL_BLOCK: [NULL_BLOCK] * len(family)}  # by the first group's block

        def find(_: int, digest: bytes) -> int | None:
            blocks = [self.pool.cached_block(index, digest) for index in family]
            there = [block for block in blocks if block is not None]
            if len(there) < len(family):
                return None
            found[there[0]] = there
            return there[0]

        first = self.managers[family[0]]
        hits, tokens = first.find_longest_hit(block_hashes, max_tokens, drop, find)
        return [[found[block][number] for block in hits] for number in range(len(family))], tokens

    def publishable_tokens(self, manager: SingleTypeManager, num_tokens: int) -> int:
        """Up to the last boundary, and what is dropped beyond it."""
        if self.partial_hits:
            return num_tokens
        publishable = num_tokens - num_tokens % self.common_block_size
        if manager.drops and publishable:
            return min(num_tokens, publishable + manager.block_size)
        return publishable


class Search:
    """One search for a boundary: what was found, and what need not be asked again."""

    __slots__ = ("block_hashes", "closed", "coordinator", "dropped", "hits")

    def __init__(self, coordinator: HybridCoordinator, block_hashes: Sequence[bytes]) -> None:
        self.coordinator = coordinator
        self.block_hashes = block_hashes
        self.hits: list[list[int]] = [[] for _ in coordinator.managers]
        self.closed: dict[tuple[int, ...], int] = {}  # hits of downward closed families, in tokens
        self.dropped: set[tuple[int, ...]] = set()  # families that found an end to drop

    def lower(self, boundary: int) -> int:
        """The boundary, or a lower one, after every family was asked."""
        for family in self.coordinator.families:
            if family in self.closed:
                boundary = min(boundary, self.closed[family])
            else:
                boundary = self.ask(family, boundary)
        return boundary

    def ask(self, family: tuple[int, ...], boundary: int) -> int:
        """What a family can resume from; it drops an end once for each boundary."""
        first = self.coordinator.managers[family[0]]
        drop = first.drops and family not in self.dropped
        limit = self.with_dropped(first, boundary) if drop else boundary
        if len(family) == 1:
            found, tokens = first.find_longest_hit(self.block_hashes, limit, drop)
            self.hits[first.group_index] = found
        else:
            tables, tokens = self.coordinator.find_jointly(family, self.block_hashes, limit, drop)
            for group_index, table in zip(family, tables, strict=True):
                self.hits[group_index] = table
        if drop:
            self.dropped.add(family)
        elif tokens < boundary:
            self.dropped.clear()
        if first.downward_closed:
            self.closed[family] = tokens
        return tokens

    def with_dropped(self, manager: SingleTypeManager, boundary: int) -> int:
        """How far a group may look for an end that is dropped."""
        known = len(self.block_hashes) * manager.hash_block_size
        return min(boundary + manager.dropped_tokens(), known)

    def hits_up_to(self, boundary: int) -> BlockIds:
        managers = self.coordinator.managers
        return tuple(
            tuple(hits[: manager.group.blocks_for(boundary)])
            for hits, manager in zip(self.hits, managers, strict=True)
        )
