"""Issue 20, truth 1: a file whose start is plain and whose rest is compressed. Its receipt says which bytes came through the page cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import nobounce
from filesystems import Machine
from nobounce.facts import extents
from pages import resident

MIB = 1 << 20
HALF = 8 * MIB
DEVICES = ["cpu", "sim:0"]


@pytest.fixture
def half(disks: Machine) -> tuple[Path, bytes]:
    return disks.half_compressed("half.bin", HALF)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without FIEMAP: what is known then is what the kernel counts."""

    def refuse(*_: object, **__: object) -> list[extents.Extent]:
        raise OSError(errno.EOPNOTSUPP, "no FIEMAP")

    monkeypatch.setattr(extents, "extents", refuse)
    monkeypatch.setattr("nobounce.facts.probe.extents", refuse)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_read(half: tuple[Path, bytes], device: str) -> None:
    path, data = half
    with nobounce.open(path) as f, nobounce.Device(device).allocate(len(data)) as buffer:
        receipt = f.read(buffer, cache="avoid")
        assert buffer.numpy().tobytes() == data
        assert receipt.reasons == {"direct": HALF, "encoded-extent": HALF}
        assert receipt.evidence == "kernel"
        assert resident(path) == 0, "avoid leaves no page"
        with pytest.raises(nobounce.RouteError, match="compressed") as caught:
            f.read(buffer, require="fastpath", cache="avoid")
        assert caught.value.receipt is None, "nothing was moved"
        assert f.explain(buffer).nbytes("fallback") == HALF


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nbytes", [4096, 64 << 10])
def test_small_reads(half: tuple[Path, bytes], device: str, nbytes: int) -> None:
    path, data = half
    with nobounce.open(path) as f, nobounce.Device(device).allocate(nbytes) as buffer:
        for _ in range(2):
            assert f.read(buffer, file_offset=0, cache="avoid").fastpath_bytes == nbytes
            assert f.read(buffer, file_offset=HALF, cache="avoid").reasons == {"encoded-extent": nbytes}
            assert buffer.numpy().tobytes() == data[HALF : HALF + nbytes]
        with pytest.raises(nobounce.RouteError):
            f.read(buffer, file_offset=HALF, require="fastpath", cache="avoid")
        assert f.read(buffer, file_offset=0, require="fastpath", cache="avoid").fastpath_bytes == nbytes


@pytest.mark.parametrize("device", DEVICES)
def test_in_stream_order(half: tuple[Path, bytes], device: str) -> None:
    path, data = half
    on = nobounce.Device(device)
    with nobounce.open(path) as f, on.allocate(len(data)) as buffer, on.create_stream() as stream:
        assert f.read_async(buffer, stream=stream, cache="avoid").result().reasons == {
            "direct": HALF,
            "encoded-extent": HALF,
        }
        where = np.array(0, np.int64)
        late = f.read_async(buffer, stream=stream, nbytes=4096, file_offset=where, cache="avoid")
        assert late.result().fastpath_bytes == 4096
        with pytest.raises(nobounce.RouteError):
            f.read_async(
                buffer, stream=stream, file_offset=HALF, nbytes=4096, require="fastpath", cache="avoid"
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["auto", "threads"])
def test_batches(half: tuple[Path, bytes], device: str, method: nobounce.io.batch.batch.Method) -> None:
    path, data = half
    offsets = np.arange(0, len(data), 65536)
    with (
        nobounce.open(path) as f,
        nobounce.Device(device).allocate(len(data)) as buffer,
        nobounce.Batch(method=method) as batch,
    ):
        batch.read(f, buffer, file_offsets=offsets, nbytes=65536, cache="avoid")
        batch.wait().check()
        assert batch.receipt.reasons == {"direct": HALF, "encoded-extent": HALF}
        assert buffer.numpy().tobytes() == data
        batch.read(f, buffer, file_offsets=offsets, nbytes=65536, require="fastpath", cache="avoid")
        result = batch.wait()
        assert [e.status for e in result].count("invalid") == len(offsets) // 2


def test_a_change_of_the_file_is_seen(half: tuple[Path, bytes]) -> None:
    path, _ = half
    with nobounce.open(path, "r+") as f, nobounce.Device("cpu").allocate(65536) as buffer:
        assert f.read(buffer, cache="avoid").fastpath_bytes == 65536
        with path.open("r+b") as g:
            g.write(bytes(MIB))  # compressed now, and not yet written
        assert f.read(buffer, cache="avoid").fastpath_bytes == 0
        assert buffer.numpy().tobytes() == bytes(65536)


def test_a_small_file_among_the_metadata(disks: Machine) -> None:
    path = disks.get("btrfs") / "small.bin"
    path.write_bytes(b"x" * 1500)
    os.sync()
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(4096) as buffer:
        assert f.read(buffer, cache="avoid").fastpath_bytes == 0
        assert bytes(buffer.view()[:1500]) == b"x" * 1500


