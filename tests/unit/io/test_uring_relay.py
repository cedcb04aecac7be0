"""The relay whose reads io_uring's workers do, into sim's device memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.capabilities import need

import nobounce
from nobounce import config
from nobounce.errors import DeviceError, RuntimeStatus, TransferError
from nobounce.io import bounce, engine, uring, uring_relay
from nobounce.testing import faults

MIB = 1 << 20
NBYTES = 37 * MIB + 4321


@pytest.fixture(autouse=True)
def kernel() -> Iterator[list[uring_relay.UringRelay]]:
    """io_uring is asked for; the relays made, so that a test can see that they were used."""
    need("io_uring")
    config.override(config.Settings(relay="io_uring"))
    made: list[uring_relay.UringRelay] = []
    plain = uring_relay.UringRelay.__init__

    def noted(self: uring_relay.UringRelay, *more: Any) -> None:
        made.append(self)
        plain(self, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uring_relay.UringRelay, "__init__", noted)
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


def ring_of(device: nobounce.Device) -> bounce.Ring:
    return engine.engine_for(device._runtime).rings.get(device._runtime, device.ordinal)


def read(path: Path, nbytes: int | None = None, **more: Any) -> tuple[nobounce.Receipt, bytes]:
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(nbytes or f.nbytes) as buffer:
        receipt = f.read(buffer, **more)
        return receipt, buffer.numpy().tobytes()[: receipt.nbytes]


def whole(device: str = "sim:0") -> None:
    """Every slot and copy stream is back in the ring, and no read is under way."""
    ring = ring_of(nobounce.Device(device))
    assert len(ring._free) == ring._made
    assert len(ring._streams) == ring._streams_made
    assert all(k.in_flight == 0 for k in uring_relay._idle)


@pytest.mark.parametrize("cache", ["use", "avoid"])
@pytest.mark.parametrize(
    ("file_offset", "nbytes"), [(0, NBYTES), (4096, 30 * MIB), (4099, 20 * MIB + 17), (3 * MIB - 1, 5)]
)
def test_every_byte_arrives_in_its_place(
    path: Path, kernel: list[Any], cache: str, file_offset: int, nbytes: int
) -> None:
    receipt, data = read(path, nbytes, require="fallback", cache=cache, file_offset=file_offset)
    assert data == path.read_bytes()[file_offset : file_offset + nbytes]
    assert receipt.nbytes == receipt.fallback_bytes == nbytes
    assert receipt.host_traffic_bytes == 2 * nbytes
    assert kernel
    whole()


@pytest.mark.parametrize("cache", ["use", "avoid"])
def test_a_read_past_the_end_comes_back_short(path: Path, cache: str) -> None:
    receipt, data = read(path, NBYTES + 9 * MIB, require="fallback", cache=cache)
    assert receipt.nbytes == NBYTES
    assert data == path.read_bytes()
    whole()


def test_the_stream_s_share_bounds_the_slots_held(path: Path, kernel: list[Any]) -> None:
    config.override(config.Settings(relay="io_uring", async_buffer_nbytes=2 * bounce.SLOT_NBYTES))
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer, device.create_stream() as stream:
        f.read_async(buffer, stream=stream, require="fallback").result()
        assert buffer.numpy().tobytes() == path.read_bytes()
    assert [k._target.kernel_slots for k in kernel] == [2]
    whole()


def spoiled(monkeypatch: pytest.MonkeyPatch, result: int) -> None:
    """The third completion of each batch of them says `result`."""
    plain = uring.Ring.take

    def take(self: uring.Ring) -> Any:
        ends = plain(self)
        if len(ends):
            ends["result"][len(ends) // 2] = result
        return ends

    monkeypatch.setattr(uring.Ring, "take", take)


@pytest.mark.parametrize("result", [-errno.EINTR, -errno.EAGAIN, -errno.EOPNOTSUPP, 1000, 0])
def test_what_the_kernel_brings_short_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    spoiled(monkeypatch, result)
    receipt, data = read(path, require="fallback", cache="use")
    assert data == path.read_bytes()
    assert receipt.nbytes == NBYTES
    whole()


def test_an_error_that_stays_names_its_place_and_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, -errno.EIO)
    at = 10 * MIB

    def broken(self: Any, slot: int, file_offset: int, nbytes: int, lead: int, **_: Any) -> Any:
        return (0, False, OSError(errno.EIO, "broken")) if file_offset >= at else (nbytes, False, None)

    monkeypatch.setattr(uring_relay.UringRelay, "_fill", broken)
    with pytest.raises(TransferError) as caught:
        read(path, require="fallback", cache="use")
    assert caught.value.errno == errno.EIO
    assert caught.value.file_offset >= at
    assert caught.value.receipt is not None
    assert caught.value.receipt.nbytes <= caught.value.file_offset
    whole()
    monkeypatch.undo()
    assert read(path, require="fallback")[1] == path.read_bytes()


def test_a_copy_that_fails_ends_the_transfer_and_gives_every_slot_back(path: Path) -> None:
    config.override(config.Settings(relay="io_uring"))
    device = nobounce.Device("sim:0")
    runtime = device._runtime
    plain, calls = runtime.copy_async, 0

    def failing(*a: Any, **k: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DeviceError("copy_async", RuntimeStatus.Unknown)
        plain(*a, **k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "copy_async", failing)
        with pytest.raises(TransferError, match="copy_async"):
            read(path, require="fallback", cache="use")
    whole()


def test_without_a_ring_of_its_own_the_plain_relay_does_it(
    path: Path, kernel: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, "no descriptor left")

    uring_relay._forget()
    monkeypatch.setattr(uring.Ring, "__init__", full)
    assert read(path, require="fallback", cache="use")[1] == path.read_bytes()
    assert not kernel
    whole()


def test_faults_of_pread_are_met_so_the_kernel_does_not_read_past_them(path: Path, kernel: list[Any]) -> None:
    with faults.inject(op="pread", error=errno.EIO, times=1), pytest.raises(TransferError):
        read(path, require="fallback", cache="use")
    assert not kernel


def test_many_streams_share_the_ring(path: Path) -> None:
    device = nobounce.Device("sim:0")
    streams = [device.create_stream() for _ in range(10)]
    buffers = [device.allocate(NBYTES) for _ in streams]
    with nobounce.open(path) as f:
        moves = [
            f.read_async(b, stream=s, require="fallback", cache="use")
            for b, s in zip(buffers, streams, strict=True)
        ]
        for move in moves:
            assert move.result().nbytes == NBYTES
    content = path.read_bytes()
    assert all(b.numpy().tobytes() == content for b in buffers)
    whole()
    for thing in (*buffers, *streams):
        thing.close()
