"""vLLM's BlockPool alone: wrong calls are neither refused nor harmless.  Exits 1 if so."""

import os
import sys
from typing import Any

os.environ.update(VLLM_CONFIGURE_LOGGING="0")

import vllm
from vllm.v1.core.block_pool import BlockPool

BLOCKS = 4  # block 0 is the null block


def shown(pool: BlockPool) -> str:
    listed = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    counts = [block.ref_cnt for block in pool.blocks[1:]]
    return f"counts {counts}, listed {listed}, {pool.get_num_free_blocks()} free"


def attempt(what: str, call: Any) -> None:
    try:
        print(f"  {what}: {call()}")
    except Exception as error:
        print(f"  {what}: raised {type(error).__name__} {error}")


def start(title: str) -> Any:
    print(title)
    return BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=2)


print(f"vLLM {vllm.__version__}")

pool = start("a block held once stands twice in one batch")
(block,) = pool.get_new_blocks(1)
attempt("free it", lambda: pool.free_blocks([block, block]))
print(f"  {shown(pool)}")
wrong = block.ref_cnt != 0
attempt("take all three", lambda: [taken.block_id for taken in pool.get_new_blocks(3)])
print(f"  {shown(pool)}")

pool = start("a block is freed again")
(block,) = pool.get_new_blocks(1)
pool.free_blocks([block])
attempt("free it again", lambda: pool.free_blocks([block]))
print(f"  {shown(pool)}")
wrong |= block.ref_cnt != 0

pool = start("-1 blocks are asked for")
attempt("take them", lambda: pool.get_new_blocks(-1))
print(f"  {shown(pool)}")
wrong |= pool.get_num_free_blocks() != BLOCKS - 1
attempt("take four of three", lambda: [taken.block_id for taken in pool.get_new_blocks(4)])

sys.exit(1 if wrong else 0)
