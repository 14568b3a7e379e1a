"""Known violations are counted and passed over; one that no longer shows fails the campaign."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import kvproof_stateful
from kvproof_spec.actions import Action, Lookup, Submit
from kvproof_spec.answers import Answer, Done, Snapshot
from kvproof_spec.config import Config, Group
from kvproof_spec.trace import Header, Line, Trace, Verdict, write_trace
from kvproof_stateful import shrinking
from kvproof_stateful.campaign import Budget, Campaign, Result
from kvproof_stateful.coverage import GOALS
from kvproof_stateful.expectations import (
    BadExpectations,
    KnownViolation,
    default_expectations,
    read_expectations,
)
from kvproof_stateful.plan import Asked
from kvproof_stateful.running import Judging, time_limit
from kvproof_stateful.target import Hello, TargetFailed, UnsupportedConfig
from kvproof_stateful.targets.plain import PlainTarget

ROOT = Path(__file__).parents[2]
SMALL = Asked(groups=(Group("full", 1),), num_blocks=6)
CONFIG = Config((Group("full", 1),), num_blocks=4)


class LosesABlock(PlainTarget):
    """With two requests the list of free blocks lacks one."""

    def hello(self) -> Hello:
        return replace(super().hello(), version="1.5", claims=("I1",))

    def snapshot(self) -> Snapshot:
        shown = super().snapshot()
        return replace(shown, free_order=shown.free_order[len(self.requests) > 1 :])


class Mended(PlainTarget):
    """The next version, which no longer loses a block."""

    def hello(self) -> Hello:
        return replace(super().hello(), version="1.6", claims=("I1",))


@pytest.fixture(autouse=True)
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what is found as it is, which takes no time."""

    monkeypatch.setattr(shrinking, "shrink", lambda smallest: None)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A trace that shows the fault: two requests."""
    lines = (
        Line(Submit(0, (1,)), Done()),
        Line(Submit(1, (1,)), Done(), verdict=Verdict("I1", "a block is neither free nor held")),
    )
    path = tmp_path / "kept.ndjson"
    write_trace(path, Trace(Header(CONFIG, "loses a block"), lines))
    return path


def known_i1(kept: Path, versions: str = "<1.6", after: str = "") -> KnownViolation:
    return KnownViolation("I1", SpecifierSet(versions), after, "https://example.org/7", kept)


def run(target: PlainTarget, *known: KnownViolation, actions: int = 300) -> Result:
    return Campaign(target, Judging(), SMALL, Budget(actions=actions), known=known).run()


def test_a_known_violation_is_counted_and_the_campaign_goes_on_and_is_clean(kept: Path) -> None:
    result = run(LosesABlock(), known_i1(kept))
    assert result.exit_code == 0
    assert result.found == []
    assert result.coverage.lines == 300
    assert result.coverage.known["I1"] > 20
    assert result.coverage.to_json()["known_violations"] == {"I1": result.coverage.known["I1"]}


def test_without_the_expectation_it_is_a_violation() -> None:
    result = run(LosesABlock(), actions=40)
    assert result.exit_code == 1
    assert [found.rule for found in result.found] == ["I1"]
    assert not result.coverage.known


def test_an_expectation_of_another_rule_covers_nothing(kept: Path) -> None:
    other = replace(known_i1(kept), rule="I2")
    result = run(LosesABlock(), other, actions=40)
    assert [found.rule for found in result.found] == ["I1"]
    (stale,) = result.stale_expectations
    assert "I2 is expected" in stale
    assert "came out as I1" in stale


def test_an_expectation_that_no_longer_shows_fails_the_campaign_and_says_what_to_do(
    kept: Path,
) -> None:
    result = run(Mended(), known_i1(kept, versions="<=1.6"))
    assert result.exit_code == 1
    assert result.found == []
    (stale,) = result.stale_expectations
    assert stale == (
        "I1 is expected of plain 1.6 (https://example.org/7), but kept.ndjson came out clean: "
        "remove the expectation or narrow its versions"
    )


def test_an_expectation_is_of_its_versions_only(kept: Path) -> None:
    assert run(Mended(), known_i1(kept, versions="<1.6")).exit_code == 0
    result = run(LosesABlock(), known_i1(kept, versions=">=1.6"), actions=40)
    assert result.exit_code == 1
    assert [found.rule for found in result.found] == ["I1"]
    assert result.stale_expectations == []


@pytest.mark.parametrize(
    ("versions", "version", "inside"),
    [
        ("", "0.32.0", True),
        ("==0.32.*", "0.32.1", True),
        ("==0.32.0", "0.32.0+cpu", True),
        ("<0.33", "0.32.0rc1", True),
        ("<0.32", "0.32.0", False),
        (">=0.30,<0.32.1", "0.32.1", False),
    ],
)
def test_versions_are_compared_as_python_does(
    kept: Path, versions: str, version: str, inside: bool
) -> None:
    assert known_i1(kept, versions).covers("I1", version, set()) is inside


def test_what_must_come_before_must_have_come_before(kept: Path) -> None:
    after = known_i1(kept, after="preempted")
    assert after.covers("I1", "1.5", {"hit", "preempted"})
    assert not after.covers("I1", "1.5", {"hit"})
    assert not after.covers("I1", "1.5", set())


def test_a_violation_without_what_must_come_before_is_unexpected(kept: Path) -> None:
    result = run(LosesABlock(), known_i1(kept, after="forget refused"), actions=60)
    assert [found.rule for found in result.found] == ["I1"]
    assert result.exit_code == 1


def test_what_the_violating_answer_itself_reaches_counts_as_before(kept: Path) -> None:
    class RefusesAndLoses(LosesABlock):
        def snapshot(self) -> Snapshot:
            shown = PlainTarget.snapshot(self)
            lost = bool(self.steps) and self.issued > 1
            return replace(shown, free_order=shown.free_order[lost:])

    known = known_i1(kept, after="two steps in flight")
    asked = replace(SMALL, features=frozenset({"full", "async"}))
    made = Campaign(RefusesAndLoses(), Judging(), asked, Budget(actions=600), known=(known,))
    result = made.run()
    assert result.coverage.known["I1"] > 0


def test_the_kept_trace_is_judged_at_its_own_level(kept: Path) -> None:
    result = Campaign(
        LosesABlock(), Judging("safety"), SMALL, Budget(actions=60), known=(known_i1(kept),)
    ).run()
    assert result.stale_expectations == []
    assert result.exit_code == 0


def test_a_kept_trace_that_no_longer_fits_the_target_is_a_bad_expectation(kept: Path) -> None:
    write_trace(kept, Trace(Header(CONFIG, "plain"), (Line(Lookup(0), None),)))
    with pytest.raises(BadExpectations, match=r"kept\.ndjson"):
        run(LosesABlock(), known_i1(kept))


def test_a_kept_trace_whose_configuration_is_no_longer_supported_does_not_end_in_an_error(
    kept: Path,
) -> None:
    class NeedsMoreBlocks(LosesABlock):
        def build(self, config: Config) -> None:
            if config.num_blocks < 5:
                raise UnsupportedConfig("at least 5 blocks")
            super().build(config)

    try:
        result = run(NeedsMoreBlocks(), known_i1(kept))
    except (BadExpectations, TargetFailed):
        return
    assert result.exit_code == 1
    assert result.stale_expectations


def test_a_kept_trace_on_a_target_that_hangs_is_ended(kept: Path) -> None:
    """The time an action may take holds for the kept traces too."""

    class Hangs(LosesABlock):
        def perform(self, action: Action) -> Answer:
            while isinstance(action, Lookup):
                if time.monotonic() > end:
                    pytest.fail("it was not ended")
            return super().perform(action)

    end = time.monotonic() + 5
    lines = (Line(Submit(0, (1,)), Done()), Line(Lookup(0), None))
    write_trace(kept, Trace(Header(CONFIG, "plain"), lines))
    known, budget = (known_i1(kept),), Budget(actions=5)
    with time_limit(0.2):
        result = Campaign(Hangs(), Judging(), SMALL, budget, known=known, action_seconds=0.2).run()
    assert result.exit_code in (1, 3)


FILE = """\
[[violation]]
rule = "I1"
versions = "<0.33"
after = "preempted"
link = "https://example.org/1"
trace = "kept.ndjson"

