"""The same command in another environment: it has the engine, this one has kvproof.

The other Python gets this kvproof's packages first on its path, by links in a folder of
their own, so that nothing else of this environment comes with them; and what that needs
besides must be there.  Output, exit code and Ctrl-C are the other process's.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import kvproof_stateful
from kvproof_stateful.exits import UsageError

PACKAGES = ("kvproof_spec", "kvproof_reference", "kvproof_stateful")
NEEDED = ("hypothesis", "packaging", "rich")
OLDEST = (3, 11)

VARIABLE = "KVPROOF_PYTHON"
"""Set in the process that was started: where it runs, as it was asked for."""

PROBE = (
    "import json, sys; from importlib.util import find_spec;"
    "print(json.dumps([sys.version_info[:2], [n for n in sys.argv[1:] if find_spec(n) is None]]))"
)


def is_here(environment: str) -> bool:
    """Is this the process that was started for it?"""
    return os.environ.get(VARIABLE) == environment


def python_option() -> str:
    """What a command must have to run where this one does: ` --python ENV`, or nothing."""
    environment = os.environ.get(VARIABLE)
    return f" --python {shlex.quote(environment)}" if environment else ""


def run_elsewhere(environment: str, arguments: Sequence[str]) -> int:
    """Run kvproof with these arguments in an environment, a folder or a Python; its exit code."""
    python = python_of(environment)
    require_usable(python)
    with tempfile.TemporaryDirectory(prefix="kvproof-") as folder:
        link_packages(Path(folder))
        command = [str(python), "-m", "kvproof_stateful.cli", *arguments]
        return run_with_paths(command, [folder], {VARIABLE: environment})


def python_of(environment: str) -> Path:
    path = Path(environment).expanduser()
    found = [path / "bin" / "python", path / "Scripts" / "python.exe"] if path.is_dir() else [path]
    for python in found:
        if python.is_file() and os.access(python, os.X_OK):
            return python.absolute()  # not resolved: a link is what makes it an environment
    raise UsageError(
        f"--python {environment}: a virtual environment or a Python executable is expected"
    )


def require_usable(python: Path) -> None:
    """It is a Python of a version that will do, and has what kvproof needs."""
    try:
        command = [str(python), "-c", PROBE, *NEEDED]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        version, missing = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        text = " ".join(str(error).split())
        raise UsageError(f"--python {python} is no working Python: {text:.200}") from None
    if tuple(version) < OLDEST:
        told = ".".join(map(str, version))
        raise UsageError(f"--python {python} is Python {told}, kvproof needs 3.11 or newer")
    if missing:
        raise UsageError(
            f"--python {python} lacks {', '.join(missing)}: "
            f"{python} -m pip install {' '.join(missing)}"
        )


def link_packages(folder: Path) -> None:
    """This kvproof's packages, and its targets as a distribution of that name."""
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (folder / name).symlink_to(Path(spec.origin).parent, target_is_directory=True)
    info = folder / f"kvproof-{kvproof_stateful.__version__}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kvproof\nVersion: {kvproof_stateful.__version__}\n"
    (info / "METADATA").write_text(metadata)
    own = [p for p in entry_points(group="kvproof.targets") if p.value.startswith(PACKAGES)]
    lines = [f"{point.name} = {point.value}\n" for point in own]
    (info / "entry_points.txt").write_text("".join(["[kvproof.targets]\n", *lines]))


def run_with_paths(
    command: Sequence[str], paths: Sequence[str], variables: dict[str, str] | None = None
) -> int:
    """Run a command with `paths` first on Python's; a signal counts as in a shell."""
    every = [*paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join(every)}
    with subprocess.Popen(command, env=environment) as process, signals_go_to(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def signals_go_to(process: subprocess.Popen[Any]) -> Generator[None]:
    """Ctrl-C reaches both processes, and only the other one acts on it; a kill is passed on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ignore(signum: int, frame: FrameType | None) -> None:
        pass

    def pass_on(signum: int, frame: FrameType | None) -> None:
        process.send_signal(signum)

    before = signal.signal(signal.SIGINT, ignore), signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
