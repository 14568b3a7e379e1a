"""The genuine KVCacheManager of an installed vLLM, unmodified, driven action by action.

Releases differ in their signatures, not in the meaning of what is used here: an argument
that a release does not know is left out if it is at its default, else unsupported.
Observed on vLLM 0.23 to 0.33 (vllm/v1/core/kv_cache_manager.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import warnings
from typing import Any

from kvproof_spec.actions import Allocate
from kvproof_spec.answers import Answer, Forgotten, Granted, Hit, Issued, Raised, Refused, Snapshot
from kvproof_spec.config import Config, Group
from kvproof_spec.pages import NULL_BLOCK, Tables
from kvproof_stateful.target import Hello, UnsupportedConfig
from kvproof_stateful.targets.driven import DrivenTarget, Progress

logging.disable(logging.WARNING)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core import kv_cache_manager, kv_cache_utils
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request, RequestStatus

    try:
        from vllm.utils.hashing import sha256
    except ImportError:
        from vllm.utils import sha256

kv_cache_utils.init_none_hash(sha256)


def known_arguments(function: Any, **given: Any) -> dict[str, Any]:
    """Of `given`, what `function` takes in this release."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in parameters}


ALLOCATE = set(inspect.signature(kv_cache_manager.KVCacheManager.allocate_slots).parameters)
FEATURES = {
    "full",
    "sliding",
    "uncached",
    "lookahead",
    "external",
    "preempt",
    "abort",
    "unissued",
    "forget",
    "trim",
    "publish",
    "async",
}


def cache_spec(group: Group) -> Any:
    """VLLM's description of a group: one head of size one in float32."""
    kind = SlidingWindowSpec if group.kind == "sliding" else FullAttentionSpec
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
        "use_mla": False,
    }
    if group.kind == "sliding":
        given["sliding_window"] = group.window
    return kind(**{name: value for name, value in given.items() if name in fields})


