"""Faults around loads and stores."""

from __future__ import annotations

from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.scheduler import Found, Scheduler, Tracked
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_spec.actions import Allocate
from kvproof_spec.answers import Answer, Done, Granted
from kvproof_stateful.faults.fault import VLLM, seeded
from kvproof_stateful.targets.driven import Progress
from kvproof_stateful.targets.plain import PlainTarget


@seeded("unordered-load-findable-before-arrival", "I6", without=("I2",))
class UnorderedLoadFindableBeforeArrival(PlainTarget):
    """What an unordered load will bring is published when the load starts."""

    def allocate(self, progress: Progress, action: Allocate) -> Answer:
        answer = super().allocate(progress, action)
        if isinstance(answer, Granted) and action.unordered:
            loaded = progress.computed + progress.hit + action.external
            self.manager.cache_blocks(self.known[progress.id], loaded)
        return answer


@seeded("store-source-reused", "I4", f"{VLLM}/issues/46951")
class StoresFromFreeBlocks(Scheduler):
    """The blocks of a request that is being stored come back at once."""

    def _free(self, tracked: Tracked, stored: bool = False) -> None:
        super()._free(tracked, stored=False)


@seeded("load-destination-reused", "I4", f"{VLLM}/issues/32255")
class LoadsIntoFreeBlocks(Scheduler):
    """The blocks of a request that leaves while it loads come back at once."""

    def _abandon(self, tracked: Tracked) -> None:
        self.manager.free(tracked.request)


@seeded("load-found-at-admission", "I6", without=("I2",))
class LoadsAreFoundBeforeTheyArrive(Scheduler):
    """What an unordered load is to bring is findable from its beginning."""

    def _admit(self, tracked: Tracked, found: Found) -> None:
        super()._admit(tracked, found)
        self.manager.cache_blocks(tracked.request, found.num_tokens)


@seeded("failed-load-reported-as-done", "I2", "https://github.com/ai-dynamo/dynamo/issues/15079")
class FailedLoadReportedAsDone(PlainTarget):
    """What a load was to bring is found, though it has brought less."""

    def _complete_load(self, progress: Progress, tokens: int) -> Done:
        if tokens:
            self.manager.cache_blocks(self._request(progress), progress.computed)
        return super()._complete_load(progress, tokens)


@seeded("zeroing-races-load", "I4", f"{VLLM}/pull/48481")
class ZeroingRacesLoad(SingleTypeManager):
    """Blocks that an unordered load fills are cleared with the next step."""

    def allocate_external(self, request_id: int, num_tokens: int, unordered: bool) -> None:
        super().allocate_external(request_id, num_tokens, unordered=False)


@seeded("recycled-bytes-not-cleared", "I2", f"{VLLM}/issues/35219")
class RecycledBytesNotCleared(KVCacheManager):
    """Pages that must be zeroed when they change hands are not."""

    def take_new_block_ids(self) -> tuple[int, ...]:
        super().take_new_block_ids()
        return ()
