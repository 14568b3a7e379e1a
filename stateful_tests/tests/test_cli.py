"""The command line, mostly in processes of its own: exit codes, traces, replay, reports."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import pytest

from kvproof_spec.choices import FEATURES, KINDS
from kvproof_spec.invariants import RULES
from kvproof_stateful.cli import EXIT_CODES, main
from kvproof_stateful.coverage import GOALS
from kvproof_stateful.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_VIOLATION

HERE = Path(__file__).parent
SECONDS = 60
"""What a command may take before the test gives up on it."""

COMMAND = (sys.executable, "-m", "kvproof_stateful.cli")
FAULTY = ("--target", "loses-a-block", "--actions", "60")


class Outcome(NamedTuple):
    code: int | str | None
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.out)
        return report


Kvproof = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets of broken_targets.py, installed here and in the processes started here."""
    folder = tmp_path / "site"
    run_path(str(HERE / "broken_targets.py"))["install"](folder)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(HERE))))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kvproof(capfd: pytest.CaptureFixture[str]) -> Kvproof:
    """The command in this process."""

    def run(*arguments: str) -> Outcome:
        code: int | str | None
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        shown = capfd.readouterr()
        return Outcome(code, shown.out, shown.err)

    return run


def kvproof_apart(*arguments: str) -> Outcome:
    """The command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def traces(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.ndjson"))


HELP = ("", "campaign", "replay", "show", "scenarios", "targets", "bench", "bench campaign")


@pytest.mark.parametrize("command", HELP)
def test_every_command_explains_itself(kvproof: Kvproof, command: str) -> None:
    outcome = kvproof(*command.split(), "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert f"usage: kvproof {command}".strip() in outcome.out


@pytest.mark.parametrize("command", ["", "campaign", "replay", "show", "scenarios", "targets"])
def test_the_exit_codes_are_explained(kvproof: Kvproof, command: str) -> None:
    out = kvproof(*command.split(), "--help").out
    assert EXIT_CODES in out
    assert [line.split()[0] for line in EXIT_CODES.splitlines()[1:]] == ["0", "1", "2", "3", "130"]


@pytest.mark.parametrize("command", ["campaign", "replay", "show", "scenarios"])
def test_help_has_examples(kvproof: Kvproof, command: str) -> None:
    _, _, examples = kvproof(command, "--help").out.partition("examples:\n")
    assert f"  kvproof {command}" in examples


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kvproof_stateful.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    print('imported:', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    imported = {name.partition(".")[0] for name in last.split()}
    assert "kvproof_stateful" in imported
    heavy = {"hypothesis", "rich", "torch", "vllm", "kvproof_spec", "kvproof_reference"}
    assert not imported & heavy


def test_help_answers_in_under_three_tenths_of_a_second() -> None:
    """In processor time, which a busy machine does not lengthen much; the best of five."""

    def used() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(used() for _ in range(5)) < 0.3


def test_a_clean_campaign_ends_with_0(kvproof: Kvproof) -> None:
    outcome = kvproof("campaign", "--actions", "2000", "--groups", "full:4,sliding:4:8")
    assert outcome.code == EXIT_CLEAN, outcome
    assert "NO VIOLATION  plain" in outcome.out
    assert "14 of 17 rules evaluated" in outcome.out
    assert not traces("kvproof-out")


def test_what_a_target_shows_no_evidence_of_is_reported_as_not_evaluated(kvproof: Kvproof) -> None:
    out = kvproof("campaign", "--actions", "300").out
    row = next(line for line in out.splitlines() if line.split()[:1] == ["R9"])
    assert row.rstrip().endswith("not evaluated: the target shows no evidence")


def test_a_violation_ends_with_1_and_is_shown_saved_and_replayable(kvproof: Kvproof) -> None:
    outcome = kvproof("campaign", *FAULTY, "--out", "found")
    assert outcome.code == EXIT_VIOLATION, outcome
    (path,) = traces("found")
    assert "VIOLATED  I1" in outcome.out
    assert f"kvproof replay {path} --target loses-a-block" in outcome.out
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header["kvproof"] == 1
    assert header["target"] == "loses-a-block"
    assert all(isinstance(line["action"], dict) for line in lines)
    assert [line["action"]["type"] for line in lines] == ["Submit", "Submit"]
    assert lines[-1]["verdict"]["rule"] == "I1"
    assert not any("verdict" in line for line in lines[:-1])

    recorded = kvproof("replay", str(path))
    assert recorded.code == EXIT_VIOLATION
    assert "I1: " in recorded.out
    assert "otherwise" not in recorded.out

    same = kvproof("replay", str(path), "--target", "loses-a-block")
    assert same.code == EXIT_VIOLATION
    assert "otherwise" not in same.out

    healthy = kvproof("replay", str(path), "--target", "plain")
    assert healthy.code == EXIT_CLEAN
    assert "no violation" in healthy.out
    assert "the trace records I1: on plain 0.1.0 it comes out otherwise" in healthy.out


def test_a_block_that_does_not_exist_is_reported_like_any_violation(kvproof: Kvproof) -> None:
    options = ("--groups", "full:1", "--blocks", "4", "--actions", "60", "--out", "found")
    outcome = kvproof("campaign", "--target", "grants-a-block-outside", *options)
    assert outcome.code == EXIT_VIOLATION
    assert "block 1000000 does not exist" in outcome.out
    (path,) = traces("found")
    assert kvproof("replay", str(path)).code == EXIT_VIOLATION


def test_a_replay_can_leave_out_the_rule(kvproof: Kvproof) -> None:
    kvproof("campaign", *FAULTY, "--out", "found")
    (path,) = traces("found")
    outcome = kvproof("replay", str(path), "--without", "I1")
    assert outcome.code == EXIT_CLEAN
    assert "the trace records I1" in outcome.out


def test_replays_as_json_say_the_rule_and_the_recorded_one(kvproof: Kvproof) -> None:
    kvproof("campaign", *FAULTY, "--out", "found")
    (path,) = traces("found")
    recorded = kvproof("replay", str(path), "--json")
    assert recorded.code == EXIT_VIOLATION
    report = recorded.report
    assert (report["rule"], report["recorded_rule"]) == ("I1", "I1")
    assert (report["on"], report["actions"]) == ("recorded answers", 2)
    healthy = kvproof("replay", str(path), "--target", "plain", "--json").report
    assert (healthy["rule"], healthy["recorded_rule"]) == (None, "I1")
    assert healthy["on"].startswith("plain ")


def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    options = ("campaign", *FAULTY, "--groups", "full:2")
    for folder, seed in (("one", "3"), ("two", "3"), ("other", "4")):
        assert kvproof_apart(*options, "--seed", seed, "--out", folder).code == EXIT_VIOLATION
    (one,), (two,), (other,) = traces("one"), traces("two"), traces("other")
    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_two_worker_processes_find_it_too() -> None:
    options = ("campaign", *FAULTY, "--groups", "full:2", "--workers", "2", "--json")
    for folder in ("one", "two"):
        outcome = kvproof_apart(*options, "--out", folder)
        assert outcome.code == EXIT_VIOLATION, outcome
        (found,) = outcome.report["violations"]
        assert found["rule"] == "I1"
        assert found["trace"] == str(traces(folder)[0])
        assert outcome.report["judged_actions"] == 60
    (one,), (two,) = traces("one"), traces("two")
    assert one.read_bytes() == two.read_bytes()
    assert "--workers 2" in one.read_text()


def test_a_campaign_goes_on_to_find_violations_of_other_rules(kvproof: Kvproof) -> None:
    options = ("--target", "has-two-faults", "--actions", "120", "--groups", "full:1")
    outcome = kvproof("campaign", *options, "--blocks", "6", "--out", "found", "--json")
    assert outcome.code == EXIT_VIOLATION
    assert sorted(found["rule"] for found in outcome.report["violations"]) == ["I1", "I5"]
    assert sorted(path.name.partition("-")[0] for path in traces("found")) == ["I1", "I5"]
    assert all(found["again"] > 0 for found in outcome.report["violations"])


def test_a_rule_that_is_left_out_is_not_judged_and_said_to_be(kvproof: Kvproof) -> None:
    options = ("campaign", "--target", "shows-a-stranger", "--actions", "1500")
    outcome = kvproof(*options, "--groups", "full:4", "--without", "I5")
    assert outcome.code == EXIT_CLEAN, outcome
    row = next(line for line in outcome.out.splitlines() if line.split()[:1] == ["I5"])
    assert row.rstrip().endswith("left out")
    report = kvproof(*options, "--groups", "full:4", "--without", "I5", "--json").report
    assert report["without"] == ["I5"]
    assert "I5" not in report["coverage"]["evaluated"]
    judged = kvproof(*options, "--groups", "full:1", "--blocks", "6", "--json")
    assert judged.code == EXIT_VIOLATION


def test_safety_evaluates_invariants_and_no_rule_of_the_contract(kvproof: Kvproof) -> None:
    options = ("campaign", "--level", "safety", "--actions", "1500", "--groups", "full:4")
    outcome = kvproof(*options, "--json")
    assert outcome.code == EXIT_CLEAN, outcome
    assert sorted(outcome.report["coverage"]["evaluated"]) == ["I1", "I2", "I3", "I4", "I5", "I6"]


def test_the_exact_level_also_compares_with_the_policy(kvproof: Kvproof) -> None:
    options = ("campaign", "--level", "exact:vllm-0.32", "--actions", "1500", "--groups", "full:4")
    outcome = kvproof(*options, "--json")
    assert outcome.code == EXIT_CLEAN, outcome
    evaluated = outcome.report["coverage"]["evaluated"]
    assert evaluated["exact"] == {"snapshot": 1500}


def test_the_plain_manager_is_clean_when_steps_are_unordered(kvproof: Kvproof) -> None:
    options = ("campaign", "--ordering", "strict", "--actions", "2000")
    outcome = kvproof(*options, "--groups", "full:4,sliding:4:8")
    assert outcome.code == EXIT_CLEAN, outcome


def test_features_are_exactly_those_asked_for(kvproof: Kvproof) -> None:
    options = ("campaign", "--actions", "600", "--features", "full,async,worker", "--json")
    outcome = kvproof(*options)
    coverage = outcome.report["coverage"]
    assert sorted(coverage["by_feature"]) == ["async", "full", "worker"]
    core = {"submit", "lookup", "admit", "extend", "issue", "complete step", "finish"}
    assert set(coverage["actions"]) == core
    assert coverage["goals"]["two steps in flight"] > 0


def test_without_the_worker_feature_no_rows_are_sent(kvproof: Kvproof) -> None:
    options = ("campaign", "--actions", "600", "--features", "full", "--json")
    evaluated = kvproof(*options).report["coverage"]["evaluated"]
    assert "rows" not in evaluated.get("I5", {})


def test_the_groups_and_blocks_are_those_asked_for(kvproof: Kvproof) -> None:
    options = ("--groups", "full:2,sliding:2:6", "--blocks", "9", "--out", "found")
    kvproof("campaign", *FAULTY, *options)
    (path,) = traces("found")
    config = json.loads(path.read_text().splitlines()[0])["config"]
    assert config["num_blocks"] <= 9
    groups = {
        (group["kind"], group["block_size"], group.get("window", 0)) for group in config["groups"]
    }
    assert groups <= {("full", 2, 0), ("sliding", 2, 6)}  # shrunk to those that matter


@pytest.mark.parametrize("groups", ["full:32", "full:64", "full:32,sliding:32:40"])
def test_blocks_may_be_large(kvproof: Kvproof, groups: str) -> None:
    outcome = kvproof("campaign", "--groups", groups, "--actions", "600")
    assert outcome.code in (EXIT_CLEAN, EXIT_FAILED), outcome
    assert "VIOLATED" not in outcome.out


def test_a_reader_that_goes_away_is_not_taken_for_a_violation() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "campaign", "--actions", "200", "--groups", "full:4"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == EXIT_INTERRUPTED
    assert "Traceback" not in done.stderr


def test_the_ladder_adds_one_feature_a_rung(kvproof: Kvproof) -> None:
    outcome = kvproof("campaign", "--ladder", "--actions", "24000", "--json")
    assert outcome.code == EXIT_CLEAN, outcome
    rungs = outcome.report["ladder"]
    assert [rung["added"] for rung in rungs] == [[f] for f in FEATURES if f != "uncached"]
    for rung in rungs:
        performed = set(rung["coverage"]["by_feature"])
        assert set(rung["added"]) <= performed <= {*rung["features"], "uncached"}
        assert 0 < rung["judged_actions"] <= 24000 // len(rungs)


def test_the_ladder_prints_a_line_a_rung(kvproof: Kvproof) -> None:
    out = kvproof("campaign", "--ladder", "--actions", "600").out
    lines = [line for line in out.splitlines() if line.startswith("+ ")]
    assert [line.split()[1] for line in lines] == [f for f in FEATURES if f != "uncached"]


def test_the_ladder_ends_at_the_first_rung_that_breaks_a_rule(kvproof: Kvproof) -> None:
    options = ("--target", "shows-a-stranger", "--ladder", "--groups", "full:1", "--blocks", "6")
    outcome = kvproof("campaign", *options, "--actions", "600", "--json")
    assert outcome.code == EXIT_VIOLATION
    assert outcome.report["exit_code"] == EXIT_VIOLATION
    (rung,) = outcome.report["ladder"]
    assert [found["rule"] for found in rung["violations"]] == ["I5"]


def test_a_target_that_fails_ends_the_ladder_with_3(kvproof: Kvproof) -> None:
    options = ("--target", "raises-in-reset", "--ladder", "--actions", "600")
    assert kvproof("campaign", *options).code == EXIT_FAILED


def test_the_json_report_has_the_documented_keys(kvproof: Kvproof) -> None:
    outcome = kvproof("campaign", *FAULTY, "--json", "--seed", "5")
    report = outcome.report
    assert set(report) == {
        *("target", "version", "level", "without", "seed", "command", "exit_code", "seconds"),
        *("judged_actions", "violations", "stale_expectations", "never_evaluated", "failure"),
        *("interrupted", "coverage"),
    }
    assert set(report["coverage"]) == {
        *("runs", "lines", "actions", "by_feature", "goals", "evaluated", "skipped"),
        "known_violations",
        "qualities",
        "runs_by_feature",
        "runs_by_pair",
    }
    (found,) = report["violations"]
    assert set(found) == {
        *("rule", "witness", "also", "trace", "trace_actions", "found_after_actions"),
        *("found_after_seconds", "again"),
    }
    assert report["exit_code"] == outcome.code
    assert report["seed"] == 5
    assert report["judged_actions"] == report["coverage"]["lines"] == 60
    assert list(report["coverage"]["goals"]) == list(GOALS)
    assert set(report["coverage"]["actions"]) <= set(KINDS)
    assert set(report["coverage"]["evaluated"]) <= {rule.id for rule in RULES}


def test_the_recorded_command_repeats_the_campaign(kvproof: Kvproof) -> None:
    options = ("--groups", "full:2", "--blocks", "7", "--seed", "6")
    report = kvproof("campaign", *FAULTY, *options, "--json", "--out", "one").report
    program, *arguments = report["command"].split()
    assert program == "kvproof"
    again = kvproof(*arguments, "--json", "--out", "two").report
    (one,), (two,) = traces("one"), traces("two")
    assert one.read_bytes() == two.read_bytes()
    assert again["coverage"] == report["coverage"]


def test_the_targets_are_listed(kvproof: Kvproof) -> None:
    outcome = kvproof("targets")
    assert outcome.code == EXIT_CLEAN
    for name in ("plain", "vllm", "vllm-manager", "has-no-window"):
        assert name in outcome.out


def interrupt(arguments: tuple[str, ...], ready: Callable[[], bool], everyone: bool) -> Outcome:
    """Send SIGINT, as Ctrl-C does to `everyone` of the group, once it is `ready`."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + SECONDS
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "it was never ready"
            time.sleep(0.05)
        if everyone:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Outcome(process.returncode, out, err)


