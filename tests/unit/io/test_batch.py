"""nobounce.Batch: right bytes, one end per request, and nothing lost whatever fails, by io_uring and by threads, on cpu and sim."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nobounce
from capabilities import need
from nobounce.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    RouteError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from nobounce.facts.pagecache import residency
from nobounce.io.movers import uring
from nobounce.runtimes import faults, rawio
from nobounce.runtimes.host import cpu as cpu_runtime

PAGE = 4096
PAGES = 512
WAYS = [("cpu", "io_uring"), ("cpu", "threads"), ("sim:0", "auto")]


@pytest.fixture(params=WAYS, ids=lambda w: "-".join(w))
def way(request: pytest.FixtureRequest) -> tuple[nobounce.Device, str]:
    name, method = request.param
    if method == "io_uring":
        need("io_uring")
    return nobounce.Device(name), method


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(3).integers(0, 256, PAGES * PAGE, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    need("o_direct")
    made = tmp_path / "data.bin"
    with made.open("wb") as f:
        f.write(data)
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return made


@pytest.fixture
def ringed(path: Path) -> Iterator[tuple[nobounce.File, nobounce.Buffer]]:
    """A file and a cpu buffer for tests of what the ring reports."""
    need("io_uring")
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGES * PAGE) as buffer:
        yield f, buffer


def pages_of(buffer: nobounce.Buffer) -> np.ndarray[Any, Any]:
    return buffer.numpy().reshape(-1, PAGE)


def of(data: bytes, pages: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8).reshape(-1, PAGE)[pages]


def rig(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, int], int]) -> None:
    """Have the ring report `change(slot, result)` instead of each result, once per slot."""
    real = uring.Ring.take

    def take(ring: uring.Ring) -> Any:
        found = real(ring)
        for i, key in enumerate(found["user_data"].tolist()):
            if key < 1 << 60:
                found["result"][i] = change(key, int(found["result"][i]))
        return found

    monkeypatch.setattr(uring.Ring, "take", take)


class Latch:
    """Plain direct reads that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Semaphore(0)
        real = rawio.read_plain

        def read(*arguments: Any) -> int:
            self.reached.release()
            self.open.wait(30)
            return real(*arguments)

        monkeypatch.setattr(cpu_runtime.rawio, "read_plain", read)


# bytes, order, receipts


def test_many_random_reads_arrive_in_their_places_and_go_direct(
    way: tuple[nobounce.Device, str], path: Path, data: bytes
) -> None:
    device, method = way
    pages = np.random.default_rng(1).permutation(PAGES)
    with nobounce.open(path) as f, device.allocate(PAGES * PAGE) as buffer:
        with nobounce.Batch(PAGES, depth=32, method=method) as batch:
            ids = batch.read(f, buffer, file_offsets=pages * PAGE, nbytes=PAGE, cache="avoid")
            result = batch.wait()
            assert batch.outstanding == batch.running == 0
        assert ids.tolist() == list(range(PAGES))
        assert sorted(result.ids.tolist()) == ids.tolist()
        assert result.ok
        assert set(result.statuses) == {"complete"}
        assert set(result.backends) == {"fastpath"}
        assert (result.nbytes == PAGE).all()
        assert not result.errnos.any()
        assert (pages_of(buffer) == of(data, pages)).all()
        fd = f.fileno()
        assert residency(fd, 0, len(data)).resident_bytes == 0
    receipt = batch.receipt
    assert receipt.fastpath_bytes == receipt.nbytes == receipt.requested == PAGES * PAGE
    assert receipt.evidence == "kernel"
    assert receipt.reasons == {"direct": PAGES * PAGE}
    assert "a batch of 512 requests" in str(receipt)


def test_reads_that_come_from_the_page_cache_are_no_direct_reads(path: Path) -> None:
    need("io_uring")
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGES * PAGE) as buffer:
        f._fds["direct"] = os.open(path, os.O_RDONLY)
        with nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, cache="avoid")
    assert batch.receipt.reasons == {"page-cache-served": PAGES * PAGE}
    assert batch.receipt.nbytes == PAGES * PAGE
    assert batch.receipt.evidence == "none"


