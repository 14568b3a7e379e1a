"""The core, one idea at a time: content, pages, segments, steps that outlive their requests.

It ends with the article's walk-through at the exact level, in ids and free order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

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
    Segments,
    Submit,
    Trim,
)
from kvproof_spec.answers import (
    Answer,
    Done,
    Forgotten,
    Granted,
    Hit,
    Issued,
    Refused,
    Returned,
    Trimmed,
)
from kvproof_spec.config import Config, Group
from kvproof_spec.derived import (
    needed_in_flight,
    outstanding_tokens,
    processed_tokens,
    references,
    used_by_operations,
)
from kvproof_spec.judgement import Violation
from kvproof_spec.oracle import Oracle
from kvproof_spec.pages import PageWriter, cells, needed_cells, read_page
from kvproof_spec.policies import POLICIES
from kvproof_spec.prefix import Prefix, content_of, extend_content
from kvproof_spec.state import ActionDisabled, State, initial_state

FULL = Config((Group("full", 2),), num_blocks=6)
WINDOW = Config((Group("sliding", 2, 3),), num_blocks=6)
BOTH = Config((Group("full", 2), Group("sliding", 2, 3)), num_blocks=9)

Move = tuple[Action, Answer]


def after(config: Config, moves: Iterable[Move]) -> State:
    """The state after a legal run: no rule is broken."""
    oracle = Oracle(config)
    for action, answer in moves:
        oracle.step(action, answer)
    return oracle.state


def submit(request: int, *symbols: int) -> Move:
    return Submit(request, symbols), Done()


def nothing_found(request: int) -> Move:
    return Lookup(request), Hit(0, ((),))


def returned(step: int, *outputs: Output) -> Move:
    return CompleteStep(step, outputs), Returned()


def promised(state: State, block: int, offset: int, group: int = 0) -> tuple[Hashable, ...] | None:
    found = read_page(state.promise, block, group, offset)
    return None if found is None else found.symbols()


def written(state: State, block: int, offset: int, group: int = 0) -> tuple[Hashable, ...] | None:
    found = read_page(state.memory, block, group, offset)
    return None if found is None else found.symbols()


ISSUED: Move = (Issue(), Issued())
ASKED: tuple[Move, ...] = (submit(0, 1, 2, 3), nothing_found(0))
GRANTED = (*ASKED, (Allocate(0, new=3), Granted(((1, 2),))))
IN_FLIGHT = (*GRANTED, ISSUED)
COMPUTED = (*IN_FLIGHT, returned(0, Output(0, 9)))
PREEMPTED = (*IN_FLIGHT, (Release(0, "preempt"), Returned()))


# Content


def test_equal_prefixes_are_one_node_and_others_are_not() -> None:
    root = Prefix.root()
    assert root.extend(1).extend(2) is root.extend(1).extend(2)
    assert root.extend(1).extend(2) is not root.extend(2)
    assert root.extend(2) is not root.extend(1).extend(2), "the last symbol alone says nothing"
    assert root.extend(1).extend(2).symbols() == (1, 2)
    assert root.extend(1).extend(2).length == 2
    assert root.symbols() == ()


def test_prefixes_of_two_tries_are_never_equal() -> None:
    assert Prefix.root().extend(1) != Prefix.root().extend(1)


def test_content_is_the_prefix_at_each_position() -> None:
    root = Prefix.root()
    content = content_of(root, (1, 2, 1))
    assert [node.symbols() for node in content] == [(1,), (1, 2), (1, 2, 1)]
    assert extend_content(content[:1], (2, 1)) == content
    assert content_of(root, ()) == ()


def test_requests_of_one_run_share_their_prefixes() -> None:
    state = after(FULL, (submit(0, 1, 2, 3), submit(1, 1, 2, 4)))
    first, second = state.find(0).content, state.find(1).content
    assert first[1] is second[1]
    assert first[2] is not second[2]


# Pages


def test_another_groups_write_destroys_the_page() -> None:
    groups, empty = BOTH.groups, initial_state(BOTH).memory
    one, two = content_of(Prefix.root(), (1, 2))
    first = PageWriter(groups, empty)
    first.write(3, 0, 0, one)
    first.write(3, 0, 1, two)
    before = first.pages()
    second = PageWriter(groups, before)
    second.write(3, 1, 0, one)
    pages = second.pages()
    assert [read_page(before, 3, 0, offset) for offset in (0, 1)] == [one, two]
    assert [read_page(pages, 3, 0, offset) for offset in (0, 1)] == [None, None]
    assert [read_page(pages, 3, 1, offset) for offset in (0, 1)] == [one, None]


def test_a_group_finds_nothing_of_its_own_when_it_writes_after_another() -> None:
    (one,) = content_of(Prefix.root(), (1,))
    writer = PageWriter(BOTH.groups, initial_state(BOTH).memory)
    for group, offset in ((0, 0), (1, 0), (0, 1)):
        writer.write(3, group, offset, one)
    assert read_page(writer.pages(), 3, 0, 0) is None
    assert read_page(writer.pages(), 3, 0, 1) is one


def test_what_is_written_in_two_transitions_stands_side_by_side() -> None:
    (one,) = content_of(Prefix.root(), (1,))
    pages = initial_state(FULL).memory
    for offset in (0, 1):
        writer = PageWriter(FULL.groups, pages)
        writer.write(3, 0, offset, one)
        pages = writer.pages()
    assert [read_page(pages, 3, 0, offset) for offset in (0, 1)] == [one, one]


def test_a_cleared_page_is_empty_until_it_is_written() -> None:
    (one,) = content_of(Prefix.root(), (1,))
    writer = PageWriter(FULL.groups, initial_state(FULL).memory)
    writer.write(3, 0, 0, one)
    writer.clear(3)
    assert read_page(writer.pages(), 3, 0, 0) is None
    writer.write(3, 0, 1, one)
    assert [read_page(writer.pages(), 3, 0, offset) for offset in (0, 1)] == [None, one]


def test_pages_that_hold_the_same_are_equal_and_hash_alike() -> None:
    (one,) = content_of(Prefix.root(), (1,))
    empty = initial_state(FULL).memory
    made = []
    for blocks in ((1, 2), (2, 1)):
        writer = PageWriter(FULL.groups, empty)
        for block in blocks:
            writer.write(block, 0, 0, one)
        made.append(writer.pages())
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])
    assert made[0] != empty


def test_cells_pass_over_the_null_block_and_what_is_beyond_the_table() -> None:
    assert list(cells(FULL.groups, ((0, 4),), 1, 9)) == [(4, 0, 0, 2), (4, 0, 1, 3)]


@pytest.mark.parametrize(
    ("start", "end", "positions"),
    [
        (0, 2, {0: [0, 1], 1: [0, 1]}),
        (3, 3, {0: [0, 1, 2], 1: [1, 2]}),  # a hit of 3: the window of the position after it
        (3, 5, {0: [0, 1, 2, 3, 4], 1: [1, 2, 3, 4]}),
        (5, 6, {0: [0, 1, 2, 3, 4, 5], 1: [3, 4, 5]}),
    ],
)
def test_a_window_needs_only_its_own_positions(
    start: int, end: int, positions: dict[int, list[int]]
) -> None:
    needed = list(needed_cells(BOTH.groups, ((1, 2, 3), (4, 5, 6)), start, end))
    for group, wanted in positions.items():
        assert [cell[3] for cell in needed if cell[1] == group] == wanted


@pytest.mark.parametrize(
    ("group", "processed", "first"),
    [
        (Group("full", 4), 9, 0),
        (Group("sliding", 4, 8), 7, 0),
        (Group("sliding", 4, 8), 8, 1),
        (Group("sliding", 4, 8), 10, 3),
        (Group("sliding", 4, 1), 5, 5),
    ],
)
def test_the_first_needed_position_is_where_the_next_tokens_window_begins(
    group: Group, processed: int, first: int
) -> None:
    assert group.first_needed(processed) == first
    assert group.first_needed_block(processed) == first // group.block_size


def test_a_hit_ends_where_every_group_can_end() -> None:
    assert Config((Group("full", 4), Group("sliding", 6, 3)), 9).boundary == 12


# Segments


def test_the_segments_of_an_admission_follow_each_other() -> None:
    state = after(FULL, (*COMPUTED, submit(1, 1, 2, 3, 4, 5, 6, 7), (Lookup(1), Hit(2, ((1,),)))))
    asked = Allocate(1, new=2, external=2, lookahead=1)
    assert asked.segments(state) == Segments(
        computed=0, local=2, total=4, restart=4, target=6, reserved=7, processed=4
    )


def test_a_running_request_starts_where_it_has_computed_and_is_trimmed_by_what_is_back() -> None:
    decoding = (*COMPUTED, (Allocate(0, new=1), Granted(((1, 2),))), ISSUED)
    state = after(FULL, decoding)
    assert Allocate(0, new=1).segments(state) == Segments(
        computed=4, local=4, total=4, restart=4, target=5, reserved=5, processed=3
    )
    assert processed_tokens(state, state.find(0)) == 3
    assert outstanding_tokens(state, state.find(0)) == 1


def test_a_load_of_every_known_token_restarts_one_before_its_end() -> None:
    state = after(FULL, (submit(0, 1, 2, 3, 4), nothing_found(0)))
    assert Allocate(0, 0, external=4, unordered=True).segments(state) == Segments(
        computed=0, local=0, total=4, restart=3, target=4, reserved=4, processed=3
    )
    assert Allocate(0, 0, external=2, unordered=True).segments(state).restart == 2


def test_nothing_is_reserved_beyond_the_longest_sequence() -> None:
    state = after(replace(FULL, max_model_len=4), ASKED)
    assert Allocate(0, new=3, lookahead=5).segments(state).reserved == 4


# Progress


def test_a_step_computes_when_issued_and_is_written_when_it_returns() -> None:
    issued, returned_ = after(FULL, IN_FLIGHT), after(FULL, COMPUTED)
    assert issued.find(0).computed == returned_.find(0).computed == 3
    assert written(issued, 1, 0) is None
    assert written(returned_, 1, 0) == (1,)
    assert written(returned_, 2, 0) == (1, 2, 3)
    assert returned_.find(0).known == 4
    assert needed_in_flight(issued) == {1, 2}
    assert needed_in_flight(returned_) == set()


def test_a_sampled_token_is_promised_once_a_step_computes_it() -> None:
    assert promised(after(FULL, COMPUTED), 2, 1) is None
    granted = (*COMPUTED, (Allocate(0, new=1), Granted(((1, 2),))))
    assert promised(after(FULL, granted), 2, 1) == (1, 2, 3, 9)


def test_a_token_sampled_while_the_next_step_computes_it_is_promised_when_known() -> None:
    ahead = (*IN_FLIGHT, (Allocate(0, new=1), Granted(((1, 2),))), ISSUED)
    assert promised(after(FULL, ahead), 2, 1) is None
    state = after(FULL, (*ahead, returned(0, Output(0, 9))))
    assert promised(state, 2, 1) == (1, 2, 3, 9)
    assert state.steps[0].rows[0].content == state.find(0).content, "the row has learned it too"


def test_rejected_drafts_take_computed_back_and_accepted_ones_are_known() -> None:
    drafted: tuple[Move, ...] = (
        *COMPUTED,
        (Allocate(0, new=3, drafts=(8, 7)), Granted(((1, 2, 3),))),
        ISSUED,
    )
    assert after(FULL, drafted).find(0).computed == 6
    assert promised(after(FULL, drafted), 3, 0) is None
    state = after(FULL, (*drafted, returned(1, Output(0, 5, accepted=1))))
    assert state.find(0).computed == 5
    assert state.find(0).content[-1].symbols() == (1, 2, 3, 9, 8, 5)
    assert promised(state, 3, 0) == (1, 2, 3, 9, 8)
    assert promised(state, 3, 1) is None
    assert written(state, 3, 1) == (1, 2, 3, 9, 8, 7), "a rejected draft was written all the same"


def test_stale_output_extends_the_symbols_and_not_the_computed_count() -> None:
    state = after(FULL, (*PREEMPTED, returned(0, Output(0, 9))))
    request = state.find(0)
    assert [node.symbol for node in request.content] == [1, 2, 3, 9]
    assert (request.computed, request.status, request.admission) == (0, "preempted", 1)
    assert written(state, 1, 1) == (1, 2), "its step was executed"


def test_stale_drafts_that_are_rejected_take_nothing_back() -> None:
    preempted: tuple[Move, ...] = (
        *COMPUTED,
        (Allocate(0, new=3, drafts=(8, 7)), Granted(((1, 2, 3),))),
        ISSUED,
        (Release(0, "preempt"), Returned()),
        returned(1, Output(0, 5)),
    )
    request = after(FULL, preempted).find(0)
    assert [node.symbol for node in request.content] == [1, 2, 3, 9, 5]
    assert request.computed == 0


def test_a_step_writes_through_its_own_tables_after_its_request_has_left() -> None:
    left = (*IN_FLIGHT, (Release(0, "abort"), Returned()), returned(0, Output(0, 9)))
    state = after(FULL, left)
    assert state.get(0) is None
    assert written(state, 2, 0) == (1, 2, 3)
    assert promised(state, 1, 1) == (1, 2), "and what it wrote may be hit"


def test_blocks_handed_out_again_promise_nothing_of_before() -> None:
    reused = (
        *COMPUTED,
        (Release(0, "finish"), Returned()),
        submit(1, 5),
        nothing_found(1),
        (Allocate(1, new=1), Granted(((1,),))),
    )
    state = after(FULL, reused)
    assert promised(state, 1, 0) == (5,)
    assert promised(state, 1, 1) is None
    assert promised(state, 2, 0) == (1, 2, 3), "freeing alone erases nothing"
    assert written(state, 1, 0) == (1,), "memory is what was executed"


# Promises withdrawn


def test_what_is_never_issued_is_promised_no_more() -> None:
    assert promised(after(FULL, GRANTED), 1, 1) == (1, 2)
    state = after(FULL, (*GRANTED, (Release(0, "abort"), Returned())))
    assert [promised(state, block, 0) for block in (1, 2)] == [None, None]


def test_what_was_issued_before_stays_promised_when_the_rest_is_withdrawn() -> None:
    again = (*COMPUTED, (Allocate(0, new=1), Granted(((1, 2),))))
    state = after(FULL, (*again, (Release(0, "preempt"), Returned())))
    assert promised(state, 2, 0) == (1, 2, 3)
    assert promised(state, 2, 1) is None


def test_a_request_cannot_leave_unissued_while_another_relies_on_it() -> None:
    hit: tuple[Move, ...] = (
        submit(1, 1, 2, 7),
        (Lookup(1), Hit(2, ((1,),))),
        (Allocate(1, new=1), Granted(((1, 3),))),
    )
    state = after(FULL, (*GRANTED, *hit))
    with pytest.raises(ActionDisabled, match="another request relies on"):
        Release(0, "abort").check(state)
    Release(0, "abort").check(after(FULL, (*GRANTED, *hit, ISSUED)))


LOADING: tuple[Move, ...] = (
    submit(0, 1, 2, 3, 4, 5),
    nothing_found(0),
    (Allocate(0, new=0, external=4, unordered=True), Granted(((1, 2),))),
)


def test_a_load_promises_when_it_ends_and_only_what_it_brought() -> None:
    state = after(FULL, LOADING)
    assert [promised(state, block, 0) for block in (1, 2)] == [None, None]
    assert used_by_operations(state) == {1, 2}
    state = after(FULL, (*LOADING, (CompleteLoad(0, 2), Done())))
    assert [promised(state, block, 1) for block in (1, 2)] == [(1, 2), None]
    assert [written(state, block, 1) for block in (1, 2)] == [(1, 2), None]
    assert (state.find(0).status, state.find(0).computed) == ("running", 2)
    assert used_by_operations(state) == set()


def test_a_load_that_fails_altogether_starts_its_request_anew() -> None:
    state = after(FULL, (*LOADING, (CompleteLoad(0, 0), Done())))
    request = state.find(0)
    assert (request.status, request.computed, request.tables) == ("waiting", 0, ((),))
    assert references(state) == {}


def test_a_load_of_every_token_leaves_the_last_to_compute() -> None:
    whole: tuple[Move, ...] = (submit(0, 1, 2, 3, 4), *LOADING[1:], (CompleteLoad(0, 4), Done()))
    assert after(FULL, whole).find(0).computed == 3


def test_ordered_external_tokens_come_with_the_next_step() -> None:
    asked: tuple[Move, ...] = (
        *LOADING[:2],
        (Allocate(0, new=1, external=4), Granted(((1, 2, 3),))),
    )
    state = after(FULL, (*asked, ISSUED))
    assert promised(state, 2, 1) == (1, 2, 3, 4)
    assert written(state, 2, 1) is None
    state = after(FULL, (*asked, ISSUED, returned(0, Output(0, 9))))
    assert written(state, 2, 1) == (1, 2, 3, 4)


def test_forgetting_blocks_keeps_their_promise_and_forgetting_everything_does_not() -> None:
    state = after(FULL, (*COMPUTED, (Forget((1,)), Forgotten(True))))
    assert promised(state, 1, 0) == (1,)
    state = after(FULL, (*COMPUTED, (Forget(None), Forgotten(False))))
    assert promised(state, 1, 0) == (1,)
    state = after(FULL, (*COMPUTED, (Forget(None), Forgotten(True))))
    assert promised(state, 1, 0) is None
    assert written(state, 1, 0) == (1,)


# Guards


@pytest.mark.parametrize(
    ("moves", "action", "reason"),
    [
        ((), Submit(0, ()), "a prompt has at least one token"),
        ((), Submit(1, (1,)), "the next request is 0"),
        ((), Submit(0, (1,) * 256), "the prompt is too long"),
        ((), Lookup(0), "no request 0"),
        (COMPUTED, Lookup(0), "only an unadmitted request"),
        (ASKED[:1], Allocate(0, 1), "uses the Lookup just before"),
        ((*ASKED, submit(1, 5)), Allocate(0, 1), "uses the Lookup just before"),
        ((*ASKED, (Forget(()), Forgotten(True))), Allocate(0, 1), "uses the Lookup just before"),
        (ASKED, Allocate(0, 0), "new tokens, or an unordered load"),
        (ASKED, Allocate(0, 1, external=1), "external tokens in whole blocks of every group"),
        (ASKED, Allocate(0, 4), "more tokens than will be known"),
        (ASKED, Allocate(0, 3, drafts=(8,)), "drafts follow the last token to come"),
        (ASKED, Allocate(0, 0, unordered=True), "a load has external tokens"),
        (GRANTED, Allocate(0, 1), "has not been issued"),
        (COMPUTED, Allocate(0, 1, whole_sequence=True), "only at admission"),
        (LOADING, Release(0, "preempt"), "its load has not returned"),
        (LOADING, Allocate(0, 1), "its load has not returned"),
        (LOADING, CompleteLoad(0, 1), "delivered in whole blocks"),
        (LOADING, CompleteLoad(0, 6), "not what a load can leave"),
        (COMPUTED, CompleteLoad(0, 2), "no load under way"),
        (GRANTED, CompleteStep(0, ()), "no step is in flight"),
        (IN_FLIGHT, CompleteStep(1, (Output(0, 9),)), "steps return in order: 0 is next"),
        (IN_FLIGHT, CompleteStep(0, ()), "one output for each row that samples"),
        (IN_FLIGHT, CompleteStep(0, (Output(0, 9),) * 2), "one output for each row that samples"),
        (IN_FLIGHT, CompleteStep(0, (Output(0, 9, 1),)), "more drafts accepted"),
        (COMPUTED, Publish(0, 4), "beyond what is issued"),
        (ASKED, Publish(0, 1), "only a running request publishes"),
        (ASKED, Trim(0), "only a running request is trimmed"),
        (ASKED, Release(0, "preempt"), "only a running request is preempted"),
        ((), Forget((0,)), "not a normal block"),
        ((), Forget((6,)), "not a normal block"),
    ],
)
def test_what_no_engine_may_ask_is_disabled(
    moves: tuple[Move, ...], action: Action, reason: str
) -> None:
    state = after(FULL, moves)
    with pytest.raises(ActionDisabled, match=reason):
        action.check(state)


def test_a_disabled_action_is_not_judged() -> None:
    oracle = Oracle(FULL)
    before = oracle.state
    with pytest.raises(ActionDisabled):
        oracle.step(Lookup(0), Hit(0, ((),)))
    assert oracle.state is before


# Orderings


def test_under_strict_ordering_steps_use_their_blocks_as_loads_do() -> None:
    left = (*IN_FLIGHT, (Release(0, "abort"), Returned()))
    assert used_by_operations(after(FULL, left)) == set()
    strict = after(replace(FULL, ordering="strict"), left)
    assert used_by_operations(strict) == needed_in_flight(strict) == {1, 2}


def test_a_block_in_flight_is_reused_in_order_of_the_steps_or_not_at_all() -> None:
    reused: tuple[Move, ...] = (
        *IN_FLIGHT,
        (Release(0, "abort"), Returned()),
        submit(1, 5, 6),
        nothing_found(1),
        (Allocate(1, new=2), Granted(((1,),))),
    )
    ended = (*reused, ISSUED, returned(0, Output(0, 9)), returned(1, Output(1, 9)))
    assert written(after(FULL, ended), 1, 0) == (5,)
    with pytest.raises(Violation, match="I4: block 1"):
        after(replace(FULL, ordering="strict"), reused)


def test_left_of_the_window_a_step_in_flight_uses_nothing() -> None:
    decoding: tuple[Move, ...] = (
        submit(0, 1, 2, 3, 4, 5),
        nothing_found(0),
        (Allocate(0, new=5), Granted(((1, 2, 3),))),
        ISSUED,
        returned(0, Output(0, 9)),
        (Allocate(0, new=1), Granted(((1, 2, 3),))),
        ISSUED,
        (Trim(0), Trimmed(((0, 2, 3),))),
    )
    assert needed_in_flight(after(WINDOW, decoding)) == {2, 3}


# The article's walk-through


class Walk:
    """The policy's own answers, judged at the exact level."""

    def __init__(self, config: Config) -> None:
        self.answers = POLICIES["vllm-0.32"](config, ())
        self.oracle = Oracle(config, policy=POLICIES["vllm-0.32"](config, ()))

    def do(self, action: Action) -> Answer:
        answer = self.answers.predict(self.oracle.state, action)
        if answer is None:
            answer = Issued() if isinstance(action, Issue) else Done()
        self.oracle.step(action, answer, self.answers.snapshot())
        return answer

    def step(self, number: int, request: int, symbol: int) -> None:
        self.do(Issue())
        self.do(CompleteStep(number, (Output(request, symbol),)))

    @property
    def free(self) -> list[int]:
        return list(self.answers.snapshot().free_order)

    @property
    def findable(self) -> list[int]:
        """The blocks that have a key."""
        keys = self.answers.snapshot().keys or ()
        return sorted(block for _, copies in keys for block in copies)


