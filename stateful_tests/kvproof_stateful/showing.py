"""A trace as a picture: who holds each block, line by line, and the block that it ends with.

Holders follow from the answers.  What only a snapshot shows (free, findable, counted) is
shown where there is one, which is the last line of a trace that ends in a violation.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from kvproof_spec.actions import CompleteStep, Release
from kvproof_spec.answers import Snapshot
from kvproof_spec.derived import blocks_between, needed_in_flight
from kvproof_spec.pages import NULL_BLOCK
from kvproof_spec.state import State
from kvproof_spec.trace import Line, Trace, Verdict
from kvproof_stateful.reporting import WIDE, ReportConsole
from kvproof_stateful.steps import followed, step_lines, told_rule

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
"""Of requests, one after the other."""

VERBS = {"Allocate": "alloc", "CompleteStep": "return", "CompleteLoad": "loaded"}
"""Actions whose name is too long for the head of a column."""

NAMED = re.compile(r"\bblocks? [\[({]?(\d+(?:, \d+)*)|: (\d+) became")
"""Blocks in the sentences of the rules."""

LEGEND = {
    "?": "?R1 named by R1's lookup",
    "~": "~ a step in flight needs it",
    "<": "< a load is under way",
    ">": "> a store is under way",
    "=": "= a copy is to be made from or to it",
    "kept": "kept back for a step in flight",
    "*": "* findable",
    "#": "#1 counted so, which is not how often it is held",
    "free!": "free! listed as free, though held",
    "lost": "lost: neither held nor listed as free",
}


class Holder(NamedTuple):
    """A table entry that names the block."""

    request: int
    group: int
    entry: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block after one line.

    `listed`, `findable` and `counted` are None where no snapshot shows them; `kept` are
    the references of requests that have left, `copies` those of copies not yet issued.
    """

    holders: tuple[Holder, ...] = ()
    kept: int = 0
    in_flight: bool = False
    loading: bool = False
    storing: bool = False
    copies: int = 0
    named_for: int | None = None  # the request whose lookup has just found it
    listed: bool | None = None
    findable: bool | None = None
    counted: int | None = None

    @property
    def idle(self) -> bool:
        """Nobody has to do with it."""
        used = self.in_flight or self.loading or self.storing or self.findable
        return not (self.references or used or self.odd) and self.named_for is None

    @property
    def references(self) -> int:
        return len(self.holders) + self.kept + self.copies

    @property
    def odd(self) -> str:
        """How the snapshot contradicts the answers, if it does."""
        words = []
        if self.listed is not None and self.listed == bool(self.references):
            words.append("free!" if self.listed else "lost")
        if self.counted not in (None, self.references):
            words.append(f"#{self.counted}")
        return " ".join(words)

    def text(self, groups: int) -> str:
        """The cell: `R0:2` is entry 2 of request 0, `R0:1.2` that of its group 1."""
        places: dict[tuple[int, int], list[int]] = {}
        for holder in self.holders:
            places.setdefault((holder.group, holder.entry), []).append(holder.request)
        words = [
            f"R{','.join(map(str, requests))}:{f'{group}.' if groups > 1 else ''}{entry}"
            for (group, entry), requests in places.items()
        ]
        words += ["kept"] if self.kept else []
        words += [f"?R{self.named_for}"] if self.named_for is not None else []
        used = {"~": self.in_flight, "<": self.loading, ">": self.storing}
        used |= {"=": bool(self.copies), "*": bool(self.findable)}
        marks = "".join(mark for mark, is_so in used.items() if is_so)
        return (" ".join(words) or ".") + marks + (f" {self.odd}" if self.odd else "")


@dataclass(frozen=True, slots=True)
class Frame:
    """The pool after one line."""

    number: int
    line: Line
    before: State
    state: State
    blocks: dict[int, BlockView]  # those that somebody has to do with


def frames(trace: Trace) -> list[Frame]:
    told = followed(trace.header.config, trace.lines)
    return [
        Frame(number, line, before, after, views(after, line))
        for number, (line, before, after) in enumerate(told)
    ]


def views(state: State, line: Line) -> dict[int, BlockView]:
    """Each block after a line, but for those that nobody has to do with."""
    held, named = entries(state), named_by_lookup(state)
    loading, storing, in_flight = under_load(state), being_stored(state), needed_in_flight(state)
    copied = [block for copy in state.copies for block in (copy.source, copy.destination)]
    shown = ShownBlocks(line.snapshot)
    every = {
        block: BlockView(
            holders=tuple(held.get(block, ())),
            kept=state.deferred.count(block),
            in_flight=block in in_flight,
            loading=block in loading,
            storing=block in storing,
            copies=copied.count(block),
            named_for=named.get(block),
            **shown.of(block),
        )
        for block in range(1, state.config.num_blocks)
    }
    return {block: view for block, view in every.items() if not view.idle}


