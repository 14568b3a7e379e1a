"""What a campaign has covered: actions by feature, goals reached, rules by evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Release,
)
from kvproof_spec.answers import Answer, Forgotten, Granted, Hit, Raised, Refused, Scheduled
from kvproof_spec.choices import has_states
from kvproof_spec.derived import has_stale_rows
from kvproof_spec.pages import Tables, handed_out
from kvproof_spec.prefix import Prefix
from kvproof_spec.state import Request, State

GOALS: dict[str, str] = {
    "hit": "a lookup found a prefix",
    "hit of a step in flight": "a hit while a step is in flight",
    "refused": "an allocation did not fit",
    "two steps in flight": "a step was issued while another was in flight",
    "preempted": "a request was preempted",
    "unissued": "a request left between its allocation and the issue of its step",
    "resumed": "a preempted request was admitted again",
    "resumed with a hit": "a preempted request was admitted again, from a hit",
    "stale output": "a step returned to a request that had been preempted",
    "outlived": "a step returned for a request that had left",
    "draft rejected": "a step returned fewer drafts than it was given",
    "load": "an unordered load was delivered",
    "load of everything": "an unordered load was granted for every known token",
    "load failed": "an unordered load failed",
    "load failed half way": "an unordered load failed after its first blocks",
    "load outlived": "a load ended whose request had left",
    "hit inside a block": "a lookup found a prefix that ends inside a block",
    "copied": "a page was copied before it was written",
    "copied for the cache": "the cache was given a copy, and the request kept the source",
    "stored": "a store ended",
    "store outlived": "a store ended whose request had left",
    "row moved": "rejected drafts moved a row of a later step",
    "external beside a state": "external tokens were granted, or crashed, with a state group",
    "drained": "everything finished once nothing came any more",
    "copy reused": "a block lost its content while another one holds, or gets, the same",
    "forget refused": "forgetting everything was refused",
}


@dataclass
class Coverage:
    """Counts of one campaign; `merge` adds another worker's."""

    runs: int = 0
    lines: int = 0
    done: Counter[tuple[str, str]] = field(default_factory=Counter)  # (choice, feature)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    total_done: Counter[str] = field(default_factory=Counter)  # by choice
    total_refused: Counter[str] = field(default_factory=Counter)
    goals: Counter[str] = field(default_factory=Counter)
    evaluated: Counter[tuple[str, str]] = field(default_factory=Counter)  # (rule, evidence)
    with_feature: Counter[str] = field(default_factory=Counter)  # runs
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)  # runs by two features
    qualities: Counter[tuple[str, bool]] = field(default_factory=Counter)  # (id, it held)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    known: Counter[str] = field(default_factory=Counter)  # expected violations, by rule

    def count(
        self, kind: str, features: Iterable[str], answer: Answer, failed: bool = False
    ) -> None:
        """`failed`: a load that was delivered in part or not at all counts with the refused."""
        refused = failed or isinstance(answer, Refused) or answer == Forgotten(False)
        by_feature = self.refused if refused else self.done
        (self.total_refused if refused else self.total_done)[kind] += 1
        for feature in features:
            by_feature[kind, feature] += 1
        self.lines += 1

    def begin(self, features: Iterable[str]) -> None:
        """A run with these features, sorted, begins."""
        names = list(features)
        self.runs += 1
        self.with_feature.update(names)
        self.pairs.update(combinations(names, 2))

    def evaluate(self, evaluated: dict[Any, int], qualities: dict[tuple[str, bool], int]) -> None:
        self.evaluated.update(evaluated)
        self.qualities.update(qualities)

    def quality(self, identifier: str) -> tuple[int, int]:
        """How often it held, of how often it was judged."""
        held = self.qualities[identifier, True]
        return held, held + self.qualities[identifier, False]

    def merge(self, other: Coverage) -> None:
        self.runs += other.runs
        self.lines += other.lines
        for name, counts in vars(other).items():
            if isinstance(counts, Counter):
                getattr(self, name).update(counts)

    def never_evaluated(self, claims: Iterable[str]) -> list[str]:
        held = {rule for rule, _ in self.evaluated}
        return [rule for rule in claims if rule not in held]

    def to_json(self) -> dict[str, Any]:
        features = sorted({feature for _, feature in self.done | self.refused})
        kinds = sorted({kind for kind, _ in self.done | self.refused})
        return {
            "runs": self.runs,
            "lines": self.lines,
            "actions": {
                kind: {"done": self.total_done[kind], "refused": self.total_refused[kind]}
                for kind in kinds
            },
            "by_feature": {
                feature: {
                    kind: {"done": self.done[kind, feature], "refused": self.refused[kind, feature]}
                    for kind in kinds
                }
                for feature in features
            },
            "goals": {goal: self.goals[goal] for goal in GOALS},
            "evaluated": {
                rule: {e: count for (r, e), count in sorted(self.evaluated.items()) if r == rule}
                for rule in sorted({rule for rule, _ in self.evaluated})
            },
            "qualities": {
                identifier: dict(zip(("held", "judged"), self.quality(identifier), strict=True))
                for identifier in sorted({identifier for identifier, _ in self.qualities})
            },
            "runs_by_feature": dict(sorted(self.with_feature.items())),
            "runs_by_pair": {
                f"{one} {other}": runs for (one, other), runs in sorted(self.pairs.items())
            },
            "skipped": dict(sorted(self.skipped.items())),
            "known_violations": dict(sorted(self.known.items())),
        }


