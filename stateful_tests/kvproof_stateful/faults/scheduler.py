"""Faults of the scheduler, and of what it sends to the worker."""

from __future__ import annotations

from dataclasses import replace

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.scheduler import Found, Scheduler, Tracked
from kvproof_reference.steps import Row, SchedulerOutput
from kvproof_stateful.faults.fault import VLLM, seeded
from kvproof_stateful.targets.plain_engine import PlainEngineTarget


@seeded("hit-blocks-not-sent", "I5", f"{VLLM}/issues/42273")
class SendsOnlyNewBlocksOnAdmission(Scheduler):
    """A request that starts from a hit is sent its new blocks, and not those of the hit."""

    def _whole_table(self, tracked: Tracked, new_blocks: BlockIds) -> BlockIds:
        return new_blocks


@seeded("resumed-row-appended", "I5", "https://github.com/tenstorrent/vllm-tt-plugin/issues/103")
class ResumedRowIsAppended(PlainEngineTarget):
    """The worker appends the table of a resumed request to the row that it had before."""

    def _receive(self, row: Row) -> None:
        if row.kind == "resumed":
            row = replace(row, kind="running")
        super()._receive(row)


@seeded("stale-output-advances-computed", "R9")
class StaleOutputAdvancesComputed(Scheduler):
    """A step that returns for a preempted request counts its tokens as computed."""

    def _stale_output(self, tracked: Tracked, row: Row) -> None:
        super()._stale_output(tracked, row)
        tracked.request.num_computed_tokens += row.num_scheduled_tokens


@seeded("resumed-before-stale-output", "R9")
class ResumesBeforeItsStaleOutput(Scheduler):
    """A preempted request is admitted again in the same call, its last step in flight."""

    def _may_resume(self, tracked: Tracked) -> bool:
        return True

    def _may_admit(self, step: object) -> bool:
        return True


@seeded("promise-not-withdrawn", "I2")
class PromiseIsNotWithdrawn(KVCacheManager):
    """What a request has been given and never computed is found after it has left."""

    def withdraw(self, request: Request, num_issued_tokens: int) -> None:
        """Let it be found."""


@seeded("nothing-counts-as-in-flight", "R7", f"{VLLM}/issues/47728")
class NothingCountsAsInFlight(Scheduler):
    """The window slides with what is scheduled; a step in flight still reads left of it."""

    def _issued(self, output: SchedulerOutput) -> None:
        super()._issued(output)
        for row in output.rows:
            self.requests[row.request_id].request.num_in_flight_tokens = 0

    def _take(self, tracked: Tracked, row: Row, token: int | None) -> None:
        tracked.request.num_in_flight_tokens = row.num_scheduled_tokens
        super()._take(tracked, row, token)


@seeded("freed-while-in-flight", "I4", f"{VLLM}/issues/45357", strict=True)
class ReturnsAreNotDeferred(Scheduler):
    """Blocks of a request that leaves come back at once, its steps in flight or not."""

    def _free(self, tracked: Tracked, stored: bool = False) -> None:
        self.manager.free(tracked.request, until_stored=stored)


@seeded("second-request-waits-for-ever", "R11")
class SecondRequestWaitsForEver(Scheduler):
    """Nothing is wrong with request 1, and its turn never comes."""

    def _first_waiting(self) -> Tracked | None:
        first = super()._first_waiting()
        return None if first is not None and first.id == 1 else first


@seeded("preempted-request-is-lost", "R11")
class PreemptedRequestIsLost(Scheduler):
    """A request that is preempted with a step in flight is not queued when that returns."""

    def _stale_output(self, tracked: Tracked, row: Row) -> None:
        """Its token is taken, and it is forgotten."""


@seeded("findable-counts-as-used", "R12")
class WhatIsFindableCountsAsUsed(Scheduler):
    """Usage counts free blocks that still answer lookups."""

    def num_used_blocks(self) -> int:
        pool = self.manager.block_pool
        return super().num_used_blocks() + len(pool.keys.keys() & set(pool.free_order()))


@seeded("refused-admission-counts-as-hit", "R12")
class RefusedAdmissionsCountAsHits(Scheduler):
    """A lookup whose request then finds no room counts, each time."""

    def _allocate_first(self, tracked: Tracked, found: Found, num_tokens: int) -> BlockIds | None:
        blocks = super()._allocate_first(tracked, found, num_tokens)
        if blocks is None:
            self.stats.queries += tracked.request.num_tokens
            self.stats.hits += found.num_hit_tokens
        return blocks
