"""What may happen next: one source of enabled actions for campaign, machine and explorer.

`choices` yields each enabled action with its parameters still open, as domains.  The
explorer takes them all (`Choice.actions`), a campaign picks by numbers (`Choice.action`),
and a run is nothing but those numbers, so that it can be replayed and shrunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Forget,
    Issue,
    Lookup,
    Output,
    Publish,
    Release,
    Store,
    Submit,
    Trim,
)
from kvproof_spec.config import Config
from kvproof_spec.derived import (
    has_stale_rows,
    is_stored,
    outstanding_tokens,
    processed_tokens,
    references,
    rows_in_flight,
    unissued_cells,
)
from kvproof_spec.prefix import TOKENS_ONLY, Inputs, Symbol
from kvproof_spec.state import Request, Row, State

FEATURES: dict[str, str] = {
    "full": "full attention groups",
    "sliding": "sliding window groups",
    "chunked": "chunked local attention groups",
    "state": "state groups (Mamba and its like)",
    "cross": "cross attention groups",
    "mixed": "groups of different block sizes",
    "uncached": "prefix caching off",
    "lookahead": "slots reserved ahead, and draft tokens that may be rejected",
    "drafter": "groups whose cells also depend on the token that follows",
    "external": "tokens from elsewhere, by ordered and unordered loads",
    "partial": "hits that end inside a block, taken by copy",
    "lora": "prefixes of different adapters",
    "lora-version": "an adapter of the same name loaded again with other weights",
    "multimodal": "prefixes with multimodal items",
    "embeds": "prefixes with prompt embeddings",
    "salt": "prefixes of different cache salts",
    "preempt": "a running request loses its blocks and starts again",
    "abort": "a request leaves at any time",
    "abort-loading": "a request leaves while its unordered load is under way",
    "store": "outbound stores, which read a request's blocks until they end",
    "clear": "pages are zeroed when they are handed out",
    "events": "announcements of what becomes findable, and what no longer is",
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
    `inputs` are what else may decide a prompt's content, `encoder_tokens` what its encoder
    gives.  `priorities`, `max_sampled` (tokens) and `transfers` (tokens that a connector has,
    brought by an unordered load, stored at the end) are for targets that schedule themselves.
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
    inputs: tuple[Inputs, ...] = (TOKENS_ONLY,)
    encoder_tokens: tuple[int, ...] = (0,)
    transfers: tuple[tuple[int, bool, bool], ...] = ((0, False, False),)

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be issued and not yet returned."""
        return 2 if "async" in self.features else 1

    @property
    def lookaheads(self) -> Sequence[int]:
        """Slots (tokens) that an allocation may reserve ahead."""
        return range(self.lookahead + 1) if "lookahead" in self.features else (0,)


class Choice(NamedTuple):
    """An enabled action whose parameters are still open.

    Each domain lists the values of one parameter, simplest first.
    """

    kind: str
    request: int  # 0 where there is none
    build: Callable[..., Action]
    domains: tuple[Sequence[Any], ...] = ()

    def action(self, picks: Sequence[int] = ()) -> Action:
        """The action with the picked parameters; what is missing or too big is mended."""
        values = [
            domain[min(picks[i], len(domain) - 1) if i < len(picks) else 0]
            for i, domain in enumerate(self.domains)
        ]
        return self.build(*values)

    def actions(self) -> Iterator[Action]:
        """All of them, each once."""
        yield from dict.fromkeys(self.build(*values) for values in product(*self.domains))


ISSUE = Choice("issue", 0, Issue)

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
    "store",
    "complete store",
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


