"""A connector: KV that is elsewhere, and KV that goes there, by vLLM's method names."""

from __future__ import annotations

from typing import Protocol

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.request import Request


class Connector(Protocol):
    """What a scheduler asks of a connector."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens that it has behind the computed ones, and whether it brings them by itself.

        Whole blocks of every group, and so many that a token is left; only what it brings
        by itself, in an unordered load, may be all.  The rest comes with the step.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        """The request has blocks: those tokens may be loaded."""

    def request_finished(self, request: Request, blocks: BlockIds) -> bool:
        """Whether a store reads the blocks of a request that has ended, until it is said to end."""
        ...


class NoConnector:
    """Nothing is anywhere else."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        return

    def request_finished(self, request: Request, blocks: BlockIds) -> bool:
        return False
