"""Facts, routes and transfers on real file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nobounce
from filesystems import Machine
from nobounce.facts.file import examine
from nobounce.facts.source import LiveSource
from nobounce.facts.types import FileFacts
from pages import resident

MIB = 1 << 20
DIRECT = [
    "ext4-ordered",
    "ext4-writeback",
    "ext4-no-journal",
    "ext4-tuned-writeback",
    "xfs",
    "btrfs",
    "loop-on-loop",
    "bind",
]


def made(folder: Path, nbytes: int = 4 * MIB + 100) -> tuple[Path, bytes]:
    data = os.urandom(nbytes)
    path = folder / "data.bin"
    with path.open("wb") as f:
        f.write(data)
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path, data


def facts(path: Path) -> FileFacts:
    fd = os.open(path, os.O_RDONLY)
    try:
        return examine(LiveSource(), fd, path=str(path), trial=True)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("name", "fstype", "journal"),
    [
        ("ext4-ordered", "ext4", "ordered"),
        ("ext4-journal", "ext4", "journal"),
        ("ext4-writeback", "ext4", "writeback"),
        ("ext4-no-journal", "ext4", "none"),
        ("ext4-tuned-writeback", "ext4", "writeback"),
        ("xfs", "xfs", None),
        ("btrfs", "btrfs", None),
        ("tmpfs", "tmpfs", None),
        ("overlay", "overlay", None),
        ("loop-on-loop", "ext4", "ordered"),
        ("bind", "ext4", "ordered"),
    ],
)
def test_facts_name_the_file_system_and_ext4_s_true_mode(
    disks: Machine, name: str, fstype: str, journal: str | None
) -> None:
    folder = disks.get(name)
    path, _ = made(folder)
    found = facts(path).filesystem
    assert (found.fstype, found.journal) == (fstype, journal)
    assert found.mount_point == str(folder)
    assert found.memory == (name == "tmpfs")
    assert not found.read_only


def test_a_read_only_mount_is_seen(disks: Machine) -> None:
    folder = disks.get("bind")
    path, _ = made(folder)
    disks.run("mount", "-o", "remount,ro,bind", folder)
    try:
        assert facts(path).filesystem.read_only
    finally:
        disks.run("mount", "-o", "remount,rw,bind", folder)


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_direct_read_is_proven_by_the_kernel(disks: Machine, name: str, device: str) -> None:
    """The I/O threads' own counters moved by the bytes, and the page cache did not grow.

    The memory is fresh: btrfs reads into untouched memory through the page cache unless it is populated first.
    """
    path, data = made(disks.get(name))
    with nobounce.open(path) as f, nobounce.Device(device).allocate(5 * MIB) as buffer:
        receipt = f.read(buffer, cache="auto")
        assert buffer.numpy().tobytes()[: len(data)] == data
    assert receipt.fastpath_bytes == len(data), receipt.explain()
    assert receipt.evidence == "kernel"
    assert resident(path) == 0


@pytest.mark.parametrize("name", ["tmpfs", "ext4-journal"])
def test_where_there_is_no_direct_io_the_receipt_says_why(disks: Machine, name: str) -> None:
    """C61: tmpfs accepts O_DIRECT and means nothing by it; ext4 with data=journal reports no direct I/O."""
    path, data = made(disks.get(name))
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(5 * MIB) as buffer:
        receipt = f.read(buffer, cache="avoid")
        assert bytes(buffer.view()[: len(data)]) == data
        with pytest.raises(nobounce.RouteError) as caught:
            f.read(buffer, require="fastpath")
    assert receipt.fastpath_bytes == 0
    code = "memory-file-system" if name == "tmpfs" else "no-direct-io"
    assert set(receipt.reasons) <= {code, "direct-io-unproven"}, receipt.explain()
    assert any(r.cure for r in caught.value.refusals)


def test_overlay_is_direct_if_and_only_if_a_probe_or_statx_shows_it(disks: Machine) -> None:
    path, data = made(disks.get("overlay"))
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(5 * MIB) as buffer:
        receipt = f.read(buffer, cache="avoid")
        assert bytes(buffer.view()[: len(data)]) == data
        proven = f.facts().dio_offset_align or f.facts().direct_probe == "yes"
    assert bool(receipt.fastpath_bytes) == bool(proven)
    if receipt.fastpath_bytes:
        assert receipt.evidence == "kernel"


@pytest.mark.parametrize("name", [*DIRECT, "tmpfs", "overlay", "ext4-journal"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_written_bytes_come_back(disks: Machine, name: str, device: str) -> None:
    path = disks.get(name) / "written.bin"
    data = os.urandom(2 * MIB + 777)
    with nobounce.open(path, "w+") as f, nobounce.Device(device).allocate(len(data)) as buffer:
        with buffer.device.create_stream() as stream:
            buffer.copy_from(data, stream=stream)
            stream.sync()
        receipt = f.write(buffer, file_offset=13, fsync=True)
        assert receipt.nbytes == len(data)
        assert receipt.synced
    assert path.read_bytes() == bytes(13) + data


@pytest.mark.parametrize("name", ["ext4-ordered", "xfs", "btrfs"])
def test_a_write_with_edges_beside_cached_pages_keeps_every_neighbour(disks: Machine, name: str) -> None:
    """Buffered edges and a direct middle, over a file whose pages are cached and partly dirty."""
    path = disks.get(name) / "edges.bin"
    before = bytearray(os.urandom(MIB))
    path.write_bytes(before)
    path.read_bytes()
    data = os.urandom(600_001)
    with nobounce.open(path, "r+") as f:
        for at in (1, 511, 4095, 100_000):
            f.write(data[: 300_000 + at], file_offset=at)
            before[at : at + 300_000 + at] = data[: 300_000 + at]
            assert path.read_bytes() == bytes(before)
    os.sync()
    assert path.read_bytes() == bytes(before)


def test_a_block_device_is_read_and_written_direct(disks: Machine) -> None:
    device = disks.loop("raw", 16 * MIB, "mkfs.ext4", "-q", "-F")
    data = os.urandom(2 * MIB)
    with nobounce.open(device, "r+") as f, nobounce.Device("cpu").allocate(2 * MIB) as buffer:
        assert f.nbytes == 16 * MIB
        buffer.view()[:] = data
        written = f.write(buffer, file_offset=4 * MIB, fsync=True)
        buffer.view()[:] = bytes(2 * MIB)
        read = f.read(buffer, file_offset=4 * MIB)
        assert bytes(buffer.view()) == data
        assert f.read(buffer, file_offset=15 * MIB).nbytes == MIB
    assert written.fastpath_bytes == read.fastpath_bytes == 2 * MIB, read.explain()


def test_a_full_disk_is_named_and_what_was_written_reported(disks: Machine) -> None:
    path = disks.get("tmpfs") / "full.bin"
    with (
        nobounce.open(path, "w") as f,
        nobounce.Device("cpu").allocate(128 * MIB) as buffer,
        pytest.raises(nobounce.TransferError, match="disk is full") as caught,
    ):
        f.write(buffer)
    path.unlink()
    assert caught.value.errno == 28
    assert caught.value.receipt is not None
