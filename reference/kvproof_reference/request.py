"""A request: its known tokens, how far they are computed, and their hash chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from hashlib import sha256
from struct import pack
from typing import Self

HashBlock = Callable[[bytes, Sequence[int]], bytes]

ROOT_DIGEST = bytes(32)


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the prefix that ends with `tokens`, `parent` being that of what precedes them."""
    return sha256(parent + pack(f"<{len(tokens)}q", *tokens)).digest()


class Request:
    """One request as the manager sees it.

    `tokens` are all known token ids, the first `num_prompt_tokens` of them the
    prompt.  They may grow and never change.  `num_computed_tokens` is optimistic:
    it includes the `num_in_flight_tokens` whose steps have not come back.
    """

    __slots__ = (
        "_digests",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "request_id",
        "tokens",
    )

    def __init__(
        self, request_id: int, tokens: Iterable[int], num_prompt_tokens: int | None = None
    ) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        if num_prompt_tokens is None:
            num_prompt_tokens = len(self.tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self._digests: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append_tokens(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def block_hashes(self, block_size: int, hash_block: HashBlock = hash_block) -> list[bytes]:
        """Digests of the full blocks of `block_size` tokens, each chained to the one before.

        The chain is kept and extended, so one request goes with one block size
        and one hash function.
        """
        digests = self._digests
        end = (len(digests) + 1) * block_size
        while end <= len(self.tokens):
            parent = digests[-1] if digests else ROOT_DIGEST
            digests.append(hash_block(parent, self.tokens[end - block_size : end]))
            end += block_size
        return digests

    def clone(self) -> Self:
        twin = copy(self)
        twin.tokens = self.tokens.copy()
        twin._digests = self._digests.copy()
        return twin
