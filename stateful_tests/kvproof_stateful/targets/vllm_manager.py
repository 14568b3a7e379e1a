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
from kvproof_spec.answers import (
    Answer,
    Event,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Raised,
    Refused,
    Snapshot,
)
from kvproof_spec.choices import FEATURES
from kvproof_spec.config import Config, Group
from kvproof_spec.pages import NULL_BLOCK, Copy, Tables
from kvproof_spec.prefix import Inputs
from kvproof_stateful.target import Hello, UnsupportedConfig
from kvproof_stateful.targets.driven import DrivenTarget, Progress
from kvproof_stateful.targets.vllm_environment import prepare_for_vllm

logging.disable(logging.WARNING)
prepare_for_vllm()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import vllm
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_manager, kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
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
SPECS = {
    "full": "FullAttentionSpec",
    "sliding": "SlidingWindowSpec",
    "chunked": "ChunkedLocalAttentionSpec",
    "state": "MambaSpec",
    "cross": "CrossAttentionSpec",
}
"""By kind, vLLM's class in vllm/v1/kv_cache_interface.py."""


def features() -> frozenset[str]:
    """What this release can be asked for: it has no worker, and no part in transfers."""
    manager = kv_cache_manager.KVCacheManager
    optional = {
        "mixed": "scheduler_block_size" in inspect.signature(manager.__init__).parameters,
        "partial": hasattr(manager, "take_kv_cache_block_copies"),
        "drafter": "is_eagle_group" in fields_of(KVCacheGroupSpec),
        "clear": "skip_zeroing_group_ids" in ALLOCATE,
        "events": "group_idx" in BlockRemoved.__struct_fields__,
    }
    missing = {feature for feature, there in optional.items() if not there}
    return frozenset(FEATURES) - {"worker", "store", "abort-loading"} - missing


