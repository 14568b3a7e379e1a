"""Every rule rejects a hand-made bad answer, by name and with its witness, and takes the good one.

A case is a legal run of a few actions, one bad and one good way to go on, and what is said of the
bad one.  The bad way is judged twice: by all rules together, where an earlier rule may speak
first, and by its own rule alone, whose words are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from kvproof_spec.actions import (
    Action,
    Allocate,
    CompleteLoad,
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
    Event,
    Granted,
    Hit,
    Issued,
    Numbers,
    Raised,
    Refused,
    Returned,
    Scheduled,
    ScheduledRow,
    SentRow,
    Snapshot,
    Trimmed,
    Updated,
)
from kvproof_spec.config import Config, Group, Scheduling
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import EVIDENCE, Rule, Violation
from kvproof_spec.oracle import NonsenseAnswer, Oracle, rules_of
from kvproof_spec.pages import Copy, Tables

IDS = (
    *("I1", "I2", "I3", "I4", "I5", "I6"),
    *("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R9", "R10", "R11", "R12"),
)
"""The rules in reading order: those of design.md sections 3 and 4 that are stated so far."""

FULL = Config((Group("full", 2),), num_blocks=5)
PARTIAL = Config((Group("full", 4),), num_blocks=5, partial_boundary=2)
WIDE = replace(FULL, num_blocks=9)
STRICT = replace(FULL, ordering="strict")
DEFERS = replace(FULL, defers_returns=True)
UNCACHED = replace(FULL, caching=False)
EVENTS = replace(FULL, events=True)
PATIENT = replace(FULL, scheduling=Scheduling(patience=1))
WINDOW = Config((Group("sliding", 2, 3),), num_blocks=6)
BOTH = Config((Group("full", 2), Group("sliding", 2, 3)), num_blocks=9)


@dataclass(frozen=True, slots=True)
class Move:
    """An action with its answer, and what the target shows of itself after it."""

    action: Action
    answer: Answer
    snapshot: Snapshot | None = None

    def showing(
        self,
        *free_order: int,
        free_order_reversed: tuple[int, ...] | None = None,
        free_blocks: int | None = None,
        reference_counts: tuple[int, ...] | None = None,
        tables: tuple[tuple[int, Tables], ...] | None = None,
    ) -> Move:
        snapshot = Snapshot(free_order, free_order_reversed, free_blocks, reference_counts, tables)
        return replace(self, snapshot=snapshot)

    def announcing(self, findable: str, *events: Event) -> Move:
        """The keys by which a lookup would find something, a letter each, and the events."""
        keys = tuple((0, key) for key in findable)
        return replace(self, snapshot=Snapshot((3, 4), findable=keys, events=events))


Run = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """`name` completes the sentence "the rule rejects ...".

    `first` is the rule that speaks first where that is another one; `without` are rules
    that are left out, because none of them would let the run come this far.
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
    return Move(Submit(request, symbols), Done())


def lookup(request: int, tokens: int, *tables: tuple[int, ...]) -> Move:
    return Move(Lookup(request), Hit(tokens, tables))


def grant(action: Allocate, *tables: tuple[int, ...]) -> Move:
    return Move(action, Granted(tables))


def refuse(action: Allocate, *tables: tuple[int, ...]) -> Move:
    return Move(action, Refused(tables))


def issue(*rows: tuple[int, Tables]) -> Move:
    return Move(Issue(), Issued(tuple(SentRow(*row) for row in rows) if rows else None))


def complete(step: int, *outputs: tuple[int, int] | tuple[int, int, int]) -> Move:
    return Move(CompleteStep(step, tuple(Output(*output) for output in outputs)), Returned())


def abort(request: int, deferred: tuple[int, ...] | None = None) -> Move:
    return Move(Release(request, "abort"), Returned(deferred))


def trim(request: int, *tables: tuple[int, ...]) -> Move:
    return Move(Trim(request), Trimmed(tables))


def schedule(*rows: ScheduledRow) -> Move:
    """What the target's own scheduler has done, the worker's rows being the tables."""
    tables = tuple((row.request, row.worker) for row in rows)
    return Move(Issue(), Scheduled(rows, (), tables))


def update(step: int, *outputs: tuple[int, int], computed: tuple[int, int]) -> Move:
    """What the target's own scheduler has made of a returned step."""
    return Move(complete(step, *outputs).action, Updated((), (computed,)))


def idle(*steps: int) -> Run:
    """Empty steps, each issued and returned."""
    end = Updated((), ())
    return tuple(move for step in steps for move in (schedule(), Move(complete(step).action, end)))


LOAD = Allocate(1, new=0, external=2, unordered=True)

# Request 0 has three tokens in blocks 1 and 2 of one full attention group.
ASKED: Run = (submit(0, 1, 2, 3), lookup(0, 0, ()))
GRANTED: Run = (*ASKED, grant(Allocate(0, new=3), (1, 2)))
IN_FLIGHT: Run = (*GRANTED, issue())
COMPUTED: Run = (*IN_FLIGHT, complete(0, (0, 9)))
LEFT: Run = (*COMPUTED, abort(0))
LEFT_IN_FLIGHT: Run = (*IN_FLIGHT, abort(0))
PREEMPTED: Run = (*IN_FLIGHT, Move(Release(0, "preempt"), Returned()))

# Request 1 asks, with another prompt, with that of request 0 and more, or with two tokens of it.
OTHER_ASKED: Run = (submit(1, 5, 6, 7), lookup(1, 0, ()))
CONTINUED: Run = (submit(1, 1, 2, 7),)
HIT: Run = (*CONTINUED, lookup(1, 2, (1,)))
LOADING: Run = (submit(0, 9), submit(1, 5, 6, 7), lookup(1, 0, ()), grant(LOAD, (3,)))
DELIVERED = Move(CompleteLoad(1, 2), Done())