class VllmManagerTarget(DrivenTarget):
    """Driven.  Its deferred returns are the driver's own, as in vLLM's scheduler."""

    def hello(self) -> Hello:
        return Hello(
            name="vllm-manager",
            version=vllm.__version__,
            features=frozenset(FEATURES),
            claims=("I1", "I2", "I3", "I4", "I6", "R1", "R2", "R3", "R4", "R5", "R7"),
        )

    def build(self, config: Config) -> None:
        sizes = [group.block_size for group in config.groups]
        groups = [
            KVCacheGroupSpec([f"layer.{index}"], cache_spec(group))
            for index, group in enumerate(config.groups)
        ]
        cache_config = KVCacheConfig(
            num_blocks=config.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        )
        given = known_arguments(
            kv_cache_manager.KVCacheManager.__init__,
            kv_cache_config=cache_config,
            max_model_len=config.max_model_len,
            enable_caching=config.caching,
            use_eagle=False,
            log_stats=False,
            hash_block_size=math.gcd(*sizes),
            scheduler_block_size=math.lcm(*sizes),
            max_num_batched_tokens=config.max_in_flight_tokens,
            max_in_flight_tokens=config.max_in_flight_tokens,
        )
        self.manager = kv_cache_manager.KVCacheManager(**given)
        self.pool = self.manager.block_pool
        self.hasher = kv_cache_utils.get_request_block_hasher(math.gcd(*sizes), sha256)
        self.known: dict[int, Any] = {}
        self.deferred: list[tuple[int, list[Any]]] = []

    def submit(self, progress: Progress) -> None:
        given = known_arguments(
            Request.__init__,
            request_id=str(progress.id),
            prompt_token_ids=list(progress.tokens),
            sampling_params=SamplingParams(max_tokens=16),
            pooling_params=None,
            eos_token_id=0,
            block_hasher=self.hasher,
            arrival_time=0.0,
        )
        self.known[progress.id] = Request(**given)

    def _request(self, progress: Progress) -> Any:
        request = self.known[progress.id]
        request.num_computed_tokens = progress.computed
        request.num_in_flight_tokens = progress.in_flight
        return request

    def lookup(self, progress: Progress) -> Hit:
        blocks, tokens, *_ = self.manager.get_computed_blocks(self._request(progress))
        self.hit_blocks = blocks
        return Hit(tokens, tuple(tuple(b.block_id for b in group) for group in blocks.blocks))

    def allocate(self, progress: Progress, action: Allocate) -> Answer:
        request = self._request(progress)
        options = {
            "num_lookahead_tokens": action.lookahead,
            "num_external_computed_tokens": action.external,
            "delay_cache_blocks": action.unordered,
            "full_sequence_must_fit": action.whole_sequence,
            "reserved_blocks": action.headroom,
        }
        unknown = [name for name, value in options.items() if value and name not in ALLOCATE]
        if unknown:
            raise UnsupportedConfig(f"vLLM {vllm.__version__} has no {', '.join(unknown)}")
        try:
            new = self.manager.allocate_slots(
                request,
                action.new,
                progress.hit,
                None if progress.admitted else self.hit_blocks,
                **{name: value for name, value in options.items() if value},
            )
        except Exception as error:
            return Raised(f"{type(error).__name__}: {error}")
        if new is None:
            return Refused(self.tables(progress.id))
        request.status = RequestStatus.RUNNING
        return Granted(self.tables(progress.id), tuple(map(tuple, new.get_block_ids())))

    def issue(self, rows: list[Progress]) -> Issued:
        if hasattr(self.manager, "take_kv_cache_block_copies"):
            _, pinned = self.manager.take_kv_cache_block_copies()
            self.pool.free_blocks(pinned)
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()
        return Issued()

    def step_completed(self, step: int) -> tuple[int, ...]:
        while self.deferred and self.deferred[0][0] <= step:
            self.pool.free_blocks(reversed(self.deferred.pop(0)[1]))
        return self._kept_back()

    def _kept_back(self) -> tuple[int, ...]:
        kept = (block.block_id for _, blocks in self.deferred for block in blocks)
        return tuple(block for block in kept if block != NULL_BLOCK)

    def sampled(self, progress: Progress, symbols: list[int]) -> None:
        super().sampled(progress, symbols)
        self.known[progress.id].append_output_token_ids(symbols)

    def publish(self, progress: Progress, tokens: int) -> None:
        self.manager.cache_blocks(self._request(progress), tokens)

    def trim(self, progress: Progress, processed: int) -> None:
        if hasattr(self.manager, "remove_skipped_blocks"):
            self.manager.remove_skipped_blocks(str(progress.id), processed)
        else:
            self.manager.coordinator.remove_skipped_blocks(str(progress.id), processed)

    def free(self, progress: Progress, in_use_until: int | None) -> tuple[int, ...]:
        request = self._request(progress)
        if in_use_until is None:
            self.manager.free(request)
        elif not hasattr(self.manager, "pop_blocks_for_free"):
            raise UnsupportedConfig(f"vLLM {vllm.__version__} cannot defer the return of blocks")
        else:
            blocks = self.manager.pop_blocks_for_free(request)
            if blocks:
                self.deferred.append((in_use_until, blocks))
        request.status = RequestStatus.PREEMPTED
        return self._kept_back()

    def forget(self, blocks: tuple[int, ...] | None) -> Forgotten:
        if blocks is None:
            return Forgotten(self.manager.reset_prefix_cache())
        self.manager.evict_blocks(set(blocks))
        return Forgotten(True)

    def tables(self, request_id: int) -> Tables:
        name = str(request_id)
        managers = self.manager.coordinator.single_type_managers
        return tuple(tuple(b.block_id for b in m.req_to_blocks.get(name, ())) for m in managers)

    def snapshot(self) -> Snapshot:
        forward, backward = walk_free_queue(self.pool.free_block_queue)
        index = self.pool.cached_block_hash_to_block
        return Snapshot(
            free_order=forward,
            free_order_reversed=backward,
            free_blocks=self.pool.get_num_free_blocks(),
            reference_counts=tuple(block.ref_cnt for block in self.pool.blocks),
            tables=tuple((request, self.tables(request)) for request in self.requests),
            keys=tuple(
                sorted(
                    (int.from_bytes(key[-4:], "big"), copies_of(copies))
                    for key, copies in getattr(index, "_cache", index).items()
                )
            ),
        )


def walk_free_queue(queue: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Block ids along the next pointers, and along the previous ones, reversed."""
    forward = tuple(block.block_id for block in queue.get_all_free_blocks())
    backward = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head and block is not None:
        backward.append(block.block_id)
        block = block.prev_free_block
    return forward, tuple(reversed(backward))


def copies_of(copies: Any) -> tuple[int, ...]:
    """A key's value is one block, or a dict of copies by block id."""
    return tuple(copies) if isinstance(copies, dict) else (copies.block_id,)
