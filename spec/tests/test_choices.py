"""What may happen next: enabled, with nothing that is switched off, and rich enough to matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

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
)
from kvproof_spec.choices import FEATURES, KINDS, Choice, Scope, choices, chunks
from kvproof_spec.config import Config, Group
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import Oracle
from kvproof_spec.pages import needed_cells, read_page
from kvproof_spec.policies import CORRECTIONS, POLICIES, UnknownToPolicy
from kvproof_spec.policies.vllm import VllmPolicy
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Item
from kvproof_spec.state import Request, State, initial_state

FULL = Config((Group("full", 2),), num_blocks=4)

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

HURRY = {
    "lookup": 4,
    "admit": 6,
    "extend": 4,
    "issue": 6,
    "complete step": 4,
    "complete load": 3,
    "load": 4,
}
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
        for transfer in oracle.state.transfers:
            ends = CompleteLoad(transfer.request, 0), CompleteStore(transfer.request)
            self._step(oracle, policy, ends[0] if transfer.inbound else ends[1])
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
    "a load outlives its request",
    "a store outlives its request",
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
            yield goal_of_load(before.get(action.request), action.tokens)
        case CompleteStore():
            if before.get(action.request) is None:
                yield "a store outlives its request"
        case Forget(None):
            assert isinstance(answer, Forgotten)
            yield "everything is forgotten" if answer.done else "forgetting everything is refused"
        case _:
            pass
    if len(after.steps) == 2:
        yield "two steps are in flight"
    if after.deferred:
        yield "blocks are kept back for steps in flight"


def goal_of_load(request: Request | None, tokens: int) -> str:
    if request is None:
        return "a load outlives its request"
    if request.load is not None and tokens == request.load[1]:
        return "a load succeeds"
    return "a load fails half way" if tokens else "a load fails"


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
    with pytest.raises(UnknownToPolicy, match="a single group is hashed by whole blocks"):
        VllmPolicy(Config((Group("full", 4),), num_blocks=9, partial_boundary=2))


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


# What each feature offers, and only it

Move = tuple[Action, Answer]
EMPTY: Move = (Lookup(0), Hit(0, ((),)))
ISSUED: Move = (Issue(), Issued())
PARTIAL = Config((Group("full", 4),), num_blocks=9, partial_boundary=2)
STATES = Config((Group("state", 4),), num_blocks=9)
PARTIAL_STATES = replace(STATES, partial_boundary=2)


def computed(tokens: int, new: int, *table: int) -> list[Move]:
    """Request 0 has computed `new` of its tokens, and sampled if that are all."""
    outputs = (Output(0, 1),) if new == tokens else ()
    return [
        *((Submit(0, tuple(range(tokens))), Done()), EMPTY),
        *((Allocate(0, new), Granted((table,))), ISSUED),
        (CompleteStep(0, outputs), Returned()),
    ]


def after(config: Config, *moves: Move) -> State:
    oracle = Oracle(config)
    for move in moves:
        oracle.step(*move)
    return oracle.state


def offered(state: State, features: str, **more: Any) -> dict[str, list[Action]]:
    """The enabled actions by the kind of their choice; all of them pass their guards."""
    scope = Scope(state.config, frozenset(features.split()), ((0, 1, 2),), **more)
    found: dict[str, list[Action]] = {}
    for choice in choices(state, scope):
        for action in choice.actions():
            action.check(state)
            found.setdefault(choice.kind, []).append(action)
    return found


def test_a_store_is_offered_once_a_block_is_computed_and_none_is_under_way() -> None:
    ready = computed(3, 3, 1, 2)
    store, granted = (Store(0), Done()), (Allocate(0, 1), Granted(((1, 2),)))
    assert offered(after(FULL, *ready), "full store")["store"] == [Store(0)]
    assert "store" not in offered(after(FULL, *ready), "full")
    assert "store" not in offered(after(FULL, *ready[:-1]), "full store async"), "in flight"
    assert "store" not in offered(after(FULL, *computed(3, 1, 1)), "full store")
    assert "store" not in offered(after(FULL, *ready, granted), "full store")
    assert "store" not in offered(after(FULL, *ready, store), "full store")


def test_a_request_whose_store_is_under_way_may_leave_and_gets_nothing() -> None:
    state = after(FULL, *computed(3, 3, 1, 2), (Store(0), Done()))
    kinds = set(offered(state, "full store trim preempt abort publish"))
    assert kinds == {"submit", "complete store", "publish", "finish", "preempt", "abort"}
    left = Release(0, "preempt"), Returned((1,))
    waiting = after(FULL, *computed(3, 3, 1, 2), (Store(0), Done()), left, EMPTY)
    assert set(offered(waiting, "full external")) == {"submit", "lookup", "complete store"}


def test_the_end_of_a_transfer_is_offered_when_its_request_has_left() -> None:
    stored = [*computed(3, 3, 1, 2), (Store(0), Done())]
    left = after(FULL, *stored, (Release(0, "abort"), Returned((1,))))
    assert offered(left, "full")["complete store"] == [CompleteStore(0)]
    load = Allocate(0, 0, external=2, unordered=True), Granted(((1,),))
    loading = (Submit(0, (0, 1, 2)), Done()), EMPTY, load
    left = after(FULL, *loading, (Release(0, "abort"), Returned((1,))))
    assert offered(left, "full")["complete load"] == [CompleteLoad(0, 0)]


def test_a_loading_request_is_aborted_only_where_that_is_asked_for() -> None:
    load = Allocate(0, 0, external=2, unordered=True), Granted(((1,),))
    state = after(FULL, (Submit(0, (0, 1, 2)), Done()), EMPTY, load)
    assert offered(state, "full abort-loading")["abort"] == [Release(0, "abort")]
    assert set(offered(state, "full abort preempt")) == {"submit", "complete load"}


def test_drafts_are_offered_after_tokens_that_are_being_sampled() -> None:
    drafted = Allocate(0, 2, drafts=(0,)), Granted(((1, 2, 3),))
    state = after(FULL, *computed(3, 3, 1, 2), drafted, ISSUED)
    found = offered(state, "full lookahead async", samples=(0,))["draft"]
    assert {len(draft.drafts) for draft in found if isinstance(draft, Allocate)} == {1, 2}
    assert "draft" not in offered(state, "full lookahead", samples=(0,))
    assert "draft" not in offered(state, "full async")
    decoding = after(STATES, *computed(3, 3, 1))
    assert "draft" not in offered(decoding, "state lookahead async"), "a state takes none back"


def test_nothing_external_follows_a_hit_inside_a_block() -> None:
    asked = [*computed(3, 3, 1), (Submit(1, (0, 1, *range(5, 12))), Done())]
    whole = after(PARTIAL, *asked, (Lookup(1), Hit(0, ((),))))
    inside = after(PARTIAL, *asked, (Lookup(1), Hit(2, ((1,),))))
    assert {"admit", "admit external", "load"} <= set(offered(whole, "full partial external"))
    found = offered(inside, "full partial external")
    assert "admit" in found
    assert not {"admit external", "load"} & set(found)


@pytest.mark.parametrize(
    ("config", "tokens", "start", "most", "news"),
    [
        (PARTIAL, 10, 0, 4, [4, 3, 2, 1]),  # no state: a step may end anywhere
        (STATES, 10, 0, 10, [8, 4]),  # at a block's end, and not beyond the last
        (STATES, 10, 0, 7, [4]),
        (STATES, 10, 0, 3, []),  # a block is more than a step may compute: it waits
        (STATES, 10, 8, 2, [2]),  # what is left of the prompt, at once
        (STATES, 10, 2, 8, [2]),  # from inside a block to its end
        (STATES, 8, 0, 8, [4]),  # a hit of the same prompt leaves a token to compute
        (STATES, 9, 0, 9, [8, 4]),
        (STATES, 3, 0, 3, [3]),
        (PARTIAL_STATES, 7, 0, 7, [4]),
        (PARTIAL_STATES, 7, 4, 3, [2]),  # the last boundary of the prompt is inside a block
        (PARTIAL_STATES, 7, 6, 1, [1]),
        (PARTIAL_STATES, 3, 0, 3, [2]),
    ],
)
def test_a_step_ends_where_a_state_is_to_be_saved(
    config: Config, tokens: int, start: int, most: int, news: list[int]
) -> None:
    request = after(config, (Submit(0, (0,) * tokens), Done())).find(0)
    assert list(chunks(config, request, start, most)) == news


def test_states_are_admitted_in_such_chunks_only() -> None:
    state = after(STATES, (Submit(0, (0,) * 10), Done()), EMPTY)
    found = offered(state, "state external", headroom=0)
    assert found["admit"] == [Allocate(0, 8), Allocate(0, 4)]
    assert found["admit external"] == [Allocate(0, 4, external=4), Allocate(0, 2, external=8)]
    assert [load.external for load in found["load"] if isinstance(load, Allocate)] == [4, 8]
    going_on = after(STATES, *computed(10, 4, 1))
    assert offered(going_on, "state", headroom=0)["extend"] == [Allocate(0, 4)]


def test_a_load_never_brings_all_that_a_state_needs() -> None:
    for config, externals in ((STATES, [4]), (replace(PARTIAL, partial_boundary=None), [4, 8])):
        state = after(config, (Submit(0, (0,) * 8), Done()), EMPTY)
        loads = offered(state, "external", headroom=0)["load"]
        found = {load.external for load in loads if isinstance(load, Allocate)}
        assert sorted(found) == externals


def test_prompts_are_submitted_with_the_inputs_that_they_have_room_for() -> None:
    cat = Inputs("poet", items=(Item("cat", 1, 3),), embeds=((0, 7), (3, 8)))
    found = offered(initial_state(FULL), "lora multimodal embeds", inputs=(TOKENS_ONLY, cat))
    fitting = Inputs("poet", embeds=((0, 7),))
    assert found["submit"] == [Submit(0, (0, 1, 2)), Submit(0, (0, 1, 2), inputs=fitting)]


def test_encoder_tokens_are_submitted_as_the_scope_says() -> None:
    config = Config((Group("cross", 2),), num_blocks=9, caching=False)
    found = offered(initial_state(config), "cross uncached", encoder_tokens=(1, 4))["submit"]
    assert [s.encoder_tokens for s in found if isinstance(s, Submit)] == [1, 4]
