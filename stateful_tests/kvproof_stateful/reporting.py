"""Reports: progress while it runs, tables and traces for people, JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.box import SIMPLE
from rich.columns import Columns
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvproof_spec.choices import FEATURES, KINDS
from kvproof_spec.invariants import RULES
from kvproof_spec.judgement import EVIDENCE
from kvproof_spec.qualities import QUALITIES
from kvproof_spec.trace import Line, Trace, Verdict
from kvproof_stateful.campaign import Campaign, Found, Result
from kvproof_stateful.coverage import GOALS, Coverage
from kvproof_stateful.elsewhere import python_option
from kvproof_stateful.scenarios import Outcome
from kvproof_stateful.steps import step_lines, told_rule
from kvproof_stateful.target import Hello

HEARTBEAT_SECONDS = 5.0
WIDE = 152
"""Columns of a report where there is no terminal."""


@contextmanager
def progress(campaign: Campaign) -> Generator[None]:
    """Live counts on stderr: a bar on a terminal, else a line every few seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from _bar(campaign, console)
    else:
        last = [time.monotonic()]

        def beat(result: Result, seconds: float) -> None:
            if time.monotonic() - last[0] >= HEARTBEAT_SECONDS:
                last[0] = time.monotonic()
                print(_counts(result, seconds), file=sys.stderr, flush=True)

        campaign.progress = beat
        yield


def _bar(campaign: Campaign, console: Console) -> Generator[None]:
    budget = campaign.budget
    total = budget.actions or budget.seconds or 1
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def advance(result: Result, seconds: float) -> None:
            done = result.coverage.lines if budget.actions else seconds
            bar.update(task, completed=done, description=_counts(result, seconds))

        campaign.progress = advance
        yield


def _counts(result: Result, seconds: float) -> str:
    coverage = result.coverage
    rate = coverage.lines / seconds if seconds else 0
    found = ", ".join(found.rule for found in result.found) or "none"
    known = sum(coverage.known.values())
    return (
        f"{coverage.lines:,} actions judged in {coverage.runs:,} runs, {rate:,.0f}/s, "
        f"violations: {found}" + (f", known: {known}" if known else "")
    )


class ReportConsole(Console):
    """Stdout as wide as the terminal, or as the widest table where there is none."""

    def __init__(self, width: int | None = None, *, plain: bool = False) -> None:
        if width is None and not sys.stdout.isatty():
            width = WIDE
        colors: Literal["auto"] | None = None if plain else "auto"
        super().__init__(width=width, color_system=colors, highlight=False, markup=False)

    def on_broken_pipe(self) -> None:
        """Leave it to the command line: rich would exit with 1, which says violation."""
        raise BrokenPipeError


def print_report(campaign: Campaign, *, as_json: bool) -> None:
    """The whole report: JSON on stdout, or tables; violations first, then what was covered."""
    if as_json:
        print(json.dumps(campaign.to_json(), indent=2))
        return
    console = ReportConsole()
    result = campaign.result
    for found in result.found:
        print_violation(console, campaign, found)
    tables = (action_table(result.coverage), feature_table(result.coverage))
    console.print(Columns(tables, padding=(0, 4)))
    console.print(rule_table(campaign))
    for quality in QUALITIES:
        held, all_hits = result.coverage.quality(quality.id)
        if all_hits:
            console.print(f"{quality.id} {quality.sentence}: {held} of {all_hits} hits")
    console.print(goals_line(result.coverage))
    if result.coverage.skipped:
        for reason, times in result.coverage.skipped.items():
            console.print(f"skipped {times} times: {reason}")
    for line in result.stale_expectations:
        console.print(f"EXPECTATION: {line}")
    console.print(verdict_line(campaign))


