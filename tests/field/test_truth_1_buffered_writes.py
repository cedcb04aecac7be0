"""Beside issue 20, truth 1: O_DIRECT writes that the kernel makes through the page cache, which it empties again, are no direct writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nobounce
from filesystems import Machine

MIB = 1 << 20


def written(path: Path, device: str) -> nobounce.Receipt:
    with nobounce.open(path, "r+") as f, nobounce.Device(device).allocate(MIB) as buffer:
        with pytest.raises(nobounce.RouteError) as caught:
            f.write(buffer, require="fastpath")
        assert caught.value.refusals[0].cure
        return f.write(buffer, fsync=True)


def filled(path: Path) -> Path:
    with path.open("wb") as f:
        f.write(os.urandom(MIB))
        os.fsync(f.fileno())
    return path


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_btrfs_with_checksums(disks: Machine, device: str) -> None:
    receipt = written(filled(disks.get("btrfs") / "sums.bin"), device)
    assert receipt.reasons == {"checksummed": MIB}


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_btrfs_without_checksums_is_written_directly(disks: Machine, device: str) -> None:
    folder = disks.get("btrfs") / "nosums"
    folder.mkdir(exist_ok=True)
    disks.run("chattr", "+C", folder)
    path = filled(folder / "plain.bin")
    data = os.urandom(MIB)
    with nobounce.open(path, "r+") as f:
        assert f.write(data).nbytes == MIB
        with nobounce.Device(device).allocate(MIB) as buffer:
            assert f.write(buffer, require="fastpath").fastpath_bytes == MIB


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_ext4_without_extents(disks: Machine, device: str) -> None:
    receipt = written(filled(disks.get("ext4-block-mapped") / "blocks.bin"), device)
    assert receipt.reasons == {"block-mapped": MIB}
