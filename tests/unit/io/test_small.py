"""Small reads by a kept plan: the same outcome as the whole way's, and the whole way wherever anything is out of the ordinary."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.errors import (
    ArgumentError,
    DeviceError,
    RouteError,
    RuntimeStatus,
    TransferCancelledError,
    TransferError,
)
from nobounce.facts import cachestat
from nobounce.facts.pagecache import counted as counted_pages
from nobounce.io import engine, hooks, kept, oncaller, small
from nobounce.io.target import Chunk
from nobounce.runtimes import rawio

NBYTES = 64 << 10
PATIENCE = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per read that went by a plan: whether it got there."""
    done: list[bool] = []
    plain = small.SmallRead._move

    def noted(self: small.SmallRead) -> bool:
        done.append(False)
        done[-1] = plain(self)
        return done[-1]

    now = oncaller.read_now

    def noted_now(*arguments: Any) -> nobounce.Receipt | None:
        done.append(False)
        receipt = now(*arguments)
        done[-1] = receipt is not None
        return receipt

    monkeypatch.setattr(small.SmallRead, "_move", noted)
    monkeypatch.setattr(oncaller, "read_now", noted_now)
    return done


def outcome(receipt: nobounce.Receipt) -> Any:
    return (
        receipt.op,
        receipt.filename,
        receipt.device,
        receipt.requested,
        receipt.nbytes,
        receipt.segments,
        receipt.evidence,
    )


WAYS = [
    {"cache": "use"},
    {"require": "fallback", "cache": "use"},
    {"require": "fallback", "cache": "avoid"},
]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", [(4096, 0, 0), (4096, 8192, 4096), (1000, 4097, 33), (1, NBYTES - 1, 0)])
def test_the_second_read_says_and_brings_what_the_first_did(
    path: Path, device: str, way: dict[str, Any], where: tuple[int, int, int], quick: list[bool]
) -> None:
    nbytes, file_offset, buffer_offset = where
    told = {"nbytes": nbytes, "file_offset": file_offset, "buffer_offset": buffer_offset, **way}
    with nobounce.open(path) as f, nobounce.Device(device).allocate(16384) as buffer:
        first = f.read(buffer, **told)
        assert not quick
        buffer.fill(0, stream=None)
        second = f.read(buffer, **told)
        with buffer.device.create_stream() as stream:
            third = f.read_async(buffer, stream=stream, **told).result()
        data = buffer.numpy().tobytes()[buffer_offset : buffer_offset + nbytes]
    dropped = (
        device == "cpu" and way["cache"] == "avoid"
    )  # pages are dropped behind those: always the whole way
    assert quick == ([] if dropped else [True, True])
    assert outcome(first) == outcome(second) == outcome(third)
    assert data == path.read_bytes()[file_offset : file_offset + nbytes]


TIMES = (
    "bounce_pinned_bytes",
    "seconds",
    "queued_seconds",
    "bytes_per_second_of_operation",
    "latency",
    "microseconds",
    "pids",
)


def counted(found: Any) -> Any:
    """Statistics without what is a time."""
    if isinstance(found, dict):
        return {k: counted(v) for k, v in found.items() if k not in TIMES}
    return [counted(v) for v in found] if isinstance(found, list) else found


@pytest.mark.parametrize("way", [{"cache": "use"}, {"require": "fallback"}])
def test_it_is_counted_as_the_whole_way_is(path: Path, way: dict[str, Any], quick: list[bool]) -> None:
    def added() -> Any:
        before = nobounce.stats()
        f.read(buffer, **way)
        f.read_async(buffer, stream=stream, **way).result()
        return counted((nobounce.stats() - before).to_dict())

    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(4096) as buffer, device.create_stream() as stream:
        f.read(buffer, **way)
        by_plan = added()
        assert quick == [True, True]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept, "find", lambda *_, **__: None)
            whole = added()
    assert by_plan == whole


