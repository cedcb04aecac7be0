"""The linters' rules about paths and imports still bite: a file that has moved away from its rule would be ruled by none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nobounce
from capabilities import need

ROOT = Path(__file__).parents[2]
PACKAGE = Path(nobounce.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BANNED = "import threading\n\nthreading.Thread(target=print).start()\n"
REPLAYED = ["runtimes/host/streams.py", "runtimes/host/core.py", "io/engine.py", "io/transfer.py"]
"""Modules whose schedules must be replayable from a seed: threads and time come from a Scheduler alone."""


def ruff(path: str, source: str) -> set[str]:
    """The codes of what ruff says of `source` as the file `path` of the package."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    command += ["--stdin-filename", f"src/nobounce/{path}", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stderr
    return set(re.findall(r"^\S+: ([A-Z]+\d+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("path", REPLAYED)
def test_threads_of_their_own_are_banned_where_schedules_are_replayed(path: str) -> None:
    need("ruff")
    assert (PACKAGE / path).is_file()
    assert "TID251" in ruff(path, BANNED)
    assert "TID251" in ruff(path, "import time\n\ntime.sleep(1)\n")


def test_elsewhere_threads_are_plain() -> None:
    need("ruff")
    assert "TID251" not in ruff("cli/output.py", BANNED)


def test_every_path_of_a_rule_leads_to_files() -> None:
    for pattern in PROJECT["tool"]["ruff"]["lint"]["per-file-ignores"]:
        head, braces, tail = re.fullmatch(r"!?([^{]*)(?:\{([^}]*)\})?(.*)", pattern).groups()  # type: ignore[union-attr]
        for name in (braces or "").split(","):
            assert any(ROOT.glob(f"{head}{name}{tail}")), f"{pattern}: {name}"


def test_imports_that_the_contracts_forbid_break_them(tmp_path: Path) -> None:
    need("importlinter")
    shutil.copytree(PACKAGE, tmp_path / "nobounce", ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in {
        "facts/statx.py": "import nobounce.cli.output",
        "checks/files.py": "import nobounce.runtimes.registry",
        "io/movers/relay_pipe.py": "import nobounce.io.kept",
    }.items():
        with (tmp_path / "nobounce" / file).open("a") as out:
            out.write(f"\n{line}\n")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-logo", "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for contract in PROJECT["tool"]["importlinter"]["contracts"]:
        assert f"{contract['name']} BROKEN" in said
