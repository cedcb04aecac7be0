"""Issue 20, kind 12 (fio#719): holes and ranges that were never written are read without a disk, and nothing disagrees about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nobounce
from filesystems import Machine
from nobounce.facts.extents import has_holes, hole_nbytes

MIB = 1 << 20
SYSTEMS = ["ext4-ordered", "xfs", "btrfs"]


def sparse(folder: Path) -> Path:
    """A MiB each of a hole, of data, of space that was never written, and of data."""
    path = folder / "sparse.bin"
    with path.open("wb") as f:
        f.truncate(4 * MIB)
        for at in (MIB, 3 * MIB):
            f.seek(at)
            f.write(os.urandom(MIB))
        f.flush()
        os.posix_fallocate(f.fileno(), 2 * MIB, MIB)
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_a_hole(disks: Machine, name: str) -> None:
    path = sparse(disks.get(name))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert has_holes(fd)
        assert hole_nbytes(fd, 0, 4 * MIB) == 2 * MIB
        assert hole_nbytes(fd, MIB, MIB) == 0
        assert hole_nbytes(fd, MIB - 4096, 8192) == 4096
        assert hole_nbytes(fd, 3 * MIB, 9 * MIB) == 0
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_receipts_say_how_much_no_disk_was_asked_for(disks: Machine, name: str, device: str) -> None:
    path = sparse(disks.get(name))
    before = nobounce.stats()
    with nobounce.open(path) as f, nobounce.Device(device).allocate(4 * MIB) as buffer:
        large = f.read(buffer)
        assert (large.fastpath_bytes, large.hole_bytes, large.evidence) == (4 * MIB, 2 * MIB, "kernel")
        assert "no disk was asked for" in large.explain()
        assert f.read(buffer, nbytes=8192, file_offset=MIB - 4096).hole_bytes == 4096
        with nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=np.arange(0, 4 * MIB, 65536), nbytes=65536, cache="avoid")
            batch.wait().check()
            assert batch.receipt.hole_bytes == 2 * MIB
    counted = (nobounce.stats() - before).counters["hole_read_bytes"]
    assert counted == 2 * MIB + 4096 + 2 * MIB


@pytest.mark.parametrize("name", SYSTEMS)
def test_verify_agrees(disks: Machine, name: str, tmp_path: Path) -> None:
    path = sparse(disks.get(name))
    program = tmp_path / "program.py"
    program.write_text(
        f"import nobounce\nwith nobounce.open({str(path)!r}) as f, nobounce.Device('cpu').allocate(4 << 20) as b:\n"
        "    f.read(b, require='fastpath')\n    f.read(b, nbytes=4096, require='fastpath')\n"
    )
    command = [sys.executable, "-m", "nobounce", "stats", "--verify", "--", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "the kernel agrees" in done.stderr, done.stderr
    assert f"beside {2 * MIB + 4096} of holes" in done.stderr


def test_a_caller_s_descriptor_stays_where_it_was(disks: Machine) -> None:
    path = sparse(disks.get("xfs"))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.lseek(fd, 777, os.SEEK_SET)
        with nobounce.open(fd) as f, nobounce.Device("cpu").allocate(4 * MIB) as buffer:
            assert f.read(buffer).hole_bytes == 2 * MIB
        assert os.lseek(fd, 0, os.SEEK_CUR) == 777
    finally:
        os.close(fd)
