"""All groups together: one pool, one boundary that every group can resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.layout import Layout
from kvproof_reference.request import HashBlock, Request
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_spec.config import Kind

BlockIds = tuple[tuple[int, ...], ...]  # indexed by group, then by position in the table


class Coordinator(ABC):
    """Carries each question and each change to every group."""

    __slots__ = ("common_block_size", "hash_block", "hash_block_size", "managers", "pool")

    def __init__(
        self,
        layout: Layout,
        pool: BlockPool,
        manager_classes: Mapping[Kind, type[SingleTypeManager]],
        hash_block: HashBlock,
    ) -> None:
        self.pool = pool
        self.managers = tuple(
            manager_classes[group.kind](layout, index, pool)
            for index, group in enumerate(layout.groups)
        )
        self.hash_block = hash_block
        self.hash_block_size = layout.hash_block_size
        self.common_block_size = layout.common_block_size

    def block_ids(self, request_id: int) -> BlockIds:
        return tuple(tuple(manager.table(request_id)) for manager in self.managers)

    def block_hashes(self, request: Request) -> list[bytes]:
        return request.block_hashes(self.hash_block_size, self.hash_block)

    @abstractmethod
    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        """Hit blocks of every group, and the hit's length in tokens."""

    def blocks_needed(
        self,
        request_id: int,
        num_tokens: int,
        hits: Sequence[Sequence[int]],
        num_computed_tokens: int,
    ) -> int:
        """Free blocks it takes to give every group `num_tokens` tokens."""
        needed = 0
        for manager, hits_of in zip(self.managers, hits, strict=True):
            wanted = manager.group.blocks_for(num_tokens)
            needed += manager.blocks_needed(request_id, wanted, hits_of, num_computed_tokens)
        return needed

    def blocks_needed_for_whole(
        self,
        request_id: int,
        num_tokens: int,
        hits: Sequence[Sequence[int]],
        num_computed_tokens: int,
    ) -> int:
        """The same for a sequence that is computed piece by piece: windows slide meanwhile."""
        needed = 0
        for manager, hits_of in zip(self.managers, hits, strict=True):
            wanted = min(manager.group.blocks_for(num_tokens), manager.most_blocks_held())
            needed += manager.blocks_needed(request_id, wanted, hits_of, num_computed_tokens)
        return needed

    def allocate_computed(
        self,
        request_id: int,
        hits: Sequence[Sequence[int]],
        num_computed_tokens: int,
        restart: int,
    ) -> None:
        """Hold the hits of every group, and only then take blocks for external tokens.

        A block taken for one group could otherwise be the hit of a later one.  Nothing is
        held for tokens that a step which starts at `restart` does not read.
        """
        if any(request_id in manager.num_published for manager in self.managers):
            return
        for manager, hits_of in zip(self.managers, hits, strict=True):
            manager.adopt_hits(request_id, hits_of, restart)
        for manager in self.managers:
            manager.allocate_new(request_id, num_computed_tokens)

    def allocate_new(self, request_id: int, num_tokens: int) -> BlockIds:
        return tuple(
            tuple(manager.allocate_new(request_id, num_tokens)) for manager in self.managers
        )

    def publishable_tokens(self, num_tokens: int) -> int:
        """The part of the first `num_tokens` tokens that a hit can end in."""
        return num_tokens

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        num_tokens = self.publishable_tokens(num_tokens)
        block_hashes = self.block_hashes(request)
        for manager in self.managers:
            manager.cache_blocks(request, block_hashes, num_tokens)

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
        hits = manager.find_longest_hit(self.block_hashes(request), max_tokens)
        return (tuple(hits),), len(hits) * manager.block_size


class HybridCoordinator(Coordinator):
    """Several groups, which must agree on one boundary."""

    __slots__ = ()

    def find_longest_hit(self, request: Request, max_tokens: int) -> tuple[BlockIds, int]:
        """Lower the boundary group after group, until every group can resume from it.

        Downward closed groups are asked once, first: they accept whatever is shorter.
        """
        block_hashes = self.block_hashes(request)
        hits: list[list[int]] = [[] for _ in self.managers]

        def lower(boundary: int, *, downward_closed: bool) -> int:
            for manager in self.managers:
                if manager.downward_closed is downward_closed:
                    found = manager.find_longest_hit(block_hashes, boundary)
                    hits[manager.group_index] = found
                    boundary = len(found) * manager.block_size
            return boundary

        boundary = lower(max_tokens, downward_closed=True)
        while (lowered := lower(boundary, downward_closed=False)) != boundary:
            boundary = lowered
        agreed = (
            tuple(found[: boundary // manager.block_size])
            for found, manager in zip(hits, self.managers, strict=True)
        )
        return tuple(agreed), boundary

    def publishable_tokens(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.common_block_size
