"""The policies: what vLLM 0.32.0 and 0.20.2 answer, and where they part.

Every answer here was compared with the genuine managers; stateful_tests does so at random.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from random import Random

import pytest

from kvproof_spec.actions import (
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
from kvproof_spec.answers import Answer, Done, Granted, Hit, Issued, Raised, Refused, Returned
from kvproof_spec.choices import FEATURES, Scope, choices
from kvproof_spec.config import Config, Group
from kvproof_spec.oracle import Oracle
from kvproof_spec.pages import Copy
from kvproof_spec.policies import CORRECTIONS, NOT_EXACT, POLICIES, UnknownToPolicy
from kvproof_spec.policies.releases import VLLM_0_20, VLLM_0_32, Limit
from kvproof_spec.policies.vllm import VllmPolicy
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Item

FULL = Group("full", 4)
WINDOW = Group("sliding", 4, 8)
STATE = Group("state", 4)
RELEASES = (VLLM_0_32, VLLM_0_20)


class Driven:
    """A policy that answers for itself; nothing is judged but that the actions are enabled."""

    def __init__(
        self,
        config: Config,
        release: str = "vllm-0.32",
        corrections: Collection[str] = (),
    ) -> None:
        policy = POLICIES[release](config, corrections)
        assert isinstance(policy, VllmPolicy)
        self.policy = policy
        self.oracle = Oracle(config, ())
        self.steps = 0

    def do(self, action: Action) -> Answer:
        answer = self.policy.predict(self.oracle.state, action)
        if answer is None:
            answer = Issued() if isinstance(action, Issue) else Done()
        self.oracle.step(action, answer)
        return answer

    def admit(
        self,
        request: int,
        symbols: tuple[int, ...],
        new: int,
        external: int = 0,
        unordered: bool = False,
        inputs: Inputs = TOKENS_ONLY,
    ) -> Answer:
        """Submit, look up, allocate."""
        self.do(Submit(request, symbols, inputs=inputs))
        self.do(Lookup(request))
        return self.do(Allocate(request, new, external=external, unordered=unordered))

    def step(self, *sampled: int) -> None:
        """Issue a step and let it return; each of these requests samples a 9."""
        self.do(Issue())
        outputs = tuple(Output(request, 9) for request in sampled)
        self.do(CompleteStep(self.steps, outputs))
        self.steps += 1

    def run(self, request: int, symbols: tuple[int, ...], inputs: Inputs = TOKENS_ONLY) -> None:
        """Compute a whole prompt, and leave."""
        self.admit(request, symbols, len(symbols), inputs=inputs)
        self.step(request)
        self.do(Release(request, "finish"))

    @property
    def free(self) -> tuple[int, ...]:
        return self.policy.snapshot().free_order

    @property
    def keys(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return self.policy.snapshot().keys or ()


# Where the releases part


def test_freed_blocks_that_nothing_finds_come_first_or_in_order() -> None:
    orders = {}
    for name in POLICIES:
        driven = Driven(Config((FULL,), num_blocks=6), name)
        driven.run(0, (1, 1, 1, 1, 2))
        orders[name] = driven.free
    assert orders == {"vllm-0.32": (2, 3, 4, 5, 1), "vllm-0.20": (3, 4, 5, 2, 1)}


def test_a_group_takes_blocks_that_the_next_one_was_to_hold() -> None:
    """#33775: with all blocks of a hit free, 0.20 puts one of them into both tables."""
    tables = {}
    for name in POLICIES:
        config = Config((FULL, Group("sliding", 4, 32)), num_blocks=14)
        driven = Driven(config, name)
        prompt = tuple(range(16))
        driven.run(0, prompt)
        driven.run(1, tuple(range(50, 62)))
        load = driven.admit(2, (*prompt, *range(80, 89)), 0, external=8, unordered=True)
        assert isinstance(load, Granted)
        tables[name] = load.tables
    full, window = tables["vllm-0.32"]
    assert not set(full) & set(window)
    full, window = tables["vllm-0.20"]
    assert set(full) & set(window)


