"""The genuine KVCacheManager of an installed vLLM 0.32, timed as the plain one is."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from kvproof_reference.request import Request
from kvproof_stateful.bench_manager.timed import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NotThere,
    Timed,
    Variant,
    extra_keys,
    make_request,
)

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request as VllmRequest

VERSION: str = vllm.__version__
_SAMPLING = SamplingParams(max_tokens=16)

init_none_hash(sha256)


class TimedVllm(Timed):
    """Digests are made by vLLM's own hasher, outside the request, to be timed apart."""

    name = "vllm"

    def build(self, num_blocks: int, variant: Variant) -> Any:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._known: dict[int, Any] = {}
        return KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=variant.events,
        )

    def make_request(self, request_id: int, tokens: Sequence[int]) -> Request:
        """The scheduler's own: its vLLM counterpart is made when it is first asked about."""
        request = make_request(request_id, tokens, self.variant)
        self._introduce(request)
        return request

    def _introduce(self, request: Request) -> None:
        keys: dict[str, Any] = {}
        if self.variant.extra_keys:
            adapter, tenant = extra_keys(request.request_id)
            number = 1 + request.request_id % 4
            keys["lora_request"] = LoRARequest(adapter, number, lora_path=adapter)
            keys["cache_salt"] = tenant
        self._known[request.request_id] = VllmRequest(
            request_id=str(request.request_id),
            prompt_token_ids=list(request.tokens),
            sampling_params=_SAMPLING,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=None,
            **keys,
        )

    def own(self, request: Request) -> Any:
        own = self._known[request.request_id]
        own.num_computed_tokens = request.num_computed_tokens
        own.num_in_flight_tokens = request.num_in_flight_tokens
        if own.num_tokens < request.num_tokens:
            own.append_output_token_ids(request.tokens[own.num_tokens :])
        return own

    def hash(self, own: Any) -> None:
        own.block_hashes.extend(self._hasher(own))

    def ids(self, granted: Any) -> Sequence[Sequence[int]] | None:
        ids: Sequence[Sequence[int]] | None = granted.get_block_ids(allow_none=True)
        return ids

    def table(self, request_id: int) -> Sequence[Sequence[int]]:
        table: Sequence[Sequence[int]] = self.manager.get_block_ids(str(request_id))
        return table

    def withdraw(self, request: Request, num_issued_tokens: int) -> None:
        """VLLM has no such call: the keys of the blocks in question are dropped."""
        (table,) = self.manager.get_block_ids(str(request.request_id))
        self.manager.evict_blocks(set(table[num_issued_tokens // BLOCK_SIZE :]))

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        del self._known[request_id]


def require_version() -> None:
    """Only this release is known to take the calls above and to decide as the plain one does."""
    if not VERSION.startswith("0.32."):
        raise NotThere(f"vLLM {VERSION} is installed, 0.32.0 is compared with")
