"""`machine_for` makes any target a state machine, which finds its faults and shrinks them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import ClassVar

import pytest
from hypothesis import Phase, Verbosity, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvproof_spec.actions import Action, CompleteStep, Issue, Release, Submit
from kvproof_spec.answers import Answer, Hit
from kvproof_spec.config import Config
from kvproof_spec.trace import read_trace
from kvproof_stateful import machine_for
from kvproof_stateful.faults import FAULTS
from kvproof_stateful.loading import NoSuchTarget, load_target
from kvproof_stateful.machine import INTERRUPTIONS, UNDISTURBED, Broken
from kvproof_stateful.plan import ImpossibleConfig
from kvproof_stateful.running import TARGET_FAILED, UnknownLevel, judge_trace
from kvproof_stateful.running import Judging as Judged
from kvproof_stateful.target import Hello, Target, UnsupportedConfig
from kvproof_stateful.targets.driven import Progress
from kvproof_stateful.targets.plain import PlainTarget

FEW = settings(
    max_examples=10,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=UNDISTURBED,
    report_multiple_bugs=False,
    verbosity=Verbosity.quiet,
)
UNTIL_FOUND = settings(FEW, max_examples=1000, stateful_step_count=50)


def run(machine: type[RuleBasedStateMachine], limits: settings = FEW) -> None:
    run_state_machine_as_test(machine, settings=limits)


def found(machine: type[RuleBasedStateMachine], limits: settings = UNTIL_FOUND) -> Broken:
    with pytest.raises(Broken) as raised:
        run(machine, limits)
    return raised.value


class TestThePlainManager(machine_for("plain").TestCase):  # type: ignore[misc]
    """As an engine's own suite would have it."""

    settings = FEW


@pytest.mark.parametrize("target", ["plain", PlainTarget, PlainTarget()], ids=repr)
def test_a_target_is_a_name_a_class_or_an_instance(target: str | type[Target] | Target) -> None:
    run(machine_for(target, level="exact:vllm-0.32"), settings(FEW, max_examples=3))


@pytest.mark.parametrize(
    ("fault", "features", "most"),
    [
        ("double-free-in-one-batch", "full,preempt,unissued", 6),
        ("one-bit-hash", "full", 8),
        ("window-block-returned-in-flight", "sliding,async", 12),
    ],
)
def test_a_seeded_fault_is_found_by_its_rule_and_shrunk(
    fault: str, features: str, most: int, tmp_path: Path
) -> None:
    target = FAULTS[fault].target()
    broken = found(machine_for(target, features=features, out=tmp_path))
    assert broken.rule == FAULTS[fault].rule
    text = str(broken)
    assert text.startswith(f"{broken.rule}: ")
    assert "\n  witness: " in text
    (path,) = tmp_path.glob("*.ndjson")
    assert f"replay: kvproof replay {path}" in text
    trace = read_trace(path)
    assert len(trace.lines) <= most
    assert text.count(" step=") == len(trace.lines)
    verdict = judge_trace(Judged(), trace)
    assert verdict is not None
    assert verdict.rule == broken.rule


def test_without_a_folder_it_says_how_to_get_a_trace() -> None:
    target = FAULTS["double-free-in-one-batch"].target()
    assert "out=FOLDER" in str(found(machine_for(target, features="full,preempt")))


@pytest.mark.slow
def test_hypothesis_may_shrink_its_own_run_too() -> None:
    target = FAULTS["double-free-in-one-batch"].target()
    limits = settings(
        UNTIL_FOUND, phases=[Phase.generate, Phase.shrink], verbosity=Verbosity.normal
    )
    broken = found(machine_for(target, groups="full:4", features="full,preempt"), limits)
    assert broken.rule == "I1"
    shown = "\n".join(broken.__notes__)
    assert "state.act(taken=Lookup(request=" in shown
    assert shown.count("state.act(") <= 12


