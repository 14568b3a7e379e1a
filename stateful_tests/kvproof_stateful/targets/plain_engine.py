"""A scheduler of our own over the plain manager, observed as vLLM's is.

One `Issue` is one schedule(), one `CompleteStep` one update_from_output(); everything else
the scheduler decides.  The worker's rows are made of what its output sends, and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import kvproof_stateful
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.scheduler import Row, Scheduler, SchedulerOutput
from kvproof_reference.worker import Worker
from kvproof_spec.actions import Action, CompleteStep, Issue, Release, Submit
from kvproof_spec.answers import (
    Answer,
    Done,
    Returned,
    Scheduled,
    ScheduledRow,
    Snapshot,
    Updated,
)
from kvproof_spec.config import Config
from kvproof_spec.pages import NULL_BLOCK, Tables
from kvproof_stateful.target import Hello, UnsupportedConfig

DEFAULT_MAX_TOKENS = 16


class PlainEngineTarget:
    """Observed: kvproof submits requests, returns sampled tokens, and aborts."""

    name: ClassVar[str] = "plain-engine"
    manager_class: ClassVar[type[KVCacheManager]] = KVCacheManager
    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def hello(self) -> Hello:
        return Hello(
            name=self.name,
            version=kvproof_stateful.__version__,
            features=frozenset(
                ["full", "sliding", "uncached", "preempt", "abort", "async", "worker"]
            ),
            claims=("I1", "I2", "I3", "I4", "I5", "I6", "R2", "R3", "R4", "R5", "R7", "R9"),
            observed=True,
        )

    def reset(self, config: Config) -> None:
        if config.scheduling is None:
            raise UnsupportedConfig(f"{self.name} schedules itself: the config needs a scheduling")
        self.config = config
        self.manager = self.manager_class(
            config.groups,
            config.num_blocks,
            max_model_len=config.max_model_len,
            enable_caching=config.caching,
            max_in_flight_tokens=config.max_in_flight_tokens,
        )
        self.scheduler = self.scheduler_class(
            self.manager,
            config.scheduling,
            max_model_len=config.max_model_len,
            defers_returns=config.defers_returns,
        )
        self.worker = Worker()
        self.in_flight: deque[SchedulerOutput] = deque()

    def perform(self, action: Action) -> Answer:
        match action:
            case Submit():
                self._submit(action)
                return Done()
            case Issue():
                return self._schedule()
            case CompleteStep():
                return self._update(action)
            case Release():
                self.scheduler.finish_request(action.request)
                return Returned(self.manager.deferred_blocks())
            case _:
                name = type(action).__name__
                raise UnsupportedConfig(f"{name} is the scheduler's own decision")

    def _submit(self, action: Submit) -> None:
        limit = DEFAULT_MAX_TOKENS if action.max_tokens is None else action.max_tokens
        longest = min(len(action.symbols) + limit, self.config.max_model_len)
        needed = sum(group.blocks_for(longest) for group in self.config.groups)
        if needed >= self.config.num_blocks:
            raise UnsupportedConfig("a request may be too long for the pool, and wait for ever")
        request = Request(action.request, action.symbols)
        self.scheduler.add_request(request, priority=action.priority, max_tokens=limit)

    def _schedule(self) -> Scheduled:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        self._update_worker(output)
        return Scheduled(
            rows=tuple(self._shown(row) for row in output.rows),
            preempted=output.preempted,
            tables=self._tables(),
            deferred=self.manager.deferred_blocks(),
            unissued=tuple(
                block
                for row in output.withdrawn
                for part in row.block_ids
                for block in part
                if block != NULL_BLOCK
            ),
        )

    def _update_worker(self, output: SchedulerOutput) -> None:
        for request_id in output.finished:
            self.worker.remove(request_id)
        for row in output.rows:
            self._receive(row)

    def _receive(self, row: Row) -> None:
        if row.kind == "running":
            self.worker.append(row.request_id, row.block_ids)
        else:
            self.worker.replace(row.request_id, row.block_ids)

    def _shown(self, row: Row) -> ScheduledRow:
        return ScheduledRow(
            request=row.request_id,
            start=row.num_computed_tokens,
            tokens=row.num_scheduled_tokens,
            admitted=row.kind != "running",
            samples=row.samples,
            worker=self.worker.row(row.request_id),
        )

    def _update(self, action: CompleteStep) -> Updated:
        sampled = {output.request: output.symbol for output in action.outputs}
        finished = self.scheduler.update_from_output(self.in_flight.popleft(), sampled)
        computed = tuple(
            (request_id, tracked.request.num_computed_tokens)
            for request_id, tracked in self.scheduler.requests.items()
        )
        return Updated(finished, computed, self.manager.deferred_blocks())

    def _tables(self) -> tuple[tuple[int, Tables], ...]:
        return tuple(
            (request_id, self.manager.get_block_ids(request_id))
            for request_id in self.scheduler.requests
        )

    def snapshot(self) -> Snapshot:
        pool = self.manager.block_pool
        return Snapshot(
            free_order=pool.free_order(),
            free_blocks=pool.get_num_free_blocks(),
            reference_counts=pool.counts(),
            tables=self._tables(),
        )
