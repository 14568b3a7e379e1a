"""What an implementation is built with: its cache groups and its pool.

A group is the layers that share one block table.

The five kinds of the article differ in three questions: how many blocks n tokens
want, which positions a step reads, and from which position on a request that has
processed n tokens still needs its cells.  State groups, chunked local and cross
attention join `Kind` with their own rows of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

Kind = Literal["full", "sliding"]
KINDS: tuple[Kind, ...] = ("full", "sliding")
Ordering = Literal["stream", "strict"]


def ceil_div(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` tokens span.

    >>> ceil_div(15, 4)
    4
    """
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group.

    `block_size` is in tokens.  `window` is the sliding window in tokens, counting
    the reading position itself (vLLM's `sliding_window`); 0 for full attention.
    """

    kind: Kind
    block_size: int
    window: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"a block of {self.block_size} tokens")
        if (self.kind == "sliding") != (self.window > 0):
            raise ValueError(f"a {self.kind} group with a window of {self.window} tokens")

    def blocks_for(self, tokens: int) -> int:
        """Table entries that `tokens` tokens span, nulls included."""
        return ceil_div(tokens, self.block_size)

    def first_needed(self, processed: int) -> int:
        """First position that a request with `processed` tokens still needs.

        >>> Group("sliding", 4, 8).first_needed(10)
        3
        """
        if self.kind == "sliding":
            return max(0, processed - self.window + 1)
        return 0

    def first_needed_block(self, processed: int) -> int:
        """Table entries left of this one are never read again."""
        return self.first_needed(processed) // self.block_size

    def most_blocks(self, in_flight: int, max_model_len: int) -> int:
        """Blocks that a request can need at once with `in_flight` tokens in steps."""
        if self.kind == "sliding":
            most = min(self.window - 1 + in_flight, max_model_len)
            return ceil_div(most, self.block_size) + 1
        return self.blocks_for(max_model_len)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a target that schedules itself is set up: vLLM's names, all bounds in tokens.

    `long_prefill_token_threshold` limits one request's tokens of a step (0: no limit).
    `whole_sequence_check`: a request is admitted only if all its known tokens fit.
    Sampling `stop_token` ends a request, perhaps with its next step in flight.
    """

    policy: Literal["fcfs", "priority"] = "fcfs"
    asynchronous: bool = False
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    long_prefill_token_threshold: int = 0
    whole_sequence_check: bool = True
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """What an implementation is built with.

    `num_blocks` counts the null block.  `max_model_len` and `max_in_flight_tokens` are
    in tokens.  `defers_returns`: blocks of a request that leaves while its steps are in
    flight come back when the last of those steps has.  `ordering` says whether steps
    are ordered among themselves (`stream`) or not (`strict`).  `worker`: rows are sent to a
    worker, and shown.  With `scheduling` the target runs its own scheduler.
    """

    groups: tuple[Group, ...]
    num_blocks: int
    caching: bool = True
    max_model_len: int = 256
    max_in_flight_tokens: int = 64
    defers_returns: bool = False
    ordering: Ordering = "stream"
    worker: bool = True
    scheduling: Scheduling | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("no cache group")
        if self.num_blocks < 2:
            raise ValueError(f"{self.num_blocks} blocks: one besides the null block is the least")

    @property
    def boundary(self) -> int:
        """Tokens between two boundaries at which a hit may end."""
        return lcm(*(group.block_size for group in self.groups))

    @property
    def no_tables(self) -> tuple[tuple[int, ...], ...]:
        """The tables of a request that holds nothing."""
        return ((),) * len(self.groups)
