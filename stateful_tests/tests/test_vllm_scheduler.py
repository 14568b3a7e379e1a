"""The genuine Scheduler: a short campaign, its kept trace, and the set-up that it insists on."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import pytest

from kvproof_spec.actions import (
    Action,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Issue,
    Output,
    Release,
    Submit,
)
from kvproof_spec.answers import Answer, Numbers, Returned, Scheduled, ScheduledLoad, Updated
from kvproof_spec.config import Config, Group, Scheduling
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.expectations import default_expectations, read_expectations
from kvproof_stateful.loading import load_target
from kvproof_stateful.plan import Asked, parse_groups
from kvproof_stateful.running import Judging, perform_actions
from kvproof_stateful.target import Target, TargetFailed, UnsupportedConfig

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


REACHED = (
    *("hit", "hit of a step in flight", "hit inside a block", "two steps in flight"),
    *("preempted", "resumed", "resumed with a hit", "stale output", "outlived", "drained"),
    *("load", "load of everything", "load outlived", "external beside a state"),
    *("copied", "copied for the cache", "stored", "store outlived"),
)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("vllm")[0]


@pytest.mark.parametrize(
    "groups",
    ["full:4", "full:4,sliding:4:8", "sliding:4:8", "full:4,chunked:4:8", "full:4,state:4"],
)
def test_a_campaign_finds_only_what_is_known(target: Target, groups: str) -> None:
    path = default_expectations("vllm")
    assert path is not None
    campaign = Campaign(
        target,
        Judging(),
        Asked(parse_groups(groups)),
        Budget(actions=8000),
        known=read_expectations(path),
    )
    result = campaign.run()
    assert result.exit_code == 0, (result.found, result.failure, result.stale_expectations)
    for goal in ("hit", "two steps in flight", "preempted", "resumed", "load", "stored"):
        assert result.coverage.goals[goal], f"{goal} was not reached"


def test_a_campaign_over_everything_reaches_what_the_scheduler_can(target: Target) -> None:
    path = default_expectations("vllm")
    assert path is not None
    known = read_expectations(path)
    result = Campaign(target, Judging(), Asked(), Budget(actions=12_000), seed=2, known=known).run()
    assert result.exit_code == 0, (result.found, result.failure, result.never_evaluated)
    for goal in REACHED:
        assert result.coverage.goals[goal], f"{goal} was not reached"


def test_the_kept_trace_still_shows(target: Target) -> None:
    path = default_expectations("vllm")
    assert path is not None
    for violation in read_expectations(path):
        trace = violation.read()
        actions = [line.action for line in trace.lines]
        run = perform_actions(target, Judging(), trace.header.config, actions)
        verdict = run.lines[-1].verdict
        assert verdict is not None, violation.trace
        assert verdict.rule == violation.rule


CONFIG = Config(
    groups=(Group("full", 4),),
    num_blocks=9,
    max_model_len=128,
    scheduling=Scheduling(asynchronous=True),
)


def test_a_scheduler_that_quietly_became_another_fails_the_target(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the CPU platform does: asynchronous scheduling is asked for, and switched off."""
    vllm_config = pytest.importorskip("vllm.config").VllmConfig
    target.reset(CONFIG)
    monkeypatch.setattr(vllm_config, "max_concurrent_batches", property(lambda config: 1))
    with pytest.raises(TargetFailed, match="max_concurrent_batches is 1, asked for 2"):
        target.reset(CONFIG)


