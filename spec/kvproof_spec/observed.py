"""A target that schedules itself, in the core's own actions.

One call of its scheduler is one `Issue`, one returned step one `CompleteStep`.  What the
call did inside is not seen; what it must have done follows from the tables after it, and
is put as the actions that the core judges anyway: preemptions and trims first, since they
only make room, then each row's admission in order.  An allocation that was preempted again
in the same call was never issued: nothing is promised for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvproof_spec.actions import Action, Allocate, CompleteStep, Issue, Lookup, Release, Store, Trim
from kvproof_spec.answers import (
    Answer,
    Done,
    Granted,
    Hit,
    Issued,
    Returned,
    Scheduled,
    ScheduledRow,
    SentRow,
    Trimmed,
    Updated,
)
from kvproof_spec.derived import outstanding_tokens
from kvproof_spec.pages import NULL_BLOCK, Copy, Tables
from kvproof_spec.state import Request, State


class InconsistentAnswer(Exception):
    """The target's own account of a step contradicts itself or what it said before."""


def core_actions(state: State, action: Action, answer: Answer) -> Iterator[tuple[Action, Answer]]:
    """The core's actions and answers that one line of a trace stands for.

    They are to be judged one by one from `state` on; `InconsistentAnswer` if the line
    contradicts itself or `state`.
    """
    match action, answer:
        case Issue(), Scheduled():
            return _scheduled(state, answer)
        case CompleteStep(), Updated():
            return _updated(state, action, answer)
        case _:
            return iter([(action, answer)])


def _scheduled(state: State, answer: Scheduled) -> Iterator[tuple[Action, Answer]]:
    after = dict(answer.tables)
    yield from _made_room(state, answer, after)
    copies = _copies_by_request(answer, after)
    for row in answer.rows:
        yield from _admitted_or_extended(state, answer, row, copies.get(row.request, ()))
    for load in answer.loads:  # which may start from what these rows compute
        tables = _tables_of(after, load.request)
        yield Lookup(load.request), Hit(load.hit, hit_tables(state, tables, load.hit))
        unordered = Allocate(load.request, 0, external=load.external, unordered=True)
        yield unordered, Granted(tables)
    sent = tuple(SentRow(row.request, row.worker) for row in answer.rows)
    yield Issue(), Issued(sent, answer.copies, answer.cleared, answer.deferred)


def _made_room(
    state: State, answer: Scheduled, after: dict[int, Tables]
) -> Iterator[tuple[Action, Answer]]:
    """Preemptions, and what a refused extension has given back of a window."""
    kept = Counter(answer.deferred)
    kept -= Counter(end for copy in answer.copies or () for end in (copy.source, copy.destination))
    for request_id in answer.preempted:
        yield Release(request_id, "preempt"), Returned(tuple(kept.elements()))
    extended = {*answer.preempted, *(row.request for row in answer.rows)}
    for request in state.requests:
        stays = request.status == "running" and request.id not in extended
        if stays and after.get(request.id, request.tables) != request.tables:
            yield Trim(request.id), Trimmed(after[request.id])


def _admitted_or_extended(
    state: State, answer: Scheduled, row: ScheduledRow, copies: tuple[Copy, ...]
) -> Iterator[tuple[Action, Answer]]:
    tables = _tables_of(dict(answer.tables), row.request)
    _require_consistent(state, row, preempted=row.request in answer.preempted)
    if row.admitted and not _has_loaded(state, row.request):
        hit = row.start - row.external
        found = hit_tables(state, _before_copies(tables, copies), hit)
        yield Lookup(row.request), Hit(hit, found)
    granted = Granted(tables, copies=copies)
    yield Allocate(row.request, row.tokens, external=row.external), granted


def _copies_by_request(answer: Scheduled, after: dict[int, Tables]) -> dict[int, tuple[Copy, ...]]:
    """Which row's admission or extension made each copy.

    Who takes a tail by copy gets the destination; who gives the cache one has the source.
    What a request has left that was preempted in this call goes with the first row.
    """
    made: dict[int, tuple[Copy, ...]] = {}
    rows = [row.request for row in answer.rows]
    for copy in answer.copies or ():
        holders = [
            request_id
            for block in (copy.destination, copy.source)
            for request_id in rows
            if block in _tables_of(after, request_id)[copy.group]
        ]
        for holder in (*holders, *rows)[:1]:
            made[holder] = (*made.get(holder, ()), copy)
    return made


