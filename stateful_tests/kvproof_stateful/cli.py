"""The command line.  Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import kvproof_stateful
from kvproof_stateful.exits import EXIT_INTERRUPTED, EXIT_USAGE, CommandFailed

EXIT_CODES = """\
exit codes:
  0    clean: no unexpected violation, every claimed rule was evaluated
  1    an unexpected violation, or an expected one that no longer shows
  2    wrong usage: an unknown target, an impossible configuration, a damaged trace
  3    the target failed (raised, hung, answered nonsense), or a claimed rule was never evaluated
  130  interrupted; what was found is kept
"""

CAMPAIGN_EXAMPLES = """\
examples:
  kvproof campaign                                  30 s on the built-in plain manager
  kvproof campaign --target vllm-manager --level exact:vllm-0.32 --actions 200000 \\
      --groups full:4,sliding:4:8 --seed 1 --out found --json > report.json
  kvproof campaign --target vllm --time 10m --features full,sliding,async,preempt,worker
  kvproof campaign --target plain --ladder          one feature after the other
  kvproof campaign --python ~/envs/vllm --target vllm-manager      another environment's vLLM

"""

FAULTS_EXAMPLES = """\
examples:
  kvproof faults --list
  kvproof faults double-free-in-one-batch           one of them, a second
  kvproof faults --seeds 10 --workers 2 --json > faults.json
  kvproof faults --compare --seeds 10               against plain uniform choice

exit codes:
  0    each was caught by the rule that it breaks; with --compare: in half the actions at most
  2    wrong usage: no such fault
  3    one was not
  130  interrupted; what was measured is printed
"""

BENCH_MANAGER_EXAMPLES = """\
workloads (block size 16, one full attention group):
  a  long shared prefix: 64 requests of 32k tokens that share 28k, churn
  b  chat under pressure: 2,000 requests with shared system prompts, 64 decodes each
  c  decode only: 256 running
  d  eviction storm: unique requests, always evicting
  e  the first 2,000 requests of a production trace

examples:
  kvproof bench manager                             all of it, some minutes
  kvproof bench manager --json --plot manager.png > manager.json
  kvproof bench manager --workloads b,c --scale 0.1
  kvproof bench manager --against plain --requests 20     how much is noise

