"""What follows from a state and is therefore never stored: holders, users, progress."""

from __future__ import annotations

from kvproof_spec.pages import NULL_BLOCK, Cell, Tables, cells, encoder_cells, needed_cells
from kvproof_spec.state import Request, Row, State, Transfer


def references(state: State) -> dict[int, int]:
    """How often each held block is: table entries, deferred returns, and copies to be made."""
    held: dict[int, int] = {}
    for block in state.deferred:
        held[block] = held.get(block, 0) + 1
    for copy in state.copies:
        for block in (copy.source, copy.destination):
            held[block] = held.get(block, 0) + 1
    for request in state.requests:
        for table in request.tables:
            for block in table:
                held[block] = held.get(block, 0) + 1
    held.pop(NULL_BLOCK, None)
    return held


def used_by_operations(state: State) -> set[int]:
    """Blocks that an unordered operation touches: not to be handed out until it is done.

    Under ordering `strict` steps are unordered too, at the positions they need.
    """
    used = set(needed_in_flight(state)) if state.config.ordering == "strict" else set()
    for request in state.requests:
        if request.status == "loading" and request.load is not None:
            first, end = request.load
            used.update(blocks_between(state, request.tables, first, end))
    for transfer in state.transfers:
        used.update(cell[0] for cell in transfer.cells)
    return used


def needed_in_flight(state: State) -> set[int]:
    """Blocks that a step in flight reads, writes, copies or clears, at positions that it needs."""
    needed: set[int] = set()
    groups = state.config.groups
    for step in state.steps:
        needed.update(step.cleared)
        needed.update(block for copy in step.copies for block in (copy.source, copy.destination))
        for row in step.rows:
            read = needed_cells(groups, row.tables, row.start, row.end)
            encoder = encoder_cells(groups, row.tables, len(row.encoder))
            needed.update(cell[0] for cell in (*read, *encoder))
            needed |= blocks_between(state, row.tables, row.first_write, row.end)
    return needed


def blocks_between(state: State, tables: Tables, first: int, end: int) -> set[int]:
    """Blocks of positions `first` to `end - 1` in any group."""
    blocks: set[int] = set()
    for group, table in zip(state.config.groups, tables, strict=True):
        blocks.update(table[first // group.block_size : group.blocks_for(end)])
    return blocks - {NULL_BLOCK}


def tokens_in_flight(state: State, request: Request) -> int:
    """Tokens of the request's present admission whose steps have not returned."""
    return sum([row.tokens for row in rows_in_flight(state, request)])


def rows_in_flight(state: State, request: Request) -> list[Row]:
    """Rows of the request's present admission, in order of issue."""
    if not state.steps:
        return []
    return [
        row
        for step in state.steps
        for row in step.rows
        if row.request == request.id and row.admission == request.admission
    ]


def has_stale_rows(state: State, request: Request) -> bool:
    """Does a step of an earlier admission still owe the request a sampled token?"""
    return any(
        row.request == request.id and row.admission != request.admission and row.samples
        for step in state.steps
        for row in step.rows
    )


def transfer_of(state: State, request_id: int, *, inbound: bool) -> Transfer | None:
    """The transfer under way that a request began; inbound ones only once it has left."""
    for transfer in state.transfers:
        if transfer.request == request_id and transfer.inbound is inbound:
            return transfer
    return None


def is_stored(state: State, request_id: int) -> bool:
    """Is a store of the request under way?"""
    return transfer_of(state, request_id, inbound=False) is not None


def processed_tokens(state: State, request: Request) -> int:
    """Tokens whose step has finished."""
    return request.computed - tokens_in_flight(state, request)


def outstanding_tokens(state: State, request: Request) -> int:
    """Tokens to come from steps in flight of the present admission, drafts all accepted."""
    return sum([1 + len(row.drafts) for row in rows_in_flight(state, request) if row.samples])


def unissued_cells(state: State, request: Request) -> list[Cell]:
    """Cells of the positions that were granted to the request and not issued."""
    if not request.scheduled:
        return []
    groups, tables = state.config.groups, request.tables
    end = request.computed + request.scheduled
    loaded = cells(groups, tables, *request.load) if request.load else ()
    return [*loaded, *cells(groups, tables, request.computed, end)]
