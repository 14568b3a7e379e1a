"""The worker's side: block table rows built only from what it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

from kvproof_reference.coordinator import BlockIds


class Worker:
    """One row a request, one part a group.

    A running request is sent only its new ids, so left of the window its row may name
    blocks that the manager has given back.
    """

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[int, BlockIds] = {}

    def row(self, request_id: int) -> BlockIds:
        return self._rows[request_id]

    def replace(self, request_id: int, block_ids: Sequence[Sequence[int]]) -> None:
        """The whole row of a request that is new or resumed."""
        self._rows[request_id] = tuple(tuple(part) for part in block_ids)

    def append(self, request_id: int, new_block_ids: Sequence[Sequence[int]]) -> None:
        """What a running request was granted."""
        self._rows[request_id] = tuple(
            (*part, *new) for part, new in zip(self._rows[request_id], new_block_ids, strict=True)
        )

    def remove(self, request_id: int) -> None:
        del self._rows[request_id]

    def clone(self) -> Self:
        twin = copy(self)
        twin._rows = self._rows.copy()
        return twin
