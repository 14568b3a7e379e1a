"""The genuine BlockPool of an installed vLLM, alone and unmodified, for the scenarios."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from kvproof_spec.answers import Snapshot
from kvproof_stateful.targets.vllm_manager import known_arguments

BLOCK_SIZE = 2


def digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


class VllmPool:
    """vLLM's BlockPool by block ids; a key is that of a request of one full block."""

    def __init__(self, num_blocks: int) -> None:
        given = known_arguments(
            BlockPool.__init__,
            num_gpu_blocks=num_blocks,
            enable_caching=True,
            hash_block_size=BLOCK_SIZE,
        )
        self.pool = BlockPool(**given)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, digest)
        self.requests: dict[str, Any] = {}

    def _request(self, name: str) -> Any:
        if name not in self.requests:
            tokens = [1 + len(self.requests)] * BLOCK_SIZE
            given = known_arguments(
                Request.__init__,
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                eos_token_id=0,
                block_hasher=self.hasher,
                arrival_time=0.0,
            )
            self.requests[name] = Request(**given)
        return self.requests[name]

    def _blocks(self, blocks: Sequence[int]) -> list[Any]:
        return [self.pool.blocks[block] for block in blocks]

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def touch(self, blocks: Sequence[int]) -> None:
        self.pool.touch(self._blocks(blocks))

    def free(self, blocks: Sequence[int]) -> None:
        self.pool.free_blocks(self._blocks(blocks))

    def publish(self, name: str, block: int) -> None:
        given = known_arguments(
            self.pool.cache_full_blocks,
            request=self._request(name),
            blocks=self._blocks((block,)),
            num_cached_blocks=0,
            num_full_blocks=1,
            block_size=BLOCK_SIZE,
            kv_cache_group_id=0,
        )
        self.pool.cache_full_blocks(**given)

    def find(self, name: str) -> int | None:
        found = self.pool.get_cached_block(self._request(name).block_hashes[0], [0])
        return found[0].block_id if found else None

    def evict(self, block: int) -> None:
        self.pool.evict_blocks({block})

    def reset(self) -> bool:
        return bool(self.pool.reset_prefix_cache())

    def shown(self) -> Snapshot:
        queue = self.pool.free_block_queue
        head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
        return Snapshot(
            free_order=self._walk(head, "next_free_block", tail),
            free_order_reversed=self._walk(tail, "prev_free_block", head)[::-1],
            free_blocks=self.pool.get_num_free_blocks(),
            reference_counts=tuple(block.ref_cnt for block in self.pool.blocks),
        )

    def _walk(self, block: Any, link: str, end: Any) -> tuple[int, ...]:
        """Ids along the links: those of a broken list may lead round for ever, or nowhere."""
        found: list[int] = []
        while len(found) <= 2 * len(self.pool.blocks):
            block = getattr(block, link)
            if block is None or block is end:
                break
            found.append(block.block_id)
        return tuple(found)