def _before_copies(tables: Tables, copies: tuple[Copy, ...]) -> Tables:
    """The tables with the blocks that a hit has found, in the places of their copies."""
    found = {(copy.group, copy.destination): copy.source for copy in copies}
    return tuple(
        tuple(found.get((group, block), block) for block in table)
        for group, table in enumerate(tables)
    )


def _tables_of(after: dict[int, Tables], request_id: int) -> Tables:
    if request_id not in after:
        raise InconsistentAnswer(f"request {request_id} has a row or a load and no tables")
    return after[request_id]


def _has_loaded(state: State, request_id: int) -> bool:
    """Is it admitted by an unordered load that has returned, its first step to come?"""
    request = state.get(request_id)
    return request is not None and request.status == "running" and not request.issued


def hit_tables(state: State, tables: Tables, tokens: int) -> Tables:
    """The entries of an admission's tables that its hit of `tokens` tokens stands for."""
    return tuple(
        table[: group.blocks_for(tokens)]
        for group, table in zip(state.config.groups, tables, strict=True)
    )


def _require_consistent(state: State, row: ScheduledRow, preempted: bool) -> None:
    """The row goes on where the request stood, and samples where its known tokens end."""
    request = state.get(row.request)
    if request is None:
        raise InconsistentAnswer(f"the step has a row of the unknown request {row.request}")
    admitted = request.status != "running" or preempted
    if admitted != row.admitted and not _has_loaded(state, row.request):
        raise InconsistentAnswer(f"request {row.request} is {request.status}: {row}")
    if not admitted and row.start != request.computed:
        raise InconsistentAnswer(
            f"request {row.request} goes on at {row.start}, computed are {request.computed} tokens"
        )
    outstanding = 0 if admitted else outstanding_tokens(state, request)
    samples = row.start + row.tokens >= request.known + outstanding
    if samples != row.samples:
        raise InconsistentAnswer(f"request {row.request} samples is {row.samples}: {row}")


def _updated(
    state: State, action: CompleteStep, answer: Updated
) -> Iterator[tuple[Action, Answer]]:
    """The step returns, then who ended leaves; what was kept back for it is given back first."""
    own, left = _kept_for_the_finished(state, answer)
    numbers = None if answer.finished else answer.numbers
    yield action, Returned(tuple(left.elements()), answer.computed, numbers)
    for request_id in answer.finished:
        request, left = state.find(request_id), left + own[request_id]
        if request_id in answer.stored:
            trimmed = _trimmed(state, request, own[request_id])
            if trimmed != request.tables:
                yield Trim(request_id), Trimmed(trimmed)
            yield Store(request_id), Done()
        numbers = answer.numbers if request_id == answer.finished[-1] else None
        yield Release(request_id, "finish"), Returned(tuple(left.elements()), numbers=numbers)


def _kept_for_the_finished(
    state: State, answer: Updated
) -> tuple[dict[int, Counter[int]], Counter[int]]:
    """What is kept back for each request that ended, and for nobody of these.

    What has left a window may be kept, too, unless it still is for somebody else.
    """
    own = {request_id: Counter[int]() for request_id in answer.finished}
    others = state.transfers or state.steps[1:]
    left, before = Counter(answer.deferred), Counter(state.deferred if others else ())
    requests = [
        request
        for request in map(state.find, answer.finished)
        if request.id in answer.stored or _tokens_in_later_steps(state, request)
    ]
    for needed in (True, False):
        for request in requests:
            kept = _blocks(state, request, needed) & (left if needed else left - before)
            own[request.id] += kept
            left -= kept
    return own, left


def _blocks(state: State, request: Request, needed: bool) -> Counter[int]:
    """Those that it still needs once the oldest step has returned, or the others."""
    processed = _processed(state, request)
    return Counter(
        block
        for group, table in zip(state.config.groups, request.tables, strict=True)
        for entry, block in enumerate(table)
        if needed == (entry >= group.first_needed_block(processed))
    )


def _processed(state: State, request: Request) -> int:
    """Tokens whose steps are done once the oldest step has returned."""
    return request.computed - _tokens_in_later_steps(state, request)


def _tokens_in_later_steps(state: State, request: Request) -> int:
    return sum(row.tokens for step in state.steps[1:] for row in step.rows if row.of(request))


def _trimmed(state: State, request: Request, kept: Counter[int]) -> Tables:
    """The tables that a store is given: without what left the window, and is not `kept` for it."""
    processed = _processed(state, request)
    return tuple(
        tuple(
            NULL_BLOCK if entry < group.first_needed_block(processed) and not kept[block] else block
            for entry, block in enumerate(table)
        )
        for group, table in zip(state.config.groups, request.tables, strict=True)
    )
