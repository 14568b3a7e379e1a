"""Faults of what is announced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvproof_reference.block_pool import BlockPool, Key
from kvproof_reference.events import KVCacheEvent
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import SingleTypeManager
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


@seeded("silent-removal", "R10", "https://github.com/NVIDIA/TensorRT-LLM/issues/16335")
class SilentRemoval(BlockPool):
    """What is forgotten because its block is handed out again is not announced."""

    def announce_removed(self, events: list[KVCacheEvent], key: Key) -> None:
        """Say nothing."""


@seeded("reset-not-announced", "R10")
class ResetNotAnnounced(BlockPool):
    """All prefixes are forgotten, and nobody is told."""

    def reset(self) -> bool:
        before = list(self.events or ())
        done = super().reset()
        if self.events is not None:
            self.events = before
        return done


@seeded("end-inside-a-block-not-announced", "R10")
class EndInsideABlockNotAnnounced(SingleTypeManager):
    """A prefix that ends inside a block can be found and was not announced."""

    def publish_inside(
        self, request: Request, block_hashes: Sequence[bytes], block: int, num_hashes: int
    ) -> None:
        self.publish(block, block_hashes, num_hashes)


@seeded("unreported-parent", "R10", f"{VLLM}/issues/58119")
class UnreportedParent(SingleTypeManager):
    """A block that several digests go into names the last but one of them as its parent."""

    def announce(
        self,
        request: Request,
        block_hashes: Sequence[bytes],
        start: int,
        *rest: Any,
        **options: Any,
    ) -> None:
        stop, stored = rest
        super().announce(request, block_hashes, stop - 1, stop, stored)
