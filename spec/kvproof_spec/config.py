"""What an implementation is built with: its cache groups and its pool.

A group is the layers that share one block table.

| kind | a step over start..end reads | it writes | a request with n tokens needs |
|---|---|---|---|
| full | 0..end-1 | start..end-1 | everything |
| sliding, window w | from max(0, start-w+1) | start..end-1 | from max(0, n-w+1) |
| chunked, chunk c | from c*floor(start/c) | start..end-1 | from c*floor(n/c) |
| state | the state after start-1 | the state after end-1 | the state after n-1 |
| cross | all encoder tokens | them, once | all encoder tokens |

A state (Mamba and its like, vLLM's "align" mode) fills a page alone.  The block of a
position holds the state after it: a step reads the block of start-1 and writes that of
end-1, first all reads of a step, then all writes.  So a state stays behind only where a
step ended on a block's last token, or where a partial boundary was copied away; blocks
that a step has passed over are null.  Cross attention takes no part in prefix reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

Kind = Literal["full", "sliding", "chunked", "state", "cross"]
KINDS: tuple[Kind, ...] = ("full", "sliding", "chunked", "state", "cross")
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

    `block_size` is in tokens.  `window` is the sliding window in tokens, counting the
    reading position itself (vLLM's `sliding_window`), or the chunk of chunked local
    attention; 0 for the other kinds.  The cells of a `drafter` also depend on the token
    that follows.
    """

    kind: Kind
    block_size: int
    window: int = 0
    drafter: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"a block of {self.block_size} tokens")
        if (self.kind in ("sliding", "chunked")) != (self.window > 0):
            raise ValueError(f"a {self.kind} group with a window of {self.window} tokens")

    @property
    def reused(self) -> bool:
        """Does it take part in prefix reuse?"""
        return self.kind != "cross"

    @property
    def cells(self) -> int:
        """Cells of a page: one for each token, or one state."""
        return 1 if self.kind == "state" else self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Table entries that `tokens` tokens span, nulls included."""
        return ceil_div(tokens, self.block_size)

    def is_cleared(self, index: int, loaded: int) -> bool:
        """Must the page of a new table entry be zeroed, `loaded` external tokens being brought?

        A state is written as a whole, and what is brought fills its blocks.
        """
        if self.kind == "state":
            return False
        return not self.reused or index >= self.blocks_for(loaded)

    def first_needed(self, processed: int) -> int:
        """First position that a request with `processed` tokens still needs.

        >>> Group("sliding", 4, 8).first_needed(10)
        3
        >>> Group("chunked", 4, 8).first_needed(10)
        8
        """
        match self.kind:
            case "sliding":
                return max(0, processed - self.window + 1)
            case "chunked":
                return processed - processed % self.window
            case "state":
                return max(0, processed - 1)
            case _:
                return 0

    def first_needed_block(self, processed: int) -> int:
        """Table entries left of this one are never read again."""
        return self.first_needed(processed) // self.block_size

    def read(self, start: int, end: int) -> range:
        """Positions of its own that a step over `start` to `end - 1` reads.

        With `end` = `start`: what a hit of `start` tokens needs.
        """
        match self.kind:
            case "cross":
                return range(0)
            case "state":
                return range(self.first_needed(start), min(start, end))
            case _:
                return range(self.first_needed(start), end)

    def written(self, first: int, end: int) -> range:
        """Positions that computing `first` to `end - 1` leaves something at."""
        match self.kind:
            case "cross":
                return range(0)
            case "state":
                return range(max(first, end - 1), end)
            case _:
                return range(first, end)

    def entries(self, start: int, end: int) -> Sequence[int]:
        """Table entries that a step over `start` to `end - 1` reads or writes."""
        if self.kind == "state":
            ends = [tokens - 1 for tokens in (start, end) if tokens]
            return sorted({position // self.block_size for position in ends})
        return range(self.first_needed_block(start), self.blocks_for(end))

    def most_blocks(self, in_flight: int, max_model_len: int) -> int:
        """Blocks that a request can need at once with `in_flight` tokens in steps."""
        if self.kind in ("sliding", "chunked"):
            before = self.window - (self.kind == "sliding")
            most = min(before + in_flight, max_model_len)
            return ceil_div(most, self.block_size) + (self.kind == "sliding")
        return self.blocks_for(max_model_len)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a target that schedules itself is set up: vLLM's names, all bounds in tokens.

    `long_prefill_token_threshold` limits one request's tokens of a step (0: no limit).
    `whole_sequence_check`: a request is admitted only if all its known tokens fit.
    Sampling `stop_token` ends a request, perhaps with its next step in flight.
    `patience`: steps a token that all requests may take until one of them has another or ends,
    once no more arrive (0: for ever): each computes its tokens anew once at most.
    With a `connector` requests may have tokens elsewhere, or be stored.
    """

    policy: Literal["fcfs", "priority"] = "fcfs"
    asynchronous: bool = False
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    long_prefill_token_threshold: int = 0
    whole_sequence_check: bool = True
    stop_token: int | None = None
    patience: int = 0
    connector: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """What an implementation is built with.

    `num_blocks` counts the null block.  `max_model_len` and `max_in_flight_tokens` are
    in tokens.  `defers_returns`: blocks of a request that leaves while its steps are in
    flight come back when the last of those steps has.  `ordering` says whether steps
    are ordered among themselves (`stream`) or not (`strict`).  `worker`: rows are sent to a
    worker, and shown.  With `scheduling` the target runs its own scheduler.  Hits may end
    inside blocks, at multiples of `partial_boundary` tokens, if there is one.  `clears`:
    the worker zeroes every page that is handed out, with the next step.  `events`: the
    target announces what becomes findable, and what no longer is.
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
    partial_boundary: int | None = None
    clears: bool = False
    events: bool = False

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("no cache group")
        if self.num_blocks < 2:
            raise ValueError(f"{self.num_blocks} blocks: one besides the null block is the least")
        if self.caching and not all(group.reused for group in self.groups):
            raise ValueError("cross attention needs prefix caching off")
        unit = self.partial_boundary
        if unit is not None and any(unit < 1 or g.block_size % unit for g in self.groups):
            raise ValueError(f"a partial boundary of {unit} tokens does not divide every block")

    @property
    def reused(self) -> tuple[Group, ...]:
        """The groups that take part in prefix reuse."""
        return tuple(group for group in self.groups if group.reused)

    @property
    def common_block(self) -> int:
        """Tokens between two positions at which the blocks of all reused groups end."""
        return lcm(*(group.block_size for group in self.reused))

    @property
    def boundary(self) -> int:
        """Tokens between two boundaries at which a hit may end."""
        return self.partial_boundary or self.common_block

    @property
    def hash_block(self) -> int:
        """Tokens of the pieces by which an index names prefixes."""
        return self.partial_boundary or gcd(*(group.block_size for group in self.groups))

    @property
    def no_tables(self) -> tuple[tuple[int, ...], ...]:
        """The tables of a request that holds nothing."""
        return ((),) * len(self.groups)
