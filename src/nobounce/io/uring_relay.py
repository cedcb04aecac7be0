"""A relay whose reads the kernel does: one thread keeps many reads under way through io_uring and queues the copies behind them.

Threads of this process hand the interpreter's lock to one another at every call, four times a slot; with twelve of them that
takes as long as copying 2 MiB. io_uring's workers copy from the page cache without it, so one thread reaches the link, and a
program's own threads are left alone. Slots are divided so that sixteen reads are under way, also for a stream that may hold
four slots only; copies of neighbours that ended together are one call.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import ExitStack
from typing import NamedTuple

from nobounce.io import fallback, hooks, uring
from nobounce.io.bounce import Ring
from nobounce.io.fallback import Mover, PartialError, Relay, host_flags
from nobounce.io.target import PAGE, Chunk, Piece, Target

UNITS = 16
"""Reads that a relay keeps under way, if its slots can be divided into as many."""
LEAST_NBYTES = 256 << 10
"""Smaller reads cost more to ask for than they gain by being many."""
DEPTH = 256
"""Reads that may be under way in one ring."""
MIN_NBYTES = 16 << 20
"""Below this, a transfer is over before the kernel's workers have started."""
WAIT_PART, WAIT_NBYTES = 4, 4 << 20
"""A waiting thread sleeps until one in so many of the reads under way has ended, or so many bytes have come: woken for each
small one it would do little else, and what has come but is not on its way holds memory that could be read into."""
KEPT = 8
"""Rings kept for the next transfer."""
MOST_WORKERS = 12
"""Kernel workers of a thread that submits: as many as the memory of 16 cores keeps busy."""

_ASYNC = 1 << 4
"""IOSQE_ASYNC: by a worker, not by the submitting thread, which would copy page-cached bytes itself."""

_idle: list[uring.Ring] = []


class _Unit:
    """A part of a slot. While it is read into: `nbytes` from `file_offset`, `lead` bytes behind its start."""

    __slots__ = ("address", "buffer_offset", "chunk", "file_offset", "lead", "nbytes", "slot")
    chunk: Chunk

    def __init__(self, slot: tuple[int, int], address: int) -> None:
        self.slot, self.address = slot, address
        self.file_offset = self.buffer_offset = self.nbytes = self.lead = 0


class _Batch(NamedTuple):
    """Copies that one event stands for."""

    event: int
    units: list[_Unit]
    pieces: list[Piece]
    began: float


