"""A target: an implementation under test, and how it can fail to be one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvproof_spec.actions import Action
from kvproof_spec.answers import Answer, Snapshot
from kvproof_spec.config import Config


class TargetFailed(Exception):
    """The target raised, hung, crashed or answered nonsense: nothing can be judged.

    Not a violation: the message says what happened and at which action.
    """


class TargetTimedOut(TargetFailed):
    """The target did not answer in time."""


class UnsupportedConfig(Exception):
    """The target cannot be built this way: the case is skipped and counted."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a target says of itself.

    `features` it can be asked for, group kinds among them; `claims` are the rules that a
    campaign must have evaluated at least once.  An `observed` target runs its own
    scheduler: kvproof submits requests and returns sampled tokens.  `corrections` are the
    known faults of a policy's engine that this target does not have.
    """

    name: str
    version: str
    features: frozenset[str]
    claims: tuple[str, ...]
    observed: bool = False
    corrections: frozenset[str] = frozenset()


class Target(Protocol):
    """An implementation under test.  One instance serves many runs, each after a `reset`."""

    def hello(self) -> Hello: ...

    def reset(self, config: Config) -> None:
        """Start anew; raises `UnsupportedConfig`."""

    def perform(self, action: Action) -> Answer:
        """Perform an action that the spec has enabled, and answer it."""
        ...

    def snapshot(self) -> Snapshot | None:
        """What the target shows of itself now, if it can."""
