"""A manager with a clock around each of its calls, for a scheduler to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any, ClassVar

from kvproof_reference.block_pool import Copy
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_spec.config import Group
from kvproof_spec.prefix import Inputs

BUCKETS = ("lookup", "allocate", "decode", "free", "hashing", "events")
"""What is timed apart.  A decode allocates one token, all other allocations are `allocate`."""

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 18


class NotThere(Exception):
    """What was asked for cannot be measured; the message says why."""


def clock_overhead() -> float:
    """Nanoseconds that the clock itself adds between two readings."""
    readings = []
    for _ in range(1000):
        start = perf_counter_ns()
        readings.append(perf_counter_ns() - start)
    return median(readings)


@dataclass(slots=True)
class Ledger:
    """Nanoseconds and calls by bucket."""

    overhead: float
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))

    def add(self, bucket: str, nanoseconds: int) -> None:
        self.spent[bucket] += nanoseconds
        self.calls[bucket] += 1

    def take(self) -> dict[str, tuple[float, int]]:
        """(nanoseconds without the clock's own, calls) since the last time, by bucket."""
        taken = {
            bucket: (max(self.spent[bucket] - self.overhead * calls, 0.0), calls)
            for bucket, calls in self.calls.items()
            if calls
        }
        for bucket in BUCKETS:
            self.spent[bucket] = self.calls[bucket] = 0
        return taken


@dataclass(frozen=True, slots=True)
class Variant:
    """What is switched on beside plain caching."""

    name: str
    extra_keys: bool = False  # each request has an adapter and a salt
    events: bool = False


BASE = Variant("base")
VARIANTS = (BASE, Variant("extra keys", extra_keys=True), Variant("events", events=True))


class Timed(ABC):
    """`kvproof_reference.scheduler.Manager` over some manager, whose own calls alone are timed.

    An allocation is timed to the ids that go to the worker: its new ones, or at admission
    all.  Digests are made up to date before a call, so that they are timed apart.
    """

    name: ClassVar[str]

    def __init__(self, num_blocks: int, variant: Variant = BASE) -> None:
        self.num_blocks = num_blocks
        self.variant = variant
        self.manager = self.build(num_blocks, variant)
        self.ledger = Ledger(clock_overhead())
        self._hashed: dict[int, int] = {}  # digests made, by request id

    @abstractmethod
    def build(self, num_blocks: int, variant: Variant) -> Any:
        """The manager."""

    @abstractmethod
    def make_request(self, request_id: int, tokens: Sequence[int]) -> Request:
        """A request for the scheduler, by the variant with extra keys or without."""

    @abstractmethod
    def own(self, request: Request) -> Any:
        """What the manager takes for the request, with the same tokens and counts."""

    @abstractmethod
    def hash(self, own: Any) -> None:
        """Make the digests of all full blocks."""

    @abstractmethod
    def ids(self, granted: Any) -> Sequence[Sequence[int]] | None:
        """The new blocks' ids, as the worker is sent them; perhaps None if there is none."""

    @abstractmethod
    def table(self, request_id: int) -> Sequence[Sequence[int]]: ...

    @abstractmethod
    def withdraw(self, request: Request, num_issued_tokens: int) -> None: ...

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._hashed.pop(request_id, None)

    def num_free_blocks(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    @property
    def block_pool(self) -> Any:
        return self.manager.block_pool

    def new_step_starts(self) -> None:
        """What the last step announced is taken."""
        self.manager.new_step_starts()
        if self.variant.events:
            start = perf_counter_ns()
            self.manager.take_events()
            self.ledger.add("events", perf_counter_ns() - start)

    def _up_to_date(self, request: Request) -> Any:
        own = self.own(request)
        full_blocks = request.num_tokens // BLOCK_SIZE
        if full_blocks > self._hashed.get(request.request_id, 0):
            self._hashed[request.request_id] = full_blocks
            start = perf_counter_ns()
            self.hash(own)
            self.ledger.add("hashing", perf_counter_ns() - start)
        return own

    def get_computed_blocks(self, request: Request) -> tuple[Any, int]:
        own = self._up_to_date(request)
        start = perf_counter_ns()
        blocks, tokens, *_ = self.manager.get_computed_blocks(own)
        self.ledger.add("lookup", perf_counter_ns() - start)
        return blocks, tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        *,
        full_sequence_must_fit: bool = False,
        **unused: int,
    ) -> BlockIds | None:
        """`unused` are 0: no tokens come from elsewhere, and there is no encoder."""
        own = self._up_to_date(request)
        if new_computed_blocks is not None:
            start = perf_counter_ns()
            granted = self.manager.allocate_slots(
                own,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                full_sequence_must_fit=full_sequence_must_fit,
            )
            table = None if granted is None else self.table(request.request_id)
            self.ledger.add("allocate", perf_counter_ns() - start)
            return None if granted is None else as_ids(table)
        start = perf_counter_ns()
        granted = self.manager.allocate_slots(own, num_new_tokens)
        new = None if granted is None else self.ids(granted)
        spent = perf_counter_ns() - start
        self.ledger.add("decode" if num_new_tokens == 1 else "allocate", spent)
        return None if granted is None else as_ids(new)

    def get_block_ids(self, request_id: int) -> BlockIds:
        """Of an admitted request they were timed with its allocation."""
        return as_ids(self.table(request_id))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        self.manager.cache_blocks(self._up_to_date(request), num_computed_tokens)

    def free(
        self, request: Request, in_use_until: int | None = None, until_stored: bool = False
    ) -> None:
        assert in_use_until is None
        assert not until_stored
        own = self.own(request)
        start = perf_counter_ns()
        self.manager.free(own)
        self.ledger.add("free", perf_counter_ns() - start)

    # One step is in flight, and there is neither a connector nor a page to copy or clear.

    def step_completed(self, step_id: int) -> None:
        """Nothing is deferred."""
        return

    def store_completed(self, request_id: int) -> None:
        """Nothing is stored."""
        return

    def take_block_copies(self, in_use_until: int | None = None) -> tuple[Copy, ...]:
        return ()

    def take_new_block_ids(self) -> tuple[int, ...]:
        return ()

    def deferred_blocks(self) -> tuple[int, ...]:
        return ()


def as_ids(parts: Sequence[Sequence[int]] | None) -> BlockIds:
    return ((),) if parts is None else tuple(tuple(part) for part in parts)


class TimedPlain(Timed):
    """The plain manager of kvproof_reference."""

    name = "plain"

    def build(self, num_blocks: int, variant: Variant) -> KVCacheManager:
        return KVCacheManager(
            [Group("full", BLOCK_SIZE)],
            num_blocks,
            max_model_len=MAX_MODEL_LEN,
            enable_kv_cache_events=variant.events,
        )

    def make_request(self, request_id: int, tokens: Sequence[int]) -> Request:
        return make_request(request_id, tokens, self.variant)

    def own(self, request: Request) -> Request:
        return request

    def hash(self, own: Request) -> None:
        self.manager.coordinator.block_hashes(own)

    def ids(self, granted: BlockIds) -> BlockIds:
        return granted

    def table(self, request_id: int) -> BlockIds:
        table: BlockIds = self.manager.get_block_ids(request_id)
        return table

    def withdraw(self, request: Request, num_issued_tokens: int) -> None:
        self.manager.withdraw(request, num_issued_tokens)


class TimedPlainAgain(TimedPlain):
    """The other side when the plain manager is measured against itself."""

    name = "plain, again"


def make_request(request_id: int, tokens: Sequence[int], variant: Variant) -> Request:
    """With extra keys: one of four adapters and one of four tenants, by request."""
    if not variant.extra_keys:
        return Request(request_id, tokens)
    adapter, tenant = extra_keys(request_id)
    return Request(request_id, tokens, inputs=Inputs(lora=adapter, salt=tenant))


def extra_keys(request_id: int) -> tuple[str, str]:
    """(adapter, salt) of a request."""
    return f"adapter-{request_id % 4}", f"tenant-{request_id % 4}"