# Request 0 has three tokens, and has sampled a fourth, in a window of three.
WINDOW_GRANTED: Run = (
    submit(0, 1, 2, 3, 4, 5),
    lookup(0, 0, ()),
    grant(Allocate(0, new=5), (1, 2, 3)),
)
WINDOW_IN_FLIGHT: Run = (*WINDOW_GRANTED, issue())
WINDOW_COMPUTED: Run = (*WINDOW_IN_FLIGHT, complete(0, (0, 9)))

# Request 0 has three tokens in a full attention and a window group, then leaves.
BOTH_GRANTED: Run = (
    submit(0, 1, 2, 3),
    lookup(0, 0, (), ()),
    grant(Allocate(0, new=3), (1, 2), (3, 4)),
)
BOTH_LEFT: Run = (*BOTH_GRANTED, issue(), complete(0, (0, 9)), abort(0))
BOTH_HIT: Run = (*BOTH_LEFT, submit(1, 1, 2, 7), lookup(1, 2, (1,), (3,)))

# Request 0 drafts two symbols after its fourth token.
DRAFTING: Run = (
    *COMPUTED,
    grant(Allocate(0, new=3, drafts=(8, 8)), (1, 2, 3)),
    submit(1, 1, 2, 3, 9, 8, 8, 5),
)


def shown(name: str, witness: str, bad: Move, good: Move, rule: str = "I1") -> Case:
    """A case of a snapshot after request 0 was granted blocks 1 and 2."""
    return Case(rule, name, FULL, ASKED, (bad,), (good,), witness)


# Request 0 is scheduled by the target itself.
SCHEDULED: Run = (
    submit(0, 1, 2, 3),
    schedule(ScheduledRow(0, 0, 3, True, True, ((1, 2),))),
)


def reporting(used_blocks: int, queried: int, preemptions: int = 0) -> Move:
    """Step 0 returns, and the target reports its numbers."""
    numbers = Numbers(used_blocks, queried, 0, preemptions)
    return Move(complete(0, (0, 9)).action, Updated((), (), numbers=numbers))


GRANT = GRANTED[-1]
SHOWN = GRANT.showing(3, 4, free_blocks=2, reference_counts=(0, 1, 1, 0, 0))
ONE_MORE = Allocate(0, new=1)
STORED = Event("stored", 0, ("a",))

