"""Named, versioned choices among the allowed answers: the strictest level compares with one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from kvproof_spec.config import Config
from kvproof_spec.oracle import Policy
from kvproof_spec.policies.releases import (
    CORRECTIONS,
    NOT_EXACT,
    VLLM_0_20,
    VLLM_0_32,
    UnknownToPolicy,
)
from kvproof_spec.policies.vllm import VllmPolicy

__all__ = ["CORRECTIONS", "NOT_EXACT", "POLICIES", "UnknownToPolicy"]

POLICIES: dict[str, Callable[[Config, Collection[str]], Policy]] = {
    release.name: partial(VllmPolicy, release=release) for release in (VLLM_0_32, VLLM_0_20)
}
