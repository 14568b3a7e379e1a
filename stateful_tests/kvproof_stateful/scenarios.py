"""What no action of the specification reaches: named scenarios on a block pool alone.

Actions never free a block twice or ask for a negative number of blocks; engines and their
connectors have done so.  Each scenario drives a pool by hand and watches it: references
count what was taken and given back, a block is listed as free once and exactly when nobody
holds it, and a call that asks for what cannot be is refused clearly or does what is
harmless, but breaks nothing.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from packaging.specifiers import SpecifierSet

from kvproof_spec.answers import Snapshot
from kvproof_spec.pages import NULL_BLOCK
from kvproof_stateful.expectations import BadExpectations
from kvproof_stateful.target import UnsupportedConfig

T = TypeVar("T")

NUM_BLOCKS = 4
"""Of the pool, the null block included."""

VLLM = "https://github.com/vllm-project/vllm/issues/"

UNCLEAR = (AttributeError, IndexError, KeyError, TypeError)
"""Exceptions that tell of a slip inside, not of what was wrong with the call."""


class Pool(Protocol):
    """A block pool, by block ids; what it cannot do raises `UnsupportedConfig`."""

    def take(self, count: int) -> list[int]:
        """Hand out blocks."""
        ...

    def touch(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less to each, in one batch."""

    def publish(self, name: str, block: int) -> None:
        """Make a block findable by the key of this name."""

    def find(self, name: str) -> int | None: ...

    def evict(self, block: int) -> None:
        """It is no longer findable."""

    def reset(self) -> bool:
        """Nothing is findable any more; False if that is refused."""
        ...

    def shown(self) -> Snapshot: ...


@runtime_checkable
class HasPool(Protocol):
    """A target that offers its block pool alone."""

    def make_pool(self, num_blocks: int) -> Pool: ...


class Broken(Exception):
    """The scenario has gone wrong; `rule` says against what."""

    def __init__(self, rule: str, witness: str) -> None:
        super().__init__(witness)
        self.rule = rule


class Watched:
    """A pool that is compared with what it should be after every call."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.held: Counter[int] = Counter()
        self.check("at the start")

    def take(self, count: int) -> list[int]:
        blocks = self._do(f"take {count}", lambda: self.pool.take(count))
        for block in blocks:
            if not 0 < block < NUM_BLOCKS:
                raise Broken("I1", f"block {block} was handed out, which is no normal block")
            if self.held[block]:
                raise Broken("I1", f"block {block} was handed out, and is held")
            self.held[block] += 1
        if len(blocks) != count:
            raise Broken("I1", f"{count} blocks were asked for, {blocks} were handed out")
        self.check(f"after take {count}")
        return blocks

    def touch(self, *blocks: int) -> None:
        self._do(f"touch {blocks}", lambda: self.pool.touch(blocks))
        self.held.update(block for block in blocks if block != NULL_BLOCK)
        self.check(f"after touch {blocks}")

    def free(self, *blocks: int) -> None:
        self._do(f"free {blocks}", lambda: self.pool.free(blocks))
        self.held.subtract(block for block in blocks if block != NULL_BLOCK)
        self.check(f"after free {blocks}")

    def publish(self, name: str, block: int) -> None:
        self._do(f"publish {block}", lambda: self.pool.publish(name, block))
        self.check(f"after publish {block}")

    def evict(self, block: int) -> None:
        self._do(f"evict {block}", lambda: self.pool.evict(block))
        self.check(f"after evict {block}")

    def reset(self, *, done: bool) -> None:
        was_done = self._do("reset", self.pool.reset)
        if was_done is not done:
            raise Broken("I1", f"a reset answered {was_done} while blocks {self._held()} are held")
        self.check("after reset")

    def require_found(self, name: str, block: int | None) -> None:
        found = self._do(f"find {name}", lambda: self.pool.find(name))
        if found != block:
            raise Broken("I2", f"key {name} finds block {found}, not {block}")

    def refused_or(self, harmless: Counter[int], what: str, call: Callable[[], Any]) -> None:
        """A wrong call: refused clearly and nothing changed, or it leaves `harmless` held."""
        before = self.pool.shown()
        try:
            call()
        except UnsupportedConfig:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, UNCLEAR) or not str(error):
                raise Broken("I1", f"{what} raised {told}, which says not what was wrong") from None
            if self.pool.shown() != before:
                raise Broken("I1", f"{what} raised {told}, and changed the pool") from None
        else:
            self.held = harmless
        self.check(f"after {what}")

    def drain(self) -> None:
        """Take every block that should be free, one by one."""
        for _ in range(NUM_BLOCKS - 1 - len(self._held())):
            self.take(1)

    def _held(self) -> list[int]:
        return sorted(block for block, count in self.held.items() if count)

    def _do(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except UnsupportedConfig:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise Broken("I1", f"{what} raised {type(error).__name__}: {text}") from error

    def check(self, when: str) -> None:
        """Counts are references, and what nobody holds is listed as free, once."""
        shown, held = self._do("a look at the pool", self.pool.shown), self._held()
        counts = shown.reference_counts or [self.held[block] for block in range(NUM_BLOCKS)]
        for block in range(1, NUM_BLOCKS):
            if counts[block] != self.held[block]:
                told = f"block {block} is counted {counts[block]}, held {self.held[block]} times"
                raise Broken("I1", f"{when}: {told}")
        free = [block for block in range(1, NUM_BLOCKS) if block not in held]
        if sorted(shown.free_order) != free:
            told = f"listed as free are {shown.free_order}, held are {held}"
            raise Broken("I1", f"{when}: {told}")
        if shown.free_blocks not in (None, len(free)):
            told = f"{shown.free_blocks} free blocks are counted, listed are {shown.free_order}"
            raise Broken("I1", f"{when}: {told}")
        if shown.free_order_reversed not in (None, shown.free_order):
            raise Broken("I1", f"{when}: backwards the free list is {shown.free_order_reversed}")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`done` and `holds` say it in words; `report` is where an engine had it, or empty."""

    name: str
    done: str
    holds: str
    report: str
    run: Callable[[Watched], None]


