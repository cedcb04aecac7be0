"""The requests of a batch that I/O threads carry out: devices whose direct call is a vendor's, every
fallback, and all of them where the kernel has no io_uring for us.

A thread takes one request at a time and moves it by a worker, as those of a single transfer do. Small relayed
requests are taken many at once: one bounce slot, one copy op for all of them.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from nobounce.errors import DeviceError
from nobounce.io.evidence import SERVED, Meter
from nobounce.io.movers import fallback
from nobounce.io.receipt import Retry
from nobounce.io.target import Chunk, Piece
from nobounce.io.worker import Worker

if TYPE_CHECKING:
    from nobounce.clock import Condition
    from nobounce.io.batch.group import Group
    from nobounce.io.engine import Engine
    from nobounce.io.movers.bounce import Ring

GRAIN = 256
"""Requests lie this far apart in a bounce slot, in bytes."""
BUNDLE = 512
"""Relayed requests that share a slot at most."""
WIDTH = 32
"""I/O threads for small requests: the storage's depth, not the cores, is what they are for."""


class Item(NamedTuple):
    """A request for the threads; with `rest`, only what is left of it after `done` bytes."""

    slot: int
    group: Group
    kind: int
    reason: int
    file_offset: int
    nbytes: int
    buffer_offset: int
    done: int = 0
    rest: tuple[Chunk, ...] = ()

    def chunks(self) -> list[Chunk]:
        if self.rest:
            return list(self.rest)
        return self.group.chunks(self.kind, self.reason, self.file_offset, self.nbytes, self.buffer_offset)


@dataclass(slots=True)
class Outcome:
    """How a request ended: bytes from its start on, and the error if there was one. Kept
    while a worker moves it."""

    slot: int
    group: Group
    done: int = 0
    pieces: list[Piece] = field(default_factory=list)
    retries: list[Retry] = field(default_factory=list)
    errno: int = 0
    error: Exception | None = None
    stopped: bool = False
    """At the end of the file, or failed."""

    calls_out: ClassVar[bool] = False

    @property
    def direct_errno(self) -> int | None:
        return self.group.direct_errno

    def moved(self, pieces: list[Piece]) -> None:
        self.pieces += [p for p in pieces if p.nbytes]
        self.done += sum(p.nbytes for p in pieces)

    def end_of_file(self, position: int) -> None:
        self.stopped = True

    def failed(self, position: int, error: Exception) -> None:
        """The first failure counts."""
        self.stopped = True
        if self.error is None:
            self.errno, self.error = getattr(error, "errno", None) or errno.EIO, error

    def stalled(self) -> None:
        self.group.note_cold()

    def direct_failed(self, retry: Retry) -> None:
        self.group.failed_directly(retry.errno)
        self.retries.append(retry)


