"""Reads into memory that nobody has touched: divided without a gap, and the caller's thread is free meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.clock import THREADS
from nobounce.errors import TransferError
from nobounce.formats import fresh
from nobounce.formats.fresh import read_fresh
from nobounce.formats.populate import Populate, populate_ahead
from nobounce.io import strategy
from nobounce.runtimes import faults, libc, rawio

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    with made.open("wb") as f:
        f.write(os.urandom(41 * MIB + 1000))
        os.fsync(f.fileno())
    return made


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("require", ["auto", "fastpath", "fallback"])
@pytest.mark.parametrize("chunk", [MIB, 8 * MIB, 64 * MIB])
def test_every_byte_comes_once(path: Path, device: str, require: Any, chunk: int) -> None:
    data = path.read_bytes()
    drop(path)
    config.override(config.Settings(chunk_nbytes=chunk))
    with nobounce.open(path) as f, nobounce.Device(device).allocate(41 * MIB + 4096) as buffer:
        where = 41 * MIB + 4096, 0, 0
        receipt = read_fresh(f, buffer, where, require, "auto", meanwhile=lambda: None)
        assert receipt.nbytes == len(data)
        assert sum(s.nbytes for s in receipt.segments) == len(data)
        raw = nobounce.Tensor(buffer, (len(data),), "U8").tobytes()
        assert raw == data


def test_the_end_is_cut_fine_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    honest = rawio.read_plain

    def watched(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
        asked.append((offset, nbytes))
        return honest(fd, address, nbytes, offset, flags)

    monkeypatch.setattr(rawio, "read_plain", watched)
    config.override(config.Settings(io_threads=2, chunk_nbytes=8 * MIB))
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(40 * MIB) as buffer:
        read_fresh(f, buffer, (40 * MIB, 0, 0), "fastpath", "auto", meanwhile=lambda: None)
    asked.sort()
    assert asked[:4] == [(n * 8 * MIB, 8 * MIB) for n in range(4)]
    assert asked[4:] == [(n * strategy.TAIL_NBYTES, strategy.TAIL_NBYTES) for n in range(8, 10)]


def test_direct_reads_are_larger_where_the_settings_leave_it_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    honest = rawio.read_plain

    def watched(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
        asked.append((offset, nbytes))
        return honest(fd, address, nbytes, offset, flags)

    monkeypatch.setattr(rawio, "read_plain", watched)
    monkeypatch.setattr(strategy, "FRESH_DIRECT_WIDTH", 2)
    monkeypatch.setattr(strategy, "default_width", lambda *_: 2)
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(40 * MIB) as buffer:
        read_fresh(f, buffer, (40 * MIB, 0, 0), "fastpath", "auto", meanwhile=lambda: None)
    asked.sort()
    assert asked == [(0, 16 * MIB), (16 * MIB, 16 * MIB), (32 * MIB, 4 * MIB), (36 * MIB, 4 * MIB)]


def test_the_callers_thread_works_while_the_bytes_move(path: Path) -> None:
    """The transfer cannot end before `meanwhile` has run: each waits for the other."""
    moving, done = threading.Event(), threading.Event()

    def progress(backend: str, nbytes: int) -> None:
        moving.set()
        assert done.wait(30)

    def meanwhile() -> None:
        assert moving.wait(30)
        done.set()

    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(40 * MIB) as buffer:
        where = 40 * MIB, 0, 0
        receipt = read_fresh(f, buffer, where, "auto", "auto", meanwhile=meanwhile, progress=progress)
    assert receipt.nbytes == 40 * MIB


def test_what_goes_wrong_meanwhile_is_raised_when_nobody_works_any_more(path: Path) -> None:
    def meanwhile() -> None:
        raise KeyboardInterrupt

    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(40 * MIB) as buffer:
        with pytest.raises(KeyboardInterrupt):
            read_fresh(f, buffer, (40 * MIB, 0, 0), "auto", "auto", meanwhile=meanwhile)
        buffer.close()  # BusyError if a transfer used it


def test_an_error_of_the_transfer_waits_for_the_caller(path: Path) -> None:
    ran: list[int] = []
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(40 * MIB) as buffer:
        with faults.inject(op="pread", error=5, times=1), pytest.raises(TransferError):
            read_fresh(f, buffer, (40 * MIB, 0, 0), "fallback", "auto", meanwhile=lambda: ran.append(1))
        buffer.close()
    assert ran == [1]


def test_fresh_memory_read_from_the_page_cache_is_touched_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.read_bytes()
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(libc, "populate", lambda address, nbytes: touched.append((address, nbytes)))
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(40 * MIB) as buffer:
        base = buffer.handle
        read_fresh(f, buffer, (40 * MIB, 0, 0), "auto", "auto", meanwhile=lambda: None)
        assert sum(n for _, n in touched) == 40 * MIB
        assert {(a - base) % (2 * MIB) for a, _ in touched} == {0}
        touched.clear()
        f.read(buffer, nbytes=40 * MIB, cache="use")  # memory that was used before is not touched again
    assert touched == []


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("lead", [0, 4096, 3 * 4096 + 5])
def test_populating_makes_pages_and_keeps_what_they_hold(
    many: bool, lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not many:  # a kernel without process_madvise on oneself
        monkeypatch.setattr(libc, "_syscall", lambda *_: -1)
    nbytes = 9 * libc.HUGE_PAGE + 12288
    base = libc.map_huge(nbytes)
    try:
        kept = range(0, nbytes, 1 << 20)
        for at in kept:
            libc.memset(base + at, 1 + at % 251, 1)
        libc.populate(base + lead, nbytes - lead)
        assert _resident(base, nbytes) == nbytes
        assert all(_byte(base + at) == 1 + at % 251 for at in kept)
    finally:
        libc.unmap(base, nbytes)


def _byte(address: int) -> int:
    import ctypes

    return ctypes.c_ubyte.from_address(address).value


def _resident(base: int, nbytes: int) -> int:
    """Bytes of the mapping that are in memory, by /proc/self/smaps."""
    found, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(n, 16) for n in first.split("-"))
                inside = start >= base and end <= base + nbytes
            elif inside and first == "Rss:":
                found += int(line.split()[1]) << 10
    return found


def test_populating_stops_before_the_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` waits for the step under way, and none begins after it."""
    begun, go_on, steps = threading.Event(), threading.Event(), []

    def slow(address: int, nbytes: int) -> None:
        steps.append(address)
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(libc, "populate", slow)
    with nobounce.Device("cpu").allocate(200 * MIB) as buffer:
        ahead = populate_ahead(buffer)
        assert isinstance(ahead, Populate)
        working = threading.Thread(target=ahead.work)
        working.start()
        assert begun.wait(30)
        stopping = threading.Thread(target=ahead.stop)
        stopping.start()
        while not ahead._stopped:
            pass
        assert stopping.is_alive()
        go_on.set()
        stopping.join(30)
        working.join(30)
    assert len(steps) == 1