SYSTEM = tuple(range(12))  # three full blocks that R0 and R1 share
P, Q = 100, 101


def article_up_to_r1() -> Walk:
    walk = Walk(Config((Group("full", 4),), num_blocks=11))
    walk.do(Submit(0, (*SYSTEM, 20, 21, 22)))
    walk.do(Lookup(0))
    assert walk.do(Allocate(0, new=15)) == Granted(((1, 2, 3, 4),), ((1, 2, 3, 4),))
    walk.step(0, 0, P)
    assert walk.do(Allocate(0, new=1)) == Granted(((1, 2, 3, 4),), ((),))
    walk.step(1, 0, Q)
    assert walk.do(Allocate(0, new=1)) == Granted(((1, 2, 3, 4, 5),), ((5,),))
    walk.step(2, 0, 102)
    assert walk.findable == [1, 2, 3, 4], "block 5 is not full"
    walk.do(Release(0, "finish"))
    return walk


def test_the_articles_walk_through_has_its_ids_and_its_free_order() -> None:
    walk = article_up_to_r1()
    assert walk.free == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1], "unhashed first, then from the end"

    walk.do(Submit(1, (*SYSTEM, 30, 31)))
    assert walk.do(Lookup(1)) == Hit(12, ((1, 2, 3),))
    assert walk.do(Allocate(1, new=2)) == Granted(((1, 2, 3, 5),), ((5,),))
    assert walk.free == [6, 7, 8, 9, 10, 4]
    walk.step(3, 1, 103)

    walk.do(Submit(2, tuple(range(200, 228))))
    assert walk.do(Lookup(2)) == Hit(0, ((),))
    findable = walk.findable
    assert walk.do(Allocate(2, new=28)) == Refused(((),)), "7 of 6"
    assert walk.free == [6, 7, 8, 9, 10, 4]
    assert walk.findable == findable == [1, 2, 3, 4]

    walk.do(Submit(3, tuple(range(300, 324))))
    assert walk.do(Lookup(3)) == Hit(0, ((),))
    taken = (6, 7, 8, 9, 10, 4)
    assert walk.do(Allocate(3, new=24)) == Granted((taken,), (taken,))
    assert walk.free == []

    walk.do(Submit(4, (*SYSTEM, 20, 21, 22, P, 40)))
    assert walk.do(Lookup(4)) == Hit(12, ((1, 2, 3),)), "block 4's key is gone"


