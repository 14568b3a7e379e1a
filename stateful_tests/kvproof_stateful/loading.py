"""Targets by name: entry points of the group `kvproof.targets`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from kvproof_stateful.target import Target

GROUP = "kvproof.targets"


class NoSuchTarget(LookupError):
    """No entry point of this name; the message lists those there are."""


class TargetNotInstalled(ImportError):
    """What the target needs is not installed; the message says what."""


def installed_targets() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def load_target(name: str) -> Target:
    """A new instance of the named target."""
    points = installed_targets()
    if name not in points:
        raise NoSuchTarget(f"no target {name!r}; there are: {', '.join(points)}")
    try:
        target: Target = points[name].load()()
    except ImportError as error:
        raise TargetNotInstalled(
            f"target {name} cannot be loaded here: {error} (see docs/targets.md for what it needs)"
        ) from error
    return target
