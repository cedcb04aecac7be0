"""One read of page-cached bytes, by threads of the kernel side by side, on its caller's thread.

What is too large for one core to copy quickly, and over before a thread of ours or a worker of io_uring has woken.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from nobounce.errors import DeviceError
from nobounce.io.movers import uring

if TYPE_CHECKING:
    from nobounce.io.movers.bounce import Ring
    from nobounce.io.movers.pollers import KernelBlocks
    from nobounce.runtimes.base import CopyCalls

STRETCHES = 8
"""Into so many stretches a read is cut, if they come to a megabyte or more and at most a slot: each is read by all threads together, and
copied while the next one is."""
LEAST_STRETCH = 1 << 20
PIECE = 16 << 10
"""What one thread reads of a stretch is a multiple of this."""
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


class Lease:
    """What a spread read holds: the kernel's threads, slots of the bounce ring and a copy stream."""

    def __init__(self, by: KernelBlocks, ring: Ring) -> None:
        self.by, self.ring = by, ring
        self.slots: list[tuple[int, int]] = []
        self.stream = 0
        self.in_doubt = False
        """Whether copies may be under way."""

    def take(self, nbytes: int) -> bool:
        """Have slots for so many bytes, or enough of them; False where there are too few now. Raises DeviceError and OutOfMemoryError."""
        self.stream = self.ring.copy_stream()
        wanted = min(-(-nbytes // self.ring.slot_nbytes), MOST_SLOTS)
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


def spread(what: Range, held: Lease, calls: CopyCalls) -> bool:
    """Read it into the slots and copy it from there; False if a byte of it could not be read."""
    slot_nbytes, slots, stream = held.ring.slot_nbytes, held.slots, held.stream
    whole = max(LEAST_STRETCH, 1 << (what.nbytes // STRETCHES).bit_length() - 1) if what.nbytes else 1
    whole = min(whole, slot_nbytes)
    each = slot_nbytes // whole
    count, room = -(-what.nbytes // whole), len(slots) * each
    places = [address + at * whole for address, _ in slots for at in range(each)]
    threads = [_Reads(ring, what) for ring in held.by.rings]
    step = -(-whole // len(threads) // PIECE) * PIECE
    held.in_doubt = True
    begun = 0

    def begin(until: int) -> None:
        nonlocal begun
        for n in range(begun, until):
            first, nbytes = n * whole, min(whole, what.nbytes - n * whole)
            for thread, at in zip(threads, range(0, nbytes, step), strict=False):
                thread.stage(n, first + at, places[n % room] + at, min(step, nbytes - at))
        for thread in threads:
            thread.hand_over()
        begun = until

    begin(min(count, room))
    for n in range(count):
        for thread in threads:
            if not thread.has_read(n):
                return False
        nbytes = min(whole, what.nbytes - n * whole)
        calls.copy(what.address + n * whole, places[n % room], nbytes, stream)
        if begun < count and (n + 1) % each == 0:
            # What this slot held is on its way; the one behind it is the oldest.
            calls.record(slots[n // each % len(slots)][1], stream)
            if n // each + 1 >= len(slots) // 2:
                oldest = n // each + 1 - len(slots) // 2
                calls.sync(slots[oldest % len(slots)][1])
                begin(min(count, (oldest + 1) * each + room))
    calls.finish(stream)
    held.in_doubt = False
    return True


class _Reads:
    """What one of the kernel's threads reads."""

    __slots__ = ("_fd", "_file_offset", "_flags", "_read", "_ring", "_staged", "_wanted")

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
        """Wait for this thread's part of a stretch, if it has one; False where it is not what was asked for."""
        if not self._wanted or self._wanted[0][0] != stretch:
            return True
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
