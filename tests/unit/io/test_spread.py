"""Page-cached reads that their caller spreads over polling threads of the kernel, into sim's device memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.facts.pagecache import drop
from nobounce.io import oncaller
from nobounce.io.engine import engine_for
from nobounce.io.movers import pollers, spread
from nobounce.io.movers.bounce import Ring
from nobounce.io.strategy import Machine, spreading

MIB = 1 << 20
NBYTES = 40 * MIB + 12345
DATA = np.random.default_rng(9).integers(0, 256, NBYTES, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "data.bin"
    path.write_bytes(DATA.tobytes())
    return path


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Polling threads are asked for, and every read counts as one of many; the sizes of those that were spread."""
    need("io_uring")
    config.override(config.Settings(relay="polled"))
    monkeypatch.setattr(pollers, "follows", lambda now: True)
    seen: list[int] = []
    plain = spread.spread

    def noted(what: spread.Range, *rest: Any) -> bool:
        seen.append(what.nbytes)
        return plain(what, *rest)

    monkeypatch.setattr(spread, "spread", noted)
    yield seen
    config.override(None)


@pytest.fixture
def device() -> nobounce.Device:
    return nobounce.Device("sim:0")


def known(f: nobounce.File, buffer: nobounce.Buffer) -> None:
    """Have the file in the page cache and its way known: a first read is judged in full."""
    Path(f.name).read_bytes()
    f.read(buffer, nbytes=4096)


def nothing_lost(device: nobounce.Device) -> bool:
    """Whether all slots, copy streams and rings of the kernel have come back; another thread may be about to give some."""
    ring, until = engine_for(device._runtime).rings.get(device._runtime, 0), time.monotonic() + 10
    while time.monotonic() < until:
        slots, streams = ring._made == len(ring._free), ring._streams_made == len(ring._streams)
        if slots and streams and len(pollers._pool.made) == len(pollers._pool.free):
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize(
    ("file_offset", "nbytes", "buffer_offset"),
    [
        (0, MIB, 0),
        (4096, MIB, 4096),
        (13, MIB + 777, 1),
        (12345, 17 * MIB + 5, 3),
        (0, NBYTES, 0),
        (NBYTES - 5 * MIB, 5 * MIB, 77),
    ],
)
def test_every_byte_lands_where_it_belongs(
    path: Path, device: nobounce.Device, asked: list[int], file_offset: int, nbytes: int, buffer_offset: int
) -> None:
    with nobounce.open(path) as f, device.allocate(nbytes + buffer_offset + 100) as buffer:
        buffer.fill(0x5A, stream=None)
        known(f, buffer)
        buffer.fill(0x5A, stream=None)
        receipt = f.read(buffer, nbytes=nbytes, file_offset=file_offset, buffer_offset=buffer_offset)
        got = buffer.numpy()
    assert asked == [nbytes]
    assert receipt.nbytes == nbytes
    assert receipt.reasons == {"cached": nbytes}
    assert receipt.host_traffic_bytes == 2 * nbytes
    assert (got[buffer_offset : buffer_offset + nbytes] == DATA[file_offset : file_offset + nbytes]).all()
    assert (np.delete(got, slice(buffer_offset, buffer_offset + nbytes)) == 0x5A).all()


