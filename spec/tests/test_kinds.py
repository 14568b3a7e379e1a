"""The kinds of groups: chunked local attention, states and cross attention beside the plain ones.

What a step reads and writes, what a request still needs, and where a hit may end: for a state that
is a set of points, for several groups the points that all of them have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteStep,
    Issue,
    Lookup,
    Output,
    Release,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Granted,
    Hit,
    Issued,
    Refused,
    Returned,
    SentRow,
    Trimmed,
)
from kvproof_spec.config import KINDS, Config, Group
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import Oracle, rules_of
from kvproof_spec.pages import PageWriter, cells, encoder_cells, needed_cells, read_page
from kvproof_spec.state import ActionDisabled, State, initial_state

FULL = Group("full", 2)
SLIDING = Group("sliding", 2, 3)
CHUNKED = Group("chunked", 2, 4)
STATE = Group("state", 2)
CROSS = Group("cross", 2)

Move = tuple[Action, Answer]
Run = tuple[Move, ...]


def config(*groups: Group, num_blocks: int = 13, caching: bool = True) -> Config:
    return Config(groups, num_blocks, caching)


def submit(request: int, *symbols: int, encoder: int = 0) -> Move:
    return Submit(request, symbols, encoder_tokens=encoder), Done()


def lookup(request: int, tokens: int, *tables: tuple[int, ...]) -> Move:
    return Lookup(request), Hit(tokens, tables)


def grant(action: Allocate, *tables: tuple[int, ...]) -> Move:
    return action, Granted(tables)


def complete(step: int, *outputs: tuple[int, int]) -> Move:
    return CompleteStep(step, tuple(Output(*output) for output in outputs)), Returned()


def abort(request: int) -> Move:
    return Release(request, "abort"), Returned()


def trim(request: int, *tables: tuple[int, ...]) -> Move:
    return Trim(request), Trimmed(tables)


def follow(oracle: Oracle, run: Iterable[Move]) -> Oracle:
    for move in run:
        oracle.step(*move)
    return oracle


def passes(given: Config, *run: Move) -> Oracle:
    return follow(Oracle(given), run)


ISSUED: Move = (Issue(), Issued())


# What a step reads and writes


@dataclass(frozen=True, slots=True)
class Span:
    """A step over `start` to `end - 1`, or (`end` = `start`) a hit of `start` tokens."""

    group: Group
    start: int
    end: int
    read: list[int]
    written: list[int]
    entries: list[int]


SPANS = (
    Span(FULL, 0, 3, [0, 1, 2], [0, 1, 2], [0, 1]),
    Span(FULL, 3, 5, [0, 1, 2, 3, 4], [3, 4], [0, 1, 2]),
    Span(FULL, 4, 4, [0, 1, 2, 3], [], [0, 1]),
    Span(SLIDING, 3, 5, [1, 2, 3, 4], [3, 4], [0, 1, 2]),
    Span(SLIDING, 4, 4, [2, 3], [], [1]),
    Span(SLIDING, 5, 5, [3, 4], [], [1, 2]),
    Span(CHUNKED, 0, 3, [0, 1, 2], [0, 1, 2], [0, 1]),
    Span(CHUNKED, 3, 5, [0, 1, 2, 3, 4], [3, 4], [0, 1, 2]),  # it crosses into the next chunk
    Span(CHUNKED, 4, 5, [4], [4], [2]),
    Span(CHUNKED, 6, 7, [4, 5, 6], [6], [2, 3]),
    Span(CHUNKED, 4, 4, [], [], []),  # a hit that ends with a chunk needs nothing
    Span(CHUNKED, 6, 6, [4, 5], [], [2]),
    Span(STATE, 0, 3, [], [2], [1]),
    Span(STATE, 0, 5, [], [4], [2]),
    Span(STATE, 3, 4, [2], [3], [1]),  # in place
    Span(STATE, 4, 5, [3], [4], [1, 2]),
    Span(STATE, 3, 7, [2], [6], [1, 3]),  # the block between is never written
    Span(STATE, 4, 4, [3], [], [1]),
    Span(CROSS, 0, 3, [], [], [0, 1]),  # no positions of its own
)


@pytest.mark.parametrize("span", SPANS, ids=lambda s: f"{s.group.kind} {s.start} to {s.end}")
def test_a_step_reads_and_writes_by_the_kind_of_the_group(span: Span) -> None:
    group, tables = span.group, (tuple(range(1, 9)),)
    assert list(group.read(span.start, span.end)) == span.read
    assert list(group.written(span.start, span.end)) == span.written
    if group.reused:
        assert list(group.entries(span.start, span.end)) == span.entries
    read = needed_cells((group,), tables, span.start, span.end)
    wrote = cells((group,), tables, span.start, span.end)
    assert [cell[3] for cell in read] == span.read
    assert [cell[3] for cell in wrote] == span.written


def test_every_kind_is_spelled_out_here() -> None:
    assert {span.group.kind for span in SPANS} == set(KINDS)


@pytest.mark.parametrize(
    ("group", "processed", "first", "block"),
    [
        (Group("chunked", 2, 4), 0, 0, 0),
        (Group("chunked", 2, 4), 3, 0, 0),
        (Group("chunked", 2, 4), 4, 4, 2),
        (Group("chunked", 2, 4), 7, 4, 2),
        (Group("chunked", 4, 6), 7, 6, 1),  # a chunk that begins inside a block
        (Group("state", 2), 0, 0, 0),
        (Group("state", 2), 4, 3, 1),
        (Group("state", 2), 5, 4, 2),
        (Group("cross", 2), 9, 0, 0),
    ],
)
def test_what_is_left_of_the_first_needed_position_is_never_read_again(
    group: Group, processed: int, first: int, block: int
) -> None:
    assert group.first_needed(processed) == first
    assert group.first_needed_block(processed) == block


def test_a_state_fills_its_page_alone() -> None:
    assert [group.cells for group in (FULL, SLIDING, CHUNKED, STATE, CROSS)] == [2, 2, 2, 1, 2]
    assert list(cells((STATE,), ((1, 2, 3),), 0, 6)) == [(3, 0, 0, 5)]


@pytest.mark.parametrize(
    ("group", "in_flight", "most"),
    [
        (Group("full", 2), 4, 10),
        (Group("sliding", 2, 3), 4, 4),  # 2 + 4 tokens in 3 blocks, and one for the offset
        (Group("chunked", 2, 4), 4, 4),
        (Group("chunked", 2, 4), 99, 10),
    ],
)
def test_a_request_needs_no_more_blocks_than_its_window_and_what_is_in_flight(
    group: Group, in_flight: int, most: int
) -> None:
    assert group.most_blocks(in_flight, max_model_len=20) == most


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("state", 2, 4), "a state group with a window of 4 tokens"),
        (("chunked", 2), "a chunked group with a window of 0 tokens"),
        (("cross", 0), "a block of 0 tokens"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(given: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Group(*given)


def test_cross_attention_needs_caching_off() -> None:
    with pytest.raises(ValueError, match="cross attention needs prefix caching off"):
        config(FULL, CROSS)
    assert config(FULL, CROSS, caching=False).reused == (FULL,)


def test_a_partial_boundary_divides_every_block() -> None:
    with pytest.raises(ValueError, match="a partial boundary of 2 tokens does not divide"):
        Config((Group("full", 4), Group("full", 3)), 9, partial_boundary=2)


@pytest.mark.parametrize(
    ("groups", "partial", "boundary", "piece"),
    [
        ((Group("full", 4), Group("sliding", 6, 3)), None, 12, 2),
        ((Group("full", 4), Group("state", 8)), None, 8, 4),
        ((Group("full", 4), Group("state", 8)), 2, 2, 2),
    ],
)
def test_hits_end_where_the_blocks_of_all_groups_do_or_at_the_partial_boundary(
    groups: tuple[Group, ...], partial: int | None, boundary: int, piece: int
) -> None:
    made = Config(groups, 9, partial_boundary=partial)
    assert (made.boundary, made.hash_block) == (boundary, piece)


# Where a hit may end

ENTRIES = range(3)  # of each group, two tokens each
ENDS = (2, 4, 6)
KEPT_BY_GROUP = [
    [entry for entry in ENTRIES if bits >> entry & 1] for bits in range(2 ** len(ENTRIES))
]


def recoverable(group: Group, kept: Sequence[int]) -> set[int]:
    """Boundaries at which a group that has kept these entries can restore a request."""
    ends = set()
    for end in ENDS:
        last = end // 2 - 1
        match group.kind:
            case "full":
                needed = list(range(last + 1))
            case "chunked":
                needed = list(range(end // 4 * 2, last + 1))
            case _:  # a window of three reads two more tokens; a state is one
                needed = [last]
        if set(needed) <= set(kept):
            ends.add(end)
    return ends


def state_with(given: Config, kept: Sequence[Sequence[int]]) -> State:
    """A state with a request of seven tokens, whose prefix each group has kept in part."""
    state = follow(Oracle(given), [submit(0, 1, 2, 3, 4, 5, 6, 7)]).state
    promise = PageWriter(given.groups, state.promise)
    for group, entries in enumerate(kept):
        table = tuple(1 + 3 * group + e if e in entries else 0 for e in ENTRIES)
        tables = tuple(table if g == group else () for g in range(len(given.groups)))
        for end in ENDS:
            promise.write_all(cells(given.groups, tables, end - 2, end), state.find(0).content)
    return state._replace(promise=promise.pages())


def granted_hits(given: Config, kept: Sequence[Sequence[int]], nulls: bool) -> set[int]:
    """Which boundaries the spec takes for a hit, by trying them all.

    What is not kept is offered as null or as the block that has lost it.
    """
    state, found, said = state_with(given, kept), set(), set()
    for end in ENDS:
        tables = tuple(
            tuple(
                1 + 3 * group + e if e in entries or not nulls else 0 for e in ENTRIES[: end // 2]
            )
            for group, entries in enumerate(kept)
        )
        oracle = Oracle(given)
        oracle.state = state
        try:
            oracle.step(Lookup(0), Hit(end, tables))
            found.add(end)
        except Violation as violation:
            said.add(violation.rule)
    assert said <= {"I3" if nulls else "I2"}
    return found


@pytest.mark.parametrize("nulls", [True, False], ids=["as null", "as a lost block"])
@pytest.mark.parametrize(
    "groups",
    [(FULL, CHUNKED), (CHUNKED, STATE), (SLIDING, STATE), (SLIDING, CHUNKED)],
    ids=lambda groups: " and ".join(group.kind for group in groups),
)
def test_a_hit_may_end_exactly_where_every_group_is_recoverable(
    groups: tuple[Group, ...], nulls: bool
) -> None:
    given = config(*groups)
    for kept in product(KEPT_BY_GROUP, repeat=len(groups)):
        each = [recoverable(group, own) for group, own in zip(groups, kept, strict=True)]
        assert granted_hits(given, kept, nulls) == set.intersection(*each), kept


def test_what_is_recoverable_is_no_interval_and_the_common_boundary_no_minimum() -> None:
    assert recoverable(STATE, [0, 2]) == {2, 6}
    assert recoverable(CHUNKED, [2]) == {4, 6}
    assert recoverable(SLIDING, [0, 1]) == {2, 4}
    shortest = min(max(recoverable(SLIDING, [0, 1])), max(recoverable(STATE, [0, 2])))
    assert shortest == 4
    assert granted_hits(config(SLIDING, STATE), ([0, 1], [0, 2]), nulls=True) == {2}


# States

ONE_STATE = config(STATE)
SAVED: Run = (
    submit(0, 1, 2, 3),
    lookup(0, 0, ()),
    grant(Allocate(0, new=2), (1,)),
    ISSUED,
    complete(0),
)
ONE_MORE = Allocate(0, new=1)
TAIL = Allocate(1, new=1)


def state_after(given: Config, *run: Move) -> State:
    return passes(given, *run).state


def test_a_state_stays_behind_where_a_step_has_ended_on_a_blocks_last_token() -> None:
    run = (*SAVED, grant(ONE_MORE, (1, 2)), ISSUED, complete(1, (0, 9)), submit(1, 1, 2, 7))
    hit = lookup(1, 2, (1,)), grant(TAIL, (1, 3)), ISSUED, complete(2, (1, 9))
    passes(ONE_STATE, *run, *hit)


def test_a_step_leaves_no_state_at_the_blocks_that_it_has_passed_over() -> None:
    passed = submit(0, 1, 2, 3), lookup(0, 0, ()), grant(Allocate(0, new=3), (0, 2))
    run = (*passed, ISSUED, complete(0, (0, 9)), submit(1, 1, 2, 7))
    with pytest.raises(
        Violation, match=r"I2: .* block 2, group 0, position 1, .* promises <1 2 3>"
    ):
        passes(ONE_STATE, *run, lookup(1, 2, (2,)))
    with pytest.raises(Violation, match=r"I3: a hit of 2 tokens has no block at entries \[0\]"):
        passes(ONE_STATE, *run, lookup(1, 2, (0,)))


def test_a_state_inside_a_block_is_overwritten_in_place() -> None:
    inside = submit(0, 1, 2, 3), lookup(0, 0, ()), grant(Allocate(0, new=3), (0, 2))
    run = (*inside, ISSUED, complete(0, (0, 9)))
    before = read_page(state_after(ONE_STATE, *run).memory, 2, 0, 0)
    after = read_page(
        state_after(ONE_STATE, *run, grant(ONE_MORE, (0, 2)), ISSUED, complete(1, (0, 8))).memory,
        *(2, 0, 0),
    )
    assert (str(before), str(after)) == ("<1 2 3>", "<1 2 3 9>")


def test_a_hit_on_a_state_at_another_point_is_rejected() -> None:
    run = (*SAVED, grant(ONE_MORE, (1, 2)), ISSUED, complete(1, (0, 9)), grant(ONE_MORE, (1, 2)))
    asked = (*run, ISSUED, complete(2, (0, 8)), submit(1, 1, 2, 3, 9, 8))
    passes(ONE_STATE, *asked, lookup(1, 4, (0, 2)))
    with pytest.raises(Violation, match=r"I2: .* block 1, group 0, position 3, .* promises <1 2>"):
        passes(ONE_STATE, *asked, lookup(1, 4, (0, 1)))


def test_a_hit_on_a_state_that_the_same_step_saves_is_read_too_early() -> None:
    """A state is read before the step writes: what attention may do, a state may not."""
    granted = (*SAVED[:3], submit(1, 1, 2, 7), lookup(1, 2, (1,)), grant(TAIL, (1, 3)))
    with pytest.raises(Violation) as caught:
        passes(ONE_STATE, *granted, ISSUED, complete(0, (1, 9)))
    assert caught.value.rule == "I2"
    assert caught.value.witness == "request 1 read None for <1 2> in block 1, group 0, position 1"
    passes(config(FULL), *granted, ISSUED, complete(0, (1, 9)))


def test_a_hit_on_a_state_that_an_earlier_step_in_flight_saves_is_good() -> None:
    granted = (*SAVED[:4], submit(1, 1, 2, 7), lookup(1, 2, (1,)), grant(TAIL, (1, 3)), ISSUED)
    passes(ONE_STATE, *granted, complete(0), complete(1, (1, 9)))


def test_a_state_that_was_never_issued_is_withdrawn() -> None:
    left = (*SAVED[:3], abort(0), submit(1, 1, 2, 7))
    with pytest.raises(Violation, match=r"I2: .* block 1, group 0, position 1, .* promises None"):
        passes(ONE_STATE, *left, lookup(1, 2, (1,)))
    issued = (*SAVED[:4], abort(0), submit(1, 1, 2, 7), lookup(1, 2, (1,)))
    passes(ONE_STATE, *issued)


def test_a_state_is_gone_when_a_step_that_overwrites_it_is_withdrawn() -> None:
    """In place, the state before is no longer promised once the next step is granted."""
    inside = (
        submit(0, 1, 2, 3),
        lookup(0, 0, ()),
        grant(Allocate(0, new=1), (1,)),
        ISSUED,
        complete(0),
    )
    state = state_after(ONE_STATE, *inside, grant(ONE_MORE, (1,)), abort(0))
    assert read_page(state.promise, 1, 0, 0) is None
    assert str(read_page(state.memory, 1, 0, 0)) == "<1>"


def test_a_state_group_takes_what_its_policy_says_within_its_length() -> None:
    """Three new tokens need one block at their end; more may be taken, for slots ahead."""
    asked = submit(0, 1, 2, 3), lookup(0, 0, ())
    first = Allocate(0, new=3, lookahead=2)
    for table in ((0, 1), (1, 2), (0, 1, 2), (0, 1, 0)):
        passes(ONE_STATE, *asked, grant(first, table))
    with pytest.raises(Violation, match=r"R4: group 0 has 4 entries for 5 tokens"):
        passes(ONE_STATE, *asked, grant(first, (0, 1, 2, 3)))
    with pytest.raises(Violation, match=r"I3: .* no block at entries \[1\]"):
        passes(ONE_STATE, *asked, grant(first, (1, 0, 0)))


def test_a_state_group_that_takes_more_than_there_is_has_no_room() -> None:
    asked = submit(0, 1, 2, 3), lookup(0, 0, ())
    small = config(STATE, num_blocks=2)
    passes(small, *asked, grant(Allocate(0, new=3), (0, 1)))
    with pytest.raises(Violation, match=r"R2: 1 free blocks, \[\(1, 0\)\] .* and 1 kept"):
        passes(small, *asked, grant(Allocate(0, new=3, headroom=1), (0, 1)))
    passes(small, *asked, (Allocate(0, new=3, headroom=1), Refused(((),))))


def test_states_that_are_passed_over_may_be_given_back_and_the_last_may_not() -> None:
    run = (*SAVED, grant(ONE_MORE, (1, 2)), ISSUED, complete(1, (0, 9)))
    passes(ONE_STATE, *run, trim(0, (0, 2)))
    with pytest.raises(Violation, match="R7: group 0, entry 1: 2 became 0; needed from 1 on"):
        passes(ONE_STATE, *run, trim(0, (0, 0)))
    with pytest.raises(Violation, match="R7: group 0, entry 0: 1 became 0; needed from 0 on"):
        passes(ONE_STATE, *run[:-1], trim(0, (0, 2)))


def test_a_load_into_a_state_leaves_a_token_to_compute() -> None:
    asked = submit(0, 1, 2, 3, 4), lookup(0, 0, ())
    whole = Allocate(0, new=0, external=4, unordered=True)
    with pytest.raises(ActionDisabled, match="nothing to compute"):
        whole.check(state_after(ONE_STATE, *asked))
    ordered = Allocate(0, new=2, external=2)
    passes(ONE_STATE, *asked, grant(ordered, (1, 2)), ISSUED, complete(0, (0, 9)))


# Chunked local attention

ONE_CHUNKED = config(CHUNKED)
CHUNK_COMPUTED: Run = (
    submit(0, 1, 2, 3, 4, 5),
    lookup(0, 0, ()),
    grant(Allocate(0, new=5), (1, 2, 3)),
    ISSUED,
    complete(0, (0, 9)),
)


def test_what_is_left_of_the_chunk_may_be_given_back_and_nothing_else() -> None:
    passes(ONE_CHUNKED, *CHUNK_COMPUTED, trim(0, (0, 0, 3)))
    with pytest.raises(Violation, match="R7: group 0, entry 2: 3 became 0; needed from 2 on"):
        passes(ONE_CHUNKED, *CHUNK_COMPUTED, trim(0, (0, 0, 0)))
    inside = (*CHUNK_COMPUTED[:1], lookup(0, 0, ()), grant(Allocate(0, new=3), (1, 2)), ISSUED)
    with pytest.raises(Violation, match="R7: group 0, entry 0: 1 became 0; needed from 0 on"):
        passes(ONE_CHUNKED, *inside, complete(0), trim(0, (0, 2)))


def test_a_hit_that_ends_with_a_chunk_needs_no_block() -> None:
    hit = submit(1, 1, 2, 3, 4, 7), lookup(1, 4, (0, 0)), grant(TAIL, (0, 0, 4))
    passes(ONE_CHUNKED, *CHUNK_COMPUTED, *hit, ISSUED, complete(1, (1, 9)))


def test_a_hit_inside_a_chunk_needs_the_chunk_so_far() -> None:
    asked = (*CHUNK_COMPUTED, submit(1, 1, 2, 7))
    passes(ONE_CHUNKED, *asked, lookup(1, 2, (1,)))
    with pytest.raises(Violation, match=r"I3: a hit of 2 tokens has no block at entries \[0\]"):
        passes(ONE_CHUNKED, *asked, lookup(1, 2, (0,)))


def test_what_is_loaded_left_of_the_chunk_needs_no_block() -> None:
    asked = submit(0, 1, 2, 3, 4, 5, 6, 7), lookup(0, 0, ())
    passes(ONE_CHUNKED, *asked, grant(Allocate(0, new=1, external=6), (0, 0, 1, 2)))
    with pytest.raises(Violation, match="R2: group 0 needs 2 new blocks and took 4"):
        passes(ONE_CHUNKED, *asked, grant(Allocate(0, new=1, external=6), (1, 2, 3, 4)))


# Cross attention

ENCODED = config(FULL, CROSS, caching=False)
ASKED: Run = (submit(0, 1, 2, 3, encoder=3), lookup(0, 0, (), ()))
FIRST = grant(Allocate(0, new=2), (1,), (5, 6))
SECOND = grant(ONE_MORE, (1, 2), (5, 6))
DECODING: Run = (*ASKED, FIRST, ISSUED, complete(0), SECOND, ISSUED, complete(1, (0, 9)))


def encoder_in(state: State, *blocks: int) -> list[bool]:
    """Is each of request 0's encoder tokens in these blocks?"""
    request = state.find(0)
    where = encoder_cells(state.config.groups, ((), blocks), len(request.encoder))
    return [read_page(state.memory, *cell[:3]) is request.encoder[cell[3]] for cell in where]


