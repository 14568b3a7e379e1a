"""What may happen next: one source of enabled actions for campaign, machine and explorer.

`choices` yields each enabled action with its parameters still open, as domains.  The
explorer takes them all (`Choice.actions`), a campaign picks by numbers (`Choice.action`),
and a run is nothing but those numbers, so that it can be replayed and shrunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    Forget,
    Issue,
    Lookup,
    Output,
    Publish,
    Release,
    Submit,
    Trim,
)
from kvproof_spec.config import Config
from kvproof_spec.derived import (
    has_stale_rows,
    outstanding_tokens,
    rows_in_flight,
    unissued_cells,
)
from kvproof_spec.prefix import Symbol
from kvproof_spec.state import Request, State

FEATURES: dict[str, str] = {
    "full": "full attention groups",
    "sliding": "sliding window groups",
    "uncached": "prefix caching off",
    "lookahead": "slots reserved ahead, and draft tokens that may be rejected",
    "external": "tokens from elsewhere, by ordered and unordered loads",
    "preempt": "a running request loses its blocks and starts again",
    "abort": "a request leaves at any time",
    "unissued": "a request leaves between its allocation and the issue of its step",
    "forget": "blocks, or everything, lose findability",
    "trim": "blocks left of the window are given back between allocations",
    "publish": "known tokens are published between allocations",
    "async": "two steps in flight",
    "worker": "rows sent to a worker",
}


@dataclass(frozen=True, slots=True)
class Scope:
    """Bounds of what is tried: what may be submitted, sampled, asked for, and together.

    `prompts` are symbols to submit; `samples` the symbols a step may return.  `chunk`
    limits the new tokens of one allocation, `max_request_tokens` those of one request.
    `priorities` and `max_sampled` (tokens) are for targets that schedule themselves.
    """

    config: Config
    features: frozenset[str]
    prompts: tuple[tuple[Symbol, ...], ...]
    samples: tuple[Symbol, ...] = (0, 1)
    max_requests: int = 3
    chunk: int = 16
    max_request_tokens: int = 64
    lookahead: int = 2  # tokens reserved, and drafts, at most
    headroom: int = 1  # blocks kept free, at most
    priorities: tuple[int, ...] = (0,)
    max_sampled: tuple[int | None, ...] = (None,)

    def has(self, feature: str) -> bool:
        return feature in self.features

    @property
    def steps_in_flight(self) -> int:
        return 2 if "async" in self.features else 1


@dataclass(frozen=True, slots=True)
class Choice:
    """An enabled action whose parameters are still open.

    Each domain lists the values of one parameter, simplest first.
    """

    kind: str
    request: int  # 0 where there is none
    build: Callable[..., Action] = field(repr=False)
    domains: tuple[Sequence[Any], ...] = ()

    def action(self, picks: Sequence[int] = ()) -> Action:
        """The action with the picked parameters; what is missing or too big is mended."""
        values = [
            domain[min(picks[i], len(domain) - 1) if i < len(picks) else 0]
            for i, domain in enumerate(self.domains)
        ]
        return self.build(*values)

    def actions(self) -> Iterator[Action]:
        for values in product(*self.domains):
            yield self.build(*values)


KINDS: tuple[str, ...] = (
    "submit",
    "lookup",
    "admit",
    "admit external",
    "load",
    "extend",
    "draft",
    "issue",
    "complete step",
    "complete load",
    "publish",
    "trim",
    "finish",
    "preempt",
    "abort",
    "leave unissued",
    "forget blocks",
    "forget everything",
)
"""Names of the choices, in the order in which a run's numbers refer to them."""


def choices(state: State, scope: Scope) -> Iterator[Choice]:
    """The actions that an engine may ask for in this state, within the scope."""
    if len(state.requests) < scope.max_requests:
        yield Choice(
            "submit",
            0,
            lambda *parameters: Submit(state.submitted, *parameters),
            (scope.prompts, scope.priorities, scope.max_sampled),
        )
    if state.config.scheduling is not None:
        yield from _around_a_scheduler(state, scope)
        return
    if state.hit is not None:
        yield from _admissions(state, scope, state.find(state.hit.request))
    for request in state.requests:
        if request.status == "running":
            yield from _while_running(state, scope, request)
        elif request.status == "loading":
            yield _load_returns(state, request)
        elif not has_stale_rows(state, request):
            yield Choice("lookup", request.id, lambda r=request.id: Lookup(r))
        if request.status != "loading":
            yield from _leaving(state, scope, request)
    if len(state.steps) < scope.steps_in_flight and any(r.scheduled for r in state.requests):
        yield Choice("issue", 0, Issue)
    if state.steps:
        yield _step_returns(state, scope)
    if scope.has("forget"):
        normal = range(1, state.config.num_blocks)
        yield Choice("forget blocks", 0, lambda *b: Forget(tuple(sorted({*b}))), (normal, normal))
        yield Choice("forget everything", 0, lambda: Forget(None))


def _around_a_scheduler(state: State, scope: Scope) -> Iterator[Choice]:
    """What is asked of a target that schedules itself: steps, their results, and aborts."""
    if state.requests and len(state.steps) < scope.steps_in_flight:
        yield Choice("issue", 0, Issue)
    if state.steps:
        yield _step_returns(state, scope)
    if scope.has("abort"):
        for request in state.requests:
            yield Choice("abort", request.id, lambda r=request.id: Release(r, "abort"))


