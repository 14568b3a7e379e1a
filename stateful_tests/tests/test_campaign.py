"""A campaign: the same runs from the same seed, every rule's first violation, honest counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from kvproof_spec.actions import Submit
from kvproof_spec.answers import Done, Snapshot
from kvproof_spec.choices import FEATURES, KINDS, choices
from kvproof_spec.config import KINDS as GROUP_KINDS
from kvproof_spec.config import Config, Group
from kvproof_spec.trace import Header, Line, Trace, Verdict, dump_trace, read_trace
from kvproof_stateful import shrinking
from kvproof_stateful.campaign import Budget, Campaign, Found, Result
from kvproof_stateful.coverage import GOALS, Coverage
from kvproof_stateful.plan import (
    WEIGHTS,
    Asked,
    ImpossibleConfig,
    draw_scope,
    parse_groups,
    weights,
)
from kvproof_stateful.running import Judging, Run
from kvproof_stateful.target import Hello, Target, UnsupportedConfig
from kvproof_stateful.targets.plain import PlainTarget

FULL = Asked(groups=(Group("full", 1),), num_blocks=6)


class ShowsAStranger(PlainTarget):
    """Once a step was issued it shows the tables of a request that nobody submitted (I5)."""

    def snapshot(self) -> Snapshot:
        shown = super().snapshot()
        stranger = ((99, ((),) * len(self.config.groups)),)
        return replace(shown, tables=stranger) if self.issued else shown


class HasTwoFaults(ShowsAStranger):
    """With three requests the list of free blocks lacks one, too (I1)."""

    def snapshot(self) -> Snapshot:
        shown = super().snapshot()
        return replace(shown, free_order=shown.free_order[len(self.requests) > 2 :])


@pytest.fixture
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what is found as it is, which takes no time."""

    monkeypatch.setattr(shrinking, "shrink", lambda smallest: None)


def campaign(target: Target, actions: int = 400, seed: int = 0, asked: Asked = FULL) -> Campaign:
    return Campaign(target, Judging(), asked, Budget(actions=actions), seed=seed)


def bytes_of(result: Result) -> list[list[str]]:
    return [list(dump_trace(found.trace)) for found in result.found]


@pytest.mark.usefixtures("unshrunk")
def test_the_same_seed_finds_the_same_traces_and_counts_the_same() -> None:
    first, again = campaign(HasTwoFaults()).run(), campaign(HasTwoFaults()).run()
    other = campaign(HasTwoFaults(), seed=1).run()
    assert bytes_of(first) == bytes_of(again)
    assert first.coverage == again.coverage
    assert bytes_of(first) != bytes_of(other)
    assert first.coverage != other.coverage


@pytest.mark.usefixtures("unshrunk")
def test_what_else_the_target_was_used_for_changes_nothing() -> None:
    used = HasTwoFaults()
    campaign(used, seed=5).run()
    assert bytes_of(campaign(used).run()) == bytes_of(campaign(HasTwoFaults()).run())


@pytest.mark.usefixtures("unshrunk")
def test_it_goes_on_after_a_violation_and_finds_each_rule_once() -> None:
    result = campaign(HasTwoFaults()).run()
    assert sorted(found.rule for found in result.found) == ["I1", "I5"]
    assert result.coverage.lines == 400
    assert result.again["I1"] > 0
    assert result.again["I5"] > 0
    runs_broken = len(result.found) + sum(result.again.values())
    assert result.coverage.runs >= runs_broken
    assert result.exit_code == 1


@pytest.mark.usefixtures("unshrunk")
def test_a_found_trace_is_saved_as_it_was_found(tmp_path: Path) -> None:
    made = replace(campaign(ShowsAStranger()), out=tmp_path / "new" / "folder", command="kvproof x")
    (found,) = made.run().found
    assert found.path is not None
    assert found.path.parent == tmp_path / "new" / "folder"
    assert found.path.name.startswith("I5-")
    trace = read_trace(found.path)
    assert trace == found.trace
    assert trace.header.command == "kvproof x"
    assert trace.header.target == "plain"
    assert trace.verdict is not None
    assert trace.verdict.rule == "I5"
    assert len(trace.lines) == found.found_in


