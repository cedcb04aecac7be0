"""Many blocks of files read into memory of the host by one thread, with no Python work per block.

The thread has a ring of io_uring to itself while it reads: whole arrays of entries go in, and what the page cache holds has been
copied when the call that hands them over returns. Where the kernel lets no one have a ring, the blocks are read one by one.
"""

from __future__ import annotations

import ctypes
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
NOWAIT = getattr(os, "RWF_NOWAIT", 0)
"""Read what the page cache holds; EAGAIN for a block of which it does not hold every byte. 0 where Python does not know of it."""


class Blocks(Protocol):
    """Whoever reads blocks for one thread."""

    def read(self, fds: Array, file_offsets: Array, nbytes: Array, addresses: Array, flags: int) -> Array:
        """Read block i of `nbytes[i]` bytes at `file_offsets[i]` of descriptor `fds[i]` to `addresses[i]`, in any order.

        Returns an int64 array: bytes read, short at the end of a file, or minus the errno. No block is under way afterwards.
        """

    def close(self) -> None:
        """No more blocks are read by this one."""


class RingBlocks:
    """Blocks read through a ring."""

    def __init__(self) -> None:
        """Raises OSError where no ring can be had."""
        self._ring = _take()

    def read(self, fds: Array, file_offsets: Array, nbytes: Array, addresses: Array, flags: int) -> Array:
        import numpy as np

        n = len(nbytes)
        made = uring.blank(n)
        made["opcode"] = uring.OP_READ
        made["fd"], made["offset"], made["address"] = fds, file_offsets, addresses
        made["nbytes"], made["op_flags"] = nbytes, flags
        made["user_data"] = np.arange(n)
        entries, ring, results = uring.words(made), self._ring, np.zeros(n, np.int64)
        sent = done = 0
        try:
            while done < n:
                more = min(ring.depth - (sent - done), n - sent)
                ring.put(entries[sent : sent + more])
                sent += more
                left = sent - done
                # While more are to come, few enough to be waited for that the storage never runs dry.
                ring.enter(left if sent == n else max(1, left // 4))
                ends = ring.take()
                results[ends["user_data"]] = ends["result"]
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

    def read(self, fds: Array, file_offsets: Array, nbytes: Array, addresses: Array, flags: int) -> Array:
        import numpy as np

        results = np.zeros(len(nbytes), np.int64)
        rows = zip(fds.tolist(), file_offsets.tolist(), nbytes.tolist(), addresses.tolist(), strict=True)
        for i, (fd, at, size, address) in enumerate(rows):
            try:
                results[i] = os.preadv(fd, [(ctypes.c_char * size).from_address(address)], at, flags)
            except OSError as e:
                results[i] = -(e.errno or 5)
        return results

    def close(self) -> None:
        return None


def blocks() -> Blocks:
    """The quickest there is here."""
    if not uring.unavailable():
        try:
            return RingBlocks()
        except OSError:  # no memory or descriptors left for one
            pass
    return CallBlocks()


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


def _forget() -> None:
    """In a forked child: the rings are the parent's."""
    for ring in _kept:
        ring.close()
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
