"""What can happen to a cache: actions, and the state after each answer.

`check` is the guard: it raises `ActionDisabled` when the driver asks for what an engine
may not ask.  `apply` believes the answer and gives the next state; whether the answer
was allowed is what `invariants` says.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    blocks_between,
    is_stored,
    outstanding_tokens,
    processed_tokens,
    tokens_in_flight,
    transfer_of,
    unissued_cells,
)
from kvproof_spec.pages import (
    Copy,
    Pages,
    PageWriter,
    Tables,
    cells,
    encoder_cells,
    handed_out,
    read_page,
)
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Prefix, Symbol, content_of, extend_content
from kvproof_spec.state import (
    NOTHING,
    ActionDisabled,
    PendingHit,
    Request,
    Row,
    State,
    Status,
    Step,
    Transfer,
)

Reason = Literal["finish", "abort", "preempt"]


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise ActionDisabled(reason)


@dataclass(frozen=True, slots=True)
class Submit:
    """A request arrives with the token ids of its prompt, and what else decides its content.

    Its encoder, where a group attends to one, gives `encoder_tokens`, nobody else's.
    For targets that schedule themselves: `priority` (smaller first), `max_tokens` (sampled
    tokens after which it ends), the `remote` tokens that a connector has of it, by an
    `unordered` load or with a step, and whether it is `stored` when it ends.
    """

    request: int
    symbols: tuple[Symbol, ...]
    priority: int = 0
    max_tokens: int | None = None
    inputs: Inputs = TOKENS_ONLY
    encoder_tokens: int = 0
    remote: int = 0
    unordered: bool = False
    stored: bool = False

    def check(self, state: State) -> None:
        require(bool(self.symbols), "a prompt has at least one token")
        cross = not all(group.reused for group in state.config.groups)
        require(cross == bool(self.encoder_tokens), "encoder tokens, if a group attends to them")
        require(self.inputs == self.inputs.within(len(self.symbols)), "inputs beyond the prompt")
        require(self.request == state.submitted, f"the next request is {state.submitted}")
        require(len(self.symbols) < state.config.max_model_len, "the prompt is too long")

    def apply(self, state: State, answer: Answer) -> State:
        content = content_of(state.root, self.symbols, self.inputs)
        own = state.root.context(("encoder", self.request))
        encoder = content_of(own, range(self.encoder_tokens))
        request = Request(
            self.request, content, len(content), encoder, tables=state.config.no_tables
        )
        return state._replace(
            requests=(*state.requests, request), submitted=state.submitted + 1, hit=None, quiet=0
        )


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask for a reusable prefix; only the very next action may use the answer."""

    request: int

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status in ("waiting", "preempted"), "only an unadmitted request looks up")

    def apply(self, state: State, answer: Answer) -> State:
        assert isinstance(answer, Hit)
        hit, tally = PendingHit(self.request, answer.tokens, answer.tables), state.tally
        if state.config.scheduling and state.config.caching:
            queried = tally.queried + state.find(self.request).known
            tally = tally._replace(queried=queried, hit=tally.hit + answer.tokens)
        return state._replace(hit=hit, tally=tally)


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
        require(not is_stored(state, self.request), "its store has not ended")
        require(not request.scheduled, "its last allocation has not been issued")
        require(admitted, "an admission uses the Lookup just before")
        require(not (running and (self.external or self.whole_sequence)), "only at admission")
        require((self.new == 0) == self.unordered, "new tokens, or an unordered load")
        require(bool(self.external) or not self.unordered, "a load has external tokens")
        self._check_tokens(state, request)

    def _check_tokens(self, state: State, request: Request) -> None:
        ends, unit = self.segments(state), state.config.common_block
        whole = not self.external or (ends.local % unit, self.external % unit) == (0, 0)
        require(whole, "external tokens in whole blocks of every group")
        certain = ends.target - len(self.drafts)
        to_come = request.known + outstanding_tokens(state, request)
        states = any(group.kind == "state" for group in state.config.groups)
        require(ends.total < to_come + (self.unordered and not states), "nothing to compute")
        require(certain <= to_come, "more tokens than will be known")
        require(not self.drafts or certain == to_come, "drafts follow the last token to come")
        require(not self.drafts or not states, "a state cannot take drafts back")

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
        fresh = handed_out(self.tables_before(state), answer.tables)
        promise = PageWriter(groups, state.promise)
        for _, _, block in fresh:
            promise.clear(block)
        for copy in answer.copies:
            promise.copy(copy.source, copy.destination)
        if self.external and not self.unordered:
            loaded = cells(groups, answer.tables, ends.local, ends.total)
            promise.write_all(loaded, request.content)
        certain = min(request.known, ends.target - len(self.drafts))
        computed = cells(groups, answer.tables, ends.total, ends.target)
        promise.write_known(computed, request.content, certain)
        return state._replace(
            requests=state.having(granted),
            promise=promise.pages(),
            copies=(*state.copies, *answer.copies),
            uncleared=self._to_clear(state, answer, ends, fresh),
            continued=_continued(state, [(granted, ends.local)], answer.copies),
            hit=None,
        )

    def _to_clear(
        self, state: State, answer: Granted, ends: Segments, fresh: list[tuple[int, int, int]]
    ) -> tuple[int, ...]:
        """The pages handed out that a step must find zeroed: not those that a load fills."""
        if not state.config.clears:
            return ()
        loaded, groups = ends.total if self.external else 0, state.config.groups
        kept = set(state.uncleared).difference(block for _, _, block in fresh)
        zeroed = {block for group, i, block in fresh if groups[group].is_cleared(i, loaded)}
        new = zeroed.difference(copy.destination for copy in answer.copies)
        return tuple(sorted(kept if self.unordered else kept | new))


