"""Hits that end inside a block, taken by copy, and who may write a block that others hold.

A case is a legal run, one bad and one good way to go on, and what its own rule says of the bad one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvproof_spec.actions import (
    Allocate,
    CompleteLoad,
    CompleteStep,
    Issue,
    Lookup,
    Output,
    Release,
    Submit,
)
from kvproof_spec.answers import Done, Granted, Hit, Issued, Refused, Returned, Snapshot
from kvproof_spec.config import Config, Group
from kvproof_spec.derived import references
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import NonsenseAnswer, Oracle, rules_of
from kvproof_spec.pages import Copy, read_page

PARTIAL = Config((Group("full", 4),), num_blocks=9, partial_boundary=2)
WINDOW = Config((Group("sliding", 4, 3),), num_blocks=9, partial_boundary=2)
BOTH = Config((Group("full", 4), Group("sliding", 4, 3)), num_blocks=9, partial_boundary=2)
STATE = Config((Group("state", 4),), num_blocks=9, partial_boundary=2)
WHOLE = Config((Group("full", 2),), num_blocks=9)

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


def grant(action: Allocate, *tables: tuple[int, ...], copies: tuple[Copy, ...] = ()) -> Move:
    return action, Granted(tables, copies=copies)


def issue(*copies: Copy) -> Move:
    """The worker is shown to make these copies."""
    return Issue(), Issued(copies=copies)


def complete(step: int, *outputs: tuple[int, int]) -> Move:
    return CompleteStep(step, tuple(Output(*output) for output in outputs)), Returned()


def abort(request: int) -> Move:
    return Release(request, "abort"), Returned()


def showing(move: Move, *free_order: int, counts: tuple[int, ...] | None = None) -> Move:
    return move[0], move[1], Snapshot(free_order, reference_counts=counts)


ISSUED: Move = (Issue(), Issued())
FIRST = Allocate(0, new=3)
TAIL = Allocate(1, new=1)
ONE_MORE = Allocate(0, new=1)

# Request 0 has three of its tokens in block 1, request 1 shares two of them.
COMPUTED: Run = (
    submit(0, 1, 2, 3),
    lookup(0, 0, ()),
    grant(FIRST, (1,)),
    ISSUED,
    complete(0, (0, 9)),
)
ASKED: Run = (*COMPUTED, submit(1, 1, 2, 7))
HIT: Run = (*ASKED, lookup(1, 2, (1,)))
LEFT_AND_HIT: Run = (*COMPUTED, abort(0), submit(1, 1, 2, 7), lookup(1, 2, (1,)))
TAKEN = Copy(group=0, source=1, destination=2)
COPIED = grant(TAIL, (2,), copies=(TAKEN,))
READ: Run = (issue(TAKEN), complete(1, (1, 9)))

# Request 0's state after two tokens is in block 1.
STATE_SAVED: Run = (
    submit(0, 1, 2, 3),
    lookup(0, 0, ()),
    grant(Allocate(0, new=2), (1,)),
    ISSUED,
    complete(0),
)
FOR_THE_CACHE = grant(ONE_MORE, (1,), copies=(TAKEN,))
STATE_GIVEN: Run = (
    *STATE_SAVED,
    FOR_THE_CACHE,
    issue(TAKEN),
    complete(1, (0, 9)),
    submit(1, 1, 2, 7),
)

CASES = (
    Case(
        "R4",
        "a hit that ends on no partial boundary",
        PARTIAL,
        ASKED,
        (lookup(1, 1, (1,)),),
        (lookup(1, 2, (1,)),),
        "a hit of 1 tokens ends on no allowed boundary",
    ),
    Case(
        "R4",
        "a partial hit where only whole blocks are hit",
        replace(PARTIAL, partial_boundary=None),
        ASKED,
        (lookup(1, 2, (1,)),),
        (lookup(1, 0, ()),),
        "a hit of 2 tokens ends on no allowed boundary",
    ),
    Case(
        "R4",
        "a partial hit whose table lacks the block it ends in",
        PARTIAL,
        ASKED,
        (lookup(1, 2, ()),),
        (lookup(1, 2, (1,)),),
        "group 0 has 0 entries for 2 tokens: ()",
        first="I3",
    ),
    Case(
        "I2",
        "a partial hit beyond what the block promises",
        PARTIAL,
        (*COMPUTED, submit(1, 1, 2, 3, 8, 7)),
        (lookup(1, 4, (1,)),),
        (lookup(1, 2, (1,)),),
        "a hit for (<1 2 3 8>,) got block 1, group 0, position 3, which promises None",
    ),
    Case(
        "R2",
        "a partial tail that is taken over instead of copied",
        PARTIAL,
        LEFT_AND_HIT,
        (grant(TAIL, (1,)),),
        (COPIED,),
        "group 0 needs 1 new blocks and took 0",
    ),
    Case(
        "R2",
        "a copy for which there is no room",
        replace(PARTIAL, num_blocks=3),
        LEFT_AND_HIT,
        (grant(replace(TAIL, headroom=1), (2,), copies=(TAKEN,)),),
        ((replace(TAIL, headroom=1), Refused(((),))),),
        "2 free blocks, [(1, 1)] (new, reclaimed) needed, 0 for copies and 1 kept",
    ),
    Case(
        "R2",
        "a copy for the cache for which there is no room",
        replace(STATE, num_blocks=3),
        STATE_SAVED,
        (grant(Allocate(0, new=1, headroom=1), (1,), copies=(TAKEN,)),),
        (grant(Allocate(0, new=1, headroom=1), (1,)),),
        "1 free blocks, [(0, 0)] (new, reclaimed) needed, 1 for copies and 1 kept",
    ),
    Case(
        "I1",
        "a copy into a block that is held",
        PARTIAL,
        (*ASKED, submit(2, 5), lookup(2, 0, ()), grant(Allocate(2, new=1), (2,)), *HIT[-1:]),
        (COPIED,),
        (grant(TAIL, (3,), copies=(Copy(0, 1, 3),)),),
        "block 2, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "I1",
        "a copy for the cache into a block that is held",
        STATE,
        (*STATE_SAVED, submit(1, 5), lookup(1, 0, ()), grant(TAIL, (2,))),
        (FOR_THE_CACHE,),
        (grant(ONE_MORE, (1,), copies=(Copy(0, 1, 3),)),),
        "block 2, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "I1",
        "two copies for the cache into one block",
        STATE,
        STATE_SAVED,
        (grant(ONE_MORE, (1,), copies=(TAKEN, TAKEN)),),
        (FOR_THE_CACHE,),
        "block 2, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "I1",
        "counts without the two ends of a copy to be made",
        PARTIAL,
        HIT,
        (showing(COPIED, *range(3, 9), counts=(0, 1, 1, *[0] * 6)),),
        (
            showing(COPIED, *range(3, 9), counts=(0, 2, 2, *[0] * 6)),
            showing(issue(TAKEN), *range(3, 9), counts=(0, 1, 1, *[0] * 6)),
        ),
        "block 1 is counted 1, held 2 times",
    ),
    Case(
        "I1",
        "counts that keep the ends of a copy when it has been sent",
        PARTIAL,
        (*HIT, COPIED),
        (showing(issue(TAKEN), *range(3, 9), counts=(0, 2, 2, *[0] * 6)),),
        (showing(issue(TAKEN), *range(3, 9), counts=(0, 1, 1, *[0] * 6)),),
        "block 1 is counted 2, held 1 times",
    ),
    Case(
        "I1",
        "the source of a copy to be made in the free list",
        PARTIAL,
        LEFT_AND_HIT,
        (showing(COPIED, 1, *range(3, 9)),),
        (showing(COPIED, *range(3, 9)), showing(issue(TAKEN), *range(3, 9), 1)),
        "listed as free, but held: blocks [1]",
    ),
    Case(
        "I1",
        "the source of a copy to be made that is handed out",
        PARTIAL,
        (*LEFT_AND_HIT, COPIED, submit(2, 5), lookup(2, 0, ())),
        (grant(Allocate(2, new=1), (1,)),),
        (grant(Allocate(2, new=1), (3,)),),
        "block 1, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "R6",
        "a partial tail that is written where another request holds it",
        PARTIAL,
        HIT,
        (grant(TAIL, (1,)),),
        (COPIED,),
        "request 1 is to write block 1, group 0, position 2; others hold it: <1 2 3>",
        first="R2",
    ),
    Case(
        "R6",
        "a state that is written where another request holds it",
        STATE,
        (*STATE_SAVED, submit(1, 1, 2, 7), lookup(1, 2, (1,))),
        (grant(TAIL, (1,)),),
        (COPIED,),
        "request 1 is to write block 1, group 0, position 2; others hold it: <1 2>",
    ),
    Case(
        "R6",
        "a copy that is never sent",
        PARTIAL,
        (*HIT, COPIED),
        (issue(),),
        (issue(TAKEN),),
        "copies to be made before this step are (Copy(group=0, source=1, destination=2),), "
        "the worker gets ()",
    ),
    Case(
        "R6",
        "a copy that is sent with a later step",
        PARTIAL,
        (*HIT, COPIED, ISSUED),
        (issue(TAKEN),),
        (issue(),),
        "copies to be made before this step are (), the worker gets (Copy(",
    ),
    Case(
        "R6",
        "a copy that is sent from another block",
        PARTIAL,
        (*HIT, COPIED),
        (issue(Copy(0, 3, 2)),),
        (issue(TAKEN),),
        "the worker gets (Copy(group=0, source=3, destination=2),)",
    ),
    Case(
        "I2",
        "a read of a tail that two requests have written",
        PARTIAL,
        HIT,
        (grant(TAIL, (1,)), grant(ONE_MORE, (1,)), ISSUED, complete(1, (0, 9), (1, 9))),
        (COPIED, grant(ONE_MORE, (1,)), ISSUED, complete(1, (0, 9), (1, 9))),
        "request 0 read <1 2 7> for <1 2 3> in block 1, group 0, position 2",
        without=("R2", "R6"),
    ),
    Case(
        "I2",
        "a read of a copy that was never made",
        PARTIAL,
        (*HIT, COPIED),
        (issue(), complete(1, (1, 9))),
        READ,
        "request 1 read None for <1> in block 2, group 0, position 0",
        without=("R6",),
    ),
    Case(
        "I2",
        "a read of a copy that was made a step too late",
        PARTIAL,
        (*HIT, COPIED),
        (issue(), issue(TAKEN), complete(1, (1, 9))),
        (*READ, issue(), complete(2)),
        "request 1 read None for <1> in block 2, group 0, position 0",
        without=("R6",),
    ),
    Case(
        "I2",
        "a read of a copy of another block",
        PARTIAL,
        (*ASKED, submit(2, 5, 6), lookup(2, 0, ()), grant(Allocate(2, new=2), (3,)), *HIT[-1:]),
        (
            grant(TAIL, (2,), copies=(Copy(0, 3, 2),)),
            issue(Copy(0, 3, 2)),
            complete(1, (1, 9), (2, 9)),
        ),
        (COPIED, issue(TAKEN), complete(1, (1, 9), (2, 9))),
        "request 1 read None for <1> in block 2, group 0, position 0",
        without=("R7",),
    ),
    Case(
        "R7",
        "a copy of another block than the hit's",
        PARTIAL,
        HIT,
        (grant(TAIL, (2,), copies=(Copy(0, 3, 2),)),),
        (COPIED,),
        "group 0, entry 0: 1 became 2; needed from 0 on, 2 tokens are processed",
    ),
    Case(
        "R7",
        "a block that is replaced by the copy of another group",
        BOTH,
        (
            submit(0, 1, 2, 3),
            lookup(0, 0, (), ()),
            grant(FIRST, (1,), (3,)),
            ISSUED,
            complete(0, (0, 9)),
            submit(1, 1, 2, 7),
            lookup(1, 2, (1,), (3,)),
        ),
        (grant(TAIL, (2,), (4,), copies=(TAKEN, Copy(0, 3, 4))),),
        (grant(TAIL, (2,), (4,), copies=(TAKEN, Copy(1, 3, 4))),),
        "group 1, entry 0: 3 became 4; needed from 0 on, 2 tokens are processed",
        first="I1",
    ),
    Case(
        "I2",
        "a copy of what the same step still writes",
        PARTIAL,
        (submit(0, 1, 2, 3), lookup(0, 0, ()), grant(FIRST, (1,)), submit(1, 1, 2, 7)),
        (lookup(1, 2, (1,)), COPIED, issue(TAKEN), complete(0, (0, 9), (1, 9))),
        (
            ISSUED,
            lookup(1, 2, (1,)),
            COPIED,
            issue(TAKEN),
            complete(0, (0, 9)),
            complete(1, (1, 9)),
        ),
        "request 1 read None for <1> in block 2, group 0, position 0",
    ),
    Case(
        "I2",
        "a hit on the state that the engine has gone on from",
        STATE,
        STATE_GIVEN,
        (lookup(1, 2, (1,)),),
        (lookup(1, 2, (2,)),),
        "a hit for (<1 2>,) got block 1, group 0, position 1, which promises <1 2 3>",
    ),
)


def follow(oracle: Oracle, run: Iterable[Move]) -> Oracle:
    for move in run:
        oracle.step(*move)
    return oracle


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
    oracle = follow(Oracle(case.config), (*case.before, *case.good))
    assert case.rule in {rule for rule, _ in oracle.evaluated}


# What looks wrong and is not


def passes(config: Config, *run: Move) -> Oracle:
    return follow(Oracle(config), run)


def promised(oracle: Oracle, block: int) -> list[str]:
    return [str(read_page(oracle.state.promise, block, 0, offset)) for offset in range(4)]


@pytest.mark.parametrize("config", [PARTIAL, WINDOW])
def test_a_hit_inside_a_block_is_good_when_it_is_taken_by_copy(config: Config) -> None:
    passes(config, *HIT, COPIED, *READ)


def test_each_group_copies_its_own_tail() -> None:
    copies = TAKEN, Copy(1, 3, 4)
    passes(
        BOTH,
        submit(0, 1, 2, 3),
        lookup(0, 0, (), ()),
        grant(FIRST, (1,), (3,)),
        ISSUED,
        complete(0, (0, 9)),
        submit(1, 1, 2, 7),
        lookup(1, 2, (1,), (3,)),
        grant(TAIL, (2,), (4,), copies=copies),
        issue(*reversed(copies)),
        complete(1, (1, 9)),
    )


def test_a_copy_promises_what_its_source_does_but_for_what_is_written_there() -> None:
    oracle = passes(PARTIAL, *HIT, COPIED)
    assert promised(oracle, 1) == ["<1>", "<1 2>", "<1 2 3>", "None"]
    assert promised(oracle, 2) == ["<1>", "<1 2>", "<1 2 7>", "None"]


def test_copies_that_are_not_shown_are_made() -> None:
    passes(PARTIAL, *HIT, COPIED, ISSUED, complete(1, (1, 9)))


def test_copies_are_made_in_their_order() -> None:
    """Of a copy that is yet to be made another may be."""
    again = Copy(0, 2, 3)
    another = submit(2, 1, 2, 8), lookup(2, 2, (2,)), grant(Allocate(2, 1), (3,), copies=(again,))
    passes(PARTIAL, *HIT, COPIED, *another, issue(TAKEN, again), complete(1, (1, 9), (2, 9)))


def test_both_ends_of_a_copy_are_pinned_until_it_is_sent() -> None:
    assert references(passes(PARTIAL, *HIT, COPIED).state) == {1: 2, 2: 2}
    assert references(passes(PARTIAL, *HIT, COPIED, issue(TAKEN)).state) == {1: 1, 2: 1}


def test_the_source_of_a_copy_may_be_reused_by_a_later_step() -> None:
    reused = submit(2, 5), lookup(2, 0, ()), grant(Allocate(2, 1), (1,))
    sent = (*LEFT_AND_HIT, COPIED, issue(TAKEN))
    passes(PARTIAL, *sent, *reused, ISSUED, complete(1, (1, 9)), complete(2, (2, 9)))


def test_the_source_of_a_copy_in_flight_is_not_given_to_a_load() -> None:
    """The load may write it before the copy is made: loads are not ordered."""
    load = Allocate(2, new=0, external=4, unordered=True)
    asked = submit(2, 5, 6, 7, 8, 9), lookup(2, 0, ())
    with pytest.raises(Violation, match=r"I4: block 1, .* a step in flight needs it"):
        passes(PARTIAL, *LEFT_AND_HIT, COPIED, issue(TAKEN), *asked, grant(load, (1,)))


def test_a_copy_is_made_although_its_request_has_left() -> None:
    left = (*HIT, COPIED, abort(1))
    assert references(passes(PARTIAL, *left).state) == {1: 2, 2: 1}
    oracle = passes(PARTIAL, *left, issue(TAKEN), complete(1), submit(2, 1, 2, 8))
    follow(oracle, [lookup(2, 2, (2,))])


@pytest.mark.parametrize("config", [PARTIAL, WINDOW, STATE])
def test_an_engine_may_keep_the_source_and_give_the_cache_the_copy(config: Config) -> None:
    tail = Copy(0, 2, 3)
    oracle = passes(config, *STATE_SAVED, FOR_THE_CACHE)
    assert references(oracle.state) == {1: 2, 2: 1}
    follow(oracle, [issue(TAKEN), complete(1, (0, 9))])
    assert references(oracle.state) == {1: 1}, "the copy is free, and may be hit"
    hit = submit(1, 1, 2, 7), lookup(1, 2, (2,)), grant(TAIL, (3,), copies=(tail,))
    follow(oracle, [*hit, issue(tail), complete(2, (1, 9))])


def test_a_state_whose_holder_has_left_may_be_gone_on_from_in_place() -> None:
    left = (*STATE_SAVED, abort(0), submit(1, 1, 2, 7), lookup(1, 2, (1,)))
    passes(STATE, *left, grant(TAIL, (1,)), ISSUED, complete(1, (1, 9)))


def test_a_partial_state_needs_no_copy_where_the_step_ends_in_another_block() -> None:
    asked = (*STATE_SAVED, submit(1, 1, 2, 3, 4, 5), lookup(1, 2, (1,)))
    passes(STATE, *asked, grant(Allocate(1, new=3), (1, 2)), ISSUED, complete(1, (1, 9)))


# Equal content


LOADED: Run = (
    submit(0, 1, 2, 3, 4),
    lookup(0, 0, ()),
    grant(Allocate(0, new=0, external=4, unordered=True), (1, 2)),
    (CompleteLoad(0, 4), Done()),
    submit(1, 1, 2, 3, 4, 5),
    lookup(1, 4, (1, 2)),
    grant(TAIL, (1, 2, 3)),
)
"""Request 0 has every token and computes the last again, in a block that request 1 holds."""


def test_a_shared_block_may_be_written_with_what_it_holds() -> None:
    rewritten = grant(ONE_MORE, (1, 2))
    passes(WHOLE, *LOADED, rewritten, ISSUED, complete(0, (0, 9), (1, 9)))
    passes(WHOLE, *LOADED, ISSUED, rewritten, ISSUED, complete(0, (1, 9)), complete(1, (0, 9)))


@pytest.mark.parametrize("tokens", [3, 4, 5, 6])
def test_a_copy_may_hold_more_than_is_hit(tokens: int) -> None:
    """What follows the hit in the source is written again, with the same."""
    prompt = (1, 2, 3, 4, 5, 6)
    own = (3,) if tokens <= 4 else (3, 4)
    passes(
        PARTIAL,
        *(submit(0, *prompt), lookup(0, 0, ()), grant(Allocate(0, new=6), (1, 2))),
        *(ISSUED, complete(0, (0, 9)), submit(1, *prompt[:tokens]), lookup(1, 2, (1,))),
        grant(Allocate(1, tokens - 2), own, copies=(Copy(0, 1, 3),)),
        *(ISSUED, complete(1, (1, 9))),
    )


# Copies that are none


@pytest.mark.parametrize("copies", [(Copy(0, 1, 9),), (Copy(0, -1, 2),)])
def test_a_copy_of_a_block_that_does_not_exist_is_rejected(copies: tuple[Copy, ...]) -> None:
    with pytest.raises(Violation, match=r"I1: block -?\d does not exist"):
        passes(PARTIAL, *HIT, grant(TAIL, (2,), copies=copies))


def test_a_copy_in_a_group_that_does_not_exist_is_nonsense() -> None:
    with pytest.raises(NonsenseAnswer, match="group"):
        passes(PARTIAL, *HIT, grant(TAIL, (2,), copies=(Copy(7, 1, 2),)))
