"""Campaigns that look for one fault, and what is left of a run that found it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvproof_spec.choices import KINDS, Scope
from kvproof_spec.state import ActionDisabled
from kvproof_spec.trace import Header, Trace, read_trace
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.faults.fault import Fault
from kvproof_stateful.plan import SAMPLES, Plan, draw_scope
from kvproof_stateful.running import Run, perform_actions
from kvproof_stateful.shrinking import Smallest, drop_picks, shrink

A_MINUTE = Budget(seconds=60)


@dataclass(frozen=True, slots=True)
class Detection:
    """A run that broke a fault's rule, not yet shrunk."""

    plan: Plan
    run: Run
    actions: int  # judged by the campaign until then
    seconds: float  # until then
    first_rule: str  # what the campaign saw broken first, perhaps another rule


class Detected(Exception):
    """Ends a search."""

    def __init__(self, detection: Detection) -> None:
        super().__init__("the fault was detected")
        self.detection = detection


class Search(Campaign):
    """A campaign over everything the target offers, until a fault's rule is broken.

    What breaks other rules on the way is passed over, and not shrunk.
    """

    rule: str
    first_rule: str | None = None

    def _keep(self, rule: str, run: Run, plan: Plan, hung: bool) -> None:
        self.first_rule = self.first_rule or rule
        if rule == self.rule:
            actions, passed = self.result.coverage.lines, time.monotonic() - self.started
            raise Detected(Detection(plan, run, actions, passed, self.first_rule))


class UniformSearch(Search):
    """The same by plain uniform choice: each enabled action is as likely as any other.

    Prompts are any tokens, of any length that fits.
    """

    def draw_scope(self, rng: Random) -> Scope:
        return draw_scope(rng, self.hello, self.asked, uniform_prompts)

    def draw_weights(self, rng: Random) -> dict[str, float]:
        return dict.fromkeys(KINDS, 1.0)


def uniform_prompts(rng: Random, unit: int) -> tuple[tuple[int, ...], ...]:
    lengths = [rng.randint(1, 10 * unit) for _ in range(6)]
    return tuple(tuple(rng.choice(SAMPLES) for _ in range(length)) for length in lengths)


def search(
    fault: Fault, seed: int, budget: Budget = A_MINUTE, kind: type[Search] = Search
) -> Detection | None:
    """What a campaign with this seed finds of the fault, or None; an interrupt goes on."""
    made = kind(fault.target(), fault.judging, fault.asked, budget, seed)
    made.rule = fault.rule
    try:
        result = made.run()
    except Detected as end:
        return end.detection
    if result.interrupted:
        raise KeyboardInterrupt
    return None


def shrunk_trace(fault: Fault, detections: Iterable[Detection]) -> Trace | None:
    """Of these runs the one that is shortest after the cheap part of shrinking, shrunk."""
    shortest: Smallest | None = None
    for found in detections:
        smallest = Smallest(fault.target(), fault.judging, fault.rule, found.plan, found.run)
        drop_picks(smallest)
        if shortest is None or len(smallest.run.lines) < len(shortest.run.lines):
            shortest = smallest
    if shortest is None:
        return None
    shrink(shortest)
    return trace_of(fault, shortest.run)


def trace_of(fault: Fault, run: Run) -> Trace:
    hello = fault.target().hello()
    command = f"kvproof faults {fault.name} --write counterexamples"
    level, without = fault.judging.level, fault.judging.without
    header = Header(run.config, hello.name, hello.version, level, without, command=command)
    return Trace(header, tuple(run.lines))


def trace_path(folder: Path, fault: Fault) -> Path:
    return folder / f"fault-{fault.name}.ndjson"


def kept_trace(folder: Path, fault: Fault) -> Trace | None:
    """The actions of a kept trace with today's answers, if they still break the fault's rule."""
    path = trace_path(folder, fault)
    if not path.exists():
        return None
    trace = read_trace(path)
    actions = [line.action for line in trace.lines]
    judging, config = fault.judging, trace.header.config
    try:
        again = trace_of(fault, perform_actions(fault.target(), judging, config, actions))
    except ActionDisabled:
        return None
    return again if again.verdict is not None and again.verdict.rule == fault.rule else None
