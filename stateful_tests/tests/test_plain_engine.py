"""Our own scheduler, observed: healthy it breaks no rule, and each broken promise is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.scheduler import Scheduler, Tracked
from kvproof_spec.actions import (
    Action,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Issue,
    Output,
    Submit,
)
from kvproof_spec.config import Config, Group, Scheduling
from kvproof_spec.trace import Verdict
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.faults.events import AnnouncesTooLate, EachCopyIsAnnouncedAsRemoved
from kvproof_stateful.plan import Asked, Plan, parse_groups
from kvproof_stateful.running import Judging, Run, perform_actions
from kvproof_stateful.target import Target, UnsupportedConfig
from kvproof_stateful.targets.plain_engine import PlainEngineTarget

GOALS = (
    "hit",
    "two steps in flight",
    "preempted",
    "unissued",
    "resumed",
    "resumed with a hit",
    "stale output",
    "outlived",
)


@pytest.mark.parametrize("groups", ["full:4", "sliding:4:8", "full:4,sliding:4:8"])
def test_a_campaign_breaks_no_rule(groups: str) -> None:
    asked = Asked(parse_groups(groups))
    result = Campaign(PlainEngineTarget(), Judging(), asked, Budget(actions=3000)).run()
    assert result.exit_code == 0, (result.found, result.failure, result.never_evaluated)


def test_a_campaign_reaches_what_a_scheduler_can() -> None:
    result = Campaign(PlainEngineTarget(), Judging(), Asked(), Budget(actions=8000), seed=1).run()
    assert result.exit_code == 0, (result.found, result.failure, result.never_evaluated)
    for goal in GOALS:
        assert result.coverage.goals[goal], f"{goal} was not reached"


def test_a_campaign_breaks_no_rule_when_steps_are_not_ordered() -> None:
    asked = Asked(strict=True)
    result = Campaign(PlainEngineTarget(), Judging(), asked, Budget(actions=3000)).run()
    assert result.exit_code == 0, (result.found, result.failure, result.never_evaluated)


# Broken promises


class PromiseIsNotWithdrawn(Scheduler):
    """Blocks of a request that is preempted in the call that gave them are found later."""

    def _withdraw(self, victim: Tracked) -> None:
        pass


class TokensAreFoundBeforeTheyAreComputed(Scheduler):
    """A sampled token that fills a block makes it findable before a step computes it."""

    def _may_be_found(self, request: Request) -> bool:
        return True


class AnnouncesTooEarly(KVCacheManager):
    """A manager over such a pool."""

    block_pool_class = EachCopyIsAnnouncedAsRemoved


def target_with(
    scheduler: type[Scheduler] = Scheduler, manager: type[KVCacheManager] = KVCacheManager
) -> PlainEngineTarget:
    class FaultyTarget(PlainEngineTarget):
        scheduler_class = scheduler
        manager_class = manager

    return FaultyTarget()


class Detected(Exception):
    """Ends a search."""


def search(target: Target, wanted: str) -> None:
    """A campaign until it breaks the rule; what breaks others on the way is passed over."""

    class Search(Campaign):
        def _keep(self, rule: str, run: Run, plan: Plan, hung: bool) -> None:
            if rule == wanted:
                raise Detected

    Search(target, Judging(), Asked(), Budget(actions=30_000), seed=1).run()


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        (target_with(TokensAreFoundBeforeTheyAreComputed), "I2"),
        (target_with(manager=AnnouncesTooEarly), "R10"),
        (target_with(manager=AnnouncesTooLate), "R10"),
    ],
    ids=lambda value: (
        f"{value.scheduler_class.__name__}-{value.manager_class.__name__}"
        if isinstance(value, PlainEngineTarget)
        else ""
    ),
)
def test_a_broken_promise_falls_by_its_rule(target: Target, rule: str) -> None:
    with pytest.raises(Detected):
        search(target, rule)


PRESSED = Config(
    groups=(Group("full", 4),),
    num_blocks=8,
    max_model_len=128,
    scheduling=Scheduling(
        policy="priority", long_prefill_token_threshold=6, whole_sequence_check=False
    ),
)


def preempted_in_the_call_that_gave_it_blocks() -> list[Action]:
    """Request 0 has 12 tokens computed, and full blocks for 16, when request 1 takes one."""
    return [
        Submit(0, tuple(range(18)), priority=9, max_tokens=4),
        Issue(),
        CompleteStep(0, ()),
        Submit(1, tuple(range(100, 112)), priority=0, max_tokens=1),
        Issue(),
        CompleteStep(1, ()),
        Issue(),
        CompleteStep(2, (Output(1, 5),)),
        Issue(),
    ]


def verdict_of(target: Target, actions: list[Action]) -> Verdict | None:
    run = perform_actions(target, Judging(), PRESSED, actions)
    assert len(run.lines) == len(actions)
    return run.lines[-1].verdict


def test_a_promise_that_is_not_withdrawn_is_found_by_its_request() -> None:
    verdict = verdict_of(
        target_with(PromiseIsNotWithdrawn), preempted_in_the_call_that_gave_it_blocks()
    )
    assert verdict is not None
    assert verdict.rule == "I2"


def test_a_promise_that_is_withdrawn_is_not_found() -> None:
    assert verdict_of(PlainEngineTarget(), preempted_in_the_call_that_gave_it_blocks()) is None


# What the core could take for somebody else's


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def stored_one_after_the_other() -> list[Action]:
    """Request 1 hits the blocks that a store of request 0 keeps, and is stored when that ends."""
    return [
        Submit(0, tokens(9), max_tokens=1, stored=True),
        Issue(),
        CompleteStep(0, (Output(0, 7),)),
        Submit(1, tokens(9), max_tokens=1, stored=True),
        Issue(),
        CompleteStore(0),
        CompleteStep(1, (Output(1, 7),)),
        Issue(),
        CompleteStore(1),
        CompleteStep(2, ()),
    ]


def ended_together() -> list[Action]:
    """Requests 0 and 1 share blocks and end with the same step; one of them is stored."""
    return [
        Submit(0, tokens(9), max_tokens=1, stored=True),
        Submit(1, tokens(9), max_tokens=1),
        Issue(),
        CompleteStep(0, (Output(0, 7), Output(1, 7))),
        Issue(),
        CompleteStore(0),
        CompleteStep(1, ()),
    ]


def loaded_behind_a_row_of_the_same_call() -> list[Action]:
    """The load of request 1 begins behind blocks that request 0 is to compute in this step."""
    return [
        Submit(0, tokens(9), max_tokens=2),
        Submit(1, tokens(14), max_tokens=2, remote=12, unordered=True),
        Issue(),
        CompleteLoad(1, 12),
        CompleteStep(0, (Output(0, 7),)),
        Issue(),
    ]


GROUPS = ("full:4", "full:4,sliding:4:8", "full:4,chunked:4:8")


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    "actions", [stored_one_after_the_other, ended_together, loaded_behind_a_row_of_the_same_call]
)
def test_what_is_kept_or_loaded_is_told_apart(
    actions: Callable[[], list[Action]], groups: str
) -> None:
    config = Config(parse_groups(groups), 32, max_model_len=128, scheduling=Scheduling())
    run = perform_actions(PlainEngineTarget(), Judging(), config, actions())
    assert len(run.lines) == len(actions())
    assert run.lines[-1].verdict is None


# What it declines


def test_it_needs_a_scheduling() -> None:
    with pytest.raises(UnsupportedConfig, match="needs a scheduling"):
        PlainEngineTarget().reset(replace(PRESSED, scheduling=None))


def test_it_takes_no_request_that_can_outgrow_the_pool() -> None:
    target = PlainEngineTarget()
    target.reset(PRESSED)
    with pytest.raises(UnsupportedConfig, match="too long for the pool"):
        target.perform(Submit(0, tuple(range(25)), max_tokens=4))
