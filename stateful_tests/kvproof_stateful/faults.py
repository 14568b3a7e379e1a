"""Ten seeded faults of the plain manager: what a campaign must find, and by which rule.

Each is one small class, the way a real engine had it or could have it.  A shrunk trace of
each is kept under counterexamples/; this writes them anew:

    python -m kvproof_stateful.faults --write counterexamples
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.single_type_manager import SingleTypeManager
from kvproof_spec.config import Kind
from kvproof_spec.state import ActionDisabled
from kvproof_spec.trace import Header, Trace, read_trace, write_trace
from kvproof_stateful.campaign import Budget, Campaign
from kvproof_stateful.plan import Asked, Plan
from kvproof_stateful.running import Judging, Run, perform_actions
from kvproof_stateful.shrinking import Smallest, drop_picks, shrink
from kvproof_stateful.targets.plain import PlainTarget

VLLM = "https://github.com/vllm-project/vllm"
NANO_VLLM = "https://github.com/GeeeekExplorer/nano-vllm"

COMMAND = "python -m kvproof_stateful.faults --write counterexamples"


@dataclass(frozen=True, slots=True)
class Fault:
    """A manager that breaks `rule`, judged at `level`.

    `report` is where a real engine had it or a reviewer feared it; empty if none is known.
    """

    name: str
    rule: str
    level: str
    sentence: str
    report: str
    manager: type[KVCacheManager]

    def target(self) -> PlainTarget:
        """The plain target with the faulty manager."""

        class FaultyTarget(PlainTarget):
            name = f"plain+{self.name}"
            manager_class = self.manager

        return FaultyTarget()


FAULTS: dict[str, Fault] = {}
"""By name, in the order of this file."""


def seeded(
    name: str, rule: str, report: str = "", level: str = "contract"
) -> Callable[[type[KVCacheManager]], type[KVCacheManager]]:
    """Make a manager a fault; its sentence is the first line of its docstring."""

    def made(manager: type[KVCacheManager]) -> type[KVCacheManager]:
        sentence = (manager.__doc__ or "").partition("\n")[0]
        FAULTS[name] = Fault(name, rule, level, sentence, report, manager)
        return manager

    return made


def in_each_kind(mixin: type) -> dict[Kind, type[SingleTypeManager]]:
    """The manager of each kind of group, with what `mixin`, an abstract one, does differently."""
    usual = KVCacheManager.manager_classes
    return {kind: type(mixin.__name__, (mixin, usual[kind]), {}) for kind in usual}


@seeded("double-free-in-one-batch", "I1", f"{VLLM}/issues/42571")
class DoubleFreeInOneBatch(KVCacheManager):
    """A release gives its blocks back twice in one batch."""

    class Group(SingleTypeManager):
        def free(self, request_id: int) -> None:
            blocks = self.pop_blocks(request_id)
            self.pool.give_back([*reversed(blocks), *reversed(blocks)])

    class Pool(BlockPool):
        def refuse_what_is_free(self, counted_down: Sequence[int]) -> None:
            """Count on."""

    block_pool_class = Pool
    manager_classes = in_each_kind(Group)


@seeded("touch-after-allocation", "R3", f"{VLLM}/pull/10507")
class TouchAfterAllocation(KVCacheManager):
    """Hits are held only after the new blocks were taken, for which they were free."""

    class Pool(BlockPool):
        late: tuple[int, ...] = ()

        def touch(self, blocks: Iterable[int]) -> None:
            self.late += tuple(blocks)

    block_pool_class = Pool

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        new, pool = super().allocate_slots(*arguments, **options), self.block_pool
        assert isinstance(pool, self.Pool)
        BlockPool.touch(pool, pool.late)
        pool.late = ()
        return new


@seeded("hits-held-group-by-group", "R3", f"{VLLM}/issues/33775")
class HitsHeldGroupByGroup(KVCacheManager):
    """A group takes its external tokens' blocks before the next one holds its hits."""

    class Group(SingleTypeManager):
        def adopt_hits(
            self, request_id: int, hits: Sequence[int], num_computed_tokens: int
        ) -> None:
            super().adopt_hits(request_id, hits, num_computed_tokens)
            self.allocate_new(request_id, num_computed_tokens)

    manager_classes = in_each_kind(Group)


@seeded("reclaimable-hits-not-counted", "R2", f"{VLLM}/pull/11565")
class ReclaimableHitsNotCounted(KVCacheManager):
    """Hits that are free count as room for new blocks, though they are about to be held."""

    class Group(SingleTypeManager):
        def reclaimed_hits(self, hits: Sequence[int]) -> int:
            return 0

    manager_classes = in_each_kind(Group)


@seeded("key-kept-on-reuse", "I2", f"{NANO_VLLM}/issues/163")
class KeyKeptOnReuse(KVCacheManager):
    """A block that is handed out again is still found under its old key."""

    class Pool(BlockPool):
        def get_new_blocks(self, num_blocks: int) -> list[int]:
            blocks = list(self.free_order()[:num_blocks])
            self.touch(blocks)
            return blocks

    block_pool_class = Pool