def test_its_test_case_reports_what_kvproof_has_shrunk() -> None:
    case = machine_for(FAULTS["double-free-in-one-batch"].target()).TestCase
    assert Phase.shrink not in case.settings.phases
    assert case.settings.verbosity == Verbosity.quiet


class DeclinesWindows(PlainTarget):
    """It cannot be built with a window, though it declares them."""

    name = "declines-windows"

    def reset(self, config: Config) -> None:
        if any(group.kind == "sliding" for group in config.groups):
            raise UnsupportedConfig("no windows today")
        super().reset(config)


def test_what_a_target_declines_is_left_out() -> None:
    run(machine_for(DeclinesWindows))
    with pytest.raises(Unsatisfiable):
        run(machine_for(DeclinesWindows, groups="sliding:4:8"))


class Raises(PlainTarget):
    """It cannot look up."""

    name = "raises"

    def lookup(self, progress: Progress) -> Hit:
        raise RuntimeError("no lookups today")


def test_a_target_that_fails_is_reported_with_its_steps(tmp_path: Path) -> None:
    broken = found(machine_for(Raises, features="full", out=tmp_path))
    assert broken.rule == TARGET_FAILED
    assert "raised RuntimeError: no lookups today" in str(broken)
    assert "test_machine:Raises" in str(broken)
    assert [path.name for path in tmp_path.iterdir()] == ["target-failed-raises.ndjson"]


def test_known_violations_do_not_fail_it(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(
        '[[violation]]\nrule = "I1"\nversions = ">=0"\nafter = ""\nlink = ""\ntrace = ""\n'
    )
    target = FAULTS["double-free-in-one-batch"].target()
    run(machine_for(target, features="full,preempt", known=known))


THIRD_PARTY = """\
    from kvproof_stateful.targets.plain import PlainTarget

    class OurTarget(PlainTarget):
        name = "ours"
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target of somebody else's, importable from the current directory."""
    (tmp_path / "somebody_elses.py").write_text(dedent(THIRD_PARTY))
    info = tmp_path / "somebody_elses-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-elses\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvproof.targets]\nours = somebody_elses:OurTarget\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "somebody_elses", raising=False)
    return tmp_path


def test_a_third_partys_class_plugs_in_by_name(third_party: Path) -> None:
    run(machine_for("somebody_elses:OurTarget"), settings(FEW, max_examples=2))
    assert load_target("somebody_elses:OurTarget")[1].name == "ours"


def test_a_third_partys_entry_point_plugs_in(
    third_party: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(third_party)
    run(machine_for("ours"), settings(FEW, max_examples=2))


class Observed(PlainTarget):
    """What a target that schedules itself says of itself, and is asked for."""

    name = "observed"
    asked: ClassVar[set[type[Action]]] = set()

    def hello(self) -> Hello:
        return replace(super().hello(), observed=True)

    def perform(self, action: Action) -> Answer:
        assert self.config.scheduling is not None
        self.asked.add(type(action))
        return super().perform(action)


def test_an_observed_target_is_asked_for_what_goes_around_its_scheduler() -> None:
    run(machine_for(Observed, features="full,abort"))
    assert Observed.asked == {Submit, Issue, CompleteStep, Release}


def test_our_own_engine_refines_the_spec() -> None:
    run(machine_for("plain-engine"))


def test_what_cannot_be_is_said_when_the_machine_is_made() -> None:
    with pytest.raises(NoSuchTarget, match="module:Class"):
        machine_for("nope")
    with pytest.raises(UnknownLevel, match="contract"):
        machine_for("plain", level="nope")
    with pytest.raises(ImpossibleConfig, match="lookahead"):
        machine_for("plain", features="nope")
    with pytest.raises(ImpossibleConfig, match="BLOCK_SIZE"):
        machine_for("plain", groups="nope")


def test_interruptions_are_kinds_of_choices() -> None:
    from kvproof_spec.choices import KINDS

    assert set(INTERRUPTIONS) < set(KINDS)