def test_short_at_the_end_of_the_file_is_the_whole_way_s_to_say(path: Path, quick: list[bool]) -> None:
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(8192) as buffer:
        f.read(buffer, cache="use")
        receipt = f.read(buffer, file_offset=NBYTES - 100, cache="use")
    assert quick == [False]
    assert receipt.nbytes == 100


def test_an_error_is_reported_in_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(4096) as buffer:
        f.read(buffer, cache="use")

        def broken(*_: Any, **__: Any) -> int:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(rawio, "read_plain", broken)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(TransferError) as caught:
            f.read(buffer, file_offset=4096, cache="use")
        monkeypatch.undo()
        assert (caught.value.errno, caught.value.file_offset, caught.value.nbytes) == (errno.EIO, 4096, 4096)
        assert caught.value.receipt is not None
        assert f.read(buffer, cache="use").nbytes == 4096


@pytest.mark.parametrize(
    "where",
    [{"file_offset": -1}, {"buffer_offset": 1}, {"nbytes": 4097}, {"nbytes": -1}, {"buffer_offset": -4096}],
)
def test_a_bad_region_is_named_as_before(path: Path, where: dict[str, int], quick: list[bool]) -> None:
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(4096) as buffer:
        f.read(buffer, cache="use")
        with pytest.raises(ArgumentError):
            f.read(buffer, **{"nbytes": 4096, "cache": "use", **where})
    assert not quick


def test_other_settings_are_judged_anew(path: Path, quick: list[bool]) -> None:
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(4096) as buffer:
        f.read(buffer, cache="use")
        config.override(config.Settings(allow_compat_mode=False))
        with pytest.raises(RouteError):
            f.read(buffer, nbytes=4095, cache="use")
    assert not quick


class Watch(hooks.Watcher):
    """What it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.operations: list[hooks.Operation] = []

    def entered(self, operation: hooks.Operation) -> None:
        self.told.append("entered")
        self.operations.append(operation)

    def started(self, operation: hooks.Operation) -> None:
        self.told.append("started")

    def moved(self, job: Any, chunk: Chunk, began: float, ended: float) -> None:
        assert began <= ended
        self.told.append(f"moved {chunk.nbytes} at {chunk.file_offset}, {chunk.reason.code}")

    def copied(self, device: str, stream: int, op: str, nbytes: int, began: float, ended: float) -> None:
        assert began <= ended
        self.told.append(f"copied {nbytes} to {device}")

    def exited(self, operation: hooks.Operation) -> None:
        self.told.append("exited")


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    hooks.add(made)
    yield made
    hooks.remove(made)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("in_stream", [False, True])
def test_whoever_watches_transfers_is_told_of_each_and_it_goes_the_same_way(
    path: Path, quick: list[bool], watch: Watch, device: str, in_stream: bool
) -> None:
    where = nobounce.Device(device)
    with nobounce.open(path) as f, where.allocate(4096) as buffer, where.create_stream() as stream:
        f.read(buffer, cache="use")
        watch.told.clear()
        handle = stream.handle if in_stream else None
        if in_stream:
            receipt = f.read_async(buffer, stream=stream, file_offset=8192, cache="use").result(PATIENCE)
        else:
            receipt = f.read(buffer, file_offset=8192, cache="use")
    copied = [f"copied 4096 to {device}"] if device != "cpu" else []
    assert watch.told == ["entered", "started", *copied, "moved 4096 at 8192, cache-use", "exited"]
    seen = watch.operations[-1]
    assert (seen.receipt, seen.started_at, seen.ended_at) == (receipt, receipt.started_at, receipt.ended_at)
    assert (seen.nbytes, seen.file_offset, seen.stream) == (4096, 8192, handle)
    assert quick == [True]


def test_a_watched_read_that_takes_the_whole_way_after_all_is_one(
    path: Path, quick: list[bool], watch: Watch
) -> None:
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(4096) as buffer:
        f.read(buffer, cache="use")
        watch.told.clear()
        end = f.nbytes - 100
        assert f.read(buffer, file_offset=end, cache="use").nbytes == 100
    assert [t for t in watch.told if t in ("entered", "started", "exited")] == [
        "entered",
        "started",
        "exited",
    ]
    assert watch.told.count("copied 100 to sim:0") == 1
    assert quick == [False]


def test_a_watched_read_that_is_cancelled_in_its_stream_has_ended(path: Path, watch: Watch) -> None:
    device, go = nobounce.Device("sim:0"), threading.Event()
    with nobounce.open(path) as f, device.allocate(4096) as buffer, device.create_stream() as stream:
        f.read(buffer, cache="use")
        watch.told.clear()
        device._runtime.host_call(stream.handle, lambda: go.wait(PATIENCE) and None)
        move = f.read_async(buffer, stream=stream, cache="use")
        assert move.cancel()
        go.set()
        stream.sync()
    assert watch.told == ["entered", "exited"]
    assert isinstance(watch.operations[-1].error, TransferCancelledError)


def test_what_depends_on_the_place_is_the_whole_way_s(path: Path, quick: list[bool]) -> None:
    """An aligned read goes direct, the next one's edges do not."""
    need("o_direct")
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        assert f.read(buffer, nbytes=100, file_offset=1, cache="avoid").fallback_bytes == 100
        assert f.read(buffer, nbytes=4096, cache="avoid").fastpath_bytes == 4096
        assert f.read(buffer, nbytes=100, file_offset=1, cache="avoid").fallback_bytes == 100
        assert f.read(buffer, nbytes=4096, buffer_offset=1, cache="avoid").fastpath_bytes == 0
        assert f.read(buffer, nbytes=4096, file_offset=8192, cache="avoid").fastpath_bytes == 4096
        data = buffer.numpy().tobytes()
    assert quick == [True, True]
    assert data[:4096] == path.read_bytes()[8192 : 8192 + 4096]