def test_written_pages_are_in_the_file(way: tuple[nobounce.Device, str], path: Path, data: bytes) -> None:
    device, method = way
    pages = np.random.default_rng(2).permutation(PAGES)[:200]
    fresh = os.urandom(200 * PAGE)
    with nobounce.open(path, "r+") as f, device.allocate(200 * PAGE) as buffer:
        with device.create_stream() as stream:
            buffer.copy_from(fresh, stream=stream)
        with nobounce.Batch(method=method) as batch:
            batch.write(f, buffer, file_offsets=pages * PAGE, nbytes=PAGE)
        assert batch.receipt.op == "write"
        assert batch.receipt.fastpath_bytes == 200 * PAGE
    wanted = np.frombuffer(data, np.uint8).reshape(-1, PAGE).copy()
    wanted[pages] = np.frombuffer(fresh, np.uint8).reshape(-1, PAGE)
    assert path.read_bytes() == wanted.tobytes()


@pytest.mark.parametrize("require", ["auto", "fallback"])
def test_requests_of_any_alignment_move_exactly_their_bytes(
    way: tuple[nobounce.Device, str], path: Path, data: bytes, require: Any
) -> None:
    device, method = way
    rng = np.random.default_rng(5)
    nbytes = rng.integers(0, 3 * PAGE, 100)
    offsets = rng.integers(0, len(data) - 3 * PAGE, 100)
    places = np.concatenate([[0], np.cumsum(nbytes + 16)])[:-1]
    with nobounce.open(path) as f, device.allocate(int(nbytes.sum()) + 1600) as buffer:
        with nobounce.Batch(method=method) as batch:
            batch.read(
                f,
                buffer,
                file_offsets=offsets,
                nbytes=nbytes,
                buffer_offsets=places,
                require=require,
                cache="avoid",
            )
            assert batch.wait().check().nbytes.sum() == nbytes.sum()
        held = buffer.numpy().tobytes()
        assert residency(f.fileno(), 0, len(data)).resident_bytes == 0
    for offset, n, place in zip(offsets.tolist(), nbytes.tolist(), places.tolist(), strict=True):
        assert held[place : place + n] == data[offset : offset + n]
        assert held[place + n : place + n + 16] == bytes(16)
    receipt = batch.receipt
    assert receipt.nbytes == nbytes.sum()
    if require == "fallback":
        assert receipt.reasons == {"required-fallback": nbytes.sum()}
        assert receipt.host_traffic_bytes == (0 if device.name == "cpu" else 2 * nbytes.sum())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(0, 12 * PAGE), max_size=12, unique=True), seed=st.integers(0, 99))
def test_neighbouring_unaligned_writes_never_lose_a_byte(
    way: tuple[nobounce.Device, str], tmp_path: Path, cuts: list[int], seed: int
) -> None:
    device, method = way
    total = 12 * PAGE
    target = tmp_path / "target.bin"
    target.write_bytes(bytes(total))
    fresh = np.random.default_rng(seed).integers(0, 256, total, np.uint8).tobytes()
    starts = sorted({0, *cuts} - {total})
    sizes = [b - a for a, b in zip(starts, [*starts[1:], total], strict=True)]
    with nobounce.open(target, "r+") as f, device.allocate(total) as buffer:
        with device.create_stream() as stream:
            buffer.copy_from(fresh, stream=stream)
        with nobounce.Batch(method=method) as batch:
            batch.write(f, buffer, file_offsets=starts, nbytes=sizes)
    assert target.read_bytes() == fresh


def test_small_relayed_requests_share_bounce_slots_and_copies(path: Path, data: bytes) -> None:
    device = nobounce.Device("sim:0")
    pages = np.arange(PAGES)[::-1]
    with nobounce.open(path, "r+") as f, device.allocate(PAGES * PAGE) as buffer:
        with faults.inject(op="copy", device="sim:0") as copies, nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=pages * PAGE, nbytes=PAGE, require="fallback", cache="avoid")
            batch.wait().check()
            assert copies.calls < PAGES / 4
        assert (pages_of(buffer) == of(data, pages)).all()
        with nobounce.Batch() as batch:
            batch.write(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, require="fallback")
    assert batch.receipt.host_traffic_bytes == 2 * PAGES * PAGE
    assert path.read_bytes() == of(data, pages).tobytes()


