"""A trace is told in the lines that one writes when debugging a cache manager by hand."""

from __future__ import annotations

from typing import Any

import pytest

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
from kvproof_spec.answers import (
    Answer,
    Done,
    Granted,
    Hit,
    Issued,
    Raised,
    Scheduled,
    ScheduledRow,
    SentRow,
)
from kvproof_spec.config import Config, Group
from kvproof_spec.trace import Line
from kvproof_stateful.running import Judging, perform_actions
from kvproof_stateful.steps import step_lines
from kvproof_stateful.targets.plain import PlainTarget

BOTH = Config((Group("full", 2), Group("sliding", 2, 3)), num_blocks=16, defers_returns=True)
FULL = Config((Group("full", 2),), num_blocks=5)

ACTIONS: tuple[Action, ...] = (
    Submit(0, (1, 2, 3, 1, 2)),
    Lookup(0),
    Allocate(0, 5, lookahead=1, headroom=1, whole_sequence=True),
    Issue(),
    CompleteStep(0, (Output(0, 3),)),
    Publish(0, 5),
    Trim(0),
    Submit(1, (1, 2, 3, 1, 2, 1)),
    Lookup(1),
    Allocate(1, 2),
    Allocate(0, 3, drafts=(1, 2)),
    Issue(),
    CompleteStep(1, (Output(0, 2, accepted=1), Output(1, 1))),
    Submit(2, (3,) * 7),
    Lookup(2),
    Allocate(2, 7, headroom=3),
    Lookup(2),
    Allocate(2, 0, external=4, unordered=True),
    CompleteLoad(2, 0),
    Forget((1, 2)),
    Forget(),
    Release(0, "finish"),
    Release(1, "preempt"),
    Release(1, "abort"),
)

TOLD = """\
  0  step=0 req=R0 submit tokens=[1, 2, 3, 1, 2] free=15
  1  step=0 req=R0 lookup hit_tokens=0 blocks=[[], []] ref=[] free=15
  2  step=0 req=R0 allocate scheduled=5 lookahead=1 headroom=1 whole_sequence \
granted owned=[[1, 2, 3], [4, 5, 6]] new=[[1, 2, 3], [4, 5, 6]] free=9
  3  step=0 issue free=9
  4  step=1 step 0 returns {'R0': 3} free=9
  5  step=1 req=R0 publish tokens=5 free=9
  6  step=1 req=R0 trim owned=[[1, 2, 3], [0, 5, 6]] free=10
  7  step=1 req=R1 submit tokens=[1, 2, 3, 1, 2, 1] free=10
  8  step=1 req=R1 lookup hit_tokens=4 blocks=[[1, 2], [0, 5]] ref=[1, 1, 1] free=10
  9  step=1 req=R1 allocate scheduled=2 granted owned=[[1, 2, 7], [0, 5, 8]] new=[[7], [8]] free=8
 10  step=1 req=R0 allocate scheduled=3 drafts=[1, 2] \
granted owned=[[1, 2, 3, 9], [0, 5, 6, 10]] new=[[9], [10]] free=6
 11  step=1 issue free=6
 12  step=2 step 1 returns {'R0': 2, 'R1': 1} free=6
 13  step=2 req=R2 submit tokens=[3, 3, 3, 3, 3, 3, 3] free=6
 14  step=2 req=R2 lookup hit_tokens=0 blocks=[[], []] ref=[] free=6
 15  step=2 req=R2 allocate scheduled=7 headroom=3 refused owned=[[], []] free=6
 16  step=2 req=R2 lookup hit_tokens=0 blocks=[[], []] ref=[] free=6
 17  step=2 req=R2 allocate scheduled=0 external=4 unordered \
granted owned=[[11, 12], [0, 13]] new=[[], []] free=3
 18  step=2 req=R2 load returns valid_tokens=0 free=6
 19  step=2 forget blocks=[1, 2] done free=6
 20  step=2 forget everything refused free=6
 21  step=2 req=R0 finish free=10
 22  step=2 req=R1 preempt free=15
 23  step=2 req=R1 abort free=15
"""


def test_a_run_of_the_plain_manager_is_told_action_by_action() -> None:
    run = perform_actions(PlainTarget(), Judging(), BOTH, ACTIONS)
    assert "".join(f"{line}\n" for line in step_lines(BOTH, run.lines)) == TOLD


def told(*lines: tuple[Action, Answer | None]) -> list[str]:
    return list(step_lines(FULL, [Line(action, answer) for action, answer in lines]))


def test_what_a_scheduler_did_is_told_row_by_row() -> None:
    row = ScheduledRow(0, start=0, tokens=3, admitted=True, samples=True, worker=((1, 2),))
    scheduled = Scheduled((row,), preempted=(), tables=((0, ((1, 2),)),))
    assert told((Submit(0, (1, 2, 3)), Done()), (Issue(), scheduled)) == [
        "  0  step=0 req=R0 submit tokens=[1, 2, 3] free=4",
        "  1  step=0 issue scheduled R0[0:3] hit_tokens=0 row=[[1, 2]] free=2",
    ]


def test_a_missing_answer_and_an_exception_are_told() -> None:
    submit = (Submit(0, (1, 2, 3)), Done())
    hit = (Lookup(0), Hit(0, ((),)))
    assert told(submit, hit, (Allocate(0, 3), Raised("MemoryError: no room")))[-1] == (
        "  2  step=0 req=R0 allocate scheduled=3 raised MemoryError: no room free=4"
    )
    assert told(submit, (Lookup(0), None))[-1] == "  1  step=0 req=R0 lookup no answer free=4"


def untyped(value: Any) -> Any:
    """What no type checker would let through."""
    return value


NONSENSE: tuple[Any, ...] = (
    Hit,
    "done",
    Hit(0, untyped(None)),
    Hit(untyped("0"), ((),)),
    Hit(-2, ((),)),
    Hit(2, ((99,),)),
    Hit(2, ((), ())),
    Hit(0, untyped((("1",),))),
    Hit(0, untyped((([1], [2]),))),
    Granted(untyped((1,))),
    Issued((SentRow(9, ((1,),)),)),
)


@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
def test_nonsense_is_told_too(answer: Any) -> None:
    lines = told((Submit(0, (1, 2, 3)), Done()), (Lookup(0), answer))
    assert len(lines) == 2
    assert lines[1].startswith("  1  step=0 req=R0 lookup")
