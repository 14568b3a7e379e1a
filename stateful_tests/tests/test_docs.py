"""README.md and docs/ are run: what a page tells its reader to type works.

A `console` block is a session: each line that starts with `$ ` runs through the shell, in a
directory that holds copies of the data folders, and exits 0, or as a trailing `# exit N` says. A
`python` block runs on its own, a block of `>>>` lines as a doctest; one that names vllm-manager
runs again where vLLM is installed. `no-run` behind the language
exempts what needs make, vLLM or a long time (`# takes 20 minutes`), and nothing else.
"""

import doctest
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA_FOLDERS = ("benchmarks", "counterexamples", "docs")
SECONDS_A_COMMAND = 120

FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=fence)`*\s*$", re.M | re.S
)
EXIT = re.compile(r"\s#\s*exit (\d+)\s*$")
EXEMPT = re.compile(r"\bmake\b|vllm|# takes \d", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int  # of the fence
    info: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A line typed at the prompt, and how it ends."""

    text: str
    exit_code: int


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, tuple(match["info"].split()), match["text"])


def commands_of(block: Block) -> Iterator[Command]:
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        if line.startswith("$ "):
            code = EXIT.search(line)
            yield Command(line[2:], int(code[1]) if code else 0)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


BLOCKS = [
    block
    for page in pages()
    for block in blocks_of(page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8"))
    if block.info and block.info[0] in ("console", "python")
]


def blocks_to_run(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.info == (language,)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in DATA_FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    return tmp_path


def test_the_pages_hold_commands_to_run() -> None:
    assert blocks_to_run("console"), "README.md and docs/ hold no ```console block"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_only_make_vllm_and_long_commands_are_exempt(block: Block) -> None:
    assert block.info[1:] in ((), ("no-run",)), f"{block.place}: what is {block.info[1:]}?"
    if block.info[0] == "console":
        assert list(commands_of(block)), f"{block.place}: no line starts with '$ '"
    if "no-run" in block.info:
        assert EXEMPT.search(block.text), f"{block.place}: nothing in it says why it is not run"


@pytest.mark.parametrize("block", blocks_to_run("console"), ids=lambda block: block.place)
@pytest.mark.usefixtures("workplace")
def test_console_blocks_end_as_they_say(block: Block) -> None:
    for command in commands_of(block):
        done = subprocess.run(
            command.text,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_A_COMMAND,
        )
        assert done.returncode == command.exit_code, (
            f"{block.place}: `{command.text}` exited {done.returncode}, "
            f"not {command.exit_code}:\n{done.stdout}"
        )


@pytest.mark.parametrize("block", blocks_to_run("python"), ids=lambda block: block.place)
@pytest.mark.usefixtures("workplace")
def test_python_blocks_run(block: Block) -> None:
    names: dict[str, object] = {"__name__": "__docs__"}
    if ">>> " in block.text:
        test = doctest.DocTestParser().get_doctest(
            block.text, names, block.place, block.page, block.line
        )
        assert doctest.DocTestRunner().run(test).failed == 0, f"{block.place}: see the output"
    else:
        # As far down as on the page, so that a traceback names the line there.
        source = "\n" * block.line + block.text
        exec(compile(source, block.page, "exec", dont_inherit=True), names)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "block",
    [block for block in blocks_to_run("python") if "vllm-manager" in block.text],
    ids=lambda block: block.place,
)
def test_python_blocks_that_name_it_run_with_the_genuine_vllm(block: Block) -> None:
    pytest.importorskip("vllm")
    test_python_blocks_run(block)


def test_blocks_and_commands_are_found_as_a_reader_sees_them() -> None:
    page = (
        "Text\n```console\n$ false  # exit 1\nits output\n$ echo a \\\n    b\n```\n"
        "````markdown\n```python\nnot a block\n```\n````\n```python no-run\nimport vllm\n```\n"
    )
    session, quoted, exempt = blocks_of("page.md", page)
    assert (session.place, session.info) == ("page.md:2", ("console",))
    assert list(commands_of(session)) == [
        Command("false  # exit 1", 1),
        Command("echo a      b", 0),
    ]
    assert quoted.info == ("markdown",)
    assert exempt.info == ("python", "no-run")
