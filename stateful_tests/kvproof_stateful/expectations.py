"""Known violations of an implementation: a file beside the targets, checked at every start.

Each names the rule, the versions that have it, what must have happened in a run for it to
count as this one, where it is written up, and a kept trace that still shows it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from kvproof_spec.trace import DamagedTrace, Trace, read_trace
from kvproof_stateful.coverage import GOALS


class BadExpectations(ValueError):
    """The file is not a list of known violations; the message says where and why."""


@dataclass(frozen=True, slots=True)
class KnownViolation:
    """`after`: a goal that a run must have reached before, or "" for any run."""

    rule: str
    versions: SpecifierSet
    after: str
    link: str
    trace: Path

    def covers(self, rule: str, version: str, reached: set[str]) -> bool:
        here = self.versions.contains(version, prereleases=True)
        return here and rule == self.rule and (not self.after or self.after in reached)

    def read(self) -> Trace:
        try:
            return read_trace(self.trace)
        except (DamagedTrace, OSError) as error:
            raise BadExpectations(f"kept trace of {self.rule}: {error}") from None


def default_expectations(target: str) -> Path | None:
    """The file that comes with kvproof for a target, if there is one."""
    path = Path(str(files("kvproof_stateful"))) / "known" / f"{target}.toml"
    return path if path.exists() else None


def read_expectations(path: Path) -> tuple[KnownViolation, ...]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadExpectations(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadExpectations(f"{path}: {error}") from None
    entries = content.pop("violation", [])
    if content or not isinstance(entries, list):
        raise BadExpectations(f"{path}: only [[violation]] tables are expected")
    return tuple(_parse(path, entry) for entry in entries)


def _parse(path: Path, entry: Any) -> KnownViolation:
    wanted = {"rule", "versions", "after", "link", "trace"}
    if not isinstance(entry, dict) or set(entry) != wanted:
        raise BadExpectations(f"{path}: a violation has {', '.join(sorted(wanted))}")
    if not all(isinstance(value, str) for value in entry.values()):
        raise BadExpectations(f"{path}: every value is a string")
    if entry["after"] and entry["after"] not in GOALS:
        raise BadExpectations(f"{path}: after is one of {', '.join(GOALS)}, or empty")
    try:
        versions = SpecifierSet(entry["versions"])
    except InvalidSpecifier as error:
        raise BadExpectations(f"{path}: {error}") from None
    trace = path.parent / entry["trace"]
    return KnownViolation(entry["rule"], versions, entry["after"], entry["link"], trace)