def choices(state: State, scope: Scope) -> list[Choice]:
    """The actions that an engine may ask for in this state, within the scope."""
    found: list[Choice] = []
    if len(state.requests) < scope.max_requests:
        domains = (
            scope.prompts, scope.priorities, scope.max_sampled, scope.inputs, scope.encoder_tokens,
            scope.transfers,
        )  # fmt: skip
        found.append(Choice("submit", 0, partial(_submit, state.submitted), domains))
    if state.config.scheduling is not None:
        return found + _around_a_scheduler(state, scope)
    if state.hit is not None:
        found += _admissions(state, scope, state.find(state.hit.request))
    for request in state.requests:
        rows = rows_in_flight(state, request) if state.steps else []
        if request.status == "running":
            found += _while_running(state, scope, request, rows)
        elif request.status == "loading":
            found.append(_load_returns(state, request))
        elif not has_stale_rows(state, request):
            found.append(_plain("lookup", Lookup, request.id))
        if not rows or "async" in scope.features:
            found += _leaving(state, scope, request)
    found += _transfers(state)
    found += _steps(state, scope, any(request.scheduled for request in state.requests))
    if "forget" in scope.features:
        found += _forgets(state.config.num_blocks)
    return found


def _submit(
    request: int,
    prompt: tuple[Symbol, ...],
    priority: int,
    max_tokens: int | None,
    inputs: Inputs,
    encoder_tokens: int,
    transfers: tuple[int, bool, bool],
) -> Submit:
    inputs = inputs.within(len(prompt))
    return Submit(request, prompt, priority, max_tokens, inputs, encoder_tokens, *transfers)


@lru_cache(maxsize=64)
def _forgets(num_blocks: int) -> tuple[Choice, Choice]:
    normal = range(1, num_blocks)
    blocks = Choice("forget blocks", 0, _forget_two, (normal, normal))
    return blocks, Choice("forget everything", 0, Forget)


def _forget_two(one: int, other: int) -> Forget:
    return Forget((one,) if one == other else (min(one, other), max(one, other)))


def _steps(state: State, scope: Scope, to_issue: bool) -> list[Choice]:
    found = []
    if to_issue and len(state.steps) < scope.steps_in_flight:
        found.append(ISSUE)
    if state.steps:
        found.append(_step_returns(state, scope))
    return found


def _around_a_scheduler(state: State, scope: Scope) -> list[Choice]:
    """What is asked of a target that schedules itself: steps, their results, and aborts.

    It learns that a transfer has ended from the next step that returns.
    """
    found = _steps(state, scope, bool(state.requests or state.transfers or state.deferred))
    if state.steps:
        found += _transfers(state)
    for request in state.requests:
        loading = request.status == "loading"
        if loading and state.steps:
            end = request.load[1] if request.load else 0
            load = partial(CompleteLoad, request.id)
            found.append(Choice("complete load", request.id, load, ((end,),)))
        if "abort-loading" in scope.features if loading else "abort" in scope.features:
            found.append(_plain("abort", Release, request.id, "abort"))
    return found


def _counts(most: int) -> range:
    """`most` down to 1."""
    return range(most, 0, -1)


def _admissions(state: State, scope: Scope, request: Request) -> list[Choice]:
    assert state.hit is not None
    start, states = state.hit.tokens, has_states(state.config)
    rest = request.known - start
    if rest < 1 or is_stored(state, request.id):
        return []
    extras: tuple[Sequence[Any], ...] = (
        range(scope.headroom + 1),
        (False,) if states else (False, True),
        scope.lookaheads,
    )
    admit = partial(_admit, request.id)
    news = chunks(state.config, request, start, min(rest, scope.chunk))
    found = [Choice("admit", request.id, admit, (news, *extras))] if news else []
    unit = state.config.common_block
    if "external" in scope.features and start % unit == 0:
        externals, loads = range(unit, rest, unit), range(unit, rest + (not states), unit)
        if externals:
            counts = [
                chunks(state.config, request, start + external, min(rest - external, scope.chunk))
                for external in externals
            ]
            pairs = [(new, e) for e, some in zip(externals, counts, strict=True) for new in some]
            build = partial(_admit_external, request.id)
            found += [Choice("admit external", request.id, build, (pairs, *extras))] * bool(pairs)
        if loads and not _touches_what_is_free(state):
            of_a_load = (*extras[:2], (0,), loads)  # engines reserve ahead once it has arrived
            found.append(Choice("load", request.id, admit, ((0,), *of_a_load)))
    return found