def _counts(most: int) -> tuple[int, ...]:
    """1 to `most`, the most first."""
    return (most, *range(1, most))


def _admissions(state: State, scope: Scope, request: Request) -> Iterator[Choice]:
    assert state.hit is not None
    rest = request.known - state.hit.tokens
    if rest < 1 or has_stale_rows(state, request):
        return
    extras: tuple[Sequence[Any], ...] = (
        range(scope.headroom + 1),
        (False, True),
        range(scope.lookahead + 1) if scope.has("lookahead") else (0,),
    )

    def admit(new: int, headroom: int, whole: bool, lookahead: int, external: int = 0) -> Action:
        return Allocate(
            request.id,
            new,
            external=external,
            unordered=new == 0,
            lookahead=lookahead,
            headroom=headroom,
            whole_sequence=whole,
        )

    yield Choice("admit", request.id, admit, (_counts(min(rest, scope.chunk)), *extras))
    if not scope.has("external"):
        return
    unit = state.config.boundary
    for external in range(unit, rest, unit):
        news = _counts(min(rest - external, scope.chunk))
        domains = (news, *extras, (external,))
        yield Choice("admit external", request.id, admit, domains)
    loads = range(unit, rest + 1, unit)
    if loads:
        yield Choice("load", request.id, admit, ((0,), *extras, loads))


def _while_running(state: State, scope: Scope, request: Request) -> Iterator[Choice]:
    rows = rows_in_flight(state, request)
    outstanding = outstanding_tokens(state, request)
    to_compute = request.known + outstanding - request.computed
    may_grow = request.known + outstanding < scope.max_request_tokens
    drafting = any(row.drafts for row in rows)
    ready = not request.scheduled and not drafting and (not rows or scope.has("async"))
    lookaheads = range(scope.lookahead + 1) if scope.has("lookahead") else (0,)
    if ready and may_grow and to_compute > 0:
        news = _counts(min(to_compute, scope.chunk))

        def extend(new: int, headroom: int, lookahead: int) -> Action:
            return Allocate(request.id, new, lookahead=lookahead, headroom=headroom)

        yield Choice("extend", request.id, extend, (news, range(scope.headroom + 1), lookaheads))
        if scope.has("lookahead") and to_compute == 1 and not rows:

            def draft(count: int, symbol: Symbol, lookahead: int) -> Action:
                drafts = (symbol,) * count
                return Allocate(request.id, 1 + count, drafts=drafts, lookahead=lookahead)

            counts = range(1, scope.lookahead + 1)
            yield Choice("draft", request.id, draft, (counts, scope.samples, lookaheads))
    certain = min(request.computed, request.known)
    if scope.has("publish") and certain > 0:
        yield Choice("publish", request.id, lambda n: Publish(request.id, n), ((certain,),))
    if scope.has("trim"):
        yield Choice("trim", request.id, lambda: Trim(request.id))


def _leaving(state: State, scope: Scope, request: Request) -> Iterator[Choice]:
    quiet = scope.has("async") or not rows_in_flight(state, request)
    if not quiet:
        return
    running = request.status == "running"
    if request.scheduled:
        if scope.has("unissued") and not relied_upon(state, request):
            reasons = ("preempt", "abort")
            leave = lambda reason: Release(request.id, reason)  # noqa: E731
            yield Choice("leave unissued", request.id, leave, (reasons,))
        return
    if running and request.known > request.prompt_tokens:
        yield Choice("finish", request.id, lambda: Release(request.id, "finish"))
    if running and scope.has("preempt"):
        yield Choice("preempt", request.id, lambda: Release(request.id, "preempt"))
    if scope.has("abort"):
        yield Choice("abort", request.id, lambda: Release(request.id, "abort"))


def relied_upon(state: State, request: Request) -> bool:
    """Does another request hold a block that `request` was granted and has not issued?"""
    own = {cell[0] for cell in unissued_cells(state, request)}
    others = (other for other in state.requests if other.id != request.id)
    return any(own.intersection(table) for other in others for table in other.tables)


def _load_returns(state: State, request: Request) -> Choice:
    first, end = request.load or (0, 0)
    partial: tuple[int, ...] = ()
    if all(group.kind == "full" for group in state.config.groups):
        unit = state.config.boundary
        partial = tuple(range(max(first, unit), end, unit))
    delivered = (end, 0, *partial)
    build = lambda tokens: CompleteLoad(request.id, tokens)  # noqa: E731
    return Choice("complete load", request.id, build, (delivered,))


def _step_returns(state: State, scope: Scope) -> Choice:
    step = state.steps[0]
    sampling = [row for row in step.rows if row.samples]
    domains = [
        [(a, symbol) for a in range(len(row.drafts) + 1) for symbol in scope.samples]
        for row in sampling
    ]

    def build(*returned: tuple[int, Symbol]) -> Action:
        outputs = tuple(
            Output(row.request, symbol, accepted)
            for row, (accepted, symbol) in zip(sampling, returned, strict=True)
        )
        return CompleteStep(step.id, outputs)

    return Choice("complete step", 0, build, tuple(domains))
