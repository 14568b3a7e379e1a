"""How vLLM's releases differ, what they get wrong, and what no policy here predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvproof_spec.config import Config


@dataclass(frozen=True, slots=True)
class Release:
    """One release's choices: True is what 0.32.0 does.

    `unhashed_first`: freed blocks that nothing finds go in front of the free order.
    `holds_all_hits_first`: before any group takes blocks for external tokens (#33775).
    `trims_processed`: an allocation gives back what steps in flight do not read (#47728).
    `publishes_reachable`: only what a hit at a common boundary can need.
    `publishes_prompt_end`: the prompt's last boundary gets a key of its own, even inside
    a block.  `retires_states`: states are given back over the nulls between them.
    `looks_past_limit`: a drafter may find its extra block beyond the longest hit.
    `shortens_every_group`: of full attention, where other groups agree on less.
    `keys_adapter_versions`: an adapter is known by more than its name.
    """

    name: str
    unhashed_first: bool = True
    holds_all_hits_first: bool = True
    trims_processed: bool = True
    publishes_reachable: bool = True
    publishes_prompt_end: bool = True
    retires_states: bool = True
    looks_past_limit: bool = True
    shortens_every_group: bool = True
    keys_adapter_versions: bool = True


VLLM_0_32 = Release("vllm-0.32")
"""Observed on 0.32.0; 0.33.0 differs only in states: it puts off fewer hits."""

VLLM_0_20 = Release(
    "vllm-0.20",
    unhashed_first=False,
    holds_all_hits_first=False,
    trims_processed=False,
    publishes_reachable=False,
    publishes_prompt_end=False,
    retires_states=False,
    looks_past_limit=False,
    shortens_every_group=False,
    keys_adapter_versions=False,
)
"""Append only.  Observed on 0.20.2; 0.23.0 already puts unhashed window blocks first."""

CORRECTIONS: dict[str, str] = {
    "withdraws unissued": "what a request leaves unissued is no longer findable",
    "restores last token": "a load of every known token keeps the window of the last one",
    "refuses state shortage": "a load announces the state that it brings and the next (#46892)",
}
"""What vLLM 0.32 breaks, and an implementation that is otherwise equal may do right."""


class UnknownToPolicy(ValueError):
    """The policy cannot predict this configuration; the message says why."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a policy does not predict: in which policies, of which feature, and why."""

    policies: tuple[str, ...]
    feature: str
    reason: str
    applies: Callable[[Config], bool]


def _hashes_inside_one_group(config: Config) -> bool:
    sizes = {group.block_size for group in config.groups}
    return config.caching and len(config.groups) == 1 and sizes != {config.hash_block}


def _chunks_of_other_blocks(config: Config) -> bool:
    chunked = [group for group in config.groups if group.kind == "chunked"]
    return config.caching and any(group.block_size != config.boundary for group in chunked)


def _states_without_partial_hits(config: Config) -> bool:
    states = [group for group in config.groups if group.kind == "state"]
    several_hashes = any(group.block_size > config.hash_block for group in states)
    return config.caching and config.partial_boundary is None and several_hashes


def _drafts_by_chunks(config: Config) -> bool:
    drafting = any(group.kind == "chunked" and group.drafter for group in config.groups)
    return config.caching and drafting


def _has_partial_hits(config: Config) -> bool:
    return config.caching and config.partial_boundary is not None


def _has_one_kind_twice(config: Config) -> bool:
    alike = {(group.kind, group.block_size, group.window) for group in config.groups}
    return config.caching and len(config.groups) > 1 and len(alike) == 1


BOTH = (VLLM_0_32.name, VLLM_0_20.name)
NOT_EXACT: tuple[Limit, ...] = (
    Limit(
        BOTH,
        "partial",
        "a single group is hashed by whole blocks (UnitaryKVCacheCoordinator asserts it)",
        _hashes_inside_one_group,
    ),
    Limit(
        BOTH,
        "chunked",
        "chunked local attention beside other block sizes: every lookup fails an assertion",
        _chunks_of_other_blocks,
    ),
    Limit(
        BOTH,
        "drafter",
        "a drafter with chunked local attention: every lookup fails an assertion",
        _drafts_by_chunks,
    ),
    Limit(
        (VLLM_0_32.name,),
        "state",
        "states beside smaller blocks: then vLLM 0.32 ends hits inside their blocks",
        _states_without_partial_hits,
    ),
    Limit(
        (VLLM_0_20.name,),
        "partial",
        "0.20.2 has no hits inside blocks",
        _has_partial_hits,
    ),
    Limit(
        (VLLM_0_20.name,),
        "full",
        "several groups that are all alike: HybridKVCacheCoordinator wants two kinds",
        _has_one_kind_twice,
    ),
)
"""What vLLM itself does not take, so that there is nothing to be exact about.

0.20.2 also has no `full_sequence_must_fit` and no `reserved_blocks`, and cannot defer the
return of blocks: a target has to skip what asks for them.
"""


def refuse_unknown(config: Config, release: Release) -> None:
    """Raise `UnknownToPolicy` for what is listed in `NOT_EXACT`."""
    for limit in NOT_EXACT:
        if release.name in limit.policies and limit.applies(config):
            raise UnknownToPolicy(f"policy {release.name} does not know this: {limit.reason}")
