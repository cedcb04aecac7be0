"""One read of page-cached bytes, by threads of the kernel side by side, on its caller's thread.

What is too large for one core to copy quickly, and over before a thread of ours or a worker of io_uring has woken.
"""

from __future__ import annotations

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
"""Bytes of one read: powers of two, so that slots hold whole ones. Small ones for io_uring's workers, which are woken one by one while
they are asked for."""
LEAST_COPY = 256 << 10
"""Bytes of one copy, unless all of it is less; at most a slot's."""
COPIES = 8
"""Into so many copies a read is cut, within these: the first begins early, the last one is short."""


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
        """Have slots for so many bytes; False where there are too few now. Raises DeviceError and OutOfMemoryError."""
        self.stream = self.ring.copy_stream()
        while len(self.slots) * self.ring.slot_nbytes < nbytes:
            slot = self.ring.acquire(wait=not self.slots)
            if slot is None:
                return False
            self.slots.append(slot)
        return True

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
    """Read it into the slots, which hold all of it, and copy it from there; False if a byte of it could not be read."""
    by, ring, slots = held.by, held.ring, held.slots
    unit = _unit(what.nbytes, by.width)
    whole = max(LEAST_COPY, unit, min(ring.slot_nbytes, 1 << (what.nbytes // COPIES).bit_length()))
    reads = _reads(what, unit, ring.slot_nbytes, slots)
    held.in_doubt = True
    width = min(by.width, len(reads))
    started = [by.start(reads[k::width]) for k in range(width)]
    last = len(reads) - 1
    for begin in range(0, what.nbytes, whole):
        nbytes = min(whole, what.nbytes - begin)
        end = (begin + nbytes - 1) // unit
        for k in range(width):
            rows = (end - k) // width + 1
            if rows <= 0:
                continue
            first = max(0, -(-(begin // unit - k) // width))
            moved = by.wait(started[k], rows)[first:]
            short = end == last and last % width == k
            if len(moved) and (
                int(moved[: len(moved) - short].min(initial=unit)) < unit
                or (short and int(moved[-1]) < what.nbytes - last * unit)
            ):
                return False
        slot, at = divmod(begin, ring.slot_nbytes)
        calls.copy(what.address + begin, slots[slot][0] + at, nbytes, held.stream)
    calls.finish(held.stream)
    held.in_doubt = False
    return True


def _unit(nbytes: int, width: int) -> int:
    if width == 1:
        return LEAST_UNIT
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
