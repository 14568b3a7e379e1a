"""Our own scheduler, observed: healthy it breaks no rule, and each broken promise is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.request import Request
from kvproof_reference.scheduler import Scheduler, Tracked
from kvproof_reference.steps import Row, SchedulerOutput
from kvproof_spec.actions import Action, CompleteStep, Issue, Output, Submit
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


def target_with(scheduler: type[Scheduler]) -> PlainEngineTarget:
    class FaultyTarget(PlainEngineTarget):
        scheduler_class = scheduler

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
    ],
    ids=lambda value: (
        value.scheduler_class.__name__ if isinstance(value, PlainEngineTarget) else ""
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


# What it declines


def test_it_needs_a_scheduling() -> None:
    with pytest.raises(UnsupportedConfig, match="needs a scheduling"):
        PlainEngineTarget().reset(replace(PRESSED, scheduling=None))


def test_it_takes_no_request_that_can_outgrow_the_pool() -> None:
    target = PlainEngineTarget()
    target.reset(PRESSED)
    with pytest.raises(UnsupportedConfig, match="too long for the pool"):
        target.perform(Submit(0, tuple(range(25)), max_tokens=4))
