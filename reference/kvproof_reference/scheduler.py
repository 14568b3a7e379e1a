"""A small scheduler, in vLLM's words: which requests compute how many tokens in the next step.

Each request has a number of known tokens, and a number of computed ones that tries to catch
up.  `schedule` may be called again before a step has returned: a request then computes a
token that is still being sampled.  When blocks run out, the least important running request
gives way, and starts again later.

A connector may have a request's first tokens.  Either they come with its first step, or by an
unordered load: then the request holds its blocks and waits, and goes on when the load has
ended.  A request that ends may be stored: its blocks are kept until that has ended, too.

It works over any manager with vLLM's method names, the plain one or another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple, Protocol

from kvproof_reference.block_pool import BlockPool, Copy
from kvproof_reference.chunks import saving_chunk, state_block_size
from kvproof_reference.connector import Connector, NoConnector
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.request import Request
from kvproof_reference.steps import (
    Ended,
    Kind,
    Load,
    Row,
    SchedulerOutput,
    Stats,
    StepInTheMaking,
)
from kvproof_spec.config import Config

Status = Literal["waiting", "loading", "running", "preempted"]


class Manager(Protocol):
    """What a scheduler asks of a manager."""

    @property
    def block_pool(self) -> BlockPool: ...

    def new_step_starts(self) -> None: ...

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]: ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Sequence[Sequence[int]] | None = None,
        *,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> BlockIds | None: ...

    def get_block_ids(self, request_id: int) -> BlockIds: ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...

    def withdraw(self, request: Request, num_issued_tokens: int) -> None: ...

    def free(
        self, request: Request, in_use_until: int | None = None, until_stored: bool = False
    ) -> None: ...

    def step_completed(self, step_id: int) -> None: ...

    def store_completed(self, request_id: int) -> None: ...

    def take_block_copies(self, in_use_until: int | None = None) -> tuple[Copy, ...]: ...

    def take_new_block_ids(self) -> tuple[int, ...]: ...

    def deferred_blocks(self) -> tuple[int, ...]: ...


class NeverFits(Exception):
    """A request is refused although nothing else holds a block: it would wait for ever."""


@dataclass(slots=True)
class Tracked:
    """A request as the scheduler counts it.

    `rank` is smaller the more important it is.  It ends when it has `most_tokens` tokens.
    `num_output_placeholders` tokens are being sampled by steps in flight; `last_step` is
    the last one that it has a row in.  `first_row` is how its next row is announced, if the
    worker does not have the one of its present admission yet.
    """

    request: Request
    rank: tuple[int, int]
    most_tokens: int
    num_encoder_tokens: int = 0
    status: Status = "waiting"
    num_output_placeholders: int = 0
    last_step: int | None = None
    first_row: Kind | None = "new"

    @property
    def id(self) -> int:
        return self.request.request_id

    @property
    def num_tokens_to_come(self) -> int:
        """Tokens known once all its steps have returned."""
        return self.request.num_tokens + self.num_output_placeholders


class Found(NamedTuple):
    """What need not be computed of a request: hits, and what the connector has, in tokens."""

    hits: BlockIds
    num_hit_tokens: int
    num_external_tokens: int
    is_unordered: bool

    @property
    def num_tokens(self) -> int:
        return self.num_hit_tokens + self.num_external_tokens


class Scheduler:
    """Requests that wait, and those that run, over one manager.

    If the configuration defers returns, the blocks of a request that leaves while its steps
    are in flight come back when the last of these steps has.

    Progress (R11): the most important running request is never preempted, and nobody is
    admitted while a running one lacks blocks.  Once nobody submits any more and every load
    has ended, every request that fits the empty pool ends within two calls a token of all
    that are left.
    """

    def __init__(
        self, manager: Manager, config: Config, connector: Connector | None = None
    ) -> None:
        if config.scheduling is None:
            raise ValueError("the configuration has no scheduling")
        self.manager = manager
        self.config = config
        self.scheduling = config.scheduling
        self.connector = connector or NoConnector()
        if state_block_size(config) > self._largest_chunk():
            raise ValueError("a step is too small to reach the next state that is saved")
        self.requests: dict[int, Tracked] = {}  # by id, all that have not finished
        self.running: dict[int, Tracked] = {}  # by id, in order of admission
        self.loading: dict[int, Tracked] = {}  # by id, those that an unordered load fills
        self.stats = Stats()
        self._waiting: list[tuple[tuple[int, int], int]] = []  # a heap of (rank, id)
        self._finished: list[int] = []  # since the last step
        self._num_arrived = 0
        self._num_steps = 0

    # Requests

    def add_request(
        self,
        request: Request,
        *,
        priority: int = 0,
        max_tokens: int = 16,
        num_encoder_tokens: int = 0,
    ) -> None:
        """Queue a request; it ends once it has sampled `max_tokens` tokens."""
        by_priority = self.scheduling.policy == "priority"
        tracked = Tracked(
            request,
            rank=(priority if by_priority else 0, self._num_arrived),
            most_tokens=min(request.num_tokens + max_tokens, self.config.max_model_len),
            num_encoder_tokens=num_encoder_tokens,
        )
        self._num_arrived += 1
        self.requests[tracked.id] = tracked
        self._enqueue(tracked)

    def finish_request(self, request_id: int) -> None:
        """End a request from outside; its steps in flight, and its load, return to nobody."""
        self._leave(self.requests[request_id], stored=False)

    def _end(self, tracked: Tracked) -> bool:
        """End a request that has sampled its last token; whether a store now reads its blocks."""
        stored = tracked.status == "running" and self.connector.request_finished(
            tracked.request, self.manager.get_block_ids(tracked.id)
        )
        self._leave(tracked, stored)
        return stored

    def _leave(self, tracked: Tracked, stored: bool) -> None:
        del self.requests[tracked.id]
        if tracked.status == "running":
            self._free(tracked, stored)
            del self.running[tracked.id]
        elif tracked.status == "loading":
            self._abandon(tracked)
            del self.loading[tracked.id]
        if tracked.last_step is not None:
            self._finished.append(tracked.id)

    def _abandon(self, tracked: Tracked) -> None:
        """A load goes on without its request: until it ends, nobody else may get the blocks."""
        self.manager.free(tracked.request, until_stored=True)

    def _enqueue(self, tracked: Tracked) -> None:
        heappush(self._waiting, (tracked.rank, tracked.id))

    def _first_waiting(self) -> Tracked | None:
        """The most important request that waits; those that ended meanwhile are dropped."""
        while self._waiting:
            tracked = self.requests.get(self._waiting[0][1])
            if tracked is not None and tracked.status in ("waiting", "preempted"):
                return tracked
            heappop(self._waiting)
        return None

    # A step is made

    def schedule(self) -> SchedulerOutput:
        """The next step, perhaps an empty one."""
        step = StepInTheMaking(self.scheduling.max_num_batched_tokens)
        self.manager.new_step_starts()
        if self._extend_running(step) and self._may_admit(step):
            self._admit_waiting(step)
        output = SchedulerOutput(
            step_id=self._num_steps,
            rows=tuple(step.rows.values()),
            preempted=tuple(step.preempted),
            finished=tuple(self._finished),
            withdrawn=tuple(step.withdrawn),
            loads=tuple(step.loads),
            copies=self._take_copies(),
            cleared=self.manager.take_new_block_ids(),
        )
        self._finished.clear()
        self._num_steps += 1
        self._issued(output)
        return output

    def _take_copies(self) -> tuple[Copy, ...]:
        """Where an unordered load could get their blocks, these come back with the step."""
        return self.manager.take_block_copies(
            self._num_steps if self.config.defers_returns else None
        )

    def _extend_running(self, step: StepInTheMaking) -> bool:
        """More tokens for whoever runs; False if one of them waits for blocks."""
        enough = True
        for tracked in list(self.running.values()):
            if tracked.status != "running":  # it gave way to one before it
                continue
            num_tokens = self._num_new_tokens(tracked, step)
            if num_tokens == 0:
                continue
            blocks = self._allocate(tracked, num_tokens, step)
            if blocks is not None:
                step.add(self._row(tracked, num_tokens, blocks))
            elif self._least_important() is tracked:
                enough = False  # it keeps what it has, until somebody else needs that
                self._require_others_hold(tracked)
            else:
                return False  # blocks that come back with steps: no more of these until then
        return enough

    def _may_admit(self, step: StepInTheMaking) -> bool:
        """Nobody is admitted into what others have just given up."""
        return not step.preempted

    def _num_new_tokens(self, tracked: Tracked, step: StepInTheMaking) -> int:
        to_come = tracked.num_tokens_to_come
        if to_come >= tracked.most_tokens:  # the steps in flight end it
            return 0
        return self._chunk(tracked, tracked.request.num_computed_tokens, step)

    def _chunk(self, tracked: Tracked, start: int, step: StepInTheMaking) -> int:
        """How many tokens from `start` on the request may compute in this step."""
        most = min(self._largest_chunk(), step.budget)
        num_tokens = min(tracked.num_tokens_to_come - start, most)
        return saving_chunk(self.config, tracked.request, start, num_tokens)

    def _largest_chunk(self) -> int:
        budget = self.scheduling.max_num_batched_tokens
        return min(self.scheduling.long_prefill_token_threshold or budget, budget)

    def _allocate(
        self, tracked: Tracked, num_tokens: int, step: StepInTheMaking
    ) -> BlockIds | None:
        """Blocks for a running request, for which less important ones give way."""
        while True:
            blocks = self.manager.allocate_slots(tracked.request, num_tokens)
            if blocks is not None:
                return blocks
            victim = self._least_important()
            if victim is tracked or self._returns_are_deferred(victim):
                return None
            self._preempt(victim, step)

    def _least_important(self) -> Tracked:
        return max(self.running.values(), key=lambda tracked: tracked.rank)

    def _require_others_hold(self, tracked: Tracked) -> None:
        waits = tracked.request.num_in_flight_tokens or self.manager.deferred_blocks()
        if not waits and not self.loading and not self.running.keys() - {tracked.id}:
            raise NeverFits(f"request {tracked.id} does not fit, and nothing else holds a block")

    def _preempt(self, victim: Tracked, step: StepInTheMaking) -> None:
        """Take everything from a running request; it starts again, and recomputes."""
        if step.take_back(victim.id):
            self._withdraw(victim)
        self._free(victim)
        del self.running[victim.id]
        victim.status, victim.first_row = "preempted", "resumed"
        self.stats.preemptions += 1
        victim.request.num_computed_tokens = 0
        victim.num_output_placeholders = 0
        step.preempted.append(victim.id)
        if self._may_resume(victim):
            self._enqueue(victim)

    def _withdraw(self, victim: Tracked) -> None:
        """No step will compute what this call has allocated: nobody may find it."""
        self.manager.withdraw(victim.request, victim.request.num_computed_tokens)

    def _may_resume(self, tracked: Tracked) -> bool:
        """Output that is still to come could be sampled a second time."""
        return tracked.request.num_in_flight_tokens == 0

    def _returns_are_deferred(self, tracked: Tracked) -> bool:
        return self.config.defers_returns and tracked.request.num_in_flight_tokens > 0

    def _free(self, tracked: Tracked, stored: bool = False) -> None:
        deferred = self._returns_are_deferred(tracked)
        self.manager.free(tracked.request, tracked.last_step if deferred else None, stored)

    def _admit_waiting(self, step: StepInTheMaking) -> None:
        """Start whoever waits, the most important first, until something runs out."""
        while step.budget > 0 and self._has_a_place():
            tracked = self._first_waiting()
            if tracked is None:
                return
            found = self._find(tracked)
            num_tokens = 0
            if not found.is_unordered:
                num_tokens = self._chunk(tracked, found.num_tokens, step)
                if num_tokens == 0:  # the next state is out of this step's reach
                    return
            blocks = self._allocate_first(tracked, found, num_tokens)
            if blocks is None:
                self._require_others_hold(tracked)
                return
            heappop(self._waiting)
            self._admit(tracked, found)
            if found.is_unordered:
                step.loads.append(Load(tracked.id, *found[1:3]))
            else:
                step.add(self._row(tracked, num_tokens, blocks, found.num_external_tokens))

    def _has_a_place(self) -> bool:
        return len(self.running) + len(self.loading) < self.scheduling.max_num_seqs

    def _find(self, tracked: Tracked) -> Found:
        hits, num_hit_tokens = self.manager.get_computed_blocks(tracked.request)
        if num_hit_tokens % self.config.common_block:  # it ends inside a block, which is copied
            return Found(hits, num_hit_tokens, 0, False)
        external, unordered = self.connector.get_num_new_matched_tokens(
            tracked.request, num_hit_tokens
        )
        return Found(hits, num_hit_tokens, external, unordered and external > 0)

    def _allocate_first(self, tracked: Tracked, found: Found, num_tokens: int) -> BlockIds | None:
        return self.manager.allocate_slots(
            tracked.request,
            num_tokens,
            found.num_hit_tokens,
            found.hits,
            num_external_computed_tokens=found.num_external_tokens,
            delay_cache_blocks=found.is_unordered,
            num_encoder_tokens=tracked.num_encoder_tokens,
            full_sequence_must_fit=self.scheduling.whole_sequence_check,
        )

    def _admit(self, tracked: Tracked, found: Found) -> None:
        tracked.request.num_computed_tokens = found.num_tokens
        tracked.status = "loading" if found.is_unordered else "running"
        (self.loading if found.is_unordered else self.running)[tracked.id] = tracked
        if self.config.caching:
            self.stats.queries += tracked.request.num_tokens
            self.stats.hits += found.num_hit_tokens
        self.connector.update_state_after_alloc(
            tracked.request, self.manager.get_block_ids(tracked.id), found.num_external_tokens
        )

    def _whole_table(self, tracked: Tracked, new_blocks: BlockIds) -> BlockIds:
        """The worker has no row of the request, or an old one: it needs the hits as well."""
        return self.manager.get_block_ids(tracked.id)

    def _row(
        self, tracked: Tracked, num_tokens: int, new_blocks: BlockIds, num_external_tokens: int = 0
    ) -> Row:
        start = tracked.request.num_computed_tokens
        return Row(
            tracked.id,
            tracked.first_row or "running",
            start,
            num_tokens,
            start + num_tokens >= tracked.num_tokens_to_come,
            self._whole_table(tracked, new_blocks) if tracked.first_row else new_blocks,
            num_external_tokens,
        )

    def _issued(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed: the next one goes on behind them."""
        for row in output.rows:
            tracked = self.requests[row.request_id]
            tracked.request.num_computed_tokens += row.num_scheduled_tokens
            tracked.request.num_in_flight_tokens += row.num_scheduled_tokens
            tracked.num_output_placeholders += row.samples
            tracked.last_step = output.step_id
            tracked.first_row = None

    # A step returns

    def update_from_output(
        self,
        output: SchedulerOutput,
        sampled: Mapping[int, int],
        finished_recving: Collection[int] = (),
        finished_sending: Collection[int] = (),
    ) -> Ended:
        """Take the oldest step's tokens, by request; the requests that end with them.

        With it comes word of the loads and stores that have ended, by request.
        """
        self.manager.step_completed(output.step_id)
        finished, stored = [], []
        for row in output.rows:
            tracked = self.requests.get(row.request_id)
            if tracked is None:
                continue
            token = sampled[tracked.id] if row.samples else None
            self._take(tracked, row, token)
            if token is not None and self._ends_with(tracked, token):
                finished.append(tracked.id)
                if self._end(tracked):
                    stored.append(tracked.id)
        for request_id in finished_recving:
            self._loaded(request_id)
        for request_id in finished_sending:
            self.manager.store_completed(request_id)
        return Ended(tuple(finished), tuple(stored))

    def _take(self, tracked: Tracked, row: Row, token: int | None) -> None:
        tracked.request.num_in_flight_tokens -= row.num_scheduled_tokens
        if token is not None:
            tracked.request.append_tokens((token,))
        if tracked.status == "running":
            self._current_output(tracked, row)
        else:
            self._stale_output(tracked, row)

    def _loaded(self, request_id: int) -> None:
        """What was loaded can be found, and the request goes on behind it."""
        tracked = self.loading.pop(request_id, None)
        if tracked is None:
            self.manager.store_completed(request_id)  # the request has left
            return
        request = tracked.request
        self.manager.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # there is no logit without a token
        tracked.status = "running"
        self.running[tracked.id] = tracked

    def _current_output(self, tracked: Tracked, row: Row) -> None:
        request = tracked.request
        tracked.num_output_placeholders -= row.samples
        if row.samples and self._may_be_found(request):
            self.manager.cache_blocks(request, request.num_tokens)

    def _may_be_found(self, request: Request) -> bool:
        """A later step already computes the token that is known now."""
        return request.num_computed_tokens >= request.num_tokens

    def _stale_output(self, tracked: Tracked, row: Row) -> None:
        """The request was preempted meanwhile: its token counts, what was computed is gone."""
        if self._may_resume(tracked):
            self._enqueue(tracked)

    def _ends_with(self, tracked: Tracked, token: int) -> bool:
        at_most = tracked.request.num_tokens >= tracked.most_tokens
        return at_most or token == self.scheduling.stop_token

    # What it says of itself

    def num_used_blocks(self) -> int:
        """Blocks that somebody refers to: a free one may still answer lookups."""
        pool = self.manager.block_pool
        return len(pool.reference_counts) - 1 - pool.get_num_free_blocks()
