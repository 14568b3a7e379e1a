"""What the pool announces about findable blocks; names and order are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of a group became findable, the one after `parent_block_hash` first.

    `token_ids` are those of the whole stretch, also where a block in it is not findable.
    `block_size` is in tokens; a prefix that ends inside a block has that of a hash block.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None  # None at the start of a sequence
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None
    group_idx: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last block that answered for these keys of a group does so no more."""

    block_hashes: tuple[bytes, ...]
    group_idx: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every key of every group is forgotten."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
