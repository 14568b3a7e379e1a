"""The genuine vLLM scheduler and worker rows, headless on a CPU.

`VllmEngine` owns one genuine `Scheduler` (or `AsyncScheduler`) and one genuine
`InputBatch` that `GPUModelRunner._update_states` keeps.  The caller submits requests,
asks for steps and hands back sampled tokens; the engine reads off what happened.
Nothing of vLLM is patched; vllm_setup says what stands in for what.  The model's outputs
are made here, including the runner's own note of what it sampled.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvproof_spec.pages import Copy
from kvproof_spec.prefix import TOKENS_ONLY, Inputs
from kvproof_stateful.targets.vllm_environment import prepare_for_vllm
from kvproof_stateful.targets.vllm_setup import VERSION, EngineConfig, EngineSetupError, make_engine

prepare_for_vllm()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.engine import EngineCoreEventType
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from kvproof_stateful.targets.vllm_connector import NOTHING_REMOTE, Begun, Remote
    from kvproof_stateful.targets.vllm_manager import request_inputs, shown_findable

__all__ = ["VERSION", "EngineConfig", "EngineMisused", "EngineSetupError", "VllmEngine"]

_UNKNOWN_TOKEN = -1  # what the asynchronous runner notes until the sampled token is known

RequestId = int
BlockId = int
Tables = tuple[tuple[BlockId, ...], ...]  # indexed by group, then by block position
RowKind = Literal["new", "running", "resumed"]


class EngineMisused(Exception):
    """A call came out of turn: the caller's fault, not the engine's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: positions `start` to `start + tokens - 1`.

    `samples` says whether the step yields this request's next token.  `worker_tables` is
    the worker's row after its update, up to its valid length.  The last `external` tokens
    before `start` come with the step.
    """

    request_id: RequestId
    start: int
    tokens: int
    kind: RowKind
    samples: bool
    worker_tables: Tables
    external: int


@dataclass(frozen=True, slots=True)
class Load:
    """An unordered load of `external` tokens that begins after `hit` tokens."""

    request_id: RequestId
    hit: int
    external: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One `schedule()`: rows in admission order, and who lost its blocks.

    `preempted` is what the worker is told, sorted; a request first scheduled and then
    preempted has no row.  `handed_out` are the blocks taken from the pool for this step, in
    order, also for it; those of a load and of states are not named.
    """

    rows: tuple[Row, ...]
    loads: tuple[Load, ...]
    preempted: tuple[RequestId, ...]
    handed_out: tuple[BlockId, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """What vLLM reports of itself: blocks in use now, the rest since its start."""

    used_blocks: int
    queries: int
    hits: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Updated:
    """One `update_from_output()`: who ended with it, and of whom a store now reads the blocks."""

    finished: tuple[RequestId, ...]
    stored: tuple[RequestId, ...]
    stats: Stats


@dataclass(frozen=True, slots=True)
class _InFlight:
    output: Any  # vLLM's SchedulerOutput
    names: tuple[str, ...]  # the worker's batch order
    sampling: frozenset[str]


@dataclass(slots=True)
class _Counted:
    """Sums over what vLLM reports in pieces."""

    queries: int = 0
    hits: int = 0
    preemptions: int = 0  # whose events were taken

    def add_lookups(self, stats: Any) -> None:
        self.queries += stats.queries + stats.preempted_queries
        self.hits += stats.hits + stats.preempted_hits

    def add_events(self, events: Iterable[Any]) -> None:
        self.preemptions += preemptions_among(events)


def preemptions_among(events: Iterable[Any]) -> int:
    return sum(event.type == EngineCoreEventType.PREEMPTED for event in events)


class VllmEngine:
    """One genuine scheduler with its worker's rows; at most `config.depth` steps in flight."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        parts = make_engine(config)
        self._scheduler, self._runner = parts.scheduler, parts.runner
        hashes = config.caching or config.connector
        self._block_hasher = get_request_block_hasher(parts.hash_size, sha256) if hashes else None
        self._arrivals = 0
        self._in_flight: deque[_InFlight] = deque()
        self._counted = _Counted()

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    # What is asked of it

    def add_request(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        priority: int,
        max_tokens: int,
        inputs: Inputs = TOKENS_ONLY,
        remote: Remote = NOTHING_REMOTE,
    ) -> None:
        """Submit a prompt; a smaller `priority` is served earlier, `max_tokens` are sampled."""
        if str(request_id) in self._scheduler.requests:
            raise EngineMisused(f"request {request_id} is live")
        if not 0 < len(tokens) < self.config.max_model_len:
            raise EngineMisused(f"a prompt of {len(tokens)} tokens")
        if self.config.connector:
            self._scheduler.connector.remote[str(request_id)] = remote
        self._arrivals += 1
        stop = self.config.stop_token
        request = Request(
            request_id=str(request_id),
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                stop_token_ids=None if stop is None else [stop],
            ),
            pooling_params=None,
            arrival_time=float(self._arrivals),
            priority=priority,
            block_hasher=self._block_hasher,
            **request_inputs(inputs, len(tokens)),
        )
        self._scheduler.add_request(request)

    def schedule(self) -> Scheduled:
        """Schedule one step and let the worker update its rows for it."""
        if len(self._in_flight) == self.config.depth:
            raise EngineMisused(f"{self.config.depth} steps are in flight")
        before = self.tables()
        output = self._scheduler.schedule()
        preempted = tuple(sorted(int(name) for name in output.preempted_req_ids or ()))
        begun = self._take_begun()
        GPUModelRunner._update_states(self._runner, output)
        rows = tuple(self._rows(output, begun))
        sampling = frozenset(str(row.request_id) for row in rows if row.samples)
        names = tuple(self._runner.input_batch.req_ids)
        self._in_flight.append(_InFlight(output, names, sampling))
        if self.config.asynchronous:
            self._note_sampled(dict.fromkeys(sampling, _UNKNOWN_TOKEN))
        return Scheduled(
            rows=rows,
            loads=tuple(self._loads(begun)),
            preempted=preempted,
            handed_out=tuple(output.new_block_ids_to_zero or ()),
            copies=copies_of_a_step(output, before, self.tables()),
        )

    def update(
        self,
        sampled: Mapping[RequestId, int],
        loaded: Collection[RequestId] = (),
        sent: Collection[RequestId] = (),
    ) -> Updated:
        """Return the oldest step, with one token for each of its rows that samples.

        Rows of requests that have left since then sample all the same.  `loaded` and `sent`
        are requests whose load or store has ended, which comes with any step's output.
        """
        by_name = {str(request_id): token for request_id, token in sampled.items()}
        oldest = self._oldest_step(by_name)
        if not self.config.asynchronous:
            self._note_sampled(by_name)
        result = model_output(oldest, by_name, loaded, sent)
        outputs = self._scheduler.update_from_output(oldest.output, result)
        records = [record for each in outputs.values() for record in each.outputs]
        return Updated(
            finished=tuple(int(r.request_id) for r in records if r.finish_reason is not None),
            stored=self._take_stored(),
            stats=self._stats(outputs.values()),
        )

    def _oldest_step(self, sampled: Mapping[str, int]) -> _InFlight:
        if not self._in_flight:
            raise EngineMisused("no step is in flight")
        wanted = sorted(map(int, self._in_flight[0].sampling))
        if sorted(map(int, sampled)) != wanted:
            raise EngineMisused(f"the step samples {wanted}, given {sorted(sampled)}")
        return self._in_flight.popleft()

    def abort(self, request_id: RequestId) -> None:
        """Finish a live request from outside."""
        request = self._scheduler.requests.get(str(request_id))
        if request is None or request.is_finished():
            raise EngineMisused(f"request {request_id} is not live")
        self._counted.add_events(request.events)
        self._scheduler.finish_requests(str(request_id), RequestStatus.FINISHED_ABORTED)

    # What it shows

    def tables(self) -> dict[RequestId, Tables]:
        """Block ids of every live request, by group; the null block is 0."""
        return {int(name): self._table(name) for name in self._live()}

    def computed(self) -> dict[RequestId, int]:
        """VLLM's `num_computed_tokens` of every live request: it counts steps in flight."""
        return {int(name): r.num_computed_tokens for name, r in self._live().items()}

    def deferred(self) -> tuple[BlockId, ...]:
        """Blocks that are kept back, for steps in flight or for transfers; nulls left out."""
        fenced = [b.block_id for _, blocks in self._scheduler.deferred_frees for b in blocks]
        for name, request in self._scheduler.requests.items():
            if request.is_finished():
                fenced += [block for table in self._table(name) for block in table]
        return tuple(block for block in fenced if block)

    def free_order(self) -> list[BlockId]:
        """Free blocks, the next one to be handed out first."""
        queue = self._pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def reference_counts(self) -> list[int]:
        """Holders of each block, indexed by block id; vLLM does not keep the null block's."""
        return [block.ref_cnt for block in self._pool.blocks]

    def findable(self) -> tuple[tuple[int, str], ...]:
        """Group and name of each key that a lookup finds."""
        return shown_findable(self._pool.cached_block_hash_to_block)

    def take_events(self) -> list[Any]:
        """What vLLM has published, and is to publish, since the last call."""
        published = self._scheduler.kv_event_publisher.take() if self.config.events else []
        return [*published, *(self._scheduler.kv_cache_manager.take_events() or ())]

    # How that is read off

    def _live(self) -> dict[str, Any]:
        requests = self._scheduler.requests.items()
        return {name: request for name, request in requests if not request.is_finished()}

    def _table(self, name: str) -> Tables:
        return tuple(map(tuple, self._scheduler.kv_cache_manager.get_block_ids(name)))

    def _take_begun(self) -> dict[str, Begun]:
        if not self.config.connector:
            return {}
        connector = self._scheduler.connector
        begun, connector.begun = connector.begun, {}
        return dict(begun)

    def _take_stored(self) -> tuple[RequestId, ...]:
        if not self.config.connector:
            return ()
        connector = self._scheduler.connector
        stored, connector.stored = connector.stored, []
        return tuple(int(name) for name in stored)

    def _loads(self, begun: Mapping[str, Begun]) -> Iterator[Load]:
        for name, its in begun.items():
            if its.unordered:
                request = self._scheduler.requests[name]
                yield Load(int(name), request.num_computed_tokens - its.tokens, its.tokens)

    def _rows(self, output: Any, begun: Mapping[str, Begun]) -> Iterator[Row]:
        kinds_and_starts: dict[str, tuple[RowKind, int]] = {
            new.req_id: ("new", new.num_computed_tokens) for new in output.scheduled_new_reqs
        }
        old = output.scheduled_cached_reqs
        for name, start in zip(old.req_ids, old.num_computed_tokens, strict=True):
            kind: RowKind = "resumed" if name in old.resumed_req_ids else "running"
            kinds_and_starts[name] = kind, start
        batch = self._runner.input_batch
        for name, tokens in output.num_scheduled_tokens.items():
            index, (kind, start) = batch.req_id_to_index[name], kinds_and_starts[name]
            yield Row(
                request_id=int(name),
                start=start,
                tokens=tokens,
                kind=kind,
                # The runner's rule (`discard_request_mask`): its count of tokens includes
                # those sampled by steps still in flight.
                samples=start + tokens >= self._runner.requests[name].num_tokens,
                worker_tables=tuple(
                    tuple(table.block_table.np[index, : table.num_blocks_per_row[index]].tolist())
                    for table in batch.block_table.block_tables
                ),
                external=begun[name].tokens if name in begun else 0,
            )

    def _note_sampled(self, tokens: Mapping[str, int]) -> None:
        """What `GPUModelRunner._bookkeeping_sync` notes of the tokens it sampled."""
        batch = self._runner.input_batch
        for name, token in tokens.items():
            row = batch.req_id_to_index[name]
            position = batch.num_tokens_no_spec[row]
            batch.token_ids_cpu[row, position] = token
            batch.is_token_ids[row, position] = True
            batch.num_tokens_no_spec[row] = position + 1
            self._runner.requests[name].output_token_ids.append(token)

    def _stats(self, outputs: Collection[Any]) -> Stats:
        """Preemptions are counted by their events, also those that vLLM has yet to send."""
        for record in (record for each in outputs for record in each.outputs):
            self._counted.add_events(record.events or ())
        (reported,) = [each.scheduler_stats for each in outputs if each.scheduler_stats]
        self._counted.add_lookups(reported.prefix_cache_stats)
        waiting = sum(preemptions_among(request.events) for request in self._live().values())
        return Stats(
            used_blocks=round(reported.kv_cache_usage * (self.config.num_blocks - 1)),
            queries=self._counted.queries,
            hits=self._counted.hits,
            preemptions=self._counted.preemptions + waiting,
        )


def copies_of_a_step(
    output: Any, before: Mapping[RequestId, Tables], after: Mapping[RequestId, Tables]
) -> tuple[Copy, ...]:
    """The copies that the worker is told to make first, by what the tables are around the call.

    VLLM does not say of which group they are: of the one in which an end stands.  The source
    may have been the tail of a request that was then preempted.
    """
    made = []
    for copy in output.kv_cache_block_copies or ():
        places = (copy.dst_block_id, after), (copy.src_block_id, after), (copy.src_block_id, before)
        groups = [
            group
            for end, tables in places
            for of_request in tables.values()
            for group, table in enumerate(of_request)
            if end in table
        ]
        made.append(Copy(groups[0], copy.src_block_id, copy.dst_block_id))
    return tuple(made)


def model_output(
    step: _InFlight,
    tokens: Mapping[str, int],
    loaded: Collection[RequestId],
    sent: Collection[RequestId],
) -> Any:
    """What the model runner would return; also a step without rows brings word of transfers."""
    told = None
    if loaded or sent:
        told = KVConnectorOutput(
            finished_sending={str(request_id) for request_id in sent} or None,
            finished_recving={str(request_id) for request_id in loaded} or None,
        )
    return ModelRunnerOutput(
        req_ids=list(step.names),
        req_id_to_index={name: index for index, name in enumerate(step.names)},
        sampled_token_ids=[[tokens[n]] if n in step.sampling else [] for n in step.names],
        kv_connector_output=told,
    )
