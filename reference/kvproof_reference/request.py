"""A request: its known tokens, how far they are computed, and their hash chain."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from hashlib import blake2b, sha256
from struct import iter_unpack
from typing import Any, NamedTuple, Self

from kvproof_spec.prefix import TOKENS_ONLY, Inputs

KeyOf = Callable[[bytes], bytes]
KeyInputs = Callable[[Inputs], Inputs]
Special = tuple[str | None, int]  # item and offset inside it, or None and a prompt embedding

ROOT_DIGEST = bytes(32)


TOKEN_BYTES = 4


def whole_digest(digest: bytes) -> bytes:
    """What names a prefix: its digest, uncut."""
    return digest


def token_bytes(tokens: Sequence[int]) -> bytes:
    """What is hashed of token ids: `TOKEN_BYTES` each."""
    return array("I", tokens).tobytes()


def hash_root(inputs: Inputs) -> bytes:
    """What the first block follows: adapter and salt decide every position."""
    if inputs.lora is None and inputs.salt is None:
        return ROOT_DIGEST
    return hash_text((inputs.lora, inputs.lora_version, inputs.salt), b"root")


def hash_special(
    parent: bytes, special: Sequence[tuple[int, Special]], embeddable: int | None
) -> bytes:
    """`parent` of a block at some of whose places, counted from its start, more than ids count.

    `embeddable` places could hold an embedding; None if the request has none.
    """
    return hash_text((parent, tuple(special), embeddable), b"special")


def hash_text(value: tuple[object, ...], use: bytes) -> bytes:
    """Digest of strings, bytes and numbers: no two uses, and no chain, share one."""
    return blake2b(ascii(value).encode(), digest_size=len(ROOT_DIGEST), person=use).digest()


def special_positions(inputs: Inputs) -> dict[int, Special]:
    """Where an item or a prompt embedding stands; of several at one place the first prevails."""
    special: dict[int, Special] = {}
    for item in reversed(inputs.items):
        for offset in range(item.tokens):
            special[item.first + offset] = (item.id, offset)
    for at, embedding in reversed(inputs.embeds):
        special[at] = (None, embedding)
    return special


class Keyed(NamedTuple):
    """What enters a request's digests beside its tokens.

    As in vLLM a prompt with embeddings is keyed by all its rows, of tokens too: it shares
    no prefix with a prompt that has none, and its end counts.
    """

    root: bytes
    special: Mapping[int, Special]  # by position
    embeddable: int | None  # tokens of a prompt with embeddings

    def block(
        self, parent: bytes, start: int, tokens: Sequence[int]
    ) -> tuple[bytes, Sequence[int]]:
        """What stands for the parent and the tokens of a block that begins at `start`."""
        special = self.special
        places = range(start, start + len(tokens))
        here = [(at - start, special[at]) for at in places if at in special]
        if self.embeddable is not None:
            rows = min(max(self.embeddable - start, 0), len(tokens))
            embedded = {place for place, (item, _) in here if item is None}
            tokens = [0 if place in embedded else token for place, token in enumerate(tokens)]
            return hash_special(parent, here, rows), tokens
        return (hash_special(parent, here, None) if here else parent), tokens


NOTHING_KEYED = Keyed(ROOT_DIGEST, {}, None)


def all_inputs(inputs: Inputs) -> Inputs:
    return inputs


class Request:
    """One request as the manager sees it.

    `tokens` are all known token ids, the first `num_prompt_tokens` of them the
    prompt.  They may grow and never change.  `inputs` are what else decides content.
    `num_computed_tokens` is optimistic: it includes the `num_in_flight_tokens` whose
    steps have not come back.
    """

    __slots__ = (
        "_chain",
        "_digests",
        "_keyed",
        "inputs",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "request_id",
        "tokens",
    )

    def __init__(
        self,
        request_id: int,
        tokens: Iterable[int],
        num_prompt_tokens: int | None = None,
        inputs: Inputs = TOKENS_ONLY,
    ) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        if num_prompt_tokens is None:
            num_prompt_tokens = len(self.tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.inputs = inputs
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self._digests: list[bytes] = []
        self._chain: Any = None  # sha256 of all that has a digest
        self._keyed = NOTHING_KEYED

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append_tokens(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def block_hashes(
        self,
        block_size: int,
        key_of: KeyOf = whole_digest,
        key_inputs: KeyInputs = all_inputs,
    ) -> list[bytes]:
        """Digests of the prefixes that end with full blocks of `block_size` tokens.

        `key_inputs` picks what of the inputs enters them; `key_of` may shorten a digest.
        One hash runs over all tokens and goes on where it was, so one request goes with one
        block size and one way of hashing.
        """
        digests = self._digests
        start = len(digests) * block_size
        if start + block_size > len(self.tokens):
            return digests
        if self._chain is None:
            inputs = key_inputs(self.inputs)
            embeddable = self.num_prompt_tokens if inputs.embeds else None
            self._keyed = Keyed(hash_root(inputs), special_positions(inputs), embeddable)
            self._chain = sha256(self._keyed.root)
        made = len(digests)
        end = len(self.tokens) // block_size * block_size
        if self._keyed.special:
            for first in range(start, end, block_size):
                self._hash_special_block(self._keyed, first, block_size)
        else:
            chain = self._chain
            data = token_bytes(self.tokens[start:end])
            for (block,) in iter_unpack(f"{TOKEN_BYTES * block_size}s", data):
                chain.update(block)
                digests.append(chain.digest())
        if key_of is not whole_digest:
            digests[made:] = map(key_of, digests[made:])
        return digests

    def _hash_special_block(self, keyed: Keyed, start: int, block_size: int) -> None:
        """One block, at some of whose places more than ids may count."""
        parent = self._chain.digest()
        block = keyed.block(parent, start, self.tokens[start : start + block_size])
        if block[0] != parent:
            self._chain = sha256(block[0])
        self._chain.update(token_bytes(block[1]))
        self._digests.append(self._chain.digest())

    def clone(self) -> Self:
        twin = copy(self)
        twin.tokens = self.tokens.copy()
        twin._digests = self._digests.copy()
        twin._chain = self._chain and self._chain.copy()
        return twin
