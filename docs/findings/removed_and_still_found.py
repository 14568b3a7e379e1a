"""VLLM alone: a removal is announced, and a lookup still finds it.  Exits 1 when it happens.

Two requests of the same step compute the same block, so the key has two copies.  When one of
them is reused, the event stream says that the key is gone.
"""

import sys

import torch
import vllm
from vllm.distributed.kv_events import BlockRemoved
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK, BLOCKS = 4, 5  # block 0 is the null block

init_none_hash(sha256)
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
manager = KVCacheManager(
    kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
    max_model_len=256,
    scheduler_block_size=BLOCK,
    hash_block_size=BLOCK,
    enable_kv_cache_events=True,
)


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def admit(submitted: Request) -> None:
    blocks, computed, *_ = manager.get_computed_blocks(submitted)
    manager.allocate_slots(submitted, submitted.num_tokens - computed, computed, blocks)
    print(f"{submitted.request_id} has blocks {manager.get_block_ids(submitted.request_id)}")


one, two = request("one", [1, 1, 1, 1]), request("two", [1, 1, 1, 1])
admit(one)
admit(two)
manager.free(one)
manager.free(two)
manager.take_events()
admit(request("other", list(range(10, 22))))
removed = [e for e in manager.take_events() if isinstance(e, BlockRemoved)]
_, hit, *_ = manager.get_computed_blocks(request("reader", [1, 1, 1, 1, 2]))
print(f"vLLM {vllm.__version__}: {len(removed)} removal is announced, the hit has {hit} tokens")
sys.exit(1 if removed and hit else 0)
