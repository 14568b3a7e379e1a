"""Campaigns, targets, reports and the command line: the specification put to use."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvproof_stateful.machine import machine_for

__all__ = ["__version__", "machine_for"]

try:
    __version__ = version("kvproof")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0"


def __getattr__(name: str) -> object:
    """Import `machine_for`, and Hypothesis with it, only where it is used."""
    if name == "machine_for":
        from kvproof_stateful.machine import machine_for

        return machine_for
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
