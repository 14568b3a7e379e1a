"""`kvproof faults`: what it measures, when it calls a fault caught, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from kvproof_spec.choices import KINDS
from kvproof_spec.trace import Trace, read_trace
from kvproof_stateful.campaign import Budget
from kvproof_stateful.cli import main
from kvproof_stateful.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from kvproof_stateful.faults import FAULTS, PARTS, command
from kvproof_stateful.faults.measuring import COMPARED, Comparison, Row
from kvproof_stateful.faults.search import UniformSearch, search
from kvproof_stateful.plan import Asked
from kvproof_stateful.running import Judging
from kvproof_stateful.targets.plain import PlainTarget

DOUBLE_FREE = "double-free-in-one-batch"
RARE = "hits-held-group-by-group"  # in no first run
KEPT = Path(__file__).parents[2] / "counterexamples"


def double_free_trace() -> Trace:
    return read_trace(KEPT / f"fault-{DOUBLE_FREE}.ndjson")


def test_each_fault_is_of_a_part_and_says_what_it_is() -> None:
    modules = {part.__name__ for part in PARTS}
    for fault in FAULTS.values():
        assert fault.part.__module__ in modules
        assert fault.sentence.endswith(".")
        assert fault.target().hello().name.endswith(f"+{fault.name}")


def test_it_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "--json"]) == EXIT_CLEAN
    listed = json.loads(capsys.readouterr().out)["faults"]
    assert [fault["name"] for fault in listed] == list(FAULTS)
    assert main(["faults", "--list", DOUBLE_FREE]) == EXIT_CLEAN
    assert "A release gives its blocks back twice in one batch." in capsys.readouterr().out


def test_a_fault_is_measured_and_its_trace_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["faults", DOUBLE_FREE, "--seeds", "2", "--write", str(tmp_path), "--json"]
    assert main(arguments) == EXIT_CLEAN
    told = capsys.readouterr()
    (row,) = json.loads(told.out)["faults"]
    assert (row["name"], row["rule"]) == (DOUBLE_FREE, "I1")
    assert (row["caught"], row["caught_by_rule"]) == (True, "I1")
    assert row["actions"] > 0
    assert row["seconds"] > 0
    assert (row["found"], row["searches"], row["first_rules"]) == (2, 2, {"I1": 2})
    trace = read_trace(tmp_path / f"fault-{DOUBLE_FREE}.ndjson")
    assert len(trace.lines) == row["trace_actions"]
    assert "1 of 1: double-free-in-one-batch" in told.err


def test_a_search_in_vain_is_no_catch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", RARE, "--time", "0.000001", "--json"]) == EXIT_FAILED
    (row,) = json.loads(capsys.readouterr().out)["faults"]
    assert row["caught"] is False
    assert row["caught_by_rule"] is row["actions"] is row["trace_actions"] is None
    assert main(["faults", RARE, "--time", "0.000001"]) == EXIT_FAILED
    assert "nothing (not caught)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none-such"], "no fault none-such (see: kvproof faults --list)"),
        (["--seeds", "0"], "--seeds and --workers are at least 1"),
        (["--time", "0"], "--time is in seconds, more than 0"),
        (["--write", "nowhere"], "--write nowhere is no directory"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["faults", *arguments]) == EXIT_USAGE
    assert capsys.readouterr().err == f"kvproof: {told}\n"


def test_an_interrupt_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Row(DOUBLE_FREE, ((10, 0.5),), {"I1": 1}, double_free_trace())

    def measure(name: str, measuring: object) -> Row:
        if name != DOUBLE_FREE:
            raise KeyboardInterrupt
        return measured

    monkeypatch.setattr(command, "measure", measure)
    assert main(["faults", DOUBLE_FREE, "one-bit-hash", "--json"]) == EXIT_INTERRUPTED
    (row,) = json.loads(capsys.readouterr().out)["faults"]
    assert row["name"] == DOUBLE_FREE


def test_it_is_caught_if_most_searches_see_its_rule_broken_first() -> None:
    trace = double_free_trace()
    found = ((100, 1.0), (300, 3.0), (200, 2.0))
    assert Row(DOUBLE_FREE, found, {"I1": 2, "I2": 1}, trace).caught
    assert not Row(DOUBLE_FREE, found, {"I1": 1, "I2": 2}, trace).caught
    assert not Row(DOUBLE_FREE, found, {"I1": 3}, None).caught
    assert not Row(DOUBLE_FREE, (found[0], None), {"I1": 1}, trace).caught


def test_a_search_in_vain_counts_as_longer_than_any_other() -> None:
    assert Row(DOUBLE_FREE, ((100, 1.0), None, (300, 3.0)), {"I1": 2}, None).actions == 300
    assert Row(DOUBLE_FREE, ((100, 1.0), None, None), {"I1": 1}, None).seconds is None


def test_two_processes_measure_in_the_order_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["hit-of-all-tokens", DOUBLE_FREE]
    arguments = ["faults", *names, "--seeds", "1", "--workers", "2", "--json"]
    assert main(arguments) == EXIT_CLEAN
    rows = json.loads(capsys.readouterr().out)["faults"]
    assert [row["name"] for row in rows] == names


def test_uniform_choice_prefers_nothing() -> None:
    plain = UniformSearch(PlainTarget(), Judging(), Asked(), Budget(actions=1))
    plain.hello = plain.target.hello()
    assert plain.draw_weights(Random(0)) == dict.fromkeys(KINDS, 1.0)
    prompts = [prompt for seed in range(20) for prompt in plain.draw_scope(Random(seed)).prompts]
    assert len(set(prompts)) > 100
    assert {symbol for prompt in prompts for symbol in prompt} == {1, 2, 3}


def test_uniform_choice_finds_what_is_everywhere() -> None:
    found = search(FAULTS[DOUBLE_FREE], 0, Budget(actions=20_000), UniformSearch)
    assert found is not None
    assert found.first_rule == "I1"


@pytest.mark.parametrize(("uniform", "code"), [(200.0, EXIT_CLEAN), (199.0, EXIT_FAILED)])
def test_generation_must_take_half_the_actions_of_uniform_choice(
    uniform: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(name: str, seeds: object, most_actions: int) -> Comparison:
        return Comparison(name, 100.0, uniform)

    monkeypatch.setattr(command, "compare", compare)
    assert main(["faults", "--compare", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["compared"]] == list(COMPARED)
    assert (told["actions"], told["uniform_actions"]) == (100.0, uniform)
    assert main(["faults", "--compare"]) == code
    assert "by uniform choice" in capsys.readouterr().out


def test_twelve_faults_are_compared() -> None:
    assert len(COMPARED) == 12
    assert set(COMPARED) <= FAULTS.keys()