def test_reads_and_writes_of_several_files_and_devices_share_a_batch(path: Path, data: bytes) -> None:
    one, two = nobounce.Device("cpu"), nobounce.Device("sim:1")
    with nobounce.open(path, "r+") as f, one.allocate(PAGE) as a, two.allocate(PAGE) as b:
        with nobounce.Batch() as batch:
            batch.read(f, a, file_offsets=PAGE, nbytes=PAGE, cookies=["a"], cache="avoid")
            batch.read(f, b, file_offsets=2 * PAGE, nbytes=PAGE, cookies=["b"], cache="avoid")
            events = {e.cookie: e for e in batch}
            assert events["a"].backend == events["b"].backend == "fastpath"
            batch.write(f, b, file_offsets=0, nbytes=PAGE)
        assert a.numpy().tobytes() == data[PAGE : 2 * PAGE]
        assert b.numpy().tobytes() == data[2 * PAGE : 3 * PAGE]
    assert path.read_bytes()[:PAGE] == data[2 * PAGE : 3 * PAGE]
    assert batch.receipt.device == "cpu and 1 more"
    assert "1 of the requests are writes" in str(batch.receipt)


def test_the_end_of_the_file_ends_a_read_short_and_complete(
    way: tuple[nobounce.Device, str], tmp_path: Path
) -> None:
    device, method = way
    path = tmp_path / "odd.bin"
    path.write_bytes(b"x" * (PAGE + 700))
    with nobounce.open(path) as f, device.allocate(4 * PAGE) as buffer:
        with nobounce.Batch(method=method) as batch:
            batch.read(f, buffer, file_offsets=[0, PAGE, 2 * PAGE, 1 << 40], nbytes=PAGE, cache="avoid")
            result = batch.wait().check()
        got = dict(zip(result.ids.tolist(), result.nbytes.tolist(), strict=True))
    assert got == {0: PAGE, 1: 700, 2: 0, 3: 0}
    assert batch.receipt.nbytes == PAGE + 700


def test_cache_auto_takes_what_is_cached(way: tuple[nobounce.Device, str], path: Path, data: bytes) -> None:
    need("cachestat")
    device, method = way
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 10 * PAGE, 0)
    os.close(fd)
    with nobounce.open(path) as f, device.allocate(20 * PAGE) as buffer:
        with nobounce.Batch(method=method) as batch:
            batch.read(f, buffer, file_offsets=np.arange(20) * PAGE, nbytes=PAGE, cache="auto")
        assert buffer.numpy().tobytes() == data[: 20 * PAGE]
    assert batch.receipt.reasons == {"cached": 10 * PAGE, "direct": 10 * PAGE}


def test_a_request_larger_than_a_chunk_is_cut(way: tuple[nobounce.Device, str], tmp_path: Path) -> None:
    device, method = way
    path = tmp_path / "large.bin"
    data = os.urandom(20 << 20)
    path.write_bytes(data)
    with nobounce.open(path) as f, device.allocate(len(data)) as buffer:
        with nobounce.Batch(method=method) as batch:
            batch.read(f, buffer, file_offsets=0, nbytes=len(data), cache="avoid")
        assert buffer.numpy().tobytes() == data
    assert batch.receipt.fastpath_bytes == len(data)


# arguments and validity