def entries(state: State) -> dict[int, list[Holder]]:
    """The table entries that name each block."""
    found: dict[int, list[Holder]] = {}
    for request in state.requests:
        for group, table in enumerate(request.tables):
            for entry, block in enumerate(table):
                found.setdefault(block, []).append(Holder(request.id, group, entry))
    return found


def named_by_lookup(state: State) -> dict[int, int]:
    """The blocks of a hit that is not yet used, and the request that looked up."""
    if state.hit is None:
        return {}
    return {block: state.hit.request for table in state.hit.tables for block in table}


def under_load(state: State) -> set[int]:
    """Blocks that an unordered load still fills."""
    found: set[int] = set()
    for request in state.requests:
        if request.status == "loading" and request.load is not None:
            found |= blocks_between(state, request.tables, *request.load)
    for transfer in state.transfers:
        found.update(cell[0] for cell in transfer.cells if transfer.inbound)
    return found


def being_stored(state: State) -> set[int]:
    """Blocks that an outbound store still reads."""
    stores = [transfer for transfer in state.transfers if not transfer.inbound]
    return {cell[0] for transfer in stores for cell in transfer.cells}


class ShownBlocks:
    """What a snapshot shows of each block."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot
        self.listed = set(snapshot.free_order) if snapshot else set[int]()
        keys = snapshot.keys if snapshot else None
        self.findable = None if keys is None else {b for _, copies in keys for b in copies}

    def of(self, block: int) -> dict[str, Any]:
        if self.snapshot is None:
            return {}
        counts = self.snapshot.reference_counts
        return {
            "listed": block in self.listed,
            "findable": None if self.findable is None else block in self.findable,
            "counted": None if counts is None else counts[block],
        }


def blocks_of(verdict: Verdict | None, shown: Sequence[Frame]) -> set[int]:
    """The blocks that a violation is about: those its witness names, else those it changed."""
    if verdict is None or verdict.rule is None or not shown:
        return set()
    return named_in(verdict.witness) or changed_last(shown)


def named_in(witness: str) -> set[int]:
    found: set[int] = set()
    for listed, became in NAMED.findall(witness):
        found.update(int(number) for number in (listed or became).split(", "))
    return found - {NULL_BLOCK}


def changed_last(shown: Sequence[Frame]) -> set[int]:
    last, before = shown[-1].blocks, shown[-2].blocks if len(shown) > 1 else {}
    return {block for block, view in last.items() if before.get(block, BlockView()) != view}


def columns_of(chosen: Sequence[Frame], room: int, groups: int, whole: bool) -> list[Frame]:
    """The frames that fit into `room` characters: all, or the last of each step, or the last.

    Of a range that was asked for (not `whole`) every line is wanted.
    """
    kept = list(chosen)
    if whole and width_of(kept, groups) > room:
        pairs = zip(kept, [*kept[1:], None], strict=True)
        kept = [f for f, after in pairs if after is None or after.state.issued != f.state.issued]
    while len(kept) > 1 and width_of(kept, groups) > room:
        del kept[0]
    return kept


def width_of(columns: Sequence[Frame], groups: int) -> int:
    """Characters that columns take, each two apart."""
    return sum(2 + column_width(frame, groups) for frame in columns)


def column_width(frame: Frame, groups: int) -> int:
    cells = [view.text(groups) for view in frame.blocks.values()]
    return max(map(len, [*head_of(frame).split("\n"), *cells]))


def head_of(frame: Frame) -> str:
    """The line's number, and what was asked in it."""
    action = frame.line.action
    verb = VERBS.get(type(action).__name__, type(action).__name__.lower())
    if isinstance(action, Release):
        verb = action.reason
    if isinstance(action, CompleteStep):
        verb += f" {action.step}"
    request = getattr(action, "request", None)
    return f"{frame.number}\n{verb}\n" + ("" if request is None else f"R{request}")


def block_table(
    columns: Sequence[Frame], struck: Iterable[int], groups: int, verdict: Verdict | None
) -> Table:
    """A row a block that anybody has to do with, a column a frame."""
    struck = set(struck)
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("\n\nblock", justify="right", no_wrap=True)
    for frame in columns:
        table.add_column(head_of(frame), no_wrap=True)
    last = columns[-1]
    for block in sorted(struck.union(*(frame.blocks for frame in columns))):
        hit = block in struck
        row = [Text(f"{'!' if hit else ''}{block}", style="bold red" if hit else "")]
        for frame in columns:
            view = frame.blocks.get(block, BlockView())
            ends = hit and frame is last and frame.line.verdict is verdict
            row.append(Text(view.text(groups), style="bold reverse red" if ends else style(view)))
        table.add_row(*row)
    return table


