"""What the commands do, from their parsed options to an exit code."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvproof_spec.choices import FEATURES
from kvproof_spec.policies import UnknownToPolicy
from kvproof_spec.state import ActionDisabled
from kvproof_spec.trace import DamagedTrace, Trace, read_trace
from kvproof_stateful import reporting
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.elsewhere import python_option
from kvproof_stateful.exits import (
    EXIT_CLEAN,
    EXIT_FAILED,
    EXIT_USAGE,
    EXIT_VIOLATION,
    CommandFailed,
    UsageError,
)
from kvproof_stateful.expectations import (
    BadExpectations,
    KnownViolation,
    default_expectations,
    read_expectations,
)
from kvproof_stateful.loading import (
    NoSuchTarget,
    TargetNotInstalled,
    installed_targets,
    load_target,
)
from kvproof_stateful.plan import Asked, ImpossibleConfig, ask
from kvproof_stateful.running import (
    TARGET_FAILED,
    Judging,
    UnknownLevel,
    judge_trace,
    perform_actions,
    time_limit,
)
from kvproof_stateful.target import Hello, Target, TargetFailed, UnsupportedConfig
from kvproof_stateful.workers import run_in_workers

USAGE_ERRORS = (
    BadExpectations,
    DamagedTrace,
    ImpossibleConfig,
    NoSuchTarget,
    TargetNotInstalled,
    UnknownLevel,
    UnknownToPolicy,
)


@contextmanager
def usage_errors() -> Generator[None]:
    """What the user can mend, and a target that cannot even be made, in one line."""
    try:
        yield
    except USAGE_ERRORS as error:
        raise UsageError(str(error)) from error
    except TargetFailed as error:
        raise CommandFailed(str(error)) from error


def campaign(options: argparse.Namespace) -> int:
    with usage_errors():
        require_options(options)
        target, hello = load_target(options.target)
        judging = judging_of(options.level, options.without)
        asked = asked_of(options, hello)
        made = Campaign(
            target=target,
            judging=judging,
            asked=asked,
            budget=budget_of(options),
            seed=options.seed,
            known=known_of(options),
            out=Path(options.out),
            command=command_line(options),
            action_seconds=options.action_timeout,
        )
        if options.ladder:
            return ladder(made, hello, options)
        return one_campaign(made, options)


def one_campaign(made: Campaign, options: argparse.Namespace) -> int:
    perform(made, options)
    reporting.print_report(made, as_json=options.json)
    return made.result.exit_code


def perform(made: Campaign, options: argparse.Namespace) -> int:
    """Run it here or in worker processes; its exit code."""
    if options.workers > 1:
        with reporting.progress(made):
            made.adopt(run_in_workers(made, options.target, options.workers))
    else:
        with time_limit(options.action_timeout), reporting.progress(made):
            made.run()
    return made.result.exit_code


def require_options(options: argparse.Namespace) -> None:
    if options.workers < 1:
        raise UsageError("--workers is at least 1")
    require_timeout(options)
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a directory")


def require_timeout(options: argparse.Namespace) -> None:
    if not 0 <= options.action_timeout < float("inf"):
        raise UsageError("--action-timeout is in seconds, 0 for none")


def ladder(made: Campaign, hello: Hello, options: argparse.Namespace) -> int:
    """One campaign a rung, each with one feature more; stops at the first that is not clean."""
    order = [feature for feature in FEATURES if feature in hello.features - {"uncached"}]
    made.budget = replace_budget(made.budget, len(order))
    code = EXIT_CLEAN
    reports: list[dict[str, Any]] = []
    for height, added in enumerate(order, start=1):
        rung = frozenset(order[:height])
        made.asked = replace(made.asked, features=rung, newest=added)
        code = perform(made, options)
        reports.append({"features": sorted(rung), "added": [added], **made.to_json()})
        if not options.json:
            reporting.print_rung(made, [added])
        if code == EXIT_FAILED and not made.result.failure and height < len(order):
            code = EXIT_CLEAN  # a higher rung has the feature that the rule needs
        if code != EXIT_CLEAN:
            break
    if options.json:
        print(json.dumps({"exit_code": code, "ladder": reports}, indent=2))
    elif code != EXIT_CLEAN:
        reporting.print_report(made, as_json=False)
    return code


def replace_budget(budget: Budget, parts: int) -> Budget:
    return Budget(
        actions=None if budget.actions is None else max(budget.actions // parts, 1),
        seconds=None if budget.seconds is None else budget.seconds / parts,
    )


def judging_of(level: str, without: list[str]) -> Judging:
    judging = Judging(level, tuple(without))
    try:
        judging.rules()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return judging


def asked_of(options: argparse.Namespace, hello: Hello) -> Asked:
    asked = ask(hello, options.groups, options.features, options.blocks)
    strict = options.ordering == "strict"
    if strict and hello.name.startswith("vllm"):
        raise ImpossibleConfig("ordering strict is never a verdict on an engine: use target plain")
    return replace(asked, strict=strict)


def budget_of(options: argparse.Namespace) -> Budget:
    if options.actions is not None:
        if options.actions < 1:
            raise UsageError("--actions is at least 1")
        return Budget(actions=options.actions)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", options.time)
    if match is None:
        raise UsageError(f"no time {options.time!r}: 30, 30s, 10m or 2h is expected")
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    return Budget(seconds=seconds)


def known_of(options: argparse.Namespace) -> tuple[KnownViolation, ...]:
    path = Path(options.expect) if options.expect else default_expectations(options.target)
    return read_expectations(path) if path is not None else ()


def command_line(options: argparse.Namespace) -> str:
    """The command that repeats this campaign, without what only says where output goes."""
    parts = [
        "kvproof campaign",
        f"--target {options.target}{python_option()}",
        f"--level {options.level}",
    ]
    parts += [f"--groups {options.groups}"] if options.groups else []
    parts += [f"--blocks {options.blocks}"] if options.blocks else []
    parts += [f"--features {options.features}"] if options.features else []
    parts += ["--ladder"] if options.ladder else []
    parts += [f"--without {rule}" for rule in options.without]
    parts += ["--ordering strict"] if options.ordering == "strict" else []
    parts += [f"--actions {options.actions}" if options.actions else f"--time {options.time}"]
    parts += [f"--seed {options.seed}"]
    parts += [f"--workers {options.workers}"] if options.workers > 1 else []
    return " ".join(parts)


def replay(options: argparse.Namespace) -> int:
    with usage_errors():
        require_timeout(options)
        trace = trace_in(options.trace)
        without = options.without if options.without is not None else trace.header.without
        judging = judging_of(options.level or trace.header.level, list(without))
        if options.target is None:
            return replay_answers(trace, judging, options)
        target, hello = load_target(options.target)
        return replay_on_target(trace, target, hello, judging, options)


def trace_in(name: str) -> Trace:
    try:
        return read_trace(Path(name))
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error


def replay_answers(trace: Trace, judging: Judging, options: argparse.Namespace) -> int:
    try:
        verdict = judge_trace(judging, trace)
    except ActionDisabled as error:
        raise UsageError(f"{options.trace}: an action is not enabled there: {error}") from error
    reporting.print_replay(trace, trace.lines, verdict, "recorded answers", options.json)
    return exit_code_of(verdict.rule if verdict else None)


def replay_on_target(
    trace: Trace, target: Target, hello: Hello, judging: Judging, options: argparse.Namespace
) -> int:
    actions = [line.action for line in trace.lines]
    name = f"{hello.name} {hello.version}"
    try:
        with time_limit(options.action_timeout):
            run = perform_actions(
                target, judging, trace.header.config, actions, options.action_timeout
            )
    except ActionDisabled as error:
        print(f"kvproof: on {name} the trace goes another way: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (TargetFailed, UnsupportedConfig) as error:
        print(f"kvproof: {name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    verdict = run.lines[-1].verdict if run.lines else None
    reporting.print_replay(trace, tuple(run.lines), verdict, name, options.json)
    return exit_code_of(verdict.rule if verdict else None)


def show(options: argparse.Namespace) -> int:
    from kvproof_stateful import showing

    with usage_errors():
        trace = trace_in(options.trace)
    end = len(trace.lines) - 1
    if end < 0:
        raise UsageError(f"{options.trace}: a header without lines, there is nothing to show")
    first = options.first if options.first is not None else 0
    last = options.last if options.last is not None else end
    if not 0 <= first <= last <= end:
        raise UsageError(f"no lines {first} to {last}: {options.trace} has lines 0 to {end}")
    if options.json:
        print(json.dumps(showing.to_json(trace, first, last), indent=2))
    else:
        showing.print_trace(trace, options.trace, first, last, plain=options.no_color)
    return EXIT_CLEAN


def scenarios(options: argparse.Namespace) -> int:
    from kvproof_stateful.scenarios import HasPool, known_outcomes, play

    with usage_errors():
        target, hello = load_target(options.target)
        if not isinstance(target, HasPool):
            raise UsageError(f"target {hello.name} does not offer its block pool alone (make_pool)")
        outcomes = play(target, hello.version, known_outcomes(hello.name))
    reporting.print_scenarios(hello, outcomes, as_json=options.json)
    failed = any(outcome.verdict in ("violated", "stale") for outcome in outcomes)
    return EXIT_VIOLATION if failed else EXIT_CLEAN


def exit_code_of(rule: str | None) -> int:
    if rule is None:
        return EXIT_CLEAN
    return EXIT_FAILED if rule == TARGET_FAILED else EXIT_VIOLATION


def targets(options: argparse.Namespace) -> int:
    rows: list[tuple[str, Hello | str]] = []
    for name in installed_targets():
        try:
            rows.append((name, load_target(name)[1]))
        except (TargetNotInstalled, TargetFailed) as error:
            rows.append((name, str(error)))
    reporting.print_targets(rows, as_json=options.json)
    return EXIT_CLEAN if rows else EXIT_USAGE
