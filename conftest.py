"""Settings shared by every test folder."""

import importlib.util
import os

from hypothesis import settings

# No example database: what was once found is kept as a trace under counterexamples/.
settings.register_profile("kvproof", deadline=None, database=None, derandomize="CI" in os.environ)
settings.load_profile("kvproof")

# The doctests of these modules cannot be collected without vLLM.
collect_ignore_glob = (
    [] if importlib.util.find_spec("vllm") else ["stateful_tests/kvproof_stateful/targets/vllm*.py"]
)