def cool(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def pages(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return counted_pages(fd, 0, NBYTES).resident_bytes or 0
    finally:
        os.close(fd)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("where", [(4096, 8192, 0), (100, 4097, 5)])
def test_auto_takes_from_the_page_cache_what_it_holds_by_trying(
    path: Path, device: str, where: tuple[int, int, int], quick: list[bool]
) -> None:
    nbytes, file_offset, buffer_offset = where
    told = {"nbytes": nbytes, "file_offset": file_offset, "buffer_offset": buffer_offset, "cache": "auto"}
    data = path.read_bytes()
    with nobounce.open(path) as f, nobounce.Device(device).allocate(8192) as buffer:
        route = f.explain(buffer, **told)
        first, second = f.read(buffer, **told), f.read(buffer, **told)
        assert buffer.numpy().tobytes()[buffer_offset : buffer_offset + nbytes] == data[file_offset:][:nbytes]
    assert quick == [True]
    assert outcome(first) == outcome(second)
    assert [s.reason.code for s in second.segments] == [s.reason.code for s in route.segments] == ["cached"]


def test_auto_reads_directly_what_the_page_cache_lacks_and_leaves_no_page(
    path: Path, quick: list[bool]
) -> None:
    need("o_direct", "cachestat")
    data = path.read_bytes()
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        f.read(buffer, nbytes=4096, cache="auto")
        cool(path)
        receipt = f.read(buffer, nbytes=8192, file_offset=4096, cache="auto")
        assert buffer.numpy().tobytes() == data[4096 : 4096 + 8192]
        assert (receipt.fastpath_bytes, receipt.evidence) == (8192, "reported")
        assert pages(path) == 0
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 4096, 4096)
        os.close(fd)
        half = f.read(buffer, nbytes=8192, file_offset=4096, cache="auto")  # one page of two
        assert buffer.numpy().tobytes() == data[4096 : 4096 + 8192]
        assert half.nbytes == 8192
    # The first plan knows of the page cache alone; what is missing there has the file looked at.
    assert quick == [True, False, True]


def test_a_hole_made_since_is_the_whole_way_s_to_count(path: Path, quick: list[bool]) -> None:
    need("o_direct")
    with nobounce.open(path, "r+") as f, nobounce.Device("cpu").allocate(4096) as buffer:
        f.read(buffer, cache="avoid")
        f.truncate(1 << 20)
        assert f.read(buffer, file_offset=512 << 10, cache="avoid").hole_bytes == 4096
    assert quick == [False]


def test_where_pages_are_not_counted_the_whole_way_looks(
    path: Path, quick: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(cachestat, "cached_nbytes", refuse)
    data = path.read_bytes()
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(4096) as buffer:
        for n in range(3):
            receipt = f.read(buffer, file_offset=4096 * n + 1, cache="auto")
            assert receipt.nbytes == 4096
            assert buffer.numpy().tobytes() == data[4096 * n + 1 :][:4096]
    assert quick == [False]


def test_a_file_of_which_nothing_is_known_is_read_from_the_page_cache_and_not_looked_at(
    path: Path, quick: list[bool]
) -> None:
    need("cachestat")
    data = path.read_bytes()
    before = nobounce.stats()
    for _ in range(3):
        with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8192) as buffer:
            receipt = f.read(buffer, file_offset=100)
            assert buffer.numpy().tobytes() == data[100 : 100 + 8192]
            assert receipt.reasons == {"cached": 8192}
            assert f._facts is None
    assert quick == [True] * 3
    assert (nobounce.stats() - before).fallback_bytes == 3 * 8192


@pytest.mark.parametrize("way", [{"require": "fastpath"}, {"cache": "avoid"}, {"cache": "use"}])
def test_what_asks_for_another_way_is_judged_from_the_first_read_on(
    path: Path, way: dict[str, Any], quick: list[bool]
) -> None:
    need("o_direct")
    path.read_bytes()
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(8192) as buffer:
        route, receipt = f.explain(buffer, **way), f.read(buffer, **way)
    assert [s.reason.code for s in route.segments] == [s.reason.code for s in receipt.segments]
    assert not quick


def test_auto_has_the_kernel_fetch_nothing_by_asking(path: Path, quick: list[bool]) -> None:
    need("o_direct", "cachestat")
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(4096) as buffer:
        f.read(buffer, cache="auto")
        cool(path)
        for n in range(8):
            assert f.read(buffer, file_offset=4096 * n, cache="auto").fastpath_bytes == 4096
    assert pages(path) == 0
    assert quick == [True, False] + [True] * 7


def test_an_interrupt_opens_the_gate_and_reaches_the_caller(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        nobounce.open(path) as f,
        nobounce.Device("sim:0").allocate(4096) as buffer,
        buffer.device.create_stream() as s,
    ):
        f.read(buffer, cache="use")

        def interrupted(*_: Any, **__: Any) -> bool:
            raise KeyboardInterrupt

        plan = next(iter(f._plans.values()))
        read = small.SmallRead(
            plan, buffer.handle, (4096, 0, 0), None, lambda: pytest.fail("not the whole way")
        )
        monkeypatch.setattr(small.SmallRead, "_move", interrupted)
        ended: list[Any] = []
        read.begin(ended.append)
        with pytest.raises(KeyboardInterrupt):
            read.work()
        assert ended == [read]
        assert read.error is not None
        s.sync()


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_pinned_or_made_behind_the_gate(
    path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The plan is a synchronous read's, which needs one slot; the read behind the gate goes the whole way."""
    device = nobounce.Device("sim:0")
    runtime = device._runtime
    monkeypatch.setattr(engine, "_engine", None)
    threads: list[int] = []

    def note(name: str) -> None:
        plain = getattr(runtime, name)

        def noted(*a: Any, **k: Any) -> Any:
            threads.append(threading.get_ident())
            return plain(*a, **k)

        monkeypatch.setattr(runtime, name, noted)

    for name in ("alloc_pinned", "stream_create", "event_create"):
        note(name)
    with nobounce.open(path) as f, device.allocate(8192) as buffer, device.create_stream() as stream:
        f.read(buffer, nbytes=4096, cache="use")
        nbytes: Any = ctypes.c_uint64(4096) if late else 4096
        where = {"file_offset": NBYTES - 100, "cache": "use"}
        move = f.read_async(buffer, nbytes=nbytes, stream=stream, **where)
        made = len(threads)
        assert made
        move.exception(PATIENCE)  # with a timeout the caller does not do it itself
        assert move.result().nbytes == 100
        assert threads[made:] == []


def test_a_read_whose_copy_may_still_run_keeps_its_slot_until_it_has_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = nobounce.Device("sim:0")
    runtime, ring = device._runtime, engine.engine_for(device._runtime).rings.get(device._runtime, 0)
    copied, seen, waits = threading.Event(), [], []
    copy, sync, release = runtime.copy_async, runtime.stream_sync, ring.release

    def held(dst: int, src: int, nbytes: int, stream: int, *more: Any) -> None:
        runtime.host_call(stream, lambda: copied.wait(PATIENCE) and None)
        copy(dst, src, nbytes, stream, *more)

    def waited(stream: int) -> None:
        waits.append(stream)
        if len(waits) == 1:
            raise DeviceError("stream_sync", RuntimeStatus.Unknown)
        copied.set()
        sync(stream)

    def released(slot: tuple[int, int]) -> None:
        seen.append(copied.is_set())
        release(slot)

    with nobounce.open(path) as f, device.allocate(4096) as buffer:
        f.read(buffer, cache="use")
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "copy_async", held)
            patch.setattr(runtime, "stream_sync", waited)
            patch.setattr(ring, "release", released)
            assert f.read(buffer, cache="use").nbytes == 4096, "the whole way makes up for it"
            copied.set()
        assert f.read(buffer, cache="use").nbytes == 4096
        assert buffer.numpy().tobytes() == path.read_bytes()[:4096]
    assert seen
    assert all(seen)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("cache", ["auto", "use"])
def test_what_the_page_cache_holds_of_middle_sizes_is_read_on_the_calling_thread(
    tmp_path: Path, device: str, cache: Any, quick: list[bool]
) -> None:
    need("o_direct", "cachestat")
    large = tmp_path / "large.bin"
    data = os.urandom(6 << 20)
    large.write_bytes(data)
    with nobounce.open(large) as f, nobounce.Device(device).allocate(6 << 20) as buffer:
        f.read(buffer, nbytes=4096, cache=cache)
        del quick[:]
        for nbytes in (300 << 10, 1 << 20, 4 << 20):
            receipt = f.read(buffer, nbytes=nbytes, file_offset=4097, cache=cache)
            assert buffer.numpy()[:nbytes].tobytes() == data[4097 : 4097 + nbytes]
            assert receipt.cached_bytes == nbytes
        assert quick == [True] * 3
        f.read(buffer, nbytes=5 << 20, cache=cache)
        assert quick == [True] * 3


def test_direct_reads_of_middle_sizes_are_asked_for_evidence(tmp_path: Path, quick: list[bool]) -> None:
    need("o_direct", "cachestat")
    large = tmp_path / "large.bin"
    large.write_bytes(os.urandom(4 << 20))
    with nobounce.open(large) as f, nobounce.Device("cpu").allocate(4 << 20) as buffer:
        f.read(buffer, nbytes=4096)
        cool(large)
        f.read(buffer, nbytes=4096)
        cool(large)
        receipt = f.read(buffer, nbytes=2 << 20)
        assert (receipt.fastpath_bytes, receipt.evidence) == (2 << 20, "kernel")
        assert f.read(buffer, nbytes=2 << 20, cache="avoid").evidence == "kernel"
    assert not quick[-1]
