"""How a rule is put: what was expected, what was observed, and on what evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteStep,
    CompleteStore,
    Issue,
    Lookup,
    Release,
    Segments,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Event,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Raised,
    Refused,
    Returned,
    Snapshot,
    Trimmed,
)
from kvproof_spec.config import Config
from kvproof_spec.derived import processed_tokens, references, rows_in_flight, used_by_operations
from kvproof_spec.pages import (
    NULL_BLOCK,
    Cell,
    Copy,
    Tables,
    cells,
    encoder_cells,
    handed_out,
    needed_cells,
    read_page,
)
from kvproof_spec.state import Request, Row, State

T = TypeVar("T")

Evidence = Literal[
    "lookup", "hit", "grant", "refusal", "raised", "trim", "step", "reads", "rows", "snapshot",
    "tables", "sent", "kept", "cleared", "copied", "resumption", "stale output", "answer",
    "events", "schedule", "numbers",
]  # fmt: skip
EVIDENCE: dict[Evidence, str] = {
    "lookup": "the answer to a lookup",
    "hit": "the blocks of a hit of at least one token",
    "grant": "a granted allocation: the tables after",
    "refusal": "a refused allocation: the tables after, and a snapshot if there is one",
    "raised": "an exception in the place of an answer",
    "trim": "the tables after a trim",
    "step": "the tables with which a step was issued",
    "reads": "what a returned step has read, by the tables or rows shown",
    "rows": "the rows of the target's worker",
    "snapshot": "what the target shows of itself between actions",
    "tables": "the tables of all requests, in a snapshot",
    "sent": "the ids that a running request's grant sends to the worker",
    "kept": "what a target keeps back for steps in flight",
    "cleared": "the pages that are zeroed before a step",
    "copied": "the pages that are copied before a step",
    "resumption": "a preempted request that the target's scheduler admits again",
    "stale output": "a step that returns to the target's scheduler after a preemption",
    "events": "what a target announces about its index, and the index",
    "schedule": "a step that the target's scheduler made",
    "numbers": "a target's own metrics",
    "answer": "the answer that a policy predicts",
}


class lazy(Generic[T]):  # noqa: N801  (a decorator, as functools.cached_property, without its lock)
    """A property computed once, at its first use."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.name = compute.__name__

    def __get__(self, owner: Any, _: type | None = None) -> T:
        value = owner.__dict__[self.name] = self.compute(owner)
        return value


