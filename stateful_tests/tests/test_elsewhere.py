"""`--python ENV` runs the command in another environment, as if it were this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from kvproof_stateful.cli import main
from kvproof_stateful.elsewhere import VARIABLE, python_option, run_with_paths

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "counterexamples" / "fault-window-block-returned-in-flight.ndjson"
COMMAND = [sys.executable, "-m", "kvproof_stateful.cli"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing installed."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def sufficient(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with what kvproof needs, and no kvproof."""
    import hypothesis

    folder = tmp_path_factory.mktemp("sufficient") / "env"
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # A .pth file of a .pth file's folder is not read: an editable kvproof is not seen.
    Path(site, "needed.pth").write_text(f"{Path(hypothesis.__file__).parent.parent}\n")
    return folder


def run(*arguments: object, **options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **options}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_a_campaign_runs_in_the_other_environment(sufficient: Path, tmp_path: Path) -> None:
    done = run(
        "campaign", "--python", sufficient, "--actions", 400, "--features", "full,preempt",
        "--without", "I5", "--out", tmp_path, "--json",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["judged_actions"] == 400
    assert report["command"].startswith(
        f"kvproof campaign --target plain --python {sufficient} --level contract"
    )
    assert done.returncode == report["exit_code"]


def test_output_and_exit_code_are_passed_on(sufficient: Path) -> None:
    there = run("replay", KEPT, "--python", sufficient / "bin" / "python")
    here = run("replay", KEPT)
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)
    assert here.returncode == 1
    assert run("replay", KEPT, "--python", sufficient, "--target", "plain").returncode == 0


def test_it_is_the_other_python_that_runs(sufficient: Path, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(
        "import sys\n"
        "from kvproof_stateful.targets.plain import PlainTarget\n\n"
        "class Tells(PlainTarget):\n"
        "    name = sys.prefix\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    asked = ("scenarios", "--target", "tells:Tells", "--json", "--python", sufficient)
    done = run(*asked, PYTHONPATH=path)
    assert json.loads(done.stdout)["target"] == str(sufficient)


def test_its_targets_are_those_of_this_kvproof(sufficient: Path) -> None:
    listed = json.loads(run("targets", "--json", "--python", sufficient).stdout)["targets"]
    here = json.loads(run("targets", "--json").stdout)["targets"]
    assert [target["name"] for target in listed] == [target["name"] for target in here]


def test_what_it_lacks_is_said_in_one_line(bare: Path) -> None:
    done = run("campaign", "--python", bare)
    assert done.returncode == 2
    assert done.stdout == ""
    python = bare / "bin" / "python"
    assert done.stderr == (
        f"kvproof: --python {python} lacks hypothesis, packaging, rich: "
        f"{python} -m pip install hypothesis packaging rich\n"
    )


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("nowhere", "a virtual environment or a Python executable is expected"),
        (".", "a virtual environment or a Python executable is expected"),
        ("text", "a virtual environment or a Python executable is expected"),
        ("no-python", "is no working Python"),
        ("old-python", "is Python 3.9, kvproof needs 3.11"),
    ],
)
def test_what_is_no_environment_is_said_in_one_line(
    environment: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no program")
    for name, told in (("no-python", "hello"), ("old-python", "[[3, 9], []]")):
        Path(name).write_text(f"#!/bin/sh\necho '{told}'\n")
        Path(name).chmod(0o755)
    assert main(["campaign", "--python", environment]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


def test_ctrl_c_reaches_it_and_the_report_is_printed(sufficient: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "campaign", "--python", str(sufficient), "--time", "10m"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        process.stderr.readline()  # the first sign of life is five seconds into the campaign
        os.killpg(process.pid, signal.SIGINT)
        out = process.stdout.read()
    assert process.returncode == 130
    assert "INTERRUPTED" in out


def test_a_kill_is_passed_on() -> None:
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    started = time.monotonic()
    assert run_with_paths([sys.executable, "-c", code], []) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 30


def test_commands_say_where_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert python_option() == ""
    monkeypatch.setenv(VARIABLE, "/my envs/vllm")
    assert python_option() == " --python '/my envs/vllm'"