def style(view: BlockView) -> str:
    if view.holders:
        return COLORS[view.holders[0].request % len(COLORS)]
    return "dim" if view.idle else ""


def legend(columns: Sequence[Frame], groups: int) -> str:
    """What the marks mean that stand in these columns."""
    cells = " ".join(view.text(groups) for frame in columns for view in frame.blocks.values())
    place = "R0:1.2 entry 2 of R0 in group 1" if groups > 1 else "R0:2 entry 2 of R0"
    used = [text for mark, text in LEGEND.items() if mark in cells]
    return "; ".join([f"{place}, shared R0,1", ". held by nobody", *used])


def never_held(columns: Sequence[Frame], struck: set[int], num_blocks: int) -> str:
    rows = struck.union(*(frame.blocks for frame in columns))
    rest = num_blocks - 1 - len(rows & set(range(1, num_blocks)))
    return f"{rest} more blocks are held by nobody here" if rest else ""


def print_trace(trace: Trace, name: str, first: int, last: int, *, plain: bool) -> None:
    """Lines `first` to `last`: told one by one, then as a table of blocks."""
    config, verdict = trace.header.config, trace.verdict
    groups, every = len(config.groups), frames(trace)
    console = ReportConsole(shutil.get_terminal_size((WIDE, 24)).columns, plain=plain)
    for number, text in enumerate(step_lines(config, trace.lines)):
        if first <= number <= last:
            print(text)
    chosen = every[first : last + 1]
    struck = blocks_of(verdict, every)
    room = console.width - 1 - max(len("block"), len(str(config.num_blocks)) + 1) - 2
    columns = columns_of(chosen, room, groups, whole=len(chosen) == len(every))
    console.print(block_table(columns, struck, groups, verdict), overflow="ellipsis")
    notes = [legend(columns, groups), never_held(columns, struck, config.num_blocks)]
    notes.append(hint(columns, chosen, console.width))
    for note in filter(None, notes):
        console.print(note)
    if verdict is not None and verdict.rule is not None:
        console.print("\n".join(told_rule(verdict)))
    else:
        console.print(f"{name} records no violation")


def hint(columns: Sequence[Frame], chosen: Sequence[Frame], width: int) -> str:
    """Says which lines have no column, and how to see them."""
    if len(columns) == len(chosen):
        return ""
    by_step = {f.state.issued for f in columns} >= {f.state.issued for f in chosen}
    what = "after the last line of each step" if by_step else f"lines {shown_numbers(columns)}"
    return (
        f"{len(columns)} of {len(chosen)} lines fit into {width} characters: {what}; "
        "--from LINE --to LINE chooses others, each with its column"
    )


def shown_numbers(columns: Sequence[Frame]) -> str:
    numbers = [frame.number for frame in columns]
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def to_json(trace: Trace, first: int, last: int) -> dict[str, Any]:
    """The same as data: lines, and in each the blocks that somebody has to do with."""
    every, verdict = frames(trace), trace.verdict
    told = list(step_lines(trace.header.config, trace.lines))
    broken = verdict is not None and verdict.rule is not None
    return {
        "target": trace.header.target,
        "version": trace.header.target_version,
        "level": trace.header.level,
        "groups": [group.kind for group in trace.header.config.groups],
        "num_blocks": trace.header.config.num_blocks,
        "lines": [frame_to_json(f, told[f.number]) for f in every[first : last + 1]],
        "violation": {
            "line": len(every) - 1,
            "rule": verdict.rule,
            "witness": verdict.witness,
            "blocks": sorted(blocks_of(verdict, every)),
        }
        if verdict is not None and broken
        else None,
    }


def frame_to_json(frame: Frame, told: str) -> dict[str, Any]:
    return {
        "line": frame.number,
        "step": frame.before.issued,
        "action": type(frame.line.action).__name__,
        "request": getattr(frame.line.action, "request", None),
        "told": told.split(maxsplit=1)[1],
        "blocks": {str(block): block_to_json(view) for block, view in frame.blocks.items()},
    }


def block_to_json(view: BlockView) -> dict[str, Any]:
    return {
        "holders": [holder._asdict() for holder in view.holders],
        "kept": view.kept,
        "in_flight": view.in_flight,
        "loading": view.loading,
        "storing": view.storing,
        "copies": view.copies,
        "named_for": view.named_for,
        "listed_free": view.listed,
        "findable": view.findable,
        "counted": view.counted,
    }