CASES = (
    Case(
        "I1",
        "a held block that is handed out",
        FULL,
        (*GRANTED, *OTHER_ASKED),
        (grant(Allocate(1, new=2), (1,)),),
        (grant(Allocate(1, new=2), (3,)),),
        "block 1, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "I1",
        "a block handed out twice in one call",
        FULL,
        ASKED,
        (grant(Allocate(0, new=3), (1, 1)),),
        (GRANT,),
        "block 1, handed out for entry 1 of group 0, was not free",
    ),
    Case(
        "I1",
        "a block handed out while it is kept back for a step in flight",
        DEFERS,
        (*IN_FLIGHT, abort(0, (1, 2)), *OTHER_ASKED),
        (grant(Allocate(1, new=3), (1, 3)),),
        (grant(Allocate(1, new=3), (3, 4)),),
        "block 1, handed out for entry 0 of group 0, was not free",
    ),
    Case(
        "I1",
        "the id of no block",
        FULL,
        ASKED,
        (grant(Allocate(0, new=3), (1, 5)),),
        (GRANT,),
        "block 5 does not exist, there are 5",
    ),
    Case(
        "I1",
        "a negative id among those kept back",
        DEFERS,
        IN_FLIGHT,
        (abort(0, (1, -1)),),
        (abort(0, (1, 2)),),
        "block -1 does not exist",
    ),
    shown(
        "a count that is no count of references",
        "block 2 is counted 0, held 1 times",
        GRANT.showing(3, 4, reference_counts=(0, 1, 0, 0, 0)),
        SHOWN,
    ),
    shown(
        "a block that is listed twice",
        "the free list (3, 4, 4) is counted as None blocks",
        GRANT.showing(3, 4, 4),
        SHOWN,
    ),
    shown(
        "a free list that is counted wrongly",
        "the free list (3, 4) is counted as 3 blocks",
        GRANT.showing(3, 4, free_blocks=3),
        SHOWN,
    ),
    shown(
        "a block that is lost",
        "neither free nor held: blocks [4]",
        GRANT.showing(3),
        SHOWN,
    ),
    shown(
        "the null block in the free list",
        "listed as free, but no normal block: [0]",
        GRANT.showing(0, 3, 4),
        SHOWN,
    ),
    shown(
        "a held block in the free list",
        "listed as free, but held: blocks [2]",
        GRANT.showing(2, 3, 4),
        SHOWN,
    ),
    shown(
        "a free list that differs when walked backwards",
        "walked backwards the free list is (4, 3), not (3, 4)",
        GRANT.showing(3, 4, free_order_reversed=(4, 3)),
        GRANT.showing(3, 4, free_order_reversed=(3, 4)),
    ),
    Case(
        "I1",
        "a leak: a block that stays away when nothing is held",
        FULL,
        COMPUTED,
        (abort(0).showing(1, 3, 4),),
        (abort(0).showing(2, 1, 3, 4),),
        "neither free nor held: blocks [2]",
    ),
    Case(
        "I2",
        "a hit on another prefix",
        FULL,
        (*COMPUTED, submit(1, 5, 6, 7)),
        (lookup(1, 2, (1,)),),
        (lookup(1, 0, ()),),
        "a hit for (<5>,) got block 1, group 0, position 0, which promises <1>",
    ),
    Case(
        "I2",
        "a hit on a block that another group has written",
        BOTH,
        (*BOTH_LEFT, submit(1, 1, 2, 7)),
        (lookup(1, 2, (1,), (1,)),),
        (lookup(1, 2, (1,), (3,)),),
        "got block 1, group 1, position 0, which promises None",
    ),
    Case(
        "I2",
        "a hit on a block that was handed out since",
        FULL,
        (*LEFT, *OTHER_ASKED, grant(Allocate(1, new=3), (1, 3)), submit(2, 1, 2, 7)),
        (lookup(2, 2, (1,)),),
        (lookup(2, 0, ()),),
        "a hit for (<1>,) got block 1, group 0, position 0, which promises <5>",
    ),
    Case(
        "I2",
        "a read through a row that names another block",
        FULL,
        (*COMPUTED, grant(ONE_MORE, (1, 2))),
        (issue((0, ((3, 2),))), complete(1, (0, 9))),
        (issue((0, ((1, 2),))), complete(1, (0, 9))),
        "request 0 read None for <1> in block 3, group 0, position 0",
        without=("I5",),
    ),
    Case(
        "I2",
        "a read of what another group has overwritten",
        BOTH,
        BOTH_HIT,
        (grant(Allocate(1, new=1), (1, 5), (3, 1)), issue(), complete(1, (1, 9))),
        (grant(Allocate(1, new=1), (1, 5), (3, 6)), issue(), complete(1, (1, 9))),
        "request 1 read None for <1> in block 1, group 0, position 0",
        without=("R3",),
    ),
    Case(
        "I3",
        "a hit with a hole",
        FULL,
        (*COMPUTED, *CONTINUED),
        (lookup(1, 2, (0,)),),
        (lookup(1, 2, (1,)),),
        "a hit of 2 tokens has no block at entries [0] of group 0: (0,)",
    ),
    Case(
        "I3",
        "a hit that one of the groups cannot restore",
        BOTH,
        (*BOTH_LEFT, submit(1, 1, 2, 7)),
        (lookup(1, 2, (1,), (0,)),),
        (lookup(1, 2, (1,), (3,)),),
        "a hit of 2 tokens has no block at entries [0] of group 1: (0,)",
    ),
    Case(
        "I3",
        "a grant with a hole",
        FULL,
        ASKED,
        (grant(Allocate(0, new=3), (0, 2)),),
        (GRANT,),
        "a request that goes on at 0 of 3 tokens has no block at entries [0] of group 0: (0, 2)",
    ),
    Case(
        "I3",
        "a load of every known token without the window of the last",
        WINDOW,
        (submit(0, 1, 2, 3, 4), lookup(0, 0, ())),
        (grant(Allocate(0, new=0, external=4, unordered=True), (0, 1)),),
        (grant(Allocate(0, new=0, external=4, unordered=True), (1, 2)),),
        "a request that goes on at 3 of 4 tokens has no block at entries [0] of group 0: (0, 1)",
    ),
    Case(
        "I3",
        "a step with a hole in its table",
        FULL,
        GRANTED,
        (trim(0, (0, 2)), issue()),
        (trim(0, (1, 2)), issue()),
        "request 0's step over 0 to 3 tokens has no block at entries [0] of group 0: (0, 2)",
        without=("R7",),
    ),
    Case(
        "I4",
        "a load that gets a block which a step in flight writes",
        FULL,
        (*LEFT_IN_FLIGHT, submit(1, 5, 6, 7), lookup(1, 0, ())),
        (grant(LOAD, (1,)),),
        (grant(LOAD, (3,)),),
        "block 1, handed out for entry 0 of group 0: a step in flight needs it",
    ),
    Case(
        "I4",
        "a block of a load under way that is handed out",
        FULL,
        (*LOADING, submit(2, 5, 6), lookup(2, 0, ())),
        (grant(Allocate(2, new=2), (3,)),),
        (grant(Allocate(2, new=2), (4,)),),
        "block 3, handed out for entry 0 of group 0: an operation needs it",
        first="I1",
    ),
    Case(
        "I4",
        "blocks that are kept back for steps when none is in flight",
        DEFERS,
        (*IN_FLIGHT, abort(0, (1, 2))),
        (Move(complete(0, (0, 9)).action, Returned((1, 2))).showing(3, 4),),
        (Move(complete(0, (0, 9)).action, Returned(())).showing(3, 4, 2, 1),),
        "blocks (1, 2) are kept for operations, and none is in flight",
    ),
    Case(
        "I4",
        "a block of a load under way that is listed as free",
        FULL,
        LOADING[:-1],
        (grant(LOAD, (3,)).showing(1, 2, 3, 4),),
        (grant(LOAD, (3,)).showing(1, 2, 4),),
        "blocks [3] are listed as free while an operation uses them",
        first="I1",
    ),
    Case(
        "I4",
        "under strict ordering, a block of a step in flight that is handed out",
        STRICT,
        (*LEFT_IN_FLIGHT, *OTHER_ASKED),
        (grant(Allocate(1, new=2), (2,)),),
        (grant(Allocate(1, new=2), (3,)),),
        "block 2, handed out for entry 0 of group 0: a",
    ),
    Case(
        "I4",
        "under strict ordering, blocks of a step in flight that are listed as free",
        STRICT,
        IN_FLIGHT,
        (abort(0).showing(3, 4, 2, 1),),
        (abort(0, (1, 2)).showing(3, 4),),
        "blocks [1, 2] are listed as free while an operation uses them",
    ),
    Case(
        "I5",
        "a row that names another block",
        FULL,
        GRANTED,
        (issue((0, ((1, 3),))),),
        (issue((0, ((1, 2),))),),
        "request 0, group 0, position 2: the table is (1, 2), the worker has (1, 3)",
    ),
    Case(
        "I5",
        "a row that is too short",
        FULL,
        GRANTED,
        (issue((0, ((1,),))),),
        (issue((0, ((1, 2),))),),
        "request 0, group 0, position 2: the table is (1, 2), the worker has (1,)",
    ),
    Case(
        "I5",
        "a row that is missing",
        FULL,
        GRANTED,
        (Move(Issue(), Issued(())),),
        (issue((0, ((1, 2),))),),
        "the worker has rows (), scheduled are (Row(request=0",
    ),
    Case(
        "I5",
        "a row of a request that is not scheduled",
        FULL,
        (submit(0, 1, 2, 3), submit(1, 1), lookup(0, 0, ()), GRANT),
        (issue((0, ((1, 2),)), (1, ((3,),))),),
        (issue((0, ((1, 2),))),),
        "SentRow(request=1, tables=((3,),))",
    ),
    shown(
        "tables that are not those of the answers",
        "request 0 has ((1, 3),), told was ((1, 2),)",
        GRANT.showing(3, 4, tables=((0, ((1, 3),)),)),
        GRANT.showing(3, 4, tables=((0, ((1, 2),)),)),
        rule="I5",
    ),
    Case(
        "I5",
        "the tables of a request that has left",
        FULL,
        COMPUTED,
        (abort(0).showing(1, 2, 3, 4, tables=((0, ((1, 2),)),)),),
        (abort(0).showing(1, 2, 3, 4, tables=()),),
        "request 0 has ((1, 2),), told was None",
    ),
    Case(
        "I6",
        "a hit on external tokens that are still under way",
        FULL,
        (*LOADING, submit(2, 5, 6, 8)),
        (lookup(2, 2, (3,)),),
        (DELIVERED, lookup(2, 2, (3,))),
        "a hit for (<5>,) got block 3, group 0, position 0, which promises None: a draft, or its "
        "load has not returned",
    ),
    Case(
        "I6",
        "a hit on drafts that are granted",
        WIDE,
        DRAFTING,
        (lookup(1, 6, (1, 2, 3)),),
        (lookup(1, 4, (1, 2)),),
        "got block 3, group 0, position 4, which promises None: a draft",
    ),
    Case(
        "I6",
        "a hit on drafts that are in flight",
        WIDE,
        (*DRAFTING, issue()),
        (lookup(1, 6, (1, 2, 3)),),
        (lookup(1, 4, (1, 2)),),
        "got block 3, group 0, position 4, which promises None: a draft",
    ),
    Case(
        "R1",
        "an exception where there was room",
        FULL,
        ASKED,
        (Move(Allocate(0, new=3), Raised("ValueError: no blocks")),),
        (refuse(Allocate(0, new=3), ()),),
        "instead of an answer came ValueError: no blocks",
    ),
    Case(
        "R1",
        "a refusal that keeps blocks",
        FULL,
        ASKED,
        (refuse(Allocate(0, new=3), (1,)),),
        (refuse(Allocate(0, new=3), ()),),
        "a refusal changed group 0 from () to (1,)",
    ),
    Case(
        "R1",
        "a refusal that keeps the hit",
        FULL,
        (*COMPUTED, *HIT),
        (refuse(Allocate(1, new=1), (1,)),),
        (refuse(Allocate(1, new=1), ()),),
        "a refusal changed group 0 from () to (1,)",
    ),
    Case(
        "R1",
        "a refusal after which a block is missing",
        FULL,
        ASKED,
        (refuse(Allocate(0, new=3), ()).showing(1, 2, 3),),
        (refuse(Allocate(0, new=3), ()).showing(1, 2, 3, 4),),
        "a refusal left (1, 2, 3) free, not 4 blocks",
    ),
    Case(
        "R1",
        "a refusal after which a count is too high",
        FULL,
        (*COMPUTED, *HIT),
        (refuse(Allocate(1, new=1), ()).showing(3, 4, reference_counts=(0, 2, 1, 0, 0)),),
        (refuse(Allocate(1, new=1), ()).showing(3, 4, reference_counts=(0, 1, 1, 0, 0)),),
        "block 1 is counted 2, held 1 times",
    ),
    Case(
        "R2",
        "a grant that takes more than is needed",
        FULL,
        ASKED,
        (grant(Allocate(0, new=3), (1, 2, 3)),),
        (GRANT,),
        "group 0 needs 2 new blocks and took 3",
    ),
    Case(
        "R2",
        "a grant that takes too few",
        FULL,
        ASKED,
        (grant(Allocate(0, new=3), (1,)),),
        (GRANT,),
        "group 0 needs 2 new blocks and took 1",
        first="I3",
    ),
    Case(
        "R2",
        "a grant that forgets the slots reserved ahead",
        FULL,
        ASKED,
        (grant(Allocate(0, new=3, lookahead=2), (1, 2)),),
        (grant(Allocate(0, new=3, lookahead=2), (1, 2, 3)),),
        "group 0 needs 3 new blocks and took 2",
    ),
    Case(
        "R2",
        "a grant that takes more than there is",
        FULL,
        (*GRANTED, submit(1, 5, 6, 7, 8, 9), lookup(1, 0, ())),
        (grant(Allocate(1, new=5), (3, 4)),),
        (refuse(Allocate(1, new=5), ()),),
        "2 free blocks, [(3, 0)] (new, reclaimed) needed, "
        "0 for copies and 0 kept; the answer was Granted",
        first="I3",
    ),
    Case(
        "R2",
        "a grant that leaves less than the headroom",
        FULL,
        (*GRANTED, *OTHER_ASKED),
        (grant(Allocate(1, new=3, headroom=1), (3, 4)),),
        (refuse(Allocate(1, new=3, headroom=1), ()),),
        "2 free blocks, [(2, 0)] (new, reclaimed) needed, "
        "0 for copies and 1 kept; the answer was Granted",
    ),
    Case(
        "R2",
        "a grant that does not count the hits it takes from the free blocks",
        FULL,
        (
            *LEFT,
            *OTHER_ASKED,
            grant(Allocate(1, new=3), (2, 3)),
            submit(2, 1, 2, 7),
            lookup(2, 2, (1,)),
        ),
        (grant(Allocate(2, new=1, headroom=1), (1, 4)),),
        (refuse(Allocate(2, new=1, headroom=1), ()),),
        "2 free blocks, [(1, 1)] (new, reclaimed) needed, "
        "0 for copies and 1 kept; the answer was Granted",
    ),
    Case(
        "R2",
        "a grant whose whole sequence does not fit",
        FULL,
        (*GRANTED, submit(1, 5, 6, 7, 8, 9), lookup(1, 0, ())),
        (grant(Allocate(1, new=2, whole_sequence=True), (3,)),),
        (refuse(Allocate(1, new=2, whole_sequence=True), ()),),
        "2 free blocks, [(3, 0)] (new, reclaimed) needed for the whole sequence",
    ),
    Case(
        "R2",
        "an exception where there was no room",
        FULL,
        (*GRANTED, *OTHER_ASKED),
        (Move(Allocate(1, new=3, headroom=1), Raised("IndexError: pop")),),
        (refuse(Allocate(1, new=3, headroom=1), ()),),
        "needed, 0 for copies and 1 kept; the answer was Raised",
    ),
    Case(
        "R3",
        "one block in two groups of a request",
        BOTH,
        BOTH_GRANTED[:-1],
        (grant(Allocate(0, new=2), (1,), (1,)),),
        (grant(Allocate(0, new=2), (1,), (2,)),),
        "block 1 stands at (group, entry) (0, 0) and, for request 0, (1, 0)",
        first="I1",
    ),
    Case(
        "R3",
        "a hit that is kept and handed out as new to another group",
        BOTH,
        BOTH_HIT,
        (grant(Allocate(1, new=1), (1, 5), (3, 1)),),
        (grant(Allocate(1, new=1), (1, 5), (3, 6)),),
        "block 1 stands at (group, entry) (0, 0) and, for request 1, (1, 1)",
    ),
    Case(
        "R3",
        "one block at two entries of different requests",
        FULL,
        (*GRANTED, *OTHER_ASKED),
        (grant(Allocate(1, new=3), (2, 3)),),
        (grant(Allocate(1, new=3), (3, 4)),),
        "block 2 stands at (group, entry) (0, 0) and, for request 0, (0, 1)",
        first="I1",
    ),
    Case(
        "R4",
        "a hit of all tokens",
        FULL,
        (*COMPUTED, submit(1, 1, 2)),
        (lookup(1, 2, (1,)),),
        (lookup(1, 0, ()),),
        "a hit of 2 of 2 tokens leaves nothing to compute",
    ),
    Case(
        "R4",
        "a hit that ends inside a block",
        FULL,
        (*COMPUTED, *CONTINUED),
        (lookup(1, 1, (1,)),),
        (lookup(1, 2, (1,)),),
        "a hit of 1 tokens ends on no allowed boundary",
    ),
    Case(
        "R4",
        "a hit on a boundary of one group alone",
        Config((Group("full", 2), Group("sliding", 4, 3)), num_blocks=9),
        (
            submit(0, 1, 2, 3, 4, 5),
            lookup(0, 0, (), ()),
            grant(Allocate(0, new=5), (1, 2, 3), (4, 5)),
            submit(1, 1, 2, 3, 4, 5),
        ),
        (lookup(1, 2, (1,), (4,)),),
        (lookup(1, 4, (1, 2), (4,)),),
        "a hit of 2 tokens ends on no allowed boundary",
    ),
    Case(
        "R4",
        "a hit whose table is too short",
        FULL,
        (*COMPUTED, submit(1, 1, 2, 3, 9, 7)),
        (lookup(1, 4, (1,)),),
        (lookup(1, 2, (1,)),),
        "group 0 has 1 entries for 4 tokens: (1,)",
        first="I3",
    ),
    Case(
        "R4",
        "a hit whose table is too long",
        FULL,
        (*COMPUTED, *CONTINUED),
        (lookup(1, 2, (1, 2)),),
        (lookup(1, 2, (1,)),),
        "group 0 has 2 entries for 2 tokens: (1, 2)",
    ),
    Case(
        "R4",
        "a grant whose table lacks the nulls left of the window",
        WINDOW,
        (submit(0, 1, 2, 3, 4, 5), lookup(0, 0, ())),
        (grant(Allocate(0, new=1, external=4), (1, 2)),),
        (grant(Allocate(0, new=1, external=4), (0, 1, 2)),),
        "group 0 has 2 entries for 5 tokens: (1, 2)",
        first="I3",
    ),
    Case(
        "R4",
        "a hit while prefix caching is off",
        UNCACHED,
        (*COMPUTED, *CONTINUED),
        (lookup(1, 2, (1,)),),
        (lookup(1, 0, ()),),
        "a hit of 2 tokens ends on no allowed boundary",
    ),
    Case(
        "R5",
        "a hit on a prefix of the same length that differs",
        FULL,
        (*COMPUTED, submit(1, 1, 2, 5, 9, 7)),
        (lookup(1, 4, (1, 2)),),
        (lookup(1, 2, (1,)),),
        "a hit for (<1 2 5>,) got block 2, group 0, position 2, which promises <1 2 3>: another "
        "prefix of the same length",
        first="I2",
    ),
    Case(
        "R6",
        "a partial tail that is written where another request holds it",
        PARTIAL,
        (*ASKED, grant(Allocate(0, new=3), (1,)), issue(), complete(0, (0, 9)), *HIT),
        (grant(Allocate(1, new=1), (1,)),),
        (Move(Allocate(1, new=1), Granted(((2,),), copies=(Copy(0, 1, 2),))),),
        "request 1 is to write block 1, group 0, position 2; others hold it: <1 2 3>",
        first="R2",
    ),
    Case(
        "R7",
        "a block given back that full attention still reads",
        FULL,
        COMPUTED,
        (trim(0, (0, 2)),),
        (trim(0, (1, 2)),),
        "group 0, entry 0: 1 became 0; needed from 0 on, 3 tokens are processed",
    ),
    Case(
        "R7",
        "a trim by tokens that are not yet processed",
        WINDOW,
        WINDOW_IN_FLIGHT,
        (trim(0, (0, 2, 3)),),
        (trim(0, (1, 2, 3)),),
        "group 0, entry 0: 1 became 0; needed from 0 on, 0 tokens are processed",
    ),
    Case(
        "R7",
        "a trim beyond the window",
        WINDOW,
        WINDOW_COMPUTED,
        (trim(0, (0, 0, 3)),),
        (trim(0, (0, 2, 3)),),
        "group 0, entry 1: 2 became 0; needed from 1 on, 5 tokens are processed",
    ),
    Case(
        "R7",
        "a grant that returns what a step in flight reads",
        WINDOW,
        WINDOW_IN_FLIGHT,
        (grant(ONE_MORE, (0, 2, 3)),),
        (grant(ONE_MORE, (1, 2, 3)),),
        "group 0, entry 0: 1 became 0; needed from 0 on, 0 tokens are processed",
    ),
    Case(
        "R7",
        "a grant that drops a block of the hit",
        FULL,
        (*COMPUTED, *HIT),
        (grant(Allocate(1, new=1), (0, 3)),),
        (grant(Allocate(1, new=1), (1, 3)),),
        "group 0, entry 0: 1 became 0; needed from 0 on, 2 tokens are processed",
        first="I3",
    ),
    Case(
        "R7",
        "a refusal that returns what is still read",
        WINDOW,
        WINDOW_COMPUTED,
        (refuse(replace(ONE_MORE, headroom=4), (0, 0, 3)),),
        (refuse(replace(ONE_MORE, headroom=4), (0, 2, 3)),),
        "group 0, entry 1: 2 became 0; needed from 1 on, 5 tokens are processed",
    ),
    Case(
        "R7",
        "an entry that is replaced left of the window",
        WINDOW,
        WINDOW_COMPUTED,
        (trim(0, (4, 2, 3)),),
        (trim(0, (0, 2, 3)),),
        "group 0, entry 0: 1 became 4; needed from 1 on",
    ),
    Case(
        "R7",
        "an entry of a running request that a grant replaces",
        FULL,
        COMPUTED,
        (grant(ONE_MORE, (3, 2)),),
        (grant(ONE_MORE, (1, 2)),),
        "group 0, entry 0: 1 became 3; needed from 0 on",
        first="R2",
    ),
    Case(
        "R7",
        "a table that shrinks",
        WINDOW,
        WINDOW_COMPUTED,
        (trim(0, (0, 2)),),
        (trim(0, (0, 2, 3)),),
        "group 0 shrank from (1, 2, 3) to (0, 2)",
    ),
    Case(
        "R9",
        "computed tokens that a stale step has advanced",
        FULL,
        PREEMPTED,
        (update(0, (0, 9), computed=(0, 3)),),
        (update(0, (0, 9), computed=(0, 0)),),
        "request 0 counts 3 computed tokens after stale output",
    ),
    Case(
        "R9",
        "a request that resumes before its stale output is back",
        FULL,
        PREEMPTED,
        (schedule(ScheduledRow(0, 0, 3, True, True, ((1, 2),))),),
        (
            update(0, (0, 9), computed=(0, 0)),
            schedule(ScheduledRow(0, 0, 4, True, True, ((1, 2),))),
        ),
        "request 0 resumed before its stale output was back",
    ),
    Case(
        "R10",
        "a key that was never announced",
        EVENTS,
        ASKED,
        (GRANT.announcing("ab", STORED),),
        (GRANT.announcing("a", STORED),),
        "(0, 'b'): announced is False, findable is True",
    ),
    Case(
        "R10",
        "a key whose removal was never announced",
        EVENTS,
        (*ASKED, GRANT.announcing("a", STORED)),
        (issue().announcing(""),),
        (issue().announcing("", Event("removed", 0, ("a",))),),
        "(0, 'a'): announced is True, findable is False",
    ),
    Case(
        "R10",
        "keys that are findable after everything is gone",
        EVENTS,
        (*ASKED, GRANT.announcing("a", STORED)),
        (issue().announcing("a", Event("cleared")),),
        (issue().announcing("b", Event("cleared"), Event("stored", 0, ("b",))),),
        "(0, 'a'): announced is False, findable is True",
    ),
    Case(
        "R10",
        "an event whose parent was never announced",
        EVENTS,
        ASKED,
        (GRANT.announcing("ab", STORED, Event("stored", 0, ("b",), "x")),),
        (GRANT.announcing("ab", STORED, Event("stored", 0, ("b",), "a")),),
        "parent='x') names a parent that was never announced",
    ),
    Case(
        "R11",
        "a request that has no token for more steps than it has tokens",
        PATIENT,
        (*SCHEDULED, update(0, (0, 9), computed=(0, 3)), *idle(1, 2, 3, 4), schedule()),
        (Move(complete(5).action, Updated((), ())), schedule()),
        (Move(complete(5).action, Updated((0,), ())), schedule()),
        "none of the requests [0] had a token in the last 5 steps",
    ),
    Case(
        "R12",
        "a usage that is not the number of referenced blocks",
        PATIENT,
        SCHEDULED,
        (reporting(used_blocks=1, queried=3),),
        (reporting(used_blocks=2, queried=3),),
        "the target reports Numbers(used_blocks=1, queried=3, hit=0, preemptions=0), it was ",
    ),
    Case(
        "R12",
        "a hit rate that does not count what was looked up",
        PATIENT,
        SCHEDULED,
        (reporting(used_blocks=2, queried=2),),
        (reporting(used_blocks=2, queried=3),),
        "it was Numbers(used_blocks=2, queried=3, hit=0, preemptions=0)",
    ),
    Case(
        "R12",
        "a preemption that is not counted",
        replace(PATIENT, scheduling=Scheduling()),
        (*SCHEDULED, Move(Issue(), Scheduled((), (0,), ((0, ((),)),)))),
        (reporting(used_blocks=0, queried=3, preemptions=0),),
        (reporting(used_blocks=0, queried=3, preemptions=1),),
        "it was Numbers(used_blocks=0, queried=3, hit=0, preemptions=1)",
    ),
)