def goals_of(before: State, action: Action, answer: Answer) -> list[str]:
    """The goals that this answer reaches."""
    goals = _own_goals_of(before, action, answer)
    if before.config.events and _reuses_a_copy(before, action, answer):
        goals = [*goals, "copy reused"]
    return goals


def _reuses_a_copy(before: State, action: Action, answer: Answer) -> bool:
    """Does a block lose a prefix, or its key, that another one has as well, or gets?"""
    lost, step = set(_lost(before, action, answer)), before.config.hash_block
    ends = {
        block: set(cells[step - 1 :: step] or cells) for block, (_, cells) in before.promise.items()
    }
    found: set[Prefix | None] = set()
    for request in before.requests:
        found.update(request.content)
    for block in ends.keys() - lost:
        found |= ends[block]
    twice = Counter(prefix for block in ends.keys() & lost for prefix in ends[block])
    twice.pop(None, None)
    return any(count > 1 or prefix in found for prefix, count in twice.items())


def _lost(before: State, action: Action, answer: Answer) -> Iterator[int]:
    """Blocks that were handed out, not as hits, or forgotten."""
    match action, answer:
        case Forget(), _:
            yield from action.blocks or ()
        case Allocate(), Granted():
            hit = before.hit.tokens if before.hit else 0
            yield from _handed_out(before, action.request, answer.tables, hit)
            yield from (copy.destination for copy in answer.copies)
        case _, Scheduled():
            yield from _lost_to_a_schedule(before, answer)
        case _:
            pass


def _lost_to_a_schedule(before: State, answer: Scheduled) -> Iterator[int]:
    hits = {row.request: row.start - row.external for row in answer.rows if row.admitted}
    hits |= {load.request: load.hit for load in answer.loads}
    for request_id, tables in answer.tables:
        yield from _handed_out(before, request_id, tables, hits.get(request_id, 0))
    yield from (copy.destination for copy in answer.copies or ())
    yield from answer.unissued


def _handed_out(before: State, request_id: int, tables: Tables, hit: int) -> Iterator[int]:
    for group, entry, block in handed_out(before.find(request_id).tables, tables):
        if entry >= before.config.groups[group].blocks_for(hit):
            yield block


