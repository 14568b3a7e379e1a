"""How the genuine vLLM scheduler and its worker's rows are set up, headless on a CPU.

Nothing of vLLM is patched.  Stand-ins are the model config, the multimodal registry, a
connector that moves nothing, a publisher that keeps events, and the runner object (the
genuine class without its `__init__`: an attribute that is not set below raises when touched).

Importing this module imports vLLM and takes seconds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from kvproof_spec.config import Group
from kvproof_stateful.targets.vllm_environment import prepare_for_vllm

prepare_for_vllm()
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
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from kvproof_stateful.targets.vllm_connector import RemoteTokens
    from kvproof_stateful.targets.vllm_manager import group_spec

KNOWN_VERSIONS = ("0.32.0", "0.33.0")
"""Releases on which this is known to work: what it touches is nobody's promise."""

VERSION: str = vllm.__version__.split("+")[0]
_VOCABULARY = 1 << 20

Policy = Literal["fcfs", "priority"]


class EngineSetupError(Exception):
    """vLLM is not, or cannot be, set up as it was asked to be."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine is built from.

    `num_blocks` counts the null block 0; lengths, budgets and the threshold are in
    tokens, threshold 0 is none.  `connector` attaches one that moves nothing; with
    `defer_frees` it is a consumer, since only with one, and only asynchronously, does vLLM
    defer the return of blocks.  `whole_sequence_check` is vLLM's
    `scheduler_reserve_full_isl`: a request is admitted only if all its known tokens fit,
    not just its first chunk.  Sampling `stop_token` ends a request, perhaps with its next
    step in flight; reaching a length never does that.  Hits end at multiples of
    `partial_boundary`, if there is one.  `events` are kept for the caller.
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
    connector: bool = False
    defer_frees: bool = False
    whole_sequence_check: bool = True
    stop_token: int | None = None
    partial_boundary: int | None = None
    events: bool = False

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once."""
        return 2 if self.asynchronous else 1

    @property
    def states(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    @property
    def block_size(self) -> int:
        """VLLM's: that of the states where there are some, since chunks end with their blocks."""
        sizes = [group.block_size for group in self.groups if group.kind == "state"]
        return max(sizes, default=self.groups[0].block_size)

    @property
    def common_block(self) -> int:
        """Tokens between two positions at which the blocks of all groups end."""
        return math.lcm(*(group.block_size for group in self.groups))


class NamesNewBlocks(KVCacheConfig):  # type: ignore[misc]
    """A cache whose new blocks must be zeroed, as vLLM has for mixed precision.

    vLLM then names in each step's output the blocks that it handed out for it, also those
    of a request that it preempted again in the same call.
    """

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


class KeptEvents(EventPublisher):  # type: ignore[misc]
    """A publisher that keeps what it is given until it is taken."""

    def __init__(self, data_parallel_rank: int = 0, **settings: Any) -> None:
        super().__init__(data_parallel_rank)
        self._events: list[Any] = []

    def publish(self, events: Any) -> None:
        self._events += events.events

    def take(self) -> list[Any]:
        taken, self._events = self._events, []
        return taken

    def shutdown(self) -> None: ...


EventPublisherFactory.register_publisher("kept", KeptEvents)


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


def _transfer_config(config: EngineConfig) -> Any:
    """A consumer loads; a producer, which only stores, does not make vLLM defer frees."""
    role = "kv_producer" if config.asynchronous and not config.defer_frees else "kv_both"
    return KVTransferConfig(
        kv_connector=RemoteTokens.__name__,
        kv_connector_module_path=RemoteTokens.__module__,
        kv_role=role,
    )


def _events_config() -> Any:
    kept = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    object.__setattr__(kept, "publisher", "kept")
    return kept


def _vllm_config(config: EngineConfig) -> Any:
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
            block_size=config.block_size, enable_prefix_caching=config.caching
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=_transfer_config(config) if config.connector else None,
        kv_events_config=_events_config() if config.events else None,
    )
    result.cache_config.num_gpu_blocks = config.num_blocks
    if config.states:
        result.cache_config.mamba_cache_mode = "align"
        result.cache_config.mamba_block_size = config.block_size
    if config.partial_boundary is not None:
        result.cache_config.prefix_match_unit = config.partial_boundary
    # The CPU platform has switched asynchronous scheduling off without a word.
    result.scheduler_config.async_scheduling = config.asynchronous
    object.__setattr__(result, "model_config", _model_config(config.max_model_len))
    return result


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
    runner.kv_caches = []  # there is no memory to copy or to zero
    runner._zero_block_ids = lambda block_ids: None
    runner.late_interaction_runner = LateInteractionRunner()
    runner.use_async_scheduling = config.asynchronous
    runner.num_prompt_logprobs = {}
    runner.speculative_config = None
    runner.reorder_batch_threshold = None
    runner.is_pooling_model = False
    runner.uses_mrope = False
    runner.use_async_spec_decode = False
    return runner


