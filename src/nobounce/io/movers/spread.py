"""One read of page-cached bytes, by threads of the kernel side by side, on its caller's thread.

What is too large for one core to copy quickly, and over before a thread of ours or a worker of io_uring has woken.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.errors import DeviceError
from nobounce.io.movers import uring

if TYPE_CHECKING:
    import numpy as np

    from nobounce.io.movers.bounce import Ring
    from nobounce.io.movers.pollers import KernelBlocks
    from nobounce.runtimes.base import CopyCalls

    Array = np.ndarray[Any, Any]

LEAST_UNIT, MOST_UNIT = 64 << 10, 256 << 10
"""Bytes of one read: powers of two, so that slots hold whole ones."""
LEAST_COPY = 256 << 10
"""Bytes of one copy, unless all of it is less; at most a slot's."""
COPIES = 8
"""Into so many copies a read is cut, within these: the first begins early, the last one is short."""
GROUP_SLOTS, GROUPS = 4, 6
"""Slots that are read into together, by all threads, and how many such groups a read has at most: what it does not find room for waits
for the copies out of the oldest."""


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
        """Have slots for so many bytes, or for all groups; False where there are too few now. Raises DeviceError and OutOfMemoryError."""
        self.stream = self.ring.copy_stream()
        wanted = min(-(-nbytes // self.ring.slot_nbytes), GROUPS * GROUP_SLOTS)
        while len(self.slots) < wanted:
            slot = self.ring.acquire(wait=not self.slots)
            if slot is None:
                break
            self.slots.append(slot)
        if wanted > len(self.slots) >= 2 * GROUP_SLOTS:  # whole groups, of which two are enough
            wanted = len(self.slots) // GROUP_SLOTS * GROUP_SLOTS
            while len(self.slots) > wanted:
                self.ring.release(self.slots.pop())
        return len(self.slots) == wanted

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
    step = GROUP_SLOTS * held.ring.slot_nbytes
    parts = [
        what._replace(
            file_offset=what.file_offset + at, address=what.address + at, nbytes=min(step, what.nbytes - at)
        )
        for at in range(0, what.nbytes, step)
    ]
    groups = [held.slots[i : i + GROUP_SLOTS] for i in range(0, len(held.slots), GROUP_SLOTS)]
    unit = _unit(what.nbytes, held.by.width)
    under_way: deque[_Part] = deque()
    held.in_doubt = True
    for n, part in enumerate(parts):
        slots = groups[n % len(groups)]
        if len(under_way) == len(groups) and not under_way.popleft().copy(held, calls):
            return False
        if n >= len(groups):
            calls.sync(slots[0][1])
        under_way.append(_Part(part, slots, unit, held))
    while under_way:
        if not under_way.popleft().copy(held, calls):
            return False
    calls.finish(held.stream)
    held.in_doubt = False
    return True


class _Part:
    """What is read into one group of slots."""

    def __init__(self, what: Range, slots: list[tuple[int, int]], unit: int, held: Lease) -> None:
        by, self._slot_nbytes = held.by, held.ring.slot_nbytes
        self._what, self._slots, self._unit = what, slots, unit
        reads = _reads(what, unit, self._slot_nbytes, slots)
        self._count, self._width = len(reads), min(by.width, len(reads))
        self._started = [by.start(reads[k :: self._width]) for k in range(self._width)]

    def copy(self, held: Lease, calls: CopyCalls) -> bool:
        """Wait for what is read, copy by copy, and queue these; False where a byte is missing."""
        what, unit, slot_nbytes = self._what, self._unit, self._slot_nbytes
        whole = max(LEAST_COPY, unit, min(slot_nbytes, 1 << (what.nbytes // COPIES).bit_length()))
        for begin in range(0, what.nbytes, whole):
            nbytes = min(whole, what.nbytes - begin)
            if not self._are_read(held.by, begin // unit, (begin + nbytes - 1) // unit):
                return False
            slot, at = divmod(begin, slot_nbytes)
            calls.copy(what.address + begin, self._slots[slot][0] + at, nbytes, held.stream)
        calls.record(self._slots[0][1], held.stream)
        return True

    def _are_read(self, by: KernelBlocks, first: int, last: int) -> bool:
        """Wait for units `first` to `last`: unit n is the thread n % width's."""
        for k in range(self._width):
            start, stop = -(-(first - k) // self._width), (last - k) // self._width + 1
            if stop <= start:
                continue
            moved = by.wait(self._started[k], stop)[start:]
            ends = k == (self._count - 1) % self._width and last == self._count - 1
            if ends and int(moved[-1]) < self._what.nbytes - (self._count - 1) * self._unit:
                return False
            if int(moved[: len(moved) - ends].min(initial=self._unit)) < self._unit:
                return False
        return True


def _unit(nbytes: int, width: int) -> int:
    share = nbytes // (2 * width)
    return max(LEAST_UNIT, min(MOST_UNIT, 1 << max(0, share.bit_length() - 1)))


def _reads(what: Range, unit: int, slot_nbytes: int, slots: list[tuple[int, int]]) -> Array:
    """Entries of a ring, in the order of the file."""
    import numpy as np

    count = -(-what.nbytes // unit)
    made = np.zeros((count, uring.ENTRY_WORDS), np.uint64)
    at = np.arange(count, dtype=np.int64) * unit
    bases = np.array([address for address, _ in slots], np.int64)
    made[:, 0] = uring.OP_READ | what.fd << 32
    made[:, 1] = at + what.file_offset
    made[:, 2] = bases[at // slot_nbytes] + at % slot_nbytes
    made[:, 3] = unit | what.flags << 32
    made[-1, 3] = what.nbytes - (count - 1) * unit | what.flags << 32
    return made
