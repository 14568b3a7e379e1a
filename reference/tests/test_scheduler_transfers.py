"""Loads, stores, copies, states and numbers of the small scheduler, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvproof_reference import KVCacheManager, Request
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.scheduler import Scheduler
from kvproof_reference.steps import Load, SchedulerOutput
from kvproof_spec.config import Config, Group, Scheduling

BLOCK = 4
TOKEN = 7


class Remote:
    """A connector that has so many tokens of each request, and stores those that are named."""

    def __init__(self, tokens: Mapping[int, int], unordered: bool, stored: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.unordered = unordered
        self.stored = stored
        self.told: list[tuple[int, int]] = []  # (request, external tokens)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        there = self.tokens.get(request.request_id, 0) - num_computed_tokens
        return max(there, 0), self.unordered

    def update_state_after_alloc(
        self, request: Request, blocks: BlockIds, num_external_tokens: int
    ) -> None:
        self.told.append((request.request_id, num_external_tokens))

    def request_finished(self, request: Request, blocks: BlockIds) -> bool:
        return request.request_id in self.stored


def scheduler_with(
    tokens: Mapping[int, int] | None = None,
    *,
    unordered: bool = False,
    stored: tuple[int, ...] = (),
    usable_blocks: int = 16,
    groups: tuple[Group, ...] = (Group("full", BLOCK),),
    **options: Any,
) -> Scheduler:
    """`options` are those of `Scheduling`, and of `Config`."""
    config = Config(
        groups=groups,
        num_blocks=usable_blocks + 1,
        max_model_len=128,
        defers_returns=options.pop("defers_returns", False),
        partial_boundary=options.pop("partial_boundary", None),
        clears=options.pop("clears", False),
        scheduling=replace(Scheduling(whole_sequence_check=False), **options),
    )
    manager = KVCacheManager(
        groups,
        config.num_blocks,
        max_model_len=128,
        partial_boundary=config.partial_boundary,
        clears=config.clears,
    )
    return Scheduler(manager, config, Remote(tokens or {}, unordered, stored))


def submit(scheduler: Scheduler, request_id: int, num_tokens: int, **options: Any) -> Request:
    """A prompt of its own, or of the tokens from `first` on."""
    first = options.pop("first", 100 * request_id)
    request = Request(request_id, range(first, first + num_tokens))
    scheduler.add_request(request, **options)
    return request


def returned(scheduler: Scheduler, output: SchedulerOutput, **told: Any) -> tuple[int, ...]:
    sampled = {row.request_id: TOKEN for row in output.rows if row.samples}
    return scheduler.update_from_output(output, sampled, **told).finished


def step(scheduler: Scheduler, **told: Any) -> SchedulerOutput:
    """A step that returns at once, with word of transfers."""
    output = scheduler.schedule()
    returned(scheduler, output, **told)
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


def free_blocks(scheduler: Scheduler) -> int:
    return scheduler.manager.block_pool.get_num_free_blocks()


# Loads


def test_ordered_tokens_come_with_the_first_step_and_can_be_found_in_it() -> None:
    scheduler = scheduler_with({0: 8})
    submit(scheduler, 0, 10)
    submit(scheduler, 1, 10, first=0)
    output = step(scheduler)
    assert spans(output) == {0: (8, 10), 1: (8, 10)}
    assert [row.num_external_tokens for row in output.rows] == [8, 0]


def test_an_unordered_load_holds_its_blocks_and_is_no_row() -> None:
    scheduler = scheduler_with({0: 8}, unordered=True)
    submit(scheduler, 0, 10)
    output = step(scheduler)
    assert (output.rows, output.loads) == ((), (Load(0, 0, 8),))
    assert scheduler.manager.get_block_ids(0) == ((1, 2),)
    assert step(scheduler).rows == ()


def test_a_request_goes_on_behind_its_load_with_its_whole_table() -> None:
    scheduler = scheduler_with({0: 8}, unordered=True)
    submit(scheduler, 0, 10)
    step(scheduler, finished_recving=[0])
    (row,) = step(scheduler).rows
    assert (row.kind, row.num_computed_tokens, row.block_ids) == ("new", 8, ((1, 2, 3),))
    assert row.num_external_tokens == 0


def test_a_load_of_every_token_leaves_the_last_one_to_compute() -> None:
    scheduler = scheduler_with({0: 8}, unordered=True)
    submit(scheduler, 0, 8)
    step(scheduler, finished_recving=[0])
    (row,) = step(scheduler).rows
    assert (row.num_computed_tokens, row.num_scheduled_tokens, row.samples) == (7, 1, True)


def test_nobody_finds_what_is_still_being_loaded() -> None:
    scheduler = scheduler_with({0: 8}, unordered=True)
    submit(scheduler, 0, 10)
    step(scheduler)
    submit(scheduler, 1, 10, first=0)
    assert spans(step(scheduler, finished_recving=[0]))[1] == (0, 10)
    submit(scheduler, 2, 10, first=0)
    assert spans(step(scheduler))[2] == (8, 10)


def test_a_load_begins_behind_what_the_cache_has() -> None:
    scheduler = scheduler_with({1: 8}, unordered=True)
    submit(scheduler, 0, 5)
    step(scheduler)
    submit(scheduler, 1, 10, first=0)
    assert scheduler.schedule().loads == (Load(1, 4, 4),)


def test_a_load_takes_the_place_of_a_running_request() -> None:
    scheduler = scheduler_with({0: 4}, unordered=True, max_num_seqs=1)
    submit(scheduler, 0, 5)
    submit(scheduler, 1, 5)
    assert step(scheduler).rows == ()
    assert step(scheduler, finished_recving=[0]).rows == ()
    assert list(spans(step(scheduler))) == [0]


def test_the_blocks_of_a_request_that_leaves_while_it_loads_are_kept_until_the_load_ends() -> None:
    scheduler = scheduler_with({0: 8}, unordered=True)
    submit(scheduler, 0, 10)
    output = scheduler.schedule()
    scheduler.finish_request(0)
    assert sorted(scheduler.manager.deferred_blocks()) == [1, 2]
    assert free_blocks(scheduler) == 14
    returned(scheduler, output, finished_recving=[0])
    assert scheduler.manager.deferred_blocks() == ()
    assert free_blocks(scheduler) == 16
    assert scheduler.schedule().finished == ()  # the worker never had a row of it


def test_who_has_loaded_gives_way_like_anybody() -> None:
    scheduler = scheduler_with({1: 4}, unordered=True, usable_blocks=2)
    submit(scheduler, 0, 3)
    submit(scheduler, 1, 5, priority=9)
    step(scheduler, finished_recving=[1])
    step(scheduler)
    output = step(scheduler)
    assert (output.preempted, list(spans(output))) == ((1,), [0])


def test_a_request_that_lacks_blocks_waits_for_a_load() -> None:
    scheduler = scheduler_with({1: 4}, unordered=True, usable_blocks=2)
    submit(scheduler, 0, 4)
    submit(scheduler, 1, 5, priority=9)
    step(scheduler)
    output = step(scheduler, finished_recving=[1])
    assert (output.rows, output.preempted) == ((), ())
    assert step(scheduler).preempted == (1,)


# Stores


def test_the_blocks_of_a_request_that_is_stored_are_kept_until_the_store_ends() -> None:
    scheduler = scheduler_with(stored=(0,))
    submit(scheduler, 0, 5, max_tokens=1)
    ended = scheduler.update_from_output(scheduler.schedule(), {0: TOKEN})
    assert (ended.finished, ended.stored) == ((0,), (0,))
    assert free_blocks(scheduler) == 14
    step(scheduler, finished_sending=[0])
    assert free_blocks(scheduler) == 16


def test_a_store_and_a_step_in_flight_keep_the_blocks_until_both_have_ended() -> None:
    scheduler = scheduler_with(stored=(0,), stop_token=TOKEN, defers_returns=True)
    submit(scheduler, 0, 2)
    first, second = scheduler.schedule(), scheduler.schedule()
    returned(scheduler, first)
    assert scheduler.manager.deferred_blocks() == (1,)
    returned(scheduler, second)
    assert scheduler.manager.deferred_blocks() == (1,)
    step(scheduler, finished_sending=[0])
    assert free_blocks(scheduler) == 16


def test_an_aborted_request_is_not_stored() -> None:
    scheduler = scheduler_with(stored=(0,))
    submit(scheduler, 0, 5)
    step(scheduler)
    scheduler.finish_request(0)
    assert free_blocks(scheduler) == 16


# States


STATES = (Group("full", BLOCK), Group("state", BLOCK))


def test_chunks_end_where_a_state_is_saved() -> None:
    scheduler = scheduler_with(groups=STATES, long_prefill_token_threshold=6, usable_blocks=32)
    submit(scheduler, 0, 11)
    ends = [spans(step(scheduler))[0] for _ in range(3)]
    assert ends == [(0, 4), (4, 8), (8, 11)]


def test_a_prompt_ends_with_a_boundary_inside_a_block_of_its_own() -> None:
    scheduler = scheduler_with(groups=STATES, partial_boundary=2, usable_blocks=32)
    submit(scheduler, 0, 7)
    assert [spans(step(scheduler))[0] for _ in range(3)] == [(0, 4), (4, 6), (6, 7)]


def test_a_step_that_reaches_no_state_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="too small"):
        scheduler_with(groups=STATES, long_prefill_token_threshold=2)


@pytest.mark.parametrize("defers_returns", [False, True])
def test_a_copy_goes_with_its_step_and_may_keep_its_ends(defers_returns: bool) -> None:
    scheduler = scheduler_with(
        groups=STATES, partial_boundary=2, usable_blocks=32, defers_returns=defers_returns
    )
    submit(scheduler, 0, 7)
    step(scheduler)
    step(scheduler)
    output = scheduler.schedule()  # the index gets a copy of the state after six tokens
    (copy,) = output.copies
    assert copy.source in scheduler.manager.get_block_ids(0)[1]
    ends = (copy.source, copy.destination)
    assert scheduler.manager.deferred_blocks() == (ends if defers_returns else ())
    returned(scheduler, output)
    assert scheduler.manager.deferred_blocks() == ()


def test_pages_handed_out_are_cleared_with_the_step_but_not_those_of_a_load() -> None:
    scheduler = scheduler_with({0: 4}, unordered=True, clears=True)
    submit(scheduler, 0, 5)
    submit(scheduler, 1, 5)
    assert step(scheduler).cleared == (2, 3)


# Numbers


def test_a_hit_and_a_query_count_once_at_admission() -> None:
    scheduler = scheduler_with(usable_blocks=4)
    submit(scheduler, 0, 9, max_tokens=1)
    submit(scheduler, 1, 9, first=0, max_tokens=1)
    submit(scheduler, 2, 9, max_tokens=1)  # there is no room for it yet
    step(scheduler)
    assert (scheduler.stats.queries, scheduler.stats.hits) == (18, 8)


def test_who_is_preempted_counts_and_queries_again() -> None:
    scheduler = scheduler_with(usable_blocks=2)
    submit(scheduler, 0, 3)
    submit(scheduler, 1, 3)
    for _ in range(3):
        step(scheduler)
    assert (scheduler.stats.preemptions, scheduler.stats.queries) == (1, 6)
    scheduler.finish_request(0)
    step(scheduler)
    assert scheduler.stats.queries == 6 + 5


def test_usage_does_not_count_what_is_only_findable() -> None:
    scheduler = scheduler_with()
    submit(scheduler, 0, 9, max_tokens=1)
    output = scheduler.schedule()
    assert scheduler.num_used_blocks() == 3
    returned(scheduler, output)
    assert scheduler.num_used_blocks() == 0
