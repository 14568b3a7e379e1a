"""What may happen next: enabled, complete within its scope, and rich enough to matter.

Completeness is checked against `every_action`, which shares no code with `choices`: it takes all
actions that can be spelled with small numbers and keeps those that pass their guard and that a
driver may ask for.  Exploring a small scope by either must reach the same states, whose number is
pinned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations_with_replacement, product
from random import Random
from typing import Any

import pytest

from kvproof_spec.actions import (
    ACTIONS,
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    Forget,
    Issue,
    Lookup,
    Output,
    Publish,
    Release,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Forgotten,
    Hit,
    Issued,
    Refused,
    SentRow,
)
from kvproof_spec.choices import FEATURES, KINDS, Choice, Scope, choices
from kvproof_spec.config import Config, Group
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import Rule, Violation
from kvproof_spec.oracle import Oracle
from kvproof_spec.pages import needed_cells, read_page
from kvproof_spec.policies import CORRECTIONS, POLICIES, UnknownToPolicy
from kvproof_spec.policies.vllm import VllmPolicy
from kvproof_spec.state import ActionDisabled, Request, State, initial_state

# Answers of the policy


def new_policy(config: Config) -> VllmPolicy:
    """What vLLM 0.32 answers, but for what it is known to break."""
    policy = POLICIES["vllm-0.32"](config, CORRECTIONS)
    assert isinstance(policy, VllmPolicy)
    return policy


def clone(policy: VllmPolicy) -> VllmPolicy:
    """A deep copy, but for the prefixes, which are what they are by identity."""
    twin = VllmPolicy(policy.config, policy.corrections)
    twin.pool.free_order = copy(policy.pool.free_order)
    twin.pool.references = list(policy.pool.references)
    twin.pool.key_of = dict(policy.pool.key_of)
    twin.pool.copies = {key: dict(blocks) for key, blocks in policy.pool.copies.items()}
    twin.tables = [{r: list(table) for r, table in tables.items()} for tables in policy.tables]
    twin.published = [dict(published) for published in policy.published]
    twin.deferred = [(step, list(blocks)) for step, blocks in policy.deferred]
    return twin


def memory_of(policy: VllmPolicy) -> Hashable:
    """Everything that the policy remembers and that its later answers may depend on."""
    return (
        tuple(policy.pool.free_order),
        tuple(policy.pool.references),
        frozenset(policy.pool.key_of.items()),
        frozenset((key, tuple(blocks)) for key, blocks in policy.pool.copies.items()),
        tuple(frozenset((r, tuple(t)) for r, t in tables.items()) for tables in policy.tables),
        tuple(frozenset(published.items()) for published in policy.published),
        tuple((step, tuple(blocks)) for step, blocks in policy.deferred),
    )


def answer_of(policy: VllmPolicy, state: State, action: Action) -> Answer:
    answer = policy.predict(state, action)
    if isinstance(action, Issue):
        scheduled = [request for request in state.requests if request.scheduled]
        return Issued(tuple(SentRow(request.id, request.tables) for request in scheduled))
    return Done() if answer is None else answer


# Exploring


Actions = Callable[[State, Scope], Iterable[Action]]
Inside = Callable[[State], bool]
Node = tuple[State, Hashable]


def chosen(state: State, scope: Scope) -> Iterator[Action]:
    for choice in choices(state, scope):
        yield from choice.actions()


def explore(
    start: State, scope: Scope, actions: Actions, inside: Inside, rules: Sequence[Rule] = ()
) -> set[Node]:
    """All states that can be reached without leaving `inside`, each with the policy's memory."""
    oracle, policy = Oracle(scope.config, rules), new_policy(scope.config)
    seen: set[Node] = {(start, memory_of(policy))}
    todo = deque([(start, policy)])
    while todo:
        state, policy = todo.popleft()
        for action in actions(state, scope):
            twin = clone(policy)
            answer = answer_of(twin, state, action)
            if rules:
                oracle.state = state
                oracle.step(action, answer, twin.snapshot())
                after = oracle.state
            else:
                after = action.apply(state, answer)
            node = (after, memory_of(twin))
            if inside(after) and node not in seen:
                seen.add(node)
                todo.append((after, twin))
    return seen


