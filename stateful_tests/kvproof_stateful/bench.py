"""How fast kvproof itself judges: target plain, standard scope, one core.

Rounds of each kind are interleaved in one process, so that what else the machine does falls
on all of them alike.  A rate is that of the best round, as timeit advises (a slower one tells
of other processes), with the median beside it; a ratio is the median of paired rounds.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Callable
from random import Random
from statistics import median

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.table import Table

from kvproof_spec.choices import Scope, choices
from kvproof_spec.config import Config, Group
from kvproof_stateful.machine import Setup, machine_of
from kvproof_stateful.plan import WEIGHTS, draw_pick
from kvproof_stateful.running import Judging, Run
from kvproof_stateful.targets.plain import PlainTarget

EXACT = Judging("exact:vllm-0.32", snapshots=True)
CONTRACT = Judging("contract", snapshots=False)
RUN_LENGTH = 150
ROUND_RUNS = 12
ROUNDS = 15
MACHINE_EXAMPLES = 25


def standard_scope(num_blocks: int = 8) -> Scope:
    """8 blocks of 2 tokens, 3 requests, full attention and a sliding window, all features."""
    features = PlainTarget().hello().features - {"uncached", "forget"}
    return Scope(
        config=Config(
            groups=(Group("full", 2), Group("sliding", 2, 3)),
            num_blocks=num_blocks,
            max_model_len=128,
            defers_returns=True,
        ),
        features=features,
        prompts=((1, 2), (1, 2, 1), (1, 2, 1, 2), (2,), (1, 1, 1)),
        samples=(1, 2),
        max_requests=3,
        chunk=4,
        max_request_tokens=8,
    )


class Bench:
    """Seeded runs at one scope and judging, counted."""

    def __init__(self, judging: Judging, scope: Scope) -> None:
        self.target = PlainTarget()
        self.judging = judging
        self.scope = scope
        self.seed = 0
        self.actions = 0
        self.granted = 0
        self.refused = 0

    def runs(self, count: int) -> float:
        """Judged actions a second over `count` runs."""
        before, started = self.actions, time.perf_counter()
        for _ in range(count):
            self._one_run()
        return (self.actions - before) / (time.perf_counter() - started)

    def _one_run(self) -> None:
        rng = Random(self.seed)
        self.seed += 1
        run = Run(self.target, self.judging, self.scope.config)
        for _ in range(RUN_LENGTH):
            choice, picks = draw_pick(rng, choices(run.state, self.scope), WEIGHTS)
            answer = type(run.step(choice.action(picks))).__name__
            self.granted += answer == "Granted"
            self.refused += answer == "Refused"
        self.actions += RUN_LENGTH


def machine_rate(scope: Scope) -> float:
    counted = 0

    class Counted(machine_of(Setup(PlainTarget(), EXACT, scope=scope))):  # type: ignore[misc]
        def teardown(self) -> None:
            nonlocal counted
            counted += len(self.judged.lines)

    limits = settings(
        max_examples=MACHINE_EXAMPLES,
        stateful_step_count=RUN_LENGTH,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    started = time.perf_counter()
    run_state_machine_as_test(Counted, settings=limits)
    return counted / (time.perf_counter() - started)


def memory_growth_mib(actions: int, progress: Callable[[int], None]) -> tuple[float, float]:
    """(peak resident memory after a tenth of the actions, after all of them), in MiB."""
    bench = Bench(EXACT, standard_scope())
    early = 0.0
    while bench.actions < actions:
        bench.runs(50)
        progress(bench.actions)
        if not early and bench.actions >= actions / 10:
            gc.collect()
            early = peak_rss_mib()
    return early, peak_rss_mib()


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bench_campaign(actions: int, *, as_json: bool) -> int:
    console = Console(stderr=True)
    scope = standard_scope()
    exact, contract = Bench(EXACT, scope), Bench(CONTRACT, scope)
    large = Bench(EXACT, standard_scope(num_blocks=4096))
    rates: dict[str, list[float]] = {"exact": [], "contract": [], "large": [], "machine": []}
    for number in range(ROUNDS):
        if console.is_terminal:
            console.print(f"round {number + 1} of {ROUNDS}", end="\r")
        rates["exact"].append(exact.runs(ROUND_RUNS))
        rates["contract"].append(contract.runs(ROUND_RUNS))
        rates["large"].append(large.runs(ROUND_RUNS))
        if number % 3 == 0:
            rates["machine"].append(machine_rate(scope) / rates["exact"][-1])
    large_ratios = [a / b for a, b in zip(rates["large"], rates["exact"], strict=True)]
    early, late = memory_growth_mib(actions, lambda done: None)
    report = {
        "judged_actions_per_second": round(max(rates["exact"])),
        "judged_actions_per_second_median": round(median(rates["exact"])),
        "contract_actions_per_second": round(max(rates["contract"])),
        "contract_actions_per_second_median": round(median(rates["contract"])),
        "large_pool_ratio": round(median(large_ratios), 3),
        "ratio_to_state_machine": round(1 / median(rates["machine"]), 2),
        "peak_rss_mib": round(late, 1),
        "peak_rss_mib_at_a_tenth": round(early, 1),
        "granted_share": round(exact.granted / (exact.granted + exact.refused), 3),
        "actions": actions,
    }
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        table = Table(title="kvproof bench campaign: target plain, standard scope, one core")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in report.items():
            table.add_row(name.replace("_", " "), f"{value:,}")
        Console().print(table)
    return 0
