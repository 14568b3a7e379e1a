"""The manager: what a scheduler asks of the paged KV cache.

Names and choices are those of vLLM 0.32.  A request's tokens form five segments:

    | computed | local hit | external | new | lookahead |

Hits are held, external and new tokens get blocks to be written, lookahead tokens get
blocks that a rejected draft may leave unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import ClassVar, Self

from kvproof_reference.block_pool import BlockPool, Copy
from kvproof_reference.coordinator import (
    BlockIds,
    Coordinator,
    HybridCoordinator,
    NoCacheCoordinator,
    SingleGroupCoordinator,
)
from kvproof_reference.events import KVCacheEvent
from kvproof_reference.layout import Layout
from kvproof_reference.request import Request, whole_digest
from kvproof_reference.returns import DeferredReturns
from kvproof_reference.single_type_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    SingleTypeManager,
    SlidingWindowManager,
)
from kvproof_reference.state_manager import StateManager
from kvproof_spec.config import Group, Kind
from kvproof_spec.prefix import Inputs


class KVCacheManager:
    """Block tables of all requests in all groups, over one pool of `num_blocks` blocks.

    `num_blocks` counts the null block.  The class attributes and static methods name
    the parts, which a subclass may exchange.
    """

    block_pool_class: ClassVar[type[BlockPool]] = BlockPool
    manager_classes: ClassVar[Mapping[Kind, type[SingleTypeManager]]] = {
        "full": FullAttentionManager,
        "sliding": SlidingWindowManager,
        "chunked": ChunkedLocalAttentionManager,
        "state": StateManager,
        "cross": CrossAttentionManager,
    }

    __slots__ = (
        "_deferred",
        "_idle_until",
        "_no_hits",
        "block_pool",
        "coordinator",
        "max_model_len",
    )

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        *,
        max_model_len: int,
        enable_caching: bool = True,
        max_in_flight_tokens: int = 8192,
        partial_boundary: int | None = None,
        enable_kv_cache_events: bool = False,
        clears: bool = False,
    ) -> None:
        if enable_caching and not all(group.reused for group in groups):
            raise ValueError("cross attention needs prefix caching off")
        layout = Layout(tuple(groups), max_model_len, max_in_flight_tokens, partial_boundary)
        self.block_pool = self.block_pool_class(num_blocks, enable_caching, enable_kv_cache_events)
        self.coordinator = self.coordinator_class(layout, enable_caching)(
            layout,
            self.block_pool,
            self.manager_classes,
            self.key_of,
            self.key_inputs,
            clears,
        )
        self.max_model_len = max_model_len
        self._no_hits: BlockIds = ((),) * len(groups)
        self._deferred = DeferredReturns()
        self._idle_until: dict[int, int] = {}  # tokens, by running request

    @staticmethod
    def coordinator_class(layout: Layout, enable_caching: bool) -> type[Coordinator]:
        if not enable_caching:
            return NoCacheCoordinator
        is_simple = len(layout.groups) == 1 and not layout.partial_hits
        return SingleGroupCoordinator if is_simple else HybridCoordinator

    key_of = staticmethod(whole_digest)

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        """What of a request's inputs, beside its tokens, enters its keys."""
        return inputs

    def get_block_ids(self, request_id: int) -> BlockIds:
        return self.coordinator.block_ids(request_id)

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]:
        """The longest cached prefix: its blocks per group and its length in tokens.

        Nothing is held yet: the very next `allocate_slots` must use it.
        """
        return self.coordinator.find_longest_hit(request, self.longest_useful_hit(request))

    def longest_useful_hit(self, request: Request) -> int:
        """At least one token must be computed, or there is nothing to sample from."""
        return request.num_tokens - 1

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Sequence[Sequence[int]] | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> BlockIds | None:
        """Blocks for the next tokens: the new ones per group, or None if they do not fit.

        Refused, it has changed nothing, except that blocks which left the window were
        given back.  `reserved_blocks` must stay free; `full_sequence_must_fit` asks in
        addition that all known tokens would fit.
        """
        if num_new_tokens + num_new_computed_tokens + num_external_computed_tokens == 0:
            raise ValueError(f"request {request.request_id}: no tokens to allocate for")
        request_id = request.request_id
        if new_computed_blocks is None and not (num_external_computed_tokens or reserved_blocks):
            end = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if end <= self._idle_until.get(request_id, 0):
                return self._no_hits
        hits = self._no_hits if new_computed_blocks is None else new_computed_blocks
        local = request.num_computed_tokens + num_new_computed_tokens
        uncapped = local + num_external_computed_tokens
        computed = min(uncapped, self.max_model_len)
        end = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)

        extent = (end, computed + num_new_tokens, num_encoder_tokens)
        restart = self.restart_tokens(request, uncapped, num_external_computed_tokens)
        if full_sequence_must_fit and not self.whole_sequence_fits(
            request, hits, restart, local, num_encoder_tokens
        ):
            return None
        self.remove_skipped_blocks(request_id, self.processed_tokens(request, computed))
        needed = self.coordinator.blocks_needed(request_id, extent, hits, restart, local)
        if needed + reserved_blocks > self.block_pool.get_num_free_blocks():
            return None

        if num_external_computed_tokens > 0 or any(hits):
            self.coordinator.allocate_computed(
                request_id, hits, local, uncapped, restart, delay_cache_blocks
            )
        new_blocks = self.coordinator.allocate_new(request_id, extent)
        if not delay_cache_blocks:
            self.cache_blocks(request, self.certain_tokens(request, computed + num_new_tokens))
        self._idle_until[request_id] = self.coordinator.idle_until(request_id)
        return new_blocks

    def restart_tokens(self, request: Request, num_computed_tokens: int, num_external: int) -> int:
        """Where the next step starts: a load of every known token leaves the last to compute.

        vLLM 0.32 keeps the window of the token after it instead.
        """
        if num_external == 0:
            return num_computed_tokens
        return min(num_computed_tokens, request.num_tokens - 1)

    def whole_sequence_fits(
        self,
        request: Request,
        hits: Sequence[Sequence[int]],
        num_computed_tokens: int,
        num_local_tokens: int,
        num_encoder_tokens: int,
    ) -> bool:
        num_tokens = min(request.num_tokens, self.max_model_len)
        needed = self.coordinator.blocks_needed_for_whole(
            request.request_id,
            (num_tokens, num_tokens, num_encoder_tokens),
            hits,
            num_computed_tokens,
            num_local_tokens,
        )
        return needed <= self.block_pool.get_num_free_blocks()

    def processed_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens whose steps are done; a step in flight still reads the window before it."""
        return max(0, num_computed_tokens - request.num_in_flight_tokens)

    def certain_tokens(self, request: Request, num_tokens: int) -> int:
        """Drafts may be rejected: only known tokens are published."""
        return min(num_tokens, request.num_tokens)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the full blocks under the first `num_computed_tokens` tokens."""
        self.coordinator.cache_blocks(request, num_computed_tokens)

    def remove_skipped_blocks(self, request_id: int, processed_tokens: int) -> None:
        """Give back blocks that left the window, `processed_tokens` tokens being done."""
        self.coordinator.remove_skipped_blocks(request_id, processed_tokens)

    def withdraw(self, request: Request, num_issued_tokens: int) -> None:
        """Unpublish what no step will compute; for a request freed before its step is issued.

        vLLM 0.32 has no such call.
        """
        self.coordinator.withdraw(request.request_id, num_issued_tokens)

    def free(
        self, request: Request, in_use_until: int | None = None, until_stored: bool = False
    ) -> None:
        """Release the request, be it finished or preempted.

        With `in_use_until` its blocks stay referenced until that step has completed, with
        `until_stored` also until its store has.
        """
        self._idle_until.pop(request.request_id, None)
        if in_use_until is None and not until_stored:
            self.coordinator.free(request.request_id)
        else:
            blocks = self.coordinator.pop_blocks(request.request_id)
            self._deferred.keep(request.request_id, blocks, in_use_until, until_stored)

    def step_completed(self, step_id: int) -> None:
        """Free what was in use until this step or an earlier one."""
        self.return_deferred(self._deferred.step_completed(step_id))

    def store_completed(self, request_id: int) -> None:
        """Free what a store has read, unless a step still uses it."""
        self.return_deferred(self._deferred.store_completed(request_id))

    def return_deferred(self, releases: Iterable[Sequence[int]]) -> None:
        """One release is one batch, so the last group's blocks go before the first group's."""
        for blocks in releases:
            self.block_pool.free_blocks(reversed(blocks))

    def deferred_blocks(self) -> tuple[int, ...]:
        """Blocks whose return is deferred, once for each reference."""
        return self._deferred.blocks()

    def new_step_starts(self) -> None:
        """The states of the last step are there, and may be hit."""
        self.coordinator.new_step_starts()

    @property
    def pending_copies(self) -> tuple[Copy, ...]:
        """The copies that the next step has to make first, the last made last."""
        return tuple(self.block_pool.copies)

    def take_block_copies(self, in_use_until: int | None = None) -> tuple[Copy, ...]:
        """Hand the pending copies, group after group, to the next step.

        They no longer hold their blocks, or with `in_use_until` do so until that step has
        completed.
        """
        if in_use_until is None:
            return self.block_pool.take_copies()
        copies = self.block_pool.take_copies(still_held=True)
        for copy in copies:
            self._deferred.keep_copy((copy.source, copy.destination), in_use_until)
        return copies

    def take_new_block_ids(self) -> tuple[int, ...]:
        """Blocks handed out since the last call, to be cleared; none where that is not done."""
        return self.coordinator.take_new_block_ids()

    def record_blocks_for_zeroing(self, request_id: int, start_token: int) -> None:
        """Clear the request's blocks from `start_token` on: a load has left them unwritten."""
        self.coordinator.record_blocks_for_zeroing(request_id, start_token)

    def take_events(self) -> list[KVCacheEvent]:
        """What became findable or ceased to be since the last call; [] if that is not recorded."""
        return self.block_pool.take_events()

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable; whoever holds them keeps them."""
        self.block_pool.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while a block is held."""
        return self.block_pool.reset()

    def clone(self) -> Self:
        """An independent copy; requests are not part of it."""
        twin = copy(self)
        twin.coordinator = self.coordinator.clone()
        twin.block_pool = twin.coordinator.pool
        twin._deferred = self._deferred.clone()
        twin._idle_until = self._idle_until.copy()
        return twin
