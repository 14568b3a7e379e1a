"""VLLM alone: a window block that the next step reads is null.  Exits 1 when it happens.

A connector loads every token of a prompt, as NIXL does on the decode side.  The blocks are
allocated for a request whose next token is N, then N - 1 is computed again, and its window
may begin one block further left.
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
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, WINDOW, PROMPT, BLOCKS, LENGTH = 16, 32, 47, 33, 256


class WholePrompt(KVConnectorBase_V1, SupportsHMA):
    """The remote side has every token of the prompt."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return request.num_prompt_tokens - computed, True

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
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=LENGTH,
        is_encoder_decoder=False,
    ),
    cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
    device_config=DeviceConfig("cpu"),
    kv_transfer_config=KVTransferConfig(
        kv_connector="WholePrompt", kv_connector_module_path=__name__, kv_role="kv_consumer"
    ),
)
config.cache_config.num_gpu_blocks = BLOCKS
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
shape: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
specs = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=WINDOW)
groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
scheduler = Scheduler(
    vllm_config=config,
    kv_cache_config=KVCacheConfig(BLOCKS, [], groups),
    structured_output_manager=StructuredOutputManager(config),
    block_size=BLOCK,
    hash_block_size=BLOCK,
    mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model: False),
)
request = Request(
    request_id="R",
    prompt_token_ids=list(range(PROMPT)),
    sampling_params=SamplingParams(max_tokens=4),
    pooling_params=None,
    block_hasher=get_request_block_hasher(BLOCK, sha256),
)
scheduler.add_request(request)
loading = scheduler.schedule()
arrived = KVConnectorOutput(finished_recving={"R"})
scheduler.update_from_output(loading, ModelRunnerOutput([], {}, kv_connector_output=arrived))
(row,) = scheduler.schedule().scheduled_new_reqs
first = row.num_computed_tokens - WINDOW + 1
window = row.block_ids[1]
missing = [p for p in range(first, row.num_computed_tokens) if not window[p // BLOCK]]
print(f"vLLM {vllm.__version__}: the step computes token {row.num_computed_tokens} of {PROMPT}")
print(f"its window of {WINDOW} reads {first} on; the window group has {window}")
print(f"positions read from the null block: {missing}")
sys.exit(1 if missing else 0)