def test_what_vllm_refuses_fails_the_target(target: Target) -> None:
    """More requests than tokens a step."""
    refused = Scheduling(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(TargetFailed, match="not set up as asked: vLLM refuses"):
        target.reset(replace(CONFIG, scheduling=refused))


def test_deferred_returns_without_asynchronous_scheduling_are_unsupported(target: Target) -> None:
    with pytest.raises(UnsupportedConfig, match="defers returns"):
        target.reset(replace(CONFIG, defers_returns=True, scheduling=Scheduling()))
    with pytest.raises(UnsupportedConfig, match="scheduling"):
        target.reset(replace(CONFIG, scheduling=None))


# Transfers, numbers and announcements, one by one

WITH_A_CONNECTOR = replace(
    CONFIG, scheduling=Scheduling(connector=True, whole_sequence_check=False), events=True
)


def answers(target: Target, config: Config, actions: Sequence[Action]) -> list[Answer]:
    """What the target answers, all of it allowed."""
    run = perform_actions(target, Judging(), config, actions)
    assert run.lines[-1].verdict is None, run.lines[-1].verdict
    return [line.answer for line in run.lines if line.answer is not None]


def scheduled(answer: Answer) -> Scheduled:
    assert isinstance(answer, Scheduled)
    return answer


def updated(answer: Answer) -> Updated:
    assert isinstance(answer, Updated)
    return answer


def test_ordered_tokens_come_with_the_first_row(target: Target) -> None:
    asked: list[Action] = [Submit(0, tuple(range(10)), remote=9), Issue()]
    (row,) = scheduled(answers(target, WITH_A_CONNECTOR, asked)[-1]).rows
    assert (row.start, row.tokens, row.external) == (8, 2, 8)


LOADED: list[Action] = [
    Submit(0, tuple(range(10)), remote=10, unordered=True),
    Issue(),
    CompleteLoad(0, 8),
    CompleteStep(0, ()),
    Issue(),
]


def test_a_request_goes_on_behind_its_load(target: Target) -> None:
    seen = answers(target, WITH_A_CONNECTOR, LOADED)
    assert scheduled(seen[1]).loads == (ScheduledLoad(0, 0, 8),)
    (row,) = scheduled(seen[-1]).rows
    assert (row.start, row.tokens, row.admitted, row.worker) == (8, 2, True, ((1, 2, 3),))


def test_a_load_does_not_end_before_a_step_returns(target: Target) -> None:
    asynchronous = replace(WITH_A_CONNECTOR.scheduling or Scheduling(), asynchronous=True)
    config = replace(WITH_A_CONNECTOR, scheduling=asynchronous, defers_returns=True)
    asked: list[Action] = [*LOADED[:3], Issue()]
    seen = answers(target, config, asked)
    assert scheduled(seen[-1]).rows == ()


def test_the_blocks_of_an_aborted_load_are_kept_until_it_ends(target: Target) -> None:
    asked: list[Action] = [
        *LOADED[:2],
        Release(0, "abort"),
        CompleteLoad(0, 0),
        CompleteStep(0, ()),
    ]
    seen = answers(target, WITH_A_CONNECTOR, asked)
    assert seen[2] == Returned((1, 2))
    assert updated(seen[-1]).deferred == ()


def test_the_blocks_of_a_stored_request_are_kept_until_its_store_ends(target: Target) -> None:
    asked: list[Action] = [
        *(Submit(0, tuple(range(9)), max_tokens=1, stored=True), Issue()),
        *(CompleteStep(0, (Output(0, 7),)), Issue(), CompleteStore(0), CompleteStep(1, ())),
    ]
    seen = answers(target, WITH_A_CONNECTOR, asked)
    ended = updated(seen[2])
    assert (ended.finished, ended.stored, ended.deferred) == ((0,), (0,), (1, 2, 3))
    assert updated(seen[-1]).deferred == ()


def test_numbers_are_those_of_the_scheduler_s_own_metrics(target: Target) -> None:
    asked: list[Action] = [
        *(Submit(0, tuple(range(9)), max_tokens=4), Issue(), CompleteStep(0, (Output(0, 7),))),
        *(Submit(1, tuple(range(9)), max_tokens=4), Issue()),
        CompleteStep(1, (Output(0, 7), Output(1, 7))),
    ]
    assert updated(answers(target, CONFIG_OF_TURNS, asked)[-1]).numbers == Numbers(4, 18, 8, 0)


CONFIG_OF_TURNS = replace(CONFIG, scheduling=Scheduling(whole_sequence_check=False))


def test_transfers_need_a_connector(target: Target) -> None:
    target.reset(CONFIG_OF_TURNS)
    with pytest.raises(UnsupportedConfig, match="without a connector"):
        target.perform(Submit(0, (1, 2, 3, 4, 5), remote=4))


def test_unordered_loads_need_deferred_returns_where_steps_overlap(target: Target) -> None:
    target.reset(replace(CONFIG, scheduling=Scheduling(asynchronous=True, connector=True)))
    with pytest.raises(UnsupportedConfig, match="defer returns"):
        target.perform(Submit(0, (1, 2, 3, 4, 5), remote=4, unordered=True))


def test_a_release_that_was_never_tried_fails_the_target(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = import_module("kvproof_stateful.targets.vllm_setup")
    monkeypatch.setattr(setup, "KNOWN_VERSIONS", ("0.1.0",))
    with pytest.raises(TargetFailed, match=r"was not tried: 0\.1\.0 were"):
        target.reset(CONFIG)
