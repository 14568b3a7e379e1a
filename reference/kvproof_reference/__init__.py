"""Paged KV-cache managers that refine the specification."""

from kvproof_reference.block_pool import NULL_BLOCK, BlockPool, Copy
from kvproof_reference.coordinator import BlockIds
from kvproof_reference.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import Request
from kvproof_reference.worker import Worker

__all__ = [
    "NULL_BLOCK",
    "AllBlocksCleared",
    "BlockIds",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "Copy",
    "KVCacheEvent",
    "KVCacheManager",
    "Request",
    "Worker",
]
