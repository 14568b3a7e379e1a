"""Faults of the keys: what of a prefix they tell apart."""

from __future__ import annotations

from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_stateful.faults.fault import seeded


@seeded("one-bit-hash", "I2", "https://github.com/openvinotoolkit/openvino.genai/issues/3722")
class OneBitHash(KVCacheManager):
    """Digests are cut to one bit, and what they find is not compared with the tokens."""

    @staticmethod
    def key_of(digest: bytes) -> bytes:
        return bytes([digest[0] & 1])
