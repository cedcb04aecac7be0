"""kill -9 of `cp` at random moments: DEST is the old file or the new one, and nothing else is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capabilities import need
from filesystems import machine
from scale import cases

MIB = 1 << 20
SIZE = 12 * MIB
FORKED = """
import os, signal, sys, time
import nobounce.cli.cp, nobounce.device, nobounce.io.file
from nobounce import outfile
from nobounce.cli.main import main
if sys.argv.pop(1) == "named":
    plain = os.open
    def without(path, flags, *arguments, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "no O_TMPFILE")
        return plain(path, flags, *arguments, **options)
    os.open = without
for line in sys.stdin:  # the modules are loaded: a kill hits the work, not the start
    pid = os.fork()
    if not pid:
        sys.argv[0] = "nobounce"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main()
    if float(line) >= 0:
        time.sleep(float(line))
        os.kill(pid, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize(
    ("way", "file_system"),
    [("O_TMPFILE", "here"), ("O_TMPFILE", "overlay"), ("O_TMPFILE", "btrfs"), ("named", "here")],
)
def test_old_or_new_and_nothing_left(tmp_path: Path, way: str, file_system: str) -> None:
    if file_system != "here":
        need("mkfs.btrfs" if file_system == "btrfs" else "overlay")
    with machine(tmp_path) as made:
        attack(tmp_path if file_system == "here" else made.get(file_system), way, tmp_path / "source")


def attack(where: Path, way: str, source: Path) -> None:
    folder = where / "folder"
    folder.mkdir()
    dest = folder / "dest"
    new, old = os.urandom(SIZE), os.urandom(SIZE // 2)
    source.write_bytes(new)
    command = [sys.executable, "-c", FORKED, way, "cp", str(source), str(dest), "--device", "cpu"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    generator = random.Random(13)
    with subprocess.Popen(command, text=True, **pipes) as parent:  # type: ignore[call-overload]

        def copy(killed_after: float = -1) -> int:
            parent.stdin.write(f"{killed_after}\n")
            parent.stdin.flush()
            return int(parent.stdout.readline())

        assert copy() == 0
        start = time.perf_counter()
        assert copy() == 0
        whole = time.perf_counter() - start
        for number in range(cases(75, 2)):
            dest.unlink(missing_ok=True)
            if number % 2:
                dest.write_bytes(old)
            assert copy(generator.uniform(0, whole)) in (0, -signal.SIGKILL)
            if number % 2:
                assert dest.read_bytes() in (old, new)
            else:
                assert not dest.exists() or dest.read_bytes() == new
                if way == "O_TMPFILE":
                    assert set(os.listdir(folder)) <= {"dest"}
        assert copy() == 0
        parent.stdin.close()
    assert dest.read_bytes() == new
    assert os.listdir(folder) == ["dest"]