SCENARIOS: dict[str, Scenario] = {}
"""By name, in the order of this file."""


def scenario(report: str = "") -> Callable[[Callable[[Watched], None]], Callable[[Watched], None]]:
    """Make a function a scenario; its docstring says what is done and, after "Then", what holds."""

    def made(run: Callable[[Watched], None]) -> Callable[[Watched], None]:
        name = run.__name__.replace("_", "-")
        done, _, holds = " ".join((run.__doc__ or "").split()).partition(" Then ")
        SCENARIOS[name] = Scenario(name, done, holds, report, run)
        return run

    return made


@scenario(f"{VLLM}42571")
def twice_in_a_batch_held_twice(pool: Watched) -> None:
    """A block held twice stands twice in one batch.

    Then it is free and listed once; or the batch is refused, and it is still held twice.
    """
    (block,) = pool.take(1)
    pool.touch(block)
    pool.refused_or(Counter(), f"free {(block, block)}", lambda: pool.pool.free((block, block)))
    pool.drain()


@scenario(f"{VLLM}42571")
def twice_in_a_batch_held_once(pool: Watched) -> None:
    """A block held once stands twice in one batch.

    Then it is free and listed once, or the batch is refused, and it is still held.
    """
    (block,) = pool.take(1)
    pool.refused_or(Counter(), f"free {(block, block)}", lambda: pool.pool.free((block, block)))
    pool.drain()


@scenario("https://github.com/sgl-project/sglang-jax/pull/982")
def freed_again_later(pool: Watched) -> None:
    """A block that is free already is freed by a second owner of its release.

    Then it is free and listed once, refused or not.
    """
    (block,) = pool.take(1)
    pool.free(block)
    pool.refused_or(Counter(), f"free {(block,)} again", lambda: pool.pool.free((block,)))
    pool.drain()


@scenario(f"{VLLM}3347")
def one_of_two_holders_leaves(pool: Watched) -> None:
    """One of two holders of a block frees it, then the other.

    Then it is listed after the second only.
    """
    (block,) = pool.take(1)
    pool.touch(block)
    pool.free(block)
    pool.free(block)
    pool.drain()


@scenario(f"{VLLM}42571")
def a_free_block_named_twice_is_held(pool: Watched) -> None:
    """A free block is touched by a list that names it twice, then freed twice.

    Then it has left the free list once, and is back once.
    """
    (block,) = pool.take(1)
    pool.free(block)
    pool.touch(block, block)
    pool.free(block)
    pool.free(block)
    pool.drain()


@scenario()
def held_from_the_middle(pool: Watched) -> None:
    """The middle one of three free blocks is touched, then freed.

    Then the list is whole in both directions.
    """
    pool.touch(2)
    pool.free(2)
    pool.drain()


@scenario("https://github.com/ModelEngine-Group/unified-cache-management/pull/1059")
def fewer_than_no_blocks(pool: Watched) -> None:
    """-1 blocks are asked for.

    Then it is refused, or nothing is handed out; the count of free blocks stays.
    """
    pool.refused_or(Counter(), "take -1", lambda: pool.pool.take(-1))
    pool.drain()