def test_a_file_that_is_compressed_at_its_start_alone(disks: Machine) -> None:
    path = disks.get("btrfs") / "start.bin"
    with path.open("wb") as f:
        os.fsync(f.fileno())
        disks.run("btrfs", "property", "set", path, "compression", "zstd")
        f.write(bytes(MIB))
        f.flush()
        os.fsync(f.fileno())
        disks.run("btrfs", "property", "set", path, "compression", "none")
        f.write(os.urandom(MIB))
        f.flush()
        os.fsync(f.fileno())
    with nobounce.open(path) as file, nobounce.Device("cpu").allocate(2 * MIB) as buffer:
        assert file.read(buffer, cache="avoid").reasons == {"direct": MIB, "encoded-extent": MIB}


# the backstop: what the kernel's counters deny


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nbytes", [2 * HALF, 65536])
def test_what_counters_deny_is_fallback(half: tuple[Path, bytes], device: str, nbytes: int) -> None:
    path, data = half
    at = 2 * HALF - nbytes
    with nobounce.open(path) as f, nobounce.Device(device).allocate(nbytes) as buffer:
        receipt = f.read(buffer, file_offset=at, nbytes=nbytes, cache="avoid")
        served = min(nbytes, HALF)
        assert receipt.reasons.get("page-cache-served") == served
        assert receipt.fastpath_bytes == nbytes - served
        assert receipt.nbytes == nbytes
        assert buffer.numpy().tobytes() == data[at:]
        again = f.read(buffer, file_offset=at, nbytes=nbytes, cache="avoid")
        assert again.reasons.get("page-cache-served") == served, "and it is known from then on"


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nbytes", [HALF, 4096])
def test_what_counters_deny_is_an_error_where_fastpath_is_required(
    half: tuple[Path, bytes], device: str, nbytes: int
) -> None:
    path, _ = half
    on = nobounce.Device(device)
    with nobounce.open(path) as f, on.allocate(nbytes) as buffer, on.create_stream() as stream:
        with pytest.raises(nobounce.RouteError, match="contents of the buffer are undefined") as caught:
            f.read(buffer, file_offset=HALF, nbytes=nbytes, require="fastpath", cache="avoid")
        assert caught.value.receipt.fallback_bytes == nbytes
        assert caught.value.receipt.fastpath_bytes == 0
        assert [r.code for r in caught.value.refusals] == ["page-cache-served"]
        with pytest.raises(nobounce.RouteError) as known:
            f.read(buffer, file_offset=HALF, nbytes=nbytes, require="fastpath", cache="avoid")
        assert known.value.receipt is None, "known now, and refused before anything moves"
    drop(path)
    with nobounce.open(path) as f, on.allocate(nbytes) as buffer, on.create_stream() as stream:
        late = f.read_async(
            buffer, stream=stream, file_offset=HALF, nbytes=nbytes, require="fastpath", cache="avoid"
        )
        with pytest.raises(nobounce.RouteError, match="undefined"):
            late.result()


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["auto", "threads"])
def test_what_counters_deny_of_a_batch(
    half: tuple[Path, bytes], device: str, method: nobounce.io.batch.batch.Method
) -> None:
    path, data = half
    offsets = np.arange(0, len(data), 65536)
    with (
        nobounce.open(path) as f,
        nobounce.Device(device).allocate(len(data)) as buffer,
        nobounce.Batch(method=method) as batch,
    ):
        batch.read(f, buffer, file_offsets=offsets, nbytes=65536, cache="avoid")
        result = batch.wait().check()
        assert [e.backend for e in result].count("fallback") == len(offsets) // 2
        assert batch.receipt.reasons == {"direct": HALF, "page-cache-served": HALF}
        assert buffer.numpy().tobytes() == data
    drop(path)
    with (
        nobounce.open(path) as f,
        nobounce.Device(device).allocate(len(data)) as buffer,
        nobounce.Batch(method=method) as batch,
    ):
        batch.read(f, buffer, file_offsets=offsets, nbytes=65536, require="fastpath", cache="avoid")
        ends = list(batch.wait())
        failed = [e for e in ends if e.status == "failed"]
        assert len(failed) == len(offsets) // 2
        assert all(isinstance(e.error, nobounce.RouteError) for e in failed)


@pytest.mark.usefixtures("blind")
def test_what_is_cached_before_is_denied_by_the_thread_s_counter(half: tuple[Path, bytes]) -> None:
    path, _ = half
    path.read_bytes()
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(2 * HALF) as buffer:
        assert f.read(buffer, cache="avoid").reasons == {"direct": HALF, "page-cache-served": HALF}


@pytest.mark.parametrize("name", ["ext4-ordered", "xfs"])
def test_another_reader_s_pages_deny_nothing(disks: Machine, name: str, tmp_path: Path) -> None:
    """Pages that somebody else brings in are a suspicion; the block that is read again comes from the disk."""
    path = disks.get(name) / "shared.bin"
    path.write_bytes(os.urandom(4 * MIB))
    os.sync()
    drop(path)

    def other(backend: str, nbytes: int) -> None:
        path.read_bytes()

    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(4 * MIB) as buffer:
        receipt = nobounce.io.prepare.transfer(
            f, "read", buffer, (None, 0, 0), "fastpath", "avoid", progress=other
        )
    assert receipt.fastpath_bytes == 4 * MIB
    assert resident(path) == 4 * MIB
