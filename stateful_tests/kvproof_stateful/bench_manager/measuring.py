"""Two managers under the same scheduler and requests, a round of one after a round of the other.

What else the machine does falls on both alike: a ratio is taken within each pair of rounds,
and reported as the median of all pairs with its quartiles.  The steps of both must be the
same, block for block.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles

from kvproof_reference.scheduler import Scheduler
from kvproof_reference.steps import SchedulerOutput
from kvproof_stateful.bench_manager.timed import (
    BASE,
    BLOCK_SIZE,
    BUCKETS,
    Timed,
    Variant,
)
from kvproof_stateful.bench_manager.workloads import Arrival, Size, Workload, stretch, unique

Make = Callable[[int, Variant], Timed]
Spent = dict[str, tuple[float, int]]  # (nanoseconds, calls) by bucket

TOTAL = "total"


class Disagreement(Exception):
    """The two managers did not do the same: nothing can be compared."""


class Engine:
    """One manager under the scheduler, fed with a workload's requests."""

    def __init__(self, timed: Timed, workload: Workload) -> None:
        self.timed = timed
        self.workload = workload
        self.arrivals = workload.arrivals()
        self.scheduler = Scheduler(timed, workload.config)
        self.arrived = 0
        self.preempted = 0
        self.hit_tokens = 0
        self.steps = 0

    def step(self) -> SchedulerOutput | None:
        """A step, and its return; None once all requests have ended."""
        self._let_in()
        if not self.scheduler.requests:
            return None
        output = self.scheduler.schedule()
        sampled = {row.request_id: self._token(row.request_id) for row in output.rows}
        for request_id in self.scheduler.update_from_output(output, sampled).finished:
            self.timed.forget(request_id)
        self.steps += 1
        self.preempted += len(output.preempted)
        self.hit_tokens += sum(
            row.num_computed_tokens for row in output.rows if row.kind != "running"
        )
        return output

    def _let_in(self) -> None:
        while len(self.scheduler.requests) < self.workload.in_system:
            arrival = next(self.arrivals, None)
            if arrival is None:
                return
            request = self.timed.make_request(self.arrived, arrival.tokens)
            self.scheduler.add_request(request, max_tokens=arrival.max_tokens)
            self.arrived += 1

    def _token(self, request_id: int) -> int:
        return (request_id * 7919 + self.steps * 104_729) % 32_000


@dataclass(slots=True)
class Rounds:
    """What was measured of one workload; both managers' spendings, round by round."""

    workload: Workload
    variant: Variant
    managers: tuple[str, str]
    spent: list[tuple[Spent, Spent]] = field(default_factory=list)  # (ours, theirs)
    steps: int = 0
    requests: int = 0
    hit_tokens: int = 0
    preempted: int = 0

    def ratios(self, bucket: str) -> list[float]:
        """Theirs to ours, for each round in which both spent time on the bucket."""
        pairs = [
            (nanoseconds(ours, bucket), nanoseconds(theirs, bucket)) for ours, theirs in self.spent
        ]
        return [theirs / ours for ours, theirs in pairs if ours and theirs]

    def microseconds(self, bucket: str, whose: int) -> float | None:
        """Median time of a call of the bucket; of all calls of a step for the total."""
        each = []
        for pair in self.spent:
            calls = self.workload.round if bucket == TOTAL else pair[whose].get(bucket, (0, 0))[1]
            if calls:
                each.append(nanoseconds(pair[whose], bucket) / calls / 1000)
        return median(each) if each else None


def nanoseconds(spent: Spent, bucket: str) -> float:
    if bucket == TOTAL:
        return sum(time for time, _ in spent.values())
    return spent.get(bucket, (0.0, 0))[0]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


