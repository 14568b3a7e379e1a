"""A scheduler of our own over the plain manager, observed as vLLM's is.

One `Issue` is one schedule(), one `CompleteStep` one update_from_output(); everything else
the scheduler decides.  The worker's rows are made of what its output sends, and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import kvproof_stateful
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.scheduler import Scheduler
from kvproof_reference.steps import Row, SchedulerOutput
from kvproof_reference.worker import Worker
from kvproof_spec.actions import (
    Action,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Issue,
    Release,
    Submit,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Numbers,
    Returned,
    Scheduled,
    ScheduledLoad,
    ScheduledRow,
    Snapshot,
    Updated,
)
from kvproof_spec.choices import FEATURES
from kvproof_spec.config import Config
from kvproof_spec.pages import NULL_BLOCK, Copy, Tables
from kvproof_stateful.target import Hello, UnsupportedConfig
from kvproof_stateful.targets.plain import shown_events, shown_findable

DEFAULT_MAX_TOKENS = 16

SCHEDULERS_OWN = frozenset(("lookahead", "unissued", "forget", "trim", "publish"))
"""Features that are asked of a manager: this scheduler does them by itself, or not at all."""


class RemoteTokens:
    """A connector: it has the first tokens of some requests, and stores some when they end.

    It moves nothing: kvproof says when a load or a store has ended.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.submitted: dict[int, Submit] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """As many as there are, but a token must be left; an unordered load may bring all."""
        asked, unit = self.submitted[request.request_id], self.config.common_block
        states = any(group.kind == "state" for group in self.config.groups)
        most = request.num_tokens - (states or not asked.unordered)
        end = min(asked.remote, most)
        return max(end - end % unit - num_computed_tokens, 0), asked.unordered

    def update_state_after_alloc(
        self, request: Request, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        return

    def request_finished(self, request: Request, blocks: BlockIds) -> bool:
        return self.submitted[request.request_id].stored


class PlainEngineTarget:
    """Observed: kvproof submits requests, returns sampled tokens, ends transfers, and aborts."""

    name: ClassVar[str] = "plain-engine"
    manager_class: ClassVar[type[KVCacheManager]] = KVCacheManager
    worker_class: ClassVar[type[Worker]] = Worker
    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def hello(self) -> Hello:
        return Hello(
            name=self.name,
            version=kvproof_stateful.__version__,
            features=frozenset(FEATURES) - SCHEDULERS_OWN,
            claims=(
                *("I1", "I2", "I3", "I4", "I5", "I6"),
                *("R2", "R3", "R4", "R5", "R6", "R7", "R9", "R10", "R11", "R12"),
            ),
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
            partial_boundary=config.partial_boundary,
            enable_kv_cache_events=config.events,
            clears=config.clears,
        )
        self.connector = RemoteTokens(config)
        try:
            self.scheduler = self.scheduler_class(self.manager, config, self.connector)
        except ValueError as error:
            raise UnsupportedConfig(str(error)) from None
        self.worker = self.worker_class()
        self.in_flight: deque[SchedulerOutput] = deque()
        self.loaded: list[int] = []  # requests whose loads have ended since a step returned
        self.stored: list[int] = []  # likewise

    def perform(self, action: Action) -> Answer:
        match action:
            case Submit():
                self._submit(action)
                return Done()
            case Issue():
                return self._schedule()
            case CompleteStep():
                return self._update(action)
            case CompleteLoad():
                self.loaded.append(action.request)
                return Done()
            case CompleteStore():
                self.stored.append(action.request)
                return Returned(self.manager.deferred_blocks())
            case Release():
                self.scheduler.finish_request(action.request)
                return Returned(self.manager.deferred_blocks())
            case _:
                name = type(action).__name__
                raise UnsupportedConfig(f"{name} is the scheduler's own decision")

    def _submit(self, action: Submit) -> None:
        limit = DEFAULT_MAX_TOKENS if action.max_tokens is None else action.max_tokens
        longest = min(len(action.symbols) + limit, self.config.max_model_len)
        needed = sum(
            group.blocks_for(longest if group.reused else action.encoder_tokens)
            for group in self.config.groups
        )
        if needed >= self.config.num_blocks:
            raise UnsupportedConfig("a request may be too long for the pool, and wait for ever")
        self.connector.submitted[action.request] = action
        self.scheduler.add_request(
            Request(action.request, action.symbols, inputs=action.inputs),
            priority=action.priority,
            max_tokens=limit,
            num_encoder_tokens=action.encoder_tokens,
        )

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
            loads=tuple(
                ScheduledLoad(load.request_id, load.num_hit_tokens, load.num_external_tokens)
                for load in output.loads
            ),
            copies=tuple(Copy(*copy) for copy in output.copies),
            cleared=output.cleared if self.config.clears else None,
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
            external=row.num_external_tokens,
        )

    def _update(self, action: CompleteStep) -> Updated:
        sampled = {output.request: output.symbol for output in action.outputs}
        ended = self.scheduler.update_from_output(
            self.in_flight.popleft(), sampled, self.loaded, self.stored
        )
        self.loaded, self.stored = [], []
        computed = tuple(
            (request_id, tracked.request.num_computed_tokens)
            for request_id, tracked in self.scheduler.requests.items()
        )
        return Updated(
            ended.finished,
            computed,
            self.manager.deferred_blocks(),
            ended.stored,
            self._numbers(),
        )

    def _numbers(self) -> Numbers:
        stats = self.scheduler.stats
        used = self.scheduler.num_used_blocks()
        return Numbers(used, stats.queries, stats.hits, stats.preemptions)

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
            findable=shown_findable(pool) if self.config.events else None,
            events=shown_events(self.manager),
        )
