"""The relay whose reads io_uring's workers do, into sim's device memory."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce import config
from nobounce.clock import THREADS
from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus, TransferError
from nobounce.io import engine, hooks
from nobounce.io.engine import Engine
from nobounce.io.job import Job
from nobounce.io.movers import bounce, fallback, relay_pipe, relay_slots, uring, uring_relay
from nobounce.io.prepare import transfer
from nobounce.testing import faults

MIB = 1 << 20
PATIENCE = 30.0
NBYTES = 37 * MIB + 4321


@pytest.fixture(autouse=True)
def kernel() -> Iterator[list[uring_relay.UringRelay]]:
    """io_uring is asked for; the relays made, so that a test can see that they were used."""
    need("io_uring")
    config.override(config.Settings(relay="io_uring"))
    made: list[uring_relay.UringRelay] = []
    plain = uring_relay.UringRelay.__init__

    def noted(self: uring_relay.UringRelay, *more: Any) -> None:
        plain(self, *more)
        made.append(self)

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
    assert all(k.in_flight == 0 for k in relay_pipe._idle)


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
    assert [k._target.strategy.kernel_slots for k in kernel] == [2]
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

    relay_pipe._forget()
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


@pytest.mark.parametrize("relay", ["io_uring", "threads"])
def test_a_slot_is_free_only_when_the_copy_before_a_failure_has_ended(
    path: Path, kernel: list[Any], monkeypatch: pytest.MonkeyPatch, relay: Any
) -> None:
    """A copy is queued, its event is refused: who has the slot next must not write into what is still being copied."""
    config.override(config.Settings(relay=relay, io_threads=1))
    device = nobounce.Device("sim:0")
    runtime, ring = device._runtime, ring_of(device)
    copied, seen = threading.Event(), []
    copy, sync, record = runtime.copy_async, runtime.stream_sync, runtime.event_record
    release = ring.release

    def held(dst: int, src: int, nbytes: int, stream: int, *more: Any) -> None:
        runtime.host_call(stream, lambda: copied.wait(PATIENCE) and None)
        copy(dst, src, nbytes, stream, *more)

    def refused(event: int, stream: int) -> None:
        monkeypatch.setattr(runtime, "event_record", record)
        if relay == "io_uring":  # once: what is copied afterwards must not hide it
            kernel[-1]._calls = kernel[-1]._calls._replace(record=record)
        raise DeviceError("event_record", RuntimeStatus.Unknown)

    def waited(stream: int) -> None:
        copied.set()
        sync(stream)

    def released(slot: tuple[int, int]) -> None:
        seen.append(copied.is_set())
        release(slot)

    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        monkeypatch.setattr(runtime, "copy_async", held)
        monkeypatch.setattr(runtime, "event_record", refused)
        monkeypatch.setattr(runtime, "stream_sync", waited)
        monkeypatch.setattr(ring, "release", released)
        with pytest.raises(TransferError, match="event_record"):
            f.read(buffer, require="fallback", cache="use")
        copied.set()
        monkeypatch.undo()
    assert seen
    assert all(seen)
    whole()


def test_who_waits_for_a_slot_gets_one_before_the_transfer_is_over(
    path: Path, kernel: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.override(config.Settings(relay="io_uring", async_buffer_nbytes=2 * bounce.SLOT_NBYTES))
    device = nobounce.Device("sim:0")
    ring = ring_of(device)
    monkeypatch.setattr(ring, "most", 2)
    monkeypatch.setattr(ring, "_made", 0)
    monkeypatch.setattr(ring, "_free", [])
    plain, count = relay_slots.Units.take, 0
    got: list[int] = []
    spared: list[bool] = []

    def wait_for_one() -> None:
        slot = ring.acquire(wait=True)
        got.append(kernel[-1].hub.pipe.number)
        assert slot is not None
        ring.release(slot)

    waiter = threading.Thread(target=wait_for_one, daemon=True)

    def unit(self: relay_slots.Units) -> Any:
        nonlocal count
        count += 1
        if count == 24:
            waiter.start()
            while not ring.wanted:
                THREADS.sleep(0)
        before = list(self.held)
        leaving = before[-1] if ring.wanted and len(before) > 1 else None
        given = plain(self)
        if leaving is not None and self.held == before and ring.wanted:
            spared.append(given is None or given.slot is not leaving)
        return given

    monkeypatch.setattr(relay_slots.Units, "take", unit)
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer, device.create_stream() as stream:
        f.read_async(buffer, stream=stream, require="fallback", cache="use").result()
        assert buffer.numpy().tobytes() == path.read_bytes()
    waiter.join(PATIENCE)
    assert got
    assert got[0] < kernel[-1].hub.pipe.number
    assert all(spared), "the slot that is to be given back is not read into again"
    assert len(ring._free) == 2
    for address, event in ring._free:
        device._runtime.free_pinned(address)
        device._runtime.event_destroy(event)


def test_a_thread_that_a_signal_may_interrupt_leaves_the_kernel_out(path: Path, kernel: list[Any]) -> None:
    """It would lose sight of a read that goes on into a slot."""
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(4096) as buffer:
        f.read(buffer, cache="use")
        assert kernel
        kernel.clear()

        def here(_: Engine, job: Job) -> None:
            job.begin()
            job.work()

        transfer(f, "read", buffer, (None, NBYTES - 100, 0), "auto", "use", run=here)
    assert not kernel


def test_a_relay_that_cannot_be_flushed_ends_its_transfer_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fallback.Relay.flush

    def broken(self: fallback.Relay) -> Any:
        plain(self)
        raise OSError(errno.EBADFD, "the ring is broken")

    monkeypatch.setattr(fallback.Relay, "flush", broken)
    with pytest.raises(OSError, match="the ring is broken"):
        read(path, require="fallback", cache="use")


def test_an_interrupt_before_the_pool_has_the_job_ends_it(path: Path) -> None:
    job_ended = threading.Event()
    plain = engine.Engine.submit

    def interrupted(self: engine.Engine, work: Any) -> None:
        raise KeyboardInterrupt

    def ended(*_: Any) -> None:
        job_ended.set()

    with pytest.MonkeyPatch.context() as patch, nobounce.open(path) as f:
        patch.setattr(engine.Engine, "submit", interrupted)
        patch.setattr(hooks, "ended", ended)
        with nobounce.Device("sim:0").allocate(NBYTES) as buffer, pytest.raises(KeyboardInterrupt):
            f.read(buffer, require="fallback", cache="use")
    assert job_ended.is_set()
    assert engine.Engine.submit is plain
    whole()


def mixed(path: Path, data: bytes, seed: int) -> None:
    """Reads of all sizes and places, queued and not, some cancelled, some broken: each right, short or an error."""
    pick = random.Random(seed)
    device = nobounce.Device("sim:0")
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer, device.create_stream() as stream:
        for _ in range(12):
            nbytes = pick.choice([1, 4096, 65_536, 300_000, 5 * MIB, 20 * MIB])
            at, to = pick.randrange(NBYTES), pick.randrange(NBYTES - nbytes)
            cache: Any = pick.choice(["use", "avoid", "auto"])
            told: dict[str, Any] = {"nbytes": nbytes, "file_offset": at, "buffer_offset": to, "cache": cache}
            broken = pick.random() < 0.1
            with faults.inject(op="pread", error=errno.EIO, times=1) if broken else nullcontext():
                try:
                    if pick.random() < 0.5:
                        receipt = f.read(buffer, require="fallback", **told)
                    else:
                        moves = [f.read_async(buffer, stream=stream, **told) for _ in range(3)]
                        moves[1].cancel()
                        moves[2].exception(PATIENCE)
                        receipt = moves[0].result(PATIENCE)
                except TransferError:
                    stream.sync()
                    continue
            stream.sync()
            assert receipt.nbytes == min(nbytes, NBYTES - at)
            arrived = buffer.numpy()[to : to + receipt.nbytes].tobytes()
            assert arrived == data[at : at + receipt.nbytes]


def in_a_child(path: Path, data: bytes) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if read(path, require="fallback")[1] == data else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_threads_streams_cancels_faults_and_forks_at_once(path: Path) -> None:
    data = path.read_bytes()
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            mixed(path, data, seed)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    ends = [in_a_child(path, data) for _ in range(2)]
    for thread in threads:
        thread.join()
    assert not failures
    assert ends == [0, 0]
    for _ in range(1000):  # I/O threads give their slots back right behind the end
        if len(ring_of(nobounce.Device("sim:0"))._free) == ring_of(nobounce.Device("sim:0"))._made:
            break
        THREADS.sleep(0.01)
    whole()


def test_a_copy_that_memory_was_short_for_is_waited_for_and_nothing_is_kept(
    path: Path, kernel: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every error of a runtime is a DeviceError."""
    runtime, waited = nobounce.Device("sim:0")._runtime, []
    sync = runtime.stream_sync

    def refused(event: int, stream: int) -> None:
        raise OutOfMemoryError("no memory for the event")

    monkeypatch.setattr(runtime, "event_record", refused)
    monkeypatch.setattr(runtime, "stream_sync", lambda stream: (waited.append(stream), sync(stream))[1])
    with pytest.raises(OutOfMemoryError, match="no memory for the event"):
        read(path, require="fallback", cache="use")
    assert kernel
    assert waited
    whole()


def test_slots_of_a_ring_that_fails_are_nobodys_and_others_are_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may write into them for good."""
    ring = ring_of(nobounce.Device("sim:0"))
    with monkeypatch.context() as patch:
        lost = bounce.Ring(ring.runtime, 0, most=2)
        patch.setattr(engine.Rings, "get", lambda *_: lost)
        patch.setattr(uring.Ring, "enter", fail)
        with pytest.raises(OSError, match="no such ring"):
            read(path, require="fallback", cache="use")
        assert lost.acquire(wait=True) is not None
        assert lost.acquire(wait=True) is not None


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENXIO, "no such ring")
