"""The oracle: follow an implementation, answer by answer, until one is not allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    Forget,
    Issue,
    Lookup,
    Publish,
    Release,
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
from kvproof_spec.judgement import Evidence, Expected, Observed, Rule, Violation, evidence_shown
from kvproof_spec.observed import InconsistentAnswer, core_actions
from kvproof_spec.pages import Tables
from kvproof_spec.state import ActionDisabled, State, initial_state

EXACT = "exact"
"""The rule that a target breaks by differing from the named policy."""

ALLOWED_ANSWERS: dict[type[Action], tuple[type[Answer], ...]] = {
    Submit: (Done,),
    Lookup: (Hit,),
    Allocate: (Granted, Refused, Raised),
    Issue: (Issued, Scheduled),
    CompleteStep: (Returned, Updated),
    CompleteLoad: (Done,),
    Publish: (Done,),
    Trim: (Trimmed,),
    Release: (Returned,),
    Forget: (Forgotten,),
}


class NonsenseAnswer(Exception):
    """An answer that is none: of the wrong kind or shape, or contradicting itself."""


class Policy(Protocol):
    """Predicts which of the allowed answers a named implementation picks."""

    name: str

    def predict(self, state: State, action: Action) -> Answer | None:
        """The answer, or None where the policy has nothing to say."""

    def snapshot(self) -> Snapshot:
        """Free order, keys and tables after the actions predicted so far."""


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
        self.evaluated: dict[tuple[str, Evidence], int] = {}
        self._rules = tuple(rules)
        self._judging: dict[tuple[Evidence, ...], list[tuple[Rule, list[Evidence]]]] = {}

    def _rules_for(self, shown: tuple[Evidence, ...]) -> list[tuple[Rule, list[Evidence]]]:
        """The rules that can be evaluated by what is shown, and by which part of it."""
        if shown not in self._judging:
            usable = [(rule, [e for e in rule.evidence if e in shown]) for rule in self._rules]
            self._judging[shown] = [(rule, evidence) for rule, evidence in usable if evidence]
        return self._judging[shown]

    def step(self, action: Action, answer: Answer, snapshot: Snapshot | None = None) -> None:
        """Take one answer, or raise: `ActionDisabled`, `NonsenseAnswer` or `Violation`."""
        check_answer(self.state, action, answer)
        if not isinstance(answer, Scheduled | Updated):
            self._judge(action, answer, snapshot)
            return
        try:
            parts = list(core_actions(self.state, action, answer))
            for part, its_answer in parts[:-1]:
                self._judge(part, its_answer, None, scheduled=True)
            self._judge(*parts[-1], snapshot, scheduled=True)
        except InconsistentAnswer as error:
            raise NonsenseAnswer(str(error)) from None
        except ActionDisabled as error:
            raise NonsenseAnswer(f"its scheduler did what no engine may: {error}") from None

    def _judge(
        self, action: Action, answer: Answer, snapshot: Snapshot | None, scheduled: bool = False
    ) -> None:
        before = self.state
        action.check(before)
        predicted = self.policy.predict(before, action) if self.policy else None
        after = action.apply(before, answer)
        expected = Expected(before, action, after)
        observed = Observed(answer, snapshot)
        broken: list[tuple[str, str]] = []
        shown = tuple(evidence_shown(expected, observed, scheduled))
        for rule, usable in self._rules_for(shown):
            for evidence in usable:
                self._count(rule.id, evidence)
            for witness in rule.judge(expected, observed):
                broken.append((rule.id, witness))
        if self.policy is not None and not broken:
            broken += [(EXACT, witness) for witness in self._differences(predicted, observed)]
            self._count(EXACT, "answer" if snapshot is None else "snapshot")
        if broken:
            rule_id, witness = broken[0]
            also = tuple(dict.fromkeys(other for other, _ in broken if other != rule_id))
            raise Violation(rule_id, witness, also)
        self.state = after

    def _count(self, rule_id: str, evidence: Evidence) -> None:
        key = rule_id, evidence
        self.evaluated[key] = self.evaluated.get(key, 0) + 1

    def _differences(self, predicted: Answer | None, observed: Observed) -> Iterable[str]:
        assert self.policy is not None
        answer, snapshot = observed.answer, observed.snapshot
        if predicted is not None and not same_answer(predicted, answer):
            yield f"{self.policy.name} answers {predicted}, the target {answer}"
        if snapshot is not None:
            wanted = self.policy.snapshot()
            if snapshot.free_order != wanted.free_order:
                yield (
                    f"the free order of {self.policy.name} is {wanted.free_order}, "
                    f"the target's {snapshot.free_order}"
                )
            if snapshot.keys is not None and snapshot.keys != wanted.keys:
                yield f"{self.policy.name} has keys {wanted.keys}, the target {snapshot.keys}"


def same_answer(predicted: Answer, answer: Answer) -> bool:
    """Are they the same, in what the target shows?"""
    if isinstance(predicted, Granted) and isinstance(answer, Granted):
        return predicted.tables == answer.tables and answer.new in (None, predicted.new)
    if isinstance(predicted, Returned) and isinstance(answer, Returned):
        if answer.deferred is None or predicted.deferred is None:
            return True
        return sorted(predicted.deferred) == sorted(answer.deferred)
    return predicted == answer


def check_answer(state: State, action: Action, answer: Answer) -> None:
    """Raise `NonsenseAnswer` for a wrong shape, `Violation` of I1 for an id of no block."""
    if not isinstance(answer, ALLOWED_ANSWERS[type(action)]):
        raise NonsenseAnswer(f"{type(answer).__name__} is no answer to {type(action).__name__}")
    shown: list[Tables] = []
    if isinstance(answer, Hit | Granted | Refused | Trimmed):
        shown.append(answer.tables)
    if isinstance(answer, Granted) and answer.new is not None:
        shown.append(answer.new)
    if isinstance(answer, Issued):
        shown += [row.tables for row in answer.rows or ()]
    if isinstance(answer, Scheduled):
        shown += [row.worker for row in answer.rows]
        shown += [tables for _, tables in answer.tables]
    for tables in shown:
        if len(tables) != len(state.config.groups):
            raise NonsenseAnswer(f"{len(tables)} tables for {len(state.config.groups)} groups")
        check_blocks((block for table in tables for block in table), state.config.num_blocks)
    if isinstance(answer, Returned | Scheduled | Updated):
        check_blocks(answer.deferred or (), state.config.num_blocks)


def check_blocks(blocks: Iterable[int], num_blocks: int) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise Violation("I1", f"block {block} does not exist, there are {num_blocks}")


def rules_of(level: str, without: Collection[str] = ()) -> tuple[Rule, ...]:
    """The rules of `safety` (I1 to I6), `contract` or `exact:<policy>`, less `without`."""
    unknown = set(without) - {rule.id for rule in RULES}
    if unknown:
        raise ValueError(f"no rule {', '.join(sorted(unknown))}")
    kept = [rule for rule in RULES if rule.id not in without]
    return tuple(rule for rule in kept if level != "safety" or rule.id.startswith("I"))
