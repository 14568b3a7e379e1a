"""Drafts: rows in flight that move left when drafts are rejected, and what drafters have seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteStep,
    Forget,
    Issue,
    Lookup,
    Output,
    Release,
    Submit,
)
from kvproof_spec.answers import Answer, Done, Forgotten, Granted, Hit, Issued, Returned, SentRow
from kvproof_spec.config import Config, Group
from kvproof_spec.derived import outstanding_tokens, processed_tokens
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import Oracle, rules_of
from kvproof_spec.pages import Copy, read_page
from kvproof_spec.qualities import QUALITIES
from kvproof_spec.state import ActionDisabled, State

FULL = Config((Group("full", 2),), num_blocks=9)
WINDOW = Config((Group("sliding", 2, 3),), num_blocks=9)
CHUNKED = Config((Group("chunked", 2, 4),), num_blocks=9)
STATE = Config((Group("state", 2),), num_blocks=9)

Move = tuple[Action, Answer]
Run = tuple[Move, ...]


def submit(request: int, *symbols: int) -> Move:
    return Submit(request, symbols), Done()


def lookup(request: int, tokens: int, *tables: tuple[int, ...]) -> Move:
    return Lookup(request), Hit(tokens, tables)


def grant(action: Allocate, *tables: tuple[int, ...]) -> Move:
    return action, Granted(tables)


def complete(step: int, *outputs: tuple[int, int] | tuple[int, int, int]) -> Move:
    return CompleteStep(step, tuple(Output(*output) for output in outputs)), Returned()


ISSUED: Move = (Issue(), Issued())
TWO_DRAFTS = Allocate(0, new=3, drafts=(8, 7))
ONE_DRAFT = Allocate(0, new=2, drafts=(6,))
PLAIN = Allocate(0, new=1)

# Request 0 has computed three tokens and sampled 9; it drafts 8 and 7, and goes on meanwhile.
COMPUTED: Run = (
    submit(0, 1, 2, 3),
    lookup(0, 0, ()),
    grant(Allocate(0, new=3), (1, 2)),
    ISSUED,
    complete(0, (0, 9)),
)
DRAFTED: Run = (*COMPUTED, grant(TWO_DRAFTS, (1, 2, 3)), ISSUED)
AHEAD: Run = (*DRAFTED, grant(PLAIN, (1, 2, 3, 4)), ISSUED)
DRAFTED_AHEAD: Run = (*DRAFTED, grant(ONE_DRAFT, (1, 2, 3, 4)), ISSUED)


def follow(oracle: Oracle, run: Iterable[Move]) -> Oracle:
    for move in run:
        oracle.step(*move)
    return oracle


def after(config: Config, *run: Move) -> State:
    """The state after a legal run: no rule is broken."""
    return follow(Oracle(config), run).state


def promised(state: State, block: int, offset: int) -> str:
    return str(read_page(state.promise, block, 0, offset))


def written(state: State, block: int, offset: int) -> str:
    return str(read_page(state.memory, block, 0, offset))


def spans(state: State) -> list[tuple[int, int]]:
    """Where the rows of the steps in flight start and end."""
    return [(row.start, row.end) for step in state.steps for row in step.rows]


# Drafts under asynchrony


def test_drafts_may_follow_tokens_that_are_still_being_sampled() -> None:
    state = after(FULL, *DRAFTED)
    assert outstanding_tokens(state, state.find(0)) == 3
    assert processed_tokens(state, state.find(0)) == 3
    assert spans(after(FULL, *DRAFTED_AHEAD)) == [(3, 6), (6, 8)]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Allocate(0, new=2), "more tokens than will be known"),
        (Allocate(0, new=1, drafts=(6,)), "drafts follow the last token to come"),
        (Allocate(0, new=3, drafts=(6,)), "more tokens than will be known"),
    ],
)
def test_only_the_tokens_to_come_are_computed_ahead(action: Allocate, reason: str) -> None:
    with pytest.raises(ActionDisabled, match=reason):
        action.check(after(FULL, *DRAFTED))


def test_a_state_takes_no_drafts() -> None:
    drafts = Allocate(0, new=2, drafts=(6,))
    with pytest.raises(ActionDisabled, match="a state cannot take drafts back"):
        drafts.check(after(STATE, *COMPUTED))


@pytest.mark.parametrize(
    ("accepted", "start", "block", "offset", "content"),
    [
        (0, 4, 3, 0, "<1 2 3 9 5>"),
        (1, 5, 3, 1, "<1 2 3 9 8 5>"),
        (2, 6, 4, 0, "<1 2 3 9 8 7 5>"),
    ],
)
def test_a_rejected_draft_moves_the_next_steps_row_left(
    accepted: int, start: int, block: int, offset: int, content: str
) -> None:
    """With both drafts rejected it moves from block 4 into block 3."""
    state = after(FULL, *AHEAD, complete(1, (0, 5, accepted)))
    assert spans(state) == [(start, start + 1)]
    assert state.find(0).computed == start + 1
    assert promised(state, block, offset) == content
    state = after(FULL, *AHEAD, complete(1, (0, 5, accepted)), complete(2, (0, 4)))
    assert written(state, block, offset) == content
    assert state.find(0).computed == start + 1
    assert state.find(0).known == start + 2


def test_a_row_that_has_moved_left_writes_over_the_rejected_drafts() -> None:
    back = (*AHEAD, complete(1, (0, 5)))
    assert written(after(FULL, *back), 3, 0) == "<1 2 3 9 8>", "rejected, and written all the same"
    state = after(FULL, *back, complete(2, (0, 4)))
    assert written(state, 3, 0) == "<1 2 3 9 5>"
    assert written(state, 3, 1) == "<1 2 3 9 8 7>", "which nobody reads"
    assert written(state, 4, 0) == "None"


def test_the_blocks_ahead_of_a_row_that_has_moved_left_are_kept() -> None:
    back = (*AHEAD, complete(1, (0, 5)), complete(2, (0, 4)))
    state = after(FULL, *back, grant(Allocate(0, 1, lookahead=2), (1, 2, 3, 4)), ISSUED)
    assert spans(state) == [(5, 6)]


def test_an_allocation_that_is_not_yet_issued_moves_left_too() -> None:
    granted = (*DRAFTED, grant(PLAIN, (1, 2, 3, 4)), complete(1, (0, 5)))
    state = after(FULL, *granted)
    assert (state.find(0).computed, state.find(0).scheduled) == (4, 1)
    assert promised(state, 3, 0) == "<1 2 3 9 5>"
    assert spans(after(FULL, *granted, ISSUED)) == [(4, 5)]


def test_rejections_of_several_steps_add_up() -> None:
    third = grant(PLAIN, (1, 2, 3, 4, 5)), ISSUED
    run = (*DRAFTED_AHEAD, *third)
    assert spans(after(FULL, *run)) == [(3, 6), (6, 8), (8, 9)]
    assert spans(after(FULL, *run, complete(1, (0, 5)))) == [(4, 6), (6, 7)]
    back = (*run, complete(1, (0, 5)), complete(2, (0, 4)))
    assert spans(after(FULL, *back)) == [(5, 6)]
    assert written(after(FULL, *back, complete(3, (0, 2))), 3, 1) == "<1 2 3 9 5 4>"


def test_the_rows_of_another_admission_or_request_stay_where_they_are() -> None:
    other = submit(1, 5, 6, 7), lookup(1, 0, ()), grant(Allocate(1, new=3), (5, 6)), ISSUED
    state = after(FULL, *AHEAD, *other, complete(1, (0, 5)))
    assert spans(state) == [(4, 5), (0, 3)]
    again = (
        *AHEAD[:-1],
        (Release(0, "preempt"), Returned()),
        lookup(0, 0, ()),
        grant(Allocate(0, new=4), (5, 6)),
        ISSUED,
    )
    assert spans(after(FULL, *again, complete(1, (0, 5)))) == [(0, 4)]


@pytest.mark.parametrize("config", [FULL, CHUNKED], ids=["full", "chunked"])
@pytest.mark.parametrize(("first", "second"), list(product(range(3), range(2))))
def test_memory_holds_every_token_however_many_drafts_are_accepted(
    config: Config, first: int, second: int
) -> None:
    ends = complete(1, (0, 5, first)), complete(2, (0, 4, second))
    state = after(config, *DRAFTED_AHEAD, *ends)
    request = state.find(0)
    assert request.computed == 5 + first + second
    assert request.known == request.computed + 1
    for position in range(request.computed):
        block = request.tables[0][position // 2]
        for pages in (state.memory, state.promise):
            assert read_page(pages, block, 0, position % 2) is request.content[position]


def test_what_was_rejected_may_not_be_hit() -> None:
    other = submit(1, 1, 2, 3, 9, 8, 7, 5)
    follow(Oracle(FULL), [*AHEAD, complete(1, (0, 5, 2)), other, lookup(1, 6, (1, 2, 3))])
    with pytest.raises(Violation, match=r"I2: .* block 3, group 0, position 4") as caught:
        follow(Oracle(FULL), [*AHEAD, complete(1, (0, 5)), other, lookup(1, 6, (1, 2, 3))])
    assert "R5" in caught.value.also, "the promise is the sampled token's already"


def test_what_may_be_rejected_may_not_be_hit_while_two_steps_are_in_flight() -> None:
    other = submit(1, 1, 2, 3, 9, 8, 7, 5)
    for run in (DRAFTED, AHEAD, DRAFTED_AHEAD):
        with pytest.raises(Violation, match=r"I6: .* block 3, .* a draft") as caught:
            follow(Oracle(FULL), [*run, other, lookup(1, 6, (1, 2, 3))])
        assert caught.value.rule == "I6"
        follow(Oracle(FULL), [*run, other, lookup(1, 4, (1, 2))])


def test_a_hole_that_appears_only_when_the_row_moves_left_is_seen_when_it_returns() -> None:
    """Trimmed as if the drafts were accepted, the window lacks what the row reads at last."""
    trimmed = grant(PLAIN, (0, 0, 3, 4))
    run = (*DRAFTED, trimmed, ISSUED)
    with pytest.raises(Violation, match="R7: group 0, entry 0: 1 became 0"):
        follow(Oracle(WINDOW), run)
    rules = rules_of("contract", ["R7"])
    follow(Oracle(WINDOW, rules), [*run, complete(1, (0, 5, 2)), complete(2, (0, 4))])
    with pytest.raises(Violation) as caught:
        follow(Oracle(WINDOW, rules), [*run, complete(1, (0, 5)), complete(2, (0, 4))])
    assert caught.value.rule == "I3"
    hole = (
        "request 0's step over 4 to 5 tokens has no block at entries [1] of group 0: (0, 0, 3, 4)"
    )
    assert caught.value.witness == hole


def test_a_trim_by_what_is_processed_leaves_no_hole() -> None:
    trimmed = grant(PLAIN, (0, 2, 3, 4))
    with pytest.raises(Violation, match="R7"):
        follow(Oracle(WINDOW), [*DRAFTED, trimmed])
    follow(Oracle(WINDOW), [*DRAFTED, grant(PLAIN, (1, 2, 3, 4)), ISSUED, complete(1, (0, 5))])


def test_a_worker_row_that_is_wrong_only_where_the_row_moves_left_is_read_wrong() -> None:
    rows = SentRow(0, ((1, 5, 3, 4),))
    run = (*DRAFTED, grant(PLAIN, (1, 2, 3, 4)), (Issue(), Issued((rows,))))
    with pytest.raises(Violation, match="I5: request 0, group 0, position 4"):
        follow(Oracle(WINDOW), [*run[:-1], (Issue(), Issued((SentRow(0, ((1, 2, 5, 4),)),)))])
    with pytest.raises(Violation, match="I2: request 0 read None for <1 2 3>"):
        follow(Oracle(WINDOW), [*run, complete(1, (0, 5)), complete(2, (0, 4))])


# Drafters

DRAFTER = Config((Group("full", 2), Group("full", 2, drafter=True)), num_blocks=19)
PARTIAL = Config((Group("full", 4, drafter=True),), num_blocks=9, partial_boundary=2)

SEEN: Run = (
    submit(0, 1, 2, 3, 4, 5),
    lookup(0, 0, (), ()),
    grant(Allocate(0, new=5), (1, 2, 3), (4, 5, 6)),
    ISSUED,
    complete(0, (0, 9)),
)


def counted(config: Config, *run: Move) -> tuple[int, int]:
    """Hits whose drafter cells were fresh, and stale."""
    qualities = follow(Oracle(config), run).qualities
    return qualities["Q1", True], qualities["Q1", False]


@pytest.mark.parametrize(
    ("prompt", "hit", "fresh"),
    [
        ((1, 2, 3, 4, 5, 6), 4, True),
        ((1, 2, 3, 4, 6), 4, False),  # the last cell has seen 5
        ((1, 2, 3, 4, 6), 2, True),
        ((1, 2, 7), 2, False),  # the last cell has seen 3
        ((1, 2, 3), 2, True),
    ],
)
def test_a_drafters_cell_is_fresh_when_it_has_seen_the_readers_next_token(
    prompt: tuple[int, ...], hit: int, fresh: bool
) -> None:
    asked = submit(1, *prompt), lookup(1, hit, (1, 2)[: hit // 2], (4, 5)[: hit // 2])
    assert counted(DRAFTER, *SEEN, *asked) == (int(fresh), int(not fresh))


def test_a_stale_drafter_is_counted_and_never_raised() -> None:
    stale = submit(1, 1, 2, 7), lookup(1, 2, (1,), (4,))
    fresh = submit(2, 1, 2, 3), lookup(2, 2, (1,), (4,))
    assert counted(DRAFTER, *SEEN, *stale, *fresh, lookup(1, 2, (1,), (4,))) == (1, 2)
    assert {quality.id for quality in QUALITIES}.isdisjoint(rule.id for rule in RULES)


def test_only_drafters_are_counted_and_only_hits() -> None:
    no_drafter = replace(DRAFTER, groups=(Group("full", 2),) * 2)
    stale = submit(1, 1, 2, 7), lookup(1, 2, (1,), (4,))
    assert counted(no_drafter, *SEEN, *stale) == (0, 0)
    assert counted(DRAFTER, *SEEN, submit(1, 1, 2, 7), lookup(1, 0, (), ())) == (0, 0)


def test_a_sampled_token_is_seen_when_its_step_returns() -> None:
    """The cell of position 3 sees 9, the token that the step over 0 to 3 samples."""
    short = (
        submit(0, 1, 2, 3, 4),
        lookup(0, 0, (), ()),
        grant(Allocate(0, new=4), (1, 2), (4, 5)),
        ISSUED,
    )
    hit = lookup(1, 4, (1, 2), (4, 5))
    for last, fresh in ((9, True), (8, False)):
        asked = submit(1, 1, 2, 3, 4, last)
        assert counted(DRAFTER, *short, complete(0, (0, 9)), asked, hit) == (fresh, not fresh)
    assert counted(DRAFTER, *short, submit(1, 1, 2, 3, 4, 9), hit) == (0, 1), "not yet"


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_drafters_cells_see_the_drafts_that_were_accepted(accepted: int) -> None:
    drafted = (
        *SEEN,
        grant(TWO_DRAFTS, (1, 2, 3, 7), (4, 5, 6, 8)),
        ISSUED,
        complete(1, (0, 5, accepted)),
    )
    tokens = (1, 2, 3, 4, 5, 9, *(8, 7)[:accepted], 5)
    hit = (len(tokens) - 1) // 2 * 2
    tables = (1, 2, 3, 7)[: hit // 2], (4, 5, 6, 8)[: hit // 2]
    assert counted(DRAFTER, *drafted, submit(1, *tokens), lookup(1, hit, *tables)) == (1, 0)


def test_a_reader_that_writes_the_cells_again_makes_them_its_own() -> None:
    """Of the other continuation nothing is left in the reader's own copy of the tail."""
    seen = submit(0, 1, 2, 3, 4), lookup(0, 0, ()), grant(Allocate(0, new=4), (1,))
    computed = (*seen, ISSUED, complete(0, (0, 9)))
    copied = Allocate(1, 2), Granted(((2,),), copies=(Copy(0, 1, 2),))
    reader = submit(1, 1, 2, 5, 6), lookup(1, 2, (1,)), copied, ISSUED, complete(1, (1, 9))
    own = submit(2, 1, 2, 5, 6, 9), lookup(2, 4, (2,))
    stale = submit(2, 1, 2, 3, 7), lookup(2, 2, (2,))
    assert counted(PARTIAL, *computed, *reader, *own) == (0, 2), "position 1 saw 3 in the source"
    assert counted(PARTIAL, *computed, *reader, *stale) == (1, 1)


def test_forgetting_everything_forgets_what_was_seen() -> None:
    state = follow(Oracle(DRAFTER), [*SEEN, (Forget(None), Forgotten(True))]).state
    assert not dict(state.continued.items())
