"""`bench` ended by kill -9: its files have no name, and what it leaves where they must have one goes with the next run there."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

MAIN = "import sys; sys.argv[0] = 'nobounce'; from nobounce.cli.main import main; main()"
WITHOUT_TMPFILE = """
import os, signal, sys
plain = os.open
def without(path, flags, *arguments, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(95, "no O_TMPFILE")
    return plain(path, flags, *arguments, **options)
os.open = without
"""
KILLED_WHILE_NAMED = "os.unlink = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"


def bench(folder: Path, before: str = "", *more: str) -> list[str]:
    code = before + MAIN
    return [
        sys.executable,
        "-u",
        "-c",
        code,
        "bench",
        str(folder),
        "--device",
        "cpu",
        "--size",
        "1MiB",
        *more,
    ]


def test_a_killed_bench_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(bench(tmp_path, "", "--rounds", "50"), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("machine:")
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_without_nameless_files_the_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed = subprocess.run(
        bench(tmp_path, WITHOUT_TMPFILE + KILLED_WHILE_NAMED), capture_output=True, check=False, timeout=100
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert re.fullmatch(r"\.nobounce-[0-9a-f]{16}", left)
    living = tmp_path / f".nobounce-{'0' * 16}"
    with living.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = subprocess.run(
            bench(tmp_path, WITHOUT_TMPFILE, "--rounds", "1"),
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert os.listdir(tmp_path) == [living.name], "what a living run holds stays"
