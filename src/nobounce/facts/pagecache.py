"""What the page cache holds of a file: asked of cachestat(2), else sampled, never of mincore (it answers "everything" for a
file that the caller neither owns nor may write)."""

from __future__ import annotations

import errno
import os

from nobounce.facts import cachestat
from nobounce.facts.types import Residency

SAMPLES = 8


def residency(fd: int, file_offset: int, nbytes: int) -> Residency:
    """How much of a range is in the page cache. Never raises: what cannot be learnt is None, which means cold."""
    if nbytes <= 0:
        return Residency(0, 0, "cachestat")
    try:
        return Residency(min(nbytes, cachestat.cached_nbytes(fd, file_offset, nbytes)), nbytes, "cachestat")
    except OSError:
        return sample(fd, file_offset, nbytes)


def sample(fd: int, file_offset: int, nbytes: int) -> Residency:
    """Try a few bytes with preadv2(RWF_NOWAIT): EAGAIN means that they are not in the page cache."""
    hits = tried = 0
    byte = bytearray(1)
    for n in range(SAMPLES):
        at = file_offset + nbytes * n // SAMPLES
        try:
            if os.preadv(fd, [byte], at, os.RWF_NOWAIT) == 1:
                hits += 1
            tried += 1
        except OSError as e:
            if e.errno != errno.EAGAIN:
                return Residency(None, nbytes, "unknown")
            tried += 1
    return Residency(nbytes * hits // tried, nbytes, "nowait")


def drop(fd: int, file_offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to let go of clean pages of a range (0: to the end)."""
    os.posix_fadvise(fd, file_offset, nbytes, os.POSIX_FADV_DONTNEED)
