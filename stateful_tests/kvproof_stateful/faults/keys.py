"""Faults of the keys: what of a prefix they tell apart."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from kvproof_reference.block_pool import BlockPool
from kvproof_reference.kv_cache_manager import KVCacheManager
from kvproof_reference.request import (
    KeyInputs,
    KeyOf,
    Request,
    all_inputs,
    token_bytes,
    whole_digest,
)
from kvproof_spec.prefix import Inputs
from kvproof_stateful.faults.fault import VLLM, seeded
from kvproof_stateful.targets.driven import Progress
from kvproof_stateful.targets.plain import PlainTarget


@seeded("one-bit-hash", "I2", "https://github.com/openvinotoolkit/openvino.genai/issues/3722")
class OneBitHash(KVCacheManager):
    """Digests are cut to one bit, and what they find is not compared with the tokens."""

    @staticmethod
    def key_of(digest: bytes) -> bytes:
        return bytes([digest[0] & 1])


@seeded("digest-of-the-last-block-only", "I2")
class DigestOfTheLastBlockOnly(PlainTarget):
    """A block is named by its own tokens, whatever stands before or beside them."""

    class Unchained(Request):
        def block_hashes(
            self, block_size: int, key_of: KeyOf = whole_digest, key_inputs: KeyInputs = all_inputs
        ) -> list[bytes]:
            ends = range(block_size, len(self.tokens) + 1, block_size)
            blocks = [token_bytes(self.tokens[end - block_size : end]) for end in ends]
            return [key_of(sha256(block).digest()) for block in blocks]

    def submit(self, progress: Progress) -> None:
        self.known[progress.id] = self.Unchained(progress.id, progress.tokens)


@seeded("group-left-out-of-key", "I2")
class GroupLeftOutOfKey(BlockPool):
    """A group finds what another group has of the same tokens."""

    def cached_block(self, group_index: int, digest: bytes) -> int | None:
        for group in [group_index, *self._index]:
            block = super().cached_block(group, digest)
            if block is not None:
                return block
        return None


@seeded("salt-left-out-of-key", "I2")
class SaltLeftOutOfKey(KVCacheManager):
    """A tenant finds what another tenant has computed."""

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        return replace(inputs, salt=None)


@seeded("lora-left-out-of-key", "R5", without=("I2",))
class LoraLeftOutOfKey(KVCacheManager):
    """What one adapter has computed is found by requests of another, and of none."""

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        return replace(inputs, lora=None, lora_version=0)


@seeded("lora-version-left-out-of-key", "I2", f"{VLLM}/issues/42125")
class LoraVersionLeftOutOfKey(KVCacheManager):
    """An adapter that was loaded again under its name finds what its old weights computed."""

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        return replace(inputs, lora_version=0)


@seeded("item-left-out-of-key", "I2", "https://github.com/LMCache/LMCache/issues/4086")
class ItemLeftOutOfKey(KVCacheManager):
    """Two images behind the same placeholder tokens are taken for one."""

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        return replace(inputs, items=())


@seeded("item-place-left-out-of-key", "I2", f"{VLLM}/issues/36708")
class ItemPlaceLeftOutOfKey(KVCacheManager):
    """A key names an image, and not where among the tokens it stands."""

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        return replace(inputs, items=tuple(replace(item, first=0) for item in inputs.items))


@seeded("embeds-left-out-of-key", "I2", f"{VLLM}/issues/56655")
class EmbedsLeftOutOfKey(KVCacheManager):
    """A prompt embedding is keyed by the token id that it takes the place of."""

    @staticmethod
    def key_inputs(inputs: Inputs) -> Inputs:
        return replace(inputs, embeds=())
