"""Shrinking: a plan's numbers stand for that plan, and what is left is small, always the same."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvproof_spec.actions import Submit
from kvproof_spec.answers import Snapshot
from kvproof_spec.choices import KINDS, Scope, choices
from kvproof_spec.config import Config, Group
from kvproof_spec.judgement import Violation
from kvproof_stateful.faults import FAULTS
from kvproof_stateful.plan import Asked, Pick, Plan, draw_scope, weights
from kvproof_stateful.running import TARGET_FAILED, Judging, Run, perform_plan
from kvproof_stateful.shrinking import ATTEMPTS, Smallest, minimize, shrink, without_request
from kvproof_stateful.target import Target, TargetFailed
from kvproof_stateful.targets.plain import PlainTarget

SMALL = Scope(
    config=Config((Group("full", 2),), num_blocks=7, max_model_len=128),
    features=PlainTarget().hello().features - {"uncached", "sliding"},
    prompts=((1, 2, 1, 2), (1, 2, 1), (2,)),
    samples=(1, 2),
    max_requests=3,
    chunk=4,
    max_request_tokens=8,
)


def random_plan(target: Target, scope: Scope, seed: int, length: int, level: str) -> Plan:
    """Picks that are enabled, one after the other, up to the first violation."""
    rng, picks = Random(seed), []
    weight = weights(rng)
    run = Run(target, Judging(level), scope.config)
    try:
        for _ in range(length):
            enabled = list(choices(run.state, scope))
            choice = rng.choices(enabled, [weight[c.kind] for c in enabled])[0]
            parameters = tuple(int(rng.random() * len(domain)) for domain in choice.domains)
            picks.append(Pick(KINDS.index(choice.kind), choice.request, parameters))
            run.step(choice.action(parameters))
    except (Violation, TargetFailed):
        pass
    return Plan(scope, tuple(picks))


def broken_plan(target: Target, rule: str, level: str = "contract") -> Plan:
    """The first plan of more than a few picks whose run breaks the rule."""
    for seed in range(500):
        plan = random_plan(target, SMALL, seed, 150, level)
        if len(plan.picks) > 5 and rule_broken(target, plan, level) == rule:
            return plan
    pytest.fail(f"no run breaks {rule}")


def shrunk(
    target: Target, judging: Judging, plan: Plan, rule: str, attempts: int = ATTEMPTS
) -> tuple[Plan, Run]:
    """What is left of a plan that breaks the rule, and its run."""
    run, _ = perform_plan(target, judging, plan)
    smallest = Smallest(target, judging, rule, plan, run, attempts=attempts)
    shrink(smallest)
    return smallest.plan, smallest.run


def rule_broken(target: Target, plan: Plan, level: str) -> str | None:
    run, _ = perform_plan(target, Judging(level), plan)
    verdict = run.lines[-1].verdict
    return verdict.rule if verdict else None


@pytest.mark.parametrize("seed", range(12))
def test_the_numbers_of_a_plan_read_back_as_the_same_plan(seed: int) -> None:
    target = PlainTarget()
    scope = draw_scope(Random(seed), target.hello(), Asked())
    plan, tried = random_plan(target, scope, seed, 40, "safety"), []

    def only_look(candidate: Plan) -> bool:
        tried.append(candidate)
        return False

    minimize(plan, only_look)
    assert tried
    assert tried[0] == plan


def test_performing_a_plan_leaves_out_the_picks_that_are_not_enabled() -> None:
    target = PlainTarget()
    plan = random_plan(target, SMALL, 1, 30, "contract")
    load = Pick(KINDS.index("complete load"), 77, ())
    _, performed = perform_plan(target, Judging(), replace(plan, picks=(load, *plan.picks, load)))
    assert performed == plan


def pick(kind: str, request: int = 0) -> Pick:
    return Pick(KINDS.index(kind), request, ())


def test_a_request_is_left_out_with_all_its_picks_and_later_ones_move_up() -> None:
    picks = (
        *(pick("submit"), pick("lookup", 0), pick("submit"), pick("lookup", 1)),
        *(pick("admit", 1), pick("issue"), pick("submit"), pick("abort", 2), pick("abort", 0)),
    )
    assert without_request(Plan(SMALL, picks), 1).picks == (
        *(pick("submit"), pick("lookup", 0), pick("issue"), pick("submit")),
        *(pick("abort", 1), pick("abort", 0)),
    )
    assert without_request(Plan(SMALL, picks), 0).picks == (
        *(pick("submit"), pick("lookup", 0), pick("admit", 0), pick("issue")),
        *(pick("submit"), pick("abort", 1)),
    )
    assert without_request(Plan(SMALL, picks), 3).picks == picks


def test_every_kind_is_about_a_request_or_about_none() -> None:
    about_none = [kind for kind in KINDS if without_request(Plan(SMALL, (pick(kind),)), 0).picks]
    assert about_none == ["issue", "complete step", "forget blocks", "forget everything"]


class LosesABlock(PlainTarget):
    """With two requests the list of free blocks lacks one."""

    def snapshot(self) -> Snapshot:
        shown = super().snapshot()
        return replace(shown, free_order=shown.free_order[len(self.requests) > 1 :])


def test_a_simple_fault_shrinks_to_the_two_actions_that_show_it() -> None:
    target = LosesABlock()
    small, run = shrunk(target, Judging(), broken_plan(target, "I1"), "I1")
    assert [line.action for line in run.lines] == [Submit(0, (1,)), Submit(1, (1,))]
    assert small.scope.config.num_blocks == 2
    assert run.lines[-1].verdict is not None
    assert run.lines[-1].verdict.rule == "I1"


@pytest.mark.parametrize("name", ["hit-of-all-tokens", "double-free-in-one-batch"])
def test_a_seeded_fault_shrinks_to_at_most_eight_actions(name: str) -> None:
    fault = FAULTS[name]
    target = fault.target()
    plan = broken_plan(target, fault.rule, fault.judging.level)
    small, run = shrunk(target, fault.judging, plan, fault.rule)
    assert len(run.lines) <= 8
    assert run.config == small.scope.config
    assert rule_broken(target, small, fault.judging.level) == fault.rule


def test_shrinking_comes_out_the_same_every_time() -> None:
    target = LosesABlock()
    plan = broken_plan(target, "I1")
    first_plan, first = shrunk(target, Judging(), plan, "I1")
    again_plan, again = shrunk(LosesABlock(), Judging(), plan, "I1")
    assert first_plan == again_plan
    assert first.lines == again.lines


def test_a_shrunk_plan_performs_the_shrunk_run() -> None:
    target = LosesABlock()
    small, run = shrunk(target, Judging(), broken_plan(target, "I1"), "I1")
    again, performed = perform_plan(target, Judging(), small)
    assert again.lines == run.lines
    assert performed == small


def test_no_more_runs_are_made_than_were_allowed() -> None:
    class CountsResets(LosesABlock):
        resets = 0

        def reset(self, config: Config) -> None:
            super().reset(config)
            self.resets += 1

    plan, target = broken_plan(LosesABlock(), "I1"), CountsResets()
    _, run = shrunk(target, Judging(), plan, "I1", attempts=10)
    assert target.resets <= 11
    assert run.lines[-1].verdict is not None
    assert run.lines[-1].verdict.rule == "I1"


def test_a_failure_shrinks_to_itself_and_not_to_another() -> None:
    class RaisesLater(PlainTarget):
        def snapshot(self) -> Snapshot:
            if len(self.requests) > 1:
                raise RuntimeError("too many")
            return super().snapshot()

    target = RaisesLater()
    plan = broken_plan(target, TARGET_FAILED)
    _, run = shrunk(target, Judging(), plan, TARGET_FAILED)
    assert len(run.lines) == 2
    verdict = run.lines[-1].verdict
    assert verdict is not None
    assert verdict.rule == TARGET_FAILED
    assert "too many" in verdict.witness
