"""Targets by name: entry points of the group `kvproof.targets`, or `module:Class`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points

from kvproof_stateful.target import Hello, Target, TargetFailed

GROUP = "kvproof.targets"


class NoSuchTarget(LookupError):
    """No entry point of this name; the message lists those there are."""


class TargetNotInstalled(ImportError):
    """What the target needs is not installed; the message says what."""


def installed_targets() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def load_target(name: str) -> tuple[Target, Hello]:
    """A new instance of the named target, and what it says of itself.

    `name` is an entry point, or `module:Class` of what is importable from here.
    """
    point = installed_targets().get(name)
    if point is None and ":" in name:
        point = EntryPoint(name, name, GROUP)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    if point is None:
        there = ", ".join(installed_targets())
        raise NoSuchTarget(f"no target {name!r}; there are: {there}, or name module:Class")
    try:
        target: Target = point.load()()
        return target, target.hello()
    except ImportError as error:
        raise TargetNotInstalled(
            f"target {name} cannot be loaded here: {error} (see docs/targets.md for what it needs)"
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise TargetFailed(f"target {name} cannot be made: {text}") from error


def name_of(target: Target) -> str | None:
    """A name that `load_target` finds the target's class by, if there is one."""
    kind = type(target)
    here = f"{kind.__module__}:{kind.__qualname__}"
    for name, point in installed_targets().items():
        if point.value == here:
            return name
    return None if "<" in here or kind.__module__ == "__main__" else here
