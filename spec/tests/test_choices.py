"""What may happen next: enabled, complete within its scope, and rich enough to matter.

Completeness is checked against `every_action`, which shares no code with `choices`: it takes all
actions that can be spelled with small numbers and keeps those that pass their guard and that a
driver may ask for.  Exploring a small scope by either must reach the same states, whose number is
pinned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product
from random import Random

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
    Granted,
    Hit,
    Issued,
    Refused,
    Returned,
    SentRow,
    Trimmed,
)
from kvproof_spec.choices import FEATURES, KINDS, Choice, Scope, choices
from kvproof_spec.config import Config, Group
from kvproof_spec.oracle import Oracle, rules_of
from kvproof_spec.judgement import Rule
from kvproof_spec.invariants import RULES
from kvproof_spec.pages import NULL_BLOCK
from kvproof_spec.policies import POLICIES
from kvproof_spec.policies.vllm import VllmPolicy
from kvproof_spec.state import ActionDisabled, Request, State, initial_state

# Answers of the policy


def clone(policy: VllmPolicy) -> VllmPolicy:
    """A deep copy, but for the prefixes, which are what they are by identity."""
    twin = VllmPolicy(policy.config)
    twin.pool.free_order = list(policy.pool.free_order)
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


def explore(start: State, scope: Scope, actions: Actions, inside: Inside, rules: Sequence[Rule]=()) -> set[Node]:
    """All states that can be reached without leaving `inside`, each with the policy's memory."""
    policy = VllmPolicy(scope.config)
    seen: set[Node] = {(start, memory_of(policy))}
    todo = deque([(start, policy)])
    while todo:
        state, policy = todo.popleft()
        for action in actions(state, scope):
            twin = clone(policy)
            answer = answer_of(twin, state, action)
            if rules:
                oracle = Oracle(scope.config, rules)
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

SMALL = range(4)
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
    if rows and "async" not in scope.features or coming >= scope.max_request_tokens:
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

ONE = Config((Group("full", 2),), num_blocks=4)
BOTH = Config((Group("full", 2), Group("sliding", 2, 2)), num_blocks=5)
TWO_REQUESTS = Scope(
    BOTH,
    frozenset(["full", "sliding", "preempt", "abort", "async", "unissued"]),
    prompts=((0, 0, 0),),
    samples=(0,),
    max_requests=2,
    chunk=2,
    max_request_tokens=4,
    lookahead=1,
    headroom=0,
)
LOADS = replace(TWO_REQUESTS, features=frozenset(["full", "sliding", "external", "abort", "preempt"]))
EXTRAS = replace(TWO_REQUESTS, config=ONE, features=frozenset(["full", "external", "lookahead", "publish", "trim", "forget","abort"]), samples=(0,1), headroom=1, max_request_tokens=4,chunk=3,max_requests=1)
