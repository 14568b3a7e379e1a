"""Faults of admission and allocation: what fits, and what is taken in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_reference.state_manager import StateManager
from kvproof_spec.actions import Allocate
from kvproof_spec.answers import Answer
from kvproof_stateful.faults.fault import NANO_VLLM, VLLM, seeded
from kvproof_stateful.targets.driven import Progress
from kvproof_stateful.targets.plain import PlainTarget


@seeded("touch-after-allocation", "R3", f"{VLLM}/pull/10507")
class TouchAfterAllocation(KVCacheManager):
    """Hits are held only after the new blocks were taken, for which they were free."""

    class Pool(BlockPool):
        late: tuple[int, ...] = ()

        def touch(self, blocks: Iterable[int]) -> None:
            self.late += tuple(blocks)

    block_pool_class = Pool

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        new, pool = super().allocate_slots(*arguments, **options), self.block_pool
        assert isinstance(pool, self.Pool)
        BlockPool.touch(pool, pool.late)
        pool.late = ()
        return new


@seeded("hits-held-group-by-group", "R3", f"{VLLM}/issues/33775")
class HitsHeldGroupByGroup(SingleTypeManager):
    """A group takes its external tokens' blocks before the next one holds its hits."""

    def adopt_hits(self, request_id: int, hits: Sequence[int], num_computed_tokens: int) -> None:
        super().adopt_hits(request_id, hits, num_computed_tokens)
        self.allocate_new(request_id, num_computed_tokens)


@seeded("reclaimable-hits-not-counted", "R2", f"{VLLM}/pull/11565")
class ReclaimableHitsNotCounted(SingleTypeManager):
    """Hits that are free count as room for new blocks, though they are about to be held."""

    def reclaimed_hits(self, hits: Sequence[int]) -> int:
        return 0


@seeded("hit-of-all-tokens", "R4", f"{NANO_VLLM}/issues/114")
class HitOfAllTokens(KVCacheManager):
    """A hit may cover every known token, which leaves nothing to compute."""

    def longest_useful_hit(self, request: Request) -> int:
        return request.num_tokens


@seeded("touch-before-capacity-check", "R1", f"{VLLM}/pull/11565")
class TouchBeforeCapacityCheck(KVCacheManager):
    """Hits are held before it is known whether the rest fits, and stay so if it does not."""

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        held = [block for table in arguments[3] or () for block in table]
        self.block_pool.touch(held)
        new = super().allocate_slots(*arguments, **options)
        if new is not None:
            self.block_pool.give_back(held)
        return new


@seeded("headroom-not-kept", "R2")
class HeadroomNotKept(KVCacheManager):
    """Blocks that were to stay free for running requests are given to a new one."""

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        return super().allocate_slots(*arguments, **{**options, "reserved_blocks": 0})


@seeded("null-block-counted-as-room", "R2", f"{VLLM}/issues/47272")
class NullBlockCountedAsRoom(KVCacheManager):
    """A sequence is admitted as one that fits as a whole when it is one block too long."""

    def whole_sequence_fits(self, *arguments: Any, **options: Any) -> bool:
        room = self.block_pool.get_num_free_blocks() + 1
        request, hits, restart, local, encoder = arguments
        tokens = min(request.num_tokens, self.max_model_len)
        extent = (tokens, tokens, encoder)
        needed = self.coordinator.blocks_needed_for_whole
        return needed(request.request_id, extent, hits, restart, local) <= room


@seeded("running-request-is-not-checked", "R2", f"{VLLM}/issues/41282")
class RunningRequestIsNotChecked(SingleTypeManager):
    """A running request's next blocks are taken without a look at what is free."""

    def blocks_needed(self, request_id: int, *arguments: Any, **options: Any) -> int:
        running = request_id in self.num_published
        return 0 if running else super().blocks_needed(request_id, *arguments, **options)


@seeded("lookahead-gets-no-blocks", "R2")
class LookaheadGetsNoBlocks(KVCacheManager):
    """The tokens that drafts are to be written to get no blocks."""

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        return super().allocate_slots(*arguments, **{**options, "num_lookahead_tokens": 0})


@seeded("state-takes-one-more", "R2", f"{VLLM}/issues/46892")
class StateTakesOneMore(StateManager):
    """After a load a state takes a block for the step as well, which it did not announce."""

    def blocks_taken_after_load(self, *arguments: Any, **options: Any) -> int:
        return 0


@seeded("drafts-published", "I2", f"{VLLM}/issues/41838", without=("R10",))
class DraftsPublished(PlainTarget):
    """A block that a draft fills is found before the draft is accepted."""

    def allocate(self, progress: Progress, action: Allocate) -> Answer:
        request = self.known[progress.id]
        self.known[progress.id] = drafted = request.clone()
        drafted.append_tokens(action.drafts)
        answer = super().allocate(progress, action)
        self.known[progress.id] = request
        return answer
