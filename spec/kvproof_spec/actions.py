"""What can happen to a cache: actions, and the state after each answer.

`check` is the guard: it raises `ActionDisabled` when the driver asks for what an engine
may not ask.  `apply` believes the answer and gives the next state; whether the answer
was allowed is what `invariants` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kvproof_spec.answers import (
    Answer,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Raised,
    Refused,
    Returned,
    Trimmed,
)
from kvproof_spec.derived import (
    outstanding_tokens,
    rows_in_flight,
    tokens_in_flight,
    unissued_cells,
)
from kvproof_spec.pages import Pages, PageWriter, Tables, cells, handed_out
from kvproof_spec.prefix import Symbol, content_of, extend_content
from kvproof_spec.state import ActionDisabled, PendingHit, Request, Row, State, Status, Step

Reason = Literal["finish", "abort", "preempt"]


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise ActionDisabled(reason)


@dataclass(frozen=True, slots=True)
class Submit:
    """A request arrives with the symbols of its prompt.

    `priority` (smaller first) and `max_tokens` (sampled tokens after which it ends) are
    for targets that schedule themselves.
    """

    request: int
    symbols: tuple[Symbol, ...]
    priority: int = 0
    max_tokens: int | None = None

    def check(self, state: State) -> None:
        require(bool(self.symbols), "a prompt has at least one token")
        require(self.request == state.submitted, f"the next request is {state.submitted}")
        require(len(self.symbols) < state.config.max_model_len, "the prompt is too long")

    def apply(self, state: State, answer: Answer) -> State:
        content = content_of(state.root, self.symbols)
        request = Request(self.request, content, len(content), tables=state.config.no_tables)
        requests = (*state.requests, request)
        return state._replace(requests=requests, submitted=state.submitted + 1, hit=None)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask for a reusable prefix; only the very next action may use the answer."""

    request: int

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status in ("waiting", "preempted"), "only an unadmitted request looks up")

    def apply(self, state: State, answer: Answer) -> State:
        assert isinstance(answer, Hit)
        return state._replace(hit=PendingHit(self.request, answer.tokens, answer.tables))


