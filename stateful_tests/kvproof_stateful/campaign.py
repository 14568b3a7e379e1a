"""A campaign: seeded runs against one target until the budget ends."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from kvproof_spec.choices import KINDS, Choice, Scope, choices
from kvproof_spec.judgement import Violation
from kvproof_spec.state import ActionDisabled
from kvproof_spec.trace import Header, Trace, dump_trace, write_trace
from kvproof_stateful.coverage import Coverage, goals_of
from kvproof_stateful.exits import (
    EXIT_CLEAN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_VIOLATION,
)
from kvproof_stateful.expectations import BadExpectations, KnownViolation
from kvproof_stateful.plan import WHILE_DRAINING, Asked, Pick, Plan, draw_pick, draw_scope, weights
from kvproof_stateful.running import TARGET_FAILED, Judging, Run, perform_actions
from kvproof_stateful.target import Target, TargetFailed, TargetTimedOut, UnsupportedConfig

RUN_LENGTH = 150
"""Actions of a run before the target is reset: long enough for a pool to fill and turn over."""

MOST_SKIPPED = 200
"""Runs that a target may decline one after the other before the campaign gives up."""

RULE_NEEDS: dict[str, frozenset[str]] = {
    "I5": frozenset({"worker"}),
    "R9": frozenset({"async", "preempt"}),
    "R10": frozenset({"events"}),
}
"""Features without which a claimed rule cannot be evaluated."""

NEEDS_HITS = frozenset({"I6", "R5"})
"""Rules about hits, of which there are none with prefix caching off."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Judged actions, or seconds, whichever is given."""

    actions: int | None = None
    seconds: float | None = None


DRAINED = 0.3
"""Of the runs of a target that schedules itself, those that end with everything finished."""


@dataclass(slots=True)
class Ran:
    """What a run has picked, and the goals that it has reached."""

    picks: list[Pick] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Found:
    """One broken rule: its shrunk trace, and where it was saved."""

    rule: str
    trace: Trace
    path: Path | None
    found_after: int  # judged actions
    found_in: int  # actions, before shrinking
    seconds: float  # until it was found


@dataclass
class Result:
    """What a campaign came to."""

    coverage: Coverage = field(default_factory=Coverage)
    found: list[Found] = field(default_factory=list)  # one a rule
    again: dict[str, int] = field(default_factory=dict)  # further runs that broke a found rule
    stale_expectations: list[str] = field(default_factory=list)
    never_evaluated: list[str] = field(default_factory=list)
    failure: str | None = None
    interrupted: bool = False
    seconds: float = 0.0

    def merge(self, other: Result) -> None:
        """Add another process's; of two traces for one rule the shorter one stays."""
        self.coverage.merge(other.coverage)
        for found in other.found:
            mine = {known.rule: known for known in self.found}.get(found.rule)
            if mine is None:
                self.found.append(found)
                continue
            self.again[found.rule] = self.again.get(found.rule, 0) + 1
            if len(found.trace.lines) < len(mine.trace.lines):
                self.found[self.found.index(mine)] = found
        for rule, times in other.again.items():
            self.again[rule] = self.again.get(rule, 0) + times
        for stale in other.stale_expectations:
            if stale not in self.stale_expectations:
                self.stale_expectations.append(stale)
        self.failure = self.failure or other.failure
        self.interrupted = self.interrupted or other.interrupted
        self.seconds = max(self.seconds, other.seconds)

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_INTERRUPTED
        if any(found.rule != TARGET_FAILED for found in self.found) or self.stale_expectations:
            return EXIT_VIOLATION
        if self.failure or self.never_evaluated:
            return EXIT_FAILED
        return EXIT_CLEAN


Progress = Callable[[Result, float], None]


