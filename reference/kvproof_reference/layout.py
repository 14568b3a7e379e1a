"""What the groups of one model share."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from kvproof_spec.config import Group


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups, and the bounds of a request, in tokens.

    `max_model_len` bounds a sequence, `max_in_flight_tokens` what is scheduled and
    not yet settled.
    """

    groups: tuple[Group, ...]
    max_model_len: int
    max_in_flight_tokens: int

    @property
    def hash_block_size(self) -> int:
        """Tokens from one digest to the next: every group's blocks are made of such pieces."""
        return gcd(*(group.block_size for group in self.groups))

    @property
    def common_block_size(self) -> int:
        """Tokens from one boundary to the next at which every group's blocks end."""
        return lcm(*(group.block_size for group in self.groups))
