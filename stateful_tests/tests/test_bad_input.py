"""What cannot be done is said in one line, with the right exit code and never a traceback.

2 is for what the user can mend, 3 for a target that fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

import pytest

from kvproof_stateful import shrinking
from kvproof_stateful.cli import main
from kvproof_stateful.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_USAGE

HERE = Path(__file__).parent
SECONDS = 20
"""What a command that must end by itself may take before the test gives up on it."""


class Outcome(NamedTuple):
    code: int | str | None
    out: str
    err: str


Kvproof = Callable[..., Outcome]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The targets of broken_targets.py, installed here and in the processes started here."""
    folder = tmp_path / "site"
    run_path(str(HERE / "broken_targets.py"))["install"](folder)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(HERE))))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def kvproof(site: Path, capfd: pytest.CaptureFixture[str]) -> Kvproof:
    """The command in this process: whatever it lets through fails the test."""

    def run(*arguments: str) -> Outcome:
        code: int | str | None
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        shown = capfd.readouterr()
        return Outcome(code, shown.out, shown.err)

    return run


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what is found as it is, which takes no time."""

    monkeypatch.setattr(shrinking, "shrink", lambda smallest: None)


@pytest.fixture
def kvproof_apart(site: Path) -> Kvproof:
    """The command in a process of its own, which may hang."""

    def run(*arguments: str) -> Outcome:
        command = [sys.executable, "-m", "kvproof_stateful.cli", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {SECONDS} s: {' '.join(arguments)}")
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def assert_usage(outcome: Outcome, says: str) -> None:
    """Exit code 2 and one line, which contains `says`."""
    assert outcome.code == EXIT_USAGE, outcome
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("kvproof: ")
    assert says in lines[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--target nope", "plain"),
        ("--level nope", "exact:vllm-0.32"),
        ("--level exact:nope", "exact:vllm-0.32"),
        ("--features nope", "lookahead"),
        ("--features full,", "lookahead"),
        ("--target has-no-window --features full,async", "does not declare async"),
        ("--target has-no-window --groups sliding:4:8", "sliding"),
        ("--target has-no-window --groups full:4,sliding:4:8", "sliding"),
        ("--groups nope", "full:BLOCK_SIZE"),
        ("--groups full", "full:BLOCK_SIZE"),
        ("--groups full:4:8", "full:BLOCK_SIZE"),
        ("--groups full:0", "full:BLOCK_SIZE"),
        ("--groups full:x", "full:BLOCK_SIZE"),
        ("--groups sliding:4", "sliding:BLOCK_SIZE:WINDOW"),
        ("--groups sliding:4:0", "sliding:BLOCK_SIZE:WINDOW"),
        ("--groups full:4,", "full:BLOCK_SIZE"),
        ("--features sliding --groups full:4", "sliding"),
        ("--groups full:8,chunked:4:8 --level exact:vllm-0.32", "other block sizes"),
        ("--blocks 1", "2 is the least"),
        ("--blocks 0", "2 is the least"),
        ("--blocks -4", "2 is the least"),
        ("--time soon", "10m"),
        ("--time -1", "10m"),
        ("--time 5d", "10m"),
        ("--actions 0", "at least 1"),
        ("--actions -3", "at least 1"),
        ("--workers 0", "at least 1"),
        ("--without R99", "R99"),
        ("--without R1 --without nope", "nope"),
        ("--action-timeout -1", "--action-timeout"),
        ("--action-timeout nan", "--action-timeout"),
        ("--expect missing.toml", "missing.toml"),
        ("--expect .", "."),
    ],
)
def test_what_cannot_be_asked_for_is_said_in_one_line(
    kvproof: Kvproof, options: str, says: str
) -> None:
    budget = [] if "--time" in options or "--actions" in options else ["--actions", "20"]
    assert_usage(kvproof("campaign", *options.split(), *budget), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("campaign --actions many", "--actions"),
        ("campaign --actions 5 --time 5s", "--time"),
        ("campaign --ladder --features full", "--features"),
        ("campaign --ordering sideways", "strict"),
        ("campaign --colour", "--colour"),
        ("nope", "campaign"),
        ("replay", "trace"),
        ("", "COMMAND"),
    ],
)
def test_what_cannot_be_parsed_is_said_in_one_line(
    kvproof: Kvproof, arguments: str, says: str
) -> None:
    assert_usage(kvproof(*arguments.split()), says)


def test_a_target_that_is_not_installed_names_what_it_needs(kvproof: Kvproof, site: Path) -> None:
    points = site / "broken_targets-0.dist-info" / "entry_points.txt"
    points.write_text("[kvproof.targets]\nabsent = no_such_module_anywhere:Target\n")
    assert_usage(kvproof("campaign", "--target", "absent"), "no_such_module_anywhere")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_folder_for_traces_that_is_a_file_is_a_usage_error(
    kvproof_apart: Kvproof, tmp_path: Path, workers: str
) -> None:
    (tmp_path / "occupied").write_text("")
    outcome = kvproof_apart(
        *("campaign", "--target", "loses-a-block", "--actions", "40"),
        *("--out", "occupied", "--workers", workers),
    )
    assert_usage(outcome, "occupied")


VIOLATION = """\
[[violation]]
rule = "I1"
versions = ">=0"
after = ""
link = "https://example.org"
trace = "kept.ndjson"
"""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[[violation", "known.toml"),
        ("violation = 3", "[[violation]]"),
        ("violation = [3]", "rule"),
        ('[[violation]]\nrule = "I1"', "versions"),
        (VIOLATION + "[[fault]]\n", "[[violation]]"),
        (VIOLATION + 'colour = "red"\n', "after, link, rule, trace, versions"),
        (VIOLATION.replace('">=0"', "0"), "string"),
        (VIOLATION.replace('">=0"', '"about 3"'), "about 3"),
        (VIOLATION.replace('after = ""', 'after = "never"'), "preempted"),
        (VIOLATION.replace('"I1"', '"I99"'), "I99"),
        (VIOLATION, "kept.ndjson"),
        (b"\xff\xfe", "known.toml"),
    ],
)
def test_a_bad_list_of_known_violations_is_said_in_one_line(
    kvproof: Kvproof, tmp_path: Path, content: str | bytes, says: str
) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "known.toml").write_bytes(raw)
    assert_usage(kvproof("campaign", "--expect", "known.toml", "--actions", "20"), says)


HEADER = {
    "kvproof": 1,
    "config": {"groups": [{"kind": "full", "block_size": 4}], "num_blocks": 8},
    "target": "plain",
}
SUBMIT = {"action": {"type": "Submit", "request": 0, "symbols": [1]}, "answer": {"type": "Done"}}
LOOKUP = {
    "action": {"type": "Lookup", "request": 0},
    "answer": {"type": "Hit", "tokens": 0, "tables": [[]]},
}


def trace_text(*records: object) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def test_the_undamaged_trace_of_these_tests_is_clean(kvproof: Kvproof, tmp_path: Path) -> None:
    (tmp_path / "t.ndjson").write_text(trace_text(HEADER, SUBMIT, LOOKUP))
    assert kvproof("replay", "t.ndjson").code == EXIT_CLEAN


def config(**changes: object) -> dict[str, object]:
    old = HEADER["config"]
    assert isinstance(old, dict)
    return {**HEADER, "config": {**old, **changes}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (trace_text(HEADER, SUBMIT)[:-1], "line 2: cut off"),
        (trace_text(HEADER, SUBMIT)[:-20], "line 2: cut off"),
        (trace_text(HEADER, SUBMIT)[:-20] + "\n", "line 2"),
        (trace_text(HEADER)[:40] + "\n", "line 1"),
        ("", "header"),
        ("\n", "line 1"),
        ("hello\n", "line 1"),
        (b"\xff\xfe\n", "UTF-8"),
        (b"\0\0\0\n", "line 1"),
        ("[" * 100_000 + "\n", "line 1"),
        (trace_text([1, 2]), "line 1: no header"),
        (trace_text({**HEADER, "kvproof": None}), "line 1: no header"),
        (trace_text(SUBMIT), "line 1: no header"),
        (trace_text({**HEADER, "kvproof": 2}), "upgrade kvproof"),
        (trace_text({**HEADER, "kvproof": 0}), "line 1"),
        (trace_text({**HEADER, "colour": "red"}), "line 1"),
        (trace_text({**HEADER, "level": "nope"}), "nope"),
        (trace_text({**HEADER, "without": ["R99"]}), "R99"),
        (trace_text(config(num_blocks="many")), "line 1"),
        (trace_text(config(num_blocks=0)), "line 1"),
        (trace_text(config(num_blocks=-5)), "line 1"),
        (trace_text(config(groups=[])), "line 1"),
        (trace_text(config(groups=[{"kind": "full", "block_size": 0}])), "line 1"),
        (trace_text(config(groups=[{"kind": "mamba", "block_size": 4}])), "line 1"),
        (trace_text(config(groups=[{"kind": "sliding", "block_size": 4}])), "line 1"),
        (trace_text(HEADER, 3), "line 2"),
        (trace_text(HEADER, {"answer": {"type": "Done"}}), "line 2"),
        (trace_text(HEADER, SUBMIT, {"action": {"type": "Steal", "request": 0}}), "line 3"),
        (trace_text(HEADER, {"action": {"type": "Submit", "request": "0"}}), "line 2"),
        (trace_text(HEADER, SUBMIT, HEADER), "line 3"),
        (trace_text(HEADER, LOOKUP), "not enabled"),
        (trace_text(HEADER, SUBMIT, SUBMIT), "not enabled"),
    ],
)
def test_a_damaged_trace_is_said_in_one_line(
    kvproof: Kvproof, tmp_path: Path, content: str | bytes, says: str
) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "t.ndjson").write_bytes(raw)
    outcome = kvproof("replay", "t.ndjson")
    assert_usage(outcome, says)
    assert len(outcome.err) < 400, "the line is too long to be read"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("replay missing.ndjson", "missing.ndjson"),
        ("replay .", "."),
        ("replay t.ndjson --target nope", "plain"),
        ("replay t.ndjson --level nope", "contract"),
        ("replay t.ndjson --without R99", "R99"),
        ("replay t.ndjson --target plain --action-timeout -1", "--action-timeout"),
    ],
)
def test_a_replay_that_cannot_be_is_said_in_one_line(
    kvproof: Kvproof, tmp_path: Path, arguments: str, says: str
) -> None:
    (tmp_path / "t.ndjson").write_text(trace_text(HEADER, SUBMIT, LOOKUP))
    assert_usage(kvproof(*arguments.split()), says)


def test_recorded_nonsense_is_the_targets_failure(kvproof: Kvproof, tmp_path: Path) -> None:
    two = {**LOOKUP, "answer": {"type": "Hit", "tokens": 0, "tables": [[], []]}}
    (tmp_path / "t.ndjson").write_text(trace_text(HEADER, SUBMIT, two))
    outcome = kvproof("replay", "t.ndjson")
    assert outcome.code == EXIT_FAILED
    assert "2 tables for 1 groups" in outcome.out


QUICK = ("--groups", "full:1", "--blocks", "4", "--actions", "60", "--action-timeout", "1")


def assert_failed(outcome: Outcome, says: str) -> None:
    """Exit code 3, no traceback, and a report that is JSON and contains `says`."""
    assert outcome.code == EXIT_FAILED, outcome
    assert "Traceback" not in outcome.err
    report = json.loads(outcome.out)
    assert report["exit_code"] == EXIT_FAILED
    assert says in report["failure"]
    assert "\n" not in report["failure"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("raises-in-perform", "RuntimeError: out of patience"),
        ("raises-in-reset", "RuntimeError: out of patience"),
        ("raises-in-snapshot", "RuntimeError: out of patience"),
        ("answers-none", "NoneType is no answer to Lookup"),
        ("answers-another-kind", "Done is no answer to Lookup"),
        ("answers-a-class", "Lookup"),
        ("answers-text", "str is no answer to Submit"),
        ("answers-too-many-groups", "4 tables for 1 groups"),
        ("answers-no-tables", "block ids"),
        ("answers-text-tokens", "'0'"),
        ("answers-negative-tokens", "-4"),
        ("answers-text-blocks", "block ids"),
        ("answers-half-blocks", "block ids"),
        ("answers-nested-blocks", "block ids"),
        ("answers-flat-tables", "block ids"),
        ("keeps-text-blocks", "block ids"),
        ("shows-text", "str"),
        ("shows-text-blocks", ""),
        ("shows-no-blocks", ""),
        ("shows-too-few-counts", "1 counts for"),
    ],
)
@pytest.mark.usefixtures("unshrunk")
def test_a_target_that_raises_or_answers_nonsense_ends_with_3(
    kvproof: Kvproof, target: str, says: str
) -> None:
    outcome = kvproof("campaign", "--target", target, *QUICK, "--json", "--out", "found")
    assert_failed(outcome, says)


@pytest.mark.parametrize(
    "target", ["raises-in-perform", "raises-in-snapshot", "answers-none", "answers-text"]
)
def test_a_saved_failure_is_replayed_as_one(kvproof: Kvproof, tmp_path: Path, target: str) -> None:
    kvproof("campaign", "--target", target, *QUICK, "--json", "--out", "found")
    (trace,) = (tmp_path / "found").glob("*.ndjson")
    assert kvproof("replay", str(trace)).code == EXIT_FAILED, trace.read_text()
    assert kvproof("replay", str(trace), "--target", target).code == EXIT_FAILED


@pytest.mark.usefixtures("unshrunk")
def test_lists_for_tuples_are_no_violation(kvproof: Kvproof) -> None:
    target = ("--target", "answers-lists", "--groups", "full:4", "--actions", "1500")
    assert kvproof("campaign", *target).code in (EXIT_CLEAN, EXIT_FAILED)


@pytest.mark.parametrize("target", ["hangs", "hangs-in-reset"])
def test_a_target_that_hangs_ends_with_3(kvproof_apart: Kvproof, target: str) -> None:
    outcome = kvproof_apart("campaign", "--target", target, *QUICK, "--json")
    assert_failed(outcome, "no answer within 1 s")


def test_a_target_that_hangs_in_a_worker_process_ends_with_3(kvproof_apart: Kvproof) -> None:
    outcome = kvproof_apart("campaign", "--target", "hangs", *QUICK, "--json", "--workers", "2")
    assert_failed(outcome, "no answer within 1 s")


@pytest.mark.parametrize("budget", [("--actions", "20"), ("--time", "1s")])
def test_a_target_that_can_never_be_built_ends_with_3(
    kvproof_apart: Kvproof, budget: tuple[str, str]
) -> None:
    outcome = kvproof_apart("campaign", "--target", "fits-nothing", *budget)
    assert outcome.code == EXIT_FAILED, outcome
    assert "it is too small" in outcome.out


@pytest.mark.parametrize("target", ["raises-in-hello", "raises-at-once"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_target_that_cannot_even_be_made_ends_with_3(
    kvproof: Kvproof, target: str, workers: str
) -> None:
    outcome = kvproof("campaign", "--target", target, *QUICK, "--workers", workers)
    assert outcome.code == EXIT_FAILED, outcome
    assert "RuntimeError: out of patience" in outcome.err + outcome.out


def test_the_list_of_targets_shows_also_those_that_cannot_be_made(kvproof: Kvproof) -> None:
    outcome = kvproof("targets", "--json")
    assert outcome.code == EXIT_CLEAN
    listed = {target["name"]: target for target in json.loads(outcome.out)["targets"]}
    assert "out of patience" in listed["raises-at-once"]["unavailable"]
    assert listed["loses-a-block"]["mode"] == "driven"


def test_a_claimed_rule_that_was_never_evaluated_ends_with_3(kvproof: Kvproof) -> None:
    target = ("--target", "claims-what-it-never-shows")
    budget = ("--groups", "full:4", "--actions", "1500")
    outcome = kvproof("campaign", *target, *budget, "--json")
    assert outcome.code == EXIT_FAILED, outcome
    report = json.loads(outcome.out)
    assert report["never_evaluated"] == ["R9"]
    assert report["failure"] is None


def test_a_claimed_rule_is_not_asked_for_where_it_was_left_out(kvproof: Kvproof) -> None:
    target = ("--target", "claims-what-it-never-shows")
    budget = ("--groups", "full:4", "--actions", "1500")
    assert kvproof("campaign", *target, *budget, "--without", "R9").code == EXIT_CLEAN


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("raises-in-perform", EXIT_FAILED),
        ("raises-in-reset", EXIT_FAILED),
        ("raises-in-hello", EXIT_FAILED),
        ("raises-at-once", EXIT_FAILED),
        ("hangs", EXIT_FAILED),
        ("answers-too-many-groups", EXIT_FAILED),
        ("fits-nothing", EXIT_FAILED),
        ("shows-text", EXIT_FAILED),
        ("plain", EXIT_CLEAN),
    ],
)
def test_a_replay_on_a_target_that_fails_ends_with_3(
    kvproof: Kvproof, tmp_path: Path, target: str, code: int
) -> None:
    (tmp_path / "t.ndjson").write_text(trace_text(HEADER, SUBMIT, LOOKUP))
    outcome = kvproof("replay", "t.ndjson", "--target", target, "--action-timeout", "1")
    assert outcome.code == code, outcome
    assert len(outcome.err.splitlines()) <= 1


def test_a_trace_that_goes_another_way_on_a_target_says_where(
    kvproof: Kvproof, tmp_path: Path
) -> None:
    wait = {"action": {"type": "Allocate", "request": 0, "new": 1}}
    refused = {**wait, "answer": {"type": "Refused", "tables": [[]]}}
    (tmp_path / "t.ndjson").write_text(trace_text(HEADER, SUBMIT, LOOKUP, refused, LOOKUP))
    assert kvproof("replay", "t.ndjson").code == EXIT_CLEAN
    outcome = kvproof("replay", "t.ndjson", "--target", "plain")
    assert outcome.code == EXIT_FAILED
    assert outcome.err.startswith("kvproof: on plain")
    assert len(outcome.err.splitlines()) == 1
