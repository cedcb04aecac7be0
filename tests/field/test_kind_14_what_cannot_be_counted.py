"""Issue 20, kind 14 (gcsfuse#2828): a file served by a process. Nothing says that the page cache served it, and nothing is claimed."""

from __future__ import annotations

import os

import pytest

import nobounce
from filesystems import Machine
from pages import resident

MIB = 1 << 20


@pytest.mark.parametrize("name", ["fuse", "fuse-direct-io"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_fuse_file_cannot_be_counted(disks: Machine, name: str, device: str) -> None:
    data = os.urandom(MIB + 1000)
    path = disks.get(name) / "served.bin"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert resident(path) == 0
    with nobounce.open(path) as f, nobounce.Device(device).allocate(2 * MIB) as buffer:
        receipt = f.read(buffer)
        assert buffer.numpy().tobytes()[: len(data)] == data
        assert receipt.reasons == {"direct-io-unproven": len(data)}
        assert "cannot be counted" in receipt.explain()
        assert "served by the page cache" not in receipt.explain()
        with pytest.raises(nobounce.RouteError, match="cannot be counted"):
            f.read(buffer, require="fastpath")


@pytest.mark.parametrize("name", ["fuse", "fuse-direct-io"])
def test_a_fuse_file_is_written_and_read_again(disks: Machine, name: str) -> None:
    data = os.urandom(300_001)
    path = disks.get(name) / "written.bin"
    with nobounce.open(path, "w+") as f:
        assert f.write(data, file_offset=77).fallback_bytes == len(data)
    assert path.read_bytes() == bytes(77) + data


def test_squashfs_is_read_through_the_page_cache(disks: Machine) -> None:
    path = disks.get("squashfs") / "packed.bin"
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(2 * MIB) as buffer:
        receipt = f.read(buffer)
        assert buffer.numpy().tobytes() == path.read_bytes()
    assert receipt.fallback_bytes == 2 * MIB
