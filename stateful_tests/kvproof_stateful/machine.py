"""A Hypothesis state machine for any target, for an engine's own test suite.

    from kvproof_stateful import machine_for

    TestOurManager = machine_for("our_engine.kvproof_target:OurTarget").TestCase

Each kind of choice of the specification is a rule of the machine, enabled where the
specification enables it; the scope, the request and the parameters are drawn.  A run that
breaks a rule is shrunk as campaigns do it, at thousands of actions a second: what is
reported is the smallest run so far, however far Hypothesis has shrunk its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from hypothesis import HealthCheck, Phase, Verbosity, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvproof_spec.choices import KINDS, Choice, Scope, choices
from kvproof_spec.judgement import Violation
from kvproof_spec.trace import Header, Trace, write_trace
from kvproof_stateful.coverage import goals_of
from kvproof_stateful.expectations import KnownViolation, default_expectations, read_expectations
from kvproof_stateful.loading import load_target, name_of
from kvproof_stateful.plan import SAMPLES, Asked, Pick, Plan, ask, draw_scope
from kvproof_stateful.running import Judging, Run
from kvproof_stateful.shrinking import Smallest, shrink, size
from kvproof_stateful.steps import step_lines, told_rule
from kvproof_stateful.target import Hello, Target, TargetFailed, UnsupportedConfig

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")

GRAIN = 1000
"""How many different values a drawn `random()` has."""

INTERRUPTIONS = (
    "store",
    "publish",
    "trim",
    "finish",
    "preempt",
    "abort",
    "leave unissued",
    "forget blocks",
    "forget everything",
)
"""Kinds of choices that a run may do without."""

COPIES = {
    "submit": 2,
    "lookup": 5,
    "admit": 4,
    "admit external": 2,
    "load": 2,
    "extend": 6,
    "draft": 2,
    "issue": 6,
    "complete step": 6,
    "complete load": 4,
}
"""How often a kind stands among the rules, if more than once."""

ADMISSIONS = ("admit", "admit external", "load")
USED = (True,) * 7 + (False,)
"""Whether what uses a lookup, the very next action or never, is all that is enabled then."""


UNDISTURBED = (
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
    HealthCheck.nested_given,
    HealthCheck.too_slow,
)


class Broken(AssertionError):
    """The target broke a rule; each rule has a class of its own, so that none hides another."""

    rule: ClassVar[str]


@cache
def broken(rule_id: str) -> type[Broken]:
    name = "Broken" + "".join(part.capitalize() for part in rule_id.split())
    return type(name, (Broken,), {"rule": rule_id})


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of a machine have in common."""

    target: Target
    judging: Judging
    asked: Asked = field(default_factory=Asked)
    scope: Scope | None = None  # None: drawn
    known: tuple[KnownViolation, ...] = ()
    out: Path | None = None
    hello: Hello = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hello", self.target.hello())
        self.judging.rules()


class Taken:
    """An action, and the numbers it was picked by; Hypothesis shows it as the action."""

    def __init__(self, choice: Choice, parameters: tuple[int, ...]) -> None:
        self.action = choice.action(parameters)
        self.pick = Pick(KINDS.index(choice.kind), choice.request, parameters)

    def __repr__(self) -> str:
        return repr(self.action)


@st.composite
def actions(draw: st.DrawFn, kind: str) -> Taken:
    """An enabled action of this kind: for whom, and an index into each domain.

    The request is drawn by its id, which means the same after other actions are left out.
    """
    enabled: list[Choice] = draw(st.runner()).enabled[kind]
    choice = enabled[0]
    if len(enabled) > 1:
        wanted = draw(st.integers(0, max(choice.request for choice in enabled)))
        choice = min(enabled, key=lambda choice: abs(choice.request - wanted))
    sizes = map(len, choice.domains)
    return Taken(choice, tuple([draw(st.integers(0, n - 1)) if n > 1 else 0 for n in sizes]))