def test_a_clean_campaign_judges_just_as_many_actions_as_it_was_given() -> None:
    for actions in (1, 149, 151, 700):
        assert campaign(PlainTarget(), actions).run().coverage.lines == actions


def test_a_campaign_given_seconds_ends_after_them() -> None:
    made = Campaign(PlainTarget(), Judging(), FULL, Budget(seconds=0.3))
    result = made.run()
    assert 0.3 <= result.seconds < 3
    assert result.coverage.lines > 0


@pytest.mark.usefixtures("unshrunk")
def test_workers_share_the_runs_of_one_process() -> None:
    """The violations of two halves are those of the whole, run by run."""
    whole = campaign(ShowsAStranger(), 2000).run()
    halves = [
        replace(campaign(ShowsAStranger(), 1000), first_run=worker, stride=2).run()
        for worker in (0, 1)
    ]
    assert bytes_of(whole)[0] in (bytes_of(halves[0])[0], bytes_of(halves[1])[0])
    assert halves[0].coverage != halves[1].coverage
    merged = Result()
    for half in halves:
        merged.merge(half)
    assert merged.coverage.lines == 2000
    assert [found.rule for found in merged.found] == ["I5"]
    assert merged.again["I5"] == sum(half.again["I5"] for half in halves) + 1


def interrupted_after(lines: int, target: Target) -> Result:
    def progress(result: Result, seconds: float) -> None:
        if result.coverage.lines >= lines:
            raise KeyboardInterrupt

    return replace(campaign(target, 10**9), progress=progress).run()


@pytest.mark.usefixtures("unshrunk")
def test_an_interrupt_keeps_what_was_found() -> None:
    result = interrupted_after(200, HasTwoFaults())
    assert result.interrupted
    assert result.exit_code == 130
    assert 200 <= result.coverage.lines < 400
    assert sorted(found.rule for found in result.found) == ["I1", "I5"]


def test_an_interrupt_asks_for_no_evaluation() -> None:
    result = interrupted_after(1, PlainTarget())
    assert result.exit_code == 130
    assert result.never_evaluated == []


def test_an_interrupt_while_shrinking_keeps_the_long_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(shrinking, "shrink", interrupted)
    result = replace(campaign(ShowsAStranger()), out=tmp_path).run()
    assert result.exit_code == 130
    assert [found.rule for found in result.found] == ["I5"]
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["I5"]


def found(rule: str, length: int) -> Found:
    lines = [Line(Submit(number, (1,)), Done()) for number in range(length)]
    lines[-1] = replace(lines[-1], verdict=Verdict(rule, "so"))
    header = Header(Config((Group("full", 1),), num_blocks=4), "plain")
    return Found(rule, Trace(header, tuple(lines)), None, 1, length, 0.1)


def test_of_two_traces_for_one_rule_the_shorter_one_stays() -> None:
    one = Result(found=[found("I1", 5), found("I2", 2)], again={"I1": 3})
    two = Result(found=[found("I1", 4), found("I2", 3), found("R3", 9)], again={"R3": 1})
    one.merge(two)
    assert [(f.rule, len(f.trace.lines)) for f in one.found] == [("I1", 4), ("I2", 2), ("R3", 9)]
    assert one.again == {"I1": 4, "I2": 1, "R3": 1}


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (Result(), 0),
        (Result(found=[found("I1", 1)]), 1),
        (Result(stale_expectations=["it is clean"]), 1),
        (Result(failure="it raised"), 3),
        (Result(found=[found("target failed", 1)], failure="it raised"), 3),
        (Result(never_evaluated=["R9"]), 3),
        (Result(found=[found("I1", 1)], failure="it raised"), 1),
        (Result(found=[found("I1", 1)], interrupted=True), 130),
        (Result(interrupted=True), 130),
    ],
)
def test_the_exit_code_is_that_of_the_worst(result: Result, code: int) -> None:
    assert result.exit_code == code


def test_a_failure_in_one_worker_is_the_campaigns() -> None:
    merged = Result()
    merged.merge(Result(failure="it raised"))
    merged.merge(Result(failure="it hung", interrupted=True, seconds=3))
    merged.merge(Result(seconds=2))
    assert (merged.failure, merged.interrupted, merged.seconds) == ("it raised", True, 3)


