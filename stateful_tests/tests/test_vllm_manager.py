"""The genuine KVCacheManager: short campaigns, kept traces, the article's walk-through."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvproof_spec.actions import Allocate, CompleteStep, Issue, Lookup, Output, Release, Submit
from kvproof_spec.answers import Granted, Hit, Refused
from kvproof_spec.config import Config, Group
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.expectations import default_expectations, read_expectations
from kvproof_stateful.loading import load_target
from kvproof_stateful.plan import Asked, parse_groups
from kvproof_stateful.running import Judging, Run, perform_actions
from kvproof_stateful.target import Target

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

EXACT = Judging("exact:vllm-0.32")
FINDINGS = Path(__file__).resolve().parents[2] / "docs" / "findings"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("vllm-manager")[0]


@pytest.mark.parametrize(
    "groups", ["full:4", "full:4,sliding:4:8", "sliding:4:8", "full:2,sliding:2:3"]
)
def test_a_campaign_finds_only_what_is_known(target: Target, groups: str) -> None:
    path = default_expectations("vllm-manager")
    assert path is not None
    campaign = Campaign(
        target,
        EXACT,
        Asked(parse_groups(groups)),
        Budget(actions=5000),
        known=read_expectations(path),
    )
    result = campaign.run()
    assert result.exit_code == 0, (result.found, result.failure, result.stale_expectations)
    assert result.coverage.known["I2"], "the known violation was not even met"


def test_the_kept_traces_still_show(target: Target) -> None:
    path = default_expectations("vllm-manager")
    assert path is not None
    known = read_expectations(path)
    assert {violation.rule for violation in known} == {"I2", "I3", "R1", "R2", "R10"}
    for violation in known:
        trace = violation.read()
        actions = [line.action for line in trace.lines]
        run = perform_actions(target, Judging(), trace.header.config, actions)
        verdict = run.lines[-1].verdict
        assert verdict is not None, violation.trace
        assert verdict.rule == violation.rule


def test_the_articles_walk_through_by_ids(target: Target) -> None:
    """Block size 4, 10 usable blocks; vLLM takes id 0 as the null block."""
    config = Config(groups=(Group("full", 4),), num_blocks=11, max_model_len=128)
    run = Run(target, EXACT, config)
    first = tuple(range(15))

    def free() -> list[int]:
        snapshot = target.snapshot()
        assert snapshot is not None
        return list(snapshot.free_order)

    def allocate(request: int, new: int) -> object:
        run.step(Lookup(request))
        return run.step(Allocate(request, new))

    run.step(Submit(0, first))
    assert allocate(0, 15) == Granted(((1, 2, 3, 4),), ((1, 2, 3, 4),))
    run.step(Issue())
    run.step(CompleteStep(0, (Output(0, 15),)))
    assert run.step(Allocate(0, 1)) == Granted(((1, 2, 3, 4),), ((),))
    run.step(Issue())
    run.step(CompleteStep(1, (Output(0, 16),)))
    assert run.step(Allocate(0, 1)) == Granted(((1, 2, 3, 4, 5),), ((5,),))
    run.step(Issue())
    run.step(CompleteStep(2, (Output(0, 17),)))
    run.step(Release(0, "finish"))
    assert free() == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1]
    run.step(Submit(1, (*range(12), 99)))
    assert run.step(Lookup(1)) == Hit(12, ((1, 2, 3),))
    assert run.step(Allocate(1, 1)) == Granted(((1, 2, 3, 5),), ((5,),))
    assert free() == [6, 7, 8, 9, 10, 4]
    run.step(Submit(2, tuple(range(200, 228))))
    assert isinstance(allocate(2, 28), Refused)
    assert free() == [6, 7, 8, 9, 10, 4]
    run.step(Submit(3, tuple(range(300, 324))))
    assert allocate(3, 24) == Granted(((6, 7, 8, 9, 10, 4),), ((6, 7, 8, 9, 10, 4),))
    snapshot = target.snapshot()
    assert snapshot is not None
    assert snapshot.free_order == ()
    assert snapshot.keys is not None
    held = [copies for _, copies in snapshot.keys]
    assert held.count((4,)) == 1, "the old key of block 4 is gone, its new one stands"


@pytest.mark.parametrize("script", sorted(FINDINGS.glob("*.py")), ids=lambda path: path.stem)
def test_the_findings_scripts_show_the_fault(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
