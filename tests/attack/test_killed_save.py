"""kill -9 of a save at random moments, of one file and of a set: the old one or the new one is there, whole, as `verify` judges it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nobounce
from capabilities import need
from nobounce.formats.integrity import verify
from scale import cases

INDEX = "model.safetensors.index.json"
FORKED = """
import os, signal, sys, time
import numpy as np
import nobounce.device, nobounce.formats.save, nobounce.runtimes.host.cpu, nobounce.io.transfer, xxhash
way, path, most = sys.argv[1:]
if way == "named":
    plain = os.open
    def without(path, flags, *arguments, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "no O_TMPFILE")
        return plain(path, flags, *arguments, **options)
    os.open = without
source = np.random.default_rng(5)
tensors = {f"t{n}": source.integers(0, 256, n, dtype=np.uint8) for n in (5_000_000, 4096, 77, 3_000_001, 900_000)}
for line in sys.stdin:  # the modules are loaded: a kill hits the work, not the start
    step, after = line.split()
    pid = os.fork()
    if not pid:
        options = {"max_shard_nbytes": int(most)} if int(most) else {}
        nobounce.save(tensors, path, checksums=True, metadata={"step": step}, **options)
        os._exit(0)
    if float(after) >= 0:
        time.sleep(float(after))
        os.kill(pid, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def step_of(path: Path) -> int | None:
    """Which save the model at a path is of; None where there is none. Fails where `verify` finds anything wrong with it."""
    if not (path / INDEX if path.is_dir() else path).exists():
        return None
    report = verify(str(path))
    assert report.problems == []
    assert report.is_complete
    names = [f.path for f in report.files]
    steps = {nobounce.load(name, device="cpu").metadata["step"] for name in names}
    assert len(steps) == 1, "a set of two saves"
    return int(steps.pop())


@pytest.mark.parametrize("way", ["O_TMPFILE", "named"])
@pytest.mark.parametrize("kind", ["file", "set"])
def test_old_or_new_and_whole(tmp_path: Path, kind: str, way: str) -> None:
    need("xxhash")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "m"
    most = 3_000_000 if kind == "set" else 0
    command = [sys.executable, "-c", FORKED, way, str(path), str(most)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    generator = random.Random(14)
    with subprocess.Popen(command, text=True, **pipes) as parent:  # type: ignore[call-overload]

        def save(step: int, killed_after: float = -1) -> int:
            parent.stdin.write(f"{step} {killed_after}\n")
            parent.stdin.flush()
            return int(parent.stdout.readline())

        assert save(0) == 0
        begin = time.perf_counter()
        assert save(1) == 0
        whole = time.perf_counter() - begin
        there: int | None = 1
        killed = 0
        for number in range(2, 2 + cases(200, 4)):
            if number % 4 == 0:  # there is nothing to replace
                shutil.rmtree(folder)  # and what a kill in the moment of an exchange has left
                folder.mkdir()
                there = None
            ended = save(number, generator.uniform(0, whole))
            assert ended in (0, -signal.SIGKILL)
            killed += ended != 0
            found = step_of(path)
            assert found in ((there, number) if ended else (number,))
            there = found
            if kind == "file" and way == "O_TMPFILE" and there is None:
                assert os.listdir(folder) == []
        assert killed
        assert save(1_000_000) == 0
        parent.stdin.close()
    assert step_of(path) == 1_000_000
    assert os.listdir(folder) == ["m"]
    if kind == "set":
        named = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        assert set(os.listdir(path)) == {INDEX, *named}
