"""Targets by name: entry points of the group `kvproof.targets`."""

from __future__ import annotations

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
    """A new instance of the named target, and what it says of itself."""
    points = installed_targets()
    if name not in points:
        raise NoSuchTarget(f"no target {name!r}; there are: {', '.join(points)}")
    try:
        target: Target = points[name].load()()
        return target, target.hello()
    except ImportError as error:
        raise TargetNotInstalled(
            f"target {name} cannot be loaded here: {error} (see docs/targets.md for what it needs)"
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise TargetFailed(f"target {name} cannot be made: {text}") from error
