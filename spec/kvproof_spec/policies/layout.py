"""What follows from a configuration under a release, before anything happens."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvproof_spec.config import Config, Group
from kvproof_spec.policies.releases import Release, refuse_unknown

Likeness = tuple[str, int, int]


class Searched(NamedTuple):
    """Groups that are looked up as one, because they differ at most in `drafter`."""

    group: Group
    ids: tuple[int, ...]
    drops: bool  # a hit needs one block, or piece, more than it gives


class Layout:
    """The configuration, the release's choices, and what both make of the groups."""

    def __init__(self, config: Config, release: Release, corrections: Collection[str]) -> None:
        refuse_unknown(config, release)
        self.config = config
        self.release = release
        self.corrections = frozenset(corrections)
        self.unit = config.hash_block  # tokens of a piece that is hashed
        self.hits_inside = config.caching and finds_inside(config)
        self.boundary = self.unit if self.hits_inside else config.common_block
        self.has_drafter = any(group.drafter for group in config.groups)
        self.searched = searched(config)
        self.drops = tuple(
            any(index in found.ids and found.drops for found in self.searched)
            for index in range(len(config.groups))
        )


def finds_inside(config: Config) -> bool:
    """Do hits end inside blocks?  For the sake of states that are bigger than the pieces.

    Windows and chunks are found by whole blocks.  (vLLM 0.32: `partial_hash_hits_enabled`.)
    """
    unit, groups = config.hash_block, config.groups
    return (
        len(groups) > 1
        and any(group.kind == "state" and group.block_size > unit for group in groups)
        and all(group.kind in ("full", "state") or group.block_size == unit for group in groups)
    )


def searched(config: Config) -> tuple[Searched, ...]:
    """The groups as a lookup takes them: full attention first."""
    alike: dict[Likeness, list[int]] = {}
    for index, group in enumerate(config.groups):
        if group.reused:
            alike.setdefault((group.kind, group.block_size, group.window), []).append(index)
    found = [
        Searched(
            config.groups[ids[0]], tuple(ids), any(config.groups[index].drafter for index in ids)
        )
        for ids in alike.values()
    ]
    return tuple(sorted(found, key=lambda one: one.group.kind != "full"))
