"""Faults of what is announced."""

from __future__ import annotations

from collections.abc import Iterable

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.events import KVCacheEvent
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_stateful.faults.fault import VLLM, seeded


@seeded("each-copy-announced-as-removed", "R10", f"{VLLM}/issues/55092")
class EachCopyIsAnnouncedAsRemoved(BlockPool):
    """A key's removal is announced with any of its blocks, as by vLLM (#55092)."""

    def evict(self, blocks: Iterable[int]) -> None:
        lost = list(blocks)
        for block in lost if self.events is not None else ():
            for key in self.keys.get(block, ()):
                if len(self.index[key]) > 1 and self.events is not None:
                    self.announce_removed(self.events, key)
        super().evict(lost)


@seeded("announced-too-late", "R10")
class AnnouncesTooLate(KVCacheManager):
    """What happened is announced when the next thing has."""

    def take_events(self) -> list[KVCacheEvent]:
        late: list[KVCacheEvent] = getattr(self, "late", [])
        self.late = super().take_events()
        return late