# The brute-force enumerator

SMALL = range(5)
"""Numbers that an action of the small scopes may name: requests, steps, blocks, tokens."""


def spelled(state: State, scope: Scope) -> Iterator[Action]:
    """Every action that can be spelled with small numbers and the scope's symbols."""
    yield from (Submit(request, symbols) for request, symbols in product(SMALL, scope.prompts))
    for request in SMALL[: state.submitted]:
        yield Lookup(request)
        yield Trim(request)
        yield from (Publish(request, tokens) for tokens in SMALL)
        yield from (CompleteLoad(request, tokens) for tokens in SMALL)
        yield Release(request, "finish")
        yield Release(request, "abort")
        yield Release(request, "preempt")
        yield from allocations(request, scope)
    yield Issue()
    yield from completions(state, scope)
    yield Forget(None)
    normal = range(1, scope.config.num_blocks)
    for first, second in combinations_with_replacement(normal, 2):
        yield Forget(tuple(sorted({first, second})))


@cache
def allocations(request: int, scope: Scope) -> tuple[Action, ...]:
    drafts: list[tuple[int, ...]] = [()]
    drafts += [(symbol,) * n for symbol in scope.samples for n in range(1, scope.lookahead + 1)]
    ahead, headroom = range(scope.lookahead + 1), range(scope.headroom + 1)
    parameters = SMALL, drafts, SMALL, (False, True), ahead, headroom, (False, True)
    return tuple(Allocate(request, *picked) for picked in product(*parameters))


def completions(state: State, scope: Scope) -> Iterator[Action]:
    """Every step with every result for any requests, wanted or not."""
    accepted = range(scope.lookahead + 1)
    results = [None, *product(scope.samples, accepted)]
    for step in range(state.issued):
        for picked in product(results, repeat=min(state.submitted, 2)):
            yield CompleteStep(
                step,
                tuple(Output(r, *result) for r, result in enumerate(picked) if result is not None),
            )


def every_action(state: State, scope: Scope) -> Iterator[Action]:
    for action in spelled(state, scope):
        try:
            action.check(state)
        except ActionDisabled:
            continue
        if may_be_asked(state, scope, action):
            yield action


def may_be_asked(state: State, scope: Scope, action: Action) -> bool:
    """Is the action within the scope, and what a driver may do beyond what its guard says?"""
    match action:
        case Submit():
            return len(state.requests) < scope.max_requests
        case Lookup():
            return not owed(state, action.request)
        case Allocate():
            return allocation_may_be_asked(state, scope, action)
        case Issue():
            some = any(request.scheduled for request in state.requests)
            return some and len(state.steps) < (2 if "async" in scope.features else 1)
        case CompleteStep() | CompleteLoad():
            return True
        case Publish():
            request = state.find(action.request)
            all_of_it = action.tokens == min(request.computed, len(request.content))
            return "publish" in scope.features and all_of_it
        case Trim():
            return "trim" in scope.features
        case Release():
            return release_may_be_asked(state, scope, action)
        case Forget():
            return "forget" in scope.features


def owed(state: State, request: int) -> bool:
    """Is a sampled token of an earlier admission still to come?"""
    now = state.find(request).admission
    rows = [row for step in state.steps for row in step.rows if row.request == request]
    return any(row.samples and row.admission != now for row in rows)


def current_rows(state: State, request: Request) -> int:
    rows = [row for step in state.steps for row in step.rows if row.request == request.id]
    return sum(row.admission == request.admission for row in rows)


