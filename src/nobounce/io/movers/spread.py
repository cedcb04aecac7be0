"""One read of page-cached bytes, by threads of the kernel side by side, on its caller's thread.

What is too large for one core to copy quickly, and over before a thread of ours or a
worker of io_uring has woken.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from nobounce.errors import DeviceError
from nobounce.io.movers import uring

if TYPE_CHECKING:
    from nobounce.io.movers.bounce import Ring
    from nobounce.io.movers.pollers import KernelBlocks
    from nobounce.runtimes.base import CopyCalls

STRETCHES, LEAST_STRETCH = 8, 1 << 20
"""Into so many stretches a read is cut, if each comes to a megabyte, and at most a slot: one is copied
while the next are read."""
PIECE, LARGE_PIECE, LARGE = 256 << 10, 512 << 10, 4 << 20
"""Bytes that one thread reads at a time, and of a large read. To ask for one and to learn of its end costs
the caller some 5 us; one thread reads 6 MiB in a millisecond."""
UNDER_WAY = 2
"""Pieces that one thread has: the one it reads and the next. With more it would tell of none
before all of them have ended."""
MOST_SLOTS, FEW_SLOTS = 24, 8
"""Slots that a read has at most, and that are enough for a long one: what finds no room waits for the
copies out of the oldest."""
SPIN = 50e-6
"""Seconds that the thread looks for the end of a read before it sleeps: to be woken takes as long."""


class Range(NamedTuple):
    """What is read of a file, and where it goes on the device."""

    fd: int
    flags: int
    file_offset: int
    nbytes: int
    address: int


class Cut(NamedTuple):
    """A read in so many `stretches` of `whole` bytes, `each` of them to a slot, in
    pieces of `piece` bytes."""

    piece: int
    whole: int
    each: int
    stretches: int


def cutting(nbytes: int, slot_nbytes: int) -> Cut:
    """So that the first copy begins early, and few pieces have to be asked for."""
    piece = LARGE_PIECE if nbytes >= LARGE else PIECE
    wanted = min(max(nbytes // STRETCHES, LEAST_STRETCH), slot_nbytes)
    whole = piece * max(1, wanted // piece)
    return Cut(piece, whole, slot_nbytes // whole, -(-nbytes // whole))


class Lease:
    """What a spread read holds: the kernel's threads, slots of the bounce ring and a copy stream."""

    def __init__(self, by: KernelBlocks, ring: Ring) -> None:
        self.by, self.ring = by, ring
        self.slots: list[tuple[int, int]] = []
        self.stream = 0
        self.in_doubt = False
        """Whether copies may be under way."""

    def take(self, cut: Cut) -> bool:
        """Have slots for all of it, or enough of them; False where there are too few now. Raises
        DeviceError and OutOfMemoryError."""
        self.stream = self.ring.copy_stream()
        wanted = min(-(-cut.stretches // cut.each), MOST_SLOTS)
        while len(self.slots) < wanted:
            slot = self.ring.acquire(wait=not self.slots)
            if slot is None:
                break
            self.slots.append(slot)
        return len(self.slots) >= min(wanted, FEW_SLOTS)

    def close(self) -> None:
        """Give everything back once nothing is under way. An interrupt comes after that: the kernel
        still writes into the slots."""
        interrupt: BaseException | None = None
        closed = False
        while not closed:
            try:
                self._close()
                closed = True
            except Exception:
                raise
            except BaseException as e:
                interrupt = interrupt or e
        if interrupt is not None:
            raise interrupt

    def _close(self) -> None:
        self.by.close()
        if self.in_doubt:
            with suppress(DeviceError):
                self.ring.runtime.stream_sync(self.stream)
            self.in_doubt = False
        while self.slots:
            self.ring.release(self.slots.pop())
        if self.stream:
            stream, self.stream = self.stream, 0
            self.ring.return_stream(stream)


def spread(what: Range, cut: Cut, held: Lease, calls: CopyCalls) -> bool:
    """Read it into the slots and copy it from there; False if a byte of it could not be read."""
    slots, stream = held.slots, held.stream
    piece, whole, each, count = cut
    reads = _Pieces(what, cut, [address for address, _ in slots], held.by.rings)
    held.in_doubt = True
    reads.begin()
    lag, last = len(slots) // 2, -(-what.nbytes // piece) - 1
    for n in range(last + 1):
        if not reads.has_read(n):
            return False
        stretch, rest = divmod((n + 1) * piece, whole)
        if rest and n < last:
            continue
        done = (stretch - (not rest)) if n < last else n * piece // whole
        at, nbytes = done * whole, min(whole, what.nbytes - done * whole)
        calls.copy(what.address + at, reads.place(done), nbytes, stream)
        slot, more = divmod(done + 1, each)
        if not more and reads.room < count:  # all that the slot before this one held is on its way
            calls.record(slots[(slot - 1) % len(slots)][1], stream)
            if slot >= lag:
                calls.sync(slots[(slot - lag) % len(slots)][1])
                reads.make_room((slot - lag + 1) * each + len(slots) * each)
    calls.finish(stream)
    held.in_doubt = False
    return True


class _Pieces:
    """The pieces of a read, dealt out to the kernel's threads in turn. What the page cache holds is
    read in the order of asking."""

    def __init__(self, what: Range, cut: Cut, slots: list[int], rings: list[uring.Ring]) -> None:
        self._what, self._cut, self._rings = what, cut, rings
        self._places = [address + at * cut.whole for address in slots for at in range(cut.each)]
        self._head, self._flags = uring.OP_READ | what.fd << 32, what.flags << 32
        self._count, self._per = -(-what.nbytes // cut.piece), cut.whole // cut.piece
        self.room = len(self._places)
        """Stretches, from the first on, that there has been room for."""
        self._waiting: list[int] = []

    def place(self, stretch: int) -> int:
        """Where in the slots a stretch begins."""
        return self._places[stretch % len(self._places)]

    def begin(self) -> None:
        for n in range(len(self._rings)):
            self._ask(n)

    def make_room(self, stretches: int) -> None:
        """There is room for the stretches before this one."""
        self.room = stretches
        waiting, self._waiting = sorted(self._waiting), []
        for n in waiting:
            self._ask(n)

    def _ask(self, n: int) -> None:
        if n >= self._count:
            return
        stretch, part = divmod(n, self._per)
        if stretch >= self.room:
            self._waiting.append(n)
            return
        piece, ring = self._cut.piece, self._rings[n % len(self._rings)]
        at = n * piece
        address, nbytes = self.place(stretch) + part * piece, min(piece, self._what.nbytes - at)
        ring.put_one(self._head, self._what.file_offset + at, address, nbytes | self._flags, n)
        ring.hand_over()

    def has_read(self, n: int) -> bool:
        """Wait for a piece, and ask for the next ones of its thread; False where it is not what was
        asked for. Call in order."""
        width = len(self._rings)
        ring = self._rings[n % width]
        found = ring.take_one()
        if found is None:
            until = monotonic() + SPIN
            while found is None and monotonic() < until:
                found = ring.take_one()
            while found is None:
                ring.enter(1)
                found = ring.take_one()
        if found != (n, min(self._cut.piece, self._what.nbytes - n * self._cut.piece)):
            return False
        if n < width:
            for ahead in range(1, UNDER_WAY):
                self._ask(n + ahead * width)
        self._ask(n + UNDER_WAY * width)
        return True
