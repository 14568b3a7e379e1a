"""Shrinking: Hypothesis over a run's numbers, from the run that failed.

A plan is written as the sequence of numbers that a strategy draws for it, saved as that
strategy's known example, and Hypothesis does what it does best: delete and lower numbers
while the same rule breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import SkipTest

import hypothesis.core
from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import HypothesisException

from kvproof_spec.choices import KINDS, Scope
from kvproof_spec.config import Config
from kvproof_spec.prefix import TOKENS_ONLY
from kvproof_stateful.plan import Pick, Plan
from kvproof_stateful.running import Judging, Run, perform_plan
from kvproof_stateful.target import Target, TargetFailed, UnsupportedConfig

ATTEMPTS = 3000
"""Runs that may be made to shrink one violation."""

SHORT = 40
"""Picks of a plan for which a smaller pool is tried with each stretch that is left out."""

MOST_PARAMETERS = 12
LARGEST_PARAMETER = 120
KEY = b"kvproof"
PLAIN_INPUTS = (TOKENS_ONLY,)
# Returns stay deferred: where steps are not ordered a healthy engine needs it.
USUAL: Mapping[str, object] = {
    "events": False,
    "clears": False,
    "partial_boundary": None,
    "ordering": "stream",
    "worker": True,
}
USUAL_SCHEDULING: Mapping[str, object] = {
    "policy": "fcfs",
    "asynchronous": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 0,
    "whole_sequence_check": False,
    "stop_token": None,
}
ABOUT_NO_REQUEST = {"submit", "issue", "complete step", "forget blocks", "forget everything"}
ABOUT_A_REQUEST = frozenset(KINDS) - ABOUT_NO_REQUEST


def shrink(smallest: Smallest) -> None:
    """Make it smaller, until nothing helps or its attempts are used up.

    Deterministic for a deterministic target.  An interrupt leaves the smallest so far.
    """
    with suppress(AttemptsUsedUp):
        smallest.breaks(with_used_prompts(smallest.plan))
        drop_picks(smallest)
        take_apart(smallest)
        minimize(smallest.plan, smallest.breaks)
        take_apart(smallest)


def take_apart(smallest: Smallest) -> None:
    """Leave out what a run is made of, part by part, until nothing more can be missed."""
    before = None
    while before != smallest.size:
        before = smallest.size
        for leave_out in (simplify_scope, drop_requests, drop_picks, shorten_prompts, lower_picks):
            leave_out(smallest)


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

    @property
    def size(self) -> tuple[int, ...]:
        return size(self.plan, self.run)

    def breaks_in_some_pool(self, plan: Plan, most_less: int) -> bool:
        """Does it break the rule, or would it in a pool of up to so many blocks less?

        What is left out may have filled the pool.
        """
        config = plan.scope.config
        for num_blocks in range(config.num_blocks, max(config.num_blocks - most_less, 2) - 1, -1):
            smaller = replace(plan.scope, config=replace(config, num_blocks=num_blocks))
            if self.breaks(replace(plan, scope=smaller)):
                return True
        return False

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
        if size(performed, run) < self.size:
            self.plan, self.run = performed, run
        return True


def size(plan: Plan, run: Run) -> tuple[int, ...]:
    """What is smaller is easier to read: fewer actions, then a simpler setting, shorter prompts."""
    scope = plan.scope
    symbols = sum(len(getattr(line.action, "symbols", ())) for line in run.lines)
    setting = (len(scope.config.groups), unusual(scope.config), scope.inputs != PLAIN_INPUTS)
    return len(run.lines), *setting, symbols, scope.config.num_blocks, len(scope.prompts)


def unusual(config: Config) -> int:
    """Settings that are not as usual."""
    settings: tuple[tuple[object, Mapping[str, object]], ...] = (
        (config, USUAL),
        (config.scheduling, USUAL_SCHEDULING),
    )
    return sum(
        getattr(of, name) != value
        for of, usual in settings
        if of is not None
        for name, value in usual.items()
    )


def simplify_scope(smallest: Smallest) -> None:
    """Leave out a group, the inputs beside tokens, or a setting, where the rule breaks without."""
    for simpler in simpler_scopes(smallest.plan.scope):
        with suppress(ValueError):  # not every configuration can be
            smallest.breaks(replace(smallest.plan, scope=simpler(smallest.plan.scope)))


def simpler_scopes(scope: Scope) -> Iterator[Callable[[Scope], Scope]]:
    """Each a change of what is left of the scope by then."""
    for index in reversed(range(len(scope.config.groups))):
        yield partial(without_group, index)
    yield lambda scope: replace(scope, inputs=PLAIN_INPUTS)
    for name in USUAL:
        yield partial(with_usual, name)
    for name in USUAL_SCHEDULING if scope.config.scheduling is not None else ():
        yield partial(with_usual_scheduling, name)


def without_group(index: int, scope: Scope) -> Scope:
    groups = scope.config.groups
    left = groups[:index] + groups[index + 1 :]
    encoder_tokens = scope.encoder_tokens if any(group.kind == "cross" for group in left) else (0,)
    config = replace(scope.config, groups=left)
    return replace(scope, config=config, encoder_tokens=encoder_tokens)


def with_usual(name: str, scope: Scope) -> Scope:
    changed: dict[str, Any] = {name: USUAL[name]}
    return replace(scope, config=replace(scope.config, **changed))


def with_usual_scheduling(name: str, scope: Scope) -> Scope:
    assert scope.config.scheduling is not None
    changed: dict[str, Any] = {name: USUAL_SCHEDULING[name]}
    scheduling = replace(scope.config.scheduling, **changed)
    return replace(scope, config=replace(scope.config, scheduling=scheduling))


def with_used_prompts(plan: Plan) -> Plan:
    """Without the prompts that no request has: there is less to draw."""
    submit, last = KINDS.index("submit"), len(plan.scope.prompts) - 1
    submits = [pick for pick in plan.picks if pick.kind == submit]
    chosen = {pick: min((*pick.parameters, 0)[0], last) for pick in submits}
    place = {prompt: index for index, prompt in enumerate(sorted(set(chosen.values())))}
    picks = tuple(
        replace(pick, parameters=(place[chosen[pick]], *pick.parameters[1:]))
        if pick in chosen
        else pick
        for pick in plan.picks
    )
    prompts = tuple(plan.scope.prompts[index] for index in place)
    return Plan(replace(plan.scope, prompts=prompts or plan.scope.prompts[:1]), picks)


def drop_picks(smallest: Smallest) -> None:
    """Leave out long stretches first, then shorter ones: the cheap part of the work."""
    length = len(smallest.plan.picks) // 2
    while length:
        start = len(smallest.plan.picks) - length
        while start >= 0:
            picks = smallest.plan.picks
            fewer = replace(smallest.plan, picks=picks[:start] + picks[start + length :])
            smallest.breaks_in_some_pool(fewer, most_less=2 if len(picks) <= SHORT else 0)
            start = min(start, len(smallest.plan.picks)) - length
        length //= 2


def drop_requests(smallest: Smallest) -> None:
    """Leave out whole requests, which numbers alone cannot: later ones move up."""
    submit = KINDS.index("submit")
    requests = sum(pick.kind == submit for pick in smallest.plan.picks)
    for request in reversed(range(requests)):
        fewer = without_request(smallest.plan, request)
        smallest.breaks_in_some_pool(fewer, most_less=smallest.plan.scope.config.num_blocks)


def shorten_prompts(smallest: Smallest) -> None:
    """Cut off half, a block, or a token, as often as the rule still breaks."""
    smallest.breaks(with_used_prompts(smallest.plan))
    block = max(group.block_size for group in smallest.plan.scope.config.groups)
    for index in range(len(smallest.plan.scope.prompts)):
        length = len(smallest.plan.scope.prompts[index])
        for cut in (length // 2, block, 1):
            before = None
            while before != smallest.size:
                before = smallest.size
                shorter = without_end(smallest.plan, index, cut)
                smallest.breaks_in_some_pool(shorter, most_less=1 + cut // block)


def without_end(plan: Plan, index: int, tokens: int) -> Plan:
    prompts = list(plan.scope.prompts)
    prompts[index] = prompts[index][: max(len(prompts[index]) - tokens, 1)]
    return replace(plan, scope=replace(plan.scope, prompts=tuple(prompts)))


def lower_picks(smallest: Smallest) -> None:
    """Pick the simplest of each domain, for all parameters of a pick and then one by one."""
    for index in range(len(smallest.plan.picks)):
        if index >= len(smallest.plan.picks):
            return
        parameters = smallest.plan.picks[index].parameters
        simplest = [(0,) * len(parameters)] if any(parameters) else []
        simplest += [
            (*parameters[:i], 0, *parameters[i + 1 :])
            for i, value in enumerate(parameters)
            if value
        ]
        for simpler in simplest:
            picks = list(smallest.plan.picks)
            picks[index] = replace(picks[index], parameters=simpler)
            if smallest.breaks(replace(smallest.plan, picks=tuple(picks))):
                break


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