def follow(oracle: Oracle, run: Iterable[Move]) -> None:
    for move in run:
        oracle.step(move.action, move.answer, move.snapshot)


def rejected(oracle: Oracle, case: Case) -> Violation:
    """What is said of the last of the bad moves; all before it must be taken."""
    follow(oracle, (*case.before, *case.bad[:-1]))
    state = oracle.state
    with pytest.raises(Violation) as caught:
        follow(oracle, case.bad[-1:])
    assert oracle.state is state, "a rejected answer must leave the oracle where it was"
    return caught.value


def called(case: Case) -> str:
    return f"{case.rule}: {case.name}"


@pytest.mark.parametrize("case", CASES, ids=called)
def test_among_all_rules_the_bad_answer_falls_by_its_own(case: Case) -> None:
    violation = rejected(Oracle(case.config, rules_of("contract", case.without)), case)
    assert violation.rule == (case.first or case.rule)
    assert case.rule in (violation.rule, *violation.also)


@pytest.mark.parametrize("case", CASES, ids=called)
def test_the_rule_alone_names_the_witness(case: Case) -> None:
    oracle = Oracle(case.config, [rule for rule in RULES if rule.id == case.rule])
    violation = rejected(oracle, case)
    assert violation.rule == case.rule
    assert case.witness in violation.witness
    assert str(violation) == f"{case.rule}: {violation.witness}"