def allocation_may_be_asked(state: State, scope: Scope, action: Allocate) -> bool:
    request = state.find(action.request)
    if owed(state, action.request) or action.new > scope.chunk:
        return False
    if action.lookahead and "lookahead" not in scope.features:
        return False
    if action.external and "external" not in scope.features:
        return False
    if request.status != "running":
        return not action.drafts
    rows = [
        row
        for step in state.steps
        for row in step.rows
        if row.request == request.id and row.admission == request.admission
    ]
    coming = len(request.content) + sum(row.samples for row in rows)
    if (rows and "async" not in scope.features) or coming >= scope.max_request_tokens:
        return False
    if action.drafts:
        one_left = coming - request.computed == 1
        return "lookahead" in scope.features and one_left and not action.headroom
    return True


def release_may_be_asked(state: State, scope: Scope, action: Release) -> bool:
    request = state.find(action.request)
    if current_rows(state, request) and "async" not in scope.features:
        return False
    if request.scheduled:
        return "unissued" in scope.features and action.reason != "finish"
    if action.reason == "finish":
        return request.status == "running" and len(request.content) > request.prompt_tokens
    return action.reason in scope.features


# Small scopes that are explored to the end


@dataclass(frozen=True, slots=True)
class Small:
    """A scope, and how far it is followed; the whole of it is `states` states."""

    name: str
    scope: Scope
    states: int
    issued: int
    submitted: int = 2
    preemptions: int = 0  # of the requests that are there

    def holds(self, state: State) -> bool:
        return (
            state.submitted <= self.submitted
            and state.issued <= self.issued
            and sum(request.admission for request in state.requests) <= self.preemptions
        )


FULL = Config((Group("full", 2),), num_blocks=4)
BOTH = Config((Group("full", 2), Group("sliding", 2, 2)), num_blocks=5)


def small_scope(config: Config, features: str, prompt: int, **more: Any) -> Scope:
    """One prompt of so many equal tokens, one symbol to sample, nothing ahead."""
    given: dict[str, Any] = {
        "samples": (0,),
        "max_requests": 2,
        "chunk": 3,
        "max_request_tokens": 3,
        "lookahead": 0,
        "headroom": 0,
    }
    prompts = ((0,) * prompt,)
    return Scope(config, frozenset(features.split()), prompts, **{**given, **more})


SMALL_SCOPES = (
    Small(
        "two requests in a full attention and a window group",
        small_scope(BOTH, "full sliding preempt abort async trim", 3),
        states=2300,
        issued=2,
        preemptions=1,
    ),
    Small(
        "loads into both groups",
        small_scope(BOTH, "full sliding external abort", 3),
        states=1678,
        issued=1,
        preemptions=1,
    ),
    Small(
        "loads that fail half way",
        small_scope(
            replace(FULL, defers_returns=True),
            "full external abort preempt async",
            4,
            chunk=2,
            max_request_tokens=4,
        ),
        states=1084,
        issued=1,
        submitted=1,
        preemptions=2,
    ),
    Small(
        "drafts and slots ahead",
        small_scope(
            FULL,
            "full lookahead publish trim",
            2,
            samples=(0, 1),
            max_request_tokens=4,
            lookahead=1,
            headroom=1,
        ),
        states=262,
        issued=3,
        submitted=1,
    ),
    Small(
        "forgetting",
        small_scope(FULL, "full forget abort", 2, max_requests=1),
        states=166,
        issued=2,
    ),
    Small(
        "leaving before the step is issued",
        small_scope(BOTH, "full sliding abort unissued", 3),
        states=299,
        issued=2,
    ),
)


def difference(by_choices: set[Node], by_brute_force: set[Node]) -> str:
    """What to look at first: whole sets of states would say nothing."""
    only = [
        min(one - other, key=str, default=None)
        for one, other in ((by_choices, by_brute_force), (by_brute_force, by_choices))
    ]
    return f"only by choices: {only[0]}\nonly by brute force: {only[1]}"