def fields_of(record: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


class ClearsPages(KVCacheConfig):  # type: ignore[misc]
    """A cache whose new blocks must be zeroed, as vLLM has for mixed precision."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


def cache_spec(group: Group) -> Any:
    """VLLM's description of a group: one head of size one in float32."""
    kind = getattr(kv_cache_interface, SPECS[group.kind])
    known = fields_of(kind)
    given = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
        "use_mla": False,
        "sliding_window": group.window,
        "attention_chunk_size": group.window,
    }
    if group.kind == "state":
        given |= {"shapes": ((1,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    return kind(**{name: value for name, value in given.items() if name in known})


def group_spec(index: int, group: Group) -> Any:
    drafter = {"is_eagle_group": True} if group.drafter else {}
    return KVCacheGroupSpec([f"layer.{index}"], cache_spec(group), **drafter)


def request_inputs(inputs: Inputs, tokens: int) -> dict[str, Any]:
    """What else decides a prompt's content, as vLLM's Request takes it.

    Another version of an adapter has the same name and another path.
    """
    given: dict[str, Any] = {"cache_salt": inputs.salt}
    if inputs.lora is not None:
        path = f"{inputs.lora}/{inputs.lora_version}"
        given["lora_request"] = LoRARequest(inputs.lora, 1, path)
    if inputs.items:
        given["mm_features"] = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=item.id,
                mm_position=PlaceholderRange(offset=item.first, length=item.tokens),
            )
            for item in sorted(inputs.items, key=lambda item: item.first)
        ]
    if inputs.embeds:
        given["prompt_embeds"] = torch.zeros(tokens, 1)
        given["prompt_is_token_ids"] = [True] * tokens
        for position, embedding in inputs.embeds:
            given["prompt_embeds"][position] = 1 + embedding
            given["prompt_is_token_ids"][position] = False
    return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(slots=True)
class KeptBack:
    """Blocks of a request that has left, and what they wait for."""

    request: int
    blocks: list[Any]
    step: int | None  # the last that was in flight
    transferring: bool


class VllmManagerTarget(DrivenTarget):
    """Driven.  Its deferred returns are the driver's own, as in vLLM's scheduler."""

    def hello(self) -> Hello:
        return Hello(
            name="vllm-manager",
            version=vllm.__version__,
            features=features(),
            claims=(
                *("I1", "I2", "I3", "I4", "I6"),
                *("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R10"),
            ),
        )

    def make_pool(self, num_blocks: int) -> Any:
        from kvproof_stateful.targets.vllm_pool import VllmPool

        return VllmPool(num_blocks)

    def build(self, config: Config) -> None:
        cache_config = (ClearsPages if config.clears else KVCacheConfig)(
            num_blocks=config.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[group_spec(*numbered) for numbered in enumerate(config.groups)],
        )
        given = known_arguments(
            kv_cache_manager.KVCacheManager.__init__,
            kv_cache_config=cache_config,
            max_model_len=config.max_model_len,
            enable_caching=config.caching,
            use_eagle=any(group.drafter for group in config.groups),
            log_stats=False,
            enable_kv_cache_events=config.events,
            hash_block_size=config.hash_block,
            scheduler_block_size=math.lcm(*(group.block_size for group in config.groups)),
            max_num_batched_tokens=config.max_in_flight_tokens,
            max_in_flight_tokens=config.max_in_flight_tokens,
        )
        self.manager = kv_cache_manager.KVCacheManager(**given)
        self.pool = self.manager.block_pool
        finds_partial = getattr(self.manager.coordinator, "enable_partial_hash_hits", False)
        if config.caching and bool(finds_partial) != (config.partial_boundary is not None):
            raise UnsupportedConfig(f"vLLM {vllm.__version__} finds hits inside blocks otherwise")
        self.hasher = kv_cache_utils.get_request_block_hasher(config.hash_block, sha256)
        self.known: dict[int, Any] = {}
        self.kept: list[KeptBack] = []

    def submit(self, progress: Progress) -> None:
        inputs = request_inputs(progress.inputs, len(progress.tokens))
        unknown = inputs.keys() - known_arguments(Request.__init__, **inputs).keys()
        if unknown:
            raise UnsupportedConfig(f"vLLM {vllm.__version__} has no {', '.join(sorted(unknown))}")
        given = known_arguments(
            Request.__init__,
            request_id=str(progress.id),
            prompt_token_ids=list(progress.tokens),
            sampling_params=SamplingParams(max_tokens=16),
            pooling_params=None,
            eos_token_id=0,
            block_hasher=self.hasher,
            arrival_time=0.0,
            **inputs,
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
        options: dict[str, Any] = {
            "num_lookahead_tokens": action.lookahead,
            "num_external_computed_tokens": action.external,
            "delay_cache_blocks": action.unordered,
            "full_sequence_must_fit": action.whole_sequence,
            "reserved_blocks": action.headroom,
            "num_encoder_tokens": 0 if progress.admitted else progress.encoder_tokens,
        }
        if action.unordered and self.config.clears:
            options["skip_zeroing_group_ids"] = tuple(range(len(self.config.groups)))
        unknown = [name for name, value in options.items() if value and name not in ALLOCATE]
        if unknown:
            raise UnsupportedConfig(f"vLLM {vllm.__version__} has no {', '.join(unknown)}")
        before = self._pending_copies()
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
        made = tuple(copy for copy in self._pending_copies() if copy not in before)
        ids = tuple(map(tuple, new.get_block_ids()))
        return Granted(self.tables(progress.id), ids, made)

    def _pending_copies(self) -> list[Copy]:
        return [
            Copy(group, source.block_id, destination.block_id)
            for group, manager in enumerate(self.manager.coordinator.single_type_managers)
            for source, destination in getattr(manager, "_pending_cow_copies", ())
        ]

    def issue(self, rows: list[Progress]) -> Issued:
        copies, cleared = tuple(self._pending_copies()), None
        if hasattr(self.manager, "take_kv_cache_block_copies"):
            _, pinned = self.manager.take_kv_cache_block_copies()
            self.pool.free_blocks(pinned)
        if self.config.clears:
            cleared = tuple(self.manager.take_new_block_ids())
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()
        return Issued(None, copies, cleared)

    def step_completed(self, step: int) -> tuple[int, ...]:
        for kept in self.kept:
            if kept.step is not None and kept.step <= step:
                kept.step = None
        return self._given_back()

    def clear_from(self, progress: Progress, tokens: int) -> None:
        self.manager.record_blocks_for_zeroing(str(progress.id), tokens)

    def transfer_ended(self, request_id: int) -> tuple[int, ...]:
        for kept in self.kept:
            if kept.request == request_id:
                kept.transferring = False
        return self._given_back()

    def _given_back(self) -> tuple[int, ...]:
        """Free what waits for nothing any more; the ids of the rest."""
        for kept in self.kept:
            if kept.step is None and not kept.transferring:
                self.pool.free_blocks(reversed(kept.blocks))
        self.kept = [kept for kept in self.kept if kept.step is not None or kept.transferring]
        ids = (block.block_id for kept in self.kept for block in kept.blocks)
        return tuple(block for block in ids if block != NULL_BLOCK)

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

    def free(
        self, progress: Progress, in_use_until: int | None, until_transferred: bool
    ) -> tuple[int, ...]:
        request = self._request(progress)
        if in_use_until is None and not until_transferred:
            self.manager.free(request)
        elif not hasattr(self.manager, "pop_blocks_for_free"):
            raise UnsupportedConfig(f"vLLM {vllm.__version__} cannot defer the return of blocks")
        else:
            blocks = self.manager.pop_blocks_for_free(request)
            if blocks:
                self.kept.append(KeptBack(progress.id, blocks, in_use_until, until_transferred))
        request.status = RequestStatus.PREEMPTED
        return self._given_back()

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
            findable=shown_findable(index) if self.config.events else None,
            events=tuple(map(shown_event, self.manager.take_events() or ())),
        )


def shown_findable(index: Any) -> tuple[tuple[int, str], ...]:
    """Group and name of each key that a lookup finds."""
    announced = kv_cache_utils.maybe_convert_block_hash
    return tuple(
        (int.from_bytes(key[-4:], "big"), external_name(announced(key[:-4])))
        for key in getattr(index, "_cache", index)
    )


def shown_event(event: Any) -> Event:
    if isinstance(event, AllBlocksCleared):
        return Event("cleared")
    names = tuple(map(external_name, event.block_hashes))
    if isinstance(event, BlockRemoved):
        return Event("removed", event.group_idx, names)
    assert isinstance(event, BlockStored)
    parent = event.parent_block_hash
    return Event(
        "stored", event.group_idx, names, None if parent is None else external_name(parent)
    )


def external_name(digest: Any) -> str:
    """The name of a key as vLLM announces it: bytes, or by default a number made of them."""
    return digest.hex() if isinstance(digest, bytes) else f"{digest:016x}"


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
