"""The figures of `kvproof bench manager` as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvproof_stateful.bench_manager.measuring import TOTAL, Rounds, Scaling, quartiles
from kvproof_stateful.bench_manager.timed import BASE, BUCKETS

Memory = tuple[float, float]  # bytes per block: pool empty, all blocks findable


@dataclass(slots=True)
class Report:
    """What has been measured so far; managers by name, ours first."""

    managers: tuple[str, str]
    measured: list[Rounds] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    bytes_per_block: dict[str, Memory] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # with the reason
    interrupted: bool = False

    def of(self, variant: str) -> list[Rounds]:
        return [rounds for rounds in self.measured if rounds.variant.name == variant]

    @property
    def variants(self) -> list[str]:
        """Names, in the order in which they were measured."""
        return list(dict.fromkeys(rounds.variant.name for rounds in self.measured))

    def to_json(self) -> dict[str, Any]:
        """`rows` are those of plain caching; `variants` has the same for each other one."""
        ours, theirs = self.managers
        return {
            "ratio": f"time of {theirs} / time of {ours}",
            "rows": list(rows(self.of(BASE.name), self.managers)),
            "variants": {
                name: list(rows(self.of(name), self.managers))
                for name in self.variants
                if name != BASE.name
            },
            "workloads": [
                {
                    "workload": rounds.workload.name,
                    "title": rounds.workload.title,
                    "variant": rounds.variant.name,
                    "rounds": len(rounds.spent),
                    "steps": rounds.steps,
                    "requests": rounds.requests,
                    "hit_tokens": rounds.hit_tokens,
                    "preemptions": rounds.preempted,
                }
                for rounds in self.measured
            ],
            "scaling": [
                {"blocks": point.num_blocks, "microseconds": rounded(point.microseconds)}
                for point in self.scaling
            ],
            "bytes_per_block": {
                name: {"empty": round(empty), "full": round(full)}
                for name, (empty, full) in self.bytes_per_block.items()
            },
            "left_out": self.left_out,
            "interrupted": self.interrupted,
        }


def rounded(microseconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {bucket: round(value, 2) for bucket, value in by_bucket.items()}
        for name, by_bucket in microseconds.items()
    }


def rows(measured: Sequence[Rounds], managers: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """One a workload and bucket; times are in microseconds a call, the total's a step."""
    for rounds in measured:
        for bucket in (*BUCKETS, TOTAL):
            ratios = rounds.ratios(bucket)
            if ratios:
                lower, middle, upper = quartiles(ratios)
                yield {
                    "workload": rounds.workload.name,
                    "bucket": bucket,
                    "ratio": round(middle, 2),
                    "q25": round(lower, 2),
                    "q75": round(upper, 2),
                    "microseconds": {
                        name: round(rounds.microseconds(bucket, whose) or 0.0, 2)
                        for whose, name in enumerate(managers)
                    },
                }


def print_report(report: Report, console: Console) -> None:
    for workload in {rounds.workload.name: rounds.workload for rounds in report.measured}.values():
        console.print(f"{workload.name}  {workload.title}")
    for name in report.variants:
        console.print(ratio_table(report, name))
    if report.scaling:
        console.print(scaling_table(report))
    for name, (empty, full) in report.bytes_per_block.items():
        console.print(f"{name}: {empty:,.0f} bytes a block, {full:,.0f} once all can be found")
    for reason in report.left_out:
        console.print(f"left out: {reason}")
    if report.interrupted:
        console.print("INTERRUPTED: these are the figures until then")


def ratio_table(report: Report, variant: str) -> Table:
    ours, theirs = report.managers
    title = f"time of {theirs} / time of {ours}, median of paired rounds (quartiles)"
    if variant != BASE.name:
        title += f", with {variant}"
    measured = report.of(variant)
    buckets = [
        bucket for bucket in (*BUCKETS, TOTAL) if any(rounds.ratios(bucket) for rounds in measured)
    ]
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("workload")
    for bucket in (*buckets, "rounds"):
        table.add_column(bucket, justify="right")
    for rounds in measured:
        cells = [ratio_cell(rounds.ratios(bucket)) for bucket in buckets]
        table.add_row(rounds.workload.name, *cells, str(len(rounds.spent)))
    return table


def ratio_cell(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    lower, middle, upper = quartiles(ratios)
    return f"{middle:.2f} ({lower:.2f}-{upper:.2f})"


def scaling_table(report: Report) -> Table:
    """A request has 64 blocks whatever the size of the pool."""
    buckets = [
        b for b in BUCKETS if any(b in p.microseconds[report.managers[0]] for p in report.scaling)
    ]
    table = Table(
        title="microseconds a call by the size of the pool: " + " / ".join(report.managers),
        title_justify="left",
        box=SIMPLE,
    )
    table.add_column("blocks", justify="right")
    for bucket in buckets:
        table.add_column(bucket, justify="right")
    for point in report.scaling:
        cells = [
            " / ".join(f"{times.get(bucket, 0.0):,.1f}" for times in point.microseconds.values())
            for bucket in buckets
        ]
        table.add_row(f"{point.num_blocks:,}", *cells)
    return table