def print_violation(console: Console, campaign: Campaign, found: Found) -> None:
    verdict = found.trace.verdict
    assert verdict is not None
    for line in told_rule(verdict):
        console.print(line)
    if verdict.also:
        console.print(f"  also broken: {', '.join(verdict.also)}")
    console.print(
        f"  found after {found.found_after:,} actions, {found.found_in} in its run; "
        f"shrunk to {len(found.trace.lines)}:"
    )
    for line in step_lines(found.trace.header.config, found.trace.lines):
        console.print(f"    {line}")
    if found.path is not None:
        target = f" --target {campaign.hello.name}{python_option()}"
        console.print(f"  replay: kvproof replay {found.path}{target}")
    again = campaign.result.again.get(found.rule)
    if again:
        console.print(f"  {again} more runs broke it too")
    console.print()


def action_table(coverage: Coverage) -> Table:
    """How often each choice was done, and how often refused where that can be."""
    table = Table(title="actions", title_justify="left", box=SIMPLE)
    table.add_column("action")
    table.add_column("done", justify="right")
    table.add_column("refused", justify="right")
    for kind in KINDS:
        done, refused = coverage.total_done[kind], coverage.total_refused[kind]
        if done or refused:
            table.add_row(kind, short(done), short(refused) if refused else "")
    return table


def feature_table(coverage: Coverage) -> Table:
    """The runs and the actions with each feature; what there is by both is in the JSON report."""
    table = Table(title="features", title_justify="left", box=SIMPLE)
    table.add_column("feature")
    table.add_column("runs", justify="right")
    table.add_column("actions", justify="right")
    both = coverage.done + coverage.refused
    for feature in FEATURES:
        if coverage.with_feature[feature]:
            actions = sum(count for (_, name), count in both.items() if name == feature)
            table.add_row(feature, short(coverage.with_feature[feature]), short(actions))
    return table


def short(count: int) -> str:
    """At most four characters: 999, 1.2k, 34k, 5.6M."""
    if count < 1000:
        return str(count)
    for size, unit in ((1_000, "k"), (1_000_000, "M")):
        if count < size * 1000:
            value = count / size
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return f"{count / 1e9:.0f}G"


def rule_table(campaign: Campaign) -> Table:
    """Each rule: how often evaluated and by what, or why not."""
    evaluated = campaign.result.coverage.evaluated
    table = Table(title="rules evaluated, by evidence", title_justify="left", box=SIMPLE)
    for column in ("rule", "claim", "evaluated"):
        table.add_column(column)
    judged = {rule.id for rule in campaign.judging.rules()}
    for rule in RULES:
        times = [f"{e} {short(evaluated[rule.id, e])}" for e in EVIDENCE if evaluated[rule.id, e]]
        if rule.id not in judged:
            times = ["left out"]
        elif not times:
            claimed = rule.id in campaign.hello.claims
            times = ["not evaluated" + ("" if claimed else ": the target shows no evidence")]
        table.add_row(rule.id, rule.sentence, ", ".join(times))
    exact = sum(count for (rule_id, _), count in evaluated.items() if rule_id == "exact")
    if exact:
        table.add_row("exact", f"equal to {campaign.judging.level}", short(exact))
    return table


def goals_line(coverage: Coverage) -> str:
    reached = [f"{goal} {short(coverage.goals[goal])}" for goal in GOALS if coverage.goals[goal]]
    missed = [goal for goal in GOALS if not coverage.goals[goal]]
    line = "goals reached: " + (", ".join(reached) or "none")
    return line + (f"\ngoals not reached: {', '.join(missed)}" if missed else "")