def _continued(
    state: State, seen: Iterable[tuple[Request, int]], copies: Iterable[Copy] = ()
) -> Pages:
    """What drafters' cells have seen, of (request, first position): the token after theirs."""
    groups = state.config.groups
    if not any(group.drafter for group in groups):
        return state.continued
    pages = PageWriter(groups, state.continued)
    for copy in copies:
        pages.copy(copy.source, copy.destination)
    for request, first in seen:
        for cell in cells(groups, request.tables, first, request.known - 1):
            if groups[cell[1]].drafter:
                pages.write(*cell[:3], request.content[cell[3] + 1])
    return pages.pages()


@dataclass(frozen=True, slots=True)
class Issue:
    """The worker gets a step: everything granted since the last one, perhaps nothing."""

    def check(self, state: State) -> None:
        """Always enabled: an engine may issue an empty step."""

    def apply(self, state: State, answer: Answer) -> State:
        assert isinstance(answer, Issued)
        sent = {row.request: row.tables for row in answer.rows or ()}
        rows, requests = [], []
        for request in state.requests:
            if request.scheduled:
                row = self._row(state, request, sent.get(request.id, request.tables))
                rows.append(row)
                request = request._replace(
                    computed=row.end, scheduled=0, drafts=(), load=None, issued=True
                )
            requests.append(request)
        copies = state.copies if answer.copies is None else answer.copies
        step = Step(state.issued, tuple(rows), copies, answer.cleared or ())
        return state._replace(
            requests=tuple(requests),
            steps=(*state.steps, step),
            copies=(),
            uncleared=(),
            issued=state.issued + 1,
            deferred=_deferred(state, answer),
            hit=None,
        )

    @staticmethod
    def _row(state: State, request: Request, tables: Tables) -> Row:
        certain = request.computed + request.scheduled - len(request.drafts)
        return Row(
            request=request.id,
            admission=request.admission,
            first=not request.issued,
            start=request.computed,
            tokens=request.scheduled,
            first_write=request.load[0] if request.load else request.computed,
            samples=certain >= request.known + outstanding_tokens(state, request),
            drafts=request.drafts,
            tables=tables,
            content=request.content,
            encoder=request.encoder,
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
        memory = before_forward(state)
        for row in step.rows:
            memory.write_all(cells(groups, row.tables, row.start, row.end), row.computes())
        promise = PageWriter(groups, state.promise)
        requests, outputs = state.requests, {output.request: output for output in self.outputs}
        for row in step.rows:
            if row.samples:
                output = outputs[row.request]
                symbols = (*row.drafts[: output.accepted], output.symbol)
                later = tuple(_resolved(other, row, symbols) for other in later)
                requests = tuple(_sampled(r, row, symbols, later, promise) for r in requests)
        return state._replace(
            memory=memory.pages(),
            promise=promise.pages(),
            requests=requests,
            steps=later,
            deferred=_deferred(state, answer),
            continued=_continued(
                state, [(r, row.start) for row in step.rows for r in requests if row.of(r)]
            ),
            quiet=self._quiet(state),
            hit=None,
        )

    def _quiet(self, state: State) -> int:
        loading = any(request.status == "loading" for request in state.requests)
        waits = loading or bool(state.transfers) or state.config.scheduling is None
        got = any(state.get(output.request) for output in self.outputs)
        return 0 if waits or got else state.quiet + 1


def before_forward(state: State) -> PageWriter:
    """The pages as the oldest step's rows find them: cleared, copied, loaded, encoded."""
    step, groups = state.steps[0], state.config.groups
    memory = PageWriter(groups, state.memory)
    for block in step.cleared:
        memory.clear(block)
    for copy in step.copies:
        memory.copy(copy.source, copy.destination)
    for row in step.rows:
        if row.first_write < row.start:
            memory.write_all(cells(groups, row.tables, row.first_write, row.start), row.content)
        if row.first and row.encoder:
            where = encoder_cells(groups, row.tables, len(row.encoder))
            memory.write_all(where, row.encoder)
    return memory


def _resolved(step: Step, row: Row, symbols: tuple[Symbol, ...]) -> Step:
    """`step`, whose row of the same admission now knows what `row` has sampled."""
    life, rejected = (row.request, row.admission), len(row.drafts) + 1 - len(symbols)
    rows = tuple(
        other._replace(
            content=extend_content(other.content, symbols),
            start=other.start - rejected,
            first_write=other.first_write - rejected,
        )
        if (other.request, other.admission) == life
        else other
        for other in step.rows
    )
    return step._replace(rows=rows)


def _sampled(
    request: Request,
    row: Row,
    symbols: tuple[Symbol, ...],
    later: tuple[Step, ...],
    promise: PageWriter,
) -> Request:
    """The request after `row` has sampled `symbols`: a stale row counts for symbols only.

    What its issued or granted positions now certainly hold is promised: accepted drafts,
    and the sampled token where a later step already computes it.
    """
    if request.id != row.request:
        return request
    request = request._replace(content=extend_content(request.content, symbols))
    if not row.of(request):
        return request
    rejected = len(row.drafts) + 1 - len(symbols)
    request = request._replace(computed=request.computed - rejected)
    spans = [(row.end - len(row.drafts), row.end - rejected)] if row.drafts else []
    spans += [
        (other.start, other.end) for step in later for other in step.rows if other.of(request)
    ]
    if request.scheduled:
        spans.append((request.computed, request.computed + request.scheduled))
    for first, end in spans:
        where = cells(promise.groups, request.tables, first, end)
        promise.write_known(where, request.content, request.known)
    return request


def _deferred(state: State, answer: Answer) -> tuple[int, ...]:
    shown = answer.deferred if isinstance(answer, Returned | Issued) else None
    return state.deferred if shown is None else shown


def _started_anew(state: State, request: Request, status: Status) -> Request:
    """The request with its tokens and nothing else: rows in flight are no longer its own."""
    again = Request(*request[:4], status, tables=state.config.no_tables)
    return again._replace(admission=request.admission + 1)


@dataclass(frozen=True, slots=True)
class CompleteLoad:
    """An unordered load ends with the request's first `tokens` tokens valid.

    Fewer than asked for is a load that failed half way: what is before the failure is
    kept if every group is full attention, else nothing, and the request starts anew.  If
    the request has left meanwhile, the load only writes what it would have brought.
    """

    request: int
    tokens: int

    def check(self, state: State) -> None:
        if transfer_of(state, self.request, inbound=True) is not None:
            return
        request = state.find(self.request)
        require(request.status == "loading" and request.load is not None, "no load under way")
        first, end = request.load or (0, 0)
        full = all(group.kind == "full" for group in state.config.reused)
        kept = self.tokens in (0, end) or (full and first <= self.tokens < end)
        require(kept, "not what a load can leave")
        require(self.tokens % state.config.common_block == 0, "delivered in whole blocks")

    def apply(self, state: State, answer: Answer) -> State:
        orphan = transfer_of(state, self.request, inbound=True)
        if orphan is not None:
            return self._without_request(state, orphan, answer)
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
        end = request.load[1] if request.load else 0
        unwritten = sorted(blocks_between(state, request.tables, self.tokens, end))
        return state._replace(
            requests=state.having(loaded),
            memory=memory.pages(),
            promise=promise.pages(),
            uncleared=(*state.uncleared, *unwritten) if state.config.clears else (),
            hit=None,
        )

    def _without_request(self, state: State, load: Transfer, answer: Answer) -> State:
        memory = PageWriter(state.config.groups, state.memory)
        for block, group, offset, content in load.cells:
            memory.write(block, group, offset, content)
        return _ended(state._replace(memory=memory.pages()), load, answer)


def _ended(state: State, transfer: Transfer, answer: Answer) -> State:
    others = tuple(other for other in state.transfers if other is not transfer)
    return state._replace(transfers=others, deferred=_deferred(state, answer), hit=None)


@dataclass(frozen=True, slots=True)
class Store:
    """An outbound store of the request's whole blocks begins: until it ends it reads them.

    The request gets no more blocks and gives none back but by its Release.
    """

    request: int

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status == "running", "only a running request is stored")
        require(not is_stored(state, self.request), "its last store has not ended")
        require(processed_tokens(state, request) > 0, "nothing of it has been computed")

    def _cells(self, state: State, request: Request) -> tuple[tuple[int, int, int, Prefix], ...]:
        processed = processed_tokens(state, request)
        stored = cells(
            state.config.groups,
            request.tables,
            0,
            processed - processed % state.config.common_block,
        )
        return tuple(
            (block, group, offset, request.content[position])
            for block, group, offset, position in stored
            if read_page(state.memory, block, group, offset) is request.content[position]
        )

    def apply(self, state: State, answer: Answer) -> State:
        content = self._cells(state, state.find(self.request))
        store = Transfer(self.request, inbound=False, cells=content)
        return state._replace(transfers=(*state.transfers, store), hit=None)


