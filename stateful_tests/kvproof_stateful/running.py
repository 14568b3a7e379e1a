"""One run: a target and an oracle side by side, action by action, until one is violated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TypeVar

from kvproof_spec.actions import Action
from kvproof_spec.answers import Answer, Snapshot
from kvproof_spec.choices import choices
from kvproof_spec.config import Config
from kvproof_spec.judgement import Rule, Violation
from kvproof_spec.oracle import NonsenseAnswer, Oracle, rules_of
from kvproof_spec.policies import POLICIES
from kvproof_spec.state import ActionDisabled, State
from kvproof_spec.trace import Line, Trace, Verdict
from kvproof_stateful.plan import Plan
from kvproof_stateful.target import Target, TargetFailed, TargetTimedOut, UnsupportedConfig

T = TypeVar("T")

TARGET_FAILED = "target failed"
"""In the place of a rule: the target raised, hung or answered nonsense."""


class UnknownLevel(ValueError):
    """No level of this name; the message lists them."""


@dataclass(frozen=True, slots=True)
class Judging:
    """A level, less the rules that were left out."""

    level: str = "contract"
    without: tuple[str, ...] = ()
    snapshots: bool = True

    def rules(self) -> tuple[Rule, ...]:
        base, _, _ = self.level.partition(":")
        known = ["safety", "contract", *(f"exact:{name}" for name in POLICIES)]
        if self.level not in known:
            raise UnknownLevel(f"no level {self.level!r}: {', '.join(known)}")
        return rules_of(base, self.without)

    def oracle(self, config: Config, corrections: Collection[str] = ()) -> Oracle:
        """An oracle of this level; `corrections` are the target's, of the policy's engine."""
        _, _, name = self.level.partition(":")
        policy = POLICIES[name](config, corrections) if name else None
        return Oracle(config, self.rules(), policy)


class TargetHung(BaseException):
    """Raised inside the target when an action takes too long; not to be swallowed there."""


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """End what takes longer, where signals can (the main thread of a Unix process)."""
    if seconds <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TargetHung

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass(slots=True)
class Run:
    """A target after `reset`, its oracle, and the lines so far.

    `seconds` is what one action may take (0: for ever); it needs `time_limit` around it.
    """

    target: Target
    judging: Judging
    config: Config
    seconds: float = 0
    oracle: Oracle = field(init=False)
    lines: list[Line] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.oracle = self.judging.oracle(self.config, self.target.hello().corrections)
        guarded(self.seconds, "reset", lambda: self.target.reset(self.config))

    @property
    def state(self) -> State:
        return self.oracle.state

    def step(self, action: Action) -> Answer:
        """Perform and judge one action; `Violation` or `TargetFailed` is also its last line."""
        answer: Answer | None = None
        snapshot: Snapshot | None = None
        verdict = None
        try:
            given = answer = guarded(self.seconds, action, lambda: self.target.perform(action))
            if self.judging.snapshots:
                snapshot = guarded(self.seconds, "snapshot", self.target.snapshot)
            self.oracle.step(action, given, snapshot)
            return given
        except Violation as violation:
            verdict = Verdict(violation.rule, violation.witness, violation.also)
            raise
        except NonsenseAnswer as nonsense:
            answer, snapshot = None, None  # it may be anything, and is not written down
            verdict = Verdict(TARGET_FAILED, f"{action}: answered with nonsense: {nonsense}")
            raise TargetFailed(verdict.witness) from None
        except TargetFailed as failure:
            verdict = Verdict(TARGET_FAILED, str(failure))
            raise
        finally:
            announces = snapshot is not None and snapshot.events
            kept = snapshot if announces or verdict is not None else None
            self.lines.append(Line(action, answer, kept, verdict))


def guarded(seconds: float, what: object, call: Callable[[], T]) -> T:
    """Call into the target: whatever it raises, or taking too long, is `TargetFailed`."""
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    except (TargetFailed, UnsupportedConfig, ActionDisabled):
        raise
    except TargetHung:
        raise TargetTimedOut(f"{what}: no answer within {seconds:g} s") from None
    except Exception as error:
        text = " ".join(str(error).split())
        raise TargetFailed(f"{what}: raised {type(error).__name__}: {text}") from error
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)


def perform_plan(
    target: Target, judging: Judging, plan: Plan, seconds: float = 0
) -> tuple[Run, Plan]:
    """Perform the picks that are enabled; the run's last line has the verdict.

    The plan that comes back has just the picks that were performed.
    """
    run = Run(target, judging, plan.scope.config, seconds)
    performed = []
    try:
        for pick in plan.picks:
            choice = pick.find(choices(run.state, plan.scope))
            if choice is not None:
                performed.append(pick)
                run.step(choice.action(pick.parameters))
    except (Violation, TargetFailed):
        pass
    return run, replace(plan, picks=tuple(performed))


def perform_actions(
    target: Target, judging: Judging, config: Config, actions: Sequence[Action], seconds: float = 0
) -> Run:
    """Perform a trace's actions again; `ActionDisabled` if they no longer fit the answers."""
    run = Run(target, judging, config, seconds)
    try:
        for action in actions:
            action.check(run.state)
            run.step(action)
    except (Violation, TargetFailed):
        pass
    return run


def judge_trace(judging: Judging, trace: Trace) -> Verdict | None:
    """Judge the recorded answers, without a target; the verdict of the first bad line."""
    oracle = judging.oracle(trace.header.config, trace.header.corrections)
    for line in trace.lines:
        failed = line.verdict is not None and line.verdict.rule == TARGET_FAILED
        if line.answer is None or failed:
            return line.verdict
        try:
            oracle.step(line.action, line.answer, line.snapshot)
        except Violation as violation:
            return Verdict(violation.rule, violation.witness, violation.also)
        except NonsenseAnswer as nonsense:
            return Verdict(TARGET_FAILED, str(nonsense))
    return None
