"""What a scheduler sends out: a step with its rows, and the loads that begin beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvproof_reference.block_pool import Copy
from kvproof_reference.coordinator import BlockIds

Kind = Literal["new", "resumed", "running"]


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: what the worker is sent.

    The step computes `num_scheduled_tokens` tokens from `num_computed_tokens` on, and
    `samples` the next one.  The row of a running request grows by `block_ids`, by group;
    that of a new or resumed one is replaced by them.  The last `num_external_tokens` of the
    computed tokens come with the step.
    """

    request_id: int
    kind: Kind
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    block_ids: BlockIds
    num_external_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """An unordered load of `num_external_tokens` tokens that begins after a hit."""

    request_id: int
    num_hit_tokens: int
    num_external_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, its rows in the order in which they got their blocks.

    Pages are copied and cleared before the rows are computed.  `withdrawn` rows were taken
    back in the same call, since their requests were preempted: they are not part of the
    step.  `finished` requests have left since the step before.
    """

    step_id: int
    rows: tuple[Row, ...]
    preempted: tuple[int, ...]
    finished: tuple[int, ...]
    withdrawn: tuple[Row, ...] = ()
    loads: tuple[Load, ...] = ()
    copies: tuple[Copy, ...] = ()
    cleared: tuple[int, ...] = ()  # block ids


@dataclass(slots=True)
class StepInTheMaking:
    """A step that is being put together; `budget` is what it may still compute, in tokens."""

    budget: int
    rows: dict[int, Row] = field(default_factory=dict)  # by request id
    preempted: list[int] = field(default_factory=list)
    withdrawn: list[Row] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows[row.request_id] = row
        self.budget -= row.num_scheduled_tokens

    def take_back(self, request_id: int) -> bool:
        row = self.rows.pop(request_id, None)
        if row is None:
            return False
        self.withdrawn.append(row)
        self.budget += row.num_scheduled_tokens
        return True


@dataclass(frozen=True, slots=True)
class Ended:
    """The requests that a returned step has ended, and those of them that are being stored."""

    finished: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()


@dataclass(slots=True)
class Stats:
    """What a scheduler counts of itself, since its start.

    `queries` are the known tokens of requests when they were admitted, `hits` those of them
    that the cache had.
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0
