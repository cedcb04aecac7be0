"""A relay whose reads the kernel does: one thread keeps many reads under way through io_uring and queues the copies behind them.

Threads of this process hand the interpreter's lock to one another at every call, four times a slot; with twelve of them that
takes as long as copying 2 MiB. io_uring's workers copy from the page cache without it, so one thread reaches the link, and a
program's own threads are left alone. A read is cut into slices, which several workers fill at once: a stream that may hold
four slots only still keeps sixteen reads under way.
"""

from __future__ import annotations

import os

from nobounce.errors import DeviceError
from nobounce.io import fallback, uring
from nobounce.io.bounce import Ring
from nobounce.io.fallback import Mover, PartialError, Relay, host_flags
from nobounce.io.target import Chunk, Piece, Target

SLICE_NBYTES = 1 << 20
DEPTH = 256
"""Reads that may be under way in one ring: the slices of all slots of a device."""
MIN_NBYTES = 16 << 20
"""Below this, a transfer is over before the kernel's workers have started."""
KEPT = 8
"""Rings kept for the next transfer."""

_ASYNC = 1 << 4
"""IOSQE_ASYNC: by a worker, not by the submitting thread, which would copy a page-cached slice itself."""

_idle: list[uring.Ring] = []


class _Fill:
    """A slot that is being read into."""

    __slots__ = ("chunk", "lead", "missing", "moved", "piece", "slot")

    def __init__(self, slot: tuple[int, int], piece: Piece, lead: int, chunk: Chunk) -> None:
        self.slot, self.piece, self.lead, self.chunk = slot, piece, lead, chunk
        self.missing = self.moved = 0


class UringRelay(Relay):
    """The share of one thread, which holds up to `target.kernel_slots` slots."""

    def __init__(self, target: Target, ring: Ring, kernel: uring.Ring) -> None:
        super().__init__(target, ring)
        self._kernel = kernel
        self._free: list[tuple[int, int]] = []
        self._fills: dict[int, _Fill] = {}
        self._number = 0
        self._end: int | None = None
        self._failure: tuple[int, OSError] | None = None
        self._lost: DeviceError | None = None

    def _read(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        t = self._target
        self._ready()
        pieces: list[Piece] = []
        done = 0
        while done < chunk.nbytes and self._failure is None and self._lost is None:
            slot = self._slot(pieces)
            at = chunk.file_offset + done
            lead = at % t.relay_align if chunk.direct else 0
            n = min(self._ring.slot_nbytes - lead, chunk.nbytes - done)
            piece = Piece("fallback", at, chunk.buffer_offset + done, n, chunk.reason, True)
            self._start(_Fill(slot, piece, lead, chunk))
            done += n
        self._harvest(wait=False)
        self._raise(pieces)
        return pieces, self._end

    def _start(self, fill: _Fill) -> None:
        """Put the slot's reads into the submission ring; `_harvest` hands them over."""
        import numpy as np

        t, kernel, piece = self._target, self._kernel, fill.piece
        if fill.chunk.direct:
            whole = -(-(fill.lead + piece.nbytes) // t.relay_align) * t.relay_align
            unit, fd, head, flags = whole, t.relay_fd, uring.OP_READ, 0
        else:
            whole, unit, fd = piece.nbytes, SLICE_NBYTES, t.buffered_fd
            head, flags = uring.OP_READ | _ASYNC << 8, host_flags(t)
        first = piece.file_offset - fill.lead
        number = self._number = self._number + 1
        rows = [
            (
                head | fd << 32,
                first + at,
                fill.slot[0] + at,
                min(unit, whole - at) | flags << 32,
                number,
                0,
                0,
                0,
            )
            for at in range(0, whole, unit)
        ]
        fill.missing = len(rows)
        self._fills[number] = fill
        while kernel.room < len(rows):
            self._harvest(wait=True)
        kernel.put(np.array(rows, np.uint64))

    def _harvest(self, *, wait: bool) -> None:
        """Hand over what was put in, and queue the copies of the slots that are full."""
        kernel = self._kernel
        kernel.enter(1 if wait and not kernel.waiting else 0)
        ends = kernel.take()
        for number, result in zip(ends["user_data"].tolist(), ends["result"].tolist(), strict=True):
            fill = self._fills[number]
            fill.missing -= 1
            fill.moved += max(0, result)
            if not fill.missing:
                del self._fills[number]
                self._filled(fill)

    def _filled(self, fill: _Fill) -> None:
        t, piece, slot = self._target, fill.piece, fill.slot
        moved = piece.nbytes
        try:
            if fill.moved < fill.lead + moved:
                # Short or failed: a plain read says where the file ends, or what is wrong.
                moved, ended, error = self._fill(
                    slot[0], piece.file_offset, piece.nbytes, fill.lead, direct=fill.chunk.direct
                )
                position = piece.file_offset + moved
                if ended:
                    self._end = position if self._end is None else min(self._end, position)
                if error is not None and (self._failure is None or position < self._failure[0]):
                    self._failure = position, error
            if not moved:
                self._free.append(slot)
                return
            stream = self._stream or 0
            began = self._now()
            self._calls.copy(t.address + piece.buffer_offset, slot[0] + fill.lead, moved, stream)
            self._calls.record(slot[1], stream)
        except DeviceError as e:
            self._lost = self._lost or e
            self._free.append(slot)
            return
        self._pending.append((slot, piece._replace(nbytes=moved), began))

    def _slot(self, finished: list[Piece]) -> tuple[int, int]:
        ring, pending, query = self._ring, self._pending, self._calls.query
        while True:
            while pending and query(pending[0][0][1]):
                self._free.append(self._take(finished))
            if self._free:
                slot = self._free.pop()
                if not ring.wanted:
                    return slot
                ring.release(slot)
            under_way = len(self._fills) + len(pending)
            if under_way < self._target.kernel_slots:
                found = ring.acquire(wait=not under_way)
                if found is not None:
                    return found
            if self._fills:
                self._harvest(wait=not pending)
            if pending and not self._free:
                self._free.append(self._take(finished))

    def _take(self, finished: list[Piece]) -> tuple[int, int]:
        piece, slot = self._settle()
        finished.append(piece)
        return slot

    def _raise(self, pieces: list[Piece]) -> None:
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        failure, self._failure = self._failure, None
        if failure is not None:
            raise PartialError(failure[1], pieces, failure[0]) from failure[1]

    def flush(self) -> list[Piece]:
        """As `Relay.flush`; also raises PartialError. Returns only when the kernel writes into no slot any more."""
        while self._fills:
            self._harvest(wait=True)
        for slot in self._free:
            self._ring.release(slot)
        self._free.clear()
        kernel = self._kernel
        if len(_idle) < KEPT:
            _idle.append(kernel)
        else:
            kernel.close()
        pieces = super().flush()
        self._raise(pieces)
        return pieces


def mover(target: Target) -> Mover:
    """A worker's own fallback for this target."""
    if target.ring is not None and target.kernel_slots:
        try:
            return UringRelay(target, target.ring, _take_ring())
        except OSError:
            pass  # no descriptor or no locked memory left for another ring: the plain relay needs neither
    return fallback.mover(target)


def _take_ring() -> uring.Ring:
    try:
        return _idle.pop()
    except IndexError:
        made = uring.Ring(DEPTH)
        made.limit_workers(max(2, min(16, len(os.sched_getaffinity(0)))))
        return made


def _forget() -> None:
    for kernel in _idle:
        kernel.close()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