class Picky(PlainTarget):
    """It takes no pool of an even number of blocks."""

    def build(self, config: Config) -> None:
        if config.num_blocks % 2 == 0:
            raise UnsupportedConfig("an odd number of blocks is needed")
        super().build(config)


def test_what_a_target_does_not_support_is_skipped_and_counted() -> None:
    result = campaign(Picky(), 1500, asked=Asked(groups=(Group("full", 4),))).run()
    assert result.exit_code == 0
    assert result.coverage.lines == 1500
    assert result.coverage.skipped["an odd number of blocks is needed"] > 0


class ClaimsEverything(PlainTarget):
    def hello(self) -> Hello:
        hello = super().hello()
        return replace(hello, claims=(*hello.claims, "R9"))


@pytest.mark.parametrize(
    ("features", "without", "missing"),
    [
        ({"full", "async", "preempt", "worker"}, (), ["R9"]),
        ({"full", "async", "worker"}, (), []),
        ({"full", "preempt"}, (), []),
        ({"full", "async", "preempt", "worker"}, ("R9",), []),
        ({"full", "uncached"}, (), []),
    ],
)
def test_a_claimed_rule_must_be_evaluated_where_the_features_allow_it(
    features: set[str], without: tuple[str, ...], missing: list[str]
) -> None:
    asked = Asked(groups=(Group("full", 4),), features=frozenset(features))
    made = Campaign(
        ClaimsEverything(), Judging("contract", without), asked, Budget(actions=1500), seed=2
    )
    assert made.run().never_evaluated == missing


LONG = 15_000


@pytest.fixture(scope="module")
def long_campaign() -> Coverage:
    """Random actions of everything that the plain target offers."""
    result = campaign(PlainTarget(), LONG, asked=Asked()).run()
    assert result.exit_code == 0
    return result.coverage


def test_every_choice_of_a_driven_target_is_made(long_campaign: Coverage) -> None:
    assert set(long_campaign.total_done) == set(KINDS)


def test_every_feature_of_the_target_is_tried(long_campaign: Coverage) -> None:
    assert {feature for _, feature in long_campaign.done} == set(FEATURES)


def test_what_can_be_refused_is_also_refused(long_campaign: Coverage) -> None:
    can_be = {"admit", "admit external", "load", "extend", "draft", "forget everything"}
    can_be |= {"complete load"}  # one that failed
    assert set(long_campaign.total_refused) == can_be


def test_the_counts_add_up(long_campaign: Coverage) -> None:
    counts = long_campaign.to_json()
    assert counts["lines"] == LONG
    totals = Counter[str]()
    for kind, count in counts["actions"].items():
        totals[kind] = count["done"] + count["refused"]
    assert totals.total() == LONG
    for kind, count in counts["actions"].items():
        for outcome in ("done", "refused"):
            by_feature = {f: rows[kind][outcome] for f, rows in counts["by_feature"].items()}
            assert max(by_feature.values()) <= count[outcome], kind
            # every run has a group, and those with several kinds count for each
            assert sum(by_feature.get(group, 0) for group in GROUP_KINDS) >= count[outcome], kind


def test_choices_are_counted_for_the_features_they_need(long_campaign: Coverage) -> None:
    for kind, feature in (
        *(("draft", "lookahead"), ("load", "external"), ("admit external", "external")),
        *(("complete load", "external"), ("publish", "publish"), ("trim", "trim")),
        *(("preempt", "preempt"), ("leave unissued", "unissued"), ("store", "store")),
        *(("forget blocks", "forget"), ("forget everything", "forget")),
    ):
        assert long_campaign.done[kind, feature] == long_campaign.total_done[kind] > 0


def test_the_goals_are_reached(long_campaign: Coverage) -> None:
    assert set(long_campaign.goals) <= set(GOALS)
    assert [goal for goal in GOALS if not long_campaign.goals[goal]] == ["drained"]