class Expected:
    """One transition as the core sees it: the states around an action."""

    def __init__(self, before: State, action: Action, after: State) -> None:
        self.before = before
        self.action: Any = action  # a rule knows by its table which action it judges
        self.after = after
        self.config = before.config
        self.groups = before.config.groups

    @lazy
    def request(self) -> Request:
        """The action's request, before it."""
        return self.before.find(self.action.request)

    @lazy
    def request_after(self) -> Request:
        return self.after.find(self.action.request)

    def tables(self, row: Row) -> Tables:
        """The manager's tables of a row's request, after the action."""
        return self.after.find(row.request).tables

    def touched_cells(self, row: Row, tables: Tables) -> set[Cell]:
        """What the row's step would read and write through these tables."""
        read = needed_cells(self.groups, tables, row.start, row.end)
        encoder = encoder_cells(self.groups, tables, len(row.encoder))
        return {*read, *encoder, *cells(self.groups, tables, row.first_write, row.end)}

    @lazy
    def held_before(self) -> dict[int, int]:
        """References by block, without those that this call's own trim gave back."""
        held = references(self.before)
        for old, new in zip(self.request.tables, self.request_after.tables, strict=True):
            for block, kept in zip(old, new, strict=False):
                if block != NULL_BLOCK and kept == NULL_BLOCK:
                    held[block] -= 1
                    if not held[block]:
                        del held[block]
        return held

    @lazy
    def held_after(self) -> dict[int, int]:
        """References by block."""
        return references(self.after)

    @lazy
    def segments(self) -> Segments:
        """Of the allocation that is judged."""
        segments: Segments = self.action.segments(self.before)
        return segments

    @lazy
    def appended(self) -> Tables:
        """What a grant has added at the end of a running request's tables."""
        before, after = self.request.tables, self.request_after.tables
        return tuple(now[len(was) :] for was, now in zip(before, after, strict=True))

    @lazy
    def kept_from_nobody(self) -> list[int]:
        """Blocks newly kept back that neither a request which left nor a copy has held."""
        if self.after.deferred == self.before.deferred:
            return []
        kept = Counter(self.after.deferred) - Counter(self.before.deferred)
        if isinstance(self.action, Release):
            kept -= Counter(block for table in self.request.tables for block in table)
        if isinstance(self.action, Issue):
            copies = self.after.steps[-1].copies
            kept -= Counter(block for copy in copies for block in (copy.source, copy.destination))
        return sorted(kept)

    @lazy
    def used_before(self) -> set[int]:
        return used_by_operations(self.before)

    def used_among(self, blocks: set[int]) -> set[int]:
        """Those of `blocks` that an unordered operation uses after the action."""
        return used_by_operations(self.after) & blocks if blocks else set()

    @lazy
    def tables_before(self) -> Tables:
        """Of the request, or of the hit that it starts from."""
        if isinstance(self.action, Allocate):
            return self.action.tables_before(self.before)
        return self.request.tables

    @lazy
    def broken_promises(self) -> list[Cell]:
        """Needed cells of a hit whose promise is not what the request asked for."""
        hit, content = self.after.hit, self.request.content
        assert hit is not None
        return [
            (block, group, offset, position)
            for block, group, offset, position in needed_cells(
                self.groups, hit.tables, hit.tokens, hit.tokens
            )
            if position >= len(content)
            or read_page(self.before.promise, block, group, offset) is not content[position]
        ]

    def broken(self, cell: Cell) -> str:
        """The sentence about one of the `broken_promises`."""
        block, group, offset, position = cell
        promised = read_page(self.before.promise, block, group, offset)
        wanted = self.request.content[position : position + 1]
        where = f"block {block}, group {group}, position {position}"
        return f"a hit for {wanted} got {where}, which promises {promised}"

    @lazy
    def optimistic_cells(self) -> set[Cell]:
        """Drafts not yet accepted, and external tokens whose unordered load is under way."""
        found: set[Cell] = set()
        for request in self.before.requests:
            rows = rows_in_flight(self.before, request)
            spans = [(row.end - len(row.drafts), row.end) for row in rows if row.drafts]
            if request.drafts:
                granted = request.computed + request.scheduled
                spans.append((granted - len(request.drafts), granted))
            if request.status == "loading" and request.load:
                spans.append(request.load)
            for first, end in spans:
                found.update(cells(self.groups, request.tables, first, end))
        return found

    @lazy
    def added(self) -> list[tuple[int, int, int]]:
        """(group, index, block) of each block that this call gave to the request."""
        return handed_out(self.tables_before, self.request_after.tables)

    def fits(self, request: Request) -> bool:
        """Has the empty pool room for all that is known of the request, and a token more?"""
        needed = [group.blocks_for(request.known + 1) for group in self.groups if group.reused]
        return sum(needed) < self.config.num_blocks

    @lazy
    def processed(self) -> int:
        """Tokens of the action's request whose steps have finished, external ones included."""
        if isinstance(self.action, Allocate):
            return self.segments.processed
        return processed_tokens(self.before, self.request)

    @lazy
    def certain(self) -> int:
        """Tokens of the allocation that are known and no drafts."""
        return min(self.request.known, self.segments.target - len(self.action.drafts))

    @lazy
    def rewritten(self) -> list[Cell]:
        """Cells that the allocation's step will write in blocks that it had before."""
        found, ends = [], self.segments
        for group_id, (group, table) in enumerate(
            zip(self.groups, self.tables_before, strict=True)
        ):
            after, of_a_page = self.request_after.tables[group_id], group.cells
            for position in group.written(ends.total, ends.target):
                entry = position // group.block_size
                if entry >= len(table):
                    break
                if table[entry] == after[entry] != NULL_BLOCK:
                    found.append((table[entry], group_id, position % of_a_page, position))
        return found

    def others_hold(self, block: int) -> bool:
        """Does another request have the block in a table?"""
        others = [r.tables for r in self.before.requests if r.id != self.request.id]
        return self.held_before.get(block, 0) > 0 and any(
            block in table for tables in others for table in tables
        )

    @lazy
    def to_clear(self) -> set[int]:
        """Pages that were handed out for the step that is issued and must be zeroed for it."""
        rows = self.after.steps[-1].rows
        needed = {block for row in rows for table in self.tables(row) for block in table}
        return needed.intersection(self.before.uncleared)

    @lazy
    def copies(self) -> tuple[Copy, ...]:
        """Those that this call has made."""
        return self.after.copies[len(self.before.copies) :]

    @lazy
    def copies_for_the_cache(self) -> tuple[Copy, ...]:
        """Copies whose destination the request does not get."""
        own = self.request_after.tables
        return tuple(copy for copy in self.copies if copy.destination not in own[copy.group])

    @lazy
    def handed_out(self) -> list[tuple[int, int, int]]:
        """(group, index, block) of each block that this call handed out, also for copies."""
        return self.added + [
            (copy.group, len(self.tables_before[copy.group]) - 1, copy.destination)
            for copy in self.copies_for_the_cache
        ]


