"""What a target shows beside its tables is not believed: counts, lists, rows, what it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from kvproof_spec.actions import Allocate, CompleteStep, Issue, Lookup, Output, Release, Submit
from kvproof_spec.answers import Done, Granted, Hit, Issued, Returned, SentRow, Snapshot
from kvproof_spec.config import Config, Group
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import NonsenseAnswer, Oracle
from kvproof_spec.trace import DamagedTrace, parse_trace

FULL = Config((Group("full", 2),), num_blocks=5)
WINDOW = Config((Group("sliding", 2, 3),), num_blocks=9)
NO_HIT = Hit(0, ((),))

Move = tuple[Any, ...]  # what Oracle.step takes
ADMITTED: tuple[Move, ...] = (
    (Submit(0, (1, 2, 3)), Done()),
    (Lookup(0), NO_HIT),
    (Allocate(0, 3), Granted(((1, 2),))),
)
IN_FLIGHT: tuple[Move, ...] = (*ADMITTED, (Issue(), Issued()))


def followed(config: Config, *moves: Move) -> Oracle:
    oracle = Oracle(config)
    for move in moves:
        oracle.step(*move)
    return oracle


def test_a_free_list_names_blocks_that_exist() -> None:
    oracle = followed(FULL, *IN_FLIGHT)
    with pytest.raises(Violation, match="no normal block"):
        oracle.step(Submit(1, (1,)), Done(), Snapshot((3, 99)))


@pytest.mark.parametrize("counts", [(0, 1), (0, 1, 1, 0, 0, 7)])
def test_there_is_one_count_a_block(counts: tuple[int, ...]) -> None:
    oracle = followed(FULL, *IN_FLIGHT)
    with pytest.raises(NonsenseAnswer, match="counts for 5 blocks"):
        oracle.step(Submit(1, (1,)), Done(), Snapshot((3, 4), reference_counts=counts))


def test_only_what_was_held_can_be_kept_back() -> None:
    oracle = followed(FULL, *IN_FLIGHT)
    with pytest.raises(Violation, match=r"blocks \[3, 4\] are kept back") as caught:
        oracle.step(Release(0, "abort"), Returned((3, 4)))
    assert caught.value.rule == "I4"


def test_nothing_is_kept_back_for_steps_that_have_returned() -> None:
    returned = CompleteStep(0, (Output(0, 9),)), Returned()
    oracle = followed(FULL, *IN_FLIGHT, returned)
    with pytest.raises(Violation, match="none is in flight"):
        oracle.step(Release(0, "abort"), Returned((1, 2)))


def test_what_was_held_may_be_kept_back_until_its_step_returns() -> None:
    kept = Release(0, "abort"), Returned((1, 2))
    returned = CompleteStep(0, (Output(0, 9),)), Returned(())
    assert followed(FULL, *IN_FLIGHT, kept).state.deferred == (1, 2)
    assert followed(FULL, *IN_FLIGHT, kept, returned).state.deferred == ()


def test_a_row_does_not_write_external_tokens_left_of_the_table() -> None:
    admitted = Allocate(0, 1, external=4), Granted(((0, 2, 3),))
    oracle = followed(WINDOW, (Submit(0, (5, 6, 7, 8, 9)), Done()), (Lookup(0), NO_HIT), admitted)
    with pytest.raises(Violation, match="position 0"):
        oracle.step(Issue(), Issued((SentRow(0, ((1, 2, 3),)),)))


def test_a_request_has_one_row() -> None:
    oracle = followed(FULL, *ADMITTED)
    with pytest.raises(Violation, match="the worker has rows"):
        oracle.step(Issue(), Issued((SentRow(0, ((1, 2),)), SentRow(0, ((1, 2),)))))


def test_a_running_request_is_sent_what_its_table_got() -> None:
    running = CompleteStep(0, (Output(0, 9),)), Returned()
    grown = Allocate(0, 1, lookahead=1), Granted(((1, 2, 3),), ((3,),))
    assert followed(FULL, *IN_FLIGHT, running, grown).evaluated["I5", "sent"] == 1
    with pytest.raises(Violation, match=r"is sent \(\(4,\),\)"):
        followed(FULL, *IN_FLIGHT, running, (grown[0], Granted(((1, 2, 3),), ((4,),))))


def test_tables_that_are_not_shown_are_no_evidence() -> None:
    oracle = followed(FULL, *ADMITTED, (Issue(), Issued(), Snapshot((3, 4))))
    assert ("I5", "tables") not in oracle.evaluated


def test_a_request_is_not_left_out_of_the_tables() -> None:
    oracle = followed(FULL, *IN_FLIGHT)
    with pytest.raises(Violation, match="request 0 has"):
        oracle.step(Submit(1, (1,)), Done(), Snapshot((3, 4), tables=()))


@pytest.mark.parametrize("line", ['{"action": {"request": 0}}', '{"action": {}}'])
def test_an_action_says_its_type(line: str) -> None:
    config = '{"groups": [{"kind": "full", "block_size": 2}], "num_blocks": 2}'
    header = f'{{"kvproof": 1, "config": {config}, "target": "x"}}'
    with pytest.raises(DamagedTrace, match=r"line 2: .*type"):
        parse_trace([header, line], "trace")