def test_coverage_of_two_workers_is_added_up() -> None:
    one = campaign(PlainTarget(), 300).run().coverage
    two = campaign(PlainTarget(), 200, seed=1).run().coverage
    both = Coverage()
    both.merge(one)
    both.merge(two)
    assert both.lines == 500
    assert both.runs == one.runs + two.runs
    assert both.total_done == one.total_done + two.total_done
    assert both.goals == one.goals + two.goals
    assert both.evaluated == one.evaluated + two.evaluated


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("full:4", (Group("full", 4),)),
        ("sliding:4:32", (Group("sliding", 4, 32),)),
        ("full:4,sliding:4:32", (Group("full", 4), Group("sliding", 4, 32))),
        (" full:16 , sliding:8:3 ", (Group("full", 16), Group("sliding", 8, 3))),
        ("full:2,full:2", (Group("full", 2), Group("full", 2))),
    ],
)
def test_groups_are_read(text: str, groups: tuple[Group, ...]) -> None:
    assert parse_groups(text) == groups


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "full", "full:", "full:0", "full:-4", "full:4:8", "full:4.5", "full:4,"),
        *("sliding:4", "sliding:4:0", "sliding:0:4", "sliding:4:8:2", "full:4;sliding:4:8"),
        *("mamba:4", "FULL:4"),
    ],
)
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(ImpossibleConfig, match="full:BLOCK_SIZE, sliding:BLOCK_SIZE:WINDOW"):
        parse_groups(text)


OBSERVED = replace(
    PlainTarget().hello(),
    observed=True,
    features=frozenset({"full", "sliding", "uncached", "abort", "preempt", "async", "worker"}),
)


PLAIN = PlainTarget().hello()
ONLY_FULL = replace(PLAIN, features=frozenset({"full", "abort"}))

ASKED = {
    "plain": (PLAIN, Asked()),
    "observed": (OBSERVED, Asked()),
    "only full": (ONLY_FULL, Asked()),
    "sliding": (PLAIN, Asked(features=frozenset({"sliding", "worker"}))),
    "both": (PLAIN, Asked(features=frozenset({"full", "sliding", "async"}))),
    "no kind": (PLAIN, Asked(features=frozenset({"worker"}))),
    "large blocks": (PLAIN, Asked(groups=(Group("full", 32),))),
    "unequal blocks": (PLAIN, Asked(groups=(Group("full", 4), Group("sliding", 8, 5)))),
    "two blocks": (PLAIN, Asked(num_blocks=2)),
    "strict": (PLAIN, Asked(strict=True)),
}


@pytest.mark.parametrize("name", ASKED)
def test_every_scope_that_is_drawn_is_possible(name: str) -> None:
    hello, asked = ASKED[name]
    for seed in range(150):
        scope = draw_scope(Random(seed), hello, asked)
        config = scope.config
        kinds = {group.kind for group in config.groups}
        assert scope.features <= hello.features | kinds
        assert kinds == scope.features & set(GROUP_KINDS)
        assert config.num_blocks >= 2
        assert config.caching == ("uncached" not in scope.features)
        assert (config.ordering == "strict") == asked.strict
        assert (config.scheduling is not None) == hello.observed
        if config.scheduling is not None:
            assert config.scheduling.asynchronous == ("async" in scope.features)
        if asked.groups is not None:
            assert config.groups == asked.groups
        if asked.num_blocks is not None:
            assert config.num_blocks == asked.num_blocks
        if asked.features is not None:
            assert scope.features - kinds == asked.features - set(GROUP_KINDS)
        assert scope.prompts
        for prompt in scope.prompts:
            assert 1 <= len(prompt) < config.max_model_len, "no room for a sampled token"
            assert set(prompt) <= set(scope.samples)


@pytest.mark.parametrize("seed", range(60))
def test_every_scope_that_is_drawn_can_be_performed(seed: int) -> None:
    rng, target = Random(seed), PlainTarget()
    scope = draw_scope(rng, target.hello(), Asked())
    weight = weights(rng)
    run = Run(target, Judging(), scope.config)
    for _ in range(20):
        enabled = list(choices(run.state, scope))
        choice = rng.choices(enabled, [weight[c.kind] for c in enabled])[0]
        run.step(choice.action([int(rng.random() * len(d)) for d in choice.domains]))
    assert len(run.lines) == 20


def test_every_choice_has_a_weight() -> None:
    assert set(WEIGHTS) == set(KINDS)
    for seed in range(50):
        drawn = weights(Random(seed))
        assert set(drawn) == set(KINDS)
        assert all(weight > 0 for weight in drawn.values())
    assert any(weights(Random(seed)) != WEIGHTS for seed in range(50))
    assert any(weights(Random(seed)) == WEIGHTS for seed in range(50))