@contextmanager
def no_garbage_collection() -> Generator[None]:
    """Collected before and after, so that it falls on nobody."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(make: tuple[Make, Make], workload: Workload, variant: Variant) -> Iterator[Rounds]:
    """What was measured so far, after each pair of rounds."""
    engines = [Engine(each(workload.num_blocks, variant), workload) for each in make]
    ours, theirs = engines
    rounds = Rounds(workload, variant, (ours.timed.name, theirs.timed.name))
    with no_garbage_collection():
        more = run_together(engines, workload.warm_up)
        for engine in engines:
            engine.timed.ledger.take()
        order = Random(workload.name)
        while more:
            order.shuffle(engines)
            more = run_together(engines, workload.round)
            spent = ours.timed.ledger.take(), theirs.timed.ledger.take()
            if more or not rounds.spent:  # the last round is a short one
                rounds.spent.append(spent)
            rounds.steps, rounds.requests = ours.steps, ours.arrived
            rounds.hit_tokens, rounds.preempted = ours.hit_tokens, ours.preempted
            yield rounds


def run_together(engines: Sequence[Engine], steps: int) -> bool:
    """`steps` steps of each, one engine after the other; False if the requests ran out.

    `Disagreement` unless rows, hits, blocks, preemptions and usage are the same.
    """
    seen: list[list[tuple[SchedulerOutput, int]]] = []
    for engine in engines:
        outputs = []
        for _ in range(steps):
            output = engine.step()
            if output is None:
                break
            outputs.append((output, engine.timed.num_free_blocks()))
        seen.append(outputs)
    for (one, one_free), (other, other_free) in zip(*seen, strict=False):
        if one != other or one_free != other_free:
            first, second = (engine.timed.name for engine in engines)
            raise Disagreement(
                f"workload {engines[0].workload.name}, step {one.step_id}: {first} has "
                f"{one_free} blocks free after {one}, {second} {other_free} after {other}"
            )
    if len(seen[0]) != len(seen[1]):
        raise Disagreement(f"workload {engines[0].workload.name}: one ended before the other")
    return len(seen[0]) == steps


# How it grows with the pool

POOLS = tuple(1 << power for power in (10, 12, 14, 16, 18))
TOUCHED = 64  # blocks of a request, half of them a hit


@dataclass(frozen=True, slots=True)
class Scaling:
    """Microseconds of a call, by manager and bucket, in a full pool of this size."""

    num_blocks: int
    microseconds: dict[str, dict[str, float]]


def pool_workload(num_blocks: int) -> Workload:
    """Every block has been handed out and is findable; then requests that hit half."""
    tokens = TOUCHED * BLOCK_SIZE
    filling = num_blocks // TOUCHED

    def arrivals() -> Iterator[Arrival]:
        for request in range(filling):
            yield Arrival(unique(request, tokens), 1)
        shared = stretch(0, tokens // 2)
        for request in range(filling, filling + 8 * 40):
            yield Arrival([*shared, *unique(request, tokens // 2)], 2)

    return Workload("pool", "", 1 + num_blocks, 4, arrivals, warm_up=filling // 4 + 2, round=4)


def scaling(make: tuple[Make, Make], pools: Sequence[int] = POOLS) -> Iterator[Scaling]:
    for num_blocks in pools:
        *_, rounds = measure(make, pool_workload(num_blocks), BASE)
        names = (rounds.managers[0], rounds.managers[1])
        yield Scaling(
            num_blocks,
            {
                name: {
                    bucket: microseconds
                    for bucket in BUCKETS
                    if (microseconds := rounds.microseconds(bucket, whose)) is not None
                }
                for whose, name in enumerate(names)
            },
        )


def bytes_per_block(make: Make, size: Size) -> tuple[float, float]:
    """(of an empty pool, of one whose blocks can all be found), as tracemalloc counts them."""
    num_blocks = max(TOUCHED, TOUCHED * round(64 * min(size.scale, 1)))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        timed = make(1 + num_blocks, BASE)
        empty = tracemalloc.get_traced_memory()[0] - before
        workload = pool_workload(num_blocks)
        engine = Engine(timed, workload)
        while engine.arrived <= num_blocks // TOUCHED:
            engine.step()
        for request_id in list(engine.scheduler.requests):
            engine.scheduler.finish_request(request_id)
            timed.forget(request_id)
        del engine
        gc.collect()
        full = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return empty / num_blocks, full / num_blocks
