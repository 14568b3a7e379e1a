"""Named, versioned choices among the allowed answers: the strictest level compares with one."""

from __future__ import annotations

from collections.abc import Callable

from kvproof_spec.config import Config
from kvproof_spec.oracle import Policy
from kvproof_spec.policies.vllm import VllmPolicy

POLICIES: dict[str, Callable[[Config], Policy]] = {"vllm-0.32": VllmPolicy}
