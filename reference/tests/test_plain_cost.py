"""What an operation costs does not depend on the size of the pool.

Counted in executed lines of the package, so that the clock plays no part; what runs
inside a built-in is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvproof_reference import KVCacheManager, Request
from kvproof_spec.config import Group


def lines_executed(operation: Callable[[], object]) -> int:
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return lines


def costs(num_blocks: int) -> dict[str, int]:
    manager = KVCacheManager(
        [Group("full", 4), Group("sliding", 4, 8)], num_blocks, max_model_len=256
    )
    request, other = Request(0, range(40)), Request(1, range(33))

    def adopt() -> None:
        hits, tokens = manager.get_computed_blocks(other)
        assert tokens == 32
        manager.allocate_slots(other, 1, tokens, hits)

    def release_deferred() -> None:
        manager.free(other, in_use_until=1)
        manager.step_completed(1)

    operations: dict[str, Callable[[], object]] = {
        "allocate": lambda: manager.allocate_slots(request, 40),
        "trim": lambda: manager.remove_skipped_blocks(0, 30),
        "hit": adopt,
        "free": lambda: manager.free(request),
        "deferred free": release_deferred,
        "evict": lambda: manager.evict_blocks([1, 2, 3]),
        "reset": manager.reset_prefix_cache,
    }
    return {name: lines_executed(operation) for name, operation in operations.items()}


def costs_with_states(num_blocks: int) -> dict[str, int]:
    manager = KVCacheManager(
        [Group("full", 4), Group("state", 4)],
        num_blocks,
        max_model_len=256,
        partial_boundary=2,
        enable_kv_cache_events=True,
        clears=True,
    )
    request, other = Request(0, range(7)), Request(1, range(9))

    def produce() -> None:
        assert manager.allocate_slots(request, 6)
        request.num_computed_tokens = 6
        assert manager.allocate_slots(request, 1)

    def adopt() -> None:
        manager.new_step_starts()
        hits, tokens = manager.get_computed_blocks(other)
        assert tokens == 6
        assert manager.allocate_slots(other, 3, tokens, hits)

    def release_stored() -> None:
        manager.free(other, in_use_until=1, until_stored=True)
        manager.step_completed(1)
        manager.store_completed(1)

    operations: dict[str, Callable[[], object]] = {
        "produce": produce,
        "hit": adopt,
        "copy": manager.take_block_copies,
        "clear": manager.take_new_block_ids,
        "stored free": release_stored,
        "events": manager.take_events,
    }
    return {name: lines_executed(operation) for name, operation in operations.items()}


def test_no_operation_scans_the_pool() -> None:
    assert costs(40) == costs(4000)
    assert costs_with_states(40) == costs_with_states(4000)
