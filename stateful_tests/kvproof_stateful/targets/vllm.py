"""The genuine Scheduler and worker rows of vLLM, observed.

One `Issue` is one schedule(), one `CompleteStep` one update_from_output(); everything else
the scheduler decides.  Loads and stores begin where it tells its connector so, and their ends
reach it with a step's output.  See vllm_engine for how it is run without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

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
from kvproof_spec.config import Config
from kvproof_spec.pages import Table
from kvproof_stateful.target import Hello, TargetFailed, UnsupportedConfig
from kvproof_stateful.targets.vllm_connector import Remote
from kvproof_stateful.targets.vllm_engine import (
    VERSION,
    EngineConfig,
    EngineMisused,
    EngineSetupError,
    VllmEngine,
)
from kvproof_stateful.targets.vllm_manager import shown_event

FEATURES = frozenset(
    (
        *("full", "sliding", "chunked", "state", "mixed", "drafter", "uncached", "partial"),
        *("external", "store", "clear", "events", "lora", "lora-version", "salt", "embeds"),
        *("preempt", "abort", "abort-loading", "async", "worker"),
    )
)


class VllmTarget:
    """Observed: kvproof submits requests, returns sampled tokens, ends transfers, and aborts."""

    def hello(self) -> Hello:
        return Hello(
            name="vllm",
            version=VERSION,
            features=FEATURES,
            claims=(
                *("I1", "I2", "I3", "I4", "I5", "I6"),
                *("R2", "R3", "R4", "R5", "R6", "R7", "R9", "R10", "R11", "R12"),
            ),
            observed=True,
        )

    def reset(self, config: Config) -> None:
        asked = config.scheduling
        if asked is None:
            raise UnsupportedConfig("vllm runs its own scheduler: the config needs a scheduling")
        if config.defers_returns and not asked.asynchronous:
            raise UnsupportedConfig("vLLM defers returns only with asynchronous scheduling")
        self.config = config
        self.loaded: list[int] = []  # requests whose loads have ended since a step returned
        self.stored: list[int] = []  # likewise
        try:
            self.engine = VllmEngine(
                EngineConfig(
                    groups=config.groups,
                    num_blocks=config.num_blocks,
                    caching=config.caching,
                    asynchronous=asked.asynchronous,
                    policy=asked.policy,
                    max_num_seqs=asked.max_num_seqs,
                    max_num_batched_tokens=asked.max_num_batched_tokens,
                    long_prefill_token_threshold=asked.long_prefill_token_threshold,
                    max_model_len=config.max_model_len,
                    connector=asked.connector or config.defers_returns,
                    defer_frees=config.defers_returns,
                    whole_sequence_check=asked.whole_sequence_check,
                    stop_token=asked.stop_token,
                    partial_boundary=config.partial_boundary,
                    events=config.events,
                )
            )
        except EngineSetupError as error:
            raise TargetFailed(f"vLLM was not set up as asked: {error}") from error

    def perform(self, action: Action) -> Answer:
        match action:
            case Submit():
                return self._submit(action)
            case Issue():
                return self._schedule()
            case CompleteStep():
                return self._update(action)
            case CompleteLoad():
                self.loaded.append(action.request)
                return Done()
            case CompleteStore():
                self.stored.append(action.request)
                return Returned(self.engine.deferred())
            case Release():
                self.engine.abort(action.request)
                return Returned(self.engine.deferred())
            case _:
                raise EngineMisused(f"{type(action).__name__} is the scheduler's own decision")

    def _submit(self, action: Submit) -> Done:
        engine = self.engine.config
        if not engine.connector and (action.remote or action.stored):
            raise UnsupportedConfig("without a connector there are no loads and no stores")
        if engine.asynchronous and not engine.defer_frees and action.unordered and action.remote:
            raise UnsupportedConfig("vLLM's consumers defer returns, and only they load")
        self.engine.add_request(
            action.request,
            action.symbols,
            action.priority,
            16 if action.max_tokens is None else action.max_tokens,
            action.inputs,
            Remote(action.remote, action.unordered, action.stored),
        )
        return Done()

    def _schedule(self) -> Scheduled:
        done = self.engine.schedule()
        rows = tuple(
            ScheduledRow(
                request=row.request_id,
                start=row.start,
                tokens=row.tokens,
                admitted=row.kind != "running",
                samples=row.samples,
                worker=row.worker_tables,
                external=row.external,
            )
            for row in done.rows
        )
        tables = self.engine.tables()
        # A block handed out twice in one call was taken back in between; those of states, which
        # are not named, may have been handed out before as another group's.
        named = [group.kind != "state" for group in self.config.groups]
        last = set(blocks_in(compress(tables[row.request], named) for row in rows))
        issued = Counter(block for block in set(done.handed_out) if block in last)
        unissued = Counter(done.handed_out) - issued
        return Scheduled(
            rows,
            done.preempted,
            tuple(tables.items()),
            self.engine.deferred(),
            tuple(unissued.elements()) if done.preempted else (),
            tuple(ScheduledLoad(load.request_id, load.hit, load.external) for load in done.loads),
            done.copies,
            done.handed_out if self.config.clears else None,
        )

    def _update(self, action: CompleteStep) -> Updated:
        sampled = {output.request: output.symbol for output in action.outputs}
        done = self.engine.update(sampled, self.loaded, self.stored)
        self.loaded, self.stored = [], []
        stats = done.stats
        return Updated(
            done.finished,
            tuple(self.engine.computed().items()),
            self.engine.deferred(),
            done.stored,
            Numbers(stats.used_blocks, stats.queries, stats.hits, stats.preemptions),
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(
            free_order=tuple(self.engine.free_order()),
            free_blocks=self.engine.num_free(),
            reference_counts=tuple(self.engine.reference_counts()),
            tables=tuple(self.engine.tables().items()),
            findable=self.engine.findable() if self.config.events else None,
            events=tuple(map(shown_event, self._events())),
        )

    def _events(self) -> list[Any]:
        return self.engine.take_events() if self.config.events else []


def blocks_in(tables: Iterable[Iterable[Table]]) -> Iterator[int]:
    return (block for of_request in tables for table in of_request for block in table)
