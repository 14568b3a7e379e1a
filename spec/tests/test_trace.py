"""Traces: what is written is read back, and what is damaged is refused with line and reason."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from kvproof_spec.actions import (
    ACTIONS,
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Output,
    Publish,
    Release,
    Store,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Event,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Numbers,
    Raised,
    Refused,
    Returned,
    Scheduled,
    ScheduledLoad,
    ScheduledRow,
    SentRow,
    Snapshot,
    Trimmed,
    Updated,
)
from kvproof_spec.config import Config, Group, Scheduling
from kvproof_spec.pages import Copy
from kvproof_spec.prefix import Inputs, Item
from kvproof_spec.records import MalformedRecord, decode, encode
from kvproof_spec.trace import (
    FORMAT_VERSION,
    DamagedTrace,
    Header,
    Line,
    Trace,
    Verdict,
    dump_line,
    dump_trace,
    parse_trace,
    read_trace,
    write_trace,
)

ALL_ACTIONS: tuple[Action, ...] = (
    Submit(0, (1, 2)),
    Submit(1, (3,), priority=-1, max_tokens=4),
    Submit(2, (3,), inputs=Inputs("poet", 2, "tenant", (Item("cät", 1, 2),), ((0, 9), (4, -9)))),
    Submit(3, (3,), inputs=Inputs(salt=""), encoder_tokens=5),
    Submit(4, (3,), remote=4, unordered=True, stored=True),
    Lookup(0),
    Allocate(0, 2),
    Allocate(0, 3, (7, 8), 0, False, 1, 2, True),
    Allocate(0, 0, external=4, unordered=True),
    Issue(),
    CompleteStep(0, ()),
    CompleteStep(1, (Output(0, 5), Output(1, 6, accepted=2))),
    CompleteLoad(0, 0),
    Store(0),
    CompleteStore(0),
    Publish(0, 2),
    Trim(0),
    Release(0, "finish"),
    Release(0, "abort"),
    Release(0, "preempt"),
    Forget(),
    Forget(()),
    Forget((1, 2)),
)
ALL_ANSWERS: tuple[Answer, ...] = (
    Done(),
    Hit(2, ((1,), ())),
    Granted(((1, 0), (2,))),
    Granted(((1,),), new=((),)),
    Granted(((3,), ()), copies=(Copy(0, 1, 3), Copy(1, 2, 4))),
    Refused(((),)),
    Raised('ValueError: "quoted", ünïcode,\na new line'),
    Issued(),
    Issued(()),
    Issued((SentRow(0, ((1,), (2,))),)),
    Issued(copies=(), cleared=()),
    Issued(None, (Copy(0, 1, 3),), (2, 3), (1, 3)),
    Returned(),
    Returned((), ()),
    Returned((1, 1), ((0, 3),)),
    Returned(numbers=Numbers(1, 2, 0, 3)),
    Trimmed(((0, 2),)),
    Forgotten(True),
    Forgotten(False),
    Scheduled((), (), ()),
    Scheduled(
        (ScheduledRow(0, 2, 1, True, False, ((1, 2),)),), (1,), ((0, ((1, 2),)),), (3,), (4,)
    ),
    Scheduled(
        (ScheduledRow(0, 2, 1, True, False, ((1, 2),), external=2),),
        (),
        (),
        loads=(ScheduledLoad(1, 0, 2),),
        copies=(Copy(0, 1, 2),),
        cleared=(3,),
    ),
    Updated((), ()),
    Updated((0,), (), stored=(0,), numbers=Numbers(1, 2, 3, 4)),
    Updated((0,), ((1, 2),), (3,)),
)
EVENTS = Event("stored", 1, ("a", "b"), "ü"), Event("removed", 0, ("a",)), Event("cleared")
SNAPSHOT = Snapshot(
    *((3, 4), (3, 4), 2, (0, 1, 1, 0, 0), ((0, ((1, 2),)),), ((0, (1, 2)),)),
    findable=((0, "a"),),
    events=EVENTS,
)
HEADER = Header(Config((Group("full", 2), Group("sliding", 2, 3)), num_blocks=5), "plain")


def read_text(tmp_path: Path, text: str | bytes) -> Trace:
    path = tmp_path / "a.ndjson"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path)


def read_again(tmp_path: Path, trace: Trace) -> Trace:
    path = tmp_path / "folder" / "a.ndjson"
    write_trace(path, trace)
    return read_trace(path)


def text_of(trace: Trace) -> str:
    return "".join(f"{line}\n" for line in dump_trace(trace))


# What is written is read back


def test_no_action_and_no_answer_is_forgotten_here() -> None:
    assert {type(action) for action in ALL_ACTIONS} == set(ACTIONS)
    assert {type(answer) for answer in ALL_ANSWERS} == set(get_args(Answer))


@pytest.mark.parametrize("action", ALL_ACTIONS, ids=repr)
def test_an_action_is_read_as_it_was_written(tmp_path: Path, action: Action) -> None:
    trace = Trace(HEADER, (Line(action),))
    assert read_again(tmp_path, trace) == trace


@pytest.mark.parametrize("answer", ALL_ANSWERS, ids=repr)
def test_an_answer_is_read_as_it_was_written(tmp_path: Path, answer: Answer) -> None:
    trace = Trace(HEADER, (Line(Issue(), answer),))
    assert read_again(tmp_path, trace) == trace


@pytest.mark.parametrize(
    "line",
    [
        Line(Issue(), Issued(), SNAPSHOT),
        Line(Issue(), Issued(), Snapshot(())),
        Line(Issue(), None, None, Verdict(None)),
        Line(Issue(), Issued(), SNAPSHOT, Verdict("I1", "block 3, häufig", ("R2", "R3"))),
    ],
)
def test_snapshot_and_verdict_are_read_as_they_were_written(tmp_path: Path, line: Line) -> None:
    trace = Trace(HEADER, (Line(Lookup(0), Hit(0, ((), ()))), line))
    again = read_again(tmp_path, trace)
    assert again == trace
    assert again.verdict == line.verdict


HEADERS = (
    HEADER,
    Header(HEADER.config, "vllm", "0.32.0", "exact:vllm-0.32", ("R3",), (), 7),
    Header(
        Config(
            (Group("full", 4),),
            9,
            caching=False,
            max_model_len=8,
            max_in_flight_tokens=4,
            defers_returns=True,
            ordering="strict",
            worker=False,
            scheduling=Scheduling("priority", True, 2, 8, 4, False, 1, 9, True),
        ),
        "plain",
    ),
    Header(Config((Group("chunked", 4, 8), Group("cross", 2)), 9, caching=False), "plain"),
    Header(
        Config(
            (Group("state", 8), Group("full", 4, drafter=True)),
            9,
            partial_boundary=2,
            clears=True,
            events=True,
        ),
        "plain",
    ),
)


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_is_read_as_it_was_written(tmp_path: Path, header: Header) -> None:
    assert read_again(tmp_path, Trace(header)) == Trace(header)


def given_fields(record: Any) -> Iterable[tuple[str, str]]:
    """(class, field) of each field, however deep, that has another value than its default."""
    if isinstance(record, tuple):
        for item in record:
            yield from given_fields(item)
    elif is_dataclass(record):
        for field in fields(record):
            value = getattr(record, field.name)
            if value != field.default:
                yield type(record).__name__, field.name
            yield from given_fields(value)


WRITTEN = (*ALL_ACTIONS, *ALL_ANSWERS, SNAPSHOT, *(header.config for header in HEADERS))


@pytest.mark.parametrize(
    "record",
    [
        *ACTIONS,
        *get_args(Answer),
        Output,
        SentRow,
        ScheduledRow,
        ScheduledLoad,
        Numbers,
        Config,
        Group,
        Scheduling,
        Inputs,
        Item,
        Copy,
        Snapshot,
        Event,
    ],
    ids=lambda record: record.__name__,
)
def test_no_field_has_its_default_in_all_that_is_written_here(record: type) -> None:
    given = {field for name, field in given_fields(WRITTEN) if name == record.__name__}
    assert given == {field.name for field in fields(record)}


def test_a_trace_of_no_lines_has_no_verdict() -> None:
    assert Trace(HEADER).verdict is None


GOLDEN = """\
{"kvproof": 1, "config": {"type": "Config", "groups": [{"type": "Group", "kind": "full", \
"block_size": 2}, {"type": "Group", "kind": "sliding", "block_size": 2, "window": 3}], \
"num_blocks": 5}, "target": "plain", "seed": 3}
{"action": {"type": "Submit", "request": 0, "symbols": [1, 2, 3]}, "answer": {"type": "Done"}}
{"action": {"type": "Lookup", "request": 0}, "answer": {"type": "Hit", "tokens": 0, \
"tables": [[], []]}}
{"action": {"type": "Allocate", "request": 0, "new": 3, "drafts": [3]}, "answer": \
{"type": "Granted", "tables": [[1, 2], [3, 4]], "new": [[1, 2], [3, 4]]}, "snapshot": \
{"type": "Snapshot", "free_order": [], "free_blocks": 0}}
{"action": {"type": "Issue"}, "answer": {"type": "Issued", "rows": [{"type": "SentRow", \
"request": 0, "tables": [[1, 2], [3, 4]]}]}}
{"action": {"type": "CompleteStep", "step": 0, "outputs": [{"type": "Output", "request": 0, \
"symbol": 5, "accepted": 1}]}, "answer": {"type": "Returned", "deferred": []}}
{"action": {"type": "Forget"}, "answer": {"type": "Forgotten", "done": true}, "verdict": \
{"rule": "I1", "witness": "béta", "also": ["R1"]}}
{"action": {"type": "Trim", "request": 0}}
"""


def test_the_format_is_what_it_was(tmp_path: Path) -> None:
    tables = (1, 2), (3, 4)
    trace = Trace(
        Header(HEADER.config, "plain", seed=3),
        (
            Line(Submit(0, (1, 2, 3)), Done()),
            Line(Lookup(0), Hit(0, ((), ()))),
            Line(Allocate(0, 3, drafts=(3,)), Granted(tables, tables), Snapshot((), free_blocks=0)),
            Line(Issue(), Issued((SentRow(0, tables),))),
            Line(CompleteStep(0, (Output(0, 5, 1),)), Returned(())),
            Line(Forget(), Forgotten(True), verdict=Verdict("I1", "béta", ("R1",))),
            Line(Trim(0)),
        ),
    )
    assert text_of(trace) == GOLDEN
    assert read_text(tmp_path, GOLDEN) == trace
    assert FORMAT_VERSION == 1


def test_every_line_is_one_json_object_with_its_action_under_that_key() -> None:
    for answer in ALL_ANSWERS:
        text = dump_line(Line(Issue(), answer, SNAPSHOT, Verdict("R1")))
        assert "\n" not in text
        value = json.loads(text)
        assert value["action"] == {"type": "Issue"}
        assert value["answer"]["type"] == type(answer).__name__
        assert value["verdict"]["rule"] == "R1"


# What is damaged is refused

HEAD = '{"kvproof": 1, "config": {"groups": [{"kind": "full", "block_size": 2}], "num_blocks": 5}, '
HEAD += '"target": "plain"}\n'
GOOD = '{"action": {"type": "Lookup", "request": 0}}\n'


def test_a_hand_written_header_needs_no_types(tmp_path: Path) -> None:
    trace = read_text(tmp_path, HEAD + GOOD)
    assert trace.header.config == Config((Group("full", 2),), 5)
    assert trace.lines == (Line(Lookup(0)),)


def in_line(number: int, reason: str) -> str:
    return f"a.ndjson, line {number}: {reason}"


DAMAGED = {
    "an empty file": ("", "a.ndjson: empty, a trace begins with its header"),
    "a file cut inside a line": (
        HEAD + GOOD + GOOD[:-9],
        in_line(3, "cut off, the end of line is missing"),
    ),
    "a file cut at the end of a line": (
        HEAD + GOOD[:-1],
        in_line(2, "cut off, the end of line is missing"),
    ),
    "a file cut inside its header": (HEAD[:20], in_line(1, "cut off, the end of line is missing")),
    "a line without a header": (GOOD, in_line(1, 'no header: {"kvproof": 1, ...} is expected')),
    "a header that is no object": ("[1]\n", in_line(1, "no header")),
    "a header whose version is no number": ('{"kvproof": true}\n', in_line(1, "no header")),
    "a header of a newer format": (
        HEAD.replace("1", "2", 1),
        in_line(1, "format 2 is newer than this kvproof reads (1): upgrade kvproof"),
    ),
    "a header without a target": (
        HEAD.replace('"target": "plain"', '"seed": 1'),
        in_line(1, "Header: "),
    ),
    "a group of an unknown kind": (
        HEAD.replace("full", "linear"),
        in_line(1, "Header.config: Config.groups: Group.kind: one of ('full', 'sliding', "),
    ),
    "a line that is no JSON": (HEAD + "{nonsense\n", in_line(2, "not a JSON object")),
    "an empty line": (HEAD + "\n" + GOOD, in_line(2, "not a JSON object")),
    "a line that is no object": (HEAD + "[]\n", in_line(2, "an object of type Line expected")),
    "a line without an action": (HEAD + GOOD + "{}\n", in_line(3, "Line: ")),
    "an action that is no object": (HEAD + '{"action": 3}\n', in_line(2, "Line.action: ")),
    "an unknown action": (
        HEAD + GOOD + GOOD.replace("Lookup", "Frobnicate"),
        in_line(3, "Line.action: one of Submit, Lookup, Allocate, "),
    ),
    "an answer in the place of an action": (
        HEAD + '{"action": {"type": "Done"}}\n',
        in_line(2, "Line.action: one of Submit, Lookup"),
    ),
    "an unknown field": (
        HEAD + GOOD.replace('"request"', '"request": 1, "color"'),
        in_line(2, "Line.action: no other fields of Lookup expected, not ['color']"),
    ),
    "a missing field": (
        HEAD + '{"action": {"type": "Lookup"}}\n',
        in_line(2, "Line.action: Lookup: "),
    ),
    "a field of the wrong type": (
        HEAD + GOOD.replace("0", '"0"'),
        in_line(2, "Line.action: Lookup.request: int expected, not '0'"),
    ),
    "a truth value in the place of a number": (
        HEAD + GOOD.replace("0", "true"),
        in_line(2, "Line.action: Lookup.request: int expected, not True"),
    ),
    "a reason that is none": (
        HEAD + '{"action": {"type": "Release", "request": 0, "reason": "boredom"}}\n',
        in_line(2, "Line.action: Release.reason: one of ('finish', 'abort', 'preempt')"),
    ),
    "a list of the wrong length": (
        HEAD + '{"action": {"type": "Issue"}, "answer": {"type": "Returned", "computed": [[1]]}}\n',
        in_line(2, "Line.answer: Returned.computed: "),
    ),
    "a group of no tokens": (
        HEAD.replace('"block_size": 2', '"block_size": 0'),
        in_line(1, "Header.config: Config.groups: Group: a block of 0 tokens"),
    ),
    "a chunk for a state": (
        HEAD.replace('"full"', '"state", "window": 2'),
        in_line(1, "Header.config: Config.groups: Group: a state group with a window of 2 tokens"),
    ),
    "a drafter that is no truth value": (
        HEAD.replace('"full"', '"full", "drafter": 1'),
        in_line(1, "Header.config: Config.groups: Group.drafter: bool expected, not 1"),
    ),
    "a cross attention group with caching": (
        HEAD.replace("full", "cross"),
        in_line(1, "Header.config: Config: cross attention needs prefix caching off"),
    ),
    "a partial boundary that does not divide the blocks": (
        HEAD.replace('"num_blocks": 5', '"num_blocks": 5, "partial_boundary": 3'),
        in_line(
            1, "Header.config: Config: a partial boundary of 3 tokens does not divide every block"
        ),
    ),
    "a clear of one block that is no list": (
        HEAD + '{"action": {"type": "Issue"}, "answer": {"type": "Issued", "cleared": 3}}\n',
        in_line(2, "Line.answer: Issued.cleared: "),
    ),
    "a copy without a destination": (
        HEAD + '{"action": {"type": "Issue"}, "answer": {"type": "Issued", "copies": '
        '[{"group": 0, "source": 1}]}}\n',
        in_line(2, "Line.answer: Issued.copies: "),
    ),
    "a copy of a grant that is a pair": (
        HEAD + '{"action": {"type": "Issue"}, "answer": {"type": "Granted", "tables": [], '
        '"copies": [[1, 2]]}}\n',
        in_line(2, "Line.answer: Granted.copies: an object of type Copy expected"),
    ),
    "an item without its length": (
        HEAD + '{"action": {"type": "Submit", "request": 0, "symbols": [1], "inputs": '
        '{"items": [{"id": "cat", "first": 0}]}}}\n',
        in_line(2, "Line.action: Submit.inputs: Inputs.items: Item: "),
    ),
    "an embedding without its position": (
        HEAD + '{"action": {"type": "Submit", "request": 0, "symbols": [1], "inputs": '
        '{"embeds": [[1]]}}}\n',
        in_line(2, "Line.action: Submit.inputs: Inputs.embeds: a list of 2 expected"),
    ),
    "a salt that is a number": (
        HEAD + '{"action": {"type": "Submit", "request": 0, "symbols": [1], "inputs": '
        '{"salt": 3}}}\n',
        in_line(2, "Line.action: Submit.inputs: Inputs.salt: "),
    ),
    "an event that is none": (
        HEAD + '{"action": {"type": "Issue"}, "snapshot": {"type": "Snapshot", '
        '"free_order": [], "events": '
        '[{"what": "moved"}]}}\n',
        in_line(2, "Line.snapshot: Snapshot.events: Event.what: one of ('stored', 'removed', "),
    ),
    "numbers that are not whole": (
        HEAD + '{"action": {"type": "Issue"}, "answer": {"type": "Returned", "numbers": '
        '{"used_blocks": 1.5, "queried": 0, "hit": 0, "preemptions": 0}}}\n',
        in_line(2, "Line.answer: Returned.numbers: "),
    ),
    "a store of a list of requests": (
        HEAD + '{"action": {"type": "Store", "request": [0]}}\n',
        in_line(2, "Line.action: Store.request: int expected, not [0]"),
    ),
    "a line that is nested without end": (
        HEAD + "[" * 100_000 + "]" * 100_000 + "\n",
        in_line(2, ""),
    ),
    "a number without end": (HEAD + GOOD.replace("0", "1" * 10_000), in_line(2, "")),
    "bytes that are no UTF-8": (
        HEAD.encode() + b'{"action": "\xff"}\n',
        "a.ndjson: not UTF-8 text",
    ),
    "bytes of another kind of file": (b"\x80\x04\x95 pickle\n", "a.ndjson: not UTF-8 text"),
}


@pytest.mark.parametrize(("text", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_trace_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(DamagedTrace) as caught:
        read_text(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}")
    assert message in said
    assert "\n" not in said
    assert len(said) < 600


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nowhere.ndjson")


def test_lines_that_are_not_from_a_file_name_their_source() -> None:
    with pytest.raises(DamagedTrace, match="standard input, line 2: not a JSON object"):
        parse_trace([HEAD, "{"], "standard input")


EVIL = (
    '{"action": {"type": "os.system", "request": 0}}',
    '{"action": {"type": "__import__", "name": "os"}}',
    '{"action": {"type": "builtins.eval", "source": "1"}}',
    '{"action": {"type": "Lookup", "request": 0, "__class__": "os"}}',
    '{"action": {"type": "Lookup", "request": 0, "__init__": {"type": "Lookup"}}}',
    '{"action": {"type": "Path", "request": 0}}',
    '{"action": {"type": "Verdict", "rule": null}}',
    '{"py/object": "os.system", "action": {"type": "Lookup", "request": 0}}',
)


@pytest.mark.parametrize("line", EVIL)
def test_a_trace_is_data_and_executes_nothing(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    parse_trace([HEAD, GOOD], "good")  # hints are evaluated once, and they are our own
    ran: list[object] = []
    for name in ("eval", "exec", "compile", "__import__"):
        monkeypatch.setattr(builtins, name, lambda *given, **_: ran.append(given))
    with pytest.raises(DamagedTrace):
        parse_trace([HEAD, line], "evil")
    monkeypatch.undo()
    assert not ran


# Records


def test_defaults_are_left_out_and_put_back() -> None:
    assert encode(Allocate(1, 2)) == {"type": "Allocate", "request": 1, "new": 2}
    assert decode({"type": "Allocate", "request": 1, "new": 2}, Action) == Allocate(1, 2)


def test_a_record_of_another_type_is_refused() -> None:
    with pytest.raises(MalformedRecord, match="Lookup expected, not 'Trim'"):
        decode({"type": "Trim", "request": 0}, Lookup)
