"""Many blocks of files read into memory of the host by one thread, with no Python work per block.

The thread has a ring of io_uring to itself while it reads: whole arrays of entries go in, and what the page
cache holds has been copied when the call that hands them over returns. Where the kernel lets no one have a
ring, the blocks are read one by one.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any, Protocol

from nobounce.io.movers import uring

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

DEPTH = 256
"""Entries of a thread's ring: 128 to 512 read the page cache at the same speed, and disks want no more."""
KEPT_RINGS = 32
"""Rings that are kept for the next reads: making one takes as long as reading a hundred blocks."""
ADDRESS, NUMBER = 2, 4
"""Words of an entry: where in memory it begins, and its user_data."""
NOWAIT = getattr(os, "RWF_NOWAIT", 0)
"""Read what the page cache holds; EAGAIN for a block of which it does not hold every byte. 0 where
Python does not know of it."""


def entries(
    fd: int,
    file_offsets: Array,
    nbytes: Array,
    addresses: Array,
    *,
    nowait: bool = False,
    write: bool = False,
) -> Array:
    """Reads, or writes, of one descriptor as entries of a ring (`uring.words`), numbered from 0."""
    import numpy as np

    made = np.zeros((len(nbytes), uring.ENTRY_WORDS), np.uint64)
    made[:, 0] = (uring.OP_WRITE if write else uring.OP_READ) | fd << 32
    made[:, 1], made[:, ADDRESS] = file_offsets, addresses
    made[:, 3] = nbytes
    if nowait:
        made[:, 3] |= np.uint64(NOWAIT << 32)
    made[:, NUMBER] = np.arange(len(nbytes))
    return made


def moved(reads: Array, address: int) -> Array:
    """The same reads, their memory beginning at `address` and their distances kept."""
    there = reads.copy()
    there[:, ADDRESS] -= reads[0, ADDRESS]
    there[:, ADDRESS] += there.dtype.type(address)
    return there


class Blocks(Protocol):
    """Whoever reads blocks for one thread."""

    @property
    def ahead(self) -> int:
        """Calls of `start` that are worth having under way at once."""

    def start(self, reads: Array) -> Any:
        """Begin the `entries`, which are read in any order; they are numbered one after the other, and this
        one's to number anew. Returns what the other methods take."""

    def is_done(self, started: Any) -> bool:
        """Whether `finish` would not wait."""

    def finish(self, started: Any) -> Array:
        """An int64 array: bytes read, short at the end of a file, or minus the errno. None of these
        is under way afterwards."""

    def drain(self) -> None:
        """Wait until nothing is under way."""

    def close(self) -> None:
        """No more blocks are read by this one, and none is under way."""


class Reader(Protocol):
    """Whoever reads blocks and returns when they are there."""

    def read(self, reads: Array) -> Array:
        """`Blocks.start` and `finish`."""

    def close(self) -> None: ...


class AtOnce:
    """A reader's blocks."""

    ahead = 1

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def start(self, reads: Array) -> Array:
        return self._reader.read(reads)

    def is_done(self, started: Array) -> bool:
        return True

    def finish(self, started: Array) -> Array:
        return started

    def drain(self) -> None:
        return None

    def close(self) -> None:
        self._reader.close()


class RingBlocks:
    """Blocks read through a ring."""

    def __init__(self) -> None:
        """Raises OSError where no ring can be had."""
        self._ring = _take()

    def read(self, reads: Array) -> Array:
        import numpy as np

        ring, n, first = self._ring, len(reads), int(reads[0, NUMBER])
        results = np.zeros(n, np.int64)
        sent = done = 0
        try:
            while done < n:
                more = min(ring.depth - (sent - done), n - sent)
                ring.put(reads[sent : sent + more])
                sent += more
                left = sent - done
                # While more are to come, few enough to be waited for that the storage never runs dry.
                ring.enter(left if sent == n else max(1, left // 4))
                ends = ring.take()
                results[ends["user_data"].astype(np.int64) - first] = ends["result"]
                done += len(ends)
        except BaseException:
            while ring.in_flight:  # the memory is not the caller's again before
                ring.enter(ring.in_flight)
                ring.take()
            raise
        return results

    def close(self) -> None:
        _give(self._ring)


class CallBlocks:
    """Blocks read by a call each."""

    def read(self, reads: Array) -> Array:
        import numpy as np

        results = np.zeros(len(reads), np.int64)
        for i, (head, at, address, size) in enumerate(reads[:, :4].tolist()):
            flags, nbytes = size >> 32, size & 0xFFFF_FFFF
            call = os.pwritev if head & 0xFF == uring.OP_WRITE else os.preadv
            try:
                results[i] = call(head >> 32, [(ctypes.c_char * nbytes).from_address(address)], at, flags)
            except OSError as e:
                results[i] = -(e.errno or errno.EIO)
        return results

    def close(self) -> None:
        return None


def blocks() -> Blocks:
    """What one thread reads by alone: the quickest there is here."""
    if not uring.unavailable():
        try:
            return AtOnce(RingBlocks())
        except OSError:  # no memory or descriptors left for one
            pass
    return AtOnce(CallBlocks())


_kept: list[uring.Ring] = []


def _take() -> uring.Ring:
    try:
        return _kept.pop()
    except IndexError:
        return uring.Ring(DEPTH)


def _give(ring: uring.Ring) -> None:
    if len(_kept) < KEPT_RINGS:
        _kept.append(ring)
    else:
        ring.close()


def trim() -> None:
    """Close the rings that nobody uses."""
    while _kept:
        _kept.pop().close()


def _forget() -> None:
    """In a forked child: the rings are the parent's."""
    for ring in _kept:
        ring.close()
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