@pytest.mark.parametrize("case", CASES, ids=called)
def test_the_good_answer_passes_every_rule(case: Case) -> None:
    oracle = Oracle(case.config)
    follow(oracle, (*case.before, *case.good))
    assert any(rule == case.rule for rule, _ in oracle.evaluated), "nothing has judged it"


def broken_by(case: Case, without: tuple[str, ...]) -> set[str]:
    """The rules that the bad answer breaks, when those of `without` are left out."""
    oracle = Oracle(case.config, rules_of("contract", without))
    follow(oracle, (*case.before, *case.bad[:-1]))
    try:
        follow(oracle, case.bad[-1:])
    except Violation as violation:
        return {violation.rule, *violation.also}
    return set()


JUDGED = tuple(case for case in CASES if "does not exist" not in case.witness)
"""Those that a rule judges: an id of no block is refused before any."""


@pytest.mark.parametrize("case", JUDGED, ids=called)
def test_a_rule_that_is_left_out_is_silent_and_the_others_speak_as_before(case: Case) -> None:
    broken = broken_by(case, case.without)
    assert broken_by(case, (*case.without, case.rule)) == broken - {case.rule}


# What looks wrong and is not


def passes(config: Config, *run: Move) -> Oracle:
    oracle = Oracle(config)
    follow(oracle, run)
    return oracle


