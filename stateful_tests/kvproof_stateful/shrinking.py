"""Shrinking: Hypothesis over a run's numbers, from the run that failed.

A plan is written as the sequence of numbers that a strategy draws for it, saved as that
strategy's known example, and Hypothesis does what it does best: delete and lower numbers
while the same rule breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import hypothesis.core
from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import HypothesisException

from kvproof_spec.choices import KINDS, Scope
from kvproof_stateful.plan import Pick, Plan
from kvproof_stateful.running import Judging, Run, perform_plan
from kvproof_stateful.target import Target, TargetFailed, UnsupportedConfig

ATTEMPTS = 1500
"""Runs that may be made to shrink one violation."""

MOST_PARAMETERS = 12
LARGEST_PARAMETER = 120
KEY = b"kvproof"
ABOUT_NO_REQUEST = {"submit", "issue", "complete step", "forget blocks", "forget everything"}
ABOUT_A_REQUEST = frozenset(KINDS) - ABOUT_NO_REQUEST


def shrink(smallest: Smallest) -> None:
    """Make it smaller, until nothing helps or its attempts are used up.

    Deterministic for a deterministic target.  An interrupt leaves the smallest so far.
    """
    with suppress(AttemptsUsedUp):
        smallest.breaks(with_used_prompts(smallest.plan))
        drop_picks(smallest)
        for _ in range(2):
            drop_requests(smallest)
            minimize(smallest.plan, smallest.breaks)
        drop_requests(smallest)


class AttemptsUsedUp(SkipTest):
    """Ends the shrinking: the one exception that Hypothesis does not take for a finding."""


class Smallest:
    """The smallest plan so far that breaks the rule, and its run.

    `attempts` runs may be made to find a smaller one; `seconds` is what an action may take.
    """

    def __init__(
        self,
        target: Target,
        judging: Judging,
        rule: str,
        plan: Plan,
        run: Run,
        seconds: float = 0,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.target = target
        self.judging = judging
        self.rule = rule
        self.seconds = seconds
        self.attempts = attempts
        self.plan = plan
        self.run = run

    def breaks(self, plan: Plan) -> bool:
        """Does it break the rule?  What it performs is kept if nothing smaller is."""
        self.attempts -= 1
        if self.attempts < 0:
            raise AttemptsUsedUp("no run is left to be made")
        try:
            run, performed = perform_plan(self.target, self.judging, plan, self.seconds)
        except (UnsupportedConfig, TargetFailed):  # a reset may fail, too
            return False
        verdict = run.lines[-1].verdict if run.lines else None
        if verdict is None or verdict.rule != self.rule:
            return False
        if size(performed, run) < size(self.plan, self.run):
            self.plan, self.run = performed, run
        return True


def size(plan: Plan, run: Run) -> tuple[int, int, int, int]:
    """What is smaller is easier to read: fewer actions, then shorter prompts, fewer blocks."""
    symbols = sum(len(getattr(line.action, "symbols", ())) for line in run.lines)
    return len(run.lines), symbols, plan.scope.config.num_blocks, len(plan.scope.prompts)


def with_used_prompts(plan: Plan) -> Plan:
    """Without the prompts that no request has: there is less to draw."""
    submit = KINDS.index("submit")
    used = sorted({pick.parameters[0] for pick in plan.picks if pick.kind == submit})
    place = {prompt: index for index, prompt in enumerate(used)}
    picks = tuple(
        replace(pick, parameters=(place[pick.parameters[0]], *pick.parameters[1:]))
        if pick.kind == submit
        else pick
        for pick in plan.picks
    )
    prompts = tuple(plan.scope.prompts[index] for index in used)
    return Plan(replace(plan.scope, prompts=prompts or plan.scope.prompts[:1]), picks)


def drop_picks(smallest: Smallest) -> None:
    """Leave out long stretches first, then shorter ones: the cheap part of the work."""
    length = len(smallest.plan.picks) // 2
    while length:
        start = len(smallest.plan.picks) - length
        while start >= 0:
            picks = smallest.plan.picks
            smallest.breaks(replace(smallest.plan, picks=picks[:start] + picks[start + length :]))
            start = min(start, len(smallest.plan.picks)) - length
        length //= 2


def drop_requests(smallest: Smallest) -> None:
    """Leave out whole requests, which numbers alone cannot: later ones move up."""
    submit = KINDS.index("submit")
    requests = sum(pick.kind == submit for pick in smallest.plan.picks)
    for request in reversed(range(requests)):
        smallest.breaks(without_request(smallest.plan, request))


def without_request(plan: Plan, request: int) -> Plan:
    submit, submitted = KINDS.index("submit"), 0
    picks = []
    for pick in plan.picks:
        if pick.kind == submit:
            submitted += 1
            if submitted - 1 == request:
                continue
        elif KINDS[pick.kind] in ABOUT_A_REQUEST:
            if pick.request == request:
                continue
            pick = replace(pick, request=pick.request - (pick.request > request))
        picks.append(pick)
    return replace(plan, picks=tuple(picks))


def minimize(plan: Plan, breaks: Callable[[Plan], bool]) -> None:
    """Let Hypothesis call `breaks` with ever smaller plans."""
    database = InMemoryExampleDatabase()
    # One number too many: Hypothesis takes an example that it reads back exactly for one
    # that it has shrunk before, and would leave it as it is.
    database.save(KEY, choices_to_bytes([*numbers_of(plan), 0]))
    limits = settings(
        database=database,
        phases=[Phase.reuse, Phase.shrink],
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    # Whatever it thinks of the result, the smallest plan is kept elsewhere.
    with seeded(), suppress(HypothesisException):
        find(plans(plan.scope), breaks, settings=limits, database_key=KEY)


@contextmanager
def seeded() -> Generator[None]:
    """Make Hypothesis repeatable; `hypothesis.seed` would also take away its database."""
    core: Any = hypothesis.core
    before, core.global_force_seed = core.global_force_seed, 0
    try:
        yield
    finally:
        core.global_force_seed = before


@st.composite
def plans(draw: Any, scope: Scope) -> Plan:
    """Plans within `scope`, with a smaller pool, shorter prompts and other picks."""
    num_blocks = 2 + draw(st.integers(0, scope.config.num_blocks - 2))
    config = replace(scope.config, num_blocks=num_blocks)
    prompts = tuple(draw(prompt(scope, len(original))) for original in scope.prompts)
    picks = []
    while True:
        pick = draw(maybe_pick())
        if pick is None:
            break
        picks.append(pick)
    return Plan(replace(scope, config=config, prompts=prompts), tuple(picks))


@st.composite
def prompt(draw: Any, scope: Scope, longest: int) -> tuple[int, ...]:
    symbols = [scope.samples[draw(st.integers(0, len(scope.samples) - 1))]]
    while len(symbols) < longest and draw(st.booleans()):
        symbols.append(scope.samples[draw(st.integers(0, len(scope.samples) - 1))])
    return tuple(symbols)


@st.composite
def maybe_pick(draw: Any) -> Pick | None:
    if not draw(st.booleans()):
        return None
    kind = draw(st.integers(0, len(KINDS) - 1))
    request = draw(st.integers(0, LARGEST_PARAMETER))
    parameters: list[int] = []
    while len(parameters) < MOST_PARAMETERS and draw(st.booleans()):
        parameters.append(draw(st.integers(0, LARGEST_PARAMETER)))
    return Pick(kind, request, tuple(parameters))


def numbers_of(plan: Plan) -> Iterator[int | bool]:
    """What `plans` draws for this plan, in its order."""
    scope = plan.scope
    yield scope.config.num_blocks - 2
    for symbols in scope.prompts:
        for position, symbol in enumerate(symbols):
            if position:
                yield True
            yield scope.samples.index(symbol)
        # a prompt of full length ends by itself
    for pick in plan.picks:
        yield True
        yield pick.kind
        yield min(pick.request, LARGEST_PARAMETER)
        for parameter in pick.parameters[:MOST_PARAMETERS]:
            yield True
            yield min(parameter, LARGEST_PARAMETER)
        if len(pick.parameters) < MOST_PARAMETERS:
            yield False
    yield False
