"""Faults around loads and stores."""

from __future__ import annotations

from typing import Any

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.scheduler import Found, Scheduler, Tracked
from kvproof_stateful.faults.fault import VLLM, seeded


@seeded("unordered-load-findable-before-arrival", "I6")
class UnorderedLoadFindableBeforeArrival(KVCacheManager):
    """What an unordered load will bring is published when the load starts."""

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        return super().allocate_slots(*arguments, **{**options, "delay_cache_blocks": False})


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


@seeded("load-found-at-admission", "I6")
class LoadsAreFoundBeforeTheyArrive(Scheduler):
    """What an unordered load is to bring is findable from its beginning."""

    def _allocate_first(self, tracked: Tracked, found: Found, num_tokens: int) -> BlockIds | None:
        return super()._allocate_first(tracked, found._replace(is_unordered=False), num_tokens)
