"""nobounce.trim: what is kept for the next transfer goes back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import nobounce
from nobounce import config
from nobounce.io.engine import engine_for
from nobounce.io.movers import gather, pollers, relay_pipe

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * (32 << 10))
    return path


def test_pinned_memory_goes_back_and_the_next_read_pins_anew(path: Path) -> None:
    device = nobounce.Device("sim:0")
    ring = engine_for(device._runtime).rings.get(device._runtime, 0)
    nobounce.trim()
    with nobounce.open(path) as f, device.allocate(8 * MIB) as buffer:
        for _ in range(2):
            f.read(buffer, require="fallback")
            pinned = nobounce.stats().counters["bounce_pinned_bytes"]
            held = ring.pinned_nbytes
            assert held > 0
            assert nobounce.trim() == held
            assert ring.pinned_nbytes == 0
            assert nobounce.stats().counters["bounce_pinned_bytes"] == pinned - held
            assert buffer.numpy().tobytes() == path.read_bytes()
    assert nobounce.trim() == 0


def test_the_kernel_s_rings_and_threads_go_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.override(config.Settings(relay="polled"))
    monkeypatch.setattr(pollers, "follows", lambda now: True)
    try:
        with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(8 * MIB) as buffer:
            f.read(buffer, nbytes=4096)
            f.read(buffer)
            f.read_many(buffer, file_offsets=range(0, MIB, 8192), nbytes=4096, cache="use")
            nobounce.trim()
            assert not pollers._pool.free
            assert not pollers._pool.made
            assert not gather._kept
            assert not relay_pipe._idle
            f.read(buffer)
            assert buffer.numpy().tobytes() == path.read_bytes()
    finally:
        config.override(None)


def test_nothing_is_unpinned_while_a_transfer_is_held_or_at_work(path: Path) -> None:
    device, go = nobounce.Device("sim:0"), threading.Event()
    with nobounce.open(path) as f, device.allocate(8 * MIB) as buffer, device.create_stream() as stream:
        device._runtime.host_call(stream.handle, lambda: go.wait(30) and None)
        transfer = f.read_async(buffer, stream=stream, require="fallback")
        nobounce.trim()
        go.set()
        assert transfer.result(30).nbytes == 8 * MIB
        assert buffer.numpy().tobytes() == path.read_bytes()
