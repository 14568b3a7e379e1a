"""Render docs/faults.md from docs/faults.json, which is what `kvproof faults` measured.

kvproof faults --seeds 10 --workers 2 --write counterexamples --json > docs/faults.json
kvproof faults --compare --seeds 10 --workers 2 --json > docs/generation.json
python tools/fault_document.py --write docs/faults.md
python tools/fault_document.py --check docs/faults.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvproof_stateful.faults import FAULTS, PARTS, Fault

DOCS = Path(__file__).parents[1] / "docs"

INTRODUCTION = """\
# Seeded faults

The checker is checked: each of these faults is one small class, at most twelve lines, that
exchanges a part of the healthy plain implementation for a broken one.
`kvproof faults` searches for each by campaigns over everything its target offers, with nothing said
about where to look, and shrinks the shortest run that broke its rule.

```console
$ kvproof faults --list
$ kvproof faults double-free-in-one-batch
$ kvproof replay counterexamples/fault-double-free-in-one-batch.ndjson  # exit 1
```

A fault is *caught* if most searches see the rule that it breaks broken before any other.
`actions` and `seconds` are medians over the searches, from the start of a campaign; `trace` is the
length of the shrunk trace in actions, which is kept under [counterexamples](../counterexamples).
*Without* are rules that the fault breaks as well and that come first: they are left out.
A rule `exact` is that of the policy `exact:vllm-0.32`: the order in which blocks are forgotten is
no matter of the contract.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", type=Path, metavar="FILE")
    chosen.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    document = rendered(read("faults.json"), read("generation.json"))
    if options.write:
        options.write.write_text(document, encoding="utf-8")
        return 0
    if options.check.read_text(encoding="utf-8") != document:
        print(
            f"{options.check} is not what docs/*.json say: {sys.argv[0]} --write", file=sys.stderr
        )
        return 1
    return 0


def read(name: str) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((DOCS / name).read_text(encoding="utf-8"))
    return measured


def rendered(measured: dict[str, Any], generation: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in measured["faults"]}
    if rows.keys() != FAULTS.keys():
        raise SystemExit(f"not measured, or no fault: {sorted(rows.keys() ^ FAULTS.keys())}")
    parts = [INTRODUCTION, *summary(measured)]
    for part in PARTS:
        faults = [fault for fault in FAULTS.values() if fault.part.__module__ == part.__name__]
        parts.append(section(part.__name__, part.__doc__ or "", faults, rows))
    parts.append(compared(generation))
    return "\n".join(parts)


def summary(measured: dict[str, Any]) -> Iterator[str]:
    searches = {row["searches"] for row in measured["faults"]}
    yield (
        f"{measured['num_caught']} of {len(measured['faults'])} are caught by the rule that they "
        f"break, the median shrunk trace has {measured['median_trace_actions']:g} actions "
        f"({min(searches)} searches each, of at most a minute).\n"
    )


def section(module: str, doc: str, faults: Sequence[Fault], rows: dict[str, Any]) -> str:
    title = doc.partition("\n")[0].rstrip(".")
    path = f"../stateful_tests/{module.replace('.', '/')}.py"
    lines = [
        f"## {title}\n",
        f"[{module.rpartition('.')[2]}.py]({path})\n",
        "| fault | is | must break | breaks first | actions | seconds | trace |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    lines += [table_row(fault, rows[fault.name]) for fault in faults]
    return "\n".join(lines) + "\n"


def table_row(fault: Fault, row: dict[str, Any]) -> str:
    told = fault.sentence + (f" ({link(fault.report)})" if fault.report else "")
    first = ", ".join(
        rule if len(row["first_rules"]) == 1 else f"{rule} ({times})"
        for rule, times in sorted(row["first_rules"].items(), key=lambda item: -item[1])
    )
    trace = f"[{row['trace_actions']}](../counterexamples/fault-{fault.name}.ndjson)"
    left_out = ", ".join(fault.judging.without)
    rule = fault.rule + (f" (without {left_out})" if left_out else "")
    cells = (fault.name, told, rule, first, f"{row['actions']:,.0f}", f"{row['seconds']:g}")
    return "| " + " | ".join((*cells, trace)) + " |"


def link(report: str) -> str:
    """owner/name#number, as GitHub writes it."""
    match = re.fullmatch(r"https://github.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", report)
    return f"[{match[1]}#{match[2]}]({report})" if match else report


def compared(generation: dict[str, Any]) -> str:
    longest = generation["most_actions"]
    lines = [
        "## Generation, against plain uniform choice\n",
        "What a campaign draws is weighted: families of prompts with common prefixes, pools that "
        "are scarce, actions that lead somewhere.  Plain uniform choice takes any enabled action "
        "with the same chance, over prompts of any tokens and lengths, and otherwise the same "
        "settings.  Median judged actions until the rule is broken (`kvproof faults --compare`):\n",
        "| fault | a campaign | uniform choice |",
        "|---|---:|---:|",
    ]
    for row in generation["compared"]:
        uniform = f"{row['uniform_actions']:,.0f}"
        if row["uniform_actions"] >= longest:
            uniform = f"more than {longest:,}"
        lines.append(f"| {row['name']} | {row['actions']:,.0f} | {uniform} |")
    middle = f"| **median** | {generation['actions']:,.0f} | {generation['uniform_actions']:,.0f} |"
    return "\n".join([*lines, middle]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
