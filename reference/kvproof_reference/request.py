"""A request: its known tokens, how far they are computed, and their hash chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from hashlib import blake2b, sha256
from struct import pack
from typing import NamedTuple, Self

from kvproof_spec.prefix import TOKENS_ONLY, Inputs

HashBlock = Callable[[bytes, Sequence[int]], bytes]
KeyInputs = Callable[[Inputs], Inputs]
Special = tuple[str | None, int]  # item and offset inside it, or None and a prompt embedding

ROOT_DIGEST = bytes(32)


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the prefix that ends with `tokens`, `parent` being that of what precedes them."""
    return sha256(parent + pack(f"<{len(tokens)}q", *tokens)).digest()


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
    """Digest of strings, bytes and numbers: no two uses, and no `hash_block`, share one."""
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
        self._keyed = NOTHING_KEYED if inputs is TOKENS_ONLY else None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append_tokens(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def block_hashes(
        self,
        block_size: int,
        hash_block: HashBlock = hash_block,
        key_inputs: KeyInputs = all_inputs,
    ) -> list[bytes]:
        """Digests of the full blocks of `block_size` tokens, each chained to the one before.

        `key_inputs` picks what of the inputs enters them.  The chain is kept and
        extended, so one request goes with one block size and one way of hashing.
        """
        digests = self._digests
        end = (len(digests) + 1) * block_size
        if end > len(self.tokens):
            return digests
        if self._keyed is None:
            inputs = key_inputs(self.inputs)
            embeddable = self.num_prompt_tokens if inputs.embeds else None
            self._keyed = Keyed(hash_root(inputs), special_positions(inputs), embeddable)
        keyed = self._keyed
        while end <= len(self.tokens):
            parent = digests[-1] if digests else keyed.root
            tokens: Sequence[int] = self.tokens[end - block_size : end]
            if keyed.special:
                parent, tokens = keyed.block(parent, end - block_size, tokens)
            digests.append(hash_block(parent, tokens))
            end += block_size
        return digests

    def clone(self) -> Self:
        twin = copy(self)
        twin.tokens = self.tokens.copy()
        twin._digests = self._digests.copy()
        return twin