@pytest.mark.parametrize("small", SMALL_SCOPES, ids=lambda small: small.name)
def test_a_small_scope_is_explored_as_an_enumerator_does_that_knows_no_choices(
    small: Small,
) -> None:
    start = initial_state(small.scope.config)
    by_choices = explore(start, small.scope, chosen, small.holds, RULES)
    by_brute_force = explore(start, small.scope, every_action, small.holds)
    same = by_choices == by_brute_force
    assert same, difference(by_choices, by_brute_force)
    found = len(by_choices)
    assert found == small.states


def test_the_enumerator_would_notice_a_missing_choice() -> None:
    small = next(small for small in SMALL_SCOPES if small.name == "drafts and slots ahead")
    start = initial_state(small.scope.config)

    def without_drafts(state: State, scope: Scope) -> Iterator[Action]:
        for action in chosen(state, scope):
            if not (isinstance(action, Allocate) and action.drafts):
                yield action

    fewer = explore(start, small.scope, without_drafts, small.holds)
    assert fewer < explore(start, small.scope, every_action, small.holds)


# Random walks

EVERY = frozenset(FEATURES) - {"uncached"}
PROMPTS = ((0, 0, 1), (0, 0, 1, 1, 0), (0, 1, 0, 0, 1, 1, 1, 0), (1,))


def walked(config: Config, features: frozenset[str] = EVERY) -> Scope:
    return Scope(config, features, PROMPTS, chunk=5, max_request_tokens=14)


def deferring(num_blocks: int, *groups: Group, caching: bool = True) -> Config:
    return Config(groups, num_blocks, caching, defers_returns=True)


PAIR = Group("full", 2), Group("sliding", 2, 3)
WALKS = {
    "full": walked(deferring(8, Group("full", 2))),
    "sliding": walked(deferring(8, Group("sliding", 2, 4))),
    "both": walked(deferring(14, *PAIR)),
    "caching off": walked(deferring(14, *PAIR, caching=False), EVERY | {"uncached"}),
    "one step at a time": walked(Config(PAIR, 14), EVERY - {"async"}),
    "returned at once": walked(Config(PAIR, 14), EVERY - {"external"}),
}
STEPS = 120  # a walk
SEEDS = range(20)

HURRY = {"lookup": 4, "admit": 6, "extend": 4, "issue": 6, "complete step": 4, "complete load": 3}
"""Weights by kind; 1 for the rest, so that requests come far enough to matter."""


@dataclass(slots=True)
class Walk:
    """One random run of the spec, answered by the policy and judged against it."""

    scope: Scope
    seed: int
    goals: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    actions: list[Action] = field(default_factory=list)

    def run(self) -> Walk:
        random = Random(self.seed)
        policy, judge = new_policy(self.scope.config), new_policy(self.scope.config)
        oracle = Oracle(self.scope.config, policy=judge)
        for _ in range(STEPS):
            enabled = list(choices(oracle.state, self.scope))
            for choice in enabled:
                self._pick(choice, random).check(oracle.state)
                choice.action().check(oracle.state)
            weights = [HURRY.get(choice.kind, 1) for choice in enabled]
            choice = random.choices(enabled, weights)[0]
            self.kinds[choice.kind] += 1
            self._step(oracle, policy, self._pick(choice, random))
        self._drain(oracle, policy)
        return self

    @staticmethod
    def _pick(choice: Choice, random: Random) -> Action:
        return choice.action([random.randrange(len(domain)) for domain in choice.domains])

    def _step(self, oracle: Oracle, policy: VllmPolicy, action: Action) -> None:
        before = oracle.state
        answer = answer_of(policy, before, action)
        oracle.step(action, answer, policy.snapshot())
        self.actions.append(action)
        self.goals.update(goals_of(before, action, answer, oracle.state))

    def _drain(self, oracle: Oracle, policy: VllmPolicy) -> None:
        """Whatever is under way returns, then everybody leaves."""
        while oracle.state.steps:
            step = oracle.state.steps[0]
            outputs = tuple(Output(row.request, 0) for row in step.rows if row.samples)
            self._step(oracle, policy, CompleteStep(step.id, outputs))
        for request in oracle.state.requests:
            if request.status == "loading":
                self._step(oracle, policy, CompleteLoad(request.id, 0))
            self._step(oracle, policy, Release(request.id, "abort"))
        normal = range(1, self.scope.config.num_blocks)
        if sorted(policy.snapshot().free_order) == list(normal):
            self.goals["everything is free again"] += 1


