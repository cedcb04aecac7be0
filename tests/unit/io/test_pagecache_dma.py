"""Reading page-cached bytes without a relay, on sim (which registers file pages as a GPU does)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from threading import get_ident

import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus, TransferError
from nobounce.io import strategy
from nobounce.io.engine import engine_for
from nobounce.io.movers import fallback, pagecache_dma
from nobounce.io.movers.bounce import Ring
from nobounce.io.quiet import closed_gate, quiet_of
from nobounce.io.target import Piece
from nobounce.runtimes.base import Gate

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(150 * MIB + 777))
    made.read_bytes()
    return made


@pytest.fixture(autouse=True)
def _dma(monkeypatch: pytest.MonkeyPatch) -> None:
    config.override(config.Settings(page_cache_dma="1"))
    monkeypatch.setattr(pagecache_dma, "IDLE_SECONDS", 0.05)


def read(path: Path, **more: object) -> tuple[nobounce.Receipt, bytes]:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(f.nbytes + MIB) as buffer:
        receipt = f.read(buffer, **more)  # type: ignore[arg-type]
        return receipt, buffer.numpy().tobytes()[: receipt.nbytes]


def settled() -> int:
    """Bytes still pinned once the pool has given back what it holds."""
    for _ in range(500):
        if pagecache_dma._pinned == 0:
            break
        time.sleep(0.01)
    return pagecache_dma._pinned


@pytest.mark.parametrize(
    "where", [{}, {"file_offset": 4096 + 100}, {"nbytes": 70 * MIB, "file_offset": 5 * MIB}]
)
def test_cached_bytes_arrive_without_a_relay_and_are_never_called_fastpath(
    path: Path, where: dict[str, int]
) -> None:
    receipt, data = read(path, cache="use", **where)
    start = where.get("file_offset", 0)
    assert data == path.read_bytes()[start : start + where.get("nbytes", 1 << 40)]
    assert receipt.fastpath_bytes == 0
    assert receipt.cached_bytes == receipt.nbytes
    assert receipt.host_traffic_bytes < receipt.nbytes  # the DMA worker's part is not relayed
    assert settled() == 0


def test_a_runtime_that_refuses_file_pages_is_relayed_and_not_asked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = nobounce.Device("sim:0")._runtime
    asked = 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        raise DeviceError("register_host", RuntimeStatus.NotSupported)

    monkeypatch.setattr(runtime, "register_host", refuse)
    monkeypatch.setattr(pagecache_dma, "_refused", set())
    for _ in range(2):
        receipt, data = read(path, cache="use")
        assert data == path.read_bytes()
        assert receipt.host_traffic_bytes == 2 * receipt.nbytes
    assert asked == 1
    assert settled() == 0


def test_what_is_pinned_at_once_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache_dma, "MOST_PINNED", 70 * MIB)
    receipt, data = read(path, cache="use")
    assert data == path.read_bytes()
    assert receipt.host_traffic_bytes >= 2 * 60 * MIB
    assert settled() == 0


def test_pages_stay_pinned_while_more_are_being_pinned_and_make_room_when_the_budget_is_spent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagecache_dma, "IDLE_SECONDS", 60.0)
    monkeypatch.setattr(pagecache_dma, "MOST_PINNED", 200 * MIB)
    monkeypatch.setattr(pagecache_dma, "_keeper", keeper := pagecache_dma.Keeper())
    runtime = nobounce.Device("sim:0")._runtime
    plain, freed = runtime.unregister_host, 0

    def counted(address: int) -> None:
        nonlocal freed
        freed += 1
        plain(address)

    monkeypatch.setattr(runtime, "unregister_host", counted)
    for n in range(4):
        receipt, data = read(path, cache="use")
        assert data == path.read_bytes()
        assert receipt.host_traffic_bytes < 2 * receipt.nbytes
        deadline = 500
        while not keeper._held and deadline:  # the pool hands the windows over after the read has returned
            deadline -= 1
            time.sleep(0.01)
        assert keeper._held
        assert (freed > 0) == (n > 0), "the first read's pages stay until the second needs the room"
        assert pagecache_dma._pinned <= 200 * MIB
    keeper._busy_at = 0.0
    with keeper._changed.mutex:
        keeper._changed.notify_all()
    assert settled() == 0


def test_a_registration_that_fails_because_the_file_shrank_is_no_refusal_of_the_runtime(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = nobounce.Device("sim:0")._runtime
    monkeypatch.setattr(pagecache_dma, "_refused", set())

    def shrunk(*_: object, **__: object) -> None:
        os.truncate(path, 10 * MIB)
        raise DeviceError("register_host", RuntimeStatus.InvalidValue)

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "register_host", shrunk)
        assert read(path, cache="use")[0].nbytes == 10 * MIB
    assert not pagecache_dma._refused


def test_C68_a_file_that_shrinks_is_short_and_kills_nobody(path: Path) -> None:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(f.nbytes) as buffer:
        os.truncate(path, 10 * MIB)
        assert f.read(buffer, cache="use").nbytes == 10 * MIB
    assert settled() == 0


def test_cold_ranges_do_not_go_this_way(path: Path) -> None:
    receipt, _ = read(path, require="fallback")
    assert receipt.host_traffic_bytes == 2 * receipt.nbytes


def test_nothing_is_registered_while_a_stream_is_held_at_a_gate(path: Path) -> None:
    """Registering memory waits for the device, and the gate waits for its copies: together they would wait for ever."""
    device = nobounce.Device("sim:0")
    runtime = device._runtime
    quiet = quiet_of(runtime)
    assert quiet is not None
    with device.create_stream() as stream, nobounce.open(path) as f, device.allocate(f.nbytes) as buffer:
        gate = closed_gate(runtime, stream.handle, lambda: None)
        try:
            begun = quiet.try_call()
            receipt = f.read(buffer, cache="use")
        finally:
            gate.open()
            gate.open()
        assert not begun
        stream.sync()
        assert buffer.numpy().tobytes() == path.read_bytes()
        assert receipt.host_traffic_bytes == 2 * receipt.nbytes
    assert quiet.try_call()
    quiet.called()
    receipt, _ = read(path, cache="use")
    assert receipt.host_traffic_bytes < receipt.nbytes
    assert settled() == 0


def test_a_gate_waits_for_the_registration_under_way() -> None:
    """In either order they would wait for one another."""
    device = nobounce.Device("sim:0")
    runtime = device._runtime
    quiet = quiet_of(runtime)
    assert quiet is not None
    with device.create_stream() as stream:
        assert quiet.try_call()
        made: list[Gate] = []
        closing = threading.Thread(
            target=lambda: made.append(closed_gate(runtime, stream.handle, lambda: None)), daemon=True
        )
        closing.start()
        closing.join(0.05)
        early = list(made)
        quiet.called()
        closing.join(10)
        made[0].open()
        assert not early


def test_what_is_to_be_unregistered_waits_for_the_gate(path: Path) -> None:
    device = nobounce.Device("sim:0")
    quiet = quiet_of(device._runtime)
    assert quiet is not None
    with nobounce.open(path) as f, device.allocate(f.nbytes) as buffer, device.create_stream() as stream:
        for _ in range(10):
            f.read(buffer, cache="use")
            assert f.read_async(buffer, stream=stream, nbytes=4096, cache="use").result(30).nbytes == 4096
    assert settled() == 0
    assert quiet._gates == len(quiet._calls) == 0


def test_a_relay_that_fails_at_the_end_leaves_no_window_s_copy_under_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the pages would be unpinned, and the caller's buffer freed, under the device's hands."""
    runtime = nobounce.Device("sim:0")._runtime
    ring = engine_for(runtime).rings.get(runtime, 0)
    plain, sync, synced = fallback.Relay.flush, runtime.stream_sync, []

    def broken(self: fallback.Relay) -> list[Piece]:
        plain(self)
        raise DeviceError("event_sync", RuntimeStatus.Unknown)

    def counted(stream: int) -> None:
        synced.append(stream)
        sync(stream)

    monkeypatch.setattr(fallback.Relay, "flush", broken)
    monkeypatch.setattr(runtime, "stream_sync", counted)
    with pytest.raises(TransferError, match="event_sync"):
        read(path, cache="use")
    assert synced
    assert len(ring._streams) == ring._streams_made
    monkeypatch.undo()
    assert settled() == 0


