"""A small scheduler, in vLLM's words: which requests compute how many tokens in the next step.

Each request has a number of known tokens, and a number of computed ones that tries to catch
up.  `schedule` may be called again before a step has returned: a request then computes a
token that is still being sampled.  When blocks run out, the least important running request
gives way, and starts again later.

It works over any manager with vLLM's method names, the plain one or another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, Protocol

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.request import Request
from kvproof_spec.config import Scheduling

Status = Literal["waiting", "running", "preempted"]
Kind = Literal["new", "resumed", "running"]


class Manager(Protocol):
    """What a scheduler asks of a manager."""

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]: ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Sequence[Sequence[int]] | None = None,
        *,
        full_sequence_must_fit: bool = False,
    ) -> BlockIds | None: ...

    def get_block_ids(self, request_id: int) -> BlockIds: ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None: ...

    def withdraw(self, request: Request, num_issued_tokens: int) -> None: ...

    def free(self, request: Request, in_use_until: int | None = None) -> None: ...

    def step_completed(self, step_id: int) -> None: ...

    def deferred_blocks(self) -> tuple[int, ...]: ...


class NeverFits(Exception):
    """A request is refused although nothing else holds a block: it would wait for ever."""


@dataclass(slots=True)
class Tracked:
    """A request as the scheduler counts it.

    `rank` is smaller the more important it is.  It ends when it has `most_tokens` tokens.
    `num_output_placeholders` tokens are being sampled by steps in flight; `last_step` is
    the last one that it has a row in.
    """

    request: Request
    rank: tuple[int, int]
    most_tokens: int
    status: Status = "waiting"
    num_output_placeholders: int = 0
    last_step: int | None = None

    @property
    def id(self) -> int:
        return self.request.request_id

    @property
    def num_tokens_to_come(self) -> int:
        """Tokens known once all its steps have returned."""
        return self.request.num_tokens + self.num_output_placeholders


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: what the worker is sent.

    The step computes `num_scheduled_tokens` tokens from `num_computed_tokens` on, and
    `samples` the next one.  The row of a running request grows by `block_ids`, by group;
    that of a new or resumed one is replaced by them.
    """

    request_id: int
    kind: Kind
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, its rows in the order in which they got their blocks.

    `withdrawn` rows were taken back in the same call, since their requests were preempted:
    they are not part of the step.  `finished` requests have left since the step before.
    """

    step_id: int
    rows: tuple[Row, ...]
    preempted: tuple[int, ...]
    finished: tuple[int, ...]
    withdrawn: tuple[Row, ...] = ()


@dataclass(slots=True)
class _Step:
    """A step that is being put together."""

    budget: int  # tokens
    rows: dict[int, Row] = field(default_factory=dict)  # by request id
    preempted: list[int] = field(default_factory=list)
    withdrawn: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows[row.request_id] = row
        self.budget -= row.num_scheduled_tokens

    def take_back(self, request_id: int) -> bool:
        row = self.rows.pop(request_id, None)
        if row is None:
            return False
        self.withdrawn.append(row)
        self.budget += row.num_scheduled_tokens
        return True


class Scheduler:
    """Requests that wait, and those that run, over one manager.

    With `defers_returns` the blocks of a request that leaves while its steps are in flight
    come back when the last of these steps has.

    Progress (R11): the most important running request is never preempted, and nobody is
    admitted while a running one lacks blocks.  Once nobody submits any more, every request
    that fits the empty pool ends within two calls a token of all that are left.
    """

    def __init__(
        self,
        manager: Manager,
        scheduling: Scheduling,
        *,
        max_model_len: int,
        defers_returns: bool = False,
    ) -> None:
        self.manager = manager
        self.scheduling = scheduling
        self.max_model_len = max_model_len
        self.defers_returns = defers_returns
        self.requests: dict[int, Tracked] = {}  # by id, all that have not finished
        self.running: dict[int, Tracked] = {}  # by id, in order of admission
        self._waiting: list[tuple[tuple[int, int], int]] = []  # a heap of (rank, id)
        self._finished: list[int] = []  # since the last step
        self._num_arrived = 0
        self._num_steps = 0

    # Requests

    def add_request(self, request: Request, *, priority: int = 0, max_tokens: int = 16) -> None:
        """Queue a request; it ends once it has sampled `max_tokens` tokens."""
        by_priority = self.scheduling.policy == "priority"
        tracked = Tracked(
            request,
            rank=(priority if by_priority else 0, self._num_arrived),
            most_tokens=min(request.num_tokens + max_tokens, self.max_model_len),
        )
        self._num_arrived += 1
        self.requests[tracked.id] = tracked
        self._enqueue(tracked)

    def finish_request(self, request_id: int) -> None:
        """End a request, be it from outside; its steps in flight return to nobody."""
        tracked = self.requests.pop(request_id)
        if tracked.status == "running":
            self._free(tracked)
            del self.running[request_id]
        if tracked.status != "waiting":
            self._finished.append(request_id)

    def _enqueue(self, tracked: Tracked) -> None:
        heappush(self._waiting, (tracked.rank, tracked.id))

    def _first_waiting(self) -> Tracked | None:
        """The most important request that waits; those that ended meanwhile are dropped."""
        while self._waiting:
            tracked = self.requests.get(self._waiting[0][1])
            if tracked is not None and tracked.status != "running":
                return tracked
            heappop(self._waiting)
        return None

    # A step is made

    def schedule(self) -> SchedulerOutput:
        """The next step, perhaps an empty one."""
        step = _Step(self.scheduling.max_num_batched_tokens)
        if self._extend_running(step) and self._may_admit(step):
            self._admit_waiting(step)
        output = SchedulerOutput(
            step_id=self._num_steps,
            rows=tuple(step.rows.values()),
            preempted=tuple(step.preempted),
            finished=tuple(self._finished),
            withdrawn=tuple(step.withdrawn),
        )
        self._finished.clear()
        self._num_steps += 1
        self._issued(output)
        return output

    def _extend_running(self, step: _Step) -> bool:
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
                step.add(self._row(tracked, "running", num_tokens, blocks))
            elif self._least_important() is tracked:
                enough = False  # it keeps what it has, until somebody else needs that
                self._require_others_hold(tracked)
            else:
                return False  # blocks that come back with steps: no more of these until then
        return enough

    def _may_admit(self, step: _Step) -> bool:
        """Nobody is admitted into what others have just given up."""
        return not step.preempted

    def _num_new_tokens(self, tracked: Tracked, step: _Step) -> int:
        to_come = tracked.num_tokens_to_come
        if to_come >= tracked.most_tokens:  # the steps in flight end it
            return 0
        return self._chunk(to_come - tracked.request.num_computed_tokens, step)

    def _chunk(self, num_tokens: int, step: _Step) -> int:
        """As many of these tokens as one request may compute in this step."""
        most = self.scheduling.long_prefill_token_threshold or num_tokens
        return min(num_tokens, most, step.budget)

    def _allocate(self, tracked: Tracked, num_tokens: int, step: _Step) -> BlockIds | None:
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
        if not waits and not self.running.keys() - {tracked.id}:
            raise NeverFits(f"request {tracked.id} does not fit, and nothing else holds a block")

    def _preempt(self, victim: Tracked, step: _Step) -> None:
        """Take everything from a running request; it starts again, and recomputes."""
        if step.take_back(victim.id):
            self._withdraw(victim)
        self._free(victim)
        del self.running[victim.id]
        victim.status = "preempted"
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
        return self.defers_returns and tracked.request.num_in_flight_tokens > 0

    def _free(self, tracked: Tracked) -> None:
        deferred = self._returns_are_deferred(tracked)
        self.manager.free(tracked.request, tracked.last_step if deferred else None)

    def _admit_waiting(self, step: _Step) -> None:
        """Start whoever waits, the most important first, until something runs out."""
        while step.budget > 0 and len(self.running) < self.scheduling.max_num_seqs:
            tracked = self._first_waiting()
            if tracked is None:
                return
            request = tracked.request
            hits, num_hit_tokens = self.manager.get_computed_blocks(request)
            num_tokens = self._chunk(request.num_tokens - num_hit_tokens, step)
            blocks = self.manager.allocate_slots(
                request,
                num_tokens,
                num_hit_tokens,
                hits,
                full_sequence_must_fit=self.scheduling.whole_sequence_check,
            )
            if blocks is None:
                self._require_others_hold(tracked)
                return
            heappop(self._waiting)
            request.num_computed_tokens = num_hit_tokens
            kind = self._kind_of_admission(tracked)
            tracked.status = "running"
            self.running[tracked.id] = tracked
            step.add(self._row(tracked, kind, num_tokens, self._whole_table(tracked, blocks)))

    def _kind_of_admission(self, tracked: Tracked) -> Kind:
        return "resumed" if tracked.status == "preempted" else "new"

    def _whole_table(self, tracked: Tracked, new_blocks: BlockIds) -> BlockIds:
        """The worker has no row of the request, or an old one: it needs the hits as well."""
        return self.manager.get_block_ids(tracked.id)

    def _row(self, tracked: Tracked, kind: Kind, num_tokens: int, block_ids: BlockIds) -> Row:
        start = tracked.request.num_computed_tokens
        samples = start + num_tokens >= tracked.num_tokens_to_come
        return Row(tracked.id, kind, start, num_tokens, samples, block_ids)

    def _issued(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed: the next one goes on behind them."""
        for row in output.rows:
            tracked = self.requests[row.request_id]
            tracked.request.num_computed_tokens += row.num_scheduled_tokens
            tracked.request.num_in_flight_tokens += row.num_scheduled_tokens
            tracked.num_output_placeholders += row.samples
            tracked.last_step = output.step_id

    # A step returns

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Take the oldest step's tokens, by request; the requests that end with them."""
        self.manager.step_completed(output.step_id)
        finished = []
        for row in output.rows:
            tracked = self.requests.get(row.request_id)
            if tracked is None:
                continue
            tracked.request.num_in_flight_tokens -= row.num_scheduled_tokens
            token = sampled[tracked.id] if row.samples else None
            if token is not None:
                tracked.request.append_tokens((token,))
            if tracked.status == "running":
                self._current_output(tracked, row)
            else:
                self._stale_output(tracked, row)
            if token is not None and self._ends_with(tracked, token):
                self.finish_request(tracked.id)
                finished.append(tracked.id)
        return tuple(finished)

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
