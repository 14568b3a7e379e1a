"""VLLM alone: an allocation that was said to fit takes more blocks.  Exits 1 when it happens.

Full attention beside a Mamba group in "align" mode, and external tokens: the Mamba group
announces one block and takes two, for the loaded state and for the running one.
"""

import sys

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

BLOCK, EXTERNAL, NEW, FREE = 4, 40, 1, 12

init_none_hash(sha256)
specs = (
    FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32),
    MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
)
groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
manager = KVCacheManager(
    kv_cache_config=KVCacheConfig(FREE + 1, [], groups),
    max_model_len=256,
    scheduler_block_size=BLOCK,
    hash_block_size=BLOCK,
)
request = Request(
    request_id="R",
    prompt_token_ids=list(range(EXTERNAL + NEW)),
    sampling_params=SamplingParams(max_tokens=4),
    pooling_params=None,
    block_hasher=get_request_block_hasher(BLOCK, sha256),
)
blocks, computed, *_ = manager.get_computed_blocks(request)
print(f"vLLM {vllm.__version__}: {FREE} blocks are free, {EXTERNAL} external tokens and {NEW} new")
try:
    answer = manager.allocate_slots(
        request, NEW, computed, blocks, num_external_computed_tokens=EXTERNAL
    )
except ValueError as error:
    left = manager.block_pool.get_num_free_blocks()
    print(f"instead of None: {type(error).__name__}: {error}; {left} blocks are left")
    sys.exit(1)
print(f"the answer is {answer}")
