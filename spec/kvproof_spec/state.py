"""The state of the core: pages, what they hold, who holds them, what is in flight.

There is no hash, no index and no order of free blocks here.  Whether a hit is legal is
not looked up, it is read off the pages; references, the free set, users and usage are
derived from what is stored.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvproof_spec.config import Config
from kvproof_spec.pages import Copy, Pages, Tables
from kvproof_spec.prefix import Prefix, Symbol, extend_content

Status = Literal["waiting", "loading", "running", "preempted"]


NOTHING = Pages({})


class ActionDisabled(Exception):
    """The guard of an action is false in this state: the driver's mistake, nobody's bug."""


class Request(NamedTuple):
    """A request that the manager knows.

    `content[p]` is the prefix at position p, for every known token, `encoder[p]` that of
    its encoder's tokens.  `computed` counts the tokens of issued steps, finished or not;
    `scheduled` those granted and not yet issued, of which the last `drafts` may be
    rejected.  `load` is the range of external tokens still under way: by an unordered load
    while `loading`, else by the next step.  `issued`: a step of its present admission has
    been.  `admission` counts preemptions, so that rows of an earlier life are told apart.
    """

    id: int
    content: tuple[Prefix, ...]
    prompt_tokens: int
    encoder: tuple[Prefix, ...] = ()
    status: Status = "waiting"
    computed: int = 0
    scheduled: int = 0
    drafts: tuple[Symbol, ...] = ()
    load: tuple[int, int] | None = None
    tables: Tables = ()
    issued: bool = False
    admission: int = 0

    @property
    def known(self) -> int:
        """Tokens whose symbols are known."""
        return len(self.content)


class Row(NamedTuple):
    """One request's part of a step in flight; it outlives its request.

    The step writes positions `first_write` to `start + tokens - 1` through `tables`, the
    worker's row as of this step, and the encoder's if it is the `first` of its admission.
    `content` grows while earlier steps return; where they reject drafts, the row moves left.
    """

    request: int
    admission: int
    first: bool
    start: int
    tokens: int
    first_write: int
    samples: bool
    drafts: tuple[Symbol, ...]
    tables: Tables
    content: tuple[Prefix, ...]
    encoder: tuple[Prefix, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def of(self, request: Request) -> bool:
        """Is it a row of the request's present admission?"""
        return (self.request, self.admission) == (request.id, request.admission)

    def computes(self) -> tuple[Prefix, ...]:
        """What the row has at each position up to its end, drafts included."""
        return extend_content(self.content[: self.end - len(self.drafts)], self.drafts)


class Step(NamedTuple):
    """One issued batch: pages are cleared, then copied, then the rows are computed."""

    id: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...] = ()
    cleared: tuple[int, ...] = ()  # block ids


class Transfer(NamedTuple):
    """An unordered operation that outlives, or may outlive, the request that began it.

    An outbound store reads what its cells held when it began; an inbound load, whose
    request has left, still writes them.
    """

    request: int
    inbound: bool
    cells: tuple[tuple[int, int, int, Prefix], ...]  # (block, group, offset, content)


class PendingHit(NamedTuple):
    """The answer to the last Lookup; only the very next action may use it."""

    request: int
    tokens: int
    tables: Tables


class Tally(NamedTuple):
    """What a target that schedules itself has done so far, in tokens and in events."""

    queried: int = 0
    hit: int = 0
    preemptions: int = 0


class State(NamedTuple):
    """Everything the oracle remembers between two actions.

    `memory` is what executed operations have written, `promise` what a lookup may rely
    on.  A block is one page whatever the group, so neither has the group in its address.
    `deferred` are the references that the target says it still keeps for operations in
    flight after their requests have left.  `copies` go with the next step; `uncleared`
    are blocks handed out since the last one that must be zeroed with it.  `continued` has,
    for the cells of drafters, the prefix one token longer that they have seen.  `quiet`
    counts the steps that have returned since a request came, left, got a token or was in transfer.
    """

    config: Config
    root: Prefix
    memory: Pages = NOTHING
    promise: Pages = NOTHING
    requests: tuple[Request, ...] = ()
    steps: tuple[Step, ...] = ()  # in order of issue
    copies: tuple[Copy, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    uncleared: tuple[int, ...] = ()  # block ids
    continued: Pages = NOTHING
    deferred: tuple[int, ...] = ()  # block ids, one entry a reference
    hit: PendingHit | None = None
    submitted: int = 0
    issued: int = 0
    quiet: int = 0
    tally: Tally = Tally()

    def get(self, request_id: int) -> Request | None:
        for request in self.requests:
            if request.id == request_id:
                return request
        return None

    def find(self, request_id: int) -> Request:
        request = self.get(request_id)
        if request is None:
            raise ActionDisabled(f"no request {request_id}")
        return request

    def having(self, request: Request) -> tuple[Request, ...]:
        """The requests, with `request` in the place of its former self."""
        return tuple(request if other.id == request.id else other for other in self.requests)

    def without(self, request_id: int) -> tuple[Request, ...]:
        return tuple(other for other in self.requests if other.id != request_id)


def initial_state(config: Config) -> State:
    return State(config, Prefix.root())
