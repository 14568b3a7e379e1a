"""Blocks of requests that have left, kept until nothing in flight uses them any more.

This is a scheduler's doing, and a driven manager has none: so it is done here as the
driver does it.  Whatever a request has left comes back as one batch over all groups,
reversed, at the end of the last thing that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvproof_spec.derived import tokens_in_flight, transfer_of
from kvproof_spec.pages import NULL_BLOCK
from kvproof_spec.state import Request, State


class KeptBack(NamedTuple):
    """The blocks of one request, and what they wait for."""

    request: int
    blocks: tuple[int, ...]  # of all groups, each in table order
    step: int | None  # the last one that was in flight
    transfer: bool  # a store, or a load that goes on without the request

    @property
    def waits(self) -> bool:
        return self.transfer or self.step is not None


class Returns:
    """What is kept back, in the order of the releases."""

    def __init__(self, kept: tuple[KeptBack, ...] = ()) -> None:
        self.kept = kept

    def keep(self, kept: KeptBack) -> None:
        self.kept += (kept,)

    def step_completed(self, step: int) -> Iterator[tuple[int, ...]]:
        """The batches that come back, each in its order."""
        return self._given_back(
            [
                each._replace(step=None) if each.step is not None and each.step <= step else each
                for each in self.kept
            ]
        )

    def transfer_completed(self, request_id: int) -> Iterator[tuple[int, ...]]:
        return self._given_back(
            [
                each._replace(transfer=False) if each.request == request_id else each
                for each in self.kept
            ]
        )

    def _given_back(self, kept: list[KeptBack]) -> Iterator[tuple[int, ...]]:
        self.kept = tuple([each for each in kept if each.waits])
        return (each.blocks[::-1] for each in kept if not each.waits)

    def blocks(self) -> tuple[int, ...]:
        """One entry a reference."""
        if not self.kept:
            return ()
        blocks = [block for each in self.kept for block in each.blocks]
        return tuple([block for block in blocks if block != NULL_BLOCK])


def waiting(state: State, request: Request) -> KeptBack:
    """What the blocks of a request that leaves now have to wait for, if anything."""
    in_flight = state.config.defers_returns and tokens_in_flight(state, request)
    stored = transfer_of(state, request.id, inbound=False) is not None
    step = state.steps[-1].id if in_flight else None
    return KeptBack(request.id, (), step, stored or request.status == "loading")