def test_scalars_stand_for_all_and_packing_skips_impossible_sizes(path: Path, data: bytes) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(4 * PAGE) as buffer:
        with nobounce.Batch() as batch:
            ids = batch.read(
                f, buffer, file_offsets=0, nbytes=[PAGE, -1, PAGE], buffer_offsets=None, cache="avoid"
            )
            result = batch.wait()
            assert result.errors.keys() == {int(ids[1])}
            assert len(batch.read(f, buffer, file_offsets=[], nbytes=PAGE, cache="avoid")) == 0
            assert len(batch.wait()) == 0
        assert buffer.numpy().tobytes()[: 2 * PAGE] == data[:PAGE] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_offsets": [0, 1], "nbytes": [1, 2, 3]}, "differ in length: file_offsets has 2, nbytes has 3"),
        ({"file_offsets": 0.5, "nbytes": 1}, "file_offsets is of float64"),
        ({"file_offsets": [[0]], "nbytes": 1}, "file_offsets has 2 dimensions"),
        ({"file_offsets": 0, "nbytes": "many"}, "nbytes is of"),
        ({"file_offsets": 0, "nbytes": True}, "nbytes is of bool"),
        ({"file_offsets": [0, 2**63], "nbytes": 1}, r"file_offsets\[1\] is 9223372036854775808"),
        ({"file_offsets": 0, "nbytes": 1, "timeout": -1}, "timeout=-1"),
        ({"file_offsets": 0, "nbytes": 1, "cookies": "ab"}, "2 cookies for 1 requests"),
        ({"file_offsets": 0, "nbytes": 1, "require": "sometimes"}, "require='sometimes'"),
        ({"file_offsets": range(9), "nbytes": 1}, "9 requests do not fit: the capacity is 8"),
    ],
)
def test_arguments_that_fit_no_request_are_named_and_nothing_is_held(
    path: Path, arguments: dict[str, Any], message: str
) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGE) as buffer, nobounce.Batch(8) as b:
        with pytest.raises(ArgumentError, match=message):
            b.read(f, buffer, **arguments)
        assert b.outstanding == 0
        buffer.close()


@pytest.mark.parametrize("arguments", [{"capacity": 0}, {"depth": 0}, {"method": "magic"}])
def test_a_batch_of_nothing_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        nobounce.Batch(**arguments)


def test_one_bad_request_is_invalid_and_the_others_run(
    way: tuple[nobounce.Device, str], path: Path, data: bytes
) -> None:
    device, method = way
    with nobounce.open(path) as f, device.allocate(3 * PAGE) as buffer:
        with nobounce.Batch(method=method) as batch:
            batch.read(f, buffer, file_offsets=[0, -5, PAGE], nbytes=PAGE, cache="avoid")
            events = {e.id: e for e in batch}
        assert [events[i].status for i in range(3)] == ["complete", "invalid", "complete"]
        assert events[1].errno == errno.EINVAL
        assert isinstance(events[1].error, ArgumentError)
        assert "file_offset is -5" in str(events[1].error)
        assert events[1].error.__notes__ == ["request 1 of the batch"]
        assert pages_of(buffer)[[0, 2]].tobytes() == data[: 2 * PAGE]


def test_strict_refuses_them_all_and_names_the_first_bad_one(path: Path) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGE) as buffer:
        with nobounce.Batch(strict=True) as batch:
            with pytest.raises(ArgumentError, match=r"request 2 of 3 \(strict.*buffer_offset 8192"):
                batch.read(
                    f,
                    buffer,
                    file_offsets=0,
                    nbytes=[512, 512, PAGE],
                    buffer_offsets=[0, 0, 8192],
                    cache="avoid",
                )
            with pytest.raises(RouteError) as caught:
                batch.read(f, buffer, file_offsets=[0, 1], nbytes=512, require="fastpath", cache="avoid")
            assert "request 1 of 2" in caught.value.__notes__[0]
            assert batch.outstanding == 0
        assert batch.receipt.nbytes == 0
        buffer.close()


def test_required_fastpath_makes_the_misaligned_invalid_and_refuses_where_nothing_can_go_direct(
    path: Path,
) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(2 * PAGE) as buffer, nobounce.Batch() as b:
        b.read(f, buffer, file_offsets=[0, 1], nbytes=PAGE, require="fastpath", cache="avoid")
        result = b.wait()
        assert dict(zip(result.ids.tolist(), result.statuses, strict=True)) == {0: "complete", 1: "invalid"}
        assert isinstance(result.errors[1], RouteError)
        with (
            faults.inject(op="direct", device="sim:0"),
            nobounce.Device("sim:0").allocate(PAGE) as far,
            pytest.raises(RouteError, match="no P2P"),
        ):
            b.read(f, far, file_offsets=[0, 1], nbytes=PAGE, require="fastpath", cache="avoid")


# failures