def test_a_refusal_may_return_what_left_the_window() -> None:
    refused = refuse(replace(ONE_MORE, headroom=4), (0, 2, 3)).showing(1, 4, 5)
    oracle = passes(WINDOW, *WINDOW_COMPUTED, refused)
    assert oracle.state.find(0).tables == ((0, 2, 3),)


def test_a_refusal_need_not_return_what_left_the_window() -> None:
    passes(WINDOW, *WINDOW_COMPUTED, refuse(replace(ONE_MORE, headroom=4), (1, 2, 3)))


def test_what_the_call_itself_trims_counts_as_free() -> None:
    more = Allocate(0, new=1, lookahead=1, headroom=2)
    short = passes(WINDOW, *WINDOW_COMPUTED)
    with pytest.raises(Violation, match="R2: 2 free blocks"):
        follow(short, [grant(more, (1, 2, 3, 4))])
    passes(WINDOW, *WINDOW_COMPUTED, grant(more, (0, 2, 3, 4)))


def test_a_block_that_the_call_itself_trims_may_be_handed_out_at_once() -> None:
    more = Allocate(0, new=1, lookahead=1)
    passes(WINDOW, *WINDOW_COMPUTED, grant(more, (0, 2, 3, 1)))


def test_worker_rows_may_be_old_left_of_the_window() -> None:
    granted = grant(ONE_MORE, (0, 2, 3))
    passes(WINDOW, *WINDOW_COMPUTED, granted, issue((0, ((1, 2, 3),))))