def _touches_what_is_free(state: State) -> bool:
    """Does a step clear or copy a block that nobody holds?  (An unordered load might get it.)

    To keep such blocks back is a scheduler's duty, not its cache manager's.
    """
    touched = set(state.uncleared)
    for step in state.steps:
        touched.update(step.cleared)
        touched.update(block for copy in step.copies for block in (copy.source, copy.destination))
    return bool(touched) and not references(state).keys() >= touched


def has_states(config: Config) -> bool:
    return any(group.kind == "state" for group in config.groups)


def chunks(config: Config, request: Request, start: int, most: int) -> Sequence[int]:
    """How many tokens the next step of a request at `start` may compute, most first.

    Where a state is to be saved, a step over known tokens has to end: at each block's end,
    and at the last boundary of the prompt.  (vLLM 0.32: `_mamba_block_aligned_split`.)
    """
    known_end = max(request.prompt_tokens, request.known - 1)
    if not has_states(config) or start >= known_end:
        return _counts(most)
    block = max(group.block_size for group in config.groups if group.kind == "state")
    last = (request.known - 1) // block * block
    stops = [last, *([(start // block + 1) * block] if start % block else [])]
    if config.partial_boundary:
        tail = (request.prompt_tokens - 1) // config.boundary * config.boundary
        stops += [tail] if last < tail < request.prompt_tokens else []
    first_stop = min([stop for stop in stops if stop > start], default=start + most)
    return tuple(
        new
        for new in _counts(min(most, first_stop - start))
        if start + new >= known_end or start + new in stops or (start + new) % block == 0
    )


def _admit(
    request: int, new: int, headroom: int, whole: bool, lookahead: int, external: int = 0
) -> Action:
    return Allocate(request, new, (), external, new == 0, lookahead, headroom, whole)


def _admit_external(
    request: int, counts: tuple[int, int], headroom: int, whole: bool, lookahead: int
) -> Action:
    """`counts`: new and external tokens."""
    new, external = counts
    return _admit(request, new, headroom, whole, lookahead, external)


def _while_running(
    state: State, scope: Scope, request: Request, rows: Sequence[Row]
) -> list[Choice]:
    stored = is_stored(state, request.id)
    found = [] if request.scheduled or stored else _allocations(state, scope, request, rows)
    certain = min(request.computed, request.known)
    if "store" in scope.features and processed_tokens(state, request) >= state.config.common_block:
        store = _plain("store", Store, request.id)
        found += [] if stored or request.scheduled else [store]
    ahead = bool(request.scheduled) and has_states(state.config)  # published when granted
    if certain > 0 and "publish" in scope.features and not ahead:
        domains = ((certain,),)
        found.append(Choice("publish", request.id, partial(Publish, request.id), domains))
    if "trim" in scope.features and not stored:
        found.append(_plain("trim", Trim, request.id))
    return found


def _allocations(state: State, scope: Scope, request: Request, rows: Sequence[Row]) -> list[Choice]:
    """The next tokens of a running request: with drafts only after the last token to come."""
    to_come = request.known + outstanding_tokens(state, request)
    to_compute = to_come - request.computed
    waits = rows and "async" not in scope.features
    if waits or to_compute < 1 or to_come >= scope.max_request_tokens:
        return []
    states = has_states(state.config)
    news = chunks(state.config, request, request.computed, min(to_compute, scope.chunk))
    found = [_extension(request.id, news, scope.headroom, scope.lookaheads)] if news else []
    if "lookahead" in scope.features and to_compute == 1 and not states:
        counts = range(1, scope.lookahead + 1)
        drafts = (counts, scope.samples, scope.lookaheads)
        found.append(Choice("draft", request.id, partial(_draft, request.id), drafts))
    return found


@lru_cache(maxsize=4096)
def _extension(
    request: int, news: Sequence[int], headroom: int, lookaheads: Sequence[int]
) -> Choice:
    domains = (news, range(headroom + 1), lookaheads)
    return Choice("extend", request, partial(_extend, request), domains)


def _extend(request: int, new: int, headroom: int, lookahead: int) -> Action:
    return Allocate(request, new, lookahead=lookahead, headroom=headroom)


def _draft(request: int, count: int, symbol: Symbol, lookahead: int) -> Action:
    return Allocate(request, 1 + count, drafts=(symbol,) * count, lookahead=lookahead)


def _leaving(state: State, scope: Scope, request: Request) -> list[Choice]:
    features = scope.features
    if request.status == "loading":
        leaves = "abort-loading" in features
        return [_plain("abort", Release, request.id, "abort")] if leaves else []
    if request.scheduled:
        if "unissued" not in features or relied_upon(state, request):
            return []
        leave = partial(Release, request.id)
        return [Choice("leave unissued", request.id, leave, (("preempt", "abort"),))]
    reasons = []
    if request.status == "running":
        reasons += ["finish"] if request.known > request.prompt_tokens else []
        reasons += ["preempt"] if "preempt" in features else []
    reasons += ["abort"] if "abort" in features else []
    return [_plain(reason, Release, request.id, reason) for reason in reasons]


@lru_cache(maxsize=4096)
def _plain(kind: str, build: Callable[..., Action], request: int, *more: Any) -> Choice:
    """A choice without parameters: there are few, and they come up all the time."""
    return Choice(kind, request, partial(build, request, *more))


def relied_upon(state: State, request: Request) -> bool:
    """Does another request hold a block that `request` was granted and has not issued?"""
    others = [other for other in state.requests if other.id != request.id and any(other.tables)]
    if not others:
        return False
    own = {cell[0] for cell in unissued_cells(state, request)}
    return any(own.intersection(table) for other in others for table in other.tables)


def _transfers(state: State) -> list[Choice]:
    """The ends of stores, and of loads whose requests have left."""
    found = []
    for transfer in state.transfers:
        if transfer.inbound:
            load = partial(CompleteLoad, transfer.request)
            found.append(Choice("complete load", transfer.request, load, ((0,),)))
        else:
            found.append(_plain("complete store", CompleteStore, transfer.request))
    return found


def _load_returns(state: State, request: Request) -> Choice:
    first, end = request.load or (0, 0)
    half_way: tuple[int, ...] = ()
    if all(group.kind == "full" for group in state.config.reused):
        unit = state.config.common_block
        half_way = tuple(range(max(first, unit), end, unit))
    delivered = (end, 0, *half_way)
    return Choice("complete load", request.id, partial(CompleteLoad, request.id), (delivered,))


def _step_returns(state: State, scope: Scope) -> Choice:
    step = state.steps[0]
    drafted = tuple([(row.request, len(row.drafts)) for row in step.rows if row.samples])
    return _returns(step.id, drafted, scope.samples)


@lru_cache(maxsize=4096)
def _returns(
    step: int, drafted: tuple[tuple[int, int], ...], samples: tuple[Symbol, ...]
) -> Choice:
    """For each (request, drafts) that samples: how many are accepted, and the token after them."""
    domains = [
        [(accepted, symbol) for accepted in range(drafts + 1) for symbol in samples]
        for _, drafts in drafted
    ]

    def build(*returned: tuple[int, Symbol]) -> Action:
        outputs = tuple(
            Output(request, symbol, accepted)
            for (request, _), (accepted, symbol) in zip(drafted, returned, strict=True)
        )
        return CompleteStep(step, outputs)

    return Choice("complete step", 0, build, tuple(domains))
