"""`kvproof faults`: search for the seeded faults, and show what came out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvproof_spec.trace import write_trace
from kvproof_stateful.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, UsageError
from kvproof_stateful.faults import FAULTS
from kvproof_stateful.faults.measuring import (
    COMPARED,
    Comparison,
    Measuring,
    Row,
    compare,
    each_in_workers,
    measure,
)
from kvproof_stateful.faults.search import trace_path
from kvproof_stateful.reporting import ReportConsole

Done = TypeVar("Done", Row, Comparison)

COMPARED_ACTIONS = 100_000
"""What a search of the comparison may judge before it counts as in vain."""


def faults(options: argparse.Namespace) -> int:
    """Measure what is named, or everything; 0 if all of it was caught by its rule."""
    names = names_of(options)
    if options.list:
        return list_faults(names, as_json=options.json)
    if options.compare:
        return compare_with_uniform(names, options)
    measuring = Measuring(range(options.seeds), options.time, options.write)
    work = partial(measure, measuring=measuring)
    rows: list[Row] = []
    interrupted = False
    try:
        for row in watched(each_in_workers(work, names, options.workers), len(names)):
            rows.append(row)
            if options.write is not None and row.trace is not None:
                write_trace(trace_path(options.write, FAULTS[row.name]), row.trace)
    except KeyboardInterrupt:
        interrupted = True
    if options.json:
        print(json.dumps(report_of(rows), indent=2))
    else:
        print_rows(rows)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_CLEAN if rows and all(row.caught for row in rows) else EXIT_FAILED


def watched(done: Iterable[Done], total: int) -> Iterator[Done]:
    """What is done, counted on stderr: by a bar on a terminal, else by a line each."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("faults"), TimeElapsedColumn())
    is_shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        for number, one in enumerate(bar.track(done, total=total), start=1):
            if not is_shown:
                print(f"{number} of {total}: {one.name}", file=sys.stderr, flush=True)
            yield one


def names_of(options: argparse.Namespace) -> list[str]:
    unknown = [name for name in options.names if name not in FAULTS]
    if unknown:
        raise UsageError(f"no fault {', '.join(unknown)} (see: kvproof faults --list)")
    if options.seeds < 1 or options.workers < 1:
        raise UsageError("--seeds and --workers are at least 1")
    if options.time <= 0:
        raise UsageError("--time is in seconds, more than 0")
    if options.write is not None and not options.write.is_dir():
        raise UsageError(f"--write {options.write} is no directory")
    return options.names or list(COMPARED if options.compare else FAULTS)


def list_faults(names: Sequence[str], *, as_json: bool) -> int:
    chosen = [FAULTS[name] for name in names]
    if as_json:
        listed = [fault.to_json() for fault in chosen]
        print(json.dumps({"faults": listed}, indent=2))
        return EXIT_CLEAN
    table = Table(box=SIMPLE)
    for column in ("fault", "breaks", "sentence"):
        table.add_column(column)
    for fault in chosen:
        table.add_row(fault.name, fault.rule, fault.sentence)
    ReportConsole().print(table)
    return EXIT_CLEAN


def report_of(rows: Sequence[Row]) -> dict[str, Any]:
    return {"faults": [row.to_json() for row in rows], **summary(rows)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    lengths = [len(row.trace.lines) for row in rows if row.trace]
    return {
        "num_caught": sum(row.caught for row in rows),
        "median_trace_actions": median(lengths) if lengths else None,
    }


def print_rows(rows: Sequence[Row]) -> None:
    table = Table(box=SIMPLE)
    for column in ("fault", "breaks", "caught by"):
        table.add_column(column)
    for column in ("searches", "actions", "seconds", "trace"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            row.rule,
            (row.caught_by_rule or "nothing") + ("" if row.caught else " (not caught)"),
            f"{row.successes} of {len(row.found)}",
            shown(row.actions, ",.0f"),
            shown(row.seconds, ",.2f"),
            str(len(row.trace.lines)) if row.trace else "",
        )
    console = ReportConsole()
    console.print(table)
    told = summary(rows)
    console.print(
        f"{told['num_caught']} of {len(rows)} caught by the rule that they break; "
        f"median trace: {told['median_trace_actions']} actions"
    )


def shown(number: float | None, pattern: str) -> str:
    return "" if number is None else format(number, pattern)


def compare_with_uniform(names: Sequence[str], options: argparse.Namespace) -> int:
    """How many actions a fault takes, against uniform choice; 0 if that is half at most."""
    work = partial(compare, seeds=range(options.seeds), most_actions=COMPARED_ACTIONS)
    made = list(watched(each_in_workers(work, names, options.workers), len(names)))
    ours = median(comparison.actions for comparison in made)
    uniform = median(comparison.uniform_actions for comparison in made)
    if options.json:
        compared = [comparison.to_json() for comparison in made]
        told = {"actions": ours, "uniform_actions": uniform, "most_actions": COMPARED_ACTIONS}
        print(json.dumps({"compared": compared, **told}, indent=2))
    else:
        table = Table(box=SIMPLE)
        table.add_column("fault")
        for column in ("actions", "by uniform choice"):
            table.add_column(column, justify="right")
        for comparison in made:
            uniform_shown = f"{comparison.uniform_actions:,.0f}"
            if comparison.uniform_actions >= COMPARED_ACTIONS:
                uniform_shown = f"more than {COMPARED_ACTIONS:,}"
            table.add_row(comparison.name, f"{comparison.actions:,.0f}", uniform_shown)
        table.add_section()
        table.add_row("median", f"{ours:,.0f}", f"{uniform:,.0f}")
        ReportConsole().print(table)
    return EXIT_CLEAN if 2 * ours <= uniform else EXIT_FAILED