GOALS = (
    "an allocation is refused",
    "a refusal gives back what left the window",
    "a request starts from a hit",
    "a request starts from a hit on what the same step will write",
    "a preempted request resumes with a hit",
    "two steps are in flight",
    "a step returns for a request that was preempted",
    "a step returns for a request that has left",
    "blocks are kept back for steps in flight",
    "a load fails",
    "a load fails half way",
    "a load succeeds",
    "a draft is rejected",
    "a draft is accepted",
    "a block that left the window is given back",
    "everything is forgotten",
    "forgetting everything is refused",
    "everything is free again",
)


def goals_of(before: State, action: Action, answer: Answer, after: State) -> Iterator[str]:
    match action:
        case Allocate():
            yield from goals_of_allocation(before, action, answer, after)
        case Trim():
            if before.find(action.request).tables != after.find(action.request).tables:
                yield "a block that left the window is given back"
        case CompleteStep():
            yield from goals_of_step(before, action)
        case CompleteLoad():
            load = before.find(action.request).load
            asked = load[1] if load else 0
            failed = "a load fails half way" if action.tokens else "a load fails"
            yield "a load succeeds" if action.tokens == asked else failed
        case Forget(None):
            assert isinstance(answer, Forgotten)
            yield "everything is forgotten" if answer.done else "forgetting everything is refused"
        case _:
            pass
    if len(after.steps) == 2:
        yield "two steps are in flight"
    if after.deferred:
        yield "blocks are kept back for steps in flight"


def goals_of_allocation(
    before: State, action: Allocate, answer: Answer, after: State
) -> Iterator[str]:
    request, later = before.find(action.request), after.find(action.request)
    if isinstance(answer, Refused):
        yield "an allocation is refused"
        if request.tables != later.tables:
            yield "a refusal gives back what left the window"
    elif request.status != "running" and before.hit is not None and before.hit.tokens:
        yield "a request starts from a hit"
        if request.status == "preempted":
            yield "a preempted request resumes with a hit"
        needed = needed_cells(
            before.config.groups, before.hit.tables, before.hit.tokens, before.hit.tokens
        )
        unwritten = any(read_page(before.memory, *cell[:3]) is None for cell in needed)
        if unwritten and not before.steps:
            yield "a request starts from a hit on what the same step will write"


def goals_of_step(before: State, action: CompleteStep) -> Iterator[str]:
    accepted = {output.request: output.accepted for output in action.outputs}
    for row in before.steps[0].rows:
        request = before.get(row.request)
        if request is None:
            yield "a step returns for a request that has left"
        elif request.admission != row.admission:
            yield "a step returns for a request that was preempted"
        if row.drafts:
            rejected = accepted[row.request] < len(row.drafts)
            yield "a draft is rejected" if rejected else "a draft is accepted"


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    return [Walk(scope, seed).run() for scope in WALKS.values() for seed in SEEDS]


@pytest.mark.parametrize("goal", GOALS)
def test_random_walks_get_there(walks: list[Walk], goal: str) -> None:
    assert sum(walk.goals[goal] for walk in walks), f"never: {goal}"


def test_random_walks_reach_no_goal_that_is_not_listed(walks: list[Walk]) -> None:
    assert {goal for walk in walks for goal in walk.goals} <= set(GOALS)


def test_after_every_walk_everything_is_free_again(walks: list[Walk]) -> None:
    assert all(walk.goals["everything is free again"] for walk in walks)


