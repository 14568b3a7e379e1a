"""How soon the faults are found, by which rule, and how short their traces get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from kvproof_spec.trace import Trace
from kvproof_stateful.campaign import Budget
from kvproof_stateful.faults import FAULTS
from kvproof_stateful.faults.search import (
    Search,
    UniformSearch,
    kept_trace,
    search,
    shrunk_trace,
)

COMPARED = (
    "double-free-in-one-batch",
    "key-kept-on-reuse",
    "touch-after-allocation",
    "hits-held-group-by-group",
    "reclaimable-hits-not-counted",
    "hit-of-all-tokens",
    "one-bit-hash",
    "window-block-returned-in-flight",
    "unordered-load-findable-before-arrival",
    "resumed-row-appended",
    "stale-output-advances-computed",
    "store-source-reused",
)
"""The faults on which generation is compared with plain uniform choice."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How a fault is measured: as data, for another process."""

    seeds: Sequence[int]
    seconds: float  # a search
    traces: Path | None = None  # the folder of kept traces, the shorter of which stand


@dataclass(frozen=True, slots=True)
class Row:
    """What came out for one fault.

    `found` holds what each search judged and took until the fault's rule was broken, None for
    one in vain; `first_rules` how many searches saw which rule broken first.
    """

    name: str
    found: tuple[tuple[int, float] | None, ...]
    first_rules: dict[str, int]
    trace: Trace | None

    @property
    def rule(self) -> str:
        return FAULTS[self.name].rule

    @property
    def caught_by_rule(self) -> str | None:
        """The rule that most searches saw broken first."""
        return max(self.first_rules, key=self.first_rules.__getitem__, default=None)

    @property
    def successes(self) -> int:
        return sum(one is not None for one in self.found)

    @property
    def caught(self) -> bool:
        """By the rule that it breaks, in most searches, with a trace to show."""
        most = 2 * self.successes > len(self.found)
        return most and self.caught_by_rule == self.rule and self.trace is not None

    @property
    def actions(self) -> float | None:
        """The median, if most searches found it: one in vain is longer than any other."""
        return self._median([one and one[0] for one in self.found])

    @property
    def seconds(self) -> float | None:
        return self._median([one and one[1] for one in self.found])

    @staticmethod
    def _median(values: Sequence[float | None]) -> float | None:
        middle = median(inf if value is None else value for value in values)
        return None if middle == inf else middle

    def to_json(self) -> dict[str, Any]:
        return {
            **FAULTS[self.name].to_json(),
            "caught_by_rule": self.caught_by_rule,
            "caught": self.caught,
            "actions": self.actions,
            "seconds": None if self.seconds is None else round(self.seconds, 2),
            "trace_actions": len(self.trace.lines) if self.trace else None,
            "found": self.successes,
            "searches": len(self.found),
            "first_rules": self.first_rules,
        }


Done = TypeVar("Done")


def measure(name: str, measuring: Measuring) -> Row:
    """Search with each seed, and shrink the shortest run that was found."""
    fault = FAULTS[name]
    found = [search(fault, seed, Budget(seconds=measuring.seconds)) for seed in measuring.seeds]
    detections = [detection for detection in found if detection is not None]
    kept = kept_trace(measuring.traces, fault) if measuring.traces else None
    traces = [trace for trace in (kept, shrunk_trace(fault, detections)) if trace]
    return Row(
        name=name,
        found=tuple((one.actions, one.seconds) if one else None for one in found),
        first_rules=dict(Counter(detection.first_rule for detection in detections)),
        trace=min(traces, key=lambda trace: len(trace.lines), default=None),
    )


def each_in_workers(
    work: Callable[[str], Done], names: Sequence[str], workers: int
) -> Iterator[Done]:
    """`work(name)` in the order of the names, each as soon as it and those before it are there."""
    if workers == 1:
        yield from map(work, names)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(work, name) for name in names]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Median judged actions until one fault's rule is broken: by a campaign, and by uniform choice.

    A search in vain counts with the actions that it was given: the median is at least that.
    """

    name: str
    actions: float
    uniform_actions: float

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "actions": self.actions,
            "uniform_actions": self.uniform_actions,
        }


def compare(name: str, seeds: Sequence[int], most_actions: int) -> Comparison:
    """The same seeds and the same number of actions for both."""

    def actions(kind: type[Search]) -> float:
        budget = Budget(actions=most_actions)
        found = [search(FAULTS[name], seed, budget, kind) for seed in seeds]
        return median(
            most_actions if found_one is None else found_one.actions for found_one in found
        )

    return Comparison(name, actions(Search), actions(UniformSearch))