def verdict_line(campaign: Campaign) -> str:
    result, coverage = campaign.result, campaign.result.coverage
    held = {rule for rule, _ in coverage.evaluated}
    judged = [rule.id for rule in campaign.judging.rules()]
    counts = f"{sum(rule in held for rule in judged)} of {len(judged)} rules evaluated"
    name = f"{campaign.hello.name} {campaign.hello.version}, level {campaign.judging.level}"
    known = sum(coverage.known.values())
    done = (
        f"{name}: {coverage.lines:,} actions in {coverage.runs:,} runs, "
        f"{result.seconds:.1f} s, seed {campaign.seed}; {counts}"
    ) + (f"; {known} runs ended in a known violation" if known else "")
    if result.interrupted:
        return f"INTERRUPTED  {done}"
    if result.failure:
        return f"TARGET FAILED  {result.failure}\n{done}"
    if result.found or result.stale_expectations:
        rules = ", ".join(found.rule for found in result.found) or "an expectation is stale"
        return f"VIOLATED  {rules}  {done}"
    if result.never_evaluated:
        return f"NOT EVALUATED  claimed, but never: {', '.join(result.never_evaluated)}  {done}"
    return f"NO VIOLATION  {done}"


def print_rung(campaign: Campaign, added: Sequence[str]) -> None:
    print(f"{'+ ' + ', '.join(added):28} {verdict_line(campaign)}", flush=True)


def print_replay(
    trace: Trace, lines: Sequence[Line], verdict: Verdict | None, on: str, as_json: bool
) -> None:
    recorded = trace.verdict.rule if trace.verdict else None
    if as_json:
        report = {
            "on": on,
            "actions": len(lines),
            "rule": verdict.rule if verdict else None,
            "witness": verdict.witness if verdict else "",
            "recorded_rule": recorded,
        }
        print(json.dumps(report, indent=2))
        return
    for text in step_lines(trace.header.config, lines):
        print(text)
    if verdict is not None and verdict.rule is not None:
        print("\n".join(told_rule(verdict)))
    else:
        print("no violation")
    if recorded != (verdict.rule if verdict else None):
        print(f"the trace records {recorded or 'no violation'}: on {on} it comes out otherwise")


def print_targets(rows: Sequence[tuple[str, Hello | str]], *, as_json: bool) -> None:
    if as_json:
        listed = [
            {"name": name, "unavailable": hello}
            if isinstance(hello, str)
            else {
                "name": name,
                "version": hello.version,
                "mode": "observed" if hello.observed else "driven",
                "features": sorted(hello.features),
                "claims": list(hello.claims),
            }
            for name, hello in rows
        ]
        print(json.dumps({"targets": listed}, indent=2))
        return
    table = Table(box=SIMPLE)
    for column in ("target", "version", "mode", "features", "claims"):
        table.add_column(column)
    for name, hello in rows:
        if isinstance(hello, str):
            table.add_row(name, "-", "-", hello, "-")
        else:
            mode = "observed" if hello.observed else "driven"
            features = ", ".join(f for f in FEATURES if f in hello.features)
            table.add_row(name, hello.version, mode, features, ", ".join(hello.claims))
    ReportConsole().print(table)


def print_scenarios(hello: Hello, outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    if as_json:
        told = [outcome.to_json() for outcome in outcomes]
        report = {"target": hello.name, "version": hello.version, "scenarios": told}
        print(json.dumps(report, indent=2))
        return
    console = ReportConsole()
    table = Table(title=f"{hello.name} {hello.version}", title_justify="left", box=SIMPLE)
    for column in ("scenario", "what is done", "then", "verdict"):
        table.add_column(column)
    for outcome in outcomes:
        verdict = " ".join(filter(None, (outcome.verdict, outcome.rule)))
        table.add_row(outcome.scenario.name, outcome.scenario.done, outcome.scenario.holds, verdict)
    console.print(table)
    for outcome in outcomes:
        if outcome.verdict != "ok":
            print_outcome(outcome)
    counted = Counter(outcome.verdict for outcome in outcomes)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counted.items()))


def print_outcome(outcome: Outcome) -> None:
    print(f"{outcome.scenario.name}: {outcome.verdict}: {outcome.witness}")
    print(f"  reported: {outcome.scenario.report or 'nowhere'}")
    if outcome.link:
        print(f"  written up: {outcome.link}")
