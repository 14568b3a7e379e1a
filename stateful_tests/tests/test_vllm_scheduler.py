"""The genuine Scheduler: a short campaign, its kept trace, and the set-up that it insists on."""

from dataclasses import replace

import pytest

from kvproof_spec.config import Config, Group, Scheduling
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.expectations import default_expectations, read_expectations
from kvproof_stateful.loading import load_target
from kvproof_stateful.plan import Asked, parse_groups
from kvproof_stateful.running import Judging, perform_actions
from kvproof_stateful.target import Target, TargetFailed, UnsupportedConfig

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("vllm")[0]


@pytest.mark.parametrize("groups", ["full:4", "full:4,sliding:4:8", "sliding:4:8"])
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
    for goal in ("hit", "two steps in flight", "preempted", "resumed"):
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
