"""Transfers that relay through one ring at the same time, into sim's device memory: one thread of theirs does the reads."""

from __future__ import annotations

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
from nobounce.clock import THREADS
from nobounce.errors import TransferError
from nobounce.io import engine, prepare, strategy
from nobounce.io.movers import (
    bounce,
    relay_copies,
    relay_hub,
    relay_pipe,
    relay_slots,
    uring,
    uring_relay,
)

MIB = 1 << 20
PATIENCE = 30.0
NBYTES = 40 * MIB + 123


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    """With the first reads of a relay made small, which two cores would not do."""
    need("io_uring")
    config.override(config.Settings(relay="io_uring"))
    plain = relay_pipe.Pipe.__init__

    def made(self: relay_pipe.Pipe, ring: bounce.Ring, unit_nbytes: int) -> None:
        plain(self, ring, unit_nbytes)
        self.stagger = 5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_pipe.Pipe, "__init__", made)
        yield
    assert not any(relay_hub._hubs.values()), "who has left is in no hub"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


def ring_of(device: nobounce.Device) -> bounce.Ring:
    return engine.engine_for(device._runtime).rings.get(device._runtime, device.ordinal)


class Reads:
    """Async reads of one or more files, each into a buffer on a stream of its own."""

    def __init__(self, *paths: Path) -> None:
        self.device = nobounce.Device("sim:0")
        self.paths = paths
        self.streams = [self.device.create_stream() for _ in paths]
        self.buffers = [self.device.allocate(p.stat().st_size) for p in paths]
        self.files = [nobounce.open(p) for p in paths]

    def start(self, cache: Any = "use") -> list[nobounce.Transfer]:
        every = zip(self.files, self.buffers, self.streams, strict=True)
        return [f.read_async(b, stream=s, require="fallback", cache=cache) for f, b, s in every]

    def are_right(self) -> list[bool]:
        return [b.numpy().tobytes() == p.read_bytes() for b, p in zip(self.buffers, self.paths, strict=True)]

    def close(self) -> None:
        for thing in (*self.files, *self.buffers, *self.streams):
            thing.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("cache", ["use", "avoid"])