@seeded("unordered-load-findable-before-arrival", "I6")
class UnorderedLoadFindableBeforeArrival(KVCacheManager):
    """What an unordered load will bring is published when the load starts."""

    def allocate_slots(self, *arguments: Any, **options: Any) -> BlockIds | None:
        return super().allocate_slots(*arguments, **{**options, "delay_cache_blocks": False})


@seeded("forward-order-free", "exact", f"{VLLM}/issues/48489", level="exact:vllm-0.32")
class ForwardOrderFree(KVCacheManager):
    """A release gives its blocks back first to last: short prefixes are forgotten first."""

    class Group(SingleTypeManager):
        def free(self, request_id: int) -> None:
            self.pool.free_blocks(self.pop_blocks(request_id))

    manager_classes = in_each_kind(Group)


@seeded("window-block-returned-in-flight", "R7", f"{VLLM}/issues/47728")
class WindowBlockReturnedInFlight(KVCacheManager):
    """The window slides with what is scheduled; a step in flight still reads left of it."""

    def processed_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return num_computed_tokens


@seeded("hit-of-all-tokens", "R4", f"{NANO_VLLM}/issues/114")
class HitOfAllTokens(KVCacheManager):
    """A hit may cover every known token, which leaves nothing to compute."""

    def longest_useful_hit(self, request: Request) -> int:
        return request.num_tokens


@seeded("one-bit-hash", "I2", "https://github.com/openvinotoolkit/openvino.genai/issues/3722")
class OneBitHash(KVCacheManager):
    """Digests are cut to one bit, and what they find is not compared with the tokens."""

    @staticmethod
    def key_of(digest: bytes) -> bytes:
        return bytes([digest[0] & 1])


@dataclass(frozen=True, slots=True)
class Detection:
    """A run that broke a fault's rule, not yet shrunk."""

    plan: Plan
    run: Run
    actions: int  # judged by the campaign until then
    seconds: float  # until then


class Detected(Exception):
    """Ends a search."""

    def __init__(self, detection: Detection) -> None:
        super().__init__("the fault was detected")
        self.detection = detection


def search(fault: Fault, seed: int, seconds: float = 60) -> Detection | None:
    """A campaign over everything the plain target offers, until it breaks the fault's rule.

    What breaks other rules on the way is passed over, and not shrunk.
    """

    class Search(Campaign):
        def _keep(self, rule: str, run: Run, plan: Plan, hung: bool) -> None:
            if rule == fault.rule:
                actions, passed = self.result.coverage.lines, time.monotonic() - self.started
                raise Detected(Detection(plan, run, actions, passed))

    budget = Budget(seconds=seconds)
    try:
        Search(fault.target(), Judging(fault.level), Asked(), budget, seed).run()
    except Detected as end:
        return end.detection
    return None


def shrunk_trace(fault: Fault, seeds: Iterable[int]) -> Trace | None:
    """Of what these seeds find, the run that is shortest after the cheap part of shrinking."""
    shortest: Smallest | None = None
    for seed in seeds:
        found = search(fault, seed)
        if found is not None:
            target, judging = fault.target(), Judging(fault.level)
            smallest = Smallest(target, judging, fault.rule, found.plan, found.run)
            drop_picks(smallest)
            if shortest is None or len(smallest.run.lines) < len(shortest.run.lines):
                shortest = smallest
    if shortest is None:
        return None
    shrink(shortest)
    return trace_of(fault, shortest.run)


def trace_of(fault: Fault, run: Run) -> Trace:
    hello = fault.target().hello()
    header = Header(run.config, hello.name, hello.version, fault.level, command=COMMAND)
    return Trace(header, tuple(run.lines))


def recorded_anew(fault: Fault, trace: Trace) -> Trace | None:
    """The same actions with today's answers, if they still break the fault's rule."""
    actions = [line.action for line in trace.lines]
    judging, config = Judging(fault.level), trace.header.config
    try:
        again = trace_of(fault, perform_actions(fault.target(), judging, config, actions))
    except ActionDisabled:
        return None
    return again if again.verdict is not None and again.verdict.rule == fault.rule else None


def trace_path(folder: Path, fault: Fault) -> Path:
    return folder / f"fault-{fault.name}.ndjson"


def write_traces(folder: Path, faults: Iterable[Fault], seeds: Sequence[int]) -> None:
    """Search, shrink, and keep the shorter of what is found and what is there."""
    for fault in faults:
        path = trace_path(folder, fault)
        there = recorded_anew(fault, read_trace(path)) if path.exists() else None
        traces = [trace for trace in (there, shrunk_trace(fault, seeds)) if trace is not None]
        if not traces:
            raise SystemExit(f"{fault.name}: {fault.rule} was not found")
        shortest = min(traces, key=lambda trace: len(trace.lines))
        write_trace(path, shortest)
        print(f"{path}: {fault.rule} in {len(shortest.lines)} actions")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvproof_stateful.faults", description=__doc__)
    parser.add_argument("--write", metavar="DIR", type=Path, required=True)
    parser.add_argument("--seeds", metavar="N", type=int, default=5, help="search N seeds")
    parser.add_argument("names", metavar="FAULT", nargs="*", help="only these faults")
    options = parser.parse_args()
    chosen = [FAULTS[name] for name in options.names or FAULTS]
    write_traces(options.write, chosen, range(options.seeds))


if __name__ == "__main__":
    main()