[[violation]]
rule = "R7"
versions = ""
after = ""
link = "https://example.org/2"
trace = "below/other.ndjson"
"""


def test_a_file_of_known_violations_is_read(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(FILE)
    first, second = read_expectations(path)
    assert first == KnownViolation(
        "I1", SpecifierSet("<0.33"), "preempted", "https://example.org/1", tmp_path / "kept.ndjson"
    )
    assert second.trace == tmp_path / "below" / "other.ndjson"
    assert second.after == ""


def test_an_empty_file_expects_nothing(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text("")
    assert read_expectations(path) == ()


@pytest.mark.parametrize("after", [*GOALS, ""])
def test_every_goal_may_have_to_come_before(tmp_path: Path, after: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(FILE.replace('"preempted"', f'"{after}"'))
    assert read_expectations(path)[0].after == after


def test_the_plain_target_has_no_known_violations() -> None:
    assert default_expectations("plain") is None


def shipped() -> list[Path]:
    folder = Path(kvproof_stateful.__file__).parent / "known"
    return sorted(folder.glob("*.toml"))


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_the_known_violations_that_come_with_kvproof_can_be_read(path: Path) -> None:
    assert default_expectations(path.stem) == path
    for known in read_expectations(path):
        trace = known.read()
        assert trace.verdict is not None, known.trace
        assert trace.verdict.rule == known.rule
        assert known.link.startswith("https://") or (ROOT / known.link).exists(), known.link