def test_encoder_tokens_are_given_exactly_where_a_group_attends_to_them() -> None:
    for given, tokens in ((ENCODED, 0), (config(FULL), 2)):
        with pytest.raises(ActionDisabled, match="encoder tokens, if a group attends to them"):
            Submit(0, (1,), encoder_tokens=tokens).check(initial_state(given))


def test_the_encoders_cells_are_written_once_by_the_first_row() -> None:
    assert encoder_in(state_after(ENCODED, *ASKED, FIRST, ISSUED), 5, 6) == [False] * 3
    assert encoder_in(state_after(ENCODED, *DECODING[:5]), 5, 6) == [True] * 3
    firsts = [row.first for row in state_after(ENCODED, *DECODING[:-1]).steps[0].rows]
    assert firsts == [False]
    passes(ENCODED, *DECODING)


def test_every_step_reads_the_whole_encoder() -> None:
    """Request 1 is given a block of request 0's encoder, and writes it."""
    other = submit(1, 5, encoder=1), lookup(1, 0, (), ()), grant(TAIL, (3,), (6,))
    run = (*DECODING[:5], *other, ISSUED, complete(1, (1, 9)), SECOND, ISSUED)
    rules = rules_of("contract", ["I1", "R3"])
    with pytest.raises(Violation) as caught:
        follow(Oracle(ENCODED, rules), [*run, complete(2, (0, 9))])
    assert caught.value.rule == "I2"
    said = "request 0 did not read its encoder's in block 6, group 1, encoder position 2"
    assert caught.value.witness == said
    with pytest.raises(Violation, match="I1: block 6, handed out for entry 0 of group 1"):
        passes(ENCODED, *run)


