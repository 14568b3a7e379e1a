"""Faults of the worker's rows."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.worker import Worker
from kvproof_stateful.faults.fault import seeded


@seeded("new-blocks-sent-a-step-late", "I5")
class NewBlocksSentAStepLate(Worker):
    """What a running request was granted stands in its row from its next step on."""

    def append(self, request_id: int, new_block_ids: Sequence[Sequence[int]]) -> None:
        late: dict[int, BlockIds] = self.__dict__.setdefault("late", {})
        if request_id in late:
            super().append(request_id, late[request_id])
        late[request_id] = tuple(map(tuple, new_block_ids))


@seeded("tables-of-groups-swapped", "I5")
class TablesOfGroupsSwapped(Worker):
    """A row has the tables of the groups in another order than the layers."""

    def replace(self, request_id: int, block_ids: Sequence[Sequence[int]]) -> None:
        super().replace(request_id, block_ids[::-1])
