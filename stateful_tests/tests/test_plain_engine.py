"""Our own scheduler, observed: healthy it breaks no rule, and each broken promise is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop
from typing import ClassVar

import pytest

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.events import KVCacheEvent
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.scheduler import Found, Scheduler, Tracked
from kvproof_reference.steps import Row, SchedulerOutput
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


class SendsOnlyNewBlocksOnAdmission(Scheduler):
    """A request that starts from a hit is sent its new blocks, and not those of the hit."""

    def _whole_table(self, tracked: Tracked, new_blocks: BlockIds) -> BlockIds:
        return new_blocks


class StaleOutputAdvancesComputed(Scheduler):
    """A step that returns for a preempted request counts its tokens as computed."""

    def _stale_output(self, tracked: Tracked, row: Row) -> None:
        super()._stale_output(tracked, row)
        tracked.request.num_computed_tokens += row.num_scheduled_tokens


class PromiseIsNotWithdrawn(Scheduler):
    """Blocks of a request that is preempted in the call that gave them are found later."""

    def _withdraw(self, victim: Tracked) -> None:
        pass


class ResumesBeforeItsStaleOutput(Scheduler):
    """A preempted request is admitted again in the same call, its last step in flight."""

    def _may_resume(self, tracked: Tracked) -> bool:
        return True

    def _may_admit(self, step: object) -> bool:
        return True


class ReturnsAreNotDeferred(Scheduler):
    """Blocks of a request that leaves come back at once, its steps in flight or not."""

    def _free(self, tracked: Tracked, stored: bool = False) -> None:
        self.manager.free(tracked.request, until_stored=stored)


class TokensAreFoundBeforeTheyAreComputed(Scheduler):
    """A sampled token that fills a block makes it findable before a step computes it."""

    def _may_be_found(self, request: Request) -> bool:
        return True


class NothingCountsAsInFlight(Scheduler):
    """The window slides with what is scheduled; a step in flight still reads left of it."""

    def _issued(self, output: SchedulerOutput) -> None:
        super()._issued(output)
        for row in output.rows:
            self.requests[row.request_id].request.num_in_flight_tokens = 0

    def _take(self, tracked: Tracked, row: Row, token: int | None) -> None:
        tracked.request.num_in_flight_tokens = row.num_scheduled_tokens
        super()._take(tracked, row, token)


class StoresFromFreeBlocks(Scheduler):
    """The blocks of a request that is being stored come back at once."""

    def _free(self, tracked: Tracked, stored: bool = False) -> None:
        super()._free(tracked, stored=False)


class LoadsIntoFreeBlocks(Scheduler):
    """The blocks of a request that leaves while it loads come back at once."""

    def _abandon(self, tracked: Tracked) -> None:
        self.manager.free(tracked.request)


class LoadsAreFoundBeforeTheyArrive(Scheduler):
    """What an unordered load is to bring is findable from its beginning."""

    def _allocate_first(self, tracked: Tracked, found: Found, num_tokens: int) -> BlockIds | None:
        return super()._allocate_first(tracked, found._replace(is_unordered=False), num_tokens)


class WhatIsFindableCountsAsUsed(Scheduler):
    """Usage counts free blocks that still answer lookups."""

    def num_used_blocks(self) -> int:
        pool = self.manager.block_pool
        return super().num_used_blocks() + len(pool.keys.keys() & set(pool.free_order()))


class RefusedAdmissionsCountAsHits(Scheduler):
    """A lookup whose request then finds no room counts, each time."""

    def _allocate_first(self, tracked: Tracked, found: Found, num_tokens: int) -> BlockIds | None:
        blocks = super()._allocate_first(tracked, found, num_tokens)
        if blocks is None:
            self.stats.queries += tracked.request.num_tokens
            self.stats.hits += found.num_hit_tokens
        return blocks


class SecondRequestWaitsForEver(Scheduler):
    """Whoever comes is served before request 1."""

    def _first_waiting(self) -> Tracked | None:
        first = super()._first_waiting()
        if first is not None and first.id == 1:
            heappop(self._waiting)
            following = super()._first_waiting()
            self._enqueue(first)
            return following if following is not first else None
        return first


class EachCopyIsAnnouncedAsRemoved(BlockPool):
    """A key's removal is announced with any of its blocks, as by vLLM (#55092)."""

    def evict(self, blocks: Iterable[int]) -> None:
        lost = list(blocks)
        for block in lost if self.events is not None else ():
            for key in self.keys.get(block, ()):
                if len(self.index[key]) > 1 and self.events is not None:
                    self.announce_removed(self.events, key)
        super().evict(lost)


class AnnouncesTooEarly(KVCacheManager):
    """A manager over such a pool."""

    block_pool_class = EachCopyIsAnnouncedAsRemoved


class AnnouncesTooLate(KVCacheManager):
    """What happened is announced when the next thing has."""

    def take_events(self) -> list[KVCacheEvent]:
        late: list[KVCacheEvent] = getattr(self, "late", [])
        self.late = super().take_events()
        return late


def target_with(
    scheduler: type[Scheduler] = Scheduler, manager: type[KVCacheManager] = KVCacheManager
) -> PlainEngineTarget:
    class FaultyTarget(PlainEngineTarget):
        scheduler_class = scheduler
        manager_class = manager

    return FaultyTarget()


class ResumedRowIsAppended(PlainEngineTarget):
    """The worker appends the table of a resumed request to the row that it had before."""

    name: ClassVar[str] = "resumed-row-is-appended"

    def _receive(self, row: Row) -> None:
        if row.kind == "resumed":
            row = replace(row, kind="running")
        super()._receive(row)


class Detected(Exception):
    """Ends a search."""


def search(target: Target, wanted: str, strict: bool) -> None:
    """A campaign until it breaks the rule; what breaks others on the way is passed over."""

    class Search(Campaign):
        def _keep(self, rule: str, run: Run, plan: Plan, hung: bool) -> None:
            if rule == wanted:
                raise Detected

    Search(target, Judging(), Asked(strict=strict), Budget(actions=30_000), seed=1).run()


@pytest.mark.parametrize(
    ("target", "rule", "strict"),
    [
        (target_with(SendsOnlyNewBlocksOnAdmission), "I5", False),
        (ResumedRowIsAppended(), "I5", False),
        (target_with(StaleOutputAdvancesComputed), "R9", False),
        (target_with(ResumesBeforeItsStaleOutput), "R9", False),
        (target_with(TokensAreFoundBeforeTheyAreComputed), "I2", False),
        (target_with(NothingCountsAsInFlight), "R7", False),
        (target_with(ReturnsAreNotDeferred), "I4", True),
        (target_with(StoresFromFreeBlocks), "I4", False),
        (target_with(LoadsIntoFreeBlocks), "I4", False),
        (target_with(LoadsAreFoundBeforeTheyArrive), "I6", False),
        (target_with(WhatIsFindableCountsAsUsed), "R12", False),
        (target_with(RefusedAdmissionsCountAsHits), "R12", False),
        (target_with(SecondRequestWaitsForEver), "R11", False),
        (target_with(manager=AnnouncesTooEarly), "R10", False),
        (target_with(manager=AnnouncesTooLate), "R10", False),
    ],
    ids=lambda value: (
        f"{value.scheduler_class.__name__}-{value.manager_class.__name__}"
        if isinstance(value, PlainEngineTarget)
        else ""
    ),
)
def test_a_broken_promise_falls_by_its_rule(target: Target, rule: str, strict: bool) -> None:
    with pytest.raises(Detected):
        search(target, rule, strict)


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
