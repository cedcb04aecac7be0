"""One read of page-cached bytes, by threads of the kernel side by side, on its caller's thread.

What is too large for one core to copy quickly, and over before a thread of ours or a worker of io_uring has woken.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import cycle, islice
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from nobounce.errors import DeviceError
from nobounce.io.movers import uring

if TYPE_CHECKING:
    from nobounce.io.movers.bounce import Ring
    from nobounce.io.movers.pollers import KernelBlocks
    from nobounce.runtimes.base import CopyCalls

STRETCHES, LEAST_STRETCH = 8, 1 << 20
"""Into so many stretches a read is cut, if each comes to a megabyte, and at most a slot: one is copied while the next are read."""
LEAST_PIECE, MOST_PIECE, GRAIN = 256 << 10, 512 << 10, 16 << 10
"""Bytes that one thread reads at a time, multiples of GRAIN. To ask for one, and to learn of its end, costs the caller some 4 us."""
MOST_SLOTS, FEW_SLOTS = 24, 8
"""Slots that a read has at most, and that are enough for a long one: what finds no room waits for the copies out of the oldest."""
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
    """A read in so many `stretches` of `whole` bytes, `each` of them to a slot, in pieces of `piece` bytes."""

    piece: int
    whole: int
    each: int
    stretches: int


def cutting(nbytes: int, threads: int, slot_nbytes: int) -> Cut:
    """So that all threads get about as much, in few pieces, and the first copy begins early."""
    share = -(-nbytes // threads // GRAIN) * GRAIN
    piece = min(max(share, LEAST_PIECE), MOST_PIECE)
    wanted = min(max(nbytes // STRETCHES, LEAST_STRETCH), slot_nbytes)
    whole = piece * max(1, min(round(wanted / piece), slot_nbytes // piece))
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
        """Have slots for all of it, or enough of them; False where there are too few now. Raises DeviceError and OutOfMemoryError."""
        self.stream = self.ring.copy_stream()
        wanted = min(-(-cut.stretches // cut.each), MOST_SLOTS)
        while len(self.slots) < wanted:
            slot = self.ring.acquire(wait=not self.slots)
            if slot is None:
                break
            self.slots.append(slot)
        return len(self.slots) >= min(wanted, FEW_SLOTS)

    def close(self) -> None:
        """Give everything back once nothing is under way. An interrupt comes after that: the kernel still writes into the slots."""
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
    room = len(slots) * each
    places = [address + at * whole for address, _ in slots for at in range(each)]
    threads = cycle([_Reads(ring, what) for ring in held.by.rings])
    held.in_doubt = True
    readers: list[list[_Reads]] = []
    """Of each stretch, in the order of its pieces."""

    def begin(until: int) -> None:
        asked: set[_Reads] = set()
        for n in range(len(readers), min(count, until)):
            first, nbytes = n * whole, min(whole, what.nbytes - n * whole)
            mine = list(islice(threads, -(-nbytes // piece)))
            for k, thread in enumerate(mine):
                at = k * piece
                thread.stage(n, first + at, places[n % room] + at, min(piece, nbytes - at))
            readers.append(mine)
            asked.update(mine)
        for thread in asked:
            thread.hand_over()

    begin(room)
    lag = len(slots) // 2
    for n in range(count):
        for thread in readers[n]:
            if not thread.has_read(n):
                return False
        nbytes = min(whole, what.nbytes - n * whole)
        calls.copy(what.address + n * whole, places[n % room], nbytes, stream)
        slot, last = divmod(n + 1, each)
        if len(readers) < count and not last:  # all that the slot before this one held is on its way
            calls.record(slots[(slot - 1) % len(slots)][1], stream)
            if slot >= lag:
                calls.sync(slots[(slot - lag) % len(slots)][1])
                begin((slot - lag + 1) * each + room)
    calls.finish(stream)
    held.in_doubt = False
    return True


class _Reads:
    """What one of the kernel's threads reads."""

    __slots__ = ("_fd", "_file_offset", "_flags", "_ring", "_staged", "_wanted")

    def __init__(self, ring: uring.Ring, what: Range) -> None:
        self._ring, self._fd, self._flags, self._file_offset = (
            ring,
            what.fd << 32,
            what.flags << 32,
            what.file_offset,
        )
        self._staged = 0
        self._wanted: deque[tuple[int, int]] = deque()
        """(stretch, bytes) of the reads under way, in order: what the page cache holds is read in the order of asking."""

    def stage(self, stretch: int, at: int, address: int, nbytes: int) -> None:
        self._ring.stage(
            self._staged,
            uring.OP_READ | self._fd,
            self._file_offset + at,
            address,
            nbytes | self._flags,
            stretch,
        )
        self._staged += 1
        self._wanted.append((stretch, nbytes))

    def hand_over(self) -> None:
        if self._staged:
            self._ring.commit(self._staged)
            self._ring.hand_over()
            self._staged = 0

    def has_read(self, stretch: int) -> bool:
        """Wait for the next read, which is of this stretch; False where it is not what was asked for."""
        ring = self._ring
        found = ring.take_one()
        if found is None:
            until = monotonic() + SPIN
            while found is None and monotonic() < until:
                found = ring.take_one()
            while found is None:
                ring.enter(1)
                found = ring.take_one()
        return found == self._wanted.popleft()
