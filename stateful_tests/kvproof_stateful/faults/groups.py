"""Faults of the groups: windows, chunks, states, and the boundary that all can resume from."""

from __future__ import annotations

from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_stateful.faults.fault import VLLM, seeded


@seeded("window-block-returned-in-flight", "R7", f"{VLLM}/issues/47728")
class WindowBlockReturnedInFlight(KVCacheManager):
    """The window slides with what is scheduled; a step in flight still reads left of it."""

    def processed_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return num_computed_tokens