class UringRelay(Relay):
    """The share of one thread, which holds up to `target.kernel_slots` slots of the ring."""

    def __init__(self, target: Target, ring: Ring, kernel: uring.Ring) -> None:
        super().__init__(target, ring)
        self._kernel = kernel
        share = target.kernel_slots * ring.slot_nbytes // UNITS
        self._unit_nbytes = min(ring.slot_nbytes, max(LEAST_NBYTES, share // PAGE * PAGE))
        self._held: list[tuple[int, int]] = []
        self._free: deque[_Unit] = deque()
        self._events: list[int] = []
        self._reading: dict[int, _Unit] = {}
        self._batches: deque[_Batch] = deque()
        self._new: list[tuple[int, ...]] = []
        self._number = 0
        self._arrived: list[Piece] = []
        self._end: int | None = None
        self._failure: tuple[int, OSError] | None = None
        self._lost: Exception | None = None
        self._shared = ExitStack()
        self._shared.enter_context(ring.shared())
        self._relays = 0

    def _read(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        t = self._target
        self.ready()
        done = 0
        while done < chunk.nbytes and self._failure is None and self._lost is None:
            unit = self._unit()
            unit.chunk = chunk
            unit.file_offset = at = chunk.file_offset + done
            unit.buffer_offset = chunk.buffer_offset + done
            unit.lead = at % t.relay_align if chunk.direct else 0
            unit.nbytes = n = min(self._unit_nbytes - unit.lead, chunk.nbytes - done)
            self._start(unit)
            done += n
        self._harvest(wait=False)
        return self._report(), self._end

    def _start(self, unit: _Unit) -> None:
        """Note the read; `_harvest` hands it to the kernel."""
        t = self._target
        if unit.chunk.direct:
            whole = -(-(unit.lead + unit.nbytes) // t.relay_align) * t.relay_align
            head, fd, flags = uring.OP_READ, t.relay_fd, 0
        else:
            whole, fd = unit.nbytes, t.buffered_fd
            head, flags = uring.OP_READ | _ASYNC << 8, host_flags(t)
        number = self._number = self._number + 1
        at = unit.file_offset - unit.lead
        self._new.append((head | fd << 32, at, unit.address, whole | flags << 32, number, 0, 0, 0))
        self._reading[number] = unit

    def _harvest(self, *, wait: bool) -> None:
        """Hand new reads over, and queue the copies of what has been read."""
        import numpy as np

        kernel = self._kernel
        if self._relays != self._ring.relays:
            self._relays = self._ring.relays
            kernel.limit_workers(workers(self._relays))
        if self._new:
            kernel.put(np.array(self._new, np.uint64))
            self._new.clear()
        some = min(len(self._reading) // WAIT_PART, WAIT_NBYTES // self._unit_nbytes)
        kernel.enter(max(1, some) if wait else 0)
        ends = kernel.take()
        if not len(ends):
            return
        read: list[_Unit] = []
        # All of them first: whatever goes wrong with one, nobody waits for the others again.
        ended = [self._reading.pop(number) for number in ends["user_data"].tolist()]
        for unit, result in zip(ended, ends["result"].tolist(), strict=True):
            if result >= unit.lead + unit.nbytes or self._again(unit):
                read.append(unit)
            else:
                self._free.append(unit)
        if read:
            self._copy(read)

    def _again(self, unit: _Unit) -> bool:
        """A read that came back short or failed: a plain one says where the file ends, or what is wrong."""
        moved, ended, error = self._fill(
            unit.address, unit.file_offset, unit.nbytes, unit.lead, direct=unit.chunk.direct
        )
        position = unit.file_offset + moved
        if ended:
            self._end = position if self._end is None else min(self._end, position)
        if error is not None and (self._failure is None or position < self._failure[0]):
            self._failure = position, error
        unit.nbytes = moved
        return moved > 0

    def _copy(self, units: list[_Unit]) -> None:
        """Queue the copies: one for each run of neighbours, one event behind them all."""
        t, stream, copy = self._target, self._stream or 0, self._calls.copy
        units.sort(key=_place)
        pieces: list[Piece] = []
        began = self._now()
        try:
            event = self._event()
            first = 0
            while first < len(units):
                u = units[first]
                nbytes, last = u.nbytes, first + 1
                while last < len(units) and _follows(u, nbytes, units[last]):
                    nbytes += units[last].nbytes
                    last += 1
                copy(t.address + u.buffer_offset, u.address + u.lead, nbytes, stream)
                pieces.append(Piece("fallback", u.file_offset, u.buffer_offset, nbytes, u.chunk.reason, True))
                first = last
            self._calls.record(event, stream)
            self._events.remove(event)
        except Exception as e:
            self._lost = self._lost or e
            self._quiesce()  # copies that no event tells of may be under way
            self._free.extend(units)
            return
        self._batches.append(_Batch(event, units, pieces, began))

    def _event(self) -> int:
        """One that no batch has; not that of a slot that is to be given back."""
        while True:
            kept = self._held[-1][1] if self._crowded() else 0
            for event in self._events:
                if event != kept:
                    return event
            self._settle_oldest()

    def _settle_oldest(self, *, known: bool = False) -> None:
        """Wait for the oldest copies, unless they are `known` to be done: their units are free, and their bytes have arrived.

        Raises DeviceError.
        """
        batch = self._batches.popleft()
        try:
            if not known:
                self._sync(batch.event)
        finally:
            self._free.extend(batch.units)
            self._events.append(batch.event)
        self._arrived += batch.pieces
        if hooks.watchers:
            self._tell(sum(p.nbytes for p in batch.pieces), batch.began)

    def _unit(self) -> _Unit:
        """A free part of a slot, had by whatever comes first: an unused one, a slot of the ring, the end of a copy."""
        ring = self._ring
        while True:
            while self._batches and self._calls.query(self._batches[0].event):
                self._settle_oldest(known=True)
            if self._crowded():
                unit = self._spare()
                if unit is not None:
                    return unit
            elif self._free:
                return self._free.popleft()
            if len(self._held) < min(self._target.kernel_slots, ring.fair):
                slot = ring.acquire(wait=not self._held)
                if slot is not None:
                    self._hold(slot)
                    continue
            if self._reading:
                self._harvest(wait=True)
            elif self._batches:
                self._settle_oldest()

    def _hold(self, slot: tuple[int, int]) -> None:
        self._held.append(slot)
        self._events.append(slot[1])
        step = self._unit_nbytes
        last = self._ring.slot_nbytes - step
        self._free.extend(_Unit(slot, slot[0] + at) for at in range(0, last + 1, step))

    def _keeps(self) -> int:
        """How many slots this relay should hold at most: somebody may wait for one, or there are more relays by now."""
        return 1 if self._ring.wanted else self._ring.fair

    def _crowded(self) -> bool:
        return len(self._held) > self._keeps()

    def _spare(self) -> _Unit | None:
        """A unit of the slots that stay, while another one empties to be given back."""
        self._give_slots()
        leaving = self._held[-1] if self._crowded() else None
        for unit in self._free:
            if unit.slot is not leaving:
                self._free.remove(unit)
                return unit
        return None

    def _give_slots(self) -> None:
        """Give back slots that nothing is in, as far as there are too many."""
        for slot in list(self._held):
            parts = [u for u in self._free if u.slot is slot]
            whole = self._ring.slot_nbytes // self._unit_nbytes
            if self._crowded() and len(parts) == whole and slot[1] in self._events:
                self._held.remove(slot)
                self._events.remove(slot[1])
                for part in parts:
                    self._free.remove(part)
                self._ring.release(slot)

    def _report(self) -> list[Piece]:
        """What has arrived since the last report. Raises PartialError and what a runtime raised, once each."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        pieces, self._arrived = self._arrived, []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise PartialError(failure[1], pieces, failure[0]) from failure[1]
        return pieces

    def flush(self) -> list[Piece]:
        """As `Relay.flush`; also raises PartialError. Returns only when the kernel writes into no slot any more."""
        if self._reading or self._batches:
            self._step_in()
        try:
            try:
                while self._reading:
                    self._harvest(wait=True)
            except BaseException:
                self._ring.abandon(len(self._held))
                raise
            while self._batches:
                try:
                    self._settle_oldest()
                except Exception as e:
                    self._lost = self._lost or e
            for slot in self._held:
                self._ring.release(slot)
            self._held.clear()
            self._free.clear()
            self._events.clear()
            if len(_idle) < KEPT:
                _idle.append(self._kernel)
            else:
                self._kernel.close()
        finally:
            self._shared.close()
            super().flush()
        return self._report()


def _place(unit: _Unit) -> int:
    return unit.file_offset


def _follows(first: _Unit, nbytes: int, unit: _Unit) -> bool:
    """Whether `unit` goes on where `nbytes` from `first` end, in the file, in the slot and at the destination."""
    return (
        unit.slot is first.slot
        and unit.address + unit.lead == first.address + first.lead + nbytes
        and unit.file_offset == first.file_offset + nbytes
        and unit.buffer_offset == first.buffer_offset + nbytes
        and unit.chunk.reason is first.chunk.reason
    )


def mover(target: Target) -> Mover:
    """A worker's own fallback for this target.

    Where a signal may interrupt the thread at any moment it could lose sight of a read that the kernel still does.
    """
    if target.ring is not None and target.kernel_slots and not target.runtime.scheduler.interruptible():
        try:
            return UringRelay(target, target.ring, _take_ring())
        except OSError:
            pass  # no descriptor or no locked memory left for another ring: the plain relay needs neither
    return fallback.mover(target)


def _take_ring() -> uring.Ring:
    try:
        return _idle.pop()
    except IndexError:
        return uring.Ring(DEPTH)


def workers(relays: int) -> int:
    """Kernel workers for each of so many threads that submit: together no more than one alone would have."""
    most = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    return max(2, most // max(1, relays))


def _forget() -> None:
    for kernel in _idle:
        kernel.close()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