@st.composite
def scopes(draw: st.DrawFn, setup: Setup) -> Scope:
    if setup.scope is not None:
        return setup.scope
    return draw_scope(DrawnRandom(draw), setup.hello, setup.asked, short_prompts)


def short_prompts(rng: Random, unit: int) -> tuple[tuple[int, ...], ...]:
    """Prompts of two symbols, one after the other: few numbers say where two of them part."""
    prompts = []
    for _ in range(rng.randint(1, 4)):
        longest = rng.choice((2, 3, 6)) * unit
        length = rng.randint(1, longest)
        cut = rng.randint(0, length)
        prompts.append((rng.choice(SAMPLES[:2]),) * cut + (rng.choice(SAMPLES),) * (length - cut))
    return tuple(prompts)


def machine_for(
    target: str | type[Target] | Target,
    *,
    level: str = "contract",
    without: tuple[str, ...] = (),
    groups: str | None = None,
    features: str | None = None,
    num_blocks: int | None = None,
    known: Path | str | None = None,
    out: Path | str | None = None,
) -> type[RuleBasedStateMachine]:
    """A state machine whose runs are all allowed, or the target breaks a rule.

    `target` is an instance, a class, or a name: an entry point, or `module:Class`.  `level`,
    `without`, `groups` and `features` are those of `kvproof campaign`, None is drawn for
    each run.  `known` is a file of known violations (None: that of the target, if it has
    one); a run that ends in one of them starts anew.  Under `out`, if it is given, the
    shrunk trace of each broken rule is saved, which `kvproof replay` performs again.
    """
    if isinstance(target, str):
        made, hello = load_target(target)
    else:
        made = target() if isinstance(target, type) else target
        hello = made.hello()
    path = Path(known) if known is not None else default_expectations(hello.name)
    return machine_of(
        Setup(
            target=made,
            judging=Judging(level, without),
            asked=ask(hello, groups, features, num_blocks),
            known=read_expectations(path) if path else (),
            out=None if out is None else Path(out),
        )
    )


def machine_of(setup: Setup) -> type[RefinesTheSpec]:
    """The machine of a setup, with a rule for each kind of choice.

    Hypothesis takes enabled rules alike, so that what is usual stands there several times,
    and (swarm) leaves some names out of a run: of all that makes requests go on, or of none.
    """
    rules = {}
    for kind in KINDS:
        name = kind.replace(" ", "_") if kind in INTERRUPTIONS else "act"
        for copy in range(COPIES.get(kind, 1)):
            rules[f"{kind} {copy}"] = rule_for(kind, name)
    made = type("Machine", (RefinesTheSpec,), {"setup": setup, "smallest": {}, **rules})
    machine = cast("type[RefinesTheSpec]", made)
    machine.TestCase.settings = settings(
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=UNDISTURBED,
        verbosity=Verbosity.quiet,
    )
    return machine


def rule_for(kind: str, name: str) -> Callable[..., None]:
    """Take a choice of this kind, if one is enabled."""

    def take(machine: RefinesTheSpec, taken: Taken, used: bool = False) -> None:
        machine.take(taken, used)

    def enabled(machine: RefinesTheSpec) -> bool:
        return kind in machine.enabled

    take.__name__ = take.__qualname__ = name
    drawn = actions(kind)
    if kind == "lookup":
        ruled = rule(taken=drawn, used=st.sampled_from(USED))(take)
    else:
        ruled = rule(taken=drawn)(take)
    return precondition(enabled)(ruled)