def test_an_allocation_gives_back_what_a_step_in_flight_still_reads() -> None:
    """#47728: 0.20 counts the tokens in flight as processed."""
    tables = {}
    for name in POLICIES:
        driven = Driven(Config((WINDOW,), num_blocks=9), name)
        driven.admit(0, (1,) * 10, 10)
        driven.step(0)
        driven.do(Allocate(0, 1))
        driven.do(Issue())
        granted = driven.do(Allocate(0, 1))
        assert isinstance(granted, Granted)
        tables[name] = granted.tables
    assert tables == {"vllm-0.32": ((1, 2, 3),), "vllm-0.20": ((0, 2, 3),)}


def test_a_window_is_published_where_a_hit_can_need_it() -> None:
    keys = {}
    for name in POLICIES:
        driven = Driven(Config((Group("full", 8), Group("sliding", 4, 3)), num_blocks=9), name)
        driven.run(0, (1,) * 12)
        keys[name] = driven.keys
    assert keys["vllm-0.32"] == ((0, (1,)), (1, (4,)))
    assert keys["vllm-0.20"] == ((0, (1,)), (1, (3,)), (1, (4,)), (1, (5,)))


def test_the_end_of_a_prompt_has_a_key_inside_its_block() -> None:
    """Beside the block's own; no lookup asks for it where hits end with blocks."""
    for name, copies in (("vllm-0.32", [(1,), (2,), (2,)]), ("vllm-0.20", [(1,), (2,)])):
        driven = Driven(Config((Group("full", 8), Group("sliding", 4, 5)), num_blocks=9), name)
        driven.admit(0, (1,) * 15, 15)
        driven.step(0)
        driven.do(Allocate(0, 1))
        assert [blocks for group, blocks in driven.keys if group == 0] == copies


def test_an_adapter_loaded_again_is_taken_for_the_old_one_by_name() -> None:
    for name, tokens in (("vllm-0.32", 0), ("vllm-0.20", 4)):
        driven = Driven(Config((FULL,), num_blocks=9), name)
        driven.run(0, (1,) * 5, inputs=Inputs(lora="a"))
        driven.do(Submit(1, (1,) * 5, inputs=Inputs(lora="a", lora_version=1)))
        answer = driven.do(Lookup(1))
        assert isinstance(answer, Hit)
        assert answer.tokens == tokens


def test_a_release_is_nothing_but_its_switches() -> None:
    switches = [field.name for field in fields(VLLM_0_32) if field.name != "name"]
    assert all(getattr(VLLM_0_32, switch) for switch in switches)
    assert not any(getattr(VLLM_0_20, switch) for switch in switches)
    assert list(POLICIES) == [release.name for release in RELEASES]


# States


def test_a_state_group_announces_one_block_and_takes_two() -> None:
    """#46892: full(4) + Mamba(4), 12 free, 41 tokens, 40 external, 1 new."""
    config = Config((FULL, STATE), num_blocks=13)
    answers = [
        Driven(config, "vllm-0.32", corrections).admit(0, (1,) * 41, 1, external=40)
        for corrections in ((), CORRECTIONS)
    ]
    assert answers[0] == Raised("ValueError: Cannot get 1 free blocks from the pool")
    assert answers[1] == Refused(((), ()))
    enough = Driven(replace(config, num_blocks=14)).admit(0, (1,) * 41, 1, external=40)
    assert isinstance(enough, Granted)


def test_a_hit_on_a_state_of_this_step_is_put_off() -> None:
    driven = Driven(Config((FULL, STATE), num_blocks=20))
    driven.admit(0, (1,) * 5, 4)
    assert driven.admit(1, (1,) * 6, 1) == Refused(((), ()))
    driven.do(Issue())
    assert driven.do(Lookup(1)) == Hit(4, ((1,), (2,)))
    assert isinstance(driven.do(Allocate(1, 2)), Granted)


def test_states_behind_a_step_come_back_over_the_nulls_between_them() -> None:
    driven = Driven(Config((STATE,), num_blocks=9))
    driven.admit(0, (1,) * 13, 8)
    driven.step()
    driven.do(Allocate(0, 4))
    driven.step()
    driven.do(Allocate(0, 1))
    driven.step(0)
    assert driven.policy.groups[0].table(0) == [0, 0, 2, 3]
    assert driven.free == (4, 5, 6, 7, 8, 1)


PARTIAL = Config((FULL, STATE), num_blocks=20, partial_boundary=2)