class ShownPool:
    """What a snapshot shows of the pool, brought up to date from one snapshot to the next.

    `listed` are the ids of the free order, `strange` those that are no normal block, and
    `referenced` is the number of normal blocks whose count is not 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_order: tuple[int, ...] = ()
        self.counts: tuple[int, ...] = ()
        self.listed: set[int] = set()
        self.strange: set[int] = set()
        self.referenced = 0

    def show(self, snapshot: Snapshot) -> None:
        """Take in the next snapshot of the same run."""
        order, counts = snapshot.free_order, snapshot.reference_counts or ()
        if order is not self.free_order:
            gone, come = changed_ends(self.free_order, order)
            self.free_order = order
            self.listed.difference_update(gone)
            self.listed.update(come)
            self.strange.difference_update(gone)
            if come and not 0 < min(come) <= max(come) < self.num_blocks:
                self.strange.update(block for block in come if not 0 < block < self.num_blocks)
        if counts is not self.counts and counts != self.counts:
            self.counts = counts
            self.referenced = len(counts) - counts.count(0) - sum(map(bool, counts[:1]))


class ShownEvents:
    """What a target has announced, replayed from one snapshot to the next, and its index.

    A key is (group, name).  `orphans` are events of the last snapshot that name a parent
    which was never announced, in groups where every block is.
    """

    def __init__(self, config: Config) -> None:
        self.announced: set[tuple[int, str]] = set()
        self.findable: set[tuple[int, str]] = set()
        self.orphans: list[Event] = []
        self._ever: set[tuple[int, str]] = set()
        self._complete = {
            index
            for index, group in enumerate(config.groups)
            if group.kind == "full" and group.block_size == config.hash_block
        }

    def show(self, snapshot: Snapshot) -> None:
        """Take in the next snapshot of the same run."""
        self.findable = set(snapshot.findable or ())
        self.orphans = []
        for event in snapshot.events:
            keys = {(event.group, key) for key in event.keys}
            match event.what:
                case "stored":
                    parent = event.group, event.parent
                    known = event.parent is None or parent in self._ever
                    if event.group in self._complete and not known:
                        self.orphans.append(event)
                    self.announced |= keys
                    self._ever |= keys
                case "removed":
                    self.announced -= keys
                case "cleared":
                    self.announced.clear()


def changed_ends(
    before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What went and what came at both ends; everything, if the middle has changed too.

    >>> changed_ends((1, 2, 3, 4), (3, 4, 2))
    ((1, 2), (2,))
    >>> changed_ends((1, 2, 3, 4), (1, 3, 4))
    ((1, 2, 3, 4), (1, 3, 4))
    """
    middle = len(before) // 2
    try:
        shift = after.index(before[middle]) - middle
    except (IndexError, ValueError):
        return before, after
    first, end = max(0, -shift), min(len(before), len(after) - shift)
    if before[first:end] != after[first + shift : end + shift]:
        return before, after
    return before[:first] + before[end:], after[: first + shift] + after[end + shift :]


