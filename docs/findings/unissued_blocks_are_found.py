"""vLLM alone: a prefix hit on blocks that no step ever wrote.  Exits 1 when it happens.

A running request is scheduled, and preempted later in the same schedule() call for a more
urgent one.  The blocks of its cancelled chunk were published when they were allocated, and
freeing them leaves them in the index.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_CONFIGURE_LOGGING="0")

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, BLOCKS, LENGTH = 4, 9, 256  # block 0 is the null block

config = VllmConfig(
    scheduler_config=SchedulerConfig(
        policy="priority",
        long_prefill_token_threshold=8,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=LENGTH,
        is_encoder_decoder=False,
    ),
    cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
    device_config=DeviceConfig("cpu"),
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
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
scheduler = Scheduler(
    vllm_config=config,
    kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
    structured_output_manager=StructuredOutputManager(config),
    block_size=BLOCK,
    hash_block_size=BLOCK,
    mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model: False),
)


def submit(name: str, tokens: list[int], priority: int) -> None:
    request = Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    scheduler.add_request(request)


def step() -> Any:
    output = scheduler.schedule()
    rows = output.num_scheduled_tokens
    admitted = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    for name, tokens in rows.items():
        end = admitted.get(name, len(written.get(name, ()))) + tokens
        written[name] = range(end)
    print(f"scheduled {rows}, hits {admitted}, preempted {output.preempted_req_ids or ()}")
    names = list(rows)
    sampled = [[7] if name == "urgent" or len(written[name]) > 28 else [] for name in names]
    scheduler.update_from_output(
        output, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
    )
    return admitted


written: dict[str, range] = {}
submit("victim", list(range(28)), priority=9)
submit("waiting", list(range(200, 229)), priority=10)  # too long for the pool: it only waits
step()
submit("urgent", list(range(100, 108)), priority=0)
step()
step()  # the victim gets its third chunk, the urgent request takes it all back
computed = len(written["victim"])
submit("reader", [*range(20), 555], priority=1)
hit = step().get("reader", 0)
print(f"vLLM {vllm.__version__}: {computed} tokens were ever computed, the hit has {hit}")
sys.exit(1 if hit > computed else 0)
