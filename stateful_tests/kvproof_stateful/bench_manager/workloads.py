"""What is measured: requests in order of arrival, and how they are scheduled."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvproof_spec.config import Config, Group, Scheduling
from kvproof_stateful.bench_manager.timed import BLOCK_SIZE, MAX_MODEL_LEN

TRACE = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "conversation.jsonl.gz"
"""In a checkout; a wheel has no data."""

PIECE = 512  # tokens that one id of the trace stands for
VOCABULARY = 1 << 17
FILLER = tuple(range(VOCABULARY))


class Arrival(NamedTuple):
    """A request that comes when there is room in the system."""

    tokens: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`in_system` requests are submitted and unfinished at any time, while there are more.

    Nothing is measured in the first `warm_up` steps; then each `round` steps are a round,
    a few milliseconds: short enough that most are not interrupted by other processes.
    """

    name: str
    title: str
    num_blocks: int  # with the null block
    in_system: int
    arrivals: Callable[[], Iterator[Arrival]]
    warm_up: int
    round: int
    max_num_batched_tokens: int = 8192

    @property
    def config(self) -> Config:
        return Config(
            groups=(Group("full", BLOCK_SIZE),),
            num_blocks=self.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            scheduling=Scheduling(
                max_num_seqs=self.in_system,
                max_num_batched_tokens=self.max_num_batched_tokens,
                whole_sequence_check=False,
            ),
        )


@dataclass(frozen=True, slots=True)
class Size:
    """How much of each workload: all at scale 1, and no more than `requests` requests."""

    scale: float = 1.0
    requests: int | None = None

    def of(self, number: int, least: int = 2) -> int:
        return max(least, round(number * self.scale))

    def requests_of(self, number: int) -> int:
        scaled = self.of(number)
        return scaled if self.requests is None else max(1, min(scaled, self.requests))


def stretch(number: int, count: int) -> Sequence[int]:
    """`count` token ids that are another prefix for each number."""
    start = number * 977 % (VOCABULARY // 2)
    name = (number % VOCABULARY, number // VOCABULARY)
    return (*name, *FILLER[start : start + count - 2])[:count]


def unique(request: int, count: int) -> Sequence[int]:
    """Tokens that no other request begins with, nor a stretch of a smaller number."""
    return stretch((1 << 30) + request, count)


def long_prefix(size: Size) -> Workload:
    together = size.of(64)
    shared, own = stretch(0, 28 * 1024), 4 * 1024

    def arrivals() -> Iterator[Arrival]:
        for request in range(size.requests_of(640)):
            yield Arrival([*shared, *unique(request, own)], 1 + request % 16)

    needed = (len(shared) + together * (own + PIECE)) // BLOCK_SIZE
    return Workload(
        "a",
        "long shared prefix: 32k tokens, 28k of them shared, churn",
        num_blocks=1 + needed + needed // 20,
        in_system=together,
        arrivals=arrivals,
        warm_up=2,
        round=1,
        max_num_batched_tokens=1 << 22,
    )


def chat(size: Size) -> Workload:
    together = size.of(128)

    def arrivals() -> Iterator[Arrival]:
        rng = Random("chat")
        for request in range(size.requests_of(2000)):
            prompt = stretch(rng.randrange(8), PIECE)
            yield Arrival([*prompt, *unique(request, rng.randint(32, 512))], 64)

    return Workload(
        "b",
        "chat under pressure: shared system prompts, 64 decodes each",
        num_blocks=1 + 8 * PIECE // BLOCK_SIZE + together * 15,
        in_system=together,
        arrivals=arrivals,
        warm_up=size.of(100),
        round=8,
    )


def decode(size: Size) -> Workload:
    together = size.requests_of(256)
    steps = 512 + size.of(768)

    def arrivals() -> Iterator[Arrival]:
        for request in range(together):
            # Not all blocks of the batch get full in the same step.
            yield Arrival(unique(request, 500 + request % BLOCK_SIZE), steps)

    return Workload(
        "c",
        "decode only, 256 running",
        num_blocks=1 + together * (500 + steps + 2 * BLOCK_SIZE) // BLOCK_SIZE,
        in_system=together,
        arrivals=arrivals,
        warm_up=20,
        round=4,
        max_num_batched_tokens=1 << 20,
    )


def storm(size: Size) -> Workload:
    count = size.requests_of(2400)
    together = min(8, max(1, count // 5))

    def arrivals() -> Iterator[Arrival]:
        for request in range(count):
            yield Arrival(unique(request, 1024), 1)

    return Workload(
        "d",
        "eviction storm: unique requests, always evicting",
        num_blocks=1 + 2 * together * 1024 // BLOCK_SIZE,
        in_system=together,
        arrivals=arrivals,
        warm_up=3,
        round=2,
    )


def production(size: Size, trace: Path = TRACE) -> Workload:
    count = size.requests_of(2000)

    def arrivals() -> Iterator[Arrival]:
        return islice(read_trace(trace), count)

    return Workload(
        "e",
        f"the first {count:,} requests of a production trace",
        num_blocks=1 + 16_384,
        in_system=32,
        arrivals=arrivals,
        warm_up=size.of(200),
        round=60,
    )


WORKLOADS: dict[str, Callable[[Size], Workload]] = {
    "a": long_prefix,
    "b": chat,
    "c": decode,
    "d": storm,
    "e": production,
}


def read_trace(path: Path) -> Iterator[Arrival]:
    """The trace's requests; equal ids give equal tokens, a last part of a piece its own."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for request, line in enumerate(lines):
            num_input, num_output, runs = json.loads(line)
            tokens: list[int] = []
            for first, count in runs:
                for piece in range(first, first + count):
                    tokens += stretch(piece, PIECE)
            whole = num_input - num_input % PIECE
            yield Arrival([*tokens[:whole], *unique(request, num_input - whole)], num_output)