class Observed:
    """What the target showed: its answer, and a snapshot if one was taken."""

    def __init__(
        self,
        answer: Answer,
        snapshot: Snapshot | None = None,
        pool: ShownPool | None = None,
        events: ShownEvents | None = None,
    ) -> None:
        self.answer = answer
        self.snapshot = snapshot
        self.pool = pool
        self.events = events

    @property
    def listed(self) -> set[int]:
        """The blocks that a snapshot lists as free."""
        return self.pool.listed if self.pool else set()

    @property
    def tables(self) -> dict[int, Tables] | None:
        """The tables of all requests, where the snapshot shows them."""
        shown = self.snapshot.tables if self.snapshot else None
        return None if shown is None else dict(shown)


Judge = Callable[[Expected, Observed], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """An invariant or rule of the contract: `judge` yields one sentence a violation.

    Without any of its `evidence` it is not evaluated.
    """

    id: str
    sentence: str
    judge: Judge
    evidence: tuple[Evidence, ...]


def rule(*evidence: Evidence) -> Callable[[Judge], Rule]:
    """Make a function a rule; its id and sentence are the first line of its docstring."""

    def made(judge: Judge) -> Rule:
        identifier, _, sentence = (judge.__doc__ or "").partition("\n")[0].partition(": ")
        return Rule(identifier, sentence, judge, evidence)

    return made


def evidence_shown(expected: Expected, observed: Observed, scheduled: bool) -> list[Evidence]:
    """What there is to judge by; `scheduled`: the target's own scheduler decided."""
    shown: list[Evidence] = list(SHOWN_BY[type(observed.answer)])
    match observed.answer:
        case Hit(tokens=tokens) if tokens:
            shown.append("hit")
        case Issued(rows=rows, copies=copies, cleared=cleared, deferred=deferred):
            parts: dict[Evidence, object] = {"rows": rows, "copied": copies, "cleared": cleared}
            parts["kept"] = deferred
            for name, part in parts.items():
                if part is not None:
                    shown.append(name)
        case Granted(new=new) if new is not None and expected.request.status == "running":
            shown.append("sent")
        case Returned(deferred=deferred, numbers=numbers):
            if numbers is not None:
                shown.append("numbers")
            if isinstance(expected.action, CompleteStep | CompleteStore):
                shown.append("reads")
            if deferred is not None:
                shown.append("kept")
        case _:
            pass
    if observed.snapshot is not None:
        shown.append("snapshot")
        if observed.snapshot.tables is not None:
            shown.append("tables")
        if observed.events is not None:
            shown.append("events")
    if scheduled:
        shown += _decided_by_its_scheduler(expected)
    return shown


SHOWN_BY: dict[type[Answer], tuple[Evidence, ...]] = {
    Done: (),
    Hit: ("lookup",),
    Granted: ("grant",),
    Refused: ("refusal",),
    Raised: ("raised",),
    Issued: ("step",),
    Returned: (),
    Trimmed: ("trim",),
    Forgotten: (),
}


def _decided_by_its_scheduler(expected: Expected) -> Iterator[Evidence]:
    if isinstance(expected.action, Issue):
        yield "schedule"
    if isinstance(expected.action, Lookup) and expected.request.status == "preempted":
        yield "resumption"
    if isinstance(expected.action, CompleteStep):
        for row in expected.before.steps[0].rows:
            request = expected.before.get(row.request)
            if request is not None and request.admission != row.admission:
                yield "stale output"


class Violation(Exception):
    """The target broke a rule; `also` are further rules broken by the same answer."""

    def __init__(self, rule: str, witness: str, also: tuple[str, ...] = ()) -> None:
        super().__init__(f"{rule}: {witness}")
        self.rule = rule
        self.witness = witness
        self.also = also