def test_a_hit_in_the_step_that_fills_the_block_is_read_as_written() -> None:
    granted = grant(Allocate(1, new=1), (1, 3))
    passes(FULL, *GRANTED, *HIT, granted, issue(), complete(0, (0, 9), (1, 9)))


def test_steps_are_ordered_unless_they_are_strict() -> None:
    reused = (*LEFT_IN_FLIGHT, *OTHER_ASKED, grant(Allocate(1, new=3), (1, 2)))
    passes(FULL, *reused, issue(), complete(0, (0, 9)), complete(1, (1, 9)))
    with pytest.raises(Violation, match="I4: block 1"):
        passes(STRICT, *reused)


def test_an_aborted_requests_blocks_may_be_free_or_kept_back() -> None:
    passes(DEFERS, *IN_FLIGHT, abort(0, (1, 2)).showing(3, 4))
    passes(DEFERS, *IN_FLIGHT, abort(0, ()).showing(3, 4, 2, 1))


def test_a_load_may_take_what_a_step_in_flight_no_longer_needs() -> None:
    decoding = (*WINDOW_COMPUTED, grant(ONE_MORE, (1, 2, 3)), issue((0, ((1, 2, 3),))))
    asked = (abort(0), submit(1, 5, 6, 7), lookup(1, 0, ()))
    passes(WINDOW, *decoding, *asked, grant(LOAD, (1,)))
    with pytest.raises(Violation, match="I4: block 2"):
        passes(WINDOW, *decoding, *asked, grant(LOAD, (2,)))