LONG = ("campaign", "--groups", "full:1", "--blocks", "6", "--time", "10m", "--out", "found")


def test_ctrl_c_keeps_what_was_found() -> None:
    options = (*LONG, "--target", "loses-a-block", "--json")
    outcome = interrupt(options, lambda: bool(traces("found")), everyone=True)
    assert outcome.code == EXIT_INTERRUPTED, outcome
    assert outcome.report["interrupted"] is True
    assert outcome.report["exit_code"] == EXIT_INTERRUPTED
    (found,) = outcome.report["violations"]
    assert found["rule"] == "I1"
    assert Path(found["trace"]).exists()
    assert "Traceback" not in outcome.err


def test_ctrl_c_prints_the_report() -> None:
    options = (*LONG, "--target", "loses-a-block")
    outcome = interrupt(options, lambda: bool(traces("found")), everyone=True)
    assert outcome.code == EXIT_INTERRUPTED, outcome
    assert outcome.out.startswith("I1: ")
    assert "INTERRUPTED  loses-a-block" in outcome.out


def test_ctrl_c_before_the_worker_processes_have_begun_prints_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ready").mkdir()
    monkeypatch.setenv("BROKEN_TARGETS", str(tmp_path / "ready"))
    options = (*LONG, "--target", "starts-slowly-in-workers", "--workers", "2", "--json")
    ready = lambda: len(list((tmp_path / "ready").iterdir())) == 2  # noqa: E731
    outcome = interrupt(options, ready, everyone=True)
    assert outcome.code == EXIT_INTERRUPTED, outcome
    assert outcome.report["interrupted"] is True
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("everyone", [True, False], ids=["ctrl-c", "kill"])
def test_an_interrupt_keeps_what_worker_processes_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everyone: bool
) -> None:
    (tmp_path / "ready").mkdir()
    monkeypatch.setenv("BROKEN_TARGETS", str(tmp_path / "ready"))
    options = (*LONG, "--target", "loses-a-block-and-says-when", "--workers", "2", "--json")
    ready = lambda: len(list((tmp_path / "ready").iterdir())) == 2  # noqa: E731
    outcome = interrupt(options, ready, everyone)
    assert outcome.code == EXIT_INTERRUPTED, outcome
    assert outcome.report["interrupted"] is True
    (found,) = outcome.report["violations"]
    assert found["rule"] == "I1"
    assert Path(found["trace"]).exists()
    assert "Traceback" not in outcome.err