class Segments(NamedTuple):
    """The five segments of an allocation by their ends, in tokens from position 0.

    | computed | local hit | external | new | lookahead | end at `computed`, `local`,
    `total`, `target` and `reserved`.  The next step starts at `restart`, one before `total`
    if a load brings every known token.  No step in flight reads left of what `processed`
    tokens still need.
    """

    computed: int
    local: int
    total: int
    restart: int
    target: int
    reserved: int
    processed: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for the blocks of the next step, or of an unordered load that starts now.

    An unadmitted request starts from the hit of the Lookup just before.  `drafts` are
    the last of the `new` tokens.  `external` tokens come with the next step, or by an
    `unordered` load that ends with CompleteLoad; they are published late in both senses.
    `headroom` blocks must stay free.  `whole_sequence` asks that all known tokens fit.
    """

    request: int
    new: int
    drafts: tuple[Symbol, ...] = ()
    external: int = 0
    unordered: bool = False
    lookahead: int = 0
    headroom: int = 0
    whole_sequence: bool = False

    def check(self, state: State) -> None:
        request = state.find(self.request)
        running = request.status == "running"
        admitted = running or (state.hit is not None and state.hit.request == self.request)
        require(request.status != "loading", "its load has not returned")
        require(not request.scheduled, "its last allocation has not been issued")
        require(admitted, "an admission uses the Lookup just before")
        require(not (running and (self.external or self.whole_sequence)), "only at admission")
        require((self.new == 0) == self.unordered, "new tokens, or an unordered load")
        require(bool(self.external) or not self.unordered, "a load has external tokens")
        whole = not self.external or self.external % state.config.boundary == 0
        require(whole, "external tokens in whole boundaries")
        self._check_tokens(state, request)

    def _check_tokens(self, state: State, request: Request) -> None:
        ends, rows = self.segments(state), rows_in_flight(state, request)
        certain = ends.target - len(self.drafts)
        to_come = request.known + sum([row.samples for row in rows])
        require(ends.total < to_come + self.unordered, "nothing to compute")
        require(certain <= to_come, "more tokens than will be known")
        require(not any(row.drafts for row in rows), "drafts in flight are not yet resolved")
        last = not rows and certain == request.known
        require(not self.drafts or last, "drafts follow the last known token")

    def segments(self, state: State) -> Segments:
        request = state.find(self.request)
        limit = state.config.max_model_len
        hit = state.hit if request.status != "running" else None
        local = request.computed + (hit.tokens if hit else 0)
        total = min(local + self.external, limit)
        target = total + self.new
        restart = total - (self.unordered and total == request.known)
        processed = max(0, restart - tokens_in_flight(state, request))
        reserved = min(target + self.lookahead, limit)
        return Segments(request.computed, local, total, restart, target, reserved, processed)

    def tables_before(self, state: State) -> Tables:
        """What the request holds or, unadmitted, would hold by its hit alone."""
        request = state.find(self.request)
        hit = state.hit if request.status != "running" else None
        return hit.tables if hit else request.tables

    def apply(self, state: State, answer: Answer) -> State:
        request = state.find(self.request)
        if isinstance(answer, Refused):
            kept = request._replace(tables=answer.tables)
            return state._replace(requests=state.having(kept), hit=None)
        if isinstance(answer, Raised):
            return state._replace(hit=None)
        assert isinstance(answer, Granted)
        ends, groups = self.segments(state), state.config.groups
        granted = request._replace(
            status="loading" if self.unordered else "running",
            computed=ends.total,
            scheduled=self.new,
            drafts=self.drafts,
            load=(ends.local, ends.total) if self.external else None,
            tables=answer.tables,
        )
        promise = PageWriter(groups, state.promise)
        for _, _, block in handed_out(self.tables_before(state), answer.tables):
            promise.clear(block)
        first = ends.total if self.unordered else ends.local
        certain = min(request.known, ends.target - len(self.drafts))
        promise.write_all(cells(groups, answer.tables, first, certain), request.content)
        return state._replace(requests=state.having(granted), promise=promise.pages(), hit=None)


@dataclass(frozen=True, slots=True)
class Issue:
    """The worker gets a step: everything granted since the last one, perhaps nothing."""

    def check(self, state: State) -> None:
        """Always enabled: an engine may issue an empty step."""

    def apply(self, state: State, answer: Answer) -> State:
        shown = answer.rows if isinstance(answer, Issued) else None
        sent = {row.request: row.tables for row in shown or ()}
        rows, requests = [], []
        for request in state.requests:
            if request.scheduled:
                row = self._row(state, request, sent.get(request.id, request.tables))
                rows.append(row)
                request = request._replace(computed=row.end, scheduled=0, drafts=(), load=None)
            requests.append(request)
        steps = (*state.steps, Step(state.issued, tuple(rows)))
        issued = state.issued + 1
        return state._replace(requests=tuple(requests), steps=steps, issued=issued, hit=None)

    @staticmethod
    def _row(state: State, request: Request, tables: Tables) -> Row:
        certain = request.computed + request.scheduled - len(request.drafts)
        return Row(
            request=request.id,
            admission=request.admission,
            start=request.computed,
            tokens=request.scheduled,
            first_write=request.load[0] if request.load else request.computed,
            samples=certain >= request.known + outstanding_tokens(state, request),
            drafts=request.drafts,
            tables=tables,
            content=request.content,
        )


@dataclass(frozen=True, slots=True)
class Output:
    """What a step returns for a row that samples: drafts accepted, and the token after them."""

    request: int
    symbol: Symbol
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class CompleteStep:
    """The oldest step returns, also for requests that have left meanwhile."""

    step: int
    outputs: tuple[Output, ...]

    def check(self, state: State) -> None:
        require(bool(state.steps), "no step is in flight")
        step = state.steps[0]
        require(self.step == step.id, f"steps return in order: {step.id} is next")
        drafted = {row.request: len(row.drafts) for row in step.rows if row.samples}
        returned = sorted(output.request for output in self.outputs)
        require(returned == sorted(drafted), "one output for each row that samples")
        within = all(0 <= output.accepted <= drafted[output.request] for output in self.outputs)
        require(within, "more drafts accepted than there were")

    def apply(self, state: State, answer: Answer) -> State:
        groups, step, later = state.config.groups, state.steps[0], state.steps[1:]
        memory = PageWriter(groups, state.memory)
        for row in step.rows:
            memory.write_all(cells(groups, row.tables, row.first_write, row.end), row.computes())
        promise = PageWriter(groups, state.promise)
        requests, outputs = state.requests, {output.request: output for output in self.outputs}
        for row in step.rows:
            if row.samples:
                output = outputs[row.request]
                symbols = (*row.drafts[: output.accepted], output.symbol)
                later = tuple(_resolved(other, row, symbols) for other in later)
                requests = tuple(_sampled(r, row, symbols, promise, state) for r in requests)
        return state._replace(
            memory=memory.pages(),
            promise=promise.pages(),
            requests=requests,
            steps=later,
            deferred=_deferred(state, answer),
            hit=None,
        )


def _resolved(step: Step, row: Row, symbols: tuple[Symbol, ...]) -> Step:
    """`step`, whose row of the same admission now knows what `row` has sampled."""
    life = (row.request, row.admission)
    rows = tuple(
        other._replace(content=extend_content(other.content, symbols))
        if (other.request, other.admission) == life
        else other
        for other in step.rows
    )
    return Step(step.id, rows)


def _sampled(
    request: Request, row: Row, symbols: tuple[Symbol, ...], promise: PageWriter, state: State
) -> Request:
    """The request after `row` has sampled `symbols`: a stale row counts for symbols only.

    What its issued or granted positions now certainly hold is promised: accepted
    drafts, and the sampled token where a later step already computes it.
    """
    if request.id != row.request:
        return request
    request = request._replace(content=extend_content(request.content, symbols))
    if request.admission != row.admission:
        return request
    rejected = len(row.drafts) + 1 - len(symbols)
    request = request._replace(computed=request.computed - rejected)
    granted = request.computed + request.scheduled - len(request.drafts)
    first, end = row.end - len(row.drafts), min(granted, request.known)
    promise.write_all(cells(state.config.groups, request.tables, first, end), request.content)
    return request


def _deferred(state: State, answer: Answer) -> tuple[int, ...]:
    shown = answer.deferred if isinstance(answer, Returned) else None
    return state.deferred if shown is None else shown


def _started_anew(state: State, request: Request, status: Status) -> Request:
    """The request with its tokens and nothing else: rows in flight are no longer its own."""
    again = Request(request.id, request.content, request.prompt_tokens, status)
    return again._replace(tables=state.config.no_tables, admission=request.admission + 1)


@dataclass(frozen=True, slots=True)
class CompleteLoad:
    """An unordered load ends with the request's first `tokens` tokens valid.

    Fewer than asked for is a load that failed half way: what is before the failure is
    kept if every group is full attention, else nothing, and the request starts anew.
    """

    request: int
    tokens: int

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status == "loading" and request.load is not None, "no load under way")
        first, end = request.load or (0, 0)
        full = all(group.kind == "full" for group in state.config.groups)
        kept = self.tokens in (0, end) or (full and first <= self.tokens < end)
        require(kept, "not what a load can leave")
        require(self.tokens % state.config.boundary == 0, "delivered in whole boundaries")

    def apply(self, state: State, answer: Answer) -> State:
        request, groups = state.find(self.request), state.config.groups
        if self.tokens == 0:
            anew = _started_anew(state, request, "waiting")
            return state._replace(requests=state.having(anew), hit=None)
        memory, promise = PageWriter(groups, state.memory), PageWriter(groups, state.promise)
        first = request.load[0] if request.load else 0
        delivered = list(cells(groups, request.tables, first, self.tokens))
        memory.write_all(delivered, request.content)
        promise.write_all(delivered, request.content)
        computed = self.tokens - (self.tokens == request.known)
        loaded = request._replace(status="running", computed=computed, load=None)
        return state._replace(
            requests=state.having(loaded),
            memory=memory.pages(),
            promise=promise.pages(),
            hit=None,
        )


@dataclass(frozen=True, slots=True)
class Publish:
    """Make the request's first `tokens` tokens findable; changes nothing promised."""

    request: int
    tokens: int

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status == "running", "only a running request publishes")
        require(0 < self.tokens <= min(request.computed, request.known), "beyond what is issued")

    def apply(self, state: State, answer: Answer) -> State:
        return state._replace(hit=None)