def test_an_encoder_is_written_again_after_a_preemption() -> None:
    preempted = Release(0, "preempt"), Returned()
    again = lookup(0, 0, (), ()), grant(Allocate(0, new=4), (3, 4), (7, 8)), ISSUED
    run = (*DECODING, preempted, *again, complete(2, (0, 9)))
    assert encoder_in(state_after(ENCODED, *run), 7, 8) == [True] * 3


@pytest.mark.parametrize(
    ("table", "rule", "witness"),
    [
        ((5,), "I3", "has no block at entries [1] of group 1: (5,)"),
        ((5, 0), "I3", "has no block at entries [1] of group 1: (5, 0)"),
        ((5, 6, 7), "R2", "group 1 needs 2 new blocks and took 3"),
        ((5, 6, 0), "R4", "group 1 has 3 entries for 3 tokens: (5, 6, 0)"),
    ],
)
def test_cross_attention_has_the_blocks_of_its_encoder(
    table: tuple[int, ...], rule: str, witness: str
) -> None:
    with pytest.raises(Violation) as caught:
        passes(ENCODED, *ASKED, grant(Allocate(0, new=2), (1,), table))
    assert caught.value.rule == rule
    assert witness in caught.value.witness


def test_the_encoders_blocks_are_all_given_at_the_admission_and_never_again() -> None:
    with pytest.raises(Violation, match="group 1 needs 0 new blocks and took 1"):
        passes(ENCODED, *DECODING[:5], grant(ONE_MORE, (1, 2), (5, 6, 7)))
    with pytest.raises(Violation, match="R7: group 1, entry 0: 5 became 0; needed from 0 on"):
        passes(ENCODED, *DECODING, trim(0, (1, 2), (0, 6)))


