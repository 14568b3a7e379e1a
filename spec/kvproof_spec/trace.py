"""Traces: what was asked, what was answered, and what was judged, a line each.

A trace is NDJSON.  The first line is the header: format version, configuration, target,
seed and command.  Every other line has an action under "action", its answer under
"answer", and where they exist a snapshot and a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproof_spec.actions import Action
from kvproof_spec.answers import Answer, Snapshot
from kvproof_spec.config import Config
from kvproof_spec.records import MalformedRecord, decode, encode

FORMAT_VERSION = 1


class DamagedTrace(ValueError):
    """A file that is not a trace of this format; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the last line of a failing trace broke; `rule` is None for what held."""

    rule: str | None
    witness: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One action, and what came of it."""

    action: Action
    answer: Answer | None = None  # None: the target failed to answer
    snapshot: Snapshot | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """Where a trace comes from, and what is needed to perform it again."""

    config: Config
    target: str
    target_version: str = ""
    level: str = "contract"
    without: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()  # of the policy's engine, that the target has
    seed: int = 0
    command: str = ""
    kvproof: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Trace:
    """A header and its lines, in the order in which they happened."""

    header: Header
    lines: tuple[Line, ...] = field(default=())

    @property
    def verdict(self) -> Verdict | None:
        """That of the last line: a violation ends a trace."""
        return self.lines[-1].verdict if self.lines else None


def dump_json(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "), ensure_ascii=False)


def dump_line(line: Line) -> str:
    """One line of a trace file, without the end of line."""
    encoded = encode(line)
    del encoded["type"]
    if "verdict" in encoded:
        del encoded["verdict"]["type"]
    return dump_json(encoded)


def dump_trace(trace: Trace) -> Iterator[str]:
    header = encode(trace.header)
    header["kvproof"] = FORMAT_VERSION
    header.pop("type")
    yield dump_json(dict(sorted(header.items(), key=lambda item: item[0] != "kvproof")))
    for line in trace.lines:
        yield dump_line(line)


def write_trace(path: Path, trace: Trace) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in dump_trace(trace)), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Read a trace; `DamagedTrace` if it is not one, `OSError` if it cannot be opened."""
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DamagedTrace(f"{path}: not UTF-8 text ({error.reason})") from None
    if texts[-1] != "":
        raise DamagedTrace(f"{path}, line {len(texts)}: cut off, the end of line is missing")
    return parse_trace(texts[:-1], str(path))


def parse_trace(texts: Iterable[str], name: str) -> Trace:
    header: Header | None = None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            value = json.loads(text)
            if header is None:
                header = _parse_header(value)
            else:
                lines.append(decode(value, Line))
        except (ValueError, RecursionError) as error:
            reason = "not a JSON object" if isinstance(error, json.JSONDecodeError) else error
            raise DamagedTrace(f"{name}, line {number}: {reason}") from None
    if header is None:
        raise DamagedTrace(f"{name}: empty, a trace begins with its header")
    return Trace(header, tuple(lines))


def _parse_header(value: Any) -> Header:
    version = value.get("kvproof") if isinstance(value, dict) else None
    if type(version) is not int:
        raise MalformedRecord('no header: {"kvproof": 1, ...} is expected')
    if version > FORMAT_VERSION:
        raise MalformedRecord(
            f"format {version} is newer than this kvproof reads ({FORMAT_VERSION}): upgrade kvproof"
        )
    if version != FORMAT_VERSION:
        raise MalformedRecord(f"there is no format {version}")
    header = decode(value, Header)
    assert isinstance(header, Header)
    return header