def test_one_thread_at_a_time_drives_and_every_byte_arrives(
    path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    plain, driving, most, drivers = relay_pipe.Pipe.step, [0], [0], set()

    def step(self: relay_pipe.Pipe, me: uring_relay.UringRelay) -> None:
        driving[0] += 1
        most[0] = max(most[0], driving[0])
        drivers.add(me)
        THREADS.sleep(0)
        plain(self, me)
        driving[0] -= 1

    monkeypatch.setattr(relay_pipe.Pipe, "step", step)
    reads = Reads(*[path] * 6)
    for _ in range(3):
        for move in reads.start(cache):
            assert move.result(PATIENCE).nbytes == NBYTES
    assert all(reads.are_right())
    assert most == [1]
    assert drivers
    ring = ring_of(reads.device)
    assert len(ring._free) == ring._made
    assert ring.relays == 0
    reads.close()


def test_direct_reads_under_way_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is asked for more at once gives less."""
    need("o_direct")
    seen: list[int] = []
    plain = relay_pipe.Pipe.harvest

    def harvest(self: relay_pipe.Pipe, *a: Any, **k: Any) -> None:
        seen.append(sum(u.chunk.direct for u in self.reading.values()))
        plain(self, *a, **k)

    monkeypatch.setattr(relay_pipe.Pipe, "harvest", harvest)
    reads = Reads(path, path)
    for move in reads.start("avoid"):
        move.result(PATIENCE)
    assert all(reads.are_right())
    assert 1 < max(seen) <= relay_pipe.MOST_DIRECT
    reads.close()


@pytest.mark.parametrize("share", [4 * MIB, 16 * MIB])
def test_a_transfer_that_fails_takes_nobody_with_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(os.urandom(NBYTES))
    fill, take, begin = uring_relay.UringRelay._fill, uring.Ring.take, relay_pipe.Pipe.start
    strays: list[uring_relay.UringRelay] = []

    def start(self: Any, owner: uring_relay.UringRelay, unit: relay_pipe.Unit) -> None:
        if owner not in owner.hub.members or owner.is_over():
            strays.append(owner)
        begin(self, owner, unit)

    monkeypatch.setattr(relay_pipe.Pipe, "start", start)

    def broken(
        self: uring_relay.UringRelay, slot: int, file_offset: int, nbytes: int, lead: int, **k: Any
    ) -> Any:
        if self.target.filename == str(other) and file_offset >= 10 * MIB:
            return 0, False, OSError(errno.EIO, "broken")
        return fill(self, slot, file_offset, nbytes, lead, **k)

    def short(self: uring.Ring) -> Any:
        ends = take(self)
        ends["result"][:] = -errno.EIO
        return ends

    config.override(config.Settings(relay="io_uring", async_buffer_nbytes=share))
    monkeypatch.setattr(uring_relay.UringRelay, "_fill", broken)
    monkeypatch.setattr(uring.Ring, "take", short)
    reads = Reads(path, other, path)
    for _ in range(5):
        one, two, three = reads.start()
        assert one.result(PATIENCE).nbytes == three.result(PATIENCE).nbytes == NBYTES
        with pytest.raises(TransferError) as caught:
            two.result(PATIENCE)
        assert caught.value.filename == str(other)
        assert reads.are_right()[0]
        assert reads.are_right()[2]
        assert not strays, "nothing is read for one that has failed, or has left"
    reads.close()


def test_a_kernel_ring_that_fails_ends_everybody_s_transfer_and_the_next_ones_have_another(
    path: Path, fd_guard: None
) -> None:
    relay_pipe._forget()
    ring = ring_of(nobounce.Device("sim:0"))
    reads = Reads(*[path] * 4)
    plain, left = uring.Ring.enter, [5]

    def enter(self: uring.Ring, *a: Any, **k: Any) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENXIO, "no such ring")
        plain(self, *a, **k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uring.Ring, "enter", enter)
        ends = [move.exception(PATIENCE) for move in reads.start()]
    assert any(isinstance(e, OSError) and "no such ring" in str(e) for e in ends)
    for move in reads.start():
        assert move.result(PATIENCE).nbytes == NBYTES
    assert all(reads.are_right())
    assert len(ring._free) == ring._made
    assert ring.relays == 0
    reads.close()
    relay_pipe._forget()


def test_a_caller_s_function_that_takes_its_time_holds_nobody_up(path: Path) -> None:
    """Whoever drives hands the role over before it calls what may not return for long."""
    device = nobounce.Device("sim:0")
    reads, done = Reads(path), threading.Event()
    waited: list[bool] = []

    def progress(backend: str, nbytes: int) -> None:
        if not waited:
            waited.append(True)
            move = reads.start()[0]
            move.add_done_callback(lambda _: done.set())
            assert done.wait(PATIENCE), "the other transfer waits for this one's function"

    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        receipt = prepare.transfer(f, "read", buffer, (None, 0, 0), "fallback", "use", progress=progress)
        assert receipt.nbytes == NBYTES
        assert buffer.numpy().tobytes() == path.read_bytes()
    assert waited
    assert reads.are_right() == [True]
    reads.close()


def test_slots_are_divided_among_sizes_and_the_share_of_each_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_of(nobounce.Device("sim:0"))
    assert ring.fair == ring.most - ring.most // 4
    with ring.shared(), ring.shared():
        assert ring.fair == (ring.most - ring.most // 4) // 2
    held: list[int] = []
    plain = relay_slots.Units.hold

    def hold(self: relay_slots.Units, slot: tuple[int, int]) -> None:
        plain(self, slot)
        held.append(len(self.held))

    monkeypatch.setattr(relay_slots.Units, "hold", hold)
    config.override(config.Settings(relay="io_uring", async_buffer_nbytes=2 * bounce.SLOT_NBYTES))
    reads = Reads(path)
    assert reads.start()[0].result(PATIENCE).nbytes == NBYTES
    assert max(held) == 2
    reads.close()


def test_all_copies_are_queued_on_the_stream_of_who_drives(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side on streams of their own they would take longer, and end together instead of in turns."""
    reads = Reads(*[path] * 4)
    runtime = reads.device._runtime
    plain, copies, owners = runtime.copy_async, [], set()
    wanted: list[tuple[int, object]] = []
    queue = relay_copies.Copies.queue

    def copy(dst: int, src: int, nbytes: int, stream: int, *a: Any) -> None:
        copies.append(stream == wanted[-1][0])
        owners.add(wanted[-1][1])
        plain(dst, src, nbytes, stream, *a)

    def from_pipe(self: Any, me: Any, owner: Any, units: Any) -> None:
        assert me.hub.driver is me
        wanted.append((me.stream, owner))
        queue(self, me, owner, units)

    monkeypatch.setattr(relay_copies.Copies, "queue", from_pipe)
    monkeypatch.setattr(runtime, "copy_async", copy)
    for move in reads.start():
        assert move.result(PATIENCE).nbytes == NBYTES
    assert all(reads.are_right())
    assert all(copies)
    assert len(owners) == 4
    reads.close()


def test_copies_are_over_before_anybody_hears_that_the_kernel_s_ring_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their destinations are their owners' again then, and the stream they are on may be another transfer's."""
    relay_pipe._forget()
    reads = Reads(*[path] * 3)
    runtime = reads.device._runtime
    order: list[str] = []
    under_way: list[int] = []
    lose, sync, enter = uring_relay.UringRelay.lose, runtime.stream_sync, uring.Ring.enter

    def broken(self: uring.Ring, *a: Any, **k: Any) -> None:
        hub = next(h for known in list(relay_hub._hubs.values()) for h in known.values())
        if hub.pipe.copies.batches:
            under_way.extend({batch.stream for batch in hub.pipe.copies.batches})
            raise OSError(errno.ENXIO, "no such ring")
        enter(self, *a, **k)

    def synced(stream: int) -> None:
        if stream in under_way:
            order.append("waited")
        sync(stream)

    def lost(self: uring_relay.UringRelay, error: Exception) -> None:
        order.append("told")
        lose(self, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_copies.Copies, "settle_ended", lambda self, me: None)
        patch.setattr(uring.Ring, "enter", broken)
        patch.setattr(runtime, "stream_sync", synced)
        patch.setattr(uring_relay.UringRelay, "lose", lost)
        ends = [move.exception(PATIENCE) for move in reads.start()]
    assert any(isinstance(e, OSError) for e in ends)
    assert under_way
    assert order[0] == "waited"
    assert "told" in order
    for move in reads.start():
        assert move.result(PATIENCE).nbytes == NBYTES
    reads.close()
    relay_pipe._forget()


@pytest.mark.parametrize("cache", ["use", "avoid"])
def test_the_first_reads_grow_so_that_copies_begin_at_once_and_do_not_end_together(
    path: Path, monkeypatch: pytest.MonkeyPatch, cache: Any
) -> None:
    """A disk's reads do not: it brings large ones at once."""
    if cache == "avoid":
        need("o_direct")
    relay_pipe._forget()
    sizes: list[int] = []
    plain = relay_pipe.Pipe.start

    def start(self: relay_pipe.Pipe, owner: uring_relay.UringRelay, unit: relay_pipe.Unit) -> None:
        plain(self, owner, unit)
        sizes.append(unit.nbytes)

    monkeypatch.setattr(relay_pipe.Pipe, "start", start)
    reads = Reads(path)
    assert reads.start(cache)[0].result(PATIENCE).nbytes == NBYTES
    assert all(reads.are_right())
    unit = max(sizes)
    if cache == "use":
        assert sizes[:4] == [unit * n // 5 // relay_pipe.GRAIN * relay_pipe.GRAIN for n in (1, 2, 3, 4)]
        assert set(sizes[4:-1]) == {unit}
    else:
        assert set(sizes[:-1]) == {unit}
    reads.close()
    relay_pipe._forget()


def test_what_has_arrived_is_joined_before_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the transfer would wait for it then."""
    monkeypatch.setattr(strategy, "KERNEL_CHUNK_CACHED", 8 * MIB)
    parts: list[int] = []
    told: list[int] = []
    plain = uring_relay.UringRelay._report

    def report(self: uring_relay.UringRelay) -> Any:
        arrived = sum(p.nbytes for p in self.arrived)
        parts.append(len(self.arrived))
        pieces = plain(self)
        assert sum(p.nbytes for p in pieces) == arrived
        told.append(len(pieces))
        return pieces

    monkeypatch.setattr(uring_relay.UringRelay, "_report", report)
    reads = Reads(path)
    receipt = reads.start()[0].result(PATIENCE)
    assert (receipt.nbytes, len(receipt.segments)) == (NBYTES, 1)
    assert sum(told) < sum(parts)
    assert all(reads.are_right())
    reads.close()


@pytest.mark.parametrize(
    ("cores", "relays", "most"), [(16, 1, 14), (16, 4, 3), (8, 1, 7), (2, 1, 1), (2, 9, 1)]
)
def test_kernel_workers_are_as_many_as_cores_allow_however_many_submit(
    monkeypatch: pytest.MonkeyPatch, cores: int, relays: int, most: int
) -> None:
    monkeypatch.setattr(relay_pipe, "own_cpus", lambda: cores)
    assert relay_pipe.workers(relays) == most


def test_no_more_reads_are_put_in_than_the_kernel_s_ring_has_room_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ones before would be written over: some reads never happen, others twice."""
    relay_pipe._forget()
    monkeypatch.setattr(relay_pipe, "DEPTH", 4)
    seen: list[int] = []
    plain = uring.Ring.put

    def put(self: uring.Ring, entries: Any) -> None:
        seen.append(len(entries))
        assert len(entries) <= self.room
        plain(self, entries)

    monkeypatch.setattr(uring.Ring, "put", put)
    reads = Reads(*[path] * 3)
    for move in reads.start():
        assert move.result(PATIENCE).nbytes == NBYTES
    assert all(reads.are_right())
    assert max(seen) > 1
    reads.close()
    relay_pipe._forget()


@pytest.mark.parametrize("shared", [False, True])
def test_who_waits_for_the_kernel_looks_round_where_others_wait_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """One file may be slow, or hang, and its reads are what the driver waits for."""
    waits: set[float | None] = set()
    plain = uring.Ring.enter

    def enter(self: uring.Ring, at_least: int = 0, timeout: float | None = None) -> None:
        if at_least:
            waits.add(timeout)
        plain(self, at_least, timeout)

    monkeypatch.setattr(uring.Ring, "enter", enter)
    resize = relay_hub.Hub.resize

    def with_another(self: relay_hub.Hub) -> None:
        resize(self)
        self.pipe.shared = True

    if shared:
        monkeypatch.setattr(relay_hub.Hub, "resize", with_another)
    reads = Reads(path)
    assert reads.start()[0].result(PATIENCE).nbytes == NBYTES
    assert all(reads.are_right())
    reads.close()
    assert waits - {relay_pipe.GLANCE} == ({relay_pipe.PEEK} if shared else {None})


def test_a_transfer_between_two_chunks_finds_out_that_the_kernel_s_ring_is_broken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had asked for has arrived; the rest must not come out as the end of the file."""
    monkeypatch.setattr(strategy, "KERNEL_SLOTS", 1)
    monkeypatch.setattr(strategy, "KERNEL_CHUNK", 8 * MIB)
    monkeypatch.setattr(strategy, "KERNEL_CHUNK_CACHED", 8 * MIB)
    reads, device = Reads(path), nobounce.Device("sim:0")
    plain, broken = uring.Ring.enter, threading.Event()
    ends: list[BaseException | None] = []

    def enter(self: uring.Ring, *a: Any, **k: Any) -> None:
        if broken.is_set():
            raise OSError(errno.ENXIO, "no such ring")
        plain(self, *a, **k)

    def progress(backend: str, nbytes: int) -> None:
        if not ends:
            broken.set()
            ends.append(reads.start()[0].exception(PATIENCE))
            broken.clear()

    monkeypatch.setattr(uring.Ring, "enter", enter)
    with nobounce.open(path) as f, device.allocate(NBYTES) as buffer:
        with pytest.raises(OSError, match="no such ring") as caught:
            prepare.transfer(f, "read", buffer, (None, 0, 0), "fallback", "use", progress=progress)
        assert caught.value is not ends[0], "each has its own"
        monkeypatch.undo()
        assert f.read(buffer, require="fallback", cache="use").nbytes == NBYTES
        assert buffer.numpy().tobytes() == path.read_bytes()
    assert len(ends) == 1
    assert isinstance(ends[0], OSError)
    reads.close()