def test_what_a_load_has_delivered_may_be_hit() -> None:
    passes(FULL, *LOADING, DELIVERED, submit(2, 5, 6, 8), lookup(2, 2, (3,)))


def test_what_a_load_has_not_delivered_may_not_be_hit() -> None:
    failed = Move(CompleteLoad(1, 0), Done())
    with pytest.raises(Violation, match="I2: a hit for"):
        passes(FULL, *LOADING, failed, submit(2, 5, 6, 8), lookup(2, 2, (3,)))


def test_accepted_drafts_may_be_hit_and_rejected_ones_not() -> None:
    flying = (*DRAFTING, issue())
    passes(WIDE, *flying, complete(1, (0, 5, 2)), lookup(1, 6, (1, 2, 3)))
    with pytest.raises(Violation, match=r"I2: .* block 3, group 0, position 5"):
        passes(WIDE, *flying, complete(1, (0, 5, 1)), lookup(1, 6, (1, 2, 3)))


# Answers that are none


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ((Move(ASKED[0].action, Hit(0, ((),))),), "Hit is no answer to Submit"),
        ((ASKED[0], lookup(0, 0, (), ())), "2 tables for 1 groups"),
        ((*ASKED, Move(GRANT.action, Granted(((1, 2),), ((1,), (2,))))), "2 tables for 1 groups"),
        ((*GRANTED, issue((0, ()))), "0 tables for 1 groups"),
    ],
)
def test_an_answer_of_the_wrong_kind_or_shape_is_nonsense(run: Run, reason: str) -> None:
    with pytest.raises(NonsenseAnswer, match=reason):
        passes(FULL, *run)


# The rules themselves


def test_rules_stand_in_reading_order_and_once() -> None:
    assert tuple(rule.id for rule in RULES) == IDS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rules_docstring_begins_with_its_id_and_sentence(rule: Rule) -> None:
    assert (rule.judge.__doc__ or "").startswith(f"{rule.id}: {rule.sentence}")
    assert rule.sentence[0].islower()
    assert rule.sentence.endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_rejects_something(rule: Rule) -> None:
    assert [case for case in CASES if case.rule == rule.id]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_evidence_of_a_rule_is_known(rule: Rule) -> None:
    assert rule.evidence
    assert set(rule.evidence) <= set(EVIDENCE)


LACKING: dict[str, Run] = {
    "I1": ASKED,  # nothing granted, no snapshot
    "I2": GRANTED,  # no hit, and no step has returned
    "I3": ASKED,  # no hit of a token, nothing granted, no step issued
    "I4": ASKED,
    "I5": COMPUTED,  # neither worker rows nor a snapshot
    "I6": COMPUTED,  # no hit of a token
    "R1": LEFT,  # nothing refused
    "R2": ASKED,
    "R3": ASKED,
    "R4": ASKED[:1],
    "R5": COMPUTED,
    "R6": ASKED,
    "R7": ASKED,
    "R10": (*ASKED, SHOWN),  # no events
    "R11": COMPUTED,  # a driver decided
    "R12": COMPUTED,
    "R9": (*PREEMPTED, complete(0, (0, 9)), lookup(0, 2, (1,))),  # a driver decided
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_without_its_evidence_is_not_evaluated(rule: Rule) -> None:
    oracle = passes(FULL, *LACKING[rule.id])
    assert rule.id not in {known for known, _ in oracle.evaluated}


@pytest.mark.parametrize("case", CASES, ids=called)
def test_a_rule_is_evaluated_by_its_own_evidence_only(case: Case) -> None:
    oracle = passes(case.config, *case.before, *case.good)
    evidence = {rule.id: rule.evidence for rule in RULES}
    for rule, shown in oracle.evaluated:
        assert shown in evidence[rule]


def test_evidence_that_is_shown_is_counted() -> None:
    rows = issue((0, ((1, 2),))).showing(3, 4, tables=((0, ((1, 2),)),))
    oracle = passes(FULL, *GRANTED, rows, complete(0, (0, 9)))
    assert oracle.evaluated["I5", "rows"] == 1
    assert oracle.evaluated["I5", "tables"] == 1
    assert oracle.evaluated["I1", "snapshot"] == 1
    assert oracle.evaluated["I1", "grant"] == 1
    assert oracle.evaluated["I2", "reads"] == 1
    assert oracle.evaluated["R4", "lookup"] == 1
    assert oracle.evaluated["I3", "step"] == 1


def test_safety_is_the_invariants_and_contract_is_all() -> None:
    assert [rule.id for rule in rules_of("safety")] == [i for i in IDS if i.startswith("I")]
    assert rules_of("contract") == rules_of("exact:vllm-0.32") == RULES
    assert "R3" not in [rule.id for rule in rules_of("contract", ["R3"])]
    with pytest.raises(ValueError, match="no rule R99"):
        rules_of("contract", ["R99", "R3"])
