"""What must be set before vLLM is imported."""

from __future__ import annotations

import logging
import os


def prepare_for_vllm() -> None:
    """Every module that imports vLLM calls this first."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # also where the files are those of a GPU build
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
