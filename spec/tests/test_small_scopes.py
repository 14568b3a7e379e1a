"""Small scopes, explored to the end by `choices` and by an enumerator that knows no choices.

`every_action` takes all actions that can be spelled with small numbers and keeps those that pass
their guard and that a driver may ask for.  Exploring a small scope by either must reach the same
states, whose number is pinned.  Answers are vLLM's, or those of an engine that remembers nothing;
random walks take the latter through scopes that are too large to explore.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations_with_replacement, product
from random import Random
from typing import Any, Protocol, Self

import pytest

from kvproof_spec.actions import (
    ACTIONS,
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Output,
    Publish,
    Release,
    Store,
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
    Snapshot,
    Trimmed,
)
from kvproof_spec.choices import FEATURES, KINDS, Scope, choices
from kvproof_spec.config import Config, Group
from kvproof_spec.derived import (
    processed_tokens,
    references,
    unissued_cells,
    used_by_operations,
)
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import Rule
from kvproof_spec.oracle import Oracle
from kvproof_spec.pages import NULL_BLOCK, Copy, Table, Tables, read_page
from kvproof_spec.policies import CORRECTIONS, POLICIES
from kvproof_spec.policies.vllm import VllmPolicy
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Item
from kvproof_spec.state import ActionDisabled, Request, Row, State, initial_state

# Engines that answer


class Engine(Protocol):
    def answer(self, state: State, action: Action) -> Answer:
        """What it does, and says of it."""
        ...

    def shown(self, after: State) -> Snapshot:
        """What it shows of itself after its last answer."""
        ...

    def clone(self) -> Self: ...

    def memory(self) -> Hashable:
        """Everything that its later answers may depend on, beside the state."""
        ...


class Vllm:
    """What vLLM 0.32 answers, but for what it is known to break."""

    def __init__(self, policy: VllmPolicy) -> None:
        self.policy = policy

    @classmethod
    def of(cls, config: Config) -> Vllm:
        policy = POLICIES["vllm-0.32"](config, CORRECTIONS)
        assert isinstance(policy, VllmPolicy)
        return cls(policy)

    def answer(self, state: State, action: Action) -> Answer:
        answer = self.policy.predict(state, action)
        return rows_of(state) if isinstance(action, Issue) else answer or Done()

    def shown(self, after: State) -> Snapshot:
        return self.policy.snapshot()

    def clone(self) -> Vllm:
        return Vllm(self.policy.clone())

    def memory(self) -> Hashable:
        return self.policy.memory()


def rows_of(state: State) -> Issued:
    return Issued(tuple(SentRow(r.id, r.tables) for r in state.requests if r.scheduled))


class Careful:
    """An engine that remembers nothing: what it may do it reads off the state.

    A hit is whatever is promised; where a step begins by reading it, it is written too, and
    the next step does not write it again.
    The lowest free blocks are handed out first.  Partial tails are always copied, and a
    state at a partial boundary is copied for the cache before it is overwritten.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def clone(self) -> Careful:
        return self

    def memory(self) -> Hashable:
        return ()

    def shown(self, after: State) -> Snapshot:
        held = references(after)
        blocks = range(1, self.config.num_blocks)
        return Snapshot(
            free_order=tuple(block for block in blocks if block not in held),
            free_blocks=sum(block not in held for block in blocks),
            reference_counts=(0, *(held.get(block, 0) for block in blocks)),
            tables=tuple((request.id, request.tables) for request in after.requests),
        )

    def answer(self, state: State, action: Action) -> Answer:
        match action:
            case Lookup():
                return self._lookup(state, state.find(action.request))
            case Allocate():
                return self._allocate(state, action)
            case Issue():
                return self._issued(state)
            case CompleteStep():
                return Returned(state.deferred)
            case CompleteLoad() if state.get(action.request) is None:
                return self._ended(state, action.request)
            case CompleteStore():
                return self._ended(state, action.request)
            case Trim():
                request = state.find(action.request)
                processed = processed_tokens(state, request)
                return Trimmed(self._trimmed(request.tables, processed))
            case Release():
                return self._released(state, state.find(action.request))
            case Forget():
                return Forgotten(action.blocks is not None or not references(state))
            case _:
                return Done()

    # Lookup

    def _lookup(self, state: State, request: Request) -> Hit:
        if self.config.caching:
            unit = self.config.boundary
            for tokens in range((request.known - 1) // unit * unit, 0, -unit):
                found = [
                    self._recovered(state, request, group_id, tokens)
                    for group_id in range(len(self.config.groups))
                ]
                if None not in found:
                    return Hit(tokens, tuple(table for table in found if table is not None))
        return Hit(0, self.config.no_tables)

    def _recovered(
        self, state: State, request: Request, group_id: int, tokens: int
    ) -> Table | None:
        """The blocks from which the group can go on after so many tokens."""
        group = self.config.groups[group_id]
        needed: dict[int, list[int]] = {}
        for position in group.read(tokens, tokens):
            needed.setdefault(position // group.block_size, []).append(position)
        table = [NULL_BLOCK] * group.blocks_for(tokens)
        unissued = {cell[0] for r in state.requests for cell in unissued_cells(state, r)}
        for entry, positions in needed.items():
            copied = (entry + 1) * group.block_size > tokens
            at_once = copied or group.kind == "state"
            pages = [state.promise, *[state.memory] * at_once]
            for block in range(1, self.config.num_blocks):
                if (block not in unissued or not at_once) and all(
                    read_page(page, block, group_id, position % group.cells)
                    is request.content[position]
                    for page in pages
                    for position in positions
                ):
                    table[entry] = block
                    break
            else:
                return None
        return tuple(table)

    # Allocate

    def _allocate(self, state: State, action: Allocate) -> Answer:
        request, ends = state.find(action.request), action.segments(state)
        running = request.status == "running"
        kept = self._trimmed(request.tables, ends.processed) if running else request.tables
        before = kept if running else action.tables_before(state)
        trimmed = request._replace(tables=before)
        held = references(state._replace(requests=state.having(trimmed)))
        busy = used_by_operations(state)
        if action.unordered:
            busy |= self._in_flight(state)
        free = [b for b in range(1, self.config.num_blocks) if b not in held and b not in busy]
        wanted = self._wanted(state, action, before)
        copies = self._for_the_cache(request, before)
        room = len(free) - action.headroom
        count = sum(len(entries) for entries in wanted) + len(copies)
        if count > room or (action.whole_sequence and self._whole(request) > len(free)):
            return Refused(kept)
        tables = []
        for group_id, entries in enumerate(wanted):
            table = list(before[group_id])
            for entry in entries:
                table += [NULL_BLOCK] * (entry + 1 - len(table))
                if table[entry] != NULL_BLOCK:
                    copies.append((group_id, table[entry], free[0]))
                table[entry] = free.pop(0)
            group, reserved = self.config.groups[group_id], ends.reserved
            if group.window:
                table += [NULL_BLOCK] * (group.blocks_for(reserved) - len(table))
            tables.append(tuple(table))
        made = tuple(Copy(group, source, to or free.pop(0)) for group, source, to in copies)
        return Granted(tuple(tables), copies=made)

    def _wanted(self, state: State, action: Allocate, before: Tables) -> list[list[int]]:
        """By group, the table entries that get a block: those missing, and a partial tail."""
        request, ends = state.find(action.request), action.segments(state)
        running, wanted = request.status == "running", []
        for group, table in zip(self.config.groups, before, strict=True):
            size, entries = group.block_size, range(len(table), group.blocks_for(ends.reserved))
            if not group.reused:
                entries = range(len(table), group.blocks_for(len(request.encoder)))
                wanted.append(list(entries))
                continue
            tail = [len(table) - 1] if not running and table and ends.local % size else []
            if group.kind == "state":
                needed = {(end - 1) // size for end in (ends.restart, ends.target) if end}
                wanted.append(tail + [entry for entry in sorted(needed) if entry >= len(table)])
            else:
                first = 0 if running else group.first_needed_block(ends.restart)
                wanted.append(tail + [entry for entry in entries if entry >= first])
        return wanted

    def _for_the_cache(self, request: Request, tables: Tables) -> list[tuple[int, int, int]]:
        """(group, source, destination to be chosen) of states that the next step overwrites."""
        unit, end = self.config.partial_boundary, request.computed
        if request.status != "running" or unit is None or end % unit:
            return []
        return [
            (group_id, tables[group_id][(end - 1) // group.block_size], 0)
            for group_id, group in enumerate(self.config.groups)
            if group.kind == "state" and end % group.block_size
        ]

    def _whole(self, request: Request) -> int:
        """No fewer blocks than all known tokens take, with a copy and slots ahead."""
        tokens = max(request.known, len(request.encoder)) + 8
        return sum(group.blocks_for(tokens) + 1 for group in self.config.groups)

    @staticmethod
    def _in_flight(state: State) -> set[int]:
        rows = [row for step in state.steps for row in step.rows]
        blocks = {block for row in rows for table in row.tables for block in table}
        copies = [copy for step in state.steps for copy in step.copies]
        return blocks | {block for copy in copies for block in (copy.source, copy.destination)}

    def _trimmed(self, tables: Tables, processed: int) -> Tables:
        return tuple(
            tuple(
                NULL_BLOCK if entry < group.first_needed_block(processed) else block
                for entry, block in enumerate(table)
            )
            for group, table in zip(self.config.groups, tables, strict=True)
        )

    # Steps and operations

    @staticmethod
    def _issued(state: State) -> Issued:
        rows = rows_of(state).rows or ()
        own = {block for row in rows for table in row.tables for block in table}
        return Issued(rows, state.copies, tuple(b for b in state.uncleared if b in own))

    @staticmethod
    def _released(state: State, request: Request) -> Returned:
        """What transfers of the request itself use is kept back."""
        used = {c[0] for t in state.transfers if t.request == request.id for c in t.cells}
        first, end = request.load if request.status == "loading" and request.load else (0, 0)
        kept = []
        for group, table in zip(state.config.groups, request.tables, strict=True):
            entries = range(first // group.block_size, group.blocks_for(end))
            kept += [
                block
                for entry, block in enumerate(table)
                if block != NULL_BLOCK and (block in used or entry in entries)
            ]
        return Returned((*state.deferred, *kept))

    @staticmethod
    def _ended(state: State, request: int) -> Returned:
        """A block is kept as often as other transfers use it, and no oftener than it was."""
        inbound = all(t.inbound for t in state.transfers if t.request == request)
        others = [t for t in state.transfers if (t.request, t.inbound) != (request, inbound)]
        users = Counter(block for t in others for block in {cell[0] for cell in t.cells})
        return Returned(tuple((Counter(state.deferred) & users).elements()))


# Exploring


Actions = Callable[[State, Scope], Iterable[Action]]
Inside = Callable[[State], bool]
Node = tuple[State, Hashable]


def chosen(state: State, scope: Scope) -> Iterator[Action]:
    for choice in choices(state, scope):
        yield from choice.actions()


def explore(
    start: State,
    scope: Scope,
    actions: Actions,
    inside: Inside,
    engine: Engine,
    rules: Sequence[Rule] = (),
) -> set[Node]:
    """All states that can be reached without leaving `inside`, each with the engine's memory."""
    oracle = Oracle(scope.config, rules)
    seen: set[Node] = {(start, engine.memory())}
    todo = deque([(start, engine)])
    while todo:
        state, engine = todo.popleft()
        for action in actions(state, scope):
            twin = engine.clone()
            answer = twin.answer(state, action)
            after = action.apply(state, answer)
            if rules:
                oracle.state = state
                oracle.step(action, answer, twin.shown(after))
                assert oracle.state == after
            node = (after, twin.memory())
            if inside(after) and node not in seen:
                seen.add(node)
                todo.append((after, twin))
    return seen


# The brute-force enumerator

SMALL = range(5)
"""Numbers that an action of the small scopes may name: requests, steps, blocks, tokens."""


def spelled(state: State, scope: Scope) -> Iterator[Action]:
    """Every action that can be spelled with small numbers and the scope's symbols."""
    given = product(SMALL, scope.prompts, scope.inputs, scope.encoder_tokens)
    for request, symbols, inputs, encoder in given:
        yield Submit(request, symbols, inputs=inputs, encoder_tokens=encoder)
    for request in SMALL[: state.submitted]:
        yield Lookup(request)
        yield Trim(request)
        yield Store(request)
        yield CompleteStore(request)
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
    """Without those that make no sense in any state: they are half of them."""
    drafts: list[tuple[int, ...]] = [()]
    drafts += [(symbol,) * n for symbol in scope.samples for n in range(1, scope.lookahead + 1)]
    ahead, headroom = range(scope.lookahead + 1), range(scope.headroom + 1)
    parameters = SMALL, drafts, SMALL, (False, True), ahead, headroom, (False, True)
    made = (Allocate(request, *picked) for picked in product(*parameters))
    return tuple(a for a in made if a.unordered == (a.new == 0) and a.external >= a.unordered)


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
        case CompleteStep() | CompleteLoad() | CompleteStore():
            return True
        case Store():
            request = state.find(action.request)
            stored = tokens_back(state, request) >= block_of_all(scope.config)
            return "store" in scope.features and stored and not request.scheduled
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


def current_rows(state: State, request: Request) -> list[Row]:
    rows = [row for step in state.steps for row in step.rows if row.request == request.id]
    return [row for row in rows if row.admission == request.admission]


def tokens_back(state: State, request: Request) -> int:
    return request.computed - sum(row.tokens for row in current_rows(state, request))


def block_of_all(config: Config) -> int:
    """The least number of tokens at which a block of every group ends that is reused."""
    sizes = [group.block_size for group in config.groups if group.kind != "cross"]
    return next(n for n in range(1, 1000) if not any(n % size for size in sizes))


def ends_well(config: Config, request: Request, start: int, end: int) -> bool:
    """May a step end here?  With states, it has to stop where one is to be saved.

    vLLM 0.32: `_mamba_block_aligned_split`, said of positions instead of counts.
    """
    states = [group.block_size for group in config.groups if group.kind == "state"]
    known = len(request.content)
    if not states or start >= max(request.prompt_tokens, known - 1):
        return True
    size = max(states)
    stops = {end for end in range(start + 1, known) if end % size == 0 and known - 1 < end + size}
    if start % size:
        stops |= {end for end in range(start, start + size) if end % size == 0}
    if config.partial_boundary and not any(end > (known - 1) // size * size for end in stops):
        tail = max(n for n in range(request.prompt_tokens) if n % config.partial_boundary == 0)
        stops |= {tail} if tail > (known - 1) // size * size else set()
    passed = any(start < stop < end for stop in stops)
    to_its_end = end >= request.prompt_tokens and end >= known - 1
    return not passed and (end % size == 0 or end in stops or to_its_end)


def allocation_may_be_asked(state: State, scope: Scope, action: Allocate) -> bool:
    request = state.find(action.request)
    if owed(state, action.request) or action.new > scope.chunk:
        return False
    states = any(group.kind == "state" for group in scope.config.groups)
    if states and action.whole_sequence:
        return False
    running = request.status == "running"
    hit = state.hit.tokens if state.hit is not None and not running else 0
    start = request.computed + hit + action.external
    if action.new and not ends_well(scope.config, request, start, start + action.new):
        return False
    if action.lookahead and "lookahead" not in scope.features:
        return False
    if action.external and "external" not in scope.features:
        return False
    if action.unordered:
        held = {block for r in state.requests for table in r.tables for block in table}
        return not action.lookahead and set(state.uncleared) <= held
    if not running:
        return not action.drafts
    rows = current_rows(state, request)
    coming = len(request.content) + sum(1 + len(row.drafts) for row in rows if row.samples)
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
    if request.status == "loading":
        return "abort-loading" in scope.features
    if request.scheduled:
        return "unissued" in scope.features and action.reason != "finish"
    if action.reason == "finish":
        return request.status == "running" and len(request.content) > request.prompt_tokens
    return action.reason in scope.features


# Small scopes that are explored to the end


def rows_of_all(state: State) -> list[Row]:
    return [row for step in state.steps for row in step.rows]


@dataclass(frozen=True, slots=True)
class Small:
    """A scope, and how far it is followed; the whole of it is `states` states.

    `sometimes` holds in one of them at least.
    """

    name: str
    scope: Scope
    states: int
    issued: int
    submitted: int = 2
    preemptions: int = 0  # of the requests that are there
    engine: Callable[[Config], Engine] = Vllm.of
    sometimes: Inside = bool

    def holds(self, state: State) -> bool:
        return (
            state.submitted <= self.submitted
            and state.issued <= self.issued
            and sum(request.admission for request in state.requests) <= self.preemptions
        )


FULL = Config((Group("full", 2),), num_blocks=4)
STATE = Config((Group("state", 2),), num_blocks=5)
PARTIAL = Config((Group("full", 2),), num_blocks=5, partial_boundary=1)
TWO_KINDS = Config((Group("full", 2), Group("state", 4)), num_blocks=6, partial_boundary=2)
ENCODED = Config((Group("full", 2), Group("cross", 2)), num_blocks=5, caching=False)
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
    names = frozenset(features.split())
    assert names <= set(FEATURES)
    return Scope(config, names, prompts, **{**given, **more})


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
        states=296,
        issued=2,
    ),
    Small(
        "two requests with states",
        small_scope(STATE, "state abort async trim", 3, max_request_tokens=5),
        states=922,
        issued=2,
        engine=Careful,
        sometimes=lambda s: any(row.start % 2 == 0 < row.start for row in rows_of_all(s)),
    ),
    Small(
        "states and attention, with hits inside blocks",
        small_scope(TWO_KINDS, "full state mixed partial abort async", 4, max_request_tokens=6),
        states=504,
        issued=3,
        engine=Careful,
        sometimes=lambda s: bool(s.copies),
    ),
    Small(
        "hits inside blocks, in cleared pages",
        small_scope(
            replace(PARTIAL, clears=True), "full partial clear external abort-loading unissued", 3
        ),
        states=529,
        issued=2,
        engine=Careful,
        sometimes=lambda s: bool(s.copies) and bool(s.uncleared),
    ),
    Small(
        "stores, and loads whose requests have left",
        small_scope(FULL, "full store external abort abort-loading", 3, max_request_tokens=4),
        states=1612,
        issued=1,
        engine=Careful,
        sometimes=lambda s: {t.inbound for t in s.transfers} == {True, False},
    ),
    Small(
        "drafts in two steps in flight",
        small_scope(FULL, "full lookahead async", 2, max_request_tokens=6, lookahead=1),
        states=362,
        issued=4,
        submitted=1,
        engine=Careful,
        sometimes=lambda s: len([r for r in rows_of_all(s) if r.drafts]) == 2,
    ),
    Small(
        "encoders",
        small_scope(ENCODED, "full cross uncached abort preempt", 2, encoder_tokens=(3,)),
        states=425,
        issued=2,
        preemptions=1,
        engine=Careful,
        sometimes=lambda s: any(r.encoder and not r.first for r in rows_of_all(s)),
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
    engine = small.engine(small.scope.config)
    by_choices = explore(start, small.scope, chosen, small.holds, engine, RULES)
    by_brute_force = explore(start, small.scope, every_action, small.holds, engine)
    same = by_choices == by_brute_force
    assert same, difference(by_choices, by_brute_force)
    found = len(by_choices)
    assert found == small.states
    assert any(small.sometimes(state) for state, _ in by_choices)


def is_draft(action: Action) -> bool:
    return isinstance(action, Allocate) and bool(action.drafts)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("drafts and slots ahead", is_draft),
        ("drafts in two steps in flight", is_draft),
        ("states and attention, with hits inside blocks", lambda a: a == Allocate(1, 2)),
    ],
)
def test_the_enumerator_would_notice_a_missing_choice(
    name: str, missing: Callable[[Action], bool]
) -> None:
    small = next(small for small in SMALL_SCOPES if small.name == name)
    start, engine = initial_state(small.scope.config), small.engine(small.scope.config)

    def fewer(state: State, scope: Scope) -> Iterator[Action]:
        return (action for action in chosen(state, scope) if not missing(action))

    found = explore(start, small.scope, fewer, small.holds, engine)
    assert found < explore(start, small.scope, every_action, small.holds, engine)


# Random walks through every kind of group

EVERY = frozenset(FEATURES) - {"uncached"}
PROMPTS = ((0, 0, 1), (0, 0, 1, 1, 0, 0, 1), (0, 1, 0, 0, 1, 1, 1, 0), (1,))
INPUTS = (
    TOKENS_ONLY,
    Inputs("poet", 1),
    Inputs("poet", 2, "mine"),
    Inputs(items=(Item("cat", 1, 2),)),
    Inputs(embeds=((0, 7),)),
)


def walked(config: Config, without: str = "", **more: Any) -> Scope:
    features = EVERY - frozenset(without.split())
    return Scope(config, features, PROMPTS, chunk=5, max_request_tokens=14, **more)


DRAFTER = Group("full", 2, drafter=True)
WALKS = {
    "chunks": walked(Config((Group("full", 2), Group("chunked", 2, 4)), 16)),
    "blocks of two sizes": walked(Config((Group("full", 2), Group("sliding", 4, 5)), 14)),
    "a state": walked(Config((Group("state", 4),), 5, partial_boundary=2)),
    "a state and attention": walked(
        Config((Group("full", 2), Group("state", 4)), 14, partial_boundary=1)
    ),
    "a window and a state": walked(
        Config((Group("sliding", 2, 3), Group("state", 2)), 10, clears=True)
    ),
    "encoders": walked(
        Config((Group("full", 2), Group("cross", 2)), 14, caching=False), encoder_tokens=(1, 3)
    ),
    "cleared pages": walked(Config((Group("full", 4),), 8, partial_boundary=2, clears=True)),
    "a drafter": walked(Config((Group("full", 2), DRAFTER), 18)),
    "other inputs": walked(Config((Group("full", 2),), 10), inputs=INPUTS),
}
STEPS = 120  # a walk
SEEDS = range(6)

HURRY = {
    "lookup": 4,
    "admit": 6,
    "extend": 4,
    "draft": 4,
    "issue": 6,
    "complete step": 4,
    "complete load": 3,
    "complete store": 3,
}
"""Weights by kind; 1 for the rest, so that requests come far enough to matter."""


@dataclass(slots=True)
class Walk:
    """One random run of the spec, answered by the engine that remembers nothing."""

    scope: Scope
    seed: int
    oracle: Oracle = field(init=False)
    kinds: Counter[str] = field(default_factory=Counter)
    goals: Counter[str] = field(default_factory=Counter)
    actions: set[type[Action]] = field(default_factory=set)

    def run(self) -> Walk:
        random, engine = Random(self.seed), Careful(self.scope.config)
        self.oracle = Oracle(self.scope.config)
        for _ in range(STEPS):
            enabled = choices(self.oracle.state, self.scope)
            for choice in enabled:
                choice.action().check(self.oracle.state)
            weights = [HURRY.get(choice.kind, 1) for choice in enabled]
            choice = random.choices(enabled, weights)[0]
            self.kinds[choice.kind] += 1
            picks = [random.randrange(len(domain)) for domain in choice.domains]
            self._step(engine, choice.action(picks))
        return self

    def _step(self, engine: Careful, action: Action) -> None:
        before = self.oracle.state
        answer = engine.answer(before, action)
        self.actions.add(type(action))
        self.oracle.step(action, answer, engine.shown(action.apply(before, answer)))
        self.goals.update(goals_of(before, action, answer, self.oracle.state))


GOALS = (
    "a hit",
    "a hit inside a block",
    "a copy for the cache",
    "a block is kept back for a store",
    "a block is kept back for a load",
    "a store outlives its request",
    "a row moves left",
    "a page is cleared",
    "something is refused",
    "a draft follows a token to come",
)


def goals_of(before: State, action: Action, answer: Answer, after: State) -> Iterator[str]:
    if isinstance(answer, Hit) and answer.tokens:
        inside = answer.tokens % before.config.common_block
        yield "a hit inside a block" if inside else "a hit"
    if isinstance(answer, Granted):
        own = {block for table in answer.tables for block in table}
        if any(made.destination not in own for made in answer.copies):
            yield "a copy for the cache"
        if isinstance(action, Allocate) and action.drafts and before.steps:
            yield "a draft follows a token to come"
    if isinstance(answer, Refused):
        yield "something is refused"
    if isinstance(answer, Issued) and answer.cleared:
        yield "a page is cleared"
    for transfer in after.transfers:
        if after.deferred:
            yield f"a block is kept back for a {'load' if transfer.inbound else 'store'}"
    if isinstance(action, CompleteStore) and before.get(action.request) is None:
        yield "a store outlives its request"
    if isinstance(action, CompleteStep) and after.steps:
        starts = [[row.start for row in step.rows] for step in before.steps[1:]]
        if starts != [[row.start for row in step.rows] for step in after.steps]:
            yield "a row moves left"


@pytest.fixture(scope="module")
def walks() -> dict[str, list[Walk]]:
    return {name: [Walk(scope, seed).run() for seed in SEEDS] for name, scope in WALKS.items()}


@pytest.mark.parametrize("goal", GOALS)
def test_random_walks_get_there(walks: dict[str, list[Walk]], goal: str) -> None:
    assert sum(walk.goals[goal] for some in walks.values() for walk in some), f"never: {goal}"


def test_random_walks_reach_no_goal_that_is_not_listed(walks: dict[str, list[Walk]]) -> None:
    assert {goal for some in walks.values() for walk in some for goal in walk.goals} <= set(GOALS)


def test_random_walks_draw_every_kind_of_choice_and_action(walks: dict[str, list[Walk]]) -> None:
    every = [walk for some in walks.values() for walk in some]
    assert {kind for walk in every for kind in walk.kinds} == set(KINDS)
    assert {action for walk in every for action in walk.actions} == set(ACTIONS)


@pytest.mark.parametrize("name", WALKS)
def test_every_rule_that_has_evidence_here_is_evaluated(
    walks: dict[str, list[Walk]], name: str
) -> None:
    rules = {rule for walk in walks[name] for rule, _ in walk.oracle.evaluated}
    caching = WALKS[name].config.caching
    hits = set() if caching else {"I6", "R5"}
    of_a_scheduler = {"R9", "R10", "R11", "R12"}
    assert rules == {rule.id for rule in RULES} - of_a_scheduler - hits


def test_drafters_of_hits_are_fresh_and_stale(walks: dict[str, list[Walk]]) -> None:
    for held in (True, False):
        assert sum(walk.oracle.qualities["Q1", held] for walk in walks["a drafter"])