def test_random_walks_draw_every_kind_of_choice_and_action(walks: list[Walk]) -> None:
    assert {kind for walk in walks for kind in walk.kinds} == set(KINDS)
    assert {type(action) for walk in walks for action in walk.actions} == set(ACTIONS)


def test_a_walk_is_nothing_but_its_numbers(walks: list[Walk]) -> None:
    again = Walk(walks[0].scope, walks[0].seed).run()
    assert again.actions == walks[0].actions


# What the policy answers without its corrections


def test_vllm_leaves_the_key_of_a_step_that_was_never_issued() -> None:
    """Published at allocation, never written: the next lookup is granted nobody's content."""
    policy, oracle = VllmPolicy(FULL), Oracle(FULL)
    left: list[Action] = [Submit(0, (0, 0, 0)), Lookup(0), Allocate(0, 3), Release(0, "abort")]
    for action in [*left, Submit(1, (0, 0, 0))]:
        oracle.step(action, answer_of(policy, oracle.state, action))
    hit = answer_of(policy, oracle.state, Lookup(1))
    assert hit == Hit(2, ((1,),))
    with pytest.raises(Violation, match=r"I2: .* block 1, group 0, position 0"):
        oracle.step(Lookup(1), hit)


def test_vllm_loads_every_known_token_without_the_window_of_the_last() -> None:
    config = Config(PAIR, num_blocks=9)
    policy, oracle = VllmPolicy(config), Oracle(config)
    for action in (Submit(0, (0, 0, 0, 0)), Lookup(0)):
        oracle.step(action, answer_of(policy, oracle.state, action))
    load = Allocate(0, 0, external=4, unordered=True)
    with pytest.raises(Violation, match=r"I3: .* goes on at 3 of 4 tokens has no block at entry 0"):
        oracle.step(load, answer_of(policy, oracle.state, load))


def test_vllm_gives_a_load_what_a_step_still_writes_unless_returns_are_deferred() -> None:
    left: list[Action] = [Submit(0, (0, 0, 0)), Lookup(0), Allocate(0, 3), Issue()]
    left += [Release(0, "abort"), Submit(1, (1, 1, 1, 1, 1)), Lookup(1)]
    load = Allocate(1, 0, external=4, unordered=True)
    for defers in (False, True):
        config = replace(FULL, defers_returns=defers)
        policy, oracle = VllmPolicy(config), Oracle(config)
        for action in left:
            oracle.step(action, answer_of(policy, oracle.state, action))
        answer = answer_of(policy, oracle.state, load)
        if defers:
            oracle.step(load, answer)
            assert isinstance(answer, Refused)
        else:
            with pytest.raises(Violation, match=r"I4: block 2, .* a step in flight needs it"):
                oracle.step(load, answer)


def test_the_policy_declines_what_it_cannot_predict() -> None:
    with pytest.raises(UnknownToPolicy, match="only groups of one block size"):
        VllmPolicy(Config((Group("full", 4), Group("sliding", 2, 5)), num_blocks=9))


# Choices themselves


def test_a_choice_mends_numbers_that_do_not_fit() -> None:
    choice = Choice("count", 0, Publish, ((3, 4), (7, 8, 9)))
    assert choice.action() == choice.action([0, 0]) == Publish(3, 7)
    assert choice.action([1]) == Publish(4, 7)
    assert choice.action([9, 9, 9]) == Publish(4, 9)
    assert list(choice.actions()) == [Publish(r, n) for r in (3, 4) for n in (7, 8, 9)]


def test_features_that_are_off_are_never_chosen() -> None:
    bare = replace(WALKS["both"], features=frozenset(["full", "sliding"]))
    walk = [Walk(bare, seed).run() for seed in SEEDS[:3]]
    drawn = {kind for each in walk for kind in each.kinds}
    assert drawn <= {"submit", "lookup", "admit", "extend", "issue", "complete step", "finish"}
    allocations = [a for each in walk for a in each.actions if isinstance(a, Allocate)]
    assert not any(a.lookahead or a.drafts or a.external for a in allocations)
