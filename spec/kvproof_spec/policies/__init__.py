"""Named, versioned choices among the allowed answers: the strictest level compares with one."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvproof_spec.config import Config
from kvproof_spec.oracle import Policy
from kvproof_spec.policies.vllm import CORRECTIONS, UnknownToPolicy, VllmPolicy

__all__ = ["CORRECTIONS", "POLICIES", "UnknownToPolicy"]

POLICIES: dict[str, Callable[[Config, Collection[str]], Policy]] = {"vllm-0.32": VllmPolicy}