def test_before_block_4_is_taken_its_key_would_still_hit() -> None:
    walk = article_up_to_r1()
    walk.do(Submit(1, (*SYSTEM, 20, 21, 22, P, 40)))
    assert walk.do(Lookup(1)) == Hit(16, ((1, 2, 3, 4),))


def test_at_the_exact_level_an_equally_good_answer_is_rejected() -> None:
    config = Config((Group("full", 4),), num_blocks=11)
    for exact in (False, True):
        policy = POLICIES["vllm-0.32"](config, ()) if exact else None
        oracle = Oracle(config, policy=policy)
        oracle.step(Submit(0, (1, 2)), Done())
        oracle.step(Lookup(0), Hit(0, ((),)))
        if not exact:
            oracle.step(Allocate(0, new=2), Granted(((2,),)))
            continue
        with pytest.raises(Violation, match=r"exact: vllm-0\.32 answers Granted"):
            oracle.step(Allocate(0, new=2), Granted(((2,),)))


def test_at_the_exact_level_another_free_order_is_rejected() -> None:
    walk = article_up_to_r1()
    snapshot = walk.answers.snapshot()
    other = replace(snapshot, free_order=tuple(sorted(snapshot.free_order)))
    with pytest.raises(Violation, match=r"exact: the free order of vllm-0\.32 is"):
        walk.oracle.step(Submit(1, (1,)), Done(), other)
