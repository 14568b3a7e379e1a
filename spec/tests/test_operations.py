"""Operations besides steps: clears, outbound stores, and loads whose requests have left.

A case is a legal run, one bad and one good way to go on, and what its own rule says of the bad one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
    CompleteStep,
    CompleteStore,
    Issue,
    Lookup,
    Output,
    Release,
    Store,
    Submit,
    Trim,
)
from kvproof_spec.answers import Done, Granted, Hit, Issued, Returned, Snapshot
from kvproof_spec.config import Config, Group
from kvproof_spec.derived import references, used_by_operations
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import Oracle, rules_of
from kvproof_spec.pages import Copy, read_page
from kvproof_spec.state import ActionDisabled

FULL = Config((Group("full", 2),), num_blocks=5)
WINDOW = Config((Group("sliding", 2, 3),), num_blocks=6)
STATE = Config((Group("state", 2),), num_blocks=6)
CLEARS = replace(FULL, clears=True)

Move = tuple[Any, ...]  # what Oracle.step takes
Run = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """`name` completes the sentence "`rule` rejects ...".

    `first` is the rule that speaks first where that is another one; without `without` the
    run would not come this far.
    """

    rule: str
    name: str
    config: Config
    before: Run
    bad: Run
    good: Run
    witness: str
    first: str = ""
    without: tuple[str, ...] = ()


def submit(request: int, *symbols: int) -> Move:
    return Submit(request, symbols), Done()


def lookup(request: int, tokens: int, *tables: tuple[int, ...]) -> Move:
    return Lookup(request), Hit(tokens, tables)


def grant(action: Allocate, *tables: tuple[int, ...]) -> Move:
    return action, Granted(tables)


def issue(*cleared: int) -> Move:
    """The worker is shown to clear these pages."""
    return Issue(), Issued(cleared=cleared)


def complete(step: int, *outputs: tuple[int, int]) -> Move:
    return CompleteStep(step, tuple(Output(*output) for output in outputs)), Returned()


def abort(request: int, *kept: int) -> Move:
    return Release(request, "abort"), Returned(kept)


def stored(request: int, *kept: int) -> Move:
    return CompleteStore(request), Returned(kept)


def loaded(request: int, tokens: int, *kept: int) -> Move:
    return CompleteLoad(request, tokens), Returned(kept)


def showing(move: Move, *free_order: int) -> Move:
    return move[0], move[1], Snapshot(free_order)


ISSUED: Move = (Issue(), Issued())
ONE_MORE = Allocate(0, new=1)
LOAD = Allocate(1, new=0, external=2, unordered=True)

# Request 0 has three tokens in blocks 1 and 2.
GRANTED: Run = (submit(0, 1, 2, 3), lookup(0, 0, ()), grant(Allocate(0, new=3), (1, 2)))
COMPUTED: Run = (*GRANTED, ISSUED, complete(0, (0, 9)))
CLEARED: Run = (*GRANTED, issue(1, 2), complete(0, (0, 9)))

# Request 0's first block is being stored; request 0 has left.
STORING: Run = (*COMPUTED, (Store(0), Done()))
LEFT_STORING: Run = (*STORING, abort(0, 1))

# Request 1 loads two tokens into block 3 while request 0 has blocks 1 and 2; it leaves.
LOADING: Run = (*COMPUTED, submit(1, 5, 6, 7), lookup(1, 0, ()), grant(LOAD, (3,)))
LEFT_LOADING: Run = (*LOADING, abort(1, 3))

# Request 2 asks with another prompt, or goes on with what it has been given.
ASKED: Run = (submit(1, 7, 8), lookup(1, 0, ()))
TWO = Allocate(1, new=2)
THIRD: Run = (submit(2, 7, 8), lookup(2, 0, ()))
THIRD_TWO = Allocate(2, new=2)

CLEAR_CASES = (
    Case(
        "I2",
        "a page that is not cleared before its first step",
        CLEARS,
        GRANTED,
        (issue(1),),
        (issue(1, 2),),
        "blocks [2] were handed out for this step and are not cleared",
    ),
    Case(
        "I2",
        "a page that is handed out again and not cleared again",
        CLEARS,
        (*CLEARED, abort(0), *ASKED, grant(TWO, (1,))),
        (issue(),),
        (issue(1),),
        "blocks [1] were handed out for this step and are not cleared",
    ),
    Case(
        "I2",
        "a page that is cleared again when it has been written",
        CLEARS,
        (*CLEARED, grant(ONE_MORE, (1, 2))),
        (issue(1), complete(1, (0, 9))),
        (issue(), complete(1, (0, 9))),
        "request 0 read None for <1> in block 1, group 0, position 0",
    ),
    Case(
        "I2",
        "a page of a hit that is cleared",
        CLEARS,
        (*CLEARED, submit(1, 1, 2, 7), lookup(1, 2, (1,)), grant(Allocate(1, new=1), (1, 3))),
        (issue(1, 3), complete(1, (1, 9))),
        (issue(3), complete(1, (1, 9))),
        "request 1 read None for <1> in block 1, group 0, position 0",
    ),
    Case(
        "I4",
        "a page that is cleared while a load fills it",
        CLEARS,
        (submit(0, 5), *LOADING[-3:], lookup(0, 0, ()), grant(ONE_MORE, (1,))),
        (issue(1, 3),),
        (issue(1),),
        "blocks [3] are cleared while an operation uses them",
    ),
    Case(
        "I4",
        "a page that is cleared while a store reads it",
        CLEARS,
        (*CLEARED, (Store(0), Done()), *ASKED, grant(TWO, (3,))),
        (issue(1, 3),),
        (issue(3),),
        "blocks [1] are cleared while an operation uses them",
    ),
    Case(
        "I1",
        "the id of no block among those that are cleared",
        CLEARS,
        GRANTED,
        (issue(1, 2, 5),),
        (issue(1, 2),),
        "block 5 does not exist, there are 5",
    ),
)

STORE_CASES = (
    Case(
        "I4",
        "a block that is handed out while a store reads it",
        FULL,
        (*STORING, abort(0), *ASKED),
        (grant(TWO, (1,)),),
        (grant(TWO, (2,)),),
        "block 1, handed out for entry 0 of group 0: an operation needs it",
    ),
    Case(
        "I1",
        "a block that is handed out while it is kept back for a store",
        FULL,
        (*LEFT_STORING, *ASKED),
        (grant(TWO, (1,)),),
        (grant(TWO, (2,)),),
        "block 1, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "I2",
        "a store of a block that was overwritten meanwhile",
        FULL,
        (*STORING, abort(0), *ASKED),
        (grant(TWO, (1,)), ISSUED, complete(1, (1, 9)), stored(0)),
        (grant(TWO, (2,)), ISSUED, complete(1, (1, 9)), stored(0)),
        "request 0's store read <7> for <1> in ",
        without=("I4",),
    ),
    Case(
        "I4",
        "a block that is listed as free while a store reads it",
        FULL,
        STORING,
        (showing(abort(0), 3, 4, 2, 1),),
        (showing(abort(0, 1), 3, 4, 2),),
        "blocks [1] are listed as free while an operation uses them",
    ),
    Case(
        "I4",
        "blocks that are kept back when the store has ended",
        FULL,
        LEFT_STORING,
        (stored(0, 1),),
        (stored(0),),
        "blocks (1,) are kept for operations, and none is in flight",
    ),
    Case(
        "I4",
        "blocks that are kept back and were never the request's",
        FULL,
        STORING,
        (abort(0, 1, 3),),
        (abort(0, 1),),
        "blocks [3] are kept back, and nobody has left with them",
    ),
    Case(
        "I1",
        "a block that is released twice when the store has ended",
        FULL,
        LEFT_STORING,
        (showing(stored(0), 3, 4, 2, 1, 1),),
        (showing(stored(0), 3, 4, 2, 1),),
        "the free list (3, 4, 2, 1, 1) is counted as None blocks",
    ),
    Case(
        "I1",
        "a block that is never released when the store has ended",
        FULL,
        LEFT_STORING,
        (showing(stored(0), 3, 4, 2),),
        (showing(stored(0), 3, 4, 2, 1),),
        "neither free nor held: blocks [1]",
    ),
    Case(
        "I1",
        "a block that a store releases while its request holds it",
        FULL,
        STORING,
        (showing(stored(0), 3, 4, 1),),
        (showing(stored(0), 3, 4),),
        "listed as free, but held: blocks [1]",
    ),
)

LOAD_CASES = (
    Case(
        "I4",
        "a block that is handed out while a load of a request that has left fills it",
        FULL,
        (*LOADING, abort(1), *THIRD),
        (grant(THIRD_TWO, (3,)),),
        (grant(THIRD_TWO, (4,)),),
        "block 3, handed out for entry 0 of group 0: an operation needs it",
    ),
    Case(
        "I4",
        "a block that is listed as free while a load of a request that has left fills it",
        FULL,
        LOADING,
        (showing(abort(1), 4, 3),),
        (showing(abort(1, 3), 4),),
        "blocks [3] are listed as free while an operation uses them",
    ),
    Case(
        "I4",
        "blocks that are kept back when the load has ended",
        FULL,
        LEFT_LOADING,
        (loaded(1, 2, 3),),
        (loaded(1, 2),),
        "blocks (3,) are kept for operations, and none is in flight",
    ),
    Case(
        "I1",
        "a block that is never released when the load has ended",
        FULL,
        LEFT_LOADING,
        (showing(loaded(1, 0), 4),),
        (showing(loaded(1, 0), 4, 3),),
        "neither free nor held: blocks [3]",
    ),
    Case(
        "I2",
        "a read of what a load of a request that has left has overwritten",
        FULL,
        (*LOADING, abort(1)),
        (
            *THIRD,
            grant(THIRD_TWO, (3,)),
            ISSUED,
            complete(1, (2, 9)),
            loaded(1, 2),
            grant(Allocate(2, new=1), (3, 4)),
            ISSUED,
            complete(2, (2, 9)),
        ),
        (
            loaded(1, 2),
            *THIRD,
            grant(THIRD_TWO, (3,)),
            ISSUED,
            complete(1, (2, 9)),
            grant(Allocate(2, new=1), (3, 4)),
            ISSUED,
            complete(2, (2, 9)),
        ),
        "request 2 read <5> for <7> in block 3, group 0, position 0",
        without=("I4",),
    ),
    Case(
        "I2",
        "a hit on what a load of a request that has left has brought",
        FULL,
        (*LEFT_LOADING, loaded(1, 2), submit(2, 5, 6, 8)),
        (lookup(2, 2, (3,)),),
        (lookup(2, 0, ()),),
        "a hit for (<5>,) got block 3, group 0, position 0, which promises None",
    ),
)

CASES = (*CLEAR_CASES, *STORE_CASES, *LOAD_CASES)


def follow(oracle: Oracle, run: Iterable[Move]) -> Oracle:
    for move in run:
        oracle.step(*move)
    return oracle


def passes(config: Config, *run: Move) -> Oracle:
    return follow(Oracle(config), run)


def rejected(oracle: Oracle, case: Case) -> Violation:
    """What is said of the last of the bad moves; all before it must be taken."""
    follow(oracle, (*case.before, *case.bad[:-1]))
    with pytest.raises(Violation) as caught:
        follow(oracle, case.bad[-1:])
    return caught.value


def called(case: Case) -> str:
    return f"{case.rule}: {case.name}"


@pytest.mark.parametrize("case", CASES, ids=called)
def test_the_bad_way_falls_by_its_rule_which_names_the_witness(case: Case) -> None:
    violation = rejected(Oracle(case.config, rules_of("contract", case.without)), case)
    assert violation.rule == (case.first or case.rule)
    assert case.rule in (violation.rule, *violation.also)
    alone = rejected(Oracle(case.config, [rule for rule in RULES if rule.id == case.rule]), case)
    assert case.witness in alone.witness


@pytest.mark.parametrize("case", CASES, ids=called)
def test_the_good_way_passes_every_rule(case: Case) -> None:
    oracle = passes(case.config, *case.before, *case.good)
    assert case.rule in {rule for rule, _ in oracle.evaluated}


# Clears


def test_what_is_not_shown_to_be_cleared_is_not_judged() -> None:
    oracle = passes(CLEARS, *COMPUTED)
    assert ("I2", "cleared") not in oracle.evaluated
    assert passes(CLEARS, *CLEARED).evaluated["I2", "cleared"] == 1


def test_where_nothing_is_cleared_nothing_must_be() -> None:
    assert passes(FULL, *GRANTED, issue()).evaluated["I2", "cleared"] == 1


def test_a_page_may_be_cleared_that_nobody_holds() -> None:
    passes(CLEARS, *GRANTED, issue(1, 2, 3), complete(0, (0, 9)))


def test_what_comes_with_the_step_is_written_after_its_clears() -> None:
    """External tokens fill their page, which need not be cleared and may be."""
    asked = submit(0, 1, 2, 3), lookup(0, 0, ()), grant(Allocate(0, new=1, external=2), (1, 2))
    for cleared in ((2,), (1, 2)):
        passes(CLEARS, *asked, issue(*cleared), complete(0, (0, 9)))
    with pytest.raises(Violation, match=r"I2: blocks \[2\] were handed out"):
        passes(CLEARS, *asked, issue(1))


def test_a_copy_is_made_after_the_clears_and_needs_none() -> None:
    config = Config((Group("full", 4),), num_blocks=5, clears=True, partial_boundary=2)
    copies = (Copy(0, 1, 2),)
    asked = submit(0, 1, 2, 3), lookup(0, 0, ()), grant(Allocate(0, new=3), (1,))
    hit = submit(1, 1, 2, 7), lookup(1, 2, (1,))
    copied = Allocate(1, new=1), Granted(((2,),), copies=copies)
    for cleared in ((), (2,)):
        sent = Issue(), Issued(copies=copies, cleared=cleared)
        passes(
            config, *asked, issue(1), complete(0, (0, 9)), *hit, copied, sent, complete(1, (1, 9))
        )


def test_a_state_is_written_as_a_whole_and_needs_no_clear() -> None:
    asked = submit(0, 1, 2), lookup(0, 0, ()), grant(Allocate(0, new=2), (1,))
    passes(replace(STATE, clears=True), *asked, issue(), complete(0, (0, 9)))


def test_what_a_load_has_filled_is_not_cleared_when_its_request_goes_on() -> None:
    delivered = CompleteLoad(1, 2), Done()
    going_on = grant(Allocate(1, new=1), (3, 4))
    run = (*CLEARED, *LOADING[-3:], delivered, going_on)
    passes(CLEARS, *run, issue(4), complete(1, (1, 9)))
    with pytest.raises(Violation, match="I2: request 1 read None for <5>"):
        passes(CLEARS, *run, issue(3, 4), complete(1, (1, 9)))


def test_a_page_left_unissued_is_cleared_when_it_is_handed_out_again() -> None:
    again = abort(0), *ASKED, grant(TWO, (1,))
    passes(CLEARS, *GRANTED, *again, issue(1), complete(0, (1, 9)))
    with pytest.raises(Violation, match=r"I2: blocks \[1\] were handed out"):
        passes(CLEARS, *GRANTED, *again, issue(2))


# Stores


def test_a_store_reads_whole_computed_blocks_until_it_ends() -> None:
    oracle = passes(FULL, *STORING)
    assert used_by_operations(oracle.state) == {1}, "block 2 is not full"
    follow(oracle, [stored(0)])
    assert used_by_operations(oracle.state) == set()


def test_a_store_outlives_its_request_and_returns_its_blocks_once() -> None:
    oracle = passes(FULL, *LEFT_STORING)
    assert oracle.state.requests == ()
    assert references(oracle.state) == {1: 1}
    follow(oracle, [showing(stored(0), 3, 4, 2, 1)])
    assert references(oracle.state) == {}
    with pytest.raises(ActionDisabled, match="no store under way"):
        CompleteStore(0).check(oracle.state)


def test_a_block_that_is_stored_may_be_hit() -> None:
    hit = submit(1, 1, 2, 7), lookup(1, 2, (1,)), grant(Allocate(1, new=1), (1, 3))
    passes(FULL, *LEFT_STORING, *hit, ISSUED, showing(stored(0), 4, 2), complete(1, (1, 9)))


def test_two_requests_that_leave_keep_a_stored_block_once_each() -> None:
    hit = submit(1, 1, 2, 7), lookup(1, 2, (1,)), grant(Allocate(1, new=1), (1, 3))
    both = (*STORING, *hit, ISSUED, complete(1, (1, 9)), (Store(1), Done()))
    left = (*both, abort(0, 1), abort(1, 1, 1))
    assert references(passes(FULL, *left).state) == {1: 2}
    passes(FULL, *left, showing(stored(0, 1), 4, 2, 3), showing(stored(1), 4, 2, 3, 1))


def test_a_preempted_request_starts_again_when_its_store_has_ended() -> None:
    preempted = (*STORING, (Release(0, "preempt"), Returned((1,))))
    again = lookup(0, 2, (1,)), grant(Allocate(0, new=2), (1, 2)), ISSUED, complete(1, (0, 9))
    passes(FULL, *preempted, showing(stored(0), 3, 4, 2, 1), *again)
    with pytest.raises(ActionDisabled, match="its store has not ended"):
        passes(FULL, *preempted, *again)


@pytest.mark.parametrize(
    ("run", "action", "reason"),
    [
        (GRANTED, Store(0), "nothing of it has been computed"),
        ((*GRANTED, ISSUED), Store(0), "nothing of it has been computed"),
        (STORING, Store(0), "its last store has not ended"),
        (STORING, ONE_MORE, "its store has not ended"),
        (STORING, Trim(0), "its store has not ended"),
        (LEFT_STORING, Store(0), "no request 0"),
        (GRANTED[:1], Store(0), "only a running request is stored"),
        (LOADING, Store(1), "only a running request is stored"),
        (COMPUTED, CompleteStore(0), "no store under way"),
        (LOADING, CompleteStore(1), "no store under way"),
        (LEFT_LOADING, CompleteStore(1), "no store under way"),
    ],
)
def test_what_no_engine_may_ask_of_a_store_is_disabled(
    run: Run, action: Action, reason: str
) -> None:
    with pytest.raises(ActionDisabled, match=reason):
        action.check(passes(FULL, *run).state)


def test_a_state_is_stored_where_a_block_ends() -> None:
    run = submit(0, 1, 2, 3), lookup(0, 0, ()), grant(Allocate(0, new=2), (1,)), ISSUED, complete(0)
    oracle = passes(STATE, *run, (Store(0), Done()))
    assert used_by_operations(oracle.state) == {1}
    follow(oracle, [stored(0), grant(ONE_MORE, (1, 2)), ISSUED, complete(1, (0, 9))])


# Loads whose requests have left


def test_an_aborted_load_uses_its_blocks_until_it_has_ended() -> None:
    oracle = passes(FULL, *LEFT_LOADING)
    assert used_by_operations(oracle.state) == {3}
    follow(oracle, [showing(loaded(1, 0), 4, 3)])
    assert used_by_operations(oracle.state) == set()
    with pytest.raises(ActionDisabled, match="no request 1"):
        CompleteLoad(1, 0).check(oracle.state)


def test_an_aborted_load_writes_all_it_would_have_brought_whatever_is_said_of_it() -> None:
    for tokens in (0, 1, 2):
        oracle = passes(FULL, *LEFT_LOADING, loaded(1, tokens))
        cells = [read_page(oracle.state.memory, 3, 0, offset) for offset in (0, 1)]
        assert [str(cell) for cell in cells] == ["<5>", "<5 6>"]
        assert read_page(oracle.state.promise, 3, 0, 0) is None


def test_a_block_beyond_the_load_may_be_free_at_once() -> None:
    ahead = replace(LOAD, lookahead=1)
    leaves = (*LOADING[:-1], grant(ahead, (3, 4)), showing(abort(1, 3), 4))
    passes(FULL, *leaves, showing(loaded(1, 2), 4, 3))


def test_a_hit_of_an_aborted_load_may_be_free_at_once() -> None:
    """Only what the load fills is kept: the hit before it is the first request's."""
    asked = submit(1, 1, 2, 5, 6, 7), lookup(1, 2, (1,)), grant(LOAD, (1, 3))
    passes(FULL, *COMPUTED, *asked, showing(abort(1, 3), 4), showing(loaded(1, 4), 4, 3))


def test_only_an_abort_takes_a_loading_request_away() -> None:
    state = passes(FULL, *LOADING).state
    for reason in ("finish", "preempt"):
        with pytest.raises(ActionDisabled, match="its load has not returned"):
            Release(1, reason).check(state)
    Release(1, "abort").check(state)
