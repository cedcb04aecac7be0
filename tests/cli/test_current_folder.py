"""A folder may hold files named as modules of the standard library are: nobounce's own processes execute none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nobounce.checks.cures import root_command
from nobounce.facts.libraries import ask_child


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with every such name, each of which leaves a mark, and a file to move."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in sys.stdlib_module_names | {"numpy", "rich", "typer", "nobounce", "amdsmi"}:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r} + ' ')\n"
        )
    (folder / "data").write_bytes(os.urandom(1 << 16))
    return folder


def executed(trap: Path) -> str:
    mark = trap.parent / "executed"
    return mark.read_text() if mark.exists() else ""


def run(trap: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As the installed script does: the current folder is not on this interpreter's own path."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "nobounce", *arguments],
        cwd=trap,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "data", "--rounds", "1", "--device", "cpu"],
        ["stats", "--", "nobounce", "load", "missing.safetensors"],
        ["trace", "-o", "t.json", "--", "nobounce", "cp", "data", "copy", "--device", "cpu"],
        ["check", "data"],
        ["check"],
        ["topology"],
    ],
)
def test_no_verb_executes_what_lies_in_the_current_folder(trap: Path, arguments: list[str]) -> None:
    done = run(trap, *arguments)
    assert executed(trap) == "", done.stderr
    assert "Traceback" not in done.stderr


def test_a_users_program_runs_as_the_user_asked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('the one of this folder')")
    assert run(tmp_path, "stats", "--", "-m", "mine").stdout == "the one of this folder\n"


def test_what_a_check_asks_of_a_child_comes_from_installed_packages(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trap)
    for site in (True, False):
        assert ask_child("import json; print(json.dumps([1]))", site=site) == [1]
    assert executed(trap) == ""


def test_the_command_for_root_takes_nothing_from_the_current_folder(trap: Path) -> None:
    command = root_command("data", "--json").split()[1:]
    done = subprocess.run(command, cwd=trap, capture_output=True, text=True, check=False, timeout=60)
    assert executed(trap) == ""
    assert json.loads(done.stdout)["schema"] == "nobounce.check/1"
