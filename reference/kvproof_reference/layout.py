"""What the groups of one model share."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from kvproof_spec.config import Group


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups, and the bounds of a request, in tokens.

    `max_model_len` bounds a sequence, `max_in_flight_tokens` what is scheduled and
    not yet settled.  With a `partial_boundary` hits may end inside blocks.
    """

    groups: tuple[Group, ...]
    max_model_len: int
    max_in_flight_tokens: int
    partial_boundary: int | None = None

    def __post_init__(self) -> None:
        unit = self.partial_boundary
        if unit is not None and any(unit < 1 or g.block_size % unit for g in self.groups):
            raise ValueError(f"a partial boundary of {unit} tokens does not divide every block")
        if any(group.kind == "chunked" and group.drafter for group in self.groups):
            raise ValueError("a drafter with chunked local attention: vLLM 0.32 has none either")

    @property
    def hash_block_size(self) -> int:
        """Tokens from one digest to the next: every group's blocks are made of such pieces."""
        return self.partial_boundary or gcd(*(group.block_size for group in self.groups))

    @property
    def common_block_size(self) -> int:
        """Tokens from one boundary to the next at which every group's blocks end."""
        return lcm(*(group.block_size for group in self.groups))

    @property
    def partial_hits(self) -> bool:
        """Whether hits end inside blocks: as in vLLM, for the sake of states bigger than that.

        Windows and chunks are found by whole blocks, which must then be no bigger.
        """
        unit = self.partial_boundary
        return (
            unit is not None
            and any(group.kind == "state" and group.block_size > unit for group in self.groups)
            and all(g.kind in ("full", "state") or g.block_size == unit for g in self.groups)
        )

    @property
    def boundary(self) -> int:
        """Tokens from one place where a hit may end to the next."""
        return self.hash_block_size if self.partial_hits else self.common_block_size

    @property
    def has_drafter(self) -> bool:
        return any(group.drafter for group in self.groups)

    def alike(self, group_index: int) -> tuple[int, ...]:
        """The groups that differ from this one at most in `drafter`: they are looked up as one."""

        def likeness(group: Group) -> tuple[object, ...]:
            return group.kind, group.block_size, group.window

        wanted = likeness(self.groups[group_index])
        return tuple(i for i, group in enumerate(self.groups) if likeness(group) == wanted)

    def drops(self, group_index: int) -> bool:
        """Whether a hit needs one block more than it gives: a drafter, or looked up with one."""
        return any(self.groups[index].drafter for index in self.alike(group_index))
