"""File.read and File.write on cpu and sim: right bytes, right receipts, and nothing lost when something fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nobounce
from nobounce import config
from nobounce.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    FileError,
    FileIsDirectoryError,
    FileMissingError,
    RouteError,
    TransferError,
)
from nobounce.facts import cachestat
from nobounce.io.prepare import transfer
from nobounce.runtimes import faults
from pages import resident

MIB = 1 << 20
DEVICES = ["cpu", "sim:0"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> nobounce.Device:
    return nobounce.Device(request.param)


@pytest.fixture
def data() -> bytes:
    return os.urandom(9 * MIB + 1234)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    made = tmp_path / "data.bin"
    with made.open("wb") as f:
        f.write(data)
        os.fsync(f.fileno())
    drop(made)
    return made


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def content(buffer: nobounce.Buffer) -> bytes:
    return buffer.numpy().tobytes()


def put(buffer: nobounce.Buffer, data: bytes) -> None:
    with buffer.device.create_stream() as stream:
        buffer.copy_from(data, stream=stream)
        stream.sync()


# bytes and receipts


def test_a_whole_file_arrives_through_the_direct_path(
    device: nobounce.Device, path: Path, data: bytes
) -> None:
    with nobounce.open(path) as f, device.allocate(10 * MIB) as buffer:
        receipt = f.read(buffer)
        assert receipt.nbytes == len(data)
        assert content(buffer)[: len(data)] == data
        assert receipt.fastpath_bytes == len(data)
        assert receipt.evidence == "kernel"
        assert receipt.host_traffic_bytes == 0
        assert (receipt.device, receipt.filename, receipt.op) == (device.name, str(path), "read")
    assert resident(path) == 0


def test_evidence_is_not_kernel_where_the_page_cache_can_only_be_sampled(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a file of another user: eight samples may miss what a secretly buffered read left behind."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EPERM, "refused")

    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(10 * MIB) as buffer:
        assert f.read(buffer, cache="avoid").evidence == "kernel"
        monkeypatch.setattr(cachestat, "cached_nbytes", refuse)
        receipt = f.read(buffer, cache="avoid")
        assert receipt.fastpath_bytes == receipt.nbytes
        assert receipt.evidence == "reported"
        with nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=[0, 2 * MIB], nbytes=2 * MIB, cache="avoid")
        assert batch.receipt.fastpath_bytes == 4 * MIB
        assert batch.receipt.evidence == "reported"
    monkeypatch.undo()
    assert resident(path) == 0, "looking for evidence leaves no page behind, as sampling does"


def test_fallback_on_cpu_has_no_relay_and_on_sim_has(
    device: nobounce.Device, path: Path, data: bytes
) -> None:
    with nobounce.open(path) as f, device.allocate(10 * MIB) as buffer:
        receipt = f.read(buffer, require="fallback")
        assert content(buffer)[: len(data)] == data
    assert receipt.fallback_bytes == len(data)
    assert receipt.cached_bytes == 0
    assert receipt.host_traffic_bytes == (0 if device.name == "cpu" else 2 * len(data))


@pytest.mark.parametrize("require", ["auto", "fallback"])
def test_cache_avoid_leaves_no_page_behind(device: nobounce.Device, path: Path, require: str) -> None:
    with nobounce.open(path) as f, device.allocate(10 * MIB) as buffer:
        f.read(buffer, require=require, cache="avoid", nbytes=5 * MIB + 77, file_offset=33)  # type: ignore[arg-type]
    assert resident(path) == 0


def test_cache_use_reads_through_the_page_cache(device: nobounce.Device, path: Path, data: bytes) -> None:
    with nobounce.open(path) as f, device.allocate(10 * MIB) as buffer:
        receipt = f.read(buffer, cache="use")
    assert receipt.cached_bytes == receipt.fallback_bytes == len(data)
    assert resident(path) >= len(data)


def test_cache_auto_takes_what_is_cached_and_reads_the_rest_direct(
    device: nobounce.Device, path: Path, data: bytes
) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 4 * MIB, 0)
    os.close(fd)
    with nobounce.open(path) as f, device.allocate(10 * MIB) as buffer:
        receipt = f.read(buffer, cache="auto")
        assert content(buffer)[: len(data)] == data
    assert receipt.reasons.keys() == {"cached", "direct"}
    assert 3 * MIB <= receipt.cached_bytes <= 5 * MIB


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file_offset=st.integers(0, 70_000),
    buffer_offset=st.integers(0, 9_000),
    nbytes=st.integers(0, 40_000),
    require=st.sampled_from(["auto", "fallback"]),
    op=st.sampled_from(["read", "write"]),
)
def test_any_region_moves_exactly_its_bytes(
    device: nobounce.Device,
    tmp_path: Path,
    file_offset: int,
    buffer_offset: int,
    nbytes: int,
    require: str,
    op: str,
) -> None:
    """hipFile K145: a matrix of file offset, buffer offset and size, with everything around it untouched."""
    before = os.urandom(65_000)
    held = os.urandom(50_000)
    target = tmp_path / "region.bin"
    target.write_bytes(before)
    with nobounce.open(target, "r+") as f, device.allocate(len(held)) as buffer:
        put(buffer, held)
        move = f.read if op == "read" else f.write
        receipt = move(
            buffer,
            nbytes=nbytes,
            file_offset=file_offset,
            buffer_offset=buffer_offset,
            require=require,  # type: ignore[arg-type]
        )
        after = content(buffer)
    if op == "read":
        part = before[file_offset : file_offset + nbytes]
        assert receipt.nbytes == len(part)
        assert after == held[:buffer_offset] + part + held[buffer_offset + len(part) :]
        assert target.read_bytes() == before
    else:
        part = held[buffer_offset : buffer_offset + nbytes]
        expected = bytearray(max(len(before), file_offset + nbytes if nbytes else 0))
        expected[: len(before)] = before
        expected[file_offset : file_offset + nbytes] = part
        assert target.read_bytes() == bytes(expected)
        assert after == held
    assert sum(s.nbytes for s in receipt.segments) == receipt.nbytes


def test_C55_an_unaligned_tail_lands_at_its_place(device: nobounce.Device, tmp_path: Path) -> None:
    target = tmp_path / "tail.bin"
    target.write_bytes(b"\xaa" * 12_000)
    data = os.urandom(4196)
    with nobounce.open(target, "r+") as f, device.allocate(4196) as buffer:
        put(buffer, data)
        receipt = f.write(buffer, file_offset=4096, fsync=True)
    assert receipt.synced
    assert receipt.fastpath_bytes == 4096
    assert target.read_bytes() == b"\xaa" * 4096 + data + b"\xaa" * (12_000 - 8292)


def test_a_read_past_the_end_is_short(device: nobounce.Device, path: Path, data: bytes) -> None:
    with nobounce.open(path) as f, device.allocate(MIB) as buffer:
        assert f.read(buffer, file_offset=len(data) - 1000).nbytes == 1000
        assert f.read(buffer, file_offset=len(data) + 4096).nbytes == 0
        assert f.read(buffer, nbytes=0).nbytes == 0


def test_a_zero_size_write_beyond_the_end_does_not_grow_the_file(
    device: nobounce.Device, path: Path, data: bytes
) -> None:
    """hipFile A-38."""
    with nobounce.open(path, "r+") as f, device.allocate(4096) as buffer:
        f.write(buffer, nbytes=0, file_offset=1 << 30)
        assert f.nbytes == len(data)


def test_C54_a_file_smaller_than_asked_is_no_crash(device: nobounce.Device, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"12345678")
    with nobounce.open(small) as f, device.allocate(4096) as buffer:
        assert f.read(buffer, nbytes=4096).nbytes == 8


def test_arrays_of_the_host_are_taken_as_they_are(path: Path, data: bytes) -> None:
    target = bytearray(5000)
    with nobounce.open(path) as f:
        f.read(target, file_offset=10)
        assert bytes(target) == data[10:5010]
        with pytest.raises(ArgumentError, match="read-only"):
            f.read(bytes(10))


# requirements and settings


def test_require_fastpath_raises_before_anything_moves(device: nobounce.Device, path: Path) -> None:
    with nobounce.open(path) as f, device.allocate(MIB) as buffer:
        put(buffer, bytes(MIB))
        with pytest.raises(RouteError) as caught:
            f.read(buffer, nbytes=1000, require="fastpath")
        assert [r.code for r in caught.value.refusals] == ["size-align"]
        assert not any(content(buffer))


def test_force_compat_mode_sends_reads_through_fallback(device: nobounce.Device, path: Path) -> None:
    config.override(config.Settings(force_compat_mode=True))
    with nobounce.open(path) as f, device.allocate(MIB) as buffer:
        assert f.read(buffer).reasons == {"fastpath-disabled": MIB}


@pytest.mark.parametrize("argument", ["require", "cache"])
def test_an_unknown_word_is_named(path: Path, argument: str) -> None:
    with nobounce.open(path) as f, pytest.raises(ArgumentError, match="sometimes"):
        f.read(bytearray(10), **{argument: "sometimes"})  # type: ignore[arg-type]


# faults


@pytest.fixture
def sim() -> nobounce.Device:
    return nobounce.Device("sim:0")


@pytest.mark.parametrize("code", [errno.ENODEV, errno.EREMOTEIO])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_failed_direct_try_is_repeated_on_fallback_and_remembered(
    sim: nobounce.Device, path: Path, data: bytes, code: int, op: str
) -> None:
    """hipFile C-17, J-17: the receipt shows both tries, and the pair is remembered."""
    with nobounce.open(path, "r+") as f, sim.allocate(8 * MIB) as buffer:
        if op == "write":
            put(buffer, bytes(8 * MIB))
        move = f.read if op == "read" else f.write
        with faults.inject(op=op, device="sim:0", error=code):
            receipt = move(buffer, cache="avoid")
        assert receipt.nbytes == 8 * MIB
        assert receipt.fastpath_bytes == 0
        assert receipt.reasons == {"direct-failed": 8 * MIB}
        assert {r.errno for r in receipt.retries} == {code}
        if op == "read":
            assert content(buffer) == data[: 8 * MIB]
        assert move(buffer, cache="avoid").reasons == {"failed-before": 8 * MIB}
    if op == "write":
        assert path.read_bytes() == bytes(8 * MIB) + data[8 * MIB :]
    with nobounce.open(path) as f, sim.allocate(MIB) as buffer:
        assert f.read(buffer, cache="avoid").fastpath_bytes == MIB


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_direct_try_that_fails_half_way_is_finished_in_its_place(
    sim: nobounce.Device, path: Path, data: bytes, op: str
) -> None:
    new = os.urandom(MIB)
    with nobounce.open(path, "r+") as f, sim.allocate(MIB) as buffer:
        put(buffer, new)
        with (
            faults.inject(op=op, device="sim:0", short=0.5, times=1),
            faults.inject(op=op, device="sim:0", error=errno.ENODEV, after=1, times=1),
        ):
            receipt = f.read(buffer) if op == "read" else f.write(buffer)
        assert receipt.reasons == {"direct": MIB // 2, "direct-failed": MIB // 2}
        assert content(buffer) == (data[:MIB] if op == "read" else new)
    assert path.read_bytes() == (data if op == "read" else new + data[MIB:])


@pytest.mark.parametrize("how", ["require", "compat"])
def test_without_fallback_a_direct_failure_is_raised(sim: nobounce.Device, path: Path, how: str) -> None:
    if how == "compat":
        config.override(config.Settings(allow_compat_mode=False))
    with nobounce.open(path) as f, sim.allocate(MIB) as buffer:
        with (
            faults.inject(op="read", device="sim:0", error=errno.ENODEV, times=1),
            pytest.raises(TransferError) as caught,
        ):
            f.read(buffer, require="fastpath" if how == "require" else "auto")
        assert (caught.value.errno, caught.value.backend) == (errno.ENODEV, "fastpath")


def test_an_error_carries_everything_and_what_had_moved(
    sim: nobounce.Device, path: Path, data: bytes
) -> None:
    config.override(config.Settings(io_threads=1, chunk_nbytes=MIB))
    with nobounce.open(path) as f, sim.allocate(8 * MIB) as buffer:
        with (
            faults.inject(op="read", device="sim:0", error=errno.EIO, after=3, times=1),
            pytest.raises(TransferError) as caught,
        ):
            f.read(buffer)
        error = caught.value
        assert (error.errno, error.filename) == (errno.EIO, str(path))
        assert (error.file_offset, error.nbytes, error.backend) == (3 * MIB, MIB, "fastpath")
        assert "EIO" in str(error)
        assert error.receipt.nbytes == 3 * MIB
        assert content(buffer)[: 3 * MIB] == data[: 3 * MIB]
        assert f.read(buffer).nbytes == 8 * MIB


@pytest.mark.parametrize("op", ["pread", "pwrite"])
def test_an_error_of_fallback_is_raised_with_its_progress(
    device: nobounce.Device, path: Path, op: str
) -> None:
    config.override(config.Settings(io_threads=1, chunk_nbytes=MIB))
    with nobounce.open(path, "r+") as f, device.allocate(4 * MIB) as buffer:
        put(buffer, bytes(4 * MIB))
        move = f.read if op == "pread" else f.write
        with faults.inject(op=op, error=errno.EIO, after=2, times=1), pytest.raises(TransferError) as caught:
            move(buffer, require="fallback")
        assert (caught.value.errno, caught.value.backend, caught.value.call) == (errno.EIO, "fallback", op)
        assert caught.value.receipt.nbytes == 2 * MIB


def test_a_receipt_counts_no_bytes_behind_the_ones_that_failed(path: Path) -> None:
    """What other threads have moved meanwhile is a note."""
    config.override(config.Settings(io_threads=4, chunk_nbytes=MIB))
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(9 * MIB) as buffer:
        with (
            faults.inject(op="pread", error=errno.EIO, latency=0.3, after=1, times=1),
            pytest.raises(TransferError) as caught,
        ):
            f.read(buffer, require="fallback")
        receipt = caught.value.receipt
        assert receipt is not None
        assert receipt.nbytes == caught.value.file_offset
        assert receipt.nbytes == sum(s.nbytes for s in receipt.segments)
        assert any("beyond the first gap" in note for note in receipt.notes)


@pytest.mark.parametrize("require", ["auto", "fallback"])
def test_C67_interrupted_calls_are_repeated(
    device: nobounce.Device, path: Path, data: bytes, require: str
) -> None:
    op = "pread" if require == "fallback" else "read"
    with (
        nobounce.open(path) as f,
        device.allocate(9 * MIB) as buffer,
        faults.inject(op=op, error=errno.EINTR, every=2) as rule,
    ):
        f.read(buffer, require=require)  # type: ignore[arg-type]
        assert content(buffer) == data[: 9 * MIB]
        assert rule.hits or (require == "auto" and device.name == "cpu")


@pytest.mark.parametrize("short", [0.5, 494_700, 4096])
def test_C58_C59_short_direct_reads_go_on_from_an_aligned_place(
    sim: nobounce.Device, path: Path, data: bytes, short: float
) -> None:
    with (
        nobounce.open(path) as f,
        sim.allocate(MIB) as buffer,
        faults.inject(op="read", device="sim:0", short=short) as rule,
    ):
        receipt = f.read(buffer)
        assert content(buffer) == data[:MIB]
        assert receipt.nbytes == MIB
        assert rule.hits >= 2


def test_C59_a_direct_path_that_stalls_is_finished_by_fallback(
    sim: nobounce.Device, path: Path, data: bytes
) -> None:
    with (
        nobounce.open(path) as f,
        sim.allocate(MIB) as buffer,
        faults.inject(op="read", device="sim:0", short=100),
    ):
        receipt = f.read(buffer)
        assert content(buffer) == data[:MIB]
        assert receipt.reasons["direct-stalled"] == MIB


@pytest.mark.parametrize("require", ["auto", "fallback"])
def test_a_failed_copy_is_a_transfer_error_and_later_reads_work(
    sim: nobounce.Device, path: Path, require: str
) -> None:
    with nobounce.open(path) as f, sim.allocate(MIB) as buffer:
        if require == "fallback":
            with (
                faults.inject(op="copy", device="sim:0", error=errno.EIO, times=1),
                pytest.raises(TransferError) as caught,
            ):
                f.read(buffer, require="fallback")
            assert caught.value.backend == "fallback"
        assert f.read(buffer, require=require).nbytes == MIB  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["well", "badly"])
def test_a_stream_goes_on_behind_a_transfer_however_that_ends(
    device: nobounce.Device, path: Path, how: str
) -> None:
    """Nothing here waits for the stream: where it is still held, that would be for ever."""
    file, buffer, stream = nobounce.open(path), device.allocate(MIB), device.create_stream()
    fault = faults.inject(op="pread", error=errno.EIO) if how == "badly" else contextlib.nullcontext()
    with fault:
        move = file.read_async(buffer, stream=stream, require="fallback")
        assert (move.exception(30) is None) == (how == "well")
    deadline = time.monotonic() + 5
    while not stream.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stream.query()
    for thing in (stream, buffer, file):
        thing.close()


def test_no_pinned_memory_is_named(path: Path) -> None:
    nobounce.trim()  # what an earlier test has left
    with (
        nobounce.open(path) as f,
        nobounce.Device("sim:1").allocate(MIB) as buffer,
        faults.inject(op="alloc_pinned"),
        pytest.raises(nobounce.OutOfMemoryError),
    ):
        f.read(buffer, require="fallback")


# files


def test_a_missing_file_a_directory_and_a_pipe_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="nothing"):
        nobounce.open(tmp_path / "nothing")
    with pytest.raises(FileIsDirectoryError):
        nobounce.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe"):
        nobounce.open(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="mode"):
        nobounce.open(tmp_path / "x", "rw+")


def test_a_descriptor_of_a_socket_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(FileError, match="socket"):
        nobounce.open(ours.fileno())


@pytest.mark.parametrize("direct", [True, False])
def test_a_caller_s_descriptor_keeps_its_flags_and_stays_open(
    device: nobounce.Device, path: Path, data: bytes, direct: bool
) -> None:
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    with nobounce.open(fd) as f, device.allocate(MIB) as buffer:
        assert f.read(buffer, nbytes=MIB - 7).nbytes == MIB - 7
        assert f.read(buffer, require="fallback").nbytes == MIB
        assert content(buffer) == data[:MIB]
    assert fcntl.fcntl(fd, fcntl.F_GETFL) == before
    os.close(fd)


def test_the_direct_descriptor_is_opened_lazily_and_all_are_closed(
    device: nobounce.Device, path: Path
) -> None:
    """hipFile J-32."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with device.allocate(MIB) as buffer, nobounce.open(path) as warm:
        warm.read(buffer)
        before = count()
        f = nobounce.open(path)
        assert count() == before + 1
        f.read(buffer, require="fallback", cache="use")
        assert count() == before + 1
        f.read(buffer)
        assert count() == before + 2
        f.close()
        f.close()
        assert count() == before


