"""The oracle: follow an implementation, answer by answer, until one is not allowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Publish,
    Release,
    Store,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Raised,
    Refused,
    Returned,
    Scheduled,
    Snapshot,
    Trimmed,
    Updated,
)
from kvproof_spec.config import Config
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import (
    Evidence,
    Expected,
    Observed,
    Rule,
    ShownEvents,
    ShownPool,
    Violation,
    evidence_shown,
)
from kvproof_spec.observed import InconsistentAnswer, core_actions
from kvproof_spec.pages import Copy, Tables
from kvproof_spec.qualities import QUALITIES
from kvproof_spec.records import MalformedRecord, decode, encode
from kvproof_spec.state import ActionDisabled, State, initial_state

EXACT = "exact"
"""The rule that a target breaks by differing from the named policy."""

ALLOWED_ANSWERS: dict[type[Action], tuple[type[Answer], ...]] = {
    Submit: (Done,),
    Lookup: (Hit,),
    Allocate: (Granted, Refused, Raised),
    Issue: (Issued, Scheduled),
    CompleteStep: (Returned, Updated),
    CompleteLoad: (Done, Returned),
    Store: (Done,),
    CompleteStore: (Returned,),
    Publish: (Done,),
    Trim: (Trimmed,),
    Release: (Returned,),
    Forget: (Forgotten,),
}


Counted = tuple[str, Evidence]  # (rule, evidence), as `Oracle.evaluated` counts them


NO_EVIDENCE = frozenset((Done, Forgotten))
"""Answers that show nothing to judge by."""


class NonsenseAnswer(Exception):
    """An answer that is none: of the wrong kind or shape, or contradicting itself."""


class Policy(Protocol):
    """Predicts which of the allowed answers a named implementation picks."""

    name: str

    def predict(self, state: State, action: Action) -> Answer | None:
        """The answer, or None where the policy has nothing to say."""
        ...

    def snapshot(self) -> Snapshot:
        """Free order and keys after the actions predicted so far."""
        ...


class Oracle:
    """Judges one implementation from its first action on.

    `rules` are those of the level, without the ones that were left out; with a `policy`
    every answer and snapshot must also be the predicted one.
    """

    def __init__(
        self, config: Config, rules: Iterable[Rule] = RULES, policy: Policy | None = None
    ) -> None:
        self.state = initial_state(config)
        self.policy = policy
        self.evaluated: defaultdict[tuple[str, Evidence], int] = defaultdict(int)
        self.qualities: defaultdict[tuple[str, bool], int] = defaultdict(int)  # (id, it held)
        self._rules = tuple(rules)
        self._pool = ShownPool(config.num_blocks)
        self._events = ShownEvents(config) if config.events else None
        self._equal: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # free orders, compared
        self._judging: dict[tuple[Evidence, ...], list[tuple[Rule, list[Counted]]]] = {}

    def _rules_for(self, shown: tuple[Evidence, ...]) -> list[tuple[Rule, list[Counted]]]:
        """The rules that can be evaluated by what is shown, and by which part of it."""
        if shown not in self._judging:
            judging = self._judging[shown] = []
            for rule in self._rules:
                usable: list[Counted] = [(rule.id, e) for e in rule.evidence if e in shown]
                if usable:
                    judging.append((rule, usable))
        return self._judging[shown]

    def step(self, action: Action, answer: Answer, snapshot: Snapshot | None = None) -> None:
        """Take one answer, or raise: `ActionDisabled`, `NonsenseAnswer` or `Violation`."""
        try:
            self._step(action, answer, snapshot)
        except (AttributeError, IndexError, TypeError) as error:
            if well_typed(answer, Answer) and well_typed(snapshot, Snapshot | None):
                raise
            text = f"{answer!r:.200} or the snapshot has a field of the wrong type: {error}"
            raise NonsenseAnswer(text) from None

    def _step(self, action: Action, answer: Answer, snapshot: Snapshot | None) -> None:
        check_answer(self.state, action, answer)
        check_snapshot(self.state, snapshot)
        before = self.state
        if not isinstance(answer, Scheduled | Updated):
            self._judge(action, answer, snapshot)
            return
        try:
            parts = list(core_actions(self.state, action, answer))
            for part, its_answer in parts[:-1]:
                self._judge(part, its_answer, None, scheduled=True)
            self._judge(*parts[-1], snapshot, scheduled=True)
        except InconsistentAnswer as error:
            self.state = before
            raise NonsenseAnswer(str(error)) from None
        except ActionDisabled as error:
            self.state = before
            raise NonsenseAnswer(f"its scheduler did what no engine may: {error}") from None
        except Violation:
            self.state = before
            raise

    def _judge(
        self, action: Action, answer: Answer, snapshot: Snapshot | None, scheduled: bool = False
    ) -> None:
        before = self.state
        action.check(before)
        predicted = self.policy.predict(before, action) if self.policy else None
        after = action.apply(before, answer)
        if snapshot is None and self.policy is None and type(answer) in NO_EVIDENCE:
            self.state = after
            return
        expected = Expected(before, action, after)
        if snapshot is not None:
            self._pool.show(snapshot)
            if self._events is not None:
                self._events.show(snapshot)
        shows = snapshot is not None
        observed = Observed(
            answer, snapshot, self._pool if shows else None, self._events if shows else None
        )
        broken: list[tuple[str, str]] = []
        shown = tuple(evidence_shown(expected, observed, scheduled))
        for rule, counted in self._rules_for(shown):
            for key in counted:
                self.evaluated[key] += 1
            for witness in rule.judge(expected, observed):
                broken.append((rule.id, witness))
        if "hit" in shown and any(group.drafter for group in expected.groups):
            for quality in QUALITIES:
                self.qualities[quality.id, not any(quality.judge(expected, observed))] += 1
        if self.policy is not None and not broken:
            broken += [(EXACT, witness) for witness in self._differences(predicted, observed)]
            self.evaluated[EXACT, "answer" if snapshot is None else "snapshot"] += 1
        if broken:
            rule_id, witness = broken[0]
            also = tuple(dict.fromkeys(other for other, _ in broken if other != rule_id))
            raise Violation(rule_id, witness, also)
        self.state = after

    def _differences(self, predicted: Answer | None, observed: Observed) -> Iterable[str]:
        assert self.policy is not None
        answer, snapshot = observed.answer, observed.snapshot
        if predicted is not None and not same_answer(predicted, answer):
            yield f"{self.policy.name} answers {predicted}, the target {answer}"
        if snapshot is not None:
            wanted = self.policy.snapshot()
            pair = snapshot.free_order, wanted.free_order
            if pair[0] is self._equal[0] and pair[1] is self._equal[1]:
                pass
            elif pair[0] == pair[1]:
                self._equal = pair
            else:
                yield (
                    f"the free order of {self.policy.name} is {wanted.free_order}, "
                    f"the target's {snapshot.free_order}"
                )
            if snapshot.keys is not None and snapshot.keys != wanted.keys:
                yield f"{self.policy.name} has keys {wanted.keys}, the target {snapshot.keys}"


def same_answer(predicted: Answer, answer: Answer) -> bool:
    """Are they the same, in what the target shows?"""
    if isinstance(predicted, Granted) and isinstance(answer, Granted):
        same = predicted.tables == answer.tables and predicted.copies == answer.copies
        return same and answer.new in (None, predicted.new)
    if isinstance(predicted, Returned) and isinstance(answer, Returned):
        if answer.deferred is None or predicted.deferred is None:
            return True
        return sorted(predicted.deferred) == sorted(answer.deferred)
    return predicted == answer


def check_answer(state: State, action: Action, answer: Answer) -> None:
    """Raise `NonsenseAnswer` for a wrong shape, `Violation` of I1 for an id of no block."""
    if type(answer) not in ALLOWED_ANSWERS[type(action)]:
        raise NonsenseAnswer(f"{type(answer).__name__} is no answer to {type(action).__name__}")
    if isinstance(answer, Hit) and answer.tokens < 0:
        raise NonsenseAnswer(f"a hit of {answer.tokens} tokens")
    try:
        for tables in tables_shown(answer):
            if len(tables) != len(state.config.groups):
                raise NonsenseAnswer(f"{len(tables)} tables for {len(state.config.groups)} groups")
            for table in tables:
                check_blocks(table, state.config.num_blocks)
        for blocks in blocks_shown(answer):
            check_blocks(blocks, state.config.num_blocks)
        for copy in copies_shown(answer):
            if not 0 <= copy.group < len(state.config.groups):
                raise NonsenseAnswer(f"{copy} is of no group")
    except TypeError as error:
        raise NonsenseAnswer(f"{answer!r:.200} has not block ids where they belong") from error


def check_snapshot(state: State, snapshot: Snapshot | None) -> None:
    """Raise `NonsenseAnswer` if there is not one count for each block."""
    counts = snapshot.reference_counts if snapshot is not None else None
    if counts is not None and len(counts) != state.config.num_blocks:
        raise NonsenseAnswer(f"{len(counts)} counts for {state.config.num_blocks} blocks")


def tables_shown(answer: Answer) -> list[Tables]:
    """All tables and rows that an answer carries."""
    match answer:
        case Hit() | Refused() | Trimmed():
            return [answer.tables]
        case Granted():
            return [answer.tables] if answer.new is None else [answer.tables, answer.new]
        case Issued():
            return [row.tables for row in answer.rows or ()]
        case Scheduled():
            rows = [row.worker for row in answer.rows]
            return rows + [tables for _, tables in answer.tables]
        case _:
            return []


def blocks_shown(answer: Answer) -> list[tuple[int, ...]]:
    """All other block ids that an answer carries."""
    blocks: list[tuple[int, ...]] = [(c.source, c.destination) for c in copies_shown(answer)]
    if isinstance(answer, Issued | Returned | Scheduled | Updated):
        blocks.append(answer.deferred or ())
    if isinstance(answer, Issued | Scheduled):
        blocks.append(answer.cleared or ())
    return blocks


def copies_shown(answer: Answer) -> tuple[Copy, ...]:
    return answer.copies or () if isinstance(answer, Granted | Issued | Scheduled) else ()


def well_typed(value: object, hint: Any) -> bool:
    """Is it what its type hint says, all the way down?"""
    try:
        return bool(decode(encode(value), hint) == value)
    except (MalformedRecord, TypeError):
        return False


def check_blocks(blocks: Sequence[int], num_blocks: int) -> None:
    if type(blocks) is not tuple:
        raise NonsenseAnswer(f"{blocks} is no tuple of block ids")
    if blocks and not 0 <= min(blocks) <= max(blocks) < num_blocks:
        wrong = [block for block in blocks if not 0 <= block < num_blocks]
        raise Violation("I1", f"block {wrong[0]} does not exist, there are {num_blocks}")
    if blocks and set(map(type, blocks)) != {int}:
        raise NonsenseAnswer(f"not all of {blocks} are block ids")


def rules_of(level: str, without: Collection[str] = ()) -> tuple[Rule, ...]:
    """The rules of `safety` (I1 to I6), `contract` or `exact:<policy>`, less `without`."""
    unknown = set(without) - {rule.id for rule in RULES}
    if unknown:
        raise ValueError(f"no rule {', '.join(sorted(unknown))}")
    kept = [rule for rule in RULES if rule.id not in without]
    return tuple(rule for rule in kept if level != "safety" or rule.id.startswith("I"))
