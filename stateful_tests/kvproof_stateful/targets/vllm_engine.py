"""The genuine vLLM 0.32.0 scheduler and worker rows, headless on a CPU.

`VllmEngine` owns one genuine `Scheduler` (or `AsyncScheduler`) and one genuine
`InputBatch` that `GPUModelRunner._update_states` keeps.  The caller submits requests,
asks for steps and hands back sampled tokens; the engine reads off what happened.
Nothing of vLLM is patched.  Stand-ins are the model config, the multimodal registry,
a connector that moves nothing, the runner object (the genuine class without its
`__init__`: an attribute that is not set below raises when touched) and the model's
outputs, including the runner's own note of what it sampled.

Importing this module imports vLLM, takes seconds, and sets environment variables that
vLLM reads at import.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from kvproof_spec.config import Group

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
logging.getLogger("vllm").setLevel(logging.CRITICAL)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import vllm
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        SchedulerConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import (
        get_group_id,
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
    from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

VERSION = "0.32.0"
_VOCABULARY = 1 << 20
_UNKNOWN_TOKEN = -1  # what the asynchronous runner notes until the sampled token is known

RequestId = int
BlockId = int
Tables = tuple[tuple[BlockId, ...], ...]  # indexed by group, then by block position
Policy = Literal["fcfs", "priority"]
RowKind = Literal["new", "running", "resumed"]


class EngineSetupError(Exception):
    """vLLM is not, or cannot be, set up as it was asked to be."""


class EngineMisused(Exception):
    """A call came out of turn: the caller's fault, not the engine's."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine is built from.

    `num_blocks` counts the null block 0; lengths, budgets and the threshold are in
    tokens, threshold 0 is none.  `defer_frees` attaches a consumer connector that moves
    nothing: only with one, and only asynchronously, does vLLM defer the return of blocks.
    `whole_sequence_check` is vLLM's `scheduler_reserve_full_isl`: a request is admitted
    only if all its known tokens fit, not just its first chunk.  Sampling `stop_token` ends
    a request, perhaps with its next step in flight; reaching a length never does that.
    """

    groups: tuple[Group, ...] = (Group("full", 4),)
    num_blocks: int = 17
    caching: bool = True
    asynchronous: bool = False
    policy: Policy = "fcfs"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    long_prefill_token_threshold: int = 0
    max_model_len: int = 256
    defer_frees: bool = False
    whole_sequence_check: bool = True
    stop_token: int | None = None

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once."""
        return 2 if self.asynchronous else 1


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: positions `start` to `start + tokens - 1`.

    `samples` says whether the step yields this request's next token.  `worker_tables` is
    the worker's row after its update, up to its valid length.
    """

    request_id: RequestId
    start: int
    tokens: int
    kind: RowKind
    samples: bool
    worker_tables: Tables


@dataclass(frozen=True, slots=True)
class _After:
    """The live requests after a call, and the blocks whose return is deferred.

    `computed` and `tokens` are vLLM's `num_computed_tokens` (optimistic: it counts steps
    in flight) and `num_tokens` (known); statuses are "waiting", "running", "preempted".
    """

    tables: Mapping[RequestId, Tables]
    deferred: tuple[BlockId, ...]
    statuses: Mapping[RequestId, str]
    computed: Mapping[RequestId, int]
    tokens: Mapping[RequestId, int]


@dataclass(frozen=True, slots=True)
class Scheduled(_After):
    """One `schedule()`: rows in admission order, and who left.

    `step` counts from 0, empty steps included.  `preempted` and `finished` are what the
    worker is told, sorted; a request first scheduled and then preempted has no row.
    `handed_out` are the blocks taken from the pool for this step, in order, also for it.
    """

    step: int
    rows: tuple[Row, ...]
    preempted: tuple[RequestId, ...]
    finished: tuple[RequestId, ...]
    handed_out: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Updated(_After):
    """One `update_from_output()` of step `step`.

    `delivered` are the requests whose sampled token was appended, `finished` the
    requests that ended here with vLLM's reason ("length" or "stop").
    """

    step: int
    delivered: tuple[RequestId, ...]
    finished: tuple[tuple[RequestId, str], ...]


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    output: Any  # vLLM's SchedulerOutput
    names: tuple[str, ...]  # the worker's batch order
    sampling: frozenset[str]


class IdleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector that finds, loads and stores nothing; vLLM finds it by module path."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **options: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, name: str, layer: Any, metadata: Any, **options: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class NamesNewBlocks(KVCacheConfig):  # type: ignore[misc]
    """A cache whose new blocks must be zeroed, as vLLM has for mixed precision.

    vLLM then names in each step's output the blocks that it handed out for it, also those
    of a request that it preempted again in the same call.
    """

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


def _model_config(max_model_len: int) -> SimpleNamespace:
    return SimpleNamespace(
        max_model_len=max_model_len,
        runner_type="generate",
        multimodal_config=None,
        is_diffusion=False,
        is_moe=False,
        is_encoder_decoder=False,
        return_sampling_mask=False,
        skip_tokenizer_init=True,
        supports_multimodal_inputs=False,
        uses_mrope=False,
    )


def _vllm_config(config: EngineConfig) -> Any:
    transfer = KVTransferConfig(
        kv_connector=IdleConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_consumer",
    )
    result = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.policy,
            async_scheduling=config.asynchronous,
            scheduler_reserve_full_isl=config.whole_sequence_check,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=config.groups[0].block_size, enable_prefix_caching=config.caching
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer if config.defer_frees else None,
    )
    result.cache_config.num_gpu_blocks = config.num_blocks
    # The CPU platform has switched asynchronous scheduling off without a word.
    result.scheduler_config.async_scheduling = config.asynchronous
    object.__setattr__(result, "model_config", _model_config(config.max_model_len))
    return result


def _cache_spec(group: Group) -> Any:
    shape = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if group.kind == "sliding":
        return SlidingWindowSpec(**shape, sliding_window=group.window)
    return FullAttentionSpec(**shape)


@cache
def _start_process_group() -> None:
    """The one-process group that the runner asks for its rank; once per process."""
    settings = _vllm_config(EngineConfig())
    with set_current_vllm_config(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
        parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    init_none_hash(sha256)


@cache
def _structured_output_manager() -> Any:
    """Never asked for a grammar, so all engines share one."""
    return StructuredOutputManager(_vllm_config(EngineConfig()))


def _runner(config: EngineConfig, cache_config: Any) -> Any:
    """The genuine runner class with just the attributes that `_update_states` touches."""
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.requests = {}
    runner.input_batch = InputBatch(
        max_num_reqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        device=torch.device("cpu"),
        vocab_size=_VOCABULARY,
        block_sizes=[group.block_size for group in config.groups],
        max_num_blocks_per_req=[g.blocks_for(config.max_model_len) for g in config.groups],
    )
    runner.kv_cache_config = cache_config
    runner.late_interaction_runner = LateInteractionRunner()
    runner.use_async_scheduling = config.asynchronous
    runner.num_prompt_logprobs = {}
    runner.speculative_config = None
    runner.reorder_batch_threshold = None
    runner.is_pooling_model = False
    runner.uses_mrope = False
    runner.use_async_spec_decode = False
    runner._zero_block_ids = lambda block_ids: None  # there is no memory to zero
    return runner


def _require_as_asked(config: EngineConfig, scheduler: Any) -> None:
    """Refuse an engine that quietly became another one."""
    settings = scheduler.vllm_config
    coordinator = "KVCacheCoordinatorNoPrefixCache"
    if config.caching:
        one = len(config.groups) == 1
        coordinator = "UnitaryKVCacheCoordinator" if one else "HybridKVCacheCoordinator"
    wanted_and_got = {
        "version": (VERSION, vllm.__version__.split("+")[0]),
        "async_scheduling": (config.asynchronous, settings.scheduler_config.async_scheduling),
        "max_concurrent_batches": (config.depth, settings.max_concurrent_batches),
        "defer_block_free": (config.defer_frees, scheduler.defer_block_free),
        "use_v2_model_runner": (False, scheduler.use_v2_model_runner),
        "coordinator": (coordinator, type(scheduler.kv_cache_manager.coordinator).__name__),
    }
    for name, (wanted, got) in wanted_and_got.items():
        if wanted != got:
            raise EngineSetupError(f"vLLM's {name} is {got}, asked for {wanted}")


class VllmEngine:
    """One genuine scheduler with its worker's rows; at most `config.depth` steps in flight."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        for group in config.groups:
            if group.kind == "sliding" and group.window < 1:
                raise EngineSetupError(f"{group} has no window")
        try:
            _start_process_group()
            settings = _vllm_config(config)
            cache_config = NamesNewBlocks(
                num_blocks=config.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer{index}"], _cache_spec(group))
                    for index, group in enumerate(config.groups)
                ],
            )
            block_size, hash_size = resolve_kv_cache_block_sizes(cache_config, settings)
            self._scheduler: Any = (AsyncScheduler if config.asynchronous else Scheduler)(
                vllm_config=settings,
                kv_cache_config=cache_config,
                structured_output_manager=_structured_output_manager(),
                block_size=block_size,
                hash_block_size=hash_size,
                mm_registry=None,
                log_stats=False,
            )
            self._runner = _runner(config, cache_config)
        except (ValueError, AssertionError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise EngineSetupError(f"vLLM refuses {config}: {reason}") from error
        _require_as_asked(config, self._scheduler)
        hashes = config.caching or config.defer_frees
        self._block_hasher = get_request_block_hasher(hash_size, sha256) if hashes else None
        self._arrivals = 0
        self._steps = 0
        self._in_flight: deque[_InFlight] = deque()

    @property
    def in_flight(self) -> int:
        """Steps scheduled and not yet returned."""
        return len(self._in_flight)

    def add_request(
        self, request_id: RequestId, tokens: Sequence[int], priority: int, max_tokens: int
    ) -> None:
        """Submit a prompt; a smaller `priority` is served earlier, `max_tokens` are sampled."""
        if str(request_id) in self._scheduler.requests:
            raise EngineMisused(f"request {request_id} is live")
        if not 0 < len(tokens) < self.config.max_model_len:
            raise EngineMisused(f"a prompt of {len(tokens)} tokens")
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
        )
        self._scheduler.add_request(request)

    def schedule(self) -> Scheduled:
        """Schedule one step and let the worker update its rows for it."""
        if len(self._in_flight) == self.config.depth:
            raise EngineMisused(f"{self.config.depth} steps are in flight")
        output = self._scheduler.schedule()
        preempted = tuple(sorted(int(name) for name in output.preempted_req_ids or ()))
        finished = tuple(sorted(map(int, output.finished_req_ids)))
        kinds_and_starts: dict[str, tuple[RowKind, int]] = {
            new.req_id: ("new", new.num_computed_tokens) for new in output.scheduled_new_reqs
        }
        old = output.scheduled_cached_reqs
        for name, start in zip(old.req_ids, old.num_computed_tokens, strict=True):
            kind: RowKind = "resumed" if name in old.resumed_req_ids else "running"
            kinds_and_starts[name] = kind, start
        GPUModelRunner._update_states(self._runner, output)
        rows = tuple(
            self._row(name, *kinds_and_starts[name], tokens)
            for name, tokens in output.num_scheduled_tokens.items()
        )
        sampling = frozenset(str(row.request_id) for row in rows if row.samples)
        names = tuple(self._runner.input_batch.req_ids)
        self._in_flight.append(_InFlight(self._steps, output, names, sampling))
        if self.config.asynchronous:
            self._note_sampled(dict.fromkeys(sampling, _UNKNOWN_TOKEN))
        self._steps += 1
        return Scheduled(
            *self._after(),
            step=self._steps - 1,
            rows=rows,
            preempted=preempted,
            finished=finished,
            handed_out=tuple(output.new_block_ids_to_zero or ()),
        )

    def update(self, sampled: Mapping[RequestId, int]) -> Updated:
        """Return the oldest step, with one token for each of its rows that samples.

        Rows of requests that have left since then sample all the same.
        """
        if not self._in_flight:
            raise EngineMisused("no step is in flight")
        oldest = self._in_flight[0]
        by_name = {str(request_id): token for request_id, token in sampled.items()}
        if by_name.keys() != oldest.sampling:
            wanted = sorted(map(int, oldest.sampling))
            raise EngineMisused(f"step {oldest.step} samples {wanted}, given {sorted(sampled)}")
        self._in_flight.popleft()
        if not self.config.asynchronous:
            self._note_sampled(by_name)
        outputs = self._scheduler.update_from_output(oldest.output, self._result(oldest, by_name))
        records = [record for each in outputs.values() for record in each.outputs]
        return Updated(
            *self._after(),
            step=oldest.step,
            delivered=tuple(int(r.request_id) for r in records if r.new_token_ids),
            finished=tuple(
                (int(record.request_id), str(record.finish_reason))
                for record in records
                if record.finish_reason is not None
            ),
        )

    def abort(self, request_id: RequestId) -> None:
        """Finish a live request from outside."""
        if str(request_id) not in self._scheduler.requests:
            raise EngineMisused(f"request {request_id} is not live")
        self._scheduler.finish_requests(str(request_id), RequestStatus.FINISHED_ABORTED)

    def tables(self) -> dict[RequestId, Tables]:
        """Block ids of every live request, by group; the null block is 0."""
        get_block_ids = self._scheduler.kv_cache_manager.get_block_ids
        return {
            int(name): tuple(map(tuple, get_block_ids(name))) for name in self._scheduler.requests
        }

    def deferred(self) -> tuple[BlockId, ...]:
        """Blocks whose return to the pool is deferred, oldest release first; nulls left out."""
        return tuple(
            block.block_id
            for _, blocks in self._scheduler.deferred_frees
            for block in blocks
            if not block.is_null
        )

    def free_order(self) -> list[BlockId]:
        """Free blocks, the next one to be handed out first."""
        queue = self._pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def reference_counts(self) -> list[int]:
        """Holders of each block, indexed by block id; vLLM does not keep the null block's."""
        return [block.ref_cnt for block in self._pool.blocks]

    def index(self) -> tuple[tuple[int, tuple[BlockId, ...]], ...]:
        """What a lookup can find: group and copies of each key, the copy returned first."""
        entries = self._pool.cached_block_hash_to_block._cache.items()
        return tuple(
            (get_group_id(key), tuple(found) if isinstance(found, dict) else (found.block_id,))
            for key, found in entries
        )

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def _row(self, name: str, kind: RowKind, start: int, tokens: int) -> Row:
        batch = self._runner.input_batch
        index = batch.req_id_to_index[name]
        return Row(
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

    def _result(self, step: _InFlight, tokens: Mapping[str, int]) -> Any:
        if not step.names:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput(
            req_ids=list(step.names),
            req_id_to_index={name: index for index, name in enumerate(step.names)},
            sampled_token_ids=[[tokens[n]] if n in step.sampling else [] for n in step.names],
        )

    def _after(
        self,
    ) -> tuple[
        dict[RequestId, Tables],
        tuple[BlockId, ...],
        dict[RequestId, str],
        dict[RequestId, int],
        dict[RequestId, int],
    ]:
        live = {int(name): request for name, request in self._scheduler.requests.items()}
        return (
            self.tables(),
            self.deferred(),
            {name: request.status.name.lower() for name, request in live.items()},
            {name: request.num_computed_tokens for name, request in live.items()},
            {name: request.num_tokens for name, request in live.items()},
        )
