"""The figures as a picture; matplotlib is imported here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvproof_stateful.bench_manager.measuring import TOTAL, quartiles
from kvproof_stateful.bench_manager.report import Report
from kvproof_stateful.bench_manager.timed import BUCKETS


def plot(report: Report, path: Path) -> None:
    """Left the ratios of the totals, right the time of a call against the size of the pool."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine has
    left, right = figure.subplots(1, 2)
    plot_ratios(report, left)
    plot_scaling(report, right)
    figure.savefig(path, dpi=150)


def plot_ratios(report: Report, axes: Any) -> None:
    ours, theirs = report.managers
    names = list(dict.fromkeys(rounds.workload.name for rounds in report.measured))
    width = 0.8 / max(len(report.variants), 1)
    for number, variant in enumerate(report.variants):
        measured = [rounds for rounds in report.of(variant) if rounds.ratios(TOTAL)]
        places = [names.index(rounds.workload.name) + number * width for rounds in measured]
        plot_bars(
            axes, places, [quartiles(rounds.ratios(TOTAL)) for rounds in measured], width, variant
        )
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("workload")
    axes.set_ylabel(f"time of {theirs} / time of {ours}, total")
    axes.legend()


def plot_bars(
    axes: Any, places: list[float], bars: list[tuple[float, float, float]], width: float, label: str
) -> None:
    """A bar up to each median, with its quartiles as whiskers."""
    below = [middle - lower for lower, middle, _ in bars]
    above = [upper - middle for _, middle, upper in bars]
    heights = [middle for _, middle, _ in bars]
    axes.bar(places, heights, width, yerr=[below, above], capsize=3, label=label)


def plot_scaling(report: Report, axes: Any) -> None:
    styles = dict(zip(dict.fromkeys(report.managers), ("-", "--"), strict=False))
    pools = [point.num_blocks for point in report.scaling]
    for number, bucket in enumerate(BUCKETS):
        for name, style in styles.items():
            times = [point.microseconds[name].get(bucket) for point in report.scaling]
            if times and None not in times:
                axes.plot(
                    pools, times, style, marker=".", color=f"C{number}", label=f"{bucket}, {name}"
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("blocks of the pool")
    axes.set_ylabel("microseconds a call")
    axes.legend(fontsize="small", ncols=2)
