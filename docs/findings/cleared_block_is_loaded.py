"""VLLM alone: a step clears a block that a load fills meanwhile.  Exits 1 when it happens.

With pages that must be zeroed (Mamba beside attention, or mixed precision) each step names the
blocks to clear first.  A request that is scheduled and preempted in the same call gives its new
blocks back at once; they stay on that list, and while the step is in flight the next call may
give them to an asynchronous KV load, which is not ordered with the step.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_CONFIGURE_LOGGING="0")

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, BLOCKS, LENGTH = 4, 14, 256  # block 0 is the null block


class HasTheLoader(KVConnectorBase_V1, SupportsHMA):
    """The remote side has the first block of one request."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return (BLOCK, True) if request.request_id == "loader" else (0, False)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return 0, 1

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **options: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, name: str, layer: Any, metadata: Any, **options: Any) -> None: ...

    def wait_for_save(self) -> None: ...


config = VllmConfig(
    scheduler_config=SchedulerConfig(
        policy="priority",
        long_prefill_token_threshold=12,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=LENGTH,
        scheduler_reserve_full_isl=False,
        is_encoder_decoder=False,
    ),
    cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
    device_config=DeviceConfig("cpu"),
    kv_transfer_config=KVTransferConfig(
        kv_connector="HasTheLoader", kv_connector_module_path=__name__, kv_role="kv_consumer"
    ),
)
config.scheduler_config.async_scheduling = True  # which a CPU platform has switched off
config.cache_config.num_gpu_blocks = BLOCKS
config.cache_config.mamba_cache_mode = "align"
model = {
    "max_model_len": LENGTH,
    "runner_type": "generate",
    "multimodal_config": None,
    "skip_tokenizer_init": True,
}
off = ("is_diffusion", "is_moe", "is_encoder_decoder", "return_sampling_mask", "uses_mrope")
off += ("supports_multimodal_inputs", "enable_return_routed_experts")
model |= dict.fromkeys(off, False)
object.__setattr__(config, "model_config", SimpleNamespace(**model))
init_none_hash(sha256)
specs = (
    FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32),
    MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
)
groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
scheduler = AsyncScheduler(
    vllm_config=config,
    kv_cache_config=KVCacheConfig(BLOCKS, [], groups),
    structured_output_manager=StructuredOutputManager(config),
    block_size=BLOCK,
    hash_block_size=BLOCK,
    mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model: False),
)
assert scheduler.defer_block_free, "vLLM does not keep blocks back for steps in flight"


def submit(name: str, tokens: list[int], priority: int, max_tokens: int = 2) -> None:
    request = Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    scheduler.add_request(request)


def schedule() -> Any:
    output = scheduler.schedule()
    preempted = sorted(output.preempted_req_ids or ())
    to_clear = output.new_block_ids_to_zero or []
    print(f"scheduled {output.num_scheduled_tokens}, preempted {preempted}, to clear {to_clear}")
    return output


def returned(output: Any, sampling: list[str]) -> None:
    names = list(output.num_scheduled_tokens)
    sampled = [[7] if name in sampling else [] for name in names]
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(output, ModelRunnerOutput(names, places, sampled))


submit("victim", list(range(40)), priority=9)
submit("first", [100], priority=0, max_tokens=1)  # alone, the victim would not be cut in chunks
returned(schedule(), ["first"])
submit("urgent", list(range(50, 54)), priority=0)
returned(schedule(), ["urgent"])
in_flight = schedule()  # the victim gets its third chunk, the urgent request takes it all back
submit("loader", list(range(80, 85)), priority=1)
schedule()
loaded = scheduler.kv_cache_manager.get_block_ids("loader")
both = sorted({b for table in loaded for b in table} & set(in_flight.new_block_ids_to_zero))
print(f"vLLM {vllm.__version__}: a load fills {loaded}, the step in flight clears {both} of it")
sys.exit(1 if both else 0)