exit codes:
  0    measured
  2    wrong usage: no vLLM 0.32 here, an unknown workload, no matplotlib for --plot
  3    the managers did not do the same
  130  interrupted; what was measured is printed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is as `--help` says."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        elsewhere = getattr(options, "python", None)
        if elsewhere is not None:
            from kvproof_stateful.elsewhere import is_here, run_elsewhere

            if not is_here(elsewhere):
                return run_elsewhere(elsewhere, sys.argv[1:] if arguments is None else arguments)
        return int(options.command(options))
    except CommandFailed as error:
        print(f"kvproof: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output is gone; say nothing more on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        print(f"kvproof: {message} (see: {self.prog} --help)", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="kvproof",
        description="Test a paged KV-cache manager against an executable specification.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=kvproof_stateful.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_campaign(commands)
    add_replay(commands)
    add_show(commands)
    add_scenarios(commands)
    add_faults(commands)
    add_targets(commands)
    add_bench(commands)
    return parser


Commands = Any  # argparse names no type for what add_subparsers returns


def add_python(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--python",
        metavar="ENV",
        help="run in this virtual environment (or by this Python), which has the engine",
    )


def add_campaign(commands: Commands) -> None:
    command = commands.add_parser(
        "campaign",
        help="drive a target through seeded random runs and judge every answer",
        description="Drive a target through seeded random runs and judge every answer.\n"
        "The same seed gives the same runs; each violation is shrunk to a minimal trace.",
        epilog=CAMPAIGN_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run_campaign)
    command.add_argument(
        "--target", default="plain", help="what is tested (see: kvproof targets; default: plain)"
    )
    add_python(command)
    command.add_argument(
        "--level",
        default="contract",
        help="safety (I1 to I6), contract (and the rules, default) or exact:POLICY",
    )
    command.add_argument(
        "--groups", help="cache groups, as full:4,sliding:4:32 (block size, window, in tokens)"
    )
    command.add_argument("--blocks", type=int, help="blocks of the pool, the null block included")
    chosen = command.add_mutually_exclusive_group()
    chosen.add_argument("--features", help="exactly these, comma-separated (default: drawn)")
    chosen.add_argument(
        "--ladder", action="store_true", help="switch the features on one after the other"
    )
    command.add_argument(
        "--without", action="append", default=[], metavar="RULE", help="do not judge by this rule"
    )
    command.add_argument(
        "--ordering",
        choices=("stream", "strict"),
        default="stream",
        help="strict: steps are not ordered among themselves (never a verdict on an engine)",
    )
    budget = command.add_mutually_exclusive_group()
    budget.add_argument("--actions", type=int, help="judge this many actions")
    budget.add_argument("--time", default="30s", help="run this long: 30, 30s, 10m, 2h")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--workers", type=int, default=1, metavar="K", help="processes")
    command.add_argument(
        "--expect", metavar="FILE", help="known violations (default: those kept for the target)"
    )
    command.add_argument(
        "--out", metavar="DIR", default="kvproof-out", help="where traces are saved"
    )
    command.add_argument(
        "--action-timeout", type=float, default=20, metavar="S", help="seconds (0: none)"
    )
    command.add_argument("--json", action="store_true", help="the report as JSON on stdout")


def add_replay(commands: Commands) -> None:
    command = commands.add_parser(
        "replay",
        help="judge a saved trace again, or perform it on a target",
        description="Judge the answers of a saved trace, or perform its actions on a target.",
        epilog="examples:\n  kvproof replay found/I2-0a1b2c3d.ndjson\n"
        "  kvproof replay found/I2-0a1b2c3d.ndjson --target vllm-manager\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run_replay)
    command.add_argument("trace", help="a trace file (NDJSON)")
    command.add_argument("--target", help="perform the actions on this target")
    add_python(command)
    command.add_argument("--level", help="another level than the trace's own")
    command.add_argument("--without", action="append", metavar="RULE")
    command.add_argument("--action-timeout", type=float, default=20, metavar="S")
    command.add_argument("--json", action="store_true", help="the verdict as JSON on stdout")


def add_show(commands: Commands) -> None:
    command = commands.add_parser(
        "show",
        help="show a saved trace in the terminal: who holds each block, line by line",
        description="Tell a saved trace line by line, then show it as a table: a row a block, a\n"
        "column a line (or a step, if lines are too many), the blocks of the violation marked.\n"
        "It judges nothing: 0 says that the trace could be shown.",
        epilog="examples:\n  kvproof show found/I2-0a1b2c3d.ndjson\n"
        "  kvproof show found/I2-0a1b2c3d.ndjson --from 4 --to 9\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run_show)
    command.add_argument("trace", help="a trace file (NDJSON)")
    command.add_argument("--from", dest="first", type=int, metavar="LINE", help="first line shown")
    command.add_argument("--to", dest="last", type=int, metavar="LINE", help="last line shown")
    command.add_argument("--no-color", action="store_true", help="no colors on a terminal either")
    command.add_argument("--json", action="store_true", help="the same as JSON on stdout")


def add_scenarios(commands: Commands) -> None:
    command = commands.add_parser(
        "scenarios",
        help="play named scenarios on a target's block pool: what no action reaches",
        description="Play named scenarios on a target's block pool alone: what no action of the\n"
        "specification reaches, a block freed twice in one batch, say.",
        epilog="examples:\n  kvproof scenarios --target plain\n"
        "  kvproof scenarios --target vllm-manager --json\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run_scenarios)
    command.add_argument("--target", default="plain", help="whose pool (default: plain)")
    add_python(command)
    command.add_argument("--json", action="store_true", help="the outcomes as JSON on stdout")


def add_faults(commands: Commands) -> None:
    command = commands.add_parser(
        "faults",
        help="search for the seeded faults of the plain implementation: is each found?",
        description="Search for each seeded fault by campaigns over everything its target offers,\n"
        "and shrink the shortest run that broke its rule.  A fault is caught if most searches\n"
        "see the rule that it breaks broken first.",
        epilog=FAULTS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run_faults)
    command.add_argument("names", nargs="*", metavar="FAULT", help="only these (default: all)")
    command.add_argument("--list", action="store_true", help="name them, and search for none")
    command.add_argument(
        "--compare", action="store_true", help="with searches by plain uniform choice"
    )
    command.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="searches a fault (default: 3)"
    )
    command.add_argument(
        "--time", type=float, default=60, metavar="S", help="seconds a search (default: 60)"
    )
    command.add_argument("--workers", type=int, default=1, metavar="K", help="processes")
    command.add_argument(
        "--write", type=Path, metavar="DIR", help="keep the shorter of each trace and the one there"
    )
    command.add_argument("--json", action="store_true", help="the figures as JSON on stdout")


def add_targets(commands: Commands) -> None:
    command = commands.add_parser(
        "targets",
        help="list the targets, what they can do, and which rules they claim",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run_targets)
    add_python(command)
    command.add_argument("--json", action="store_true")


def add_bench(commands: Commands) -> None:
    command = commands.add_parser("bench", help="measure kvproof itself")
    kinds = command.add_subparsers(required=True, metavar="WHAT")
    campaign = kinds.add_parser(
        "campaign",
        help="judged actions a second on target plain, one core",
        description="Judged actions a second on target plain at the standard scope: 8 blocks of "
        "2 tokens, 3 requests, full attention and a sliding window, all rules.",
    )
    campaign.set_defaults(command=run_bench_campaign)
    campaign.add_argument("--actions", type=int, default=1_000_000, help="for the memory figure")
    campaign.add_argument("--json", action="store_true")
    manager = kinds.add_parser(
        "manager",
        help="the plain manager against the genuine one of an installed vLLM 0.32.0",
        description="The plain manager against vLLM's KVCacheManager: the same requests, "
        "scheduler and steps, a round of one after a round of the other in one process.\n"
        "Lookup, allocation, decode, free and hashing are timed apart; a figure is the median "
        "of paired ratios.",
        epilog=BENCH_MANAGER_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    manager.set_defaults(command=run_bench_manager)
    manager.add_argument("--workloads", metavar="a,b,...", help="only these (default: all)")
    manager.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="X times the requests (default: 1)"
    )
    manager.add_argument("--requests", type=int, metavar="N", help="at most N requests a workload")
    manager.add_argument(
        "--against",
        choices=("vllm", "plain"),
        default="vllm",
        help="plain: against itself, which shows how much is noise",
    )
    manager.add_argument("--trace", metavar="FILE", help="another trace for workload e")
    manager.add_argument("--plot", metavar="FILE", help="a picture (needs matplotlib)")
    manager.add_argument("--json", action="store_true", help="the figures as JSON on stdout")


def run_campaign(options: argparse.Namespace) -> int:
    from kvproof_stateful.commands import campaign

    return campaign(options)


def run_replay(options: argparse.Namespace) -> int:
    from kvproof_stateful.commands import replay

    return replay(options)


def run_show(options: argparse.Namespace) -> int:
    from kvproof_stateful.commands import show

    return show(options)


def run_scenarios(options: argparse.Namespace) -> int:
    from kvproof_stateful.commands import scenarios

    return scenarios(options)


def run_faults(options: argparse.Namespace) -> int:
    from kvproof_stateful.faults.command import faults

    return faults(options)


def run_targets(options: argparse.Namespace) -> int:
    from kvproof_stateful.commands import targets

    return targets(options)


def run_bench_campaign(options: argparse.Namespace) -> int:
    from kvproof_stateful.bench import bench_campaign

    return bench_campaign(options.actions, as_json=options.json)


def run_bench_manager(options: argparse.Namespace) -> int:
    from kvproof_stateful.bench_manager.command import bench_manager

    return bench_manager(options)


if __name__ == "__main__":
    sys.exit(main())