def test_a_hit_inside_a_block_is_taken_by_copy() -> None:
    driven = Driven(PARTIAL)
    driven.admit(0, (1,) * 7, 6)  # a step ends at the prompt's last boundary
    driven.step()
    own = driven.do(Allocate(0, 1))
    assert own == Granted(((1, 2), (0, 3)), ((), ()), (Copy(1, 3, 4),))  # it goes on in block 3
    driven.step(0)
    driven.do(Submit(1, (1,) * 6 + (2, 2)))
    assert driven.do(Lookup(1)) == Hit(6, ((1, 2), (0, 4)))
    granted = driven.do(Allocate(1, 2))
    assert granted == Granted(((1, 5), (0, 6)), ((5,), (6,)), (Copy(0, 2, 5), Copy(1, 4, 6)))
    pinned = [driven.policy.pool.references[block] for block in (2, 4, 5, 6)]
    assert pinned == [2, 1, 2, 2]
    driven.do(Issue())
    assert [driven.policy.pool.references[block] for block in (2, 4, 5, 6)] == [1, 0, 1, 1]
    assert driven.free[-1] == 4


# Drafters, chunks, encoders, embeddings


def test_a_drafter_drops_the_last_block_of_a_hit() -> None:
    for drafter, tokens in ((False, 8), (True, 4)):
        driven = Driven(Config((Group("full", 4, drafter=drafter),), num_blocks=9))
        driven.run(0, (1,) * 9)
        driven.do(Submit(1, (1,) * 9))
        hit = driven.do(Lookup(1))
        assert isinstance(hit, Hit)
        assert hit.tokens == tokens


def test_groups_alike_but_for_a_drafter_are_looked_up_as_one() -> None:
    driven = Driven(Config((FULL, Group("full", 4, drafter=True)), num_blocks=12))
    driven.run(0, (1,) * 9)
    driven.do(Submit(1, (1,) * 10))
    assert driven.do(Lookup(1)) == Hit(4, ((1,), (4,)))


def test_a_chunk_that_begins_at_the_hit_needs_nothing() -> None:
    driven = Driven(Config((Group("chunked", 4, 8),), num_blocks=9))
    driven.do(Submit(0, (1,) * 17))
    assert driven.do(Lookup(0)) == Hit(16, ((0, 0, 0, 0),))


def test_an_encoder_has_its_blocks_from_admission_on() -> None:
    driven = Driven(Config((FULL, Group("cross", 4)), num_blocks=9, caching=False))
    driven.do(Submit(0, (1,) * 3, encoder_tokens=9))
    driven.do(Lookup(0))
    assert driven.do(Allocate(0, 3)) == Granted(((1,), (2, 3, 4)), ((1,), (2, 3, 4)))


def test_the_end_of_an_embedded_prompt_is_part_of_a_blocks_name() -> None:
    """Equal content, which vLLM does not find again."""
    embedded = Inputs(embeds=((0, 1),))
    driven = Driven(Config((FULL,), num_blocks=9))
    driven.admit(0, (1,) * 3, 3, inputs=embedded)
    driven.step(0)
    driven.do(Allocate(0, 1))
    driven.step(0)
    for request, prompt, tokens in ((1, (1, 1, 1, 9, 9), 0), (2, (1, 1, 1), 0)):
        driven.do(Submit(request, prompt, inputs=embedded))
        hit = driven.do(Lookup(request))
        assert isinstance(hit, Hit)
        assert hit.tokens == tokens


def test_an_item_under_an_embedding_is_part_of_a_blocks_name() -> None:
    plain = Inputs(embeds=((0, 1),))
    driven = Driven(Config((FULL,), num_blocks=9))
    driven.run(0, (1,) * 5, inputs=plain)
    driven.do(Submit(1, (1,) * 5, inputs=replace(plain, items=(Item("cat", 0, 1),))))
    assert driven.do(Lookup(1)) == Hit(0, ((),))
    driven.do(Submit(2, (2, *(1,) * 4), inputs=plain))
    assert driven.do(Lookup(2)) == Hit(4, ((1,),))


# Returns


