"""Targets that fail, and targets that break a rule, installed by tests like anyone's own.

Each is the plain target with one thing changed; `install` makes the entry points.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kvproof_spec.actions import Action, Allocate, Lookup, Submit
from kvproof_spec.answers import Answer, Done, Granted, Hit, Returned, Snapshot
from kvproof_spec.config import Config
from kvproof_stateful.target import Hello, UnsupportedConfig
from kvproof_stateful.targets.plain import PlainTarget


class BrokenTarget(PlainTarget):
    """What all of them are: the plain target under another name."""

    name: ClassVar[str]


class LosesABlock(BrokenTarget):
    """With two requests the list of free blocks lacks one."""

    name = "loses-a-block"

    def snapshot(self) -> Snapshot:
        shown = super().snapshot()
        return replace(shown, free_order=shown.free_order[len(self.requests) > 1 :])


class ShowsAStranger(BrokenTarget):
    """Once a step was issued it shows the tables of a request that nobody submitted."""

    name = "shows-a-stranger"

    def snapshot(self) -> Snapshot:
        shown = super().snapshot()
        if not self.issued:
            return shown
        return replace(shown, tables=((99, ((),) * len(self.config.groups)),))


class HasTwoFaults(LosesABlock, ShowsAStranger):
    """It loses a block, and shows a stranger."""

    name = "has-two-faults"


class LosesABlockAndSaysWhen(LosesABlock):
    """A file in the folder $BROKEN_TARGETS tells that the fault was met and shrunk long ago."""

    name = "loses-a-block-and-says-when"
    resets = 0

    def reset(self, config: Config) -> None:
        super().reset(config)
        self.resets += 1
        if self.resets == 400:
            (Path(os.environ["BROKEN_TARGETS"]) / str(os.getpid())).touch()


class StartsSlowlyInWorkers(LosesABlock):
    """In a worker process it takes for ever to make it, and a file in $BROKEN_TARGETS says so."""

    name = "starts-slowly-in-workers"

    def __init__(self) -> None:
        if multiprocessing.parent_process() is not None:
            (Path(os.environ["BROKEN_TARGETS"]) / str(os.getpid())).touch()
            time.sleep(600)


class RaisesInPerform(BrokenTarget):
    name = "raises-in-perform"

    def perform(self, action: Action) -> Answer:
        if isinstance(action, Lookup):
            raise RuntimeError("out of\npatience")
        return super().perform(action)


class RaisesInReset(BrokenTarget):
    name = "raises-in-reset"

    def reset(self, config: Config) -> None:
        raise RuntimeError("out of\npatience")


class RaisesInSnapshot(BrokenTarget):
    name = "raises-in-snapshot"

    def snapshot(self) -> Snapshot:
        raise RuntimeError("out of\npatience")


class RaisesInHello(BrokenTarget):
    name = "raises-in-hello"

    def hello(self) -> Hello:
        raise RuntimeError("out of\npatience")


class RaisesAtOnce(BrokenTarget):
    name = "raises-at-once"

    def __init__(self) -> None:
        raise RuntimeError("out of\npatience")


class Hangs(BrokenTarget):
    name = "hangs"

    def perform(self, action: Action) -> Answer:
        while isinstance(action, Lookup):
            try:
                time.sleep(0.01)
            except Exception:  # what a careless retry loop would swallow
                continue
        return super().perform(action)


class HangsInReset(BrokenTarget):
    name = "hangs-in-reset"

    def reset(self, config: Config) -> None:
        time.sleep(600)


class FitsNothing(BrokenTarget):
    name = "fits-nothing"

    def reset(self, config: Config) -> None:
        raise UnsupportedConfig("it is too small")


class ClaimsWhatItNeverShows(BrokenTarget):
    name = "claims-what-it-never-shows"

    def hello(self) -> Hello:
        hello = super().hello()
        return replace(hello, claims=(*hello.claims, "R9"))


class HasNoWindow(BrokenTarget):
    """It declares full attention and nothing else."""

    name = "has-no-window"

    def hello(self) -> Hello:
        return replace(super().hello(), features=frozenset({"full"}), claims=("I1",))


def untyped(value: Any) -> Any:
    """What no type checker would let through."""
    return value


class AnswersNonsense(BrokenTarget):
    """To each action of the kind `to` it gives `answer`, whatever the types say."""

    to: ClassVar[type[Action]] = Lookup
    answer: ClassVar[Any]

    def perform(self, action: Action) -> Any:
        right = super().perform(action)
        return self.answer if isinstance(action, self.to) else right


class GrantsABlockOutside(AnswersNonsense):
    """Not nonsense, but I1: there is no such block."""

    name = "grants-a-block-outside"
    to = Allocate
    answer = Granted(((1_000_000,),))


class AnswersNone(AnswersNonsense):
    name = "answers-none"
    answer = None


class AnswersAnotherKind(AnswersNonsense):
    name = "answers-another-kind"
    answer = Done()


class AnswersAClass(AnswersNonsense):
    name = "answers-a-class"
    answer = Hit


class AnswersText(AnswersNonsense):
    name = "answers-text"
    to = Submit
    answer = "done"


class AnswersTooManyGroups(AnswersNonsense):
    name = "answers-too-many-groups"
    answer = Hit(0, ((), (), (), ()))


class AnswersNoTables(AnswersNonsense):
    name = "answers-no-tables"
    answer = Hit(0, untyped(None))


class AnswersTextTokens(AnswersNonsense):
    name = "answers-text-tokens"
    answer = Hit(untyped("0"), ((),))


class AnswersNegativeTokens(AnswersNonsense):
    name = "answers-negative-tokens"
    answer = Hit(-4, ((),))


class AnswersTextBlocks(AnswersNonsense):
    name = "answers-text-blocks"
    to = Allocate
    answer = Granted(untyped((("1", "2"),)))


class AnswersHalfBlocks(AnswersNonsense):
    name = "answers-half-blocks"
    to = Allocate
    answer = Granted(untyped(((1.5,),)))


class AnswersNestedBlocks(AnswersNonsense):
    name = "answers-nested-blocks"
    to = Allocate
    answer = Granted(untyped((([1], [2]),)))


class AnswersLists(BrokenTarget):
    """Its answers are right, as lists."""

    name = "answers-lists"

    def perform(self, action: Action) -> Answer:
        answer = super().perform(action)
        if not isinstance(answer, Granted):
            return answer
        lists: Any = [list(table) for table in answer.tables]
        return Granted(lists, answer.new)


class AnswersFlatTables(AnswersNonsense):
    name = "answers-flat-tables"
    to = Allocate
    answer = Granted(untyped((1,)))


class ShowsText(BrokenTarget):
    name = "shows-text"

    def snapshot(self) -> Any:
        return "all is well"


class ShowsTextBlocks(BrokenTarget):
    name = "shows-text-blocks"

    def snapshot(self) -> Snapshot:
        blocks: Any = ("1", ["2"])
        return replace(super().snapshot(), free_order=blocks)


class ShowsNoBlocks(BrokenTarget):
    name = "shows-no-blocks"

    def snapshot(self) -> Snapshot:
        nothing: Any = None
        return replace(super().snapshot(), free_order=nothing)


class ShowsTooFewCounts(BrokenTarget):
    name = "shows-too-few-counts"

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), reference_counts=(1,))


class KeepsTextBlocks(BrokenTarget):
    """What it says it keeps back is no block ids."""

    name = "keeps-text-blocks"

    def perform(self, action: Action) -> Answer:
        answer = super().perform(action)
        blocks: Any = ("1",)
        return Returned(blocks) if isinstance(answer, Returned) else answer


def install(folder: Path) -> None:
    """Write the metadata of a distribution whose entry points are these targets."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type)]
    named = [kind for kind in kinds if issubclass(kind, BrokenTarget) and "name" in vars(kind)]
    lines = [f"{kind.name} = broken_targets:{kind.__name__}\n" for kind in named]
    info = folder / "broken_targets-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-targets\nVersion: 0\n")
    (info / "entry_points.txt").write_text("".join(["[kvproof.targets]\n", *lines]))