def test_a_state_beside_an_encoder_has_no_entries_for_lookahead() -> None:
    given = config(FULL, STATE, CROSS, caching=False)
    asked: Run = (submit(0, 1, 2, 3, encoder=3), lookup(0, 0, (), (), ()))
    lookahead = Allocate(0, new=3, lookahead=2)
    passes(given, *asked, grant(lookahead, (1, 2, 3), (4, 5), (6, 7)))
    with pytest.raises(Violation, match="R4: group 1 has 3 entries for 3 tokens"):
        passes(given, *asked, grant(Allocate(0, new=3), (1, 2), (4, 5, 8), (6, 7)))


def test_the_workers_row_names_the_encoders_blocks() -> None:
    wrong = Issue(), Issued((SentRow(0, ((1,), (5, 7))),))
    with pytest.raises(Violation, match="I5: request 0, group 1"):
        passes(ENCODED, *ASKED, FIRST, wrong)


def test_a_load_does_not_get_the_encoder_of_a_step_in_flight() -> None:
    load = Allocate(1, new=0, external=2, unordered=True)
    left = (*ASKED, FIRST, ISSUED, abort(0), submit(1, 5, 6, 7, encoder=1), lookup(1, 0, (), ()))
    with pytest.raises(Violation, match=r"I4: block 6, .* a step in flight needs it"):
        passes(ENCODED, *left, grant(load, (6,), (7,)))


