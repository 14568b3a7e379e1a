"""`kvproof show` draws who holds each block, line by line, and marks what a violation is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvproof_spec.actions import Action, Allocate, CompleteLoad, Issue, Lookup, Release, Submit
from kvproof_spec.answers import Answer, Done, Granted, Hit, Issued, Returned, Snapshot
from kvproof_spec.config import Config, Group
from kvproof_spec.trace import Header, Line, Trace, Verdict, read_trace, write_trace
from kvproof_stateful.cli import main
from kvproof_stateful.running import Judging, perform_actions
from kvproof_stateful.showing import BlockView, Holder, blocks_of, frames
from kvproof_stateful.targets.plain import PlainTarget

KEPT = Path(__file__).parents[2] / "counterexamples"
SLID = KEPT / "fault-window-block-returned-in-flight.ndjson"
TWO_GROUPS = KEPT / "fault-hits-held-group-by-group.ndjson"
FULL = Config((Group("full", 2),), num_blocks=6)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_data(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    data = json.loads(shown(capsys, *arguments, "--json"))
    assert isinstance(data, dict)
    return data


def rows_of(out: str) -> dict[str, list[str]]:
    """The cells of the table, by the label of their row; a cell has single blanks only."""
    lines = out.splitlines()
    table = lines[next(n for n, line in enumerate(lines) if "───" in line) + 1 :]
    table = table[: next(n for n, line in enumerate(table) if not line.strip())]
    rows = [[cell for cell in line.split("  ") if cell.strip()] for line in table]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row}


def trace(*lines: tuple[Action, Answer], config: Config = FULL) -> Trace:
    return Trace(Header(config, "plain"), tuple(Line(*line) for line in lines))


def saved(folder: Path, content: Trace) -> Path:
    path = folder / "trace.ndjson"
    write_trace(path, content)
    return path


def test_a_violation_is_shown_with_its_block_marked(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, SLID)
    assert "  4  step=1 req=R0 allocate scheduled=1 granted owned=[[1, 2, 3], [0, 5, 6]]" in out
    rows = rows_of(out)
    assert list(rows) == ["1", "2", "3", "!4", "5", "6"]
    assert rows["!4"] == [".", ".", "R0:1.0", "R0:1.0~", ".~*"]
    assert rows["6"] == [".", ".", "R0:1.2", "R0:1.2~", "R0:1.2~"]
    assert "~ a step in flight needs it" in out
    assert "R7: only what left the window" in out
    assert "witness: group 1, entry 0: 4 became 0" in out


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.ndjson")), ids=lambda path: path.stem)
@pytest.mark.parametrize("columns", ["40", "60", "100", "400"])
def test_every_kept_trace_fits_into_any_terminal(
    path: Path, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = shown(capsys, path).partition("\n blo")[2]  # a line that is told may be longer
    assert table
    assert max(map(len, table.splitlines())) <= int(columns)
    assert "\x1b" not in table


def test_too_many_lines_are_shown_by_step_and_then_cut_and_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = " ".join(shown(capsys, TWO_GROUPS).split())
    assert "2 of 11 lines fit into 60 characters: after the last line of each step" in out
    out = " ".join(shown(capsys, TWO_GROUPS, "--from", "2", "--to", "10").split())
    assert " of 9 lines fit into 60 characters: lines " in out
    assert "--from LINE --to LINE" in out


def test_a_range_of_lines_is_told_and_drawn_alone(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, TWO_GROUPS, "--from", "7", "--to", "9")
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["7", "8", "9"]
    rows = rows_of(out)
    assert rows["!7"] == [".~", ".~", "?R0~"]
    assert all(len(cells) == 3 for cells in rows.values())
    assert "fit into" not in out


def test_a_terminal_gets_colors_and_may_decline_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in shown(capsys, SLID)
    assert "\x1b[" not in shown(capsys, SLID, "--no-color")


def test_a_trace_without_a_violation_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, trace((Submit(0, (1, 2)), Done()), (Lookup(0), Hit(0, ((),)))))
    out = shown(capsys, path)
    assert rows_of(out) == {}
    assert "5 more blocks are held by nobody here" in out
    assert f"{path} records no violation" in out
    assert as_data(capsys, path)["violation"] is None


def test_who_shares_who_loads_and_who_is_found_has_a_mark(tmp_path: Path) -> None:
    lines = trace(
        (Submit(0, (1, 2, 3)), Done()),
        (Lookup(0), Hit(0, ((),))),
        (Allocate(0, 3), Granted(((1, 2),))),
        (Issue(), Issued()),
        (Submit(1, (1, 2, 3, 1, 1)), Done()),
        (Lookup(1), Hit(2, ((1,),))),
        (Allocate(1, 0, external=2, unordered=True), Granted(((1, 3),))),
        (Release(0, "preempt"), Returned((1, 2))),
    )
    views = [frame.blocks for frame in frames(lines)]
    assert [view.get(1, BlockView()).text(1) for view in views] == [
        ".", ".", "R0:0", "R0:0~", "R0:0~", "R0:0 ?R1~", "R0,1:0~", "R1:0 kept~",
    ]  # fmt: skip
    assert views[6][3].text(1) == "R1:1<"
    assert views[7][2].text(2) == "kept~"
    assert views[6][1].holders == (Holder(0, 0, 0), Holder(1, 0, 0))


def test_a_snapshot_that_contradicts_the_answers_is_seen() -> None:
    snapshot = Snapshot(free_order=(1, 3), reference_counts=(0, 1, 2, 0, 0, 0), keys=((0, (2,)),))
    asked: tuple[Action, ...] = (Submit(0, (1, 2, 3)), Lookup(0), Allocate(0, 3))
    answers: tuple[Answer, ...] = (Done(), Hit(0, ((),)), Granted(((1, 2),)))
    lines = [Line(*pair) for pair in zip(asked, answers, strict=True)]
    verdict = Verdict("I1", "listed as free, but held: blocks [1]")
    lines[-1] = Line(asked[-1], answers[-1], snapshot, verdict)
    every = frames(Trace(Header(FULL, "plain"), tuple(lines)))
    texts = {block: view.text(1) for block, view in every[-1].blocks.items()}
    assert texts == {1: "R0:0 free!", 2: "R0:1* #2", 4: ". lost", 5: ". lost"}
    assert blocks_of(verdict, every) == {1}


@pytest.mark.parametrize(
    ("witness", "blocks"),
    [
        ("block 4, handed out for entry 1 of group 0, was not free", {4}),
        ("neither free nor held: blocks [2, 5]", {2, 5}),
        ("blocks (3, 3) are kept back, and nobody has left with them", {3}),
        ("group 1, entry 0: 2 became 0; needed from 0 on, 0 tokens are processed", {2}),
        ("a hit of 8 of 8 tokens leaves nothing to compute", {1, 2}),
    ],
)
def test_the_blocks_of_a_witness_are_those_it_names_or_those_that_changed(
    witness: str, blocks: set[int]
) -> None:
    lines = trace(
        (Submit(0, (1, 2, 3)), Done()),
        (Lookup(0), Hit(0, ((),))),
        (Allocate(0, 3), Granted(((1, 2),))),
    )
    assert blocks_of(Verdict("I1", witness), frames(lines)) == blocks


def test_the_data_name_holders_and_the_violation(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(shown(capsys, SLID, "--json", "--from", "3"))
    assert data["violation"]["rule"] == "R7"
    assert data["violation"]["blocks"] == [4]
    assert data["violation"]["line"] == 4
    assert [line["line"] for line in data["lines"]] == [3, 4]
    assert data["lines"][0]["told"] == "step=0 issue free=0"
    held = data["lines"][0]["blocks"]["4"]
    assert held["holders"] == [{"request": 0, "group": 1, "entry": 0}]
    assert held["in_flight"] is True
    assert held["listed_free"] is None
    assert data["lines"][1]["blocks"]["4"]["listed_free"] is True


def test_a_run_that_loads_ends_without_marks() -> None:
    actions: tuple[Action, ...] = (
        Submit(0, (1, 2, 3)),
        Lookup(0),
        Allocate(0, 0, external=2, unordered=True),
        CompleteLoad(0, 2),
    )
    run = perform_actions(PlainTarget(), Judging(), FULL, actions)
    told = frames(Trace(Header(FULL, "plain"), tuple(run.lines)))
    assert [frame.blocks[1].text(1) for frame in told[2:]] == ["R0:0<", "R0:0"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.ndjson"], "No such file"),
        (["damaged.ndjson"], "line 1"),
        (["header.ndjson"], "nothing to show"),
        ([str(SLID), "--from", "5"], "lines 0 to 4"),
        ([str(SLID), "--to", "9"], "lines 0 to 4"),
        ([str(SLID), "--from", "3", "--to", "2"], "lines 0 to 4"),
        ([str(SLID), "--from", "-1"], "lines 0 to 4"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.ndjson").write_text("no trace\n")
    write_trace(Path("header.ndjson"), Trace(read_trace(SLID).header))
    assert main(["show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvproof: ")
    assert err.count("\n") == 1
    assert says in err