def test_only_memory_that_the_host_reaches_is_populated() -> None:
    with nobounce.Device("sim:0").allocate(100 * MIB) as far, nobounce.Device("cpu").allocate(MIB) as small:
        assert populate_ahead(far) is None
        assert populate_ahead(small) is None


@pytest.mark.parametrize(
    ("device", "nbytes", "require", "cache", "chosen", "started"),
    [
        ("cpu", 1 << 30, "auto", "auto", {}, [strategy.FRESH_DIRECT_WIDTH + 1]),
        ("cpu", 1 << 30, "fastpath", "avoid", {"io_threads": 2}, [3]),
        ("cpu", 2 * strategy.TAIL_NBYTES, "auto", "auto", {"io_threads": 64}, [3]),
        ("cpu", 1 << 30, "fallback", "auto", {}, []),
        ("cpu", 1 << 30, "auto", "use", {}, []),
        ("cpu", 1 << 30, "auto", "auto", {"force_compat_mode": True}, []),
        ("sim:0", 1 << 30, "auto", "auto", {}, []),
    ],
)
def test_threads_are_started_ahead_for_reads_that_will_go_direct_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    nbytes: int,
    require: Any,
    cache: Any,
    chosen: dict[str, Any],
    started: list[int],
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fresh, "engine_for", lambda _: SimpleNamespace(start_threads=asked.append))
    config.override(config.Settings(**chosen))
    fresh.get_ready(nobounce.Device(device)._runtime, nbytes, require, cache)
    assert asked == started


@pytest.mark.parametrize(
    ("device", "nbytes", "waits"),
    [("sim:0", 8 * MIB, True), ("sim:0", 2 * MIB, False), ("cpu", 8 * MIB, False)],
)
def test_a_large_relay_has_a_head_start_on_what_is_made_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, nbytes: int, waits: bool
) -> None:
    need("io_uring")
    path = tmp_path / "x"
    path.write_bytes(os.urandom(nbytes))
    monkeypatch.setattr(fresh, "HEAD_START_NBYTES", 4 * MIB)
    config.override(config.Settings(relay="io_uring"))
    order: list[str] = []
    plain = THREADS.sleep

    def sleep(seconds: float) -> None:
        if seconds == fresh.HEAD_START:
            order.append("slept")
        plain(seconds)

    monkeypatch.setattr(THREADS, "sleep", sleep)
    with nobounce.open(path) as f, nobounce.Device(device).allocate(nbytes) as buffer:
        fresh.read_fresh(f, buffer, (nbytes, 0, 0), "auto", "use", meanwhile=lambda: order.append("made"))
        assert buffer.numpy().tobytes() == path.read_bytes()
    assert order == (["slept", "made"] if waits else ["made"])
