"""mypy and pyright accept the files beside this one, but for the lines that say `# wrong` (`# wrong: NAME`: for that checker alone)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import nobounce
from capabilities import need

HERE = Path(__file__).parent
PACKAGE = Path(nobounce.__file__).parent
MYPY_CACHE = HERE.parents[1] / ".mypy_cache" / "typing"
WRONG = re.compile(r"# wrong(?:: (\w+))?$")

Line = tuple[str, int]
Problems = dict[Line, str]
"""(file, line) -> the first message about it."""


def mypy(python: str, *names: str) -> Problems:
    ini = HERE / "mypy.ini"
    options = ["--config-file", str(ini), "--cache-dir", str(MYPY_CACHE / Path(python).parent.parent.name)]
    output = run("mypy", *options, "--output", "json", "--python-executable", python, *paths(names))
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return first((Path(f["file"]).name, f["line"], f["message"]) for f in found if f["severity"] == "error")


def pyright(python: str, *names: str) -> Problems:
    output = run("pyright", "--pythonversion", "3.11", "--pythonpath", python, "--outputjson", *paths(names))
    found = [f for f in json.loads(output)["generalDiagnostics"] if f["severity"] == "error"]
    return first((Path(f["file"]).name, f["range"]["start"]["line"] + 1, f["message"]) for f in found)


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, cwd=HERE)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def paths(names: tuple[str, ...]) -> list[str]:
    return [str(HERE / name) for name in names]


def first(found: Iterable[tuple[str, int, str]]) -> Problems:
    problems: Problems = {}
    for name, line, message in found:
        problems.setdefault((name, line), message)
    return problems


def marked(checker: str, *names: str) -> set[Line]:
    lines = ((name, n, WRONG.search(line)) for name in names for n, line in numbered(name))
    return {(name, n) for name, n, mark in lines if mark and mark.group(1) in (None, checker)}


def numbered(name: str) -> list[tuple[int, str]]:
    return list(enumerate((HERE / name).read_text().splitlines(), 1))


def assert_right(check: Callable[..., Problems], python: str, *names: str) -> None:
    problems, wrong = check(python, *names), marked(check.__name__, *names)
    assert {at: message for at, message in problems.items() if at not in wrong} == {}
    assert wrong - problems.keys() == set(), "accepted, although it is wrong"
    assert wrong


checkers = pytest.mark.parametrize("check", [mypy, pyright])


@checkers
def test_what_the_api_takes_and_gives(check: Callable[..., Problems]) -> None:
    need(check.__name__, "torch")
    assert_right(check, sys.executable, "loading.py", "transfers.py")


@checkers
def test_an_installed_package_checks_without_numpy_and_torch(
    check: Callable[..., Problems], tmp_path: Path
) -> None:
    """In an environment of its own, which holds the package alone: its marker for type checkers counts there."""
    need(check.__name__)
    venv.create(tmp_path / "bare", symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "bare/lib" / version / "site-packages/nobounce").symlink_to(PACKAGE)
    assert_right(check, str(tmp_path / "bare/bin/python"), "plain.py")
