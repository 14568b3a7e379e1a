"""Where the chunks of a prompt must end so that states stay behind (Mamba and its like)."""

from __future__ import annotations

from kvproof_reference.request import Request
from kvproof_spec.config import Config


def state_block_size(config: Config) -> int:
    """Tokens from one saved state to the next; 0 where there are no states."""
    return max((group.block_size for group in config.groups if group.kind == "state"), default=0)


def saving_chunk(config: Config, request: Request, start: int, num_tokens: int) -> int:
    """As many of the `num_tokens` tokens from `start` on as one step may compute, perhaps none.

    A step leaves one state behind, after its last token.  Over known tokens it ends with a
    block, with the last of them, or at the prompt's last boundary inside a block; it runs
    over none of these, and over no block's end if it starts inside one.  (vLLM 0.32:
    `_mamba_block_aligned_split`.)
    """
    block = state_block_size(config)
    known_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if not block or start >= known_end:
        return num_tokens
    end = start + num_tokens
    if end < known_end:
        end -= end % block
    last = (request.num_tokens - 1) // block * block
    stops = [last]
    if start % block:
        stops.append((start // block + 1) * block)
    if config.partial_boundary:
        tail = (request.num_prompt_tokens - 1) // config.boundary * config.boundary
        stops += [tail] if last < tail < request.num_prompt_tokens else []
    return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)