class ThreadLane:
    """A queue of requests and the pool's threads that serve it, `width` at most."""

    def __init__(self, engine: Engine, width: int, changed: Condition, wake: Callable[[], None]) -> None:
        """`changed` is notified of outcomes, `wake` called."""
        self.changed = changed
        self._engine, self._width, self._wake = engine, width, wake
        self._queue: deque[Item] = deque()
        self._workers = 0
        self.busy = 0
        """Requests put in whose outcomes have not been taken out."""
        self._outcomes: list[Outcome] = []
        self.metered = [0, 0]
        self.meter_usable = True

    def put(self, items: list[Item]) -> None:
        """Have these carried out."""
        with self.changed.mutex:
            self._queue.extend(items)
            self.busy += len(items)
            more = max(0, min(self._width, len(self._queue)) - self._workers)
            self._workers += more
        if not more:
            return
        self._engine.submit(_Spell(self, more))

    @property
    def ready(self) -> bool:
        return bool(self._outcomes)

    def take(self) -> list[Outcome]:
        """The outcomes that lie ready."""
        with self.changed.mutex:
            found, self._outcomes = self._outcomes, []
            self.busy -= len(found)
        return found

    def withdraw(self, wanted: Callable[[int], bool]) -> list[int]:
        """Take requests that no thread has begun out of the queue again; returns their slots."""
        with self.changed.mutex:
            gone = [i.slot for i in self._queue if wanted(i.slot)]
            if gone:
                self._queue = deque(i for i in self._queue if not wanted(i.slot))
                self.busy -= len(gone)
        return gone

    def take_metered(self) -> tuple[int, int] | None:
        """(read, written) bytes that the kernel has counted for the threads since the
        last call; None: not known.

        Asked when nothing is under way: waits for threads that are just about to hand their counters in.
        """
        with self.changed.mutex:
            self.changed.wait_for(lambda: not self._workers)
            found, self.metered = (self.metered[0], self.metered[1]), [0, 0]
            return found if self.meter_usable else None

    # what the pool's threads run

    def serve(self) -> None:
        """Carry requests out until there are none."""
        meters = {"read": Meter("read"), "write": Meter("write")}
        done: list[Outcome] = []
        while True:
            claimed = self._exchange(done, meters)
            if not claimed:
                return
            done = self._carry_out(claimed, meters)

    def _exchange(self, done: list[Outcome], meters: dict[str, Meter]) -> list[Item]:
        """Hand outcomes in and take the next request, or the next few that can share a bounce slot."""
        with self.changed.mutex:
            last = not self._queue
        if last:
            for meter in meters.values():
                meter.off()
        with self.changed.mutex:
            claimed: list[Item] = []
            room = 0
            while self._queue:
                item = self._queue[0]
                bundled = _bundles(item)
                if claimed and not (bundled and _together(claimed[0], item)):
                    break
                ring = item.group.target.ring
                need = -(-item.nbytes // GRAIN) * GRAIN
                if claimed and (len(claimed) >= BUNDLE or ring is None or room + need > ring.slot_nbytes):
                    break
                room += need
                claimed.append(self._queue.popleft())
                if not bundled:
                    break
            if not claimed:
                self._workers -= 1
                for column, meter in enumerate(meters.values()):
                    meter.off()
                    self.metered[column] += meter.nbytes
                    self.meter_usable = self.meter_usable and meter.usable
                self.changed.notify_all()
            self._outcomes += done
            if done:
                self.changed.notify_all()
        if done:
            self._wake()
        return claimed

    def _carry_out(self, claimed: list[Item], meters: dict[str, Meter]) -> list[Outcome]:
        ring = claimed[0].group.target.ring
        try:
            if _bundles(claimed[0]) and ring is not None:
                meters[claimed[0].group.op].off()
                return _relay(claimed, ring)
            return [_move(claimed[0], meters[claimed[0].group.op])]
        except BaseException as e:
            # Whatever it was, no request may be lost: the batch would wait for it for ever.
            lost = e if isinstance(e, Exception) else RuntimeError(f"the I/O thread ended: {e!r}")
            code = e.errno if isinstance(e, OSError) and e.errno else errno.EIO
            return [Outcome(i.slot, i.group, i.done, errno=code, error=lost) for i in claimed]


class _Spell:
    """Work for the pool: `tickets` threads that serve the lane."""

    def __init__(self, lane: ThreadLane, tickets: int) -> None:
        self._lane, self.tickets = lane, tickets

    def work(self) -> None:
        self._lane.serve()


def _bundles(item: Item) -> bool:
    from nobounce.route.many import WHOLE

    ring = item.group.target.ring
    return item.kind == WHOLE and not item.rest and ring is not None and item.nbytes <= ring.slot_nbytes


def _together(first: Item, item: Item) -> bool:
    a, b = first.group.target, item.group.target
    return a is b or (a.ring is b.ring and a.op == b.op)


def _move(item: Item, meter: Meter) -> Outcome:
    """One request, chunk by chunk in their order; stops at the end of the file and at the first failure."""
    out = Outcome(item.slot, item.group, item.done)
    worker = Worker(out, item.group.target, meter if item.group.watch else None)
    if not item.group.watch:
        meter.off()
    try:
        for chunk in item.chunks():
            worker.move(chunk)
            if out.stopped:
                break
    finally:
        worker.close(item.file_offset + out.done, max(0, item.nbytes - out.done))
    out.pieces = item.group.checked_pieces(out.pieces)
    if out.error is None and any(p.reason is SERVED for p in out.pieces):
        out.error = item.group.denial(item.file_offset, item.nbytes)
        out.errno = errno.EOPNOTSUPP if out.error is not None else 0
    return out


def _device_failed(item: Item, out: Outcome, e: DeviceError, backend: str) -> None:
    out.errno = errno.EIO
    at = item.file_offset + out.done
    out.error = item.group.target.error(
        errno.EIO, at, max(0, item.nbytes - out.done), backend, call=e.call, detail=str(e)
    )
    out.error.__cause__ = e


def _relay(items: list[Item], ring: Ring) -> list[Outcome]:
    """Several small requests of one op through one bounce slot."""
    runtime = items[0].group.target.runtime
    outs = [Outcome(i.slot, i.group) for i in items]
    stream = ring.copy_stream()
    slot = None
    try:
        slot = ring.acquire(wait=True)
        if slot is None:
            raise fallback.PartialError(OSError(errno.ENOMEM, "no bounce slot"), [], 0)
        places, at = [], slot[0]
        for item in items:
            places.append(at)
            at += -(-item.nbytes // GRAIN) * GRAIN
        if items[0].group.op == "read":
            copies = []
            for item, out, place in zip(items, outs, places, strict=True):
                _host(item, out, place)
                if out.done:
                    copies.append((item.group.target.address + item.buffer_offset, place, out.done))
            if copies:
                runtime.copy_batch(copies, stream)
                runtime.event_record(slot[1], stream)
                runtime.event_sync(slot[1])
            return outs
        runtime.copy_batch(
            [
                (place, i.group.target.address + i.buffer_offset, i.nbytes)
                for i, place in zip(items, places, strict=True)
            ],
            stream,
        )
        runtime.event_record(slot[1], stream)
        runtime.event_sync(slot[1])
        for item, out, place in zip(items, outs, places, strict=True):
            _host(item, out, place)
        return outs
    except DeviceError as e:
        with suppress(DeviceError):  # copies that no event tells of may be under way
            runtime.stream_sync(stream)
        for item, out in zip(items, outs, strict=True):
            out.done, out.pieces = 0, []
            _device_failed(item, out, e, "fallback")
        return outs
    finally:
        if slot is not None:
            ring.release(slot)
        ring.return_stream(stream)


def _host(item: Item, out: Outcome, address: int) -> None:
    """The host's half of a relayed request."""
    moved, _, error = fallback._host_io(item.group.target, address, item.file_offset, item.nbytes)
    reason = item.group.answer.reason_list[item.reason]
    out.moved([Piece("fallback", item.file_offset, item.buffer_offset, moved, reason, True)])
    if error is not None:
        out.errno = error.errno or errno.EIO
        out.error = item.group.target.error(
            out.errno, item.file_offset + moved, item.nbytes - moved, "fallback"
        )