@pytest.mark.parametrize("slots", [2, 3, 7])
def test_more_than_the_slots_hold_goes_through_them_in_turns(
    path: Path, device: nobounce.Device, asked: list[int], monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    monkeypatch.setattr(spread, "MOST_SLOTS", slots)
    monkeypatch.setattr(spread, "FEW_SLOTS", 2)
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        known(f, buffer)
        assert f.read(buffer).nbytes == NBYTES
        assert (buffer.numpy() == DATA).all()
    assert asked == [NBYTES]


def test_what_ends_with_the_file_is_read_in_full_by_the_whole_way(
    path: Path, device: nobounce.Device, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was cut short only after it was looked at."""
    monkeypatch.setattr(oncaller, "seems_held", lambda *_: True)
    with nobounce.open(path) as f, device.allocate(8 * MIB) as buffer:
        known(f, buffer)
        receipt = f.read(buffer, file_offset=NBYTES - 6 * MIB)
        assert asked == [8 * MIB]
        assert receipt.nbytes == 6 * MIB
        assert (buffer.numpy()[: 6 * MIB] == DATA[NBYTES - 6 * MIB :]).all()
    assert nothing_lost(device)


def test_what_the_page_cache_does_not_hold_is_not_spread(
    path: Path, device: nobounce.Device, asked: list[int]
) -> None:
    with nobounce.open(path) as f, device.allocate(8 * MIB) as buffer:
        os.fdatasync(f.fileno())
        known(f, buffer)
        drop(f.fileno())
        f.read(buffer)
        assert (buffer.numpy() == DATA[: 8 * MIB]).all()
    assert not asked


def test_a_copy_that_fails_is_an_error_and_gives_everything_back(
    path: Path, device: nobounce.Device, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way tries again, and says what it finds."""
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        known(f, buffer)
        f.read(buffer)
        plain = spread._Pieces.has_read

        def broken(self: Any, *given: Any) -> bool:
            plain(self, *given)
            raise DeviceError("copy", RuntimeStatus.InvalidValue)

        monkeypatch.setattr(spread._Pieces, "has_read", broken)
        assert f.read(buffer).nbytes == NBYTES
        assert nothing_lost(device)
        assert (buffer.numpy() == DATA).all()


@pytest.mark.parametrize("where", ["begin", "_ask", "has_read"])
def test_an_interrupt_leaves_nothing_behind(
    path: Path, device: nobounce.Device, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        known(f, buffer)
        f.read(buffer)
        plain, calls = getattr(spread._Pieces, where), []

        def interrupted(self: Any, *given: Any) -> Any:
            found = plain(self, *given)
            calls.append(None)
            if len(calls) == (1 if where == "begin" else 2):
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(spread._Pieces, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                f.read(buffer)
        assert nothing_lost(device)
        f.read(buffer)
        assert (buffer.numpy() == DATA).all()


def test_no_slot_goes_back_while_the_kernel_may_write_into_it(
    path: Path, device: nobounce.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        known(f, buffer)
        rings: list[Any] = []
        under_way: list[int] = []
        begin, release = spread._Pieces.begin, Ring.release

        def interrupted(self: spread._Pieces) -> None:
            begin(self)
            rings.extend(self._rings)
            raise KeyboardInterrupt

        def noted(self: Ring, slot: tuple[int, int]) -> None:
            under_way.append(sum(ring.in_flight for ring in rings))
            release(self, slot)

        with monkeypatch.context() as patch:
            patch.setattr(spread._Pieces, "begin", interrupted)
            patch.setattr(Ring, "release", noted)
            with pytest.raises(KeyboardInterrupt):
                f.read(buffer)
        assert under_way
        assert not any(under_way)


def test_an_interrupt_while_everything_is_given_back_comes_after_that(
    path: Path, device: nobounce.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        known(f, buffer)
        f.read(buffer)
        plain, calls = spread.Lease._close, []

        def interrupted(self: Any) -> None:
            calls.append(None)
            if len(calls) == 1:
                raise KeyboardInterrupt
            plain(self)

        monkeypatch.setattr(spread.Lease, "_close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f.read(buffer)
        assert nothing_lost(device)


TIMES = ("seconds", "queued_seconds", "bytes_per_second_of_operation", "latency", "microseconds")


def counted(found: Any) -> Any:
    """Statistics without what is a time, or depends on who was there first."""
    if isinstance(found, dict):
        return {k: counted(v) for k, v in found.items() if k not in (*TIMES, "bounce_pinned_bytes")}
    return [counted(v) for v in found] if isinstance(found, list) else found


def test_it_is_counted_and_told_as_the_whole_way_is(
    path: Path, device: nobounce.Device, asked: list[int]
) -> None:
    def added() -> Any:
        before = nobounce.stats()
        told = [f.read(buffer, nbytes=n * MIB, file_offset=4096).to_dict() for n in (1, 5, 17)]
        for one in told:
            for name in ("queued_at", "started_at", "ended_at", "seconds", "gib_per_second", "segments"):
                one.pop(name, None)
        return counted((nobounce.stats() - before).to_dict()), told

    with nobounce.open(path) as f, device.allocate(20 * MIB) as buffer:
        known(f, buffer)
        spread_out = added()
        assert asked == [MIB, 5 * MIB, 17 * MIB]
        config.override(config.Settings(relay="threads"))
        f.read(buffer, nbytes=4096)
        assert added() == spread_out
    assert len(asked) == 3


def test_threads_share_the_kernels_threads(path: Path, device: nobounce.Device) -> None:
    """Who finds none left goes another way."""
    wrong: list[Any] = []

    def work(n: int) -> None:
        with nobounce.open(path) as f, device.allocate(6 * MIB) as buffer:
            known(f, buffer)
            for k in range(6):
                at = (n * 7 + k) * MIB + n
                f.read(buffer, file_offset=at)
                if not (buffer.numpy() == DATA[at : at + 6 * MIB]).all():
                    wrong.append((n, k))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(pollers._pool.free) == len(pollers._pool.made)


def test_a_forked_child_has_rings_of_its_own(path: Path, device: nobounce.Device) -> None:
    with nobounce.open(path) as f, device.allocate(MIB) as buffer:
        known(f, buffer)
        f.read(buffer)
        assert pollers._pool.free
        if (child := os.fork()) == 0:
            os._exit(0 if not pollers._pool.made and pollers.polled(1, 1) is not None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        f.read(buffer, file_offset=MIB)
        assert (buffer.numpy() == DATA[MIB : 2 * MIB]).all()


@pytest.mark.parametrize(
    ("cores", "nbytes", "count", "streak", "threads"),
    [
        (2, 1 << 30, 0, True, 0),  # few cores: each polling one would be taken from the rest
        (16, 256 << 10, 0, True, 0),
        (16, 512 << 10, 0, True, 2),
        (16, MIB, 0, True, 4),
        (16, 8 * MIB, 0, False, 4),  # alone: few
        (16, 8 * MIB, 0, True, 12),
        (16, 64 * MIB, 0, False, 12),
        (16, 16 * MIB, 4096, False, 12),
        (8, 1 << 30, 0, False, 6),
    ],
)
def test_how_many_poll_for_a_read(cores: int, nbytes: int, count: int, streak: bool, threads: int) -> None:
    asked = config.Settings()
    assert spreading(asked, Machine(cores, True), nbytes, count, streak=streak) == threads
    assert spreading(asked, Machine(cores, False), nbytes, count, streak=streak) == 0
    for other in (config.Settings(relay="threads"), config.Settings(io_threads=3)):
        assert spreading(other, Machine(cores, True), nbytes, count, streak=streak) == 0
