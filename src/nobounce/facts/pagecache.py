"""What the page cache holds of a file: asked of cachestat(2), else sampled, not of mincore (it answers
"everything" for a file that the caller neither owns nor may write).

overlay, hence every container image, is the exception. Its pages belong to the file below, and cachestat
counts those of the overlay's own inode: none, ever, so that a warm file would look cold, and a read through
the cache would leave no trace. There mincore on a mapping, which overlay hands to the file below, is asked
instead, and believed only where it does not lie.

cachestat refuses such a file too (EPERM): a model that root installed and a user reads is always sampled. And
sampling is no mere look. A missed preadv2(RWF_NOWAIT) answers EAGAIN, but Linux 6.18 starts reading that page
all the same (four pages at the start of a file): 8 missed samples leave 32 to 44 KiB behind. At fixed places
the next sampling would find just those and take a cold file for a cached one, so the places are random.
overlay and tmpfs answer EOPNOTSUPP. Unknown means cold.
"""

from __future__ import annotations

import errno
import os

from nobounce.facts import cachestat
from nobounce.facts.types import Residency

SAMPLES = 8
PLACES, PLACE_NBYTES = 32, 64 << 10
"""Where `estimate` looks, and how far."""
OVERLAY = 0x794C7630
_PAGE = os.sysconf("SC_PAGESIZE")


def _between(first: int, stop: int) -> int:
    """A random whole number from `first` on, below `stop`; without `random`, which takes
    a millisecond to import."""
    return first + int.from_bytes(os.urandom(8), "little") % (stop - first)


def residency(fd: int, file_offset: int, nbytes: int) -> Residency:
    """How much of a range is in the page cache. Never raises: what cannot be learnt
    is None, which means cold."""
    for ask in (counted, sample):
        found = ask(fd, file_offset, nbytes)
        if found.resident_bytes is not None:
            return found
    return _below(fd, file_offset, nbytes)


def counted(fd: int, file_offset: int, nbytes: int) -> Residency:
    """The same, but only where every page is counted, as evidence needs it: None where
    samples alone would tell.

    Asking leaves no page behind, as sampling does. Never raises.
    """
    if nbytes <= 0:
        return Residency(0, 0, "cachestat")
    try:
        cached = cachestat.cached_nbytes(fd, file_offset, nbytes)
        if cached == 0 and cachestat.descriptor_type(fd) == OVERLAY:
            return _below(fd, file_offset, nbytes)
    except OSError:
        return Residency(None, nbytes, "unknown")
    return Residency(min(nbytes, cached), nbytes, "cachestat")


def estimate(fd: int, file_offset: int, nbytes: int) -> float:
    """About which part of a range, 0 to 1, is in the page cache: judged by a few places spread over it
    where pages are counted."""
    if nbytes > PLACES * PLACE_NBYTES:
        places = (file_offset + (nbytes - PLACE_NBYTES) * n // (PLACES - 1) for n in range(PLACES))
        found = [counted(fd, place, PLACE_NBYTES).resident_bytes for place in places]
        if None not in found:
            return sum(n or 0 for n in found) / (PLACES * PLACE_NBYTES)
    return (residency(fd, file_offset, nbytes).resident_bytes or 0) / max(1, nbytes)


def _below(fd: int, file_offset: int, nbytes: int) -> Residency:
    try:
        cached = cachestat.mapped_nbytes(fd, file_offset, nbytes)
    except OSError:
        cached = None
    return (
        Residency(None, nbytes, "unknown")
        if cached is None
        else Residency(min(nbytes, cached), nbytes, "mincore")
    )


def sample(fd: int, file_offset: int, nbytes: int) -> Residency:
    """Ask for a byte in a random page of each eighth with preadv2(RWF_NOWAIT): EAGAIN means that it
    is not in the page cache.

    No page is asked twice: one that was missed is being read by then.
    """
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:  # an interpreter built for a C library from before preadv2
        return Residency(None, nbytes, "unknown")
    hits = 0
    byte = bytearray(1)
    first = file_offset // _PAGE
    pages = (file_offset + nbytes - 1) // _PAGE - first + 1
    parts = min(SAMPLES, pages)
    for n in range(parts):
        page = first + _between(pages * n // parts, pages * (n + 1) // parts)
        try:
            hits += os.preadv(fd, [byte], max(page * _PAGE, file_offset), nowait)
        except OSError as e:
            if e.errno != errno.EAGAIN:
                return Residency(None, nbytes, "unknown")
    return Residency(nbytes * hits // parts, nbytes, "nowait")


def drop(fd: int, file_offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to let go of clean pages of a range (0: to the end), of the pages at its edges too,
    which POSIX_FADV_DONTNEED keeps where the range covers them in part."""
    first = file_offset // _PAGE * _PAGE
    last = -(-(file_offset + nbytes) // _PAGE) * _PAGE
    os.posix_fadvise(fd, first, last - first if nbytes else 0, os.POSIX_FADV_DONTNEED)
