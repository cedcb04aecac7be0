"""The reads of transfers that relay through one ring, started in turns by one thread and done
by the kernel's workers.

Who calls is one thread at a time (relay_hub); nothing here is locked.
"""

from __future__ import annotations

import os
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING

from nobounce.facts.machine import own_cpus
from nobounce.io.movers import uring
from nobounce.io.movers.bounce import Ring
from nobounce.io.movers.fallback import host_flags
from nobounce.io.movers.relay_copies import Copies
from nobounce.io.movers.relay_slots import Unit, Units

if TYPE_CHECKING:
    from nobounce.io.movers.uring_relay import UringRelay

DEPTH = 256
"""Reads that may be under way in one ring."""
WAIT_PART, WAIT_NBYTES = 4, 4 << 20
"""A waiting thread sleeps until one in so many of the reads under way has ended, or so many bytes have
come: woken for each small one it would do little else, and what has come but is not on its way holds memory
that could be read into."""
PEEK = 1e-3
"""Seconds after which a thread that waits for the kernel looks round, where it waits for others too."""
GLANCE = 1e-4
"""Seconds after which it does so where something has come whose copy waits for more."""
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


class Pipe:
    """Units of one size of a ring, the reads into them, and the copies out of them."""

    def __init__(self, ring: Ring, unit_nbytes: int) -> None:
        self.units = Units(ring, unit_nbytes)
        self.copies = Copies(self.units)
        self.shared = False
        """Whether several transfers read through it, so that none may wait for another's file alone."""
        self._kernel = _take_ring()
        self._todo: deque[UringRelay] = deque()
        self.reading: dict[int, Unit] = {}
        self._new: list[tuple[int, ...]] = []
        self.number = self.direct = 0
        self.stagger = max(1, workers(1))
        self._early = 1
        """Which of the first reads comes next, one less than there are workers: a small one, so that copies
        begin at once, then larger ones, so that they do not all end together."""
        self._limited = (0, 0)

    def step(self, me: UringRelay) -> None:
        """Do what can be done now, and wait for something unless `me` is ready: the
        thread that calls is its."""
        self.copies.settle_ended(me)
        self._drop_the_failed()
        self.units.grew = False
        self._start_reads(me)
        if self.reading or self.copies.come:
            self.harvest(me, wait=not (self.units.grew or me.is_ready()))
        elif self.copies.batches:
            self.copies.settle_oldest(me)
        elif self._todo and not self.units.held:
            slot = self.units.ring.acquire(wait=True)
            if slot is not None:
                self.units.hold(slot)
        self._drop_the_failed()

    def _drop_the_failed(self) -> None:
        """Before they can tell of their failure, and forget it: they wait for `chunk`."""
        for owner in list(self._todo):
            if owner.is_over():
                self._todo.remove(owner)
                owner.chunk = None

    def _start_reads(self, me: UringRelay) -> None:
        while not self.units.grew and len(self.reading) < DEPTH and (owner := self._next()) is not None:
            unit = self.units.take()
            if unit is None:
                return
            self.start(owner, unit)
            if owner.chunk is not None and owner.begun == owner.chunk.nbytes:
                self._todo.popleft()
                owner.chunk = None  # last: its thread may come back with the next one at once
            else:
                self._todo.rotate(-1)

    def _next(self) -> UringRelay | None:
        """Whose turn it is: of those with something to read, who has not all the slots that it may have."""
        for _ in range(len(self._todo)):
            owner = self._todo[0]
            few = owner.out * self.units.unit_nbytes < owner.most_slots * self.units.ring.slot_nbytes
            if few and owner.chunk is not None and (not owner.chunk.direct or self.direct < MOST_DIRECT):
                return owner
            self._todo.rotate(-1)
        return None

    def start(self, owner: UringRelay, unit: Unit) -> None:
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
            self.direct += 1
        else:
            whole, fd = n, t.buffered_fd
            head, flags = uring.OP_READ | _ASYNC << 8, host_flags(t)
        number = self.number = self.number + 1
        self._new.append(
            (head | fd << 32, at - unit.lead, unit.address, whole | flags << 32, number, 0, 0, 0)
        )
        self.reading[number] = unit
        owner.out += 1
        owner.begun += n

    def _room(self, *, direct: bool) -> int:
        """Bytes of its unit that the next read may fill."""
        if direct or self._early >= self.stagger:
            return self.units.unit_nbytes
        room = self.units.unit_nbytes * self._early // self.stagger // GRAIN * GRAIN
        self._early += 1
        return min(self.units.unit_nbytes, max(GRAIN, room))

    def harvest(self, me: UringRelay, *, wait: bool) -> None:
        """Hand new reads over, and take those that have ended on to their copies."""
        import numpy as np

        kernel = self._kernel
        limited = get_ident(), self.units.ring.relays  # each thread that submits has workers of its own
        if self._limited != limited:
            self._limited = limited
            kernel.limit_workers(workers(self.units.ring.relays))
        if self._new:
            kernel.put(np.array(self._new, np.uint64))
            self._new.clear()
        some = min(len(self.reading) // WAIT_PART, WAIT_NBYTES // self.units.unit_nbytes)
        # One file may be slow, or hang: the others' copies and chunks are looked at all the same.
        patience = GLANCE if self.copies.come else PEEK if self.shared else None
        kernel.enter(max(1, some) if wait and self.reading else 0, patience)
        ends = kernel.take()
        read: list[Unit] = []
        # All of them first: whatever goes wrong with one, nobody waits for the others again.
        ended = [self.reading.pop(number) for number in ends["user_data"].tolist()]
        for unit, result in zip(ended, ends["result"].tolist(), strict=True):
            if unit.chunk.direct:
                self.direct -= 1
            if result >= unit.lead + unit.nbytes or unit.owner.again(unit):
                read.append(unit)
            else:
                self.units.free.append(unit)
                unit.owner.out -= 1
        self.copies.came(read)
        self.copies.send(me, now=not self.reading)

    def give(self, owner: UringRelay) -> None:
        """`owner` has a chunk to be read."""
        self._todo.append(owner)

    def rest(self) -> None:
        """Give the slots back where nothing is under way."""
        if not (self.reading or self.copies.come or self.copies.batches):
            self.units.rest()

    def abandon(self) -> None:
        """The kernel may write into what is held for good; it ends what is under way by itself."""
        self.units.abandon()
        self.copies.forget()
        self._kernel.close()
        for kept in (self.reading, self._new, self._todo):
            kept.clear()

    def close(self) -> None:
        """Nothing is under way: everything goes back."""
        self.rest()
        if len(_idle) < KEPT:
            _idle.append(self._kernel)
        else:
            self._kernel.close()


def _take_ring() -> uring.Ring:
    try:
        return _idle.pop()
    except IndexError:
        return uring.Ring(DEPTH)


def workers(relays: int) -> int:
    """Kernel workers for each of so many threads that submit: together no more than one alone would have, and
    a core is left for these."""
    most = min(MOST_WORKERS, own_cpus() - 1)
    return max(1, most // max(1, relays))


def trim() -> None:
    """Close the rings that nobody uses."""
    while _idle:
        _idle.pop().close()


def _forget() -> None:
    for kernel in _idle:
        kernel.close()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
