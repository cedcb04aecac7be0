"""The relay through the bounce ring where it is interrupted: every slot and stream goes back, and only when nothing uses it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nobounce
from nobounce import config
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.io import engine, prepare
from nobounce.io.engine import Engine
from nobounce.io.job import Job
from nobounce.io.movers.bounce import Ring
from nobounce.io.prepare import transfer
from nobounce.io.transfer import Transfer
from nobounce.runtimes import rawio

SLOT = 16 << 10
NBYTES = 4 * SLOT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """One of small slots, for a device that one thread, the caller's, reads into."""
    config.override(config.Settings(relay="threads", stats_level=0))
    runtime = nobounce.Device("sim:0")._runtime
    made = Ring(runtime, 0, slot_nbytes=SLOT)
    monkeypatch.setattr(engine.Rings, "get", lambda *_: made)
    yield made
    for address, event in made._free:
        runtime.free_pinned(address)
        runtime.event_destroy(event)
    for stream in made._streams:
        runtime.stream_destroy(stream)


def out(ring: Ring) -> tuple[int, int]:
    """Slots and streams that somebody has."""
    return ring._made - len(ring._free), ring._streams_made - len(ring._streams)


def on_this_thread(file: nobounce.File, op: Any, buffer: nobounce.Buffer) -> None:
    """As where no other thread can be started."""

    def here(_: Engine, job: Job) -> None:
        job.begin()
        job.work()

    transfer(file, op, buffer, (None, 0, 0), "auto", "use", run=here)


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_interrupt_of_the_call_of_the_file_gives_the_slot_back(
    path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Else so many Ctrl-Cs as the ring has slots would end all transfers to the device."""

    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(rawio, "pread_into" if op == "read" else "pwrite_from", interrupted)
    device = nobounce.Device("sim:0")
    with nobounce.open(path, "r+") as f, device.allocate(NBYTES) as b, pytest.raises(KeyboardInterrupt):
        on_this_thread(f, op, b)
    assert ring._made > 0
    assert out(ring) == (0, 0)


def test_an_interrupt_of_the_wait_for_a_copy_gives_every_slot_back_when_its_copy_is_done(
    path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = nobounce.Device("sim:0")._runtime
    plain_wait, plain_release = runtime.stream_sync, ring.release
    told: list[str] = []

    def interrupted(event: int) -> None:
        told.append("interrupt")
        raise KeyboardInterrupt

    def waited(stream: int) -> None:
        told.append("wait")
        plain_wait(stream)

    def released(slot: tuple[int, int]) -> None:
        told.append("release")
        plain_release(slot)

    monkeypatch.setattr(runtime, "event_sync", interrupted)
    monkeypatch.setattr(runtime, "stream_sync", waited)
    monkeypatch.setattr(ring, "release", released)
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(NBYTES) as b, pytest.raises(KeyboardInterrupt):
        on_this_thread(f, "read", b)
    assert ring._made > 0
    assert out(ring) == (0, 0)
    assert told == ["interrupt", "wait", "release"] * 2


def test_the_slot_of_a_copy_that_no_event_tells_of_goes_back_when_it_is_done(
    path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = nobounce.Device("sim:0")._runtime
    plain_wait, plain_release = runtime.stream_sync, ring.release
    told: list[str] = []

    def unrecorded(event: int, stream: int) -> None:
        told.append("copied")
        raise DeviceError("event_record", RuntimeStatus.Unknown)

    def waited(stream: int) -> None:
        told.append("wait")
        plain_wait(stream)

    def released(slot: tuple[int, int]) -> None:
        told.append("release")
        plain_release(slot)

    monkeypatch.setattr(runtime, "event_record", unrecorded)
    monkeypatch.setattr(runtime, "stream_sync", waited)
    monkeypatch.setattr(ring, "release", released)
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(NBYTES) as b, pytest.raises(nobounce.TransferError):
        f.read(b, cache="use")
    assert out(ring) == (0, 0)
    assert told[told.index("copied") :][:3] == ["copied", "wait", "release"]


def test_what_progress_raises_is_the_error_of_the_transfer_and_ends_no_thread_of_the_pool(
    path: Path, ring: Ring
) -> None:
    config.override(config.Settings(relay="threads", stats_level=0, chunk_nbytes=SLOT))
    device = nobounce.Device("sim:0")
    ended: list[threading.ExceptHookArgs] = []

    def broken(backend: str, nbytes: int) -> None:
        raise LookupError("no such bar")

    hook, threading.excepthook = threading.excepthook, ended.append
    try:
        with nobounce.open(path) as f, device.allocate(NBYTES) as b:
            for _ in range(3):
                with pytest.raises(LookupError, match="no such bar"):
                    prepare.transfer(f, "read", b, (None, 0, 0), "fallback", "use", progress=broken)
    finally:
        threading.excepthook = hook
    assert not ended
    assert out(ring) == (0, 0)


def test_a_transfer_whose_end_cannot_be_reported_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def release() -> None:
        raise OSError("the file would not close")

    told: list[Transfer] = []
    move = Transfer(
        engine.engine_for(nobounce.Device("sim:0")._runtime), lambda _: pytest.fail("begun"), release
    )
    move.add_done_callback(told.append)
    assert move.cancel()
    assert told == [move]
    assert "the file would not close" in caplog.text