@dataclass(frozen=True, slots=True)
class Trim:
    """Give back what no future step reads, by the tokens processed so far."""

    request: int

    def check(self, state: State) -> None:
        require(state.find(self.request).status == "running", "only a running request is trimmed")

    def apply(self, state: State, answer: Answer) -> State:
        assert isinstance(answer, Trimmed)
        trimmed = state.find(self.request)._replace(tables=answer.tables)
        return state._replace(requests=state.having(trimmed), hit=None)


@dataclass(frozen=True, slots=True)
class Release:
    """A request leaves, for good or (preempt) to start again; its steps may be in flight.

    What it was granted and never issued is promised no more.
    """

    request: int
    reason: Reason

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status != "loading", "its load has not returned")
        preemptible = request.status == "running" or self.reason != "preempt"
        require(preemptible, "only a running request is preempted")
        own = {cell[0] for cell in unissued_cells(state, request)}
        others = [r for r in state.requests if own and r.id != request.id]
        held = {block for other in others for table in other.tables for block in table}
        require(not own & held, "another request relies on what it has not issued")

    def apply(self, state: State, answer: Answer) -> State:
        request = state.find(self.request)
        promise = PageWriter(state.config.groups, state.promise)
        for block, group, offset, _ in unissued_cells(state, request):
            promise.write(block, group, offset, None)
        requests = state.without(request.id)
        if self.reason == "preempt":
            requests = state.having(_started_anew(state, request, "preempted"))
        deferred = _deferred(state, answer)
        promised = promise.pages()
        return state._replace(requests=requests, promise=promised, deferred=deferred, hit=None)


@dataclass(frozen=True, slots=True)
class Forget:
    """Blocks, or (`None`) everything, lose findability; only everything loses its promise."""

    blocks: tuple[int, ...] | None = None

    def check(self, state: State) -> None:
        normal = range(1, state.config.num_blocks)
        require(all(block in normal for block in self.blocks or ()), "not a normal block")

    def apply(self, state: State, answer: Answer) -> State:
        if self.blocks is None and isinstance(answer, Forgotten) and answer.done:
            return state._replace(promise=Pages({}), hit=None)
        return state._replace(hit=None)


Action = (
    Submit | Lookup | Allocate | Issue | CompleteStep | CompleteLoad | Publish | Trim
    | Release | Forget
)  # fmt: skip
ACTIONS: tuple[type[Action], ...] = get_args(Action)