def _require_as_asked(config: EngineConfig, scheduler: Any) -> None:
    """Refuse an engine that quietly became another one."""
    settings, manager = scheduler.vllm_config, scheduler.kv_cache_manager
    coordinator = "KVCacheCoordinatorNoPrefixCache"
    if config.caching:
        one = len(config.groups) == 1
        coordinator = "UnitaryKVCacheCoordinator" if one else "HybridKVCacheCoordinator"
    connector = RemoteTokens.__name__ if config.connector else "NoneType"
    wanted_and_got = {
        "async_scheduling": (config.asynchronous, settings.scheduler_config.async_scheduling),
        "max_concurrent_batches": (config.depth, settings.max_concurrent_batches),
        "defer_block_free": (config.defer_frees, scheduler.defer_block_free),
        "use_v2_model_runner": (False, scheduler.use_v2_model_runner),
        "coordinator": (coordinator, type(manager.coordinator).__name__),
        "connector": (connector, type(scheduler.connector).__name__),
        "split at states": (config.states, scheduler.need_mamba_block_aligned_split),
        "hits inside blocks": (
            config.partial_boundary is not None and config.caching,
            manager.coordinator.enable_partial_hash_hits,
        ),
        "events": (config.events, manager.block_pool.enable_kv_cache_events),
        "log_stats": (True, manager.log_stats),
    }
    for name, (wanted, got) in wanted_and_got.items():
        if wanted != got:
            raise EngineSetupError(f"vLLM's {name} is {got}, asked for {wanted}")


@dataclass(frozen=True, slots=True)
class Parts:
    """A scheduler and its worker, made for each other; `hash_size` is in tokens."""

    scheduler: Any
    runner: Any
    hash_size: int


def make_engine(config: EngineConfig) -> Parts:
    """The genuine scheduler as asked for, or `EngineSetupError`."""
    if VERSION not in KNOWN_VERSIONS:
        raise EngineSetupError(f"vLLM {VERSION} was not tried: {', '.join(KNOWN_VERSIONS)} were")
    try:
        _start_process_group()
        settings = _vllm_config(config)
        cache_config = _cache_config(config.num_blocks, config.groups)
        block_size, hash_size = resolve_kv_cache_block_sizes(cache_config, settings)
        scheduler = (AsyncScheduler if config.asynchronous else Scheduler)(
            vllm_config=settings,
            kv_cache_config=cache_config,
            structured_output_manager=_structured_output_manager(),
            block_size=block_size,
            hash_block_size=hash_size,
            mm_registry=None,
            log_stats=True,
        )
        runner = _runner(config, cache_config)
    except (ValueError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise EngineSetupError(f"vLLM refuses {config}: {reason}") from error
    _require_as_asked(config, scheduler)
    return Parts(scheduler, runner, hash_size)


def _cache_config(num_blocks: int, groups: Sequence[Group]) -> Any:
    return NamesNewBlocks(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[group_spec(index, group) for index, group in enumerate(groups)],
    )