class RefinesTheSpec(RuleBasedStateMachine):
    """Performs what the specification enables, and follows the answers with an oracle."""

    setup: ClassVar[Setup]
    smallest: ClassVar[dict[str, Smallest]]  # by the rule that it breaks
    scope: Scope
    judged: Run
    enabled: dict[str, list[Choice]]

    @initialize(scope=st.runner().flatmap(lambda machine: scopes(machine.setup)))
    def begin(self, scope: Scope) -> None:
        """A scope, and a target that has just been reset."""
        self.scope = scope
        self.reset()

    def reset(self) -> None:
        self.picks: list[Pick] = []
        self.reached: set[str] = set()
        try:
            self.judged = Run(self.setup.target, self.setup.judging, self.scope.config)
        except UnsupportedConfig:
            reject()
        self.look(used=False)

    def look(self, used: bool) -> None:
        """See what is enabled; after a lookup that is to be `used`, only its admissions."""
        self.enabled = {}
        for choice in choices(self.judged.state, self.scope):
            self.enabled.setdefault(choice.kind, []).append(choice)
        admissions = {kind: self.enabled[kind] for kind in ADMISSIONS if kind in self.enabled}
        if used and admissions:
            self.enabled = admissions

    def take(self, taken: Taken, used: bool) -> None:
        before = self.judged.state
        self.picks.append(taken.pick)
        try:
            answer = self.judged.step(taken.action)
        except UnsupportedConfig:
            reject()
        except (Violation, TargetFailed):
            self.fail_unless_known()
            self.reset()
            return
        if self.setup.known:
            self.reached.update(goals_of(before, taken.action, answer))
        self.look(used)

    def fail_unless_known(self) -> None:
        last = self.judged.lines[-1]
        assert last.verdict is not None
        broken_rule, version = last.verdict.rule, self.setup.hello.version
        assert broken_rule is not None
        reached = set(self.reached)
        if last.answer is not None:
            reached.update(goals_of(self.judged.state, last.action, last.answer))
        if not any(known.covers(broken_rule, version, reached) for known in self.setup.known):
            smallest = self.shrunk(broken_rule)
            raise broken(broken_rule)(report(self.setup, broken_rule, smallest.run)) from None

    def shrunk(self, broken_rule: str) -> Smallest:
        """The smallest run so far that breaks the rule, this one or what it shrinks to."""
        setup, plan = self.setup, Plan(self.scope, tuple(self.picks))
        known = self.smallest.get(broken_rule)
        if known is None or size(plan, self.judged) < size(known.plan, known.run):
            known = Smallest(setup.target, setup.judging, broken_rule, plan, self.judged)
            shrink(known)
            self.smallest[broken_rule] = known
        return known


def report(setup: Setup, broken_rule: str, run: Run) -> str:
    """The rule, the witness, the steps, and how to perform them again."""
    verdict = run.lines[-1].verdict
    assert verdict is not None
    told = [f"    {line}" for line in step_lines(run.config, run.lines)]
    also = [f"  also broken: {', '.join(verdict.also)}"] if verdict.also else []
    lines = [*told_rule(verdict), *also, "  steps:", *told]
    return "\n".join([*lines, f"  replay: {replay(setup, broken_rule, run)}"])


def replay(setup: Setup, broken_rule: str, run: Run) -> str:
    """The command; the trace that it needs is written, if a folder was given."""
    if setup.out is None:
        return "machine_for(..., out=FOLDER) saves the trace and names the command"
    hello = setup.hello
    path = setup.out / (re.sub(r"[^\w.+-]", "-", f"{broken_rule}-{hello.name}") + ".ndjson")
    header = Header(
        config=run.config,
        target=hello.name,
        target_version=hello.version,
        level=setup.judging.level,
        without=setup.judging.without,
        corrections=tuple(sorted(hello.corrections)),
        command="machine_for",
    )
    write_trace(path, Trace(header, tuple(run.lines)))
    loaded_by = name_of(setup.target)
    return f"kvproof replay {path}" + (f" --target {loaded_by}" if loaded_by else "")


class DrawnRandom(Random):
    """Hypothesis draws its numbers, so that what is made of them shrinks.

    `random()` shrinks towards 1, which switches off what has a chance.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__(0)
        self._draw = draw

    def random(self) -> float:
        return 1 - self._draw(st.integers(1, GRAIN)) / GRAIN

    def getrandbits(self, k: int, /) -> int:
        return self._draw(st.integers(0, 2**k - 1))

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[self._draw(st.integers(0, len(seq) - 1))]

    def randint(self, a: int, b: int) -> int:
        return self._draw(st.integers(a, b))