@scenario(f"{VLLM}42085")
def more_than_there_are(pool: Watched) -> None:
    """One block more than there are free is asked for.

    Then it is refused, and all of them can still be had.
    """
    everything: Counter[int] = Counter({0: 1})  # to have got them is never harmless
    pool.refused_or(everything, f"take {NUM_BLOCKS}", lambda: pool.pool.take(NUM_BLOCKS))
    pool.drain()


@scenario("https://github.com/ovg-project/kvcached/pull/398")
def the_null_block_is_nobodys(pool: Watched) -> None:
    """The null block stands among blocks that are touched and freed, as in a window's table.

    Then it is never listed or handed out.
    """
    (block,) = pool.take(1)
    pool.touch(NULL_BLOCK, block)
    pool.free(NULL_BLOCK, block)
    pool.free(block, NULL_BLOCK)
    pool.drain()


@scenario("https://github.com/ovg-project/kvcached/pull/362")
def a_key_goes_with_its_content(pool: Watched) -> None:
    """A free block that a key finds is handed out again.

    Then the key finds nothing, while the block was free it found it.
    """
    (block,) = pool.take(1)
    pool.publish("a", block)
    pool.free(block)
    pool.require_found("a", block)
    pool.drain()
    pool.require_found("a", None)


@scenario(f"{VLLM}21400")
def one_of_two_copies_is_evicted(pool: Watched) -> None:
    """Of two copies of a key the first is evicted, then the second.

    Then the key finds the second copy until that is gone, too.
    """
    first, second = pool.take(2)
    pool.publish("a", first)
    pool.publish("a", second)
    pool.require_found("a", first)
    pool.evict(first)
    pool.require_found("a", second)
    pool.evict(second)
    pool.require_found("a", None)
    pool.free(second, first)
    pool.drain()


@scenario(f"{VLLM}28827")
def a_reset_while_a_block_is_held(pool: Watched) -> None:
    """Everything is to be forgotten while a block is held, and again when it is free.

    Then the first is refused and changes nothing; after the second nothing is found.
    """
    (block,) = pool.take(1)
    pool.publish("a", block)
    pool.reset(done=False)
    pool.require_found("a", block)
    pool.free(block)
    pool.reset(done=True)
    pool.require_found("a", None)
    pool.drain()


Verdict = Literal["ok", "violated", "known", "unsupported", "stale"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a scenario ended; `stale` is a known violation that no longer shows."""

    scenario: Scenario
    verdict: Verdict
    rule: str | None = None
    witness: str = ""
    link: str = ""

    def to_json(self) -> dict[str, str | None]:
        return {
            "name": self.scenario.name,
            "report": self.scenario.report,
            "done": self.scenario.done,
            "holds": self.scenario.holds,
            "verdict": self.verdict,
            "rule": self.rule,
            "witness": self.witness,
            "link": self.link,
        }


@dataclass(frozen=True, slots=True)
class KnownOutcome:
    """A scenario that an implementation is known to fail, and where it is written up."""

    scenario: str
    versions: SpecifierSet
    link: str


def known_outcomes(target: str) -> tuple[KnownOutcome, ...]:
    """The file that comes with kvproof for a target, if there is one."""
    path = Path(str(files("kvproof_stateful"))) / "known" / "scenarios" / f"{target}.toml"
    if not path.exists():
        return ()
    found = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["scenario"]:
        if entry["name"] not in SCENARIOS:
            raise BadExpectations(f"{path}: there is no scenario {entry['name']}")
        found.append(KnownOutcome(entry["name"], SpecifierSet(entry["versions"]), entry["link"]))
    return tuple(found)


def play(target: HasPool, version: str, known: Sequence[KnownOutcome]) -> list[Outcome]:
    """Every scenario on a new pool each."""
    expected = {k.scenario: k for k in known if k.versions.contains(version, prereleases=True)}
    return [outcome_of(s, target, expected.get(s.name)) for s in SCENARIOS.values()]


def outcome_of(played: Scenario, target: HasPool, known: KnownOutcome | None) -> Outcome:
    try:
        played.run(Watched(target.make_pool(NUM_BLOCKS)))
    except UnsupportedConfig as error:
        return Outcome(played, "unsupported", witness=str(error))
    except Broken as broken:
        link = known.link if known else ""
        return Outcome(played, "known" if known else "violated", broken.rule, str(broken), link)
    if known is not None:
        return Outcome(played, "stale", witness="it is known to fail here", link=known.link)
    return Outcome(played, "ok")