@dataclass(frozen=True, slots=True)
class CompleteStore:
    """The request's store ends, also if the request has left meanwhile."""

    request: int

    def check(self, state: State) -> None:
        require(is_stored(state, self.request), "no store under way")

    def apply(self, state: State, answer: Answer) -> State:
        store = transfer_of(state, self.request, inbound=False)
        assert store is not None
        return _ended(state, store, answer)


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
        require(not is_stored(state, self.request), "its store has not ended")

    def apply(self, state: State, answer: Answer) -> State:
        assert isinstance(answer, Trimmed)
        trimmed = state.find(self.request)._replace(tables=answer.tables)
        return state._replace(requests=state.having(trimmed), hit=None)


@dataclass(frozen=True, slots=True)
class Release:
    """A request leaves, for good or (preempt) to start again; its steps may be in flight.

    What it was granted and never issued is promised no more.  An unordered load that is
    under way goes on without it.
    """

    request: int
    reason: Reason

    def check(self, state: State) -> None:
        request = state.find(self.request)
        require(request.status != "loading" or self.reason == "abort", "its load has not returned")
        preemptible = request.status == "running" or self.reason != "preempt"
        require(preemptible, "only a running request is preempted")
        own = {cell[0] for cell in unissued_cells(state, request)}
        others = [r for r in state.requests if own and r.id != request.id]
        held = {block for other in others for table in other.tables for block in table}
        require(not own & held, "another request relies on what it has not issued")

    def apply(self, state: State, answer: Answer) -> State:
        request, transfers = state.find(self.request), state.transfers
        promise = PageWriter(state.config.groups, state.promise)
        for block, group, offset, _ in unissued_cells(state, request):
            promise.write(block, group, offset, None)
        if request.status == "loading" and request.load is not None:
            first, end = request.load
            loaded = tuple(
                (block, group, offset, request.content[position])
                for block, group, offset, position in cells(
                    state.config.groups, request.tables, first, end
                )
            )
            transfers = (*transfers, Transfer(request.id, inbound=True, cells=loaded))
        requests, tally = state.without(request.id), state.tally
        if self.reason == "preempt":
            requests = state.having(_started_anew(state, request, "preempted"))
            again = tally.preemptions + (state.config.scheduling is not None)
            tally = tally._replace(preemptions=again)
        return state._replace(
            requests=requests,
            promise=promise.pages(),
            transfers=transfers,
            deferred=_deferred(state, answer),
            hit=None,
            quiet=state.quiet if self.reason == "preempt" else 0,
            tally=tally,
        )


@dataclass(frozen=True, slots=True)
class Forget:
    """Blocks, or (`None`) everything, lose findability; only everything loses its promise."""

    blocks: tuple[int, ...] | None = None

    def check(self, state: State) -> None:
        normal = range(1, state.config.num_blocks)
        require(all(block in normal for block in self.blocks or ()), "not a normal block")

    def apply(self, state: State, answer: Answer) -> State:
        if self.blocks is None and isinstance(answer, Forgotten) and answer.done:
            return state._replace(promise=NOTHING, continued=NOTHING, hit=None)
        return state._replace(hit=None)


Action = (
    Submit | Lookup | Allocate | Issue | CompleteStep | CompleteLoad | Store | CompleteStore
    | Publish | Trim | Release | Forget
)  # fmt: skip
ACTIONS: tuple[type[Action], ...] = get_args(Action)