def test_a_closed_file_says_so(path: Path) -> None:
    f = nobounce.open(path)
    f.close()
    with pytest.raises(ClosedError, match="closed"):
        f.read(bytearray(10))


def test_a_buffer_in_use_cannot_be_closed(sim: nobounce.Device, path: Path) -> None:
    buffer = sim.allocate(MIB)
    seen: list[BaseException] = []

    def interfere(backend: str, nbytes: int) -> None:
        try:
            buffer.close()
        except BusyError as e:
            seen.append(e)

    with nobounce.open(path) as f:
        transfer(f, "read", buffer, (None, 0, 0), "auto", "avoid", progress=interfere)
    assert seen
    buffer.close()


def test_a_file_opened_for_writing_only_still_writes_direct(device: nobounce.Device, tmp_path: Path) -> None:
    with nobounce.open(tmp_path / "new", "w") as f, device.allocate(MIB) as buffer:
        put(buffer, b"x" * MIB)
        assert f.write(buffer).fastpath_bytes == MIB
    assert (tmp_path / "new").read_bytes() == b"x" * MIB


def test_C66_sizes_past_two_gigabytes(tmp_path: Path) -> None:
    """A sparse file of 3 GiB whose last byte is 7; hipFile J-19: no silent cap."""
    big = tmp_path / "big"
    with big.open("wb") as f:
        f.seek(3 * 1024 * MIB - 1)
        f.write(b"\x07")
    with nobounce.open(big) as f, nobounce.Device("cpu").allocate(3 * 1024 * MIB) as buffer:
        route = f.explain(buffer)
        assert sum(s.nbytes for s in route.segments) == 3 * 1024 * MIB
        tail = f.read(buffer, file_offset=3 * 1024 * MIB - 4096, buffer_offset=3 * 1024 * MIB - 4096)
        assert tail.nbytes == 4096
        assert buffer.view()[-1] == 7


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    config.override(None)
    yield
    config.override(None)