def test_a_window_that_memory_is_short_for_is_relayed_and_not_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = nobounce.Device("sim:0")._runtime

    def refuse(*_: object, **__: object) -> None:
        raise OutOfMemoryError("no memory to register with")

    monkeypatch.setattr(runtime, "register_host", refuse)
    receipt, data = read(path, cache="use")
    assert data == path.read_bytes()
    assert receipt.host_traffic_bytes == 2 * receipt.nbytes
    assert settled() == 0


def test_a_worker_that_has_a_copy_stream_waits_for_no_second_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold slots: whoever waits for one of these has the stream that it would wait for."""
    config.override(config.Settings(page_cache_dma="1", io_threads=1))
    monkeypatch.setattr("nobounce.io.worker.PAGE_CACHE_WINDOW", 32 * MIB)
    takers: list[int] = []
    take, give = Ring.copy_stream, Ring.return_stream

    def taken(self: Ring) -> int:
        assert get_ident() not in takers
        takers.append(get_ident())
        return take(self)

    def given(self: Ring, stream: int, **where: bool) -> None:
        takers.remove(get_ident())
        give(self, stream)

    monkeypatch.setattr(Ring, "copy_stream", taken)
    monkeypatch.setattr(Ring, "return_stream", given)
    reserve, asked = pagecache_dma._reserve, []

    def every_other(nbytes: int) -> bool:
        asked.append(nbytes)
        return len(asked) % 2 == 0 and reserve(nbytes)

    monkeypatch.setattr(pagecache_dma, "_reserve", every_other)
    monkeypatch.setattr(pagecache_dma._keeper, "make_room", lambda: False)
    for _ in range(20):  # the other worker may be the quicker one and leave it a single window
        receipt, data = read(path, cache="use")
        assert data == path.read_bytes()
        if receipt.host_traffic_bytes < 2 * receipt.nbytes:
            break
    assert receipt.nbytes < receipt.host_traffic_bytes < 2 * receipt.nbytes, "both ways were taken"
    assert not takers
    assert settled() == 0


@pytest.mark.parametrize(("workers", "slots"), [("1", 4), ("2", 4), ("2", 0), ("1", 0)])
def test_several_workers_may_pin_pages_and_do_without_a_relay(
    path: Path, monkeypatch: pytest.MonkeyPatch, workers: str, slots: int
) -> None:
    need("io_uring")
    monkeypatch.setattr(strategy, "BESIDE_SLOTS", slots)
    config.override(config.Settings(page_cache_dma=workers, relay="io_uring"))
    receipt, data = read(path, cache="use")
    assert data == path.read_bytes()
    if not slots:
        assert receipt.host_traffic_bytes == 0
    assert settled() == 0
