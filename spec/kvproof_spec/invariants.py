"""What is promised: the six invariants, and the rules of the contract.

Each is one function over (expected, observed) that yields a sentence with the witness
for each violation, and nothing for a good answer.  `RULES` lists them in reading order
with the evidence they need; where it is missing they are not evaluated, never held.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvproof_spec.actions import (
    Allocate,
    CompleteStep,
    CompleteStore,
    Issue,
    Lookup,
    before_forward,
)
from kvproof_spec.answers import Granted, Hit, Issued, Numbers, Raised, Refused, Returned
from kvproof_spec.derived import (
    has_stale_rows,
    needed_in_flight,
    transfer_of,
)
from kvproof_spec.judgement import Expected, Observed, Rule, rule
from kvproof_spec.pages import (
    NULL_BLOCK,
    Table,
    Tables,
    encoder_cells,
    needed_cells,
    only_returned,
    read_page,
)


@rule("grant", "snapshot")
def free_xor_held(expected: Expected, observed: Observed) -> Iterator[str]:
    """I1: what is held or used is not free: neither handed out nor listed as free.

    Counts equal references, and the free list holds each free block once.  (What a
    refusal leaves is R1's.)
    """
    if isinstance(observed.answer, Granted):
        seen: set[int] = set()
        for group, index, block in expected.handed_out:
            if block in expected.held_before or block in seen:
                yield f"block {block}, handed out for entry {index} of group {group}, was not free"
            seen.add(block)
    if observed.snapshot is not None and not isinstance(observed.answer, Refused | Raised):
        yield from _free_is_listed_once(expected, observed)
        yield from _counts_equal_references(expected, observed)


def _free_is_listed_once(expected: Expected, observed: Observed) -> Iterator[str]:
    snapshot, pool, held = observed.snapshot, observed.pool, expected.held_after
    assert snapshot is not None
    assert pool is not None
    free, listed = snapshot.free_order, pool.listed
    if len(listed) != len(free) or snapshot.free_blocks not in (None, len(free)):
        yield f"the free list {free} is counted as {snapshot.free_blocks} blocks"
    if snapshot.free_order_reversed not in (None, free):
        yield f"walked backwards the free list is {snapshot.free_order_reversed}, not {free}"
    if pool.strange:
        yield f"listed as free, but no normal block: {sorted(pool.strange)}"
    if not listed.isdisjoint(held):
        yield f"listed as free, but held: blocks {sorted(listed & held.keys())}"
    if len(listed) + len(held) < expected.config.num_blocks - 1:
        lost = set(range(1, expected.config.num_blocks)) - listed - held.keys()
        yield f"neither free nor held: blocks {sorted(lost)}"


def _counts_equal_references(expected: Expected, observed: Observed) -> Iterator[str]:
    if observed.pool is None or not observed.pool.counts:
        return
    counts, held = observed.pool.counts, expected.held_after
    wrong = [block for block, times in held.items() if counts[block] != times]
    if wrong or observed.pool.referenced != len(held):
        wrong = [block for block in range(1, len(counts)) if counts[block] != held.get(block, 0)]
        for block in wrong:
            yield f"block {block} is counted {counts[block]}, held {held.get(block, 0)} times"


@rule("hit", "reads", "cleared")
def content_is_what_was_asked_for(expected: Expected, observed: Observed) -> Iterator[str]:
    """I2: a hit equals the promise, and an executed read memory, at every needed position."""
    match expected.action:
        case Lookup():
            for cell in expected.broken_promises:
                if cell not in expected.optimistic_cells:
                    yield expected.broken(cell)
        case CompleteStep():
            yield from _wrong_reads(expected)
        case CompleteStore():
            yield from _wrongly_stored(expected)
        case Issue() if isinstance(observed.answer, Issued):
            if left := expected.to_clear.difference(observed.answer.cleared or ()):
                yield f"blocks {sorted(left)} were handed out for this step and are not cleared"
        case _:
            pass


def _wrongly_stored(expected: Expected) -> Iterator[str]:
    store = transfer_of(expected.before, expected.action.request, inbound=False)
    for block, group, offset, content in store.cells if store else ():
        found = read_page(expected.before.memory, block, group, offset)
        if found is not content:
            who = f"request {expected.action.request}'s store"
            yield f"{who} read {found} for {content} in block {block}"


def _wrong_reads(expected: Expected) -> Iterator[str]:
    """Attention reads after all writes of its step, a state before them."""
    states = any(group.kind == "state" for group in expected.groups)
    found_before = before_forward(expected.before).pages() if states else expected.after.memory
    pages = [
        found_before if group.kind == "state" else expected.after.memory
        for group in expected.groups
    ]
    for row in expected.before.steps[0].rows:
        wanted = row.computes()
        for block, group, offset, position in needed_cells(
            expected.groups, row.tables, row.start, row.end
        ):
            found = read_page(pages[group], block, group, offset)
            if found is not wanted[position]:
                where = f"block {block}, group {group}, position {position}"
                yield f"request {row.request} read {found} for {wanted[position]} in {where}"
        for block, group, offset, position in encoder_cells(
            expected.groups, row.tables, len(row.encoder)
        ):
            if read_page(expected.after.memory, block, group, offset) is not row.encoder[position]:
                where = f"block {block}, group {group}, encoder position {position}"
                yield f"request {row.request} did not read its encoder's in {where}"


@rule("hit", "grant", "step", "reads")
def computed_means_recoverable(expected: Expected, observed: Observed) -> Iterator[str]:
    """I3: each group has a block at every position that a hit, an admission or a step needs."""
    hit = expected.after.hit
    if isinstance(expected.action, Lookup) and hit is not None:
        if not expected.config.scheduling:  # which shows what its admission keeps: judged there
            name = f"a hit of {hit.tokens}"
            yield from _holes(expected, hit.tables, hit.tokens, hit.tokens, name)
    elif isinstance(observed.answer, Granted):
        ends, tables = expected.segments, observed.answer.tables
        name = f"a request that goes on at {ends.restart} of {ends.target}"
        encoder = len(expected.request.encoder)
        yield from _holes(expected, tables, ends.restart, ends.target, name, encoder)
    elif isinstance(expected.action, Issue | CompleteStep):
        issued = isinstance(expected.action, Issue)
        for row in expected.after.steps[-1].rows if issued else expected.before.steps[0].rows:
            name = f"request {row.request}'s step over {row.start} to {row.end}"
            tables = expected.tables(row) if issued else row.tables
            yield from _holes(expected, tables, row.start, row.end, name, len(row.encoder))


def _holes(
    expected: Expected, tables: Tables, start: int, end: int, name: str, encoder: int = 0
) -> Iterator[str]:
    for group_id, group in enumerate(expected.groups):
        table = tables[group_id]
        needed = group.entries(start, end) if group.reused else range(group.blocks_for(encoder))
        if needed and (needed[-1] >= len(table) or NULL_BLOCK in [table[i] for i in needed]):
            missing = [i for i in needed if i >= len(table) or table[i] == NULL_BLOCK]
            yield f"{name} tokens has no block at entries {missing} of group {group_id}: {table}"


@rule("grant", "kept", "snapshot", "cleared")
def nothing_in_use_is_handed_out(expected: Expected, observed: Observed) -> Iterator[str]:
    """I4: an unordered operation keeps its blocks, and gets none that a step still needs."""
    if isinstance(observed.answer, Granted):
        needed = needed_in_flight(expected.before) if expected.action.unordered else set()
        for group, index, block in expected.handed_out:
            if block in expected.used_before | needed:
                by = "an operation" if block in expected.used_before else "a step in flight"
                yield f"block {block}, handed out for entry {index} of group {group}: {by} needs it"
    cleared = observed.answer.cleared if isinstance(observed.answer, Issued) else None
    if written := expected.used_before.intersection(cleared or ()):
        yield f"blocks {sorted(written)} are cleared while an operation uses them"
    yield from _kept_or_freed_wrongly(expected, observed)


def _kept_or_freed_wrongly(expected: Expected, observed: Observed) -> Iterator[str]:
    if early := expected.used_among(observed.listed):
        yield f"blocks {sorted(early)} are listed as free while an operation uses them"
    if expected.after.deferred and not expected.after.steps and not expected.after.transfers:
        yield f"blocks {expected.after.deferred} are kept for operations, and none is in flight"
    if expected.kept_from_nobody:
        yield f"blocks {expected.kept_from_nobody} are kept back, and nobody has left with them"


@rule("rows", "sent", "tables")
def the_worker_sees_the_table(expected: Expected, observed: Observed) -> Iterator[str]:
    """I5: at every position that a step needs, the worker's row names the table's block."""
    if isinstance(observed.answer, Issued) and observed.answer.rows is not None:
        rows, sent = expected.after.steps[-1].rows, observed.answer.rows
        if sorted(row.request for row in sent) != sorted(row.request for row in rows):
            yield f"the worker has rows {sent}, scheduled are {rows}"
        for row in (row for row in rows if row.tables != expected.tables(row)):
            meant = expected.touched_cells(row, expected.tables(row))
            seen = expected.touched_cells(row, row.tables)
            for _, group, _, position in sorted(meant ^ seen):
                where = f"request {row.request}, group {group}, position {position}"
                table = expected.tables(row)[group]
                yield f"{where}: the table is {table}, the worker has {row.tables[group]}"
    yield from _tables_not_told(expected, observed)


def _tables_not_told(expected: Expected, observed: Observed) -> Iterator[str]:
    if isinstance(observed.answer, Granted) and expected.request.status == "running":
        if observed.answer.new not in (None, expected.appended):
            yield f"the worker is sent {observed.answer.new}, appended were {expected.appended}"
    if observed.tables is not None and not isinstance(observed.answer, Raised):
        told = {request.id: request.tables for request in expected.after.requests}
        for request_id in told.keys() | observed.tables.keys():
            shown = observed.tables.get(request_id, expected.config.no_tables)
            if told.get(request_id) != shown:
                yield f"request {request_id} has {shown}, told was {told.get(request_id)}"


@rule("hit")
def optimistic_is_not_reusable(expected: Expected, observed: Observed) -> Iterator[str]:
    """I6: drafts, and external tokens before arrival, are not granted as finished content."""
    for cell in expected.broken_promises:
        if cell in expected.optimistic_cells:
            yield f"{expected.broken(cell)}: a draft, or its load has not returned"


@rule("refusal", "raised")
def all_or_nothing(expected: Expected, observed: Observed) -> Iterator[str]:
    """R1: a refusal changes nothing but the window's return (R7), and is no exception."""
    if isinstance(observed.answer, Raised) and not _shortage(expected, _wanted(expected)):
        yield f"instead of an answer came {observed.answer.error}"
    if isinstance(observed.answer, Refused):
        before, after = expected.request.tables, expected.request_after.tables
        for group, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new and not only_returned(old, new):
                yield f"a refusal changed group {group} from {old} to {new}"
        if observed.snapshot is not None:
            free = expected.config.num_blocks - 1 - len(expected.held_after)
            if len(observed.snapshot.free_order) != free:
                yield f"a refusal left {observed.snapshot.free_order} free, not {free} blocks"
            yield from _counts_equal_references(expected, observed)


@rule("grant", "raised")
def granted_means_it_fitted(expected: Expected, observed: Observed) -> Iterator[str]:
    """R2: new blocks + reclaimable hits + headroom <= free, and what is needed is taken."""
    wanted = _wanted(expected)
    if shortage := _shortage(expected, wanted):
        yield f"{shortage}; the answer was {type(observed.answer).__name__}"
    if isinstance(observed.answer, Granted):
        taken = [0] * len(wanted)
        for group, _, _ in expected.added:
            taken[group] += 1
        for group, (new, _) in enumerate(wanted):
            if taken[group] != new:
                yield f"group {group} needs {new} new blocks and took {taken[group]}"


def _shortage(expected: Expected, wanted: list[tuple[int, int]]) -> str:
    """What does not fit, or nothing."""
    action = expected.action
    free = expected.config.num_blocks - 1 - len(expected.held_before.keys() | expected.used_before)
    given_away = len(expected.copies_for_the_cache)
    if sum(map(sum, wanted)) + given_away + action.headroom > free:
        kept = f"{given_away} for copies and {action.headroom} kept"
        return f"{free} free blocks, {wanted} (new, reclaimed) needed, {kept}"
    if action.whole_sequence:
        wanted = _wanted(expected, expected.request.known)
        if sum(map(sum, wanted)) > free:
            return f"{free} free blocks, {wanted} (new, reclaimed) needed for the whole sequence"
    return ""


def _wanted(expected: Expected, whole: int | None = None) -> list[tuple[int, int]]:
    return [blocks_wanted(expected, group, whole) for group in range(len(expected.groups))]


def blocks_wanted(expected: Expected, group_id: int, whole: int | None = None) -> tuple[int, int]:
    """(new blocks, reclaimable hits that will be held) of one group.

    For a `whole` sequence (tokens) a window group wants at most its window and the tokens
    in flight.  What a state group wants is the policy's: what it took.
    """
    group, table = expected.groups[group_id], expected.tables_before[group_id]
    ends = expected.segments
    if group.kind == "state":
        return _wanted_for_state(expected, group_id)
    if not group.reused:
        return max(group.blocks_for(len(expected.request.encoder)) - len(table), 0), 0
    entries = group.blocks_for(ends.reserved if whole is None else whole)
    if whole is not None:
        entries = min(
            entries,
            group.most_blocks(expected.config.max_in_flight_tokens, expected.config.max_model_len),
        )
    if expected.request.status == "running":
        return max(entries - len(table), 0), 0
    first = group.first_needed_block(ends.restart)
    held = {*expected.held_before, NULL_BLOCK}
    after = expected.request_after.tables[group_id]
    kept = [block for block, now in zip(table[:first], after, strict=False) if block == now]
    reclaimed = sum(block not in held for block in (*kept, *table[first:]))
    copied = bool(table) and ends.local % group.block_size != 0
    return max(entries - max(first, len(table)), 0) + copied, reclaimed


def _wanted_for_state(expected: Expected, group_id: int) -> tuple[int, int]:
    taken = sum(group == group_id for group, _, _ in expected.added)
    if expected.request.status == "running":
        return taken, 0
    before, after = expected.tables_before[group_id], expected.request_after.tables[group_id]
    kept = {block for block, now in zip(before, after, strict=False) if block == now}
    kept |= {copy.source for copy in expected.copies if copy.group == group_id}
    return taken, len(kept - {*expected.held_before, NULL_BLOCK})


@rule("grant")
def one_block_one_place(expected: Expected, observed: Observed) -> Iterator[str]:
    """R3: a block stands at one (group, entry), and is no hit kept and handed out at once."""
    own: dict[int, tuple[int, int]] = {}
    mine = expected.request_after
    for request in (mine, *expected.after.requests):
        for group, table in enumerate(request.tables):
            for entry, block in enumerate(table):
                place = own.setdefault(block, (group, entry)) if request is mine else own.get(block)
                if block != NULL_BLOCK and place not in (None, (group, entry)):
                    where = f"and, for request {request.id}, {(group, entry)}"
                    yield f"block {block} stands at (group, entry) {place} {where}"


@rule("lookup", "grant")
def something_to_compute(expected: Expected, observed: Observed) -> Iterator[str]:
    """R4: a hit leaves a token to compute and ends on a boundary; tables have their length."""
    if isinstance(observed.answer, Hit):
        tokens, known = observed.answer.tokens, expected.request.known
        if tokens >= known:
            yield f"a hit of {tokens} of {known} tokens leaves nothing to compute"
        if tokens and (tokens % expected.config.boundary or not expected.config.caching):
            yield f"a hit of {tokens} tokens ends on no allowed boundary"
        yield from _wrong_lengths(expected, observed.answer.tables, tokens)
    elif isinstance(observed.answer, Granted):
        reserved, encoder = expected.segments.reserved, len(expected.request.encoder)
        yield from _wrong_lengths(expected, observed.answer.tables, reserved, encoder)


def _wrong_lengths(
    expected: Expected, tables: Tables, tokens: int, encoder: int = 0
) -> Iterator[str]:
    for group_id, (group, table) in enumerate(zip(expected.groups, tables, strict=True)):
        spanned = tokens if group.reused else encoder
        entries = max(group.blocks_for(spanned), len(expected.tables_before[group_id]))
        most = entries
        if group.kind == "state" and isinstance(expected.action, Allocate):
            entries = group.blocks_for(expected.segments.target)  # lookahead is the policy's
        if not entries <= len(table) <= most:
            yield f"group {group_id} has {len(table)} entries for {spanned} tokens: {table}"


@rule("hit")
def identity(expected: Expected, observed: Observed) -> Iterator[str]:
    """R5: prefixes that differ never serve each other: I2, said of the key."""
    for cell in expected.broken_promises:
        promised = read_page(expected.before.promise, *cell[:3])
        if promised is not None and promised.length == cell[3] + 1:
            yield f"{expected.broken(cell)}: another prefix of the same length"


@rule("grant", "copied")
def shared_blocks_are_not_written(expected: Expected, observed: Observed) -> Iterator[str]:
    """R6: who writes a block holds it alone, or writes what it holds; copies come before."""
    if isinstance(observed.answer, Granted):
        for block, group, offset, position in expected.rewritten:
            held = read_page(expected.before.promise, block, group, offset)
            wanted = expected.request_after.content[position : expected.certain]
            if wanted[:1] != (held,) and expected.others_hold(block):
                where = f"block {block}, group {group}, position {position}"
                yield f"request {expected.request.id} is to write {where}; others hold it: {held}"
    elif isinstance(observed.answer, Issued) and observed.answer.copies is not None:
        made, sent = expected.before.copies, observed.answer.copies
        if sorted(made, key=repr) != sorted(sent, key=repr):
            yield f"copies to be made before this step are {made}, the worker gets {sent}"


@rule("grant", "refusal", "trim")
def window_return(expected: Expected, observed: Observed) -> Iterator[str]:
    """R7: only what left the window on processed progress is returned; the rest stays."""
    granted = isinstance(observed.answer, Granted)
    old_tables = expected.tables_before if granted else expected.request.tables
    for group_id, old in enumerate(old_tables):
        new = expected.request_after.tables[group_id]
        if new[: len(old)] != old:
            yield from _changed(expected, group_id, old, new)


def _changed(expected: Expected, group: int, old: Table, new: Table) -> Iterator[str]:
    first = expected.groups[group].first_needed_block(expected.processed)
    copied = [(copy.source, copy.destination) for copy in expected.copies if copy.group == group]
    for entry, (was, now) in enumerate(zip(old, new, strict=False)):
        returned = entry < first and now == NULL_BLOCK
        if was != now and not returned and (was, now) not in copied:
            where = f"group {group}, entry {entry}: {was} became {now}"
            yield f"{where}; needed from {first} on, {expected.processed} tokens are processed"
    if len(new) < len(old):
        yield f"group {group} shrank from {old} to {new}"


@rule("resumption", "stale output")
def stale_output(expected: Expected, observed: Observed) -> Iterator[str]:
    """R9: output of an earlier admission never advances `computed`; resuming waits for it."""
    if isinstance(expected.action, Lookup) and has_stale_rows(expected.before, expected.request):
        yield f"request {expected.request.id} resumed before its stale output was back"
    if isinstance(observed.answer, Returned):
        counted = dict(observed.answer.computed or ())
        for row in expected.before.steps[0].rows:
            request = expected.after.get(row.request)
            if request is not None and request.admission != row.admission:
                if counted.get(request.id, request.computed) != request.computed:
                    count = counted[request.id]
                    yield f"request {request.id} counts {count} computed tokens after stale output"


@rule("events")
def events_replay_to_the_index(expected: Expected, observed: Observed) -> Iterator[str]:
    """R10: replaying the events gives the keys that a lookup would find."""
    assert observed.events is not None
    announced, findable = observed.events.announced, observed.events.findable
    for key in sorted(announced ^ findable):
        yield f"{key}: announced is {key in announced}, findable is {key in findable}"
    for event in observed.events.orphans:
        yield f"{event} names a parent that was never announced"


@rule("schedule")
def what_fits_goes_on(expected: Expected, observed: Observed) -> Iterator[str]:
    """R11: once nothing comes any more, one that fits the empty pool soon has a token, or ends."""
    scheduling, state = expected.config.scheduling, expected.after
    if scheduling and 0 < scheduling.patience * sum(r.known for r in state.requests) < state.quiet:
        left = [request.id for request in state.requests if expected.fits(request)]
        if left:
            yield f"none of the requests {left} had a token in the last {state.quiet} steps"


@rule("numbers")
def numbers_are_what_they_say(expected: Expected, observed: Observed) -> Iterator[str]:
    """R12: usage counts referenced blocks, hit rate tokens not recomputed, preemptions events."""
    assert isinstance(observed.answer, Returned)
    shown, meant = observed.answer.numbers, Numbers(len(expected.held_after), *expected.after.tally)
    if shown != meant:
        yield f"the target reports {shown}, it was {meant}"


RULES = tuple(value for value in tuple(globals().values()) if isinstance(value, Rule))