def test_blocks_come_back_as_one_batch_when_everything_waited_for_has_ended() -> None:
    driven = Driven(Config((FULL, WINDOW), num_blocks=9, defers_returns=True))
    driven.admit(0, (1,) * 6, 5)
    driven.step()
    driven.do(Allocate(0, 1))
    driven.do(Issue())
    driven.do(Store(0))
    assert driven.do(Release(0, "abort")) == Returned((1, 2, 3, 4))
    assert driven.do(CompleteStep(1, (Output(0, 9),))) == Returned((1, 2, 3, 4))
    before = driven.free
    assert driven.do(CompleteStore(0)) == Returned(())
    assert (before, driven.free) == ((5, 6, 7, 8), (4, 2, 5, 6, 7, 8, 3, 1))


def test_a_load_that_outlives_its_request_keeps_the_blocks() -> None:
    driven = Driven(Config((FULL,), num_blocks=9))
    driven.admit(0, (1,) * 9, 0, external=8, unordered=True)
    assert driven.do(Release(0, "abort")) == Returned((1, 2))
    before = driven.free
    assert driven.do(CompleteLoad(0, 0)) == Returned(())
    assert (before, driven.free) == ((3, 4, 5, 6, 7, 8), (2, 1, 3, 4, 5, 6, 7, 8))


# The policy itself


@pytest.mark.parametrize("limit", NOT_EXACT, ids=lambda limit: limit.reason[:30])
def test_a_policy_declines_what_it_cannot_predict(limit: Limit) -> None:
    configs = [
        Config((FULL,), num_blocks=9, partial_boundary=2),
        Config((Group("full", 8), Group("chunked", 4, 8)), num_blocks=9),
        Config((FULL, Group("chunked", 4, 8, drafter=True)), num_blocks=9),
        Config((FULL, STATE), num_blocks=9, partial_boundary=2),
        Config((FULL, Group("state", 8)), num_blocks=9),
        Config((FULL, FULL), num_blocks=9),
    ]
    declined = [config for config in configs if limit.applies(config)]
    assert declined
    for policy in limit.policies:
        assert policy in POLICIES
        for config in declined:
            with pytest.raises(UnknownToPolicy, match=f"policy {policy} does not know"):
                POLICIES[policy](config, ())
    for config in declined:
        POLICIES["vllm-0.32"](replace(config, caching=False), ())


LAYOUTS = (
    (FULL,),
    (FULL, WINDOW),
    (Group("full", 8), Group("sliding", 4, 6)),
    (FULL, STATE),
    (FULL, Group("chunked", 4, 8)),
    (Group("full", 4, drafter=True), WINDOW),
)


@pytest.mark.parametrize("groups", LAYOUTS, ids=lambda groups: "-".join(g.kind for g in groups))
@pytest.mark.parametrize("name", POLICIES)
def test_a_clone_goes_on_alike_and_by_itself(name: str, groups: tuple[Group, ...]) -> None:
    rng = Random(1)
    partial = 2 if groups == (FULL, STATE) and name == "vllm-0.32" else None
    config = Config(groups, num_blocks=14, partial_boundary=partial, defers_returns=True)
    prompts = tuple((1,) * length for length in (3, 5, 9, 14))
    features = frozenset(FEATURES) - {"worker", "clear"}
    scope = Scope(config, features, prompts, chunk=8)
    driven = Driven(config, name, CORRECTIONS)
    for _ in range(400):
        found = choices(driven.oracle.state, scope)
        choice = rng.choice(found)
        action = choice.action([rng.randrange(len(domain)) for domain in choice.domains])
        twin, before = driven.policy.clone(), driven.policy.memory()
        assert twin.memory() == before
        alike = twin.predict(driven.oracle.state, action)
        assert driven.policy.memory() == before
        answer = driven.do(action)
        assert alike is None or alike == answer
        assert twin.memory() == driven.policy.memory()
        assert twin.snapshot() == driven.policy.snapshot()


def test_the_other_actions_change_only_what_they_name() -> None:
    driven = Driven(Config((FULL, WINDOW), num_blocks=20))
    driven.admit(0, (1,) * 15, 12)
    driven.step()
    assert driven.do(Trim(0)) == driven.do(Trim(0))
    keys = driven.keys
    driven.do(Publish(0, 12))
    assert driven.keys == keys
    driven.do(Forget((1,)))
    assert len(driven.keys) == len(keys) - 1
