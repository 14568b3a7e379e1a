"""Campaigns, targets, reports and the command line: the specification put to use."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvproof")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0"