# Groups of different block sizes

MIXED = config(Group("full", 2), Group("full", 4))


def test_each_group_counts_its_own_blocks() -> None:
    asked = submit(0, 1, 2, 3, 4, 5), lookup(0, 0, (), ())
    passes(MIXED, *asked, grant(Allocate(0, new=5), (1, 2, 3), (4, 5)))
    with pytest.raises(Violation, match="R2: group 1 needs 2 new blocks and took 3"):
        passes(MIXED, *asked, grant(Allocate(0, new=5), (1, 2, 3), (4, 5, 6)))
    tight = replace(MIXED, num_blocks=5)
    with pytest.raises(Violation, match=r"4 free blocks, \[\(3, 0\), \(2, 0\)\]"):
        follow(Oracle(tight, rules_of("contract", ["I3"])), [
            *asked, grant(Allocate(0, new=5), (1, 2, 3), (4,))
        ])  # fmt: skip


def test_a_hit_ends_where_the_larger_block_ends() -> None:
    run = submit(0, 1, 2, 3, 4, 5), lookup(0, 0, (), ()), grant(Allocate(0, 5), (1, 2, 3), (4, 5))
    asked = (*run, ISSUED, complete(0, (0, 9)), submit(1, 1, 2, 3, 4, 7))
    passes(MIXED, *asked, lookup(1, 4, (1, 2), (4,)), grant(TAIL, (1, 2, 6), (4, 7)))
    with pytest.raises(Violation, match="R4: a hit of 2 tokens ends on no allowed boundary"):
        passes(MIXED, *asked, lookup(1, 2, (1,), (4,)))
