"""Issue 20, truth 4: file systems x devices x sizes, alignments, cache states and modes, backends, directions and ways to call.

Receipts are held against /proc/self/io, the page cache and what debugfs says was dirtied; `check` against the receipts.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from filesystems import Machine
from scale import cases

MIB = 1 << 20
CASES = cases(20_000, 1000)
SYSTEMS = [
    "ext4-ordered",
    "xfs",
    "btrfs",
    "btrfs-nocow",
    "btrfs-half",
    "btrfs-compressed",
    "overlay",
    "tmpfs",
    "fuse",
    "squashfs",
]
DEVICES = ["cpu", "sim:0"]
CHILD = Path(__file__).parent.parent / "truth_cases.py"


def made(disks: Machine, name: str) -> Path:
    """A file of 2 MiB and a bit on the file system, half of it such that it can be compressed."""
    if name == "squashfs":
        return disks.get(name) / "packed.bin"
    if name == "btrfs-half":
        return disks.half_compressed("matrix.bin", MIB)[0]
    folder = disks.get("btrfs" if name == "btrfs-nocow" else name)
    if name == "btrfs-nocow":
        folder = folder / "nocow"
        folder.mkdir(exist_ok=True)
        disks.run("chattr", "+C", folder)
    path = folder / "matrix.bin"
    path.unlink(missing_ok=True)
    path.write_bytes(random.Random(name).randbytes(MIB) + b"nobounce" * (MIB // 8) + b"tail")
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return path


@pytest.fixture(scope="module")
def debugfs(disks: Machine) -> str:
    """Where debugfs is mounted; "" where this kernel has none."""
    try:
        return str(disks.mount("none", "debugfs", "-t", "debugfs"))
    except RuntimeError:
        return ""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SYSTEMS)
def test_receipts_say_what_the_kernel_counted(disks: Machine, name: str, device: str, debugfs: str) -> None:
    path = made(disks, name)
    count = CASES // (len(SYSTEMS) * len(DEVICES))
    seed = SYSTEMS.index(name) * len(DEVICES) + DEVICES.index(device)
    command = [sys.executable, CHILD, path, device, seed, count, debugfs]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=3600, check=False
    )
    assert (done.stdout, done.returncode) == (f"{count} cases\n", 0), done.stdout + done.stderr
