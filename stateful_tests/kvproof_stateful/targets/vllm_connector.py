"""A connector of our own, which vLLM finds by its module path: it decides, and moves nothing.

The remote side has the first tokens of some requests, and wants some others stored when they
end.  When a load or a store has ended is told with a step's output, by the caller.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from kvproof_spec.config import ceil_div
from kvproof_stateful.targets.vllm_environment import prepare_for_vllm

prepare_for_vllm()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.request import RequestStatus


@dataclass(frozen=True, slots=True)
class Remote:
    """What there is of a request elsewhere: `tokens` from the first on, by what kind of load."""

    tokens: int = 0
    unordered: bool = False
    stored: bool = False


NOTHING_REMOTE = Remote()


@dataclass(frozen=True, slots=True)
class Begun:
    """External tokens for which a request was given blocks."""

    tokens: int
    unordered: bool


class RemoteTokens(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """It has `remote` tokens; `begun` and `stored` are what vLLM made of them, until taken."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.remote: dict[str, Remote] = {}  # by vLLM's name of a request
        self.begun: dict[str, Begun] = {}
        self.stored: list[str] = []
        groups = self._kv_cache_config.kv_cache_groups
        self._sizes = [group.kv_cache_spec.block_size for group in groups]
        self._states = [isinstance(group.kv_cache_spec, MambaSpec) for group in groups]
        self._manager: Any = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is computed again, as with a best-effort cache.

        So vLLM delivers what a preempted request has sampled meanwhile, and does not drop it.
        """
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """As many as there are, in whole blocks, but a token must be left to compute.

        An unordered load may bring all tokens, as NIXL's does; not so where the state after
        the last but one would be needed.
        """
        remote = self.remote[request.request_id]
        known, unit = request.num_tokens, math.lcm(*self._sizes)
        most = known - (any(self._states) or not remote.unordered)
        end = min(remote.tokens, most)
        external = max(end - end % unit - computed, 0)
        if any(self._states) and not self._has_room(known):
            external = 0
        return external, remote.unordered and external > 0

    def _has_room(self, known: int) -> bool:
        """More than vLLM asks for: beside a state it takes more than it has checked (#46892)."""
        wanted = [
            3 if state else ceil_div(known, size) + 1
            for size, state in zip(self._sizes, self._states, strict=True)
        ]
        return bool(self._manager.block_pool.get_num_free_blocks() >= sum(wanted))

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._sizes)))

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if external:
            unordered = self.remote[request.request_id].unordered
            self.begun[request.request_id] = Begun(external, unordered)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """A store begins if the request ran to its end, and has blocks that can be read."""
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        if aborted or not any(block_ids) or not self.remote[request.request_id].stored:
            return False, None
        self.stored.append(request.request_id)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **options: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, name: str, layer: Any, metadata: Any, **options: Any) -> None: ...

    def wait_for_save(self) -> None: ...
