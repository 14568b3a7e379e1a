"""The pool: reference counts, the order of free blocks, and the index of cached prefixes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple, Self

from kvproof_reference.events import AllBlocksCleared, BlockRemoved, KVCacheEvent
from kvproof_reference.free_order import FreeOrder
from kvproof_spec.pages import normal_blocks

NULL_BLOCK = 0

Copies = int | dict[int, None]  # the only block of a key, or several, the oldest first
Key = tuple[int, bytes]  # group index, digest of the prefix that ends with the block


class Copy(NamedTuple):
    """A page that the next step copies first; both blocks are held once for it until then."""

    group: int
    source: int
    destination: int


class BlockPool:
    """Blocks 1 to `num_blocks` - 1; block 0 is the null block, set aside for ever.

    A block is free exactly when nothing refers to it.  A free block that has a key
    still answers lookups until it is handed out again.
    """

    __slots__ = (
        "_counts",
        "_digests",
        "_free",
        "_free_order",
        "_group",
        "_index",
        "_key_length",
        "copies",
        "enable_caching",
        "events",
        "reference_counts",
    )

    def __init__(
        self, num_blocks: int, enable_caching: bool = True, enable_kv_cache_events: bool = False
    ) -> None:
        self.enable_caching = enable_caching
        self.copies: list[Copy] = []  # made and not yet taken
        self.events: list[KVCacheEvent] | None = [] if enable_kv_cache_events else None
        self.reference_counts = [0] * num_blocks  # indexed by block id
        self._index: defaultdict[int, dict[bytes, Copies]] = defaultdict(dict)  # by group
        self._digests: dict[int, tuple[bytes, ...]] = {}  # of blocks that have a key
        self._group = [0] * num_blocks  # whose keys these are
        self._key_length = [0] * num_blocks  # of the first key, where a block has one
        self._free = FreeOrder(normal_blocks(num_blocks))
        self._free_order: tuple[int, ...] | None = None  # None after every change
        self._counts: tuple[int, ...] | None = None  # likewise

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def free_order(self) -> tuple[int, ...]:
        """Free blocks, the next one to be handed out first; the same object until it changes.

        For observers: it walks all free blocks.
        """
        if self._free_order is None:
            self._free_order = self._free.as_tuple()
        return self._free_order

    def counts(self) -> tuple[int, ...]:
        """Reference counts by block id; the same object until one changes.  For observers."""
        if self._counts is None:
            self._counts = tuple(self.reference_counts)
        return self._counts

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out the first free blocks, their keys forgotten."""
        free = self._free
        if not 0 <= num_blocks <= len(free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(free)} are free")
        self._free_order = self._counts = None
        blocks = free.pop(num_blocks)
        self.evict(blocks)
        counts = self.reference_counts
        for block in blocks:
            counts[block] += 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; free ones leave the free order."""
        counts = self.reference_counts
        self._counts = None
        for block in blocks:
            count = counts[block]
            if count == 0:
                if block == NULL_BLOCK:
                    continue
                self._free_order = None
                self._free.remove(block)
            counts[block] = count + 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """One reference less to each block of this batch, which names a block only once.

        Blocks nobody refers to any more become free: those without a key in front,
        since nothing can find them, and those with a key at the end.  The batch
        keeps its order on both sides.  With caching off no block has a key.
        """
        batch = list(blocks)
        repeated = len(batch) - len(set(batch))
        if repeated and repeated != batch.count(NULL_BLOCK) - 1:
            self.refuse_double_free(batch)
        self.give_back(batch)

    def refuse_double_free(self, batch: Sequence[int]) -> None:
        """The second reference would be somebody else's, or nobody's (vLLM #42571)."""
        twice = next(b for b in batch if b != NULL_BLOCK and batch.count(b) > 1)
        raise ValueError(f"block {twice} is freed twice in one batch")

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free a batch that may have several references to one block."""
        counts, keys = self.reference_counts, self._digests
        unhashed: list[int] = []
        hashed: list[int] = []
        for index, block in enumerate(blocks):
            if block == NULL_BLOCK:
                continue
            count = counts[block] - 1
            counts[block] = count
            if count == 0:
                (hashed if block in keys else unhashed).append(block)
            elif count < 0:
                self.refuse_what_is_free(blocks[: index + 1])
        self._free_order = self._counts = None
        if unhashed:
            self._free.prepend(unhashed)
        if hashed:
            self._free.append(hashed)

    def refuse_what_is_free(self, counted_down: Sequence[int]) -> None:
        """One reference too many was given back, the last of these: nothing has happened."""
        for block in counted_down:
            self.reference_counts[block] += block != NULL_BLOCK
        raise ValueError(f"block {counted_down[-1]} is given back, and nobody holds it")

    def take_copies(self, still_held: bool = False) -> tuple[Copy, ...]:
        """The copies made since the last call, those of a group together, as a rule given back."""
        taken = sorted(self.copies, key=lambda made: made.group)
        self.copies = []
        if not still_held:
            self.give_back([block for made in taken for block in made[1:]])
        return tuple(taken)

    def cached_block(self, group_index: int, digest: bytes) -> int | None:
        """The oldest copy of this prefix, if there is one."""
        copies = self._index[group_index].get(digest)
        return next(iter(copies)) if isinstance(copies, dict) else copies

    def cache_block(self, group_index: int, digest: bytes, block: int, length: int) -> bool:
        """Make `block` findable as the end of the prefix of `length` hash blocks.

        A block whose first key is of a shorter prefix loses its old keys.  False if
        it had this key already.
        """
        digests = self._digests.get(block, ())
        if not self.enable_caching or digest in digests:
            return False
        if digests and self._key_length[block] < length:
            self.forget_keys(block)
            digests = ()
        if not digests:
            self._key_length[block] = length
            self._group[block] = group_index
        self._digests[block] = (*digests, digest)
        self._add_copy(group_index, digest, block)
        return True

    def cache_blocks(
        self, group_index: int, digests: Sequence[bytes], blocks: Sequence[int], lengths: range
    ) -> None:
        """`cache_block` for each of `blocks`; here without a call for those without a key."""
        index, of_block = self._index[group_index], self._digests
        key_length, group = self._key_length, self._group
        for digest, block, length in zip(digests, blocks, lengths, strict=True):
            if block in of_block:
                self.cache_block(group_index, digest, block, length)
                continue
            if digest in index:
                self._add_copy(group_index, digest, block)
            else:
                index[digest] = block
            of_block[block] = (digest,)
            key_length[block] = length
            group[block] = group_index

    def _add_copy(self, group_index: int, digest: bytes, block: int) -> None:
        copies = self._index[group_index].setdefault(digest, block)
        if isinstance(copies, dict):
            copies[block] = None
        elif copies != block:
            self._index[group_index][digest] = {copies: None, block: None}

    def _remove_copy(self, group_index: int, digest: bytes, block: int) -> bool:
        """Whether that was the last one."""
        index = self._index[group_index]
        copies = index[digest]
        if isinstance(copies, dict):
            del copies[block]
            if len(copies) == 1:
                (index[digest],) = copies
            return False
        del index[digest]
        return True

    @property
    def index(self) -> dict[Key, tuple[int, ...]]:
        """Copies of each key, the oldest first.  For observers: it walks all keys."""
        return {
            (group, digest): tuple(copies) if isinstance(copies, dict) else (copies,)
            for group, index in self._index.items()
            for digest, copies in index.items()
        }

    @property
    def keys(self) -> dict[int, tuple[Key, ...]]:
        """Keys of each block that has one, the first one first.  For observers, likewise."""
        return {
            block: tuple((self._group[block], digest) for digest in digests)
            for block, digests in self._digests.items()
        }

    def first_key(self, block: int) -> Key | None:
        """The key that a block got when it had none."""
        digests = self._digests.get(block)
        return (self._group[block], digests[0]) if digests else None

    def move_keys(self, source: int, destination: int) -> None:
        """`destination`, which has no key, answers for `source` from now on."""
        if source not in self._digests:
            return
        group = self._group[source]
        for digest in self._digests[source]:
            self._remove_copy(group, digest, source)
            self._add_copy(group, digest, destination)
        self._digests[destination] = self._digests.pop(source)
        self._key_length[destination] = self._key_length[source]
        self._group[destination] = group

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget the keys of `blocks`; who holds them, and the free order, stay as they are."""
        pop_digests, group, events = self._digests.pop, self._group, self.events
        for block in blocks:
            for digest in pop_digests(block, ()):
                index = self._index[group[block]]
                if index[digest] == block:
                    del index[digest]
                elif not self._remove_copy(group[block], digest, block):
                    continue
                if events is not None:
                    self.announce_removed(events, (group[block], digest))

    def forget_keys(self, block: int) -> None:
        """Nothing finds `block` any more; a key goes with the last block that answers for it."""
        self.evict((block,))

    def announce_removed(self, events: list[KVCacheEvent], key: Key) -> None:
        """Said once for each key; vLLM 0.32 says it for each block that had it (#55092)."""
        group_index, digest = key
        events.append(BlockRemoved((digest,), group_index))

    def take_events(self) -> list[KVCacheEvent]:
        """What was announced since the last call, in order."""
        taken, self.events = self.events, None if self.events is None else []
        return taken or []

    def reset(self) -> bool:
        """Forget every key, unless a block is held."""
        if len(self._free) != len(self.reference_counts) - 1:
            return False
        self._index.clear()
        self._digests.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return True

    def clone(self) -> Self:
        twin = copy(self)
        twin.reference_counts = self.reference_counts.copy()
        twin._index = defaultdict(dict)
        for group, index in self._index.items():
            twin._index[group] = {
                digest: copies.copy() if isinstance(copies, dict) else copies
                for digest, copies in index.items()
            }
        twin._digests = self._digests.copy()
        twin._group = self._group.copy()
        twin._key_length = self._key_length.copy()
        twin._free = self._free.clone()
        twin.copies = self.copies.copy()
        twin.events = None if self.events is None else self.events.copy()
        return twin
