"""Settings shared by every test folder."""

import importlib.util
import os

from hypothesis import settings

# No example database: what was once found is kept as a trace under counterexamples/.
settings.register_profile("kvproof", deadline=None, database=None, derandomize="CI" in os.environ)
settings.load_profile("kvproof")

FILES = "stateful_tests/kvproof_stateful"
NEEDS = {
    "vllm": [f"{FILES}/targets/vllm*.py", f"{FILES}/bench_manager/genuine.py"],
    "matplotlib": [f"{FILES}/bench_manager/plotting.py"],
}
"""By extra, the modules whose doctests cannot be collected without it."""

collect_ignore_glob = [
    file for name, files in NEEDS.items() if not importlib.util.find_spec(name) for file in files
]
