"""The genuine Scheduler and worker rows of vLLM 0.32.0, observed.

One `Issue` is one schedule(), one `CompleteStep` one update_from_output(); everything else
the scheduler decides.  See vllm_engine for how it is run without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

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
from kvproof_spec.pages import Tables
from kvproof_stateful.target import Hello, TargetFailed, UnsupportedConfig
from kvproof_stateful.targets.vllm_engine import (
    VERSION,
    EngineConfig,
    EngineMisused,
    EngineSetupError,
    VllmEngine,
)


class VllmTarget:
    """Observed: kvproof submits requests, returns sampled tokens, and aborts."""

    def hello(self) -> Hello:
        return Hello(
            name="vllm",
            version=VERSION,
            features=frozenset(
                ["full", "sliding", "uncached", "preempt", "abort", "async", "worker"]
            ),
            claims=("I1", "I2", "I3", "I4", "I5", "I6", "R2", "R3", "R4", "R7", "R9"),
            observed=True,
        )

    def reset(self, config: Config) -> None:
        asked = config.scheduling
        if asked is None:
            raise UnsupportedConfig("vllm runs its own scheduler: the config needs a scheduling")
        if config.defers_returns and not asked.asynchronous:
            raise UnsupportedConfig("vLLM defers returns only with asynchronous scheduling")
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
                    defer_frees=config.defers_returns,
                    whole_sequence_check=asked.whole_sequence_check,
                    stop_token=asked.stop_token,
                )
            )
        except EngineSetupError as error:
            raise TargetFailed(f"vLLM was not set up as asked: {error}") from error

    def perform(self, action: Action) -> Answer:
        match action:
            case Submit():
                limit = action.max_tokens if action.max_tokens is not None else 16
                self.engine.add_request(action.request, action.symbols, action.priority, limit)
                return Done()
            case Issue():
                return self._schedule()
            case CompleteStep():
                return self._update(action)
            case Release():
                self.engine.abort(action.request)
                return Returned(self.engine.deferred())
            case _:
                raise EngineMisused(f"{type(action).__name__} is the scheduler's own decision")

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
            )
            for row in done.rows
        )
        # A block handed out twice in one call was taken back in between.
        last = set(blocks_in(done.tables[row.request] for row in rows))
        issued = Counter(block for block in set(done.handed_out) if block in last)
        unissued = Counter(done.handed_out) - issued
        return Scheduled(
            rows,
            done.preempted,
            tuple(done.tables.items()),
            done.deferred,
            tuple(unissued.elements()) if done.preempted else (),
        )

    def _update(self, action: CompleteStep) -> Updated:
        done = self.engine.update({output.request: output.symbol for output in action.outputs})
        finished = tuple(request for request, _ in done.finished)
        return Updated(finished, tuple(done.computed.items()), done.deferred)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            free_order=tuple(self.engine.free_order()),
            free_blocks=self.engine.num_free(),
            reference_counts=tuple(self.engine.reference_counts()),
            tables=tuple(self.engine.tables().items()),
        )


def blocks_in(tables: Iterable[Tables]) -> Iterator[int]:
    return (block for of_request in tables for table in of_request for block in table)