def test_a_real_error_is_the_requests_own(way: tuple[nobounce.Device, str], path: Path) -> None:
    device, method = way
    with nobounce.open(path) as f, device.allocate(PAGE) as buffer:
        with nobounce.Batch(method=method) as batch:
            batch.write(f, buffer, file_offsets=[0, PAGE, 100], nbytes=[512, PAGE, 50], buffer_offsets=0)
            result = batch.wait()
        assert set(result.statuses) == {"failed"}
        assert set(result.errnos.tolist()) == {errno.EBADF}
        for error in result.errors.values():
            assert isinstance(error, TransferError)
            assert error.filename == str(path)
        with pytest.raises(TransferError):
            result.check()


def test_leaving_the_block_carries_out_everything_and_raises_what_nobody_took(path: Path) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGE) as buffer:
        with pytest.raises(TransferError, match="Bad file descriptor"), nobounce.Batch() as batch:
            batch.write(f, buffer, file_offsets=0, nbytes=PAGE)
        assert batch.closed
        buffer.close()


@pytest.mark.parametrize("code", [errno.ENODEV, errno.EREMOTEIO])
def test_the_ring_retries_a_direct_failure_on_fallback(
    ringed: tuple[nobounce.File, nobounce.Buffer], data: bytes, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    f, buffer = ringed
    failed: list[int] = []

    def change(slot: int, result: int) -> int:
        if slot == 3 and not failed:
            failed.append(slot)
            return -code
        return result

    rig(monkeypatch, change)
    with nobounce.Batch(depth=8) as batch:
        batch.read(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, cache="avoid")
        result = batch.wait().check()
    assert buffer.numpy().tobytes() == data
    assert len(result) == PAGES
    receipt = batch.receipt
    assert [r.errno for r in receipt.retries] == [code]
    assert receipt.reasons["direct-failed"] > PAGE  # what had not begun went the same way at once
    assert receipt.nbytes == len(data)
    assert f._failed == {"cpu": code}
    assert residency(f.fileno(), 0, len(data)).resident_bytes == 0


def test_the_ring_repeats_short_and_interrupted_reads_and_reports_errors(
    ringed: tuple[nobounce.File, nobounce.Buffer], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, buffer = ringed
    rigged = {1: -errno.EINTR, 2: -errno.EAGAIN, 3: 1000, 4: 0, 5: -errno.EIO}
    rig(monkeypatch, lambda slot, result: rigged.pop(slot, result))
    with nobounce.Batch() as batch:
        batch.read(f, buffer, file_offsets=np.arange(16) * PAGE, nbytes=PAGE, cache="avoid")
        events = {e.id: e for e in batch}
    assert not rigged
    # A read of nothing in the middle of the file is no end that anybody could see from here: it stays short.
    assert {i for i, e in events.items() if e.status != "complete"} == {5}
    assert events[5].errno == errno.EIO
    assert events[4].nbytes == 0
    assert [events[i].nbytes for i in (1, 2, 3, 6)] == [PAGE] * 4
    held = pages_of(buffer)[:16]
    for i in (0, 1, 2, 3, 6, 15):
        assert held[i].tobytes() == data[i * PAGE : (i + 1) * PAGE]


def test_threads_retry_and_report_per_request(path: Path, data: bytes) -> None:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(PAGES * PAGE) as buffer:
        with (
            faults.inject(op="read", device="sim:0", error=errno.EIO, after=5, times=1),
            nobounce.Batch() as batch,
        ):
            batch.read(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, cache="avoid")
            result = batch.wait()
            assert len(result.errors) == 1
            assert set(result.errnos.tolist()) == {0, errno.EIO}
        with (
            faults.inject(op="read", device="sim:0", error=errno.EREMOTEIO, after=5, times=1),
            nobounce.Batch() as batch,
        ):
            batch.read(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, cache="avoid")
            batch.wait().check()
        assert buffer.numpy().tobytes() == data
    assert len(batch.receipt.retries) == 1
    assert batch.receipt.reasons["direct-failed"] >= PAGE


@pytest.mark.parametrize("op", ["copy", "pread"])
def test_a_failure_in_a_shared_bounce_slot_fails_its_requests_alone(path: Path, op: str) -> None:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(PAGES * PAGE) as buffer:
        with faults.inject(op=op, error=errno.EIO, times=1), nobounce.Batch() as batch:
            batch.read(
                f,
                buffer,
                file_offsets=np.arange(PAGES) * PAGE,
                nbytes=PAGE,
                require="fallback",
                cache="avoid",
            )
            first = batch.wait()
            assert len(first) == PAGES
            assert 1 <= len(first.errors) < PAGES or op == "copy"
            batch.read(f, buffer, file_offsets=0, nbytes=PAGE, require="fallback", cache="avoid")
            batch.wait().check()
        assert batch.receipt.nbytes == first.nbytes.sum() + PAGE


# depth, waiting, cancelling, timeouts


def test_more_requests_than_the_depth_run_a_few_at_a_time(
    ringed: tuple[nobounce.File, nobounce.Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    f, buffer = ringed
    most = []
    real = uring.Ring.enter

    def enter(ring: uring.Ring, *arguments: Any) -> None:
        most.append(ring.in_flight)
        real(ring, *arguments)

    monkeypatch.setattr(uring.Ring, "enter", enter)
    with nobounce.Batch(depth=5) as batch:
        batch.read(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, cache="avoid")
        assert batch.submit() == PAGES
        assert batch.submit() == 0
        assert len(batch.wait().check()) == PAGES
    assert max(most) == 5


def test_results_come_in_parts_and_each_once_and_the_room_comes_back(
    way: tuple[nobounce.Device, str], path: Path
) -> None:
    device, method = way
    with (
        nobounce.open(path) as f,
        device.allocate(64 * PAGE) as buffer,
        nobounce.Batch(64, depth=4, method=method) as batch,
    ):
        seen: list[int] = []
        for _ in range(5):
            batch.read(f, buffer, file_offsets=np.arange(64) * PAGE, nbytes=PAGE, cache="avoid")
            with pytest.raises(ArgumentError, match="have not been taken"):
                batch.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="avoid")
            while batch.outstanding:
                left = batch.outstanding
                part = batch.wait(min_n=10).check()
                assert len(part) >= min(10, left)
                seen += part.ids.tolist()
        assert sorted(seen) == list(range(320))
        assert len(batch.wait(min_n=5)) == 0


def test_waiting_for_nothing_only_looks_and_a_timeout_comes_back_empty(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch(monkeypatch)
    with (
        nobounce.open(path) as f,
        nobounce.Device("cpu").allocate(4 * PAGE) as buffer,
        nobounce.Batch(method="threads") as batch,
    ):
        batch.read(f, buffer, file_offsets=np.arange(4) * PAGE, nbytes=PAGE, cache="avoid")
        assert len(batch.wait(min_n=0)) == 0
        assert len(batch.wait(timeout=0.01)) == 0
        assert batch.running == 4
        with pytest.raises(BusyError):
            buffer.close()
        latch.open.set()
        assert len(batch.wait()) == 4


def test_cancel_takes_back_what_has_not_begun(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = Latch(monkeypatch)
    with (
        nobounce.open(path) as f,
        nobounce.Device("cpu").allocate(10 * PAGE) as buffer,
        nobounce.Batch(depth=3, method="threads") as batch,
    ):
        batch.read(f, buffer, file_offsets=np.arange(10) * PAGE, nbytes=PAGE, cache="avoid")
        batch.submit()
        for _ in range(3):
            latch.reached.acquire()
        assert batch.cancel([9]) == 1
        assert batch.cancel([9]) == 0
        assert batch.cancel() == 6
        latch.open.set()
        result = batch.wait()
        assert sorted(result.statuses) == ["cancelled"] * 7 + ["complete"] * 3
        assert all(isinstance(e, TransferCancelledError) for e in result.errors.values())
        assert set(result.errnos.tolist()) == {0, errno.ECANCELED}
        batch.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="avoid")
        assert batch.cancel() == 1
        assert batch.wait().statuses == ["cancelled"]
        batch.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="avoid")
        batch.wait().check()


def test_cancel_takes_back_what_is_not_in_the_ring(ringed: tuple[nobounce.File, nobounce.Buffer]) -> None:
    f, buffer = ringed
    with nobounce.Batch(depth=4) as batch:
        batch.read(f, buffer, file_offsets=np.arange(10) * PAGE, nbytes=PAGE, cache="avoid")
        batch.submit()
        assert batch.cancel() == 6
        assert sorted(batch.wait().statuses) == ["cancelled"] * 6 + ["complete"] * 4


def test_a_request_past_its_time_is_reported_while_it_holds_its_buffer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch(monkeypatch)
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8 * PAGE) as buffer:
        with nobounce.Batch(4, depth=2, method="threads") as batch:
            batch.read(f, buffer, file_offsets=np.arange(4) * PAGE, nbytes=PAGE, timeout=0.01, cache="avoid")
            result = batch.wait()
            assert result.statuses == ["timeout"] * 4
            assert set(result.errnos.tolist()) == {errno.ETIMEDOUT}
            assert all(isinstance(e, TransferTimeoutError) for e in result.errors.values())
            assert batch.outstanding == 0
            assert batch.running == 2
            with pytest.raises(BusyError):
                buffer.close()
            batch.read(f, buffer, file_offsets=[0, PAGE], nbytes=PAGE, cache="avoid")
            with pytest.raises(ArgumentError, match="do not fit"):
                batch.read(
                    f, buffer, file_offsets=0, nbytes=PAGE, cache="avoid"
                )  # two slots are held in the dark
            latch.open.set()
            later = batch.wait().check()
            assert len(later) == 2
        assert batch.running == 0
        buffer.close()


def test_a_timeout_in_the_ring_ends_what_waits_and_hides_what_ends_late(
    ringed: tuple[nobounce.File, nobounce.Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    f, buffer = ringed
    real = uring.Ring.take
    hidden = True

    def take(ring: uring.Ring) -> Any:
        return uring.no_ends() if hidden else real(ring)

    monkeypatch.setattr(uring.Ring, "take", take)
    with nobounce.Batch(depth=2) as batch:
        batch.read(f, buffer, file_offsets=np.arange(6) * PAGE, nbytes=PAGE, timeout=0, cache="avoid")
        assert batch.wait().statuses == ["timeout"] * 6
        assert batch.running == 2
        hidden = False
        batch.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="avoid")
        assert batch.wait().statuses == ["complete"]
        batch.close()
        assert batch.running == 0
    buffer.close()


# lifetime


def test_closing_waits_for_what_runs_and_closing_twice_is_fine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch(monkeypatch)
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8 * PAGE) as buffer:
        batch = nobounce.Batch(depth=2, method="threads")
        batch.read(f, buffer, file_offsets=np.arange(8) * PAGE, nbytes=PAGE, cache="avoid")
        batch.submit()
        latch.reached.acquire()
        closer = threading.Thread(target=batch.close)
        closer.start()
        assert closer.is_alive()
        latch.open.set()
        closer.join(30)
        batch.close()
        assert batch.receipt.nbytes <= 8 * PAGE
        for call in (batch.wait, batch.submit, batch.cancel):
            with pytest.raises(ClosedError):
                call()
        buffer.close()


def test_a_dropped_batch_lets_go_of_everything(path: Path, fd_guard: None) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(64 * PAGE) as buffer:
        batch = nobounce.Batch()
        batch.read(f, buffer, file_offsets=np.arange(64) * PAGE, nbytes=PAGE, cache="avoid")
        batch.submit()
        del batch
        gc.collect()
        buffer.close()


def test_an_exception_in_the_block_cancels_and_comes_through(
    ringed: tuple[nobounce.File, nobounce.Buffer],
) -> None:
    f, buffer = ringed
    with pytest.raises(KeyError), nobounce.Batch() as batch:
        batch.write(f, buffer, file_offsets=0, nbytes=PAGE)
        raise KeyError
    assert batch.receipt.nbytes == 0
    buffer.close()


def test_closing_the_file_first_is_fine(way: tuple[nobounce.Device, str], path: Path, data: bytes) -> None:
    device, method = way
    with device.allocate(64 * PAGE) as buffer:
        with nobounce.Batch(method=method) as batch:
            with nobounce.open(path) as f:
                batch.read(f, buffer, file_offsets=np.arange(64) * PAGE, nbytes=PAGE, cache="avoid")
            batch.wait().check()
        assert buffer.numpy().tobytes() == data[: 64 * PAGE]


def test_a_signal_in_the_middle_of_waiting_loses_nothing(
    ringed: tuple[nobounce.File, nobounce.Buffer], data: bytes
) -> None:
    f, buffer = ringed
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(5):
            with nobounce.Batch(depth=8) as batch:
                batch.read(f, buffer, file_offsets=np.arange(PAGES) * PAGE, nbytes=PAGE, cache="avoid")
                assert len(batch.wait().check()) == PAGES
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert buffer.numpy().tobytes() == data


def test_several_threads_may_use_one_batch(way: tuple[nobounce.Device, str], path: Path, data: bytes) -> None:
    device, method = way
    got: list[int] = []
    errors: list[BaseException] = []
    with (
        nobounce.open(path) as f,
        device.allocate(PAGES * PAGE) as buffer,
        nobounce.Batch(PAGES, depth=16, method=method) as batch,
    ):

        def work(k: int) -> None:
            try:
                for page in range(k, PAGES, 64):
                    ids = batch.read(
                        f,
                        buffer,
                        file_offsets=page * PAGE,
                        nbytes=PAGE,
                        buffer_offsets=page * PAGE,
                        cache="avoid",
                    )
                    assert len(ids) == 1
                    got.extend(batch.wait(min_n=1).check().ids.tolist())
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(64)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        got += batch.wait().check().ids.tolist()
        assert not errors
        assert sorted(got) == list(range(PAGES))
        assert buffer.numpy().tobytes() == data


def test_a_forks_child_is_refused_and_the_parent_goes_on(
    ringed: tuple[nobounce.File, nobounce.Buffer], data: bytes
) -> None:
    f, buffer = ringed
    with nobounce.Batch(depth=4) as batch:
        batch.read(f, buffer, file_offsets=np.arange(64) * PAGE, nbytes=PAGE, cache="avoid")
        batch.submit()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    batch.wait()
                except ClosedError as e:
                    batch.close()
                    with nobounce.Batch() as own:
                        own.read(f, buffer, file_offsets=0, nbytes=PAGE, cache="avoid")
                    code = 0 if "fork" in str(e) and own.receipt.nbytes == PAGE else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(batch.wait().check()) == 64
    assert buffer.numpy().tobytes()[: 64 * PAGE] == data[: 64 * PAGE]


def test_without_descriptors_for_a_ring_threads_do_it(path: Path, data: bytes) -> None:
    need("io_uring")
    code = """
import resource, sys, nobounce
with nobounce.open(sys.argv[1]) as f, nobounce.Device("cpu").allocate(8192) as buf, nobounce.Batch() as b:
    f.read(buf)
    used = max(int(n) for n in __import__("os").listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    b.read(f, buf, file_offsets=[0, 4096], nbytes=4096)
    print(len(b.wait().check()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_the_process_may_end_with_requests_under_way(path: Path) -> None:
    code = """
import sys, numpy as np, nobounce
f = nobounce.open(sys.argv[1]); buf = nobounce.Device(sys.argv[2]).allocate(512 * 4096)
b = nobounce.Batch(); b.read(f, buf, file_offsets=np.arange(512) * 4096, nbytes=4096); b.submit()
"""
    for device in ("cpu", "sim:0"):
        command = [sys.executable, "-c", code, str(path), device]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_process_ends_while_requests_take_their_time(path: Path) -> None:
    """Waited for once threads run no more, they would never end."""
    code = """
import sys, numpy as np, nobounce
from nobounce.runtimes import faults
slow = faults.inject(op="read", latency=0.5)
slow.__enter__()
f = nobounce.open(sys.argv[1]); buf = nobounce.Device("sim:0").allocate(512 * 4096)
b = nobounce.Batch(method="threads"); b.read(f, buf, file_offsets=np.arange(512) * 4096, nbytes=4096); b.submit()
"""
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_is_bounded_by_the_capacity(path: Path) -> None:
    with (
        nobounce.open(path) as f,
        nobounce.Device("cpu").allocate(PAGE) as buffer,
        nobounce.Batch(1 << 40) as batch,
    ):
        for _ in range(20):
            batch.read(
                f, buffer, file_offsets=np.zeros(300, int), nbytes=PAGE, buffer_offsets=0, cache="avoid"
            )
            batch.wait().check()
        assert batch._driver.table._room < 1000
        assert not batch._driver._ends.groups