@dataclass
class Campaign:
    """`target` is judged by `judging` on what `asked` leaves to the seed."""

    target: Target
    judging: Judging
    asked: Asked
    budget: Budget
    seed: int = 0
    known: tuple[KnownViolation, ...] = ()
    out: Path | None = None
    command: str = ""
    action_seconds: float = 0
    first_run: int = 0
    stride: int = 1  # every how many-th run is this process's
    progress: Progress = lambda result, seconds: None

    def run(self) -> Result:
        """Run until the budget ends or is interrupted; what was found is kept either way."""
        self.hello = self.target.hello()
        self.result = Result()
        self.started = time.monotonic()
        try:
            self._replay_known()
            for number in count(self.first_run, self.stride):
                if self._spent():
                    break
                self._one_run(Random(f"{self.seed}/{number}"))
        except KeyboardInterrupt:
            self.result.interrupted = True
        except TargetFailed as failure:
            self.result.failure = str(failure)
        self.result.seconds = time.monotonic() - self.started
        self.require_claims()
        return self.result

    def adopt(self, result: Result) -> None:
        """Take the merged result of several processes for this campaign's own, and save it."""
        self.hello = self.target.hello()
        self.result = result
        for index, found in enumerate(result.found):
            header = replace(found.trace.header, command=self.command)
            trace = replace(found.trace, header=header)
            result.found[index] = replace(found, trace=trace, path=self._save(found.rule, trace))
        self.require_claims()

    def _spent(self) -> bool:
        seconds = time.monotonic() - self.started
        self.progress(self.result, seconds)
        if self.budget.actions is not None:
            return self.result.coverage.lines >= self.budget.actions
        return seconds >= (self.budget.seconds or 0)

    def _replay_known(self) -> None:
        for known in self.known:
            if not known.versions.contains(self.hello.version, prereleases=True):
                continue
            trace = known.read()
            actions = [line.action for line in trace.lines]
            judging = Judging(trace.header.level, trace.header.without, self.judging.snapshots)
            try:
                run = perform_actions(
                    self.target, judging, trace.header.config, actions, self.action_seconds
                )
            except (ActionDisabled, UnsupportedConfig) as error:
                raise BadExpectations(f"{known.trace}: cannot be performed: {error}") from None
            verdict = run.lines[-1].verdict if run.lines else None
            if verdict is None or verdict.rule != known.rule:
                self.result.stale_expectations.append(
                    f"{known.rule} is expected of {self.hello.name} {self.hello.version} "
                    f"({known.link}), but {known.trace.name} came out "
                    f"{'clean' if verdict is None else 'as ' + str(verdict.rule)}: "
                    "remove the expectation or narrow its versions"
                )

    def _one_run(self, rng: Random) -> None:
        coverage = self.result.coverage
        scope, weight = self.draw_scope(rng), self.draw_weights(rng)
        ran = Ran()
        coverage.begin(sorted(scope.features))
        try:
            run = Run(self.target, self.judging, scope.config, self.action_seconds)
        except UnsupportedConfig as reason:
            coverage.skipped[str(reason)] += 1
            if not coverage.lines and coverage.runs >= MOST_SKIPPED:
                raise TargetFailed(f"none of {coverage.runs} runs was possible: {reason}") from None
            return
        try:
            for _ in range(self._run_length()):
                self._one_action(run, scope, draw_pick(rng, choices(run.state, scope), weight), ran)
            if self.hello.observed and rng.random() < DRAINED:
                self._drain(run, scope, rng, ran)
        except UnsupportedConfig as reason:
            coverage.skipped[str(reason)] += 1
        except (Violation, TargetFailed) as broken:
            coverage.lines += 1
            hung = isinstance(broken, TargetTimedOut)
            self._broken(run, Plan(scope, tuple(ran.picks)), ran.reached, hung)
        finally:
            coverage.evaluate(run.oracle.evaluated, run.oracle.qualities)

    def draw_scope(self, rng: Random) -> Scope:
        """What a run is drawn from."""
        return draw_scope(rng, self.hello, self.asked)

    def draw_weights(self, rng: Random) -> dict[str, float]:
        """How often each kind of choice is taken in a run."""
        return weights(rng, self.hello.observed)

    def _one_action(
        self, run: Run, scope: Scope, drawn: tuple[Choice, tuple[int, ...]], ran: Ran
    ) -> None:
        choice, parameters = drawn
        ran.picks.append(Pick(KINDS.index(choice.kind), choice.request, parameters))
        before = run.state
        action = choice.action(parameters)
        answer = run.step(action)
        failed = choice.kind == "complete load" and parameters != (0,)
        self.result.coverage.count(choice.kind, sorted(scope.features), answer, failed)
        for goal in goals_of(before, action, answer):
            self.result.coverage.goals[goal] += 1
            ran.reached.add(goal)

    def _drain(self, run: Run, scope: Scope, rng: Random, ran: Ran) -> None:
        """Nothing comes any more, and every operation returns: what is there has to finish."""
        state = run.state
        while state.requests or state.steps or state.transfers:
            enabled = [c for c in choices(state, scope) if WHILE_DRAINING[c.kind]]
            if not enabled or self._run_length() < 1:
                return
            self._one_action(run, scope, draw_pick(rng, enabled, WHILE_DRAINING), ran)
            state = run.state
        self.result.coverage.goals["drained"] += 1

    def _run_length(self) -> int:
        if self.budget.actions is None:
            return RUN_LENGTH
        return min(RUN_LENGTH, self.budget.actions - self.result.coverage.lines)

    def _broken(self, run: Run, plan: Plan, reached: set[str], hung: bool) -> None:
        verdict = run.lines[-1].verdict
        assert verdict is not None
        rule = verdict.rule
        assert rule is not None
        last = run.lines[-1]
        if last.answer is not None:
            reached = reached | set(goals_of(run.state, last.action, last.answer))
        if any(known.covers(rule, self.hello.version, reached) for known in self.known):
            self.result.coverage.known[rule] += 1
        elif rule in {found.rule for found in self.result.found}:
            self.result.again[rule] = self.result.again.get(rule, 0) + 1
        else:
            self._keep(rule, run, plan, hung)

    def _keep(self, rule: str, run: Run, plan: Plan, hung: bool) -> None:
        from kvproof_stateful.shrinking import Smallest, shrink

        after, seconds = self.result.coverage.lines, time.monotonic() - self.started
        long = len(run.lines)
        smallest = Smallest(self.target, self.judging, rule, plan, run, self.action_seconds)
        try:
            if not hung:  # each attempt would take as long
                shrink(smallest)
        finally:  # an interrupt keeps what is smallest so far
            trace = self._trace(smallest.run)
            path = self._save(rule, trace)
            self.result.found.append(Found(rule, trace, path, after, long, seconds))
        if rule == TARGET_FAILED:
            verdict = smallest.run.lines[-1].verdict
            raise TargetFailed(verdict.witness if verdict else "for no known reason")

    def _save(self, rule: str, trace: Trace) -> Path | None:
        if self.out is None:
            return None
        path = self.out / f"{rule.replace(' ', '-')}-{digest(trace)}.ndjson"
        write_trace(path, trace)
        return path

    def _trace(self, run: Run) -> Trace:
        header = Header(
            config=run.config,
            target=self.hello.name,
            target_version=self.hello.version,
            level=self.judging.level,
            without=self.judging.without,
            corrections=tuple(sorted(self.hello.corrections)),
            seed=self.seed,
            command=self.command,
        )
        return Trace(header, tuple(run.lines))

    def require_claims(self) -> None:
        """Note the claimed rules that could have been evaluated, and never were."""
        self.result.never_evaluated = []
        if self.result.interrupted or self.result.failure or self.result.found:
            return
        judged = {rule.id for rule in self.judging.rules()}
        features = self.asked.features
        for rule in self.result.coverage.never_evaluated(self.hello.claims):
            needs = RULE_NEEDS.get(rule, frozenset())
            offered = self.hello.features if features is None else features
            no_hits = rule in NEEDS_HITS and features is not None and "uncached" in features
            if rule in judged and needs <= offered and not no_hits:
                self.result.never_evaluated.append(rule)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable report."""
        result = self.result
        return {
            "target": self.hello.name,
            "version": self.hello.version,
            "level": self.judging.level,
            "without": list(self.judging.without),
            "seed": self.seed,
            "command": self.command,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 3),
            "judged_actions": result.coverage.lines,
            "violations": [
                {
                    "rule": found.rule,
                    "witness": (found.trace.verdict.witness if found.trace.verdict else ""),
                    "also": list(found.trace.verdict.also) if found.trace.verdict else [],
                    "trace": str(found.path) if found.path else None,
                    "trace_actions": len(found.trace.lines),
                    "found_after_actions": found.found_after,
                    "found_after_seconds": round(found.seconds, 3),
                    "again": result.again.get(found.rule, 0),
                }
                for found in result.found
            ],
            "stale_expectations": result.stale_expectations,
            "never_evaluated": result.never_evaluated,
            "failure": result.failure,
            "interrupted": result.interrupted,
            "coverage": result.coverage.to_json(),
        }


def digest(trace: Trace) -> str:
    """Eight hex digits that name a trace by its bytes."""
    text = "\n".join(dump_trace(trace))
    return hashlib.sha256(text.encode()).hexdigest()[:8]