def _own_goals_of(before: State, action: Action, answer: Answer) -> list[str]:
    match action, answer:
        case Lookup(), Hit():
            return _goals_of_a_hit(before, answer.tokens)
        case Allocate(), Refused():
            return ["refused"]
        case Allocate(), Granted():
            return _goals_of_a_grant(before, action, answer)
        case Allocate(), Raised():
            return ["external beside a state"] if _beside_a_state(before, action) else []
        case Release(reason="preempt"), _:
            left = before.find(action.request)
            return ["preempted", *(["unissued"] if left.scheduled else [])]
        case Release(), _ if before.find(action.request).scheduled:
            return ["unissued"]
        case Issue(), Scheduled():
            return _goals_of_a_schedule(before, answer)
        case Issue(), _:
            return ["two steps in flight"] if before.steps else []
        case CompleteStep(), _:
            return _goals_of_a_return(before, action)
        case CompleteLoad(), _:
            return [_goal_of_a_load(before, action)]
        case CompleteStore(), _:
            return ["stored", *(["store outlived"] if before.get(action.request) is None else [])]
        case _, Forgotten(done=False):
            return ["forget refused"]
        case _:
            return []


def _goal_of_a_load(before: State, action: CompleteLoad) -> str:
    request = before.get(action.request)
    if request is None or request.load is None:
        return "load outlived"
    if action.tokens == request.load[1]:
        return "load"
    return "load failed half way" if action.tokens else "load failed"


def _goals_of_a_grant(before: State, action: Allocate, answer: Granted) -> list[str]:
    request, goals = before.find(action.request), []
    if request.status == "preempted":
        goals += ["resumed"]
        goals += ["resumed with a hit"] if before.hit and before.hit.tokens else []
    if action.unordered and action.segments(before).total == request.known:
        goals += ["load of everything"]
    goals += ["external beside a state"] if _beside_a_state(before, action) else []
    for copy in answer.copies:
        own = copy.destination in answer.tables[copy.group]
        goals += ["copied" if own else "copied for the cache"]
    return goals


def _beside_a_state(before: State, action: Allocate) -> bool:
    return bool(action.external) and has_states(before.config)


def _goals_of_a_schedule(before: State, answer: Scheduled) -> list[str]:
    goals = ["two steps in flight"] if before.steps else []
    goals += ["preempted"] * len(answer.preempted)
    goals += ["unissued"] if answer.unissued else []
    external = [*answer.loads, *(row for row in answer.rows if row.external)]
    goals += ["external beside a state"] if external and has_states(before.config) else []
    for request, hit, load in _admissions(before, answer):
        goals += _goals_of_an_admission(before, request, hit)
        goals += ["load of everything"] if load and hit + load == request.known else []
    return goals + _goals_of_copies(answer)


def _admissions(before: State, answer: Scheduled) -> Iterator[tuple[Request, int, int]]:
    """Each request that was admitted, its hit, and what an unordered load is to bring."""
    for row in answer.rows:
        request = before.get(row.request)
        if row.admitted and request is not None and request.status != "running":
            yield request, row.start - row.external, 0
    for load in answer.loads:
        yield before.find(load.request), load.hit, load.external


def _goals_of_copies(answer: Scheduled) -> list[str]:
    held = {
        (group, block)
        for _, tables in answer.tables
        for group, table in enumerate(tables)
        for block in table
    }
    own = [(copy.group, copy.destination) in held for copy in answer.copies or ()]
    return ["copied" if taken else "copied for the cache" for taken in own]


def _goals_of_an_admission(before: State, request: Request, hit: int) -> list[str]:
    goals = _goals_of_a_hit(before, hit)
    if request.status == "preempted":
        goals += ["resumed"] + (["resumed with a hit"] if hit else [])
    return goals


def _goals_of_a_hit(before: State, tokens: int) -> list[str]:
    if not tokens:
        return []
    inside = tokens % before.config.common_block != 0
    goals = {"hit of a step in flight": before.steps, "hit inside a block": inside}
    return ["hit", *(goal for goal, reached in goals.items() if reached)]


def _goals_of_a_return(before: State, action: CompleteStep) -> list[str]:
    goals = []
    for request in before.requests:
        if has_stale_rows(before, request):
            goals.append("stale output")
    drafted = {row.request: len(row.drafts) for row in before.steps[0].rows}
    for output in action.outputs:
        if before.get(output.request) is None:
            goals.append("outlived")
        if output.accepted < drafted[output.request]:
            goals.append("draft rejected")
            later = [row.request for step in before.steps[1:] for row in step.rows]
            goals += ["row moved"] if output.request in later else []
    return goals
