"""Who uses which slots: counts in this process, locks of the file between processes.

A reader in another process holds a shared lock on the bytes of the slots that it reads, the writer an exclusive one on those that it
writes. They are locks of the open file description (fcntl(2), F_OFD_SETLK), so the kernel ends them with the process that held them,
kill -9 included, and two stores in one process are strangers as two processes are. The writer's own reads need no lock: it counts them.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce.errors import FileError

if TYPE_CHECKING:
    from nobounce.kv.fileformat import Geometry

    Array = np.ndarray[Any, Any]

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks)."""
_TAKEN = (errno.EAGAIN, errno.EACCES)


def runs(slots: Array) -> list[tuple[int, int]]:
    """(first, count) of neighbours among sorted, different slots."""
    if not len(slots):
        return []
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    counts = np.diff(starts, append=len(slots))
    return list(zip(slots[starts].tolist(), counts.tolist(), strict=True))


class Pins:
    """Slots in use, of one store. The store's lock is held around every call."""

    def __init__(self, fd: int, path: str, geometry: Geometry, *, writer: bool) -> None:
        self._path = path
        self._fd, self._geometry, self._writer = fd, geometry, writer
        self._counts = np.zeros(geometry.capacity, np.int32)

    def count(self, slot: int) -> int:
        """How many of this process's calls use it."""
        return int(self._counts[slot])

    @property
    def in_use(self) -> int:
        """Slots that this process's calls use."""
        return int(np.count_nonzero(self._counts))

    def add(self, slots: Array) -> Array:
        """Pin slots for reading; returns those that could not be, as another process writes them."""
        lost: list[int] = []
        if not self._writer:
            fresh = np.unique(slots[self._counts[slots] == 0])
            lost = self._lock_each(fresh, fcntl.F_RDLCK)
        refused = np.isin(slots, lost) if lost else np.zeros(len(slots), bool)
        np.add.at(self._counts, slots[~refused], 1)
        return refused

    def remove(self, slots: Array) -> None:
        """The end of one use of each slot."""
        np.subtract.at(self._counts, slots, 1)
        if not self._writer:
            free = np.unique(slots)
            self.unlock(free[self._counts[free] == 0])

    def lock(self, slots: Array) -> list[int]:
        """Take sorted slots for writing; returns those that other processes read."""
        return self._lock_each(slots, fcntl.F_WRLCK)

    def unlock(self, slots: Array) -> None:
        for first, count in runs(np.sort(slots)):
            self._set(fcntl.F_UNLCK, first, count)

    def _lock_each(self, slots: Array, kind: int) -> list[int]:
        lost = []
        for first, count in runs(slots):
            if not self._set(kind, first, count):
                lost += [s for s in range(first, first + count) if count == 1 or not self._set(kind, s, 1)]
        return lost

    def _set(self, kind: int, first: int, count: int) -> bool:
        of = self._geometry
        start = of.data_offset + first * of.slot_nbytes
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, start, count * of.slot_nbytes, 0))
        except OSError as e:
            if e.errno in _TAKEN:
                return False
            raise FileError.from_oserror(e, self._path, "lock slots of") from e
        return True
