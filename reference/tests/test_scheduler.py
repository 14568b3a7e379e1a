"""What the small scheduler decides, case by case, over the plain manager."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest

from kvproof_reference import KVCacheManager, Request
from kvproof_reference.scheduler import NeverFits, Scheduler
from kvproof_reference.steps import Row, SchedulerOutput
from kvproof_spec.config import Config, Group, Scheduling

BLOCK = 4
TOKEN = 7


def scheduler_over(
    usable_blocks: int = 16, *, groups: Iterable[Group] = (Group("full", BLOCK),), **options: Any
) -> Scheduler:
    """`options` are those of `Scheduling`, and `defers_returns`."""
    defers_returns = options.pop("defers_returns", False)
    config = Config(
        groups=tuple(groups),
        num_blocks=usable_blocks + 1,
        max_model_len=128,
        defers_returns=defers_returns,
        scheduling=replace(Scheduling(whole_sequence_check=False), **options),
    )
    manager = KVCacheManager(config.groups, config.num_blocks, max_model_len=config.max_model_len)
    return Scheduler(manager, config)


def submit(
    scheduler: Scheduler, request_id: int, num_tokens: int, first: int = 0, **options: Any
) -> Request:
    """A prompt of its own, `first` its first token."""
    request = Request(request_id, range(100 * first, 100 * first + num_tokens))
    scheduler.add_request(request, **options)
    return request


def returned(scheduler: Scheduler, output: SchedulerOutput, token: int = TOKEN) -> tuple[int, ...]:
    sampled = {row.request_id: token for row in output.rows if row.samples}
    return scheduler.update_from_output(output, sampled).finished


def step(scheduler: Scheduler) -> SchedulerOutput:
    """A step that returns at once."""
    output = scheduler.schedule()
    returned(scheduler, output)
    return output


def spans(output: SchedulerOutput) -> dict[int, tuple[int, int]]:
    """First token and end of each row, by request."""
    return {
        row.request_id: (
            row.num_computed_tokens,
            row.num_computed_tokens + row.num_scheduled_tokens,
        )
        for row in output.rows
    }


def row_of(output: SchedulerOutput, request_id: int) -> Row:
    return next(row for row in output.rows if row.request_id == request_id)


def free_blocks(scheduler: Scheduler) -> int:
    assert isinstance(scheduler.manager, KVCacheManager)
    return scheduler.manager.block_pool.get_num_free_blocks()


# What a step computes


def test_a_long_prompt_is_computed_in_chunks_and_samples_with_the_last() -> None:
    scheduler = scheduler_over(long_prefill_token_threshold=6)
    submit(scheduler, 0, 10)
    first, second = step(scheduler), step(scheduler)
    assert (spans(first), spans(second)) == ({0: (0, 6)}, {0: (6, 10)})
    assert [first.rows[0].samples, second.rows[0].samples] == [False, True]


def test_a_step_computes_no_more_tokens_than_its_budget() -> None:
    scheduler = scheduler_over(max_num_batched_tokens=8)
    submit(scheduler, 0, 5, first=1)
    submit(scheduler, 1, 5, first=2)
    assert spans(step(scheduler)) == {0: (0, 5), 1: (0, 3)}
    assert spans(step(scheduler)) == {0: (5, 6), 1: (3, 5)}


def test_no_more_requests_run_than_asked_for() -> None:
    scheduler = scheduler_over(max_num_seqs=2)
    for request_id in range(3):
        submit(scheduler, request_id, 2, first=request_id, max_tokens=1)
    assert list(spans(step(scheduler))) == [0, 1]
    assert list(spans(step(scheduler))) == [2]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2]), ("priority", [2, 0, 1])])
def test_who_waits_is_admitted_by_the_policy(policy: str, order: list[int]) -> None:
    scheduler = scheduler_over(policy=policy)
    for request_id, priority in enumerate((1, 1, 0)):
        submit(scheduler, request_id, 2, first=request_id, priority=priority)
    assert list(spans(step(scheduler))) == order


def test_a_new_request_starts_from_its_hit_and_is_sent_all_its_blocks() -> None:
    scheduler = scheduler_over()
    submit(scheduler, 0, 9)
    step(scheduler)
    submit(scheduler, 1, 9)
    row = row_of(step(scheduler), 1)
    assert (row.kind, row.num_computed_tokens, row.block_ids) == ("new", 8, ((1, 2, 4),))


def test_a_running_request_is_sent_only_its_new_blocks() -> None:
    scheduler = scheduler_over()
    submit(scheduler, 0, 4)
    step(scheduler)
    assert step(scheduler).rows[0].block_ids == ((2,),)
    assert step(scheduler).rows[0].block_ids == ((),)


def test_a_request_ends_with_its_last_token_or_the_stop_token() -> None:
    scheduler = scheduler_over(stop_token=1)
    request = submit(scheduler, 0, 3, max_tokens=2)
    submit(scheduler, 1, 3, first=1)
    assert returned(scheduler, scheduler.schedule()) == ()
    assert returned(scheduler, scheduler.schedule()) == (0,)
    assert request.num_tokens == 5
    assert returned(scheduler, scheduler.schedule(), token=1) == (1,)
    assert scheduler.schedule().finished == (1,)
    assert free_blocks(scheduler) == 16


def test_a_request_that_never_ran_is_no_row_to_forget() -> None:
    scheduler = scheduler_over()
    submit(scheduler, 0, 3)
    scheduler.finish_request(0)
    assert scheduler.schedule() == SchedulerOutput(0, (), (), ())


# Two steps in flight


def test_a_step_computes_a_token_that_is_still_being_sampled() -> None:
    scheduler = scheduler_over()
    request = submit(scheduler, 0, 3)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert spans(second) == {0: (3, 4)}
    assert second.rows[0].samples
    assert request.num_tokens == 3
    returned(scheduler, first)
    returned(scheduler, second)
    assert request.tokens == [0, 1, 2, TOKEN, TOKEN]


def test_no_step_goes_beyond_what_the_steps_in_flight_will_end() -> None:
    scheduler = scheduler_over()
    submit(scheduler, 0, 3, max_tokens=1)
    scheduler.schedule()
    assert scheduler.schedule().rows == ()


def test_a_token_sampled_meanwhile_completes_a_block_that_others_find() -> None:
    scheduler = scheduler_over()
    submit(scheduler, 0, 3)
    first = scheduler.schedule()
    scheduler.schedule()
    returned(scheduler, first, token=3)
    other = submit(scheduler, 1, 5)
    assert other.tokens[:4] == scheduler.requests[0].request.tokens
    assert spans(scheduler.schedule())[1] == (4, 5)


def test_a_step_of_a_request_that_has_left_returns_to_nobody() -> None:
    scheduler = scheduler_over()
    submit(scheduler, 0, 3)
    output = scheduler.schedule()
    scheduler.finish_request(0)
    assert returned(scheduler, output) == ()
    assert free_blocks(scheduler) == 16


@pytest.mark.parametrize(("defers_returns", "kept"), [(True, (1,)), (False, ())])
def test_blocks_of_who_leaves_come_back_with_its_last_step(
    defers_returns: bool, kept: tuple[int, ...]
) -> None:
    scheduler = scheduler_over(defers_returns=defers_returns)
    submit(scheduler, 0, 2)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.finish_request(0)
    assert scheduler.manager.deferred_blocks() == kept
    returned(scheduler, first)
    assert scheduler.manager.deferred_blocks() == kept
    returned(scheduler, second)
    assert scheduler.manager.deferred_blocks() == ()
    assert free_blocks(scheduler) == 16


# Blocks run out


def crowded(**options: Any) -> tuple[Scheduler, Request, Request]:
    """Two requests of one block each in a pool of two; both need a second one now."""
    scheduler = scheduler_over(2, **options)
    important = submit(scheduler, 0, 3, first=1, priority=0)
    other = submit(scheduler, 1, 3, first=2, priority=5)
    step(scheduler)
    step(scheduler)
    return scheduler, important, other


def test_the_least_important_request_gives_way_and_starts_again() -> None:
    scheduler, _, other = crowded()
    output = step(scheduler)
    assert output.preempted == (1,)
    assert spans(output) == {0: (4, 5)}
    assert (other.num_computed_tokens, other.num_tokens) == (0, 5)
    assert scheduler.manager.get_block_ids(1) == ((),)


def test_a_resumed_request_is_sent_its_whole_table() -> None:
    scheduler, _, _ = crowded()
    step(scheduler)
    scheduler.finish_request(0)
    row = row_of(step(scheduler), 1)
    assert row.kind == "resumed"
    assert row.block_ids == scheduler.manager.get_block_ids(1)
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (0, 5)


def test_the_least_important_request_waits_and_keeps_its_blocks() -> None:
    """It needs a second block at a time at which the other does not."""
    scheduler = scheduler_over(2)
    submit(scheduler, 0, 2, first=1)
    submit(scheduler, 1, 4, first=2)
    step(scheduler)
    output = step(scheduler)
    assert (spans(output), output.preempted) == ({0: (2, 3)}, ())
    scheduler.finish_request(0)
    assert spans(step(scheduler)) == {1: (4, 5)}


def test_nobody_is_admitted_while_a_running_request_lacks_blocks() -> None:
    scheduler = scheduler_over(3)
    submit(scheduler, 0, 2, first=1)
    submit(scheduler, 1, 4, first=2)
    submit(scheduler, 2, 4, first=3, max_tokens=1)
    step(scheduler)  # all three run, and no block is left
    submit(scheduler, 3, 1, first=4)
    assert list(spans(step(scheduler))) == [0, 1]
    scheduler.finish_request(0)
    assert list(spans(step(scheduler))) == [1, 3]


def preempted_in_flight(**options: Any) -> tuple[Scheduler, Request, SchedulerOutput]:
    """`crowded`, with the step before the preemption still in flight."""
    scheduler = scheduler_over(2, **options)
    submit(scheduler, 0, 3, first=1)
    other = submit(scheduler, 1, 3, first=2)
    step(scheduler)
    in_flight = scheduler.schedule()
    return scheduler, other, in_flight


def test_stale_output_extends_the_tokens_and_never_what_is_computed() -> None:
    scheduler, other, in_flight = preempted_in_flight()
    assert scheduler.schedule().preempted == (1,)
    returned(scheduler, in_flight)
    assert (other.num_tokens, other.num_computed_tokens) == (5, 0)


def test_a_preempted_request_does_not_resume_before_its_stale_output_is_back() -> None:
    scheduler, _, in_flight = preempted_in_flight()
    scheduler.schedule()
    scheduler.finish_request(0)
    assert scheduler.schedule().rows == ()
    returned(scheduler, in_flight)
    assert spans(scheduler.schedule()) == {1: (0, 5)}


def test_stale_output_may_end_a_preempted_request() -> None:
    scheduler, _, in_flight = preempted_in_flight(stop_token=1)
    output = scheduler.schedule()
    assert 1 in returned(scheduler, in_flight, token=1)
    returned(scheduler, output)
    assert scheduler.requests == {}
    assert set(scheduler.schedule().finished) == {0, 1}
    assert free_blocks(scheduler) == 2


def test_blocks_that_would_come_back_late_are_not_taken_from_their_request() -> None:
    scheduler, _, in_flight = preempted_in_flight(defers_returns=True)
    waiting = scheduler.schedule()
    assert (waiting.rows, waiting.preempted) == ((), ())
    returned(scheduler, in_flight)
    assert scheduler.schedule().preempted == (1,)


def scheduled_and_preempted() -> tuple[Scheduler, Request, SchedulerOutput]:
    """Request 0 gets blocks, and loses all of them to request 1 in the same call."""
    scheduler = scheduler_over(7, policy="priority", long_prefill_token_threshold=6)
    victim = submit(scheduler, 0, 18, first=1, priority=9)
    step(scheduler)
    submit(scheduler, 1, 12, first=2, priority=0, max_tokens=1)
    step(scheduler)
    return scheduler, victim, scheduler.schedule()


def test_a_row_is_taken_back_when_its_request_is_preempted_in_the_same_call() -> None:
    _, victim, output = scheduled_and_preempted()
    assert spans(output) == {1: (6, 12)}
    assert output.preempted == (0,)
    assert [row.block_ids for row in output.withdrawn] == [((6, 7),)]
    assert (victim.num_computed_tokens, victim.num_in_flight_tokens) == (0, 0)


def test_what_was_never_issued_is_not_found() -> None:
    """12 tokens were computed; 16 had been given blocks that are full."""
    scheduler, _, output = scheduled_and_preempted()
    returned(scheduler, output)
    assert spans(step(scheduler))[0][0] == 12


def test_a_request_that_fits_no_pool_is_said_so() -> None:
    scheduler = scheduler_over(2)
    submit(scheduler, 0, 20)
    with pytest.raises(NeverFits, match="request 0"):
        scheduler.schedule()


def test_a_window_returns_with_steps_so_its_request_waits_for_them() -> None:
    groups = (Group("sliding", BLOCK, 4),)
    scheduler = scheduler_over(2, groups=groups, long_prefill_token_threshold=4)
    submit(scheduler, 0, 12)
    outputs = deque((scheduler.schedule(), scheduler.schedule()))
    assert scheduler.schedule().rows == ()  # its first block is still read
    returned(scheduler, outputs.popleft())
    returned(scheduler, outputs.popleft())
    assert spans(scheduler.schedule()) == {0: (8, 12)}


# Progress


GROUPS: Mapping[str, tuple[Group, ...]] = {
    "full": (Group("full", BLOCK),),
    "sliding": (Group("sliding", BLOCK, 8),),
    "both": (Group("full", BLOCK), Group("sliding", BLOCK, 8)),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("defers_returns", [False, True])
def test_every_request_that_fits_ends_in_a_bounded_number_of_calls(
    groups: str, policy: str, defers_returns: bool
) -> None:
    """At most two calls a token, once nobody submits any more."""
    rng = Random(f"{groups} {policy} {defers_returns}")
    for _ in range(20):
        usable = len(GROUPS[groups]) * rng.randint(8, 12)
        scheduler = scheduler_over(
            usable,
            groups=GROUPS[groups],
            policy=policy,
            defers_returns=defers_returns,
            max_num_seqs=rng.choice((2, 8)),
            max_num_batched_tokens=rng.choice((8, 32)),
            long_prefill_token_threshold=rng.choice((0, 4)),
        )
        total = 0
        for request_id in range(12):
            length = rng.randint(1, 20)
            submit(
                scheduler,
                request_id,
                length,
                rng.randint(0, 3),
                priority=rng.randint(0, 2),
                max_tokens=12,
            )
            total += length + 12
        in_flight: deque[SchedulerOutput] = deque()
        calls = 0
        while scheduler.requests:
            in_flight.append(scheduler.schedule())
            calls += 1
            if len(in_flight) == 2:
                returned(scheduler, in_flight.popleft(), rng.randint(0, 3))
        assert calls <= 2 * total
        while in_flight:
            returned(scheduler, in_flight.popleft())
        assert free_blocks(scheduler) == usable


def calls_of(scheduler: Scheduler) -> int:
    """Python calls that one `schedule` makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        scheduler.schedule()
    finally:
        sys.setprofile(before)
    return calls


def test_a_call_costs_what_runs_whoever_waits_and_however_large_the_pool() -> None:
    costs = set()
    for usable_blocks, num_waiting in ((16, 0), (16, 500), (5000, 0)):
        scheduler = scheduler_over(usable_blocks, max_num_seqs=2)
        for request_id in range(2 + num_waiting):
            submit(scheduler, request_id, 3, first=request_id)
        step(scheduler)
        costs.add(calls_of(scheduler))
    assert len(costs) == 1
