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


def answer_of(policy: VllmPolicy, state: State, action: Action) -> Answer:
    answer = policy.predict(state, action)
    if isinstance(action, Issue):
        scheduled = [request for request in state.requests if request.scheduled]
        return Issued(tuple(SentRow(request.id, request.tables) for request in scheduled))
    return Done() if answer is None else answer


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
    with pytest.raises(Violation, match=r"I3: .* at 3 of 4 tokens has no block at entries \[0\]"):
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
