"""The reads and copies of transfers that relay through one ring: slots in units, started in turns, copied as they come.

Who calls is one thread at a time (relay_hub); nothing here is locked.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from nobounce.errors import NobounceError
from nobounce.io import hooks, uring
from nobounce.io.bounce import Ring
from nobounce.io.fallback import host_flags
from nobounce.io.target import Chunk, Piece

if TYPE_CHECKING:
    from nobounce.io.uring_relay import UringRelay

DEPTH = 256
"""Reads that may be under way in one ring."""
WAIT_PART, WAIT_NBYTES = 4, 4 << 20
"""A waiting thread sleeps until one in so many of the reads under way has ended, or so many bytes have come: woken for each
small one it would do little else, and what has come but is not on its way holds memory that could be read into."""
PEEK = 1e-3
"""Seconds after which a thread that waits for the kernel looks round, where it waits for others too."""
MOST_DIRECT = 8
"""Direct reads under way: a disk that is asked for more at once gives less (benchmarks/README.md)."""
MOST_WORKERS = 14
"""Kernel workers of a thread that submits: as many as the memory of 16 cores keeps busy."""
GRAIN = 64 << 10
"""Bytes that the sizes of the first reads are multiples of."""
KEPT = 8
"""Kernel rings kept for the next transfers."""

_ASYNC = 1 << 4
"""IOSQE_ASYNC: by a worker, not by the submitting thread, which would copy page-cached bytes itself."""

_idle: list[uring.Ring] = []


class Unit:
    """A part of a slot. While it is read into: `nbytes` from `file_offset`, `lead` bytes behind its start."""

    __slots__ = ("address", "buffer_offset", "chunk", "file_offset", "lead", "nbytes", "owner", "slot")
    chunk: Chunk
    owner: UringRelay

    def __init__(self, slot: tuple[int, int], address: int) -> None:
        self.slot, self.address = slot, address
        self.file_offset = self.buffer_offset = self.nbytes = self.lead = 0


class _Batch(NamedTuple):
    """Copies of one transfer that one event of `stream` stands for."""

    owner: UringRelay
    stream: int
    event: int
    units: list[Unit]
    pieces: list[Piece]
    began: float


class Pipe:
    """Slots of one ring, divided into units of one size, and what is under way in them."""

    def __init__(self, ring: Ring, unit_nbytes: int) -> None:
        self._ring, self.unit_nbytes = ring, unit_nbytes
        self._kernel = _take_ring()
        self._most = 0
        """Slots that the transfers may hold together."""
        self._todo: deque[UringRelay] = deque()
        self._held: list[tuple[int, int]] = []
        self._free: deque[Unit] = deque()
        self._events: list[int] = []
        self._reading: dict[int, Unit] = {}
        self._batches: deque[_Batch] = deque()
        self._new: list[tuple[int, ...]] = []
        self._number = self._direct = 0
        self._stagger = max(1, workers(1))
        self._early = 1
        """Which of the first reads comes next, one less than there are workers: a small one, so that copies begin at once, then larger
        ones, so that they do not all end together."""
        self._limited = (0, 0)

    def _step(self, me: UringRelay) -> None:
        """Do what can be done now, and wait for something unless `me` is ready: the thread that calls is its."""
        self._settle_ended(me)
        self._drop_the_failed()
        self._start_reads(me)
        if self._reading:
            self._harvest(me, wait=not me.is_ready())
        elif self._batches:
            self._settle_oldest(me)
        elif self._todo and not self._held:
            slot = self._ring.acquire(wait=True)
            if slot is not None:
                self._hold(slot)
        self._drop_the_failed()

    def _drop_the_failed(self) -> None:
        """Before they can tell of their failure, and forget it: they wait for `chunk`."""
        for owner in list(self._todo):
            if owner.is_over():
                self._todo.remove(owner)
                owner.chunk = None

    def _start_reads(self, me: UringRelay) -> None:
        while len(self._reading) < DEPTH and (owner := self._next()) is not None:
            unit = self._unit(me)
            if unit is None:
                return
            self._start(owner, unit)
            if owner.chunk is not None and owner.begun == owner.chunk.nbytes:
                self._todo.popleft()
                owner.chunk = None  # last: its thread may come back with the next one at once
            else:
                self._todo.rotate(-1)

    def _next(self) -> UringRelay | None:
        """Whose turn it is: of those with something to read, who has not all the slots that it may have."""
        for _ in range(len(self._todo)):
            owner = self._todo[0]
            few = owner.out * self.unit_nbytes < owner.most_slots * self._ring.slot_nbytes
            if few and owner.chunk is not None and (not owner.chunk.direct or self._direct < MOST_DIRECT):
                return owner
            self._todo.rotate(-1)
        return None

    def _start(self, owner: UringRelay, unit: Unit) -> None:
        """Note the read; `_harvest` hands it to the kernel."""
        t, chunk = owner.target, owner.chunk
        if chunk is None:
            return
        unit.owner, unit.chunk = owner, chunk
        unit.file_offset = at = chunk.file_offset + owner.begun
        unit.buffer_offset = chunk.buffer_offset + owner.begun
        unit.lead = at % t.relay_align if chunk.direct else 0
        unit.nbytes = n = min(self._room(direct=chunk.direct) - unit.lead, chunk.nbytes - owner.begun)
        if chunk.direct:
            whole = -(-(unit.lead + n) // t.relay_align) * t.relay_align
            head, fd, flags = uring.OP_READ, t.relay_fd, 0
            self._direct += 1
        else:
            whole, fd = n, t.buffered_fd
            head, flags = uring.OP_READ | _ASYNC << 8, host_flags(t)
        number = self._number = self._number + 1
        self._new.append(
            (head | fd << 32, at - unit.lead, unit.address, whole | flags << 32, number, 0, 0, 0)
        )
        self._reading[number] = unit
        owner.out += 1
        owner.begun += n

    def _room(self, *, direct: bool) -> int:
        """Bytes of its unit that the next read may fill."""
        if direct or self._early >= self._stagger:
            return self.unit_nbytes
        room = self.unit_nbytes * self._early // self._stagger // GRAIN * GRAIN
        self._early += 1
        return min(self.unit_nbytes, max(GRAIN, room))

    def _harvest(self, me: UringRelay, *, wait: bool) -> None:
        """Hand new reads over, and queue the copies of what has been read."""
        import numpy as np

        kernel = self._kernel
        limited = get_ident(), self._ring.relays  # each thread that submits has workers of its own
        if self._limited != limited:
            self._limited = limited
            kernel.limit_workers(workers(self._ring.relays))
        if self._new:
            kernel.put(np.array(self._new, np.uint64))
            self._new.clear()
        some = min(len(self._reading) // WAIT_PART, WAIT_NBYTES // self.unit_nbytes)
        # One file may be slow, or hang: the others' copies and chunks are looked at all the same.
        kernel.enter(max(1, some) if wait else 0, PEEK if self._is_shared() else None)
        ends = kernel.take()
        if not len(ends):
            return
        read: list[Unit] = []
        # All of them first: whatever goes wrong with one, nobody waits for the others again.
        ended = [self._reading.pop(number) for number in ends["user_data"].tolist()]
        for unit, result in zip(ended, ends["result"].tolist(), strict=True):
            if unit.chunk.direct:
                self._direct -= 1
            if result >= unit.lead + unit.nbytes or unit.owner.again(unit):
                read.append(unit)
            else:
                self._free.append(unit)
                unit.owner.out -= 1
        read.sort(key=_place)
        first = 0
        for n in range(1, len(read) + 1):
            if n == len(read) or read[n].owner is not read[first].owner:
                self._copy(me, read[first].owner, read[first:n])
                first = n

    def _copy(self, me: UringRelay, owner: UringRelay, units: list[Unit]) -> None:
        """Queue the copies: one for each run of neighbours, one event behind them all.

        On one stream, whosever they are: side by side they take a tenth longer, and free their units together instead of in turns.
        """
        t, stream, copy = owner.target, me.stream, me.calls.copy
        pieces: list[Piece] = []
        began = owner.now()
        try:
            event = self._event(me)
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
            me.calls.record(event, stream)
            self._events.remove(event)
        except Exception as e:
            owner.lost = owner.lost or e
            self._quiesce(stream)  # copies that no event tells of may be under way
            self._free.extend(units)
            owner.out -= len(units)
            return
        self._batches.append(_Batch(owner, stream, event, units, pieces, began))

    def _wait_for_copies(self, *more: int) -> None:
        """All that are under way, on `more` streams too: their destinations are about to be their owners' again."""
        for stream in {*more, *(batch.stream for batch in self._batches)}:
            self._quiesce(stream)

    def _quiesce(self, stream: int) -> None:
        """Wait for copies that no event tells of, on a stream that may be somebody else's by now."""
        with suppress(NobounceError):
            self._ring.runtime.stream_sync(stream)

    def _event(self, me: UringRelay) -> int:
        """One that no batch has; not that of a slot that is to be given back."""
        while True:
            kept = self._held[-1][1] if self._crowded() else 0
            for event in self._events:
                if event != kept:
                    return event
            self._settle_oldest(me)

    def _settle_ended(self, me: UringRelay) -> None:
        while self._batches:
            known = False
            with suppress(NobounceError):  # waiting for it says the same, and says it to its owner
                if not me.calls.query(self._batches[0].event):
                    return
                known = True
            self._settle_oldest(me, known=known)

    def _settle_oldest(self, me: UringRelay, *, known: bool = False) -> None:
        """Wait for the oldest copies, unless they are `known` to be done: their units are free, and their bytes have arrived."""
        batch = self._batches.popleft()
        owner = batch.owner
        try:
            if not known:
                me.calls.sync(batch.event)
            owner.arrive(batch.pieces)
            if hooks.watchers:
                owner.tell(batch.stream, sum(p.nbytes for p in batch.pieces), batch.began)
        except BaseException as e:
            self._quiesce(batch.stream)
            owner.lost = owner.lost or (e if isinstance(e, Exception) else InterruptedError("interrupted"))
            if not isinstance(e, Exception):
                raise
        finally:
            self._free.extend(batch.units)
            self._events.append(batch.event)
            owner.out -= len(batch.units)

    def _abandon(self) -> None:
        """The kernel may write into what is held for good; it ends what is under way by itself."""
        self._ring.abandon(len(self._held))
        self._kernel.close()
        for kept in (
            self._held,
            self._free,
            self._events,
            self._reading,
            self._batches,
            self._new,
            self._todo,
        ):
            kept.clear()

    def _is_shared(self) -> bool:
        return False

    def _rest(self) -> None:
        """Give the slots back where nothing is under way: whoever holds some is sure to get on."""
        if self._reading or self._batches:
            return
        for slot in self._held:
            self._ring.release(slot)
        for kept in (self._held, self._free, self._events):
            kept.clear()

    def _empty(self) -> None:
        """Nothing is under way: everything goes back."""
        self._rest()
        if len(_idle) < KEPT:
            _idle.append(self._kernel)
        else:
            self._kernel.close()

    # slots

    def _unit(self, me: UringRelay) -> Unit | None:
        """A free part of a slot, or of one more slot, if there is any now."""
        if self._crowded():
            return self._spare()
        if not self._free and len(self._held) < self._keeps():
            slot = self._ring.acquire(wait=False)
            if slot is not None:
                self._hold(slot)
        return self._free.popleft() if self._free else None

    def _hold(self, slot: tuple[int, int]) -> None:
        self._held.append(slot)
        self._events.append(slot[1])
        step = self.unit_nbytes
        last = self._ring.slot_nbytes - step
        self._free.extend(Unit(slot, slot[0] + at) for at in range(0, last + 1, step))

    def _keeps(self) -> int:
        """How many slots should be held at most: somebody may wait for one, or others relay as well by now."""
        return 1 if self._ring.wanted else min(self._ring.fair, self._most)

    def _crowded(self) -> bool:
        return len(self._held) > max(1, self._keeps())

    def _spare(self) -> Unit | None:
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
            whole = self._ring.slot_nbytes // self.unit_nbytes
            if self._crowded() and len(parts) == whole and slot[1] in self._events:
                self._held.remove(slot)
                self._events.remove(slot[1])
                for part in parts:
                    self._free.remove(part)
                self._ring.release(slot)


def _place(unit: Unit) -> tuple[int, int]:
    return id(unit.owner), unit.file_offset


def _follows(first: Unit, nbytes: int, unit: Unit) -> bool:
    """Whether `unit` goes on where `nbytes` from `first` end, in the file, in the slot and at the destination."""
    return (
        unit.slot is first.slot
        and unit.address + unit.lead == first.address + first.lead + nbytes
        and unit.file_offset == first.file_offset + nbytes
        and unit.buffer_offset == first.buffer_offset + nbytes
        and unit.chunk.reason is first.chunk.reason
    )


def _take_ring() -> uring.Ring:
    try:
        return _idle.pop()
    except IndexError:
        return uring.Ring(DEPTH)


def workers(relays: int) -> int:
    """Kernel workers for each of so many threads that submit: together no more than one alone would have, and a core is left
    for these."""
    most = min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1)
    return max(1, most // max(1, relays))


def _forget() -> None:
    for kernel in _idle:
        kernel.close()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
