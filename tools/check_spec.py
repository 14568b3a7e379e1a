"""Hold the specification to what it promises its readers.

state.py, actions.py and invariants.py are short enough to be read in one sitting, no function of
theirs branches much, and nothing in the package needs more than the standard library.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SPEC = Path(__file__).resolve().parent.parent / "spec" / "kvproof_spec"
READ_ALONE = tuple(SPEC / name for name in ("state.py", "actions.py", "invariants.py"))
MOST_LINES = 1300  # of READ_ALONE together
WORST_GRADE_ALLOWED = "B"


def missing_files() -> Iterator[str]:
    for path in READ_ALONE:
        if not path.is_file():
            yield f"{path} is missing"


def too_many_lines() -> Iterator[str]:
    lines = {path.name: len(path.read_text().splitlines()) for path in READ_ALONE}
    total = sum(lines.values())
    parts = " + ".join(f"{name} {count}" for name, count in lines.items())
    print(f"{parts} = {total} lines of at most {MOST_LINES}")
    if total > MOST_LINES:
        yield f"{total - MOST_LINES} lines too many: {parts}"


def too_complex() -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "radon",
        "cc",
        "--json",
        "--show-closures",
        *map(str, READ_ALONE),
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    blocks = 0
    for path, entries in found.items():
        if "error" in entries:
            yield f"{path}: radon could not read it: {entries['error']}"
            continue
        functions = [entry for entry in entries if entry["type"] != "class"]
        blocks += len(functions)
        for entry in functions:
            if entry["rank"] > WORST_GRADE_ALLOWED:
                name = ".".join(filter(None, (entry.get("classname"), entry["name"])))
                grade = f"{entry['rank']} ({entry['complexity']})"
                yield f"{path}:{entry['lineno']}: {name} has grade {grade}"
    print(f"{blocks} functions measured, grade {WORST_GRADE_ALLOWED} or better wanted")
    if not blocks:
        yield "radon found no function at all"


def foreign_imports() -> Iterator[str]:
    allowed = {*sys.stdlib_module_names, SPEC.name}
    for path in sorted(SPEC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                if module.partition(".")[0] not in allowed:
                    yield f"{path}:{node.lineno}: imports {module}, not in the standard library"


def main() -> int:
    faults = list(missing_files())
    if not faults:
        faults = [*too_many_lines(), *too_complex(), *foreign_imports()]
    for fault in faults:
        print(f"check_spec: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
