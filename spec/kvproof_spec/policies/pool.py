"""The free order, and the index of what a lookup finds: keys, and their copies."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Self

from kvproof_spec.answers import Snapshot
from kvproof_spec.pages import NULL_BLOCK, normal_blocks
from kvproof_spec.policies.names import Names
from kvproof_spec.policies.releases import Release
from kvproof_spec.prefix import Prefix

Key = tuple[int, Prefix]  # (group, name of the last position that the block answers for)


class PoolExhausted(Exception):
    """More blocks are taken than are free."""

    def __init__(self, count: int) -> None:
        super().__init__(f"Cannot get {count} free blocks from the pool")


class VllmPool:
    """`BlockPool`: one queue of free blocks, and for each key its copies, the oldest first."""

    def __init__(self, num_blocks: int, release: Release) -> None:
        self.release = release
        self.names = Names(release)
        self.free_order: tuple[int, ...] = normal_blocks(num_blocks)
        self.references = [0] * num_blocks
        self.keys_of: dict[int, list[Key]] = {}  # by block, the first one it got first
        self.copies: dict[Key, dict[int, None]] = {}  # the first one is returned
        self._shown: tuple[tuple[int, tuple[int, ...]], ...] | None = ()

    # Free order

    def take(self, count: int) -> list[int]:
        """The next `count` blocks; whatever found them finds them no more."""
        if count > len(self.free_order):
            raise PoolExhausted(count)
        taken = list(self.free_order[:count])
        if count:
            self.free_order = self.free_order[count:]
        for block in taken:
            self.forget(block)
            self.references[block] += 1
        return taken

    def reclaimable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free, and would not be if they were held."""
        return sum([block != NULL_BLOCK and not self.references[block] for block in blocks])

    def hold(self, blocks: Sequence[int]) -> None:
        reclaimed = [b for b in blocks if b != NULL_BLOCK and not self.references[b]]
        if reclaimed:
            free_order = list(self.free_order)
            for block in reclaimed:
                free_order.remove(block)
            self.free_order = tuple(free_order)
        for block in blocks:
            self.references[block] += block != NULL_BLOCK

    def free(self, batch: Iterable[int]) -> None:
        """One reference less to each; the batch keeps its order at both ends of the queue."""
        first: list[int] = []
        last: list[int] = []
        for block in batch:
            if block == NULL_BLOCK:
                continue
            self.references[block] -= 1
            if not self.references[block]:
                unhashed = self.release.unhashed_first and block not in self.keys_of
                (first if unhashed else last).append(block)
        if first or last:
            self.free_order = (*first, *self.free_order, *last)

    # Index

    def publish(self, key: Key, block: int) -> None:
        """Make the block findable by one more key; a longer prefix drops the keys before it."""
        copies = self.copies.get(key)
        if copies is not None and block in copies:
            return
        keys = self.keys_of.get(block)
        if keys and keys[0][1].length < key[1].length:
            self.forget(block)
        self.keys_of.setdefault(block, []).append(key)
        self.copies.setdefault(key, {})[block] = None
        self._shown = None

    def forget(self, block: int) -> list[Key]:
        """Nothing finds the block any more; its keys so far."""
        keys = self.keys_of.pop(block, None)
        if keys is None:
            return []
        for key in keys:
            del self.copies[key][block]
            if not self.copies[key]:
                del self.copies[key]
        self._shown = None
        return keys

    def move_keys(self, source: int, destination: int) -> None:
        """`destination`, which has no key, answers for `source` from now on."""
        for key in self.forget(source):
            self.publish(key, destination)

    def forget_everything(self) -> None:
        self.keys_of.clear()
        self.copies.clear()
        self._shown = ()

    def find(self, key: Key) -> int | None:
        copies = self.copies.get(key)
        return next(iter(copies)) if copies else None

    def first_key(self, block: int) -> Key | None:
        keys = self.keys_of.get(block)
        return keys[0] if keys else None

    # Shown and copied

    def snapshot(self) -> Snapshot:
        if self._shown is None:
            copies = self.copies.items()
            self._shown = tuple(sorted([(key[0], tuple(blocks)) for key, blocks in copies]))
        return Snapshot(free_order=self.free_order, keys=self._shown)

    def clone(self) -> Self:
        twin = type(self)(len(self.references), self.release)
        twin.names = self.names.clone()
        twin.free_order = self.free_order
        twin.references = list(self.references)
        twin.keys_of = {block: list(keys) for block, keys in self.keys_of.items()}
        twin.copies = {key: dict(blocks) for key, blocks in self.copies.items()}
        twin._shown = self._shown
        return twin

    def memory(self) -> Hashable:
        return (
            self.free_order,
            tuple(self.references),
            frozenset((block, tuple(keys)) for block, keys in self.keys_of.items()),
            frozenset((key, tuple(blocks)) for key, blocks in self.copies.items()),
        )
