"""What an implementation answers: what the oracle cannot know, as far as it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvproof_spec.pages import Copy, Tables


@dataclass(frozen=True, slots=True)
class Done:
    """The action was performed; nothing more is shown."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A reusable prefix of `tokens` tokens in these blocks, nulls left of the window."""

    tokens: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class Granted:
    """The request's tables after, the copies made, and, where shown, the ids sent on."""

    tables: Tables
    new: Tables | None = None
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """No room; the request's tables after."""

    tables: Tables


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in the place of an answer; `error` is its type and text."""

    error: str


@dataclass(frozen=True, slots=True)
class SentRow:
    """The worker's row of one request as of a step, within its valid length."""

    request: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class Issued:
    """What the worker got with this step, as far as the target shows it.

    `copies` are made and the pages `cleared` are zeroed before the rows are computed.
    `deferred` is what is kept back now: the ends of copies may be, until the step returns.
    """

    rows: tuple[SentRow, ...] | None = None
    copies: tuple[Copy, ...] | None = None
    cleared: tuple[int, ...] | None = None  # block ids
    deferred: tuple[int, ...] | None = None  # block ids, one entry a reference


@dataclass(frozen=True, slots=True)
class Numbers:
    """A target's own metrics: blocks in use now, and since its start what it has counted.

    `queried` are the known tokens of requests when they were admitted, `hit` those of them
    that its own cache had.
    """

    used_blocks: int
    queried: int
    hit: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Where shown, what the target still keeps, and how far it counts its requests.

    `deferred`: blocks that requests which have left keep for steps in flight, one entry a
    reference.  `computed`: (request, computed tokens) of a target that schedules itself,
    and `numbers` what it reports of itself.
    """

    deferred: tuple[int, ...] | None = None
    computed: tuple[tuple[int, int], ...] | None = None
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The request's tables after."""

    tables: Tables


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Whether it was done; a refusal changes nothing."""

    done: bool


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part of a step that the target's own scheduler made.

    It covers positions `start` to `start + tokens - 1`.  `admitted`: the request was
    waiting before, and `start` is its hit with `external` tokens that come with the step.
    `worker` is the worker's row.
    """

    request: int
    start: int
    tokens: int
    admitted: bool
    samples: bool
    worker: Tables
    external: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledLoad:
    """An unordered load that the target's scheduler began, from `hit` tokens on."""

    request: int
    hit: int
    external: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one call of the target's scheduler did: the answer to Issue.

    `rows` stand in the order in which they were admitted; `tables` are those of all its
    requests after the call.  `unissued` are blocks that it handed out to a request and took
    back in the same call, by preempting it.  `loads` began in this call.
    """

    rows: tuple[ScheduledRow, ...]
    preempted: tuple[int, ...]
    tables: tuple[tuple[int, Tables], ...]
    deferred: tuple[int, ...] = ()
    unissued: tuple[int, ...] = ()
    loads: tuple[ScheduledLoad, ...] = ()
    copies: tuple[Copy, ...] | None = None
    cleared: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Updated:
    """What the target did with a returned step: the answer to CompleteStep.

    `finished` are the requests it ended, `stored` those of them whose blocks a store now
    reads; `computed` (request, tokens) as it counts them.
    """

    finished: tuple[int, ...]
    computed: tuple[tuple[int, int], ...]
    deferred: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    numbers: Numbers | None = None


Answer = (
    Done
    | Hit
    | Granted
    | Refused
    | Raised
    | Issued
    | Returned
    | Trimmed
    | Forgotten
    | Scheduled
    | Updated
)


@dataclass(frozen=True, slots=True)
class Event:
    """A target's announcement about its index: keys of a group that a lookup now finds, or not.

    `parent` is the key before the first of those stored.  Everything is gone with `cleared`.
    """

    what: Literal["stored", "removed", "cleared"]
    group: int = 0
    keys: tuple[str, ...] = ()
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a target shows of itself between two actions; `None` is what it does not show.

    `keys` is the index, sorted, without the names of the keys: (group, the copies in
    the order in which lookups return them).  `findable` are its keys by name, and `events`
    those since the last snapshot.
    """

    free_order: tuple[int, ...]  # block ids, next to be handed out first
    free_order_reversed: tuple[int, ...] | None = None  # walked from the other end, reversed
    free_blocks: int | None = None  # the target's own count
    reference_counts: tuple[int, ...] | None = None  # indexed by block id
    tables: tuple[tuple[int, Tables], ...] | None = None  # (request, tables), by request
    keys: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    findable: tuple[tuple[int, str], ...] | None = None
    events: tuple[Event, ...] = ()
