"""How a rule is put: what was expected, what was observed, and on what evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvproof_spec.actions import Action, Allocate, handed_out
from kvproof_spec.answers import Answer, Snapshot
from kvproof_spec.derived import references, rows_in_flight, used_by_operations
from kvproof_spec.pages import Cell, Tables, cells, needed_cells, read_page
from kvproof_spec.state import Request, Row, State

Evidence = Literal["answer", "snapshot", "rows", "schedule"]
EVIDENCE: dict[Evidence, str] = {
    "answer": "what the target answered",
    "snapshot": "what it shows of itself between actions",
    "rows": "the rows of its worker",
    "schedule": "what its own scheduler decided",
}


class Expected:
    """One transition as the core sees it: the states around an action."""

    def __init__(self, before: State, action: Action, after: State) -> None:
        self.before = before
        self.action: Any = action  # a rule knows by its table which action it judges
        self.after = after
        self.config = before.config
        self.groups = before.config.groups

    @property
    def request(self) -> Request:
        """The action's request, before it."""
        return self.before.find(self.action.request)

    @property
    def request_after(self) -> Request:
        return self.after.find(self.action.request)

    def tables(self, row: Row) -> Tables:
        """The manager's tables of a row's request, after the action."""
        return self.after.find(row.request).tables

    @cached_property
    def held_before(self) -> Counter[int]:
        """References by block, without those that this call's own trim gave back."""
        held = references(self.before)
        for old, new in zip(self.request.tables, self.request_after.tables, strict=True):
            for block, kept in zip(old, new, strict=False):
                if block and not kept:
                    held[block] -= 1
        return +held

    @cached_property
    def held_after(self) -> Counter[int]:
        return references(self.after)

    @cached_property
    def used_before(self) -> set[int]:
        return used_by_operations(self.before)

    @cached_property
    def tables_before(self) -> Tables:
        """Of the request, or of the hit that it starts from."""
        if isinstance(self.action, Allocate):
            return self.action.tables_before(self.before)
        return self.request.tables

    @cached_property
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

    @cached_property
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

    @cached_property
    def handed_out(self) -> list[tuple[int, int, int]]:
        """(group, index, block) of each block that this call handed out."""
        return handed_out(self.tables_before, self.request_after.tables)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the target showed: its answer, and a snapshot if one was taken.

    `scheduled`: the target's own scheduler decided on the action, not a driver.
    """

    answer: Answer
    snapshot: Snapshot | None = None
    scheduled: bool = False

    @property
    def tables(self) -> tuple[tuple[int, Tables], ...]:
        """(request, tables) as the snapshot shows them."""
        return (self.snapshot.tables if self.snapshot else None) or ()


Judge = Callable[[Expected, Observed], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """An invariant or rule of the contract: `judge` yields one sentence a violation.

    `evidence` says what it needs to be evaluated, for each action it judges.
    """

    id: str
    sentence: str
    judge: Judge
    evidence: Mapping[type[Action], tuple[Evidence, ...]]


def rule(*answers: type[Action], **more: tuple[type[Action], ...]) -> Callable[[Judge], Rule]:
    """Make a function a rule: it judges the `answers` of these actions.

    `snapshot`, `rows` and `schedule` name the actions that it judges by other evidence.
    Id and sentence are the first line of its docstring.
    """
    by: dict[type[Action], tuple[Evidence, ...]] = dict.fromkeys(answers, ("answer",))
    for evidence in EVIDENCE:
        for action in more.get(evidence, ()):
            by[action] = (*by.get(action, ()), evidence)

    def made(judge: Judge) -> Rule:
        identifier, _, sentence = (judge.__doc__ or "").partition("\n")[0].partition(": ")
        return Rule(identifier, sentence, judge, by)

    return made


class Violation(Exception):
    """The target broke a rule; `also` are further rules broken by the same answer."""

    def __init__(self, rule: str, witness: str, also: tuple[str, ...] = ()) -> None:
        super().__init__(f"{rule}: {witness}")
        self.rule = rule
        self.witness = witness
        self.also = also
