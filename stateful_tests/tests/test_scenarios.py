"""What no action reaches: scenarios on a pool alone, healthy, faulty, and the genuine one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence

import pytest
from packaging.specifiers import SpecifierSet

from kvproof_reference.block_pool import BlockPool
from kvproof_stateful.cli import main
from kvproof_stateful.expectations import BadExpectations
from kvproof_stateful.faults import FAULTS
from kvproof_stateful.loading import load_target
from kvproof_stateful.scenarios import (
    SCENARIOS,
    HasPool,
    KnownOutcome,
    Outcome,
    known_outcomes,
    outcome_of,
    play,
)
from kvproof_stateful.target import UnsupportedConfig
from kvproof_stateful.targets.plain import PlainTarget
from kvproof_stateful.targets.plain_pool import PlainPool


class PoolOf:
    """A target that offers this pool."""

    def __init__(self, pool: type[PlainPool]) -> None:
        self.pool = pool

    def make_pool(self, num_blocks: int) -> PlainPool:
        return self.pool(BlockPool(num_blocks))


def played(name: str, target: HasPool) -> Outcome:
    return outcome_of(SCENARIOS[name], target, None)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_plain_pool_holds(name: str) -> None:
    outcome = played(name, PlainTarget())
    assert (outcome.verdict, outcome.witness) == ("ok", "")


def test_each_scenario_says_what_is_done_and_what_holds() -> None:
    assert len(SCENARIOS) == 12
    for scenario in SCENARIOS.values():
        assert scenario.done.endswith(".")
        assert scenario.holds.endswith(".")
        assert scenario.report == "" or scenario.report.startswith("https://")


class FreesEachMention(PlainPool):
    """It lists a block once for each time that a batch names it, as vLLM before 0.24."""

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pool.reference_counts[block] = 1
            self.pool.give_back([block])


class RaisesHalfWay(PlainPool):
    def free(self, blocks: Sequence[int]) -> None:
        self.pool.give_back(blocks[:1])
        raise ValueError("twice")


class SaysNothing(PlainPool):
    def free(self, blocks: Sequence[int]) -> None:
        raise ValueError


class HandsOutNull(PlainPool):
    def take(self, count: int) -> list[int]:
        return [0] * count


class Forgetful(PlainPool):
    def find(self, name: str) -> int | None:
        return None


class Resets(PlainPool):
    def reset(self) -> bool:
        return True


class CannotBeReset(PlainPool):
    def reset(self) -> bool:
        raise UnsupportedConfig("it cannot forget")


@pytest.mark.parametrize(
    ("pool", "name", "rule", "says"),
    [
        (FreesEachMention, "twice-in-a-batch-held-once", "I1", "listed as free"),
        (RaisesHalfWay, "twice-in-a-batch-held-once", "I1", "changed the pool"),
        (SaysNothing, "twice-in-a-batch-held-once", "I1", "says not what was wrong"),
        (SaysNothing, "one-of-two-holders-leaves", "I1", "raised ValueError"),
        (HandsOutNull, "the-null-block-is-nobodys", "I1", "no normal block"),
        (Forgetful, "a-key-goes-with-its-content", "I2", "finds block None"),
        (Resets, "a-reset-while-a-block-is-held", "I1", "answered True"),
    ],
)
def test_a_faulty_pool_is_violated_by_name(
    pool: type[PlainPool], name: str, rule: str, says: str
) -> None:
    outcome = played(name, PoolOf(pool))
    assert (outcome.verdict, outcome.rule) == ("violated", rule)
    assert says in outcome.witness


def test_a_seeded_fault_of_the_pool_is_found() -> None:
    target = FAULTS["key-kept-on-reuse"].target()
    assert isinstance(target, PlainTarget)
    outcome = played("a-key-goes-with-its-content", target)
    assert (outcome.verdict, outcome.rule) == ("violated", "I2")


def test_what_a_pool_cannot_do_is_unsupported() -> None:
    outcome = played("a-reset-while-a-block-is-held", PoolOf(CannotBeReset))
    assert (outcome.verdict, outcome.witness) == ("unsupported", "it cannot forget")


def test_a_known_violation_is_known_where_it_shows_and_stale_where_it_does_not() -> None:
    name = "twice-in-a-batch-held-once"
    known = (KnownOutcome(name, SpecifierSet("==1.0"), "a page"),)

    def verdict(target: HasPool, version: str) -> str:
        return {o.scenario.name: o.verdict for o in play(target, version, known)}[name]

    assert verdict(PoolOf(FreesEachMention), "1.0") == "known"
    assert verdict(PoolOf(FreesEachMention), "1.1") == "violated"
    assert verdict(PlainTarget(), "1.0") == "stale"
    assert verdict(PlainTarget(), "1.1") == "ok"


def test_the_known_ones_are_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [known.scenario for known in known_outcomes("vllm-manager")] == [
        "twice-in-a-batch-held-once",
        "freed-again-later",
        "fewer-than-no-blocks",
    ]
    assert known_outcomes("plain") == ()
    monkeypatch.delitem(SCENARIOS, "freed-again-later")
    with pytest.raises(BadExpectations, match="freed-again-later"):
        known_outcomes("vllm-manager")


def test_the_command_says_all_of_it_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["scenarios", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["target"] == "plain"
    assert [told["name"] for told in data["scenarios"]] == list(SCENARIOS)
    assert code == any(told["verdict"] == "violated" for told in data["scenarios"])
    first = data["scenarios"][0]
    assert first["verdict"] == "ok"
    assert first["report"].endswith("/42571")
    assert set(first) == {
        "name", "report", "done", "holds", "verdict", "rule", "witness", "link",
    }  # fmt: skip


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["scenarios"])
    out = capsys.readouterr().out
    for name in SCENARIOS:
        assert name in out


def test_a_target_without_a_pool_is_said_to_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenarios", "--target", "plain-engine"]) == 2
    assert "make_pool" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
def test_the_genuine_pool_fails_only_in_what_is_known() -> None:
    target, hello = load_target("vllm-manager")
    assert isinstance(target, HasPool)
    outcomes = play(target, hello.version, known_outcomes("vllm-manager"))
    assert {o.scenario.name: o.verdict for o in outcomes if o.verdict != "ok"} == {
        "twice-in-a-batch-held-once": "known",
        "freed-again-later": "known",
        "fewer-than-no-blocks": "known",
    }
