"""Does this descriptor really do direct I/O? Asked by reading one aligned block where statx does
not say (DIOALIGN absent).

O_DIRECT may be accepted and mean nothing: the file system may serve it from the page cache. A read was direct
if it moved the thread's own read_bytes by its size and left no page behind: a cold buffered read moves the
counter too, but leaves pages. Where the kernel will not count pages (another user's file, Linux before
6.5), sampling would start reading the very page in question, so the block is read a second time instead: what
the first read left in the page cache, the second gets from there, and the counter stands still.

Where the counter stands still and no page is there either (FUSE, which asks a
process), nothing can be counted.

The block is the first that a disk has to be asked for: of holes nothing is read, and compressed extents prove
nothing of plain ones (facts/extents.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from nobounce.facts.extents import WINDOW, extents
from nobounce.facts.mountstats import nfs_direct_bytes
from nobounce.facts.pagecache import counted
from nobounce.facts.threadio import thread_io
from nobounce.facts.types import DirectProbe

BLOCK = 4096
_pread = ctypes.CDLL(None, use_errno=True).pread64
_pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_pread.restype = ctypes.c_ssize_t


def probe_direct(direct_fd: int, nfs: str | None = None) -> DirectProbe:
    """Read 4 KiB through `direct_fd` (opened O_DIRECT) and see what the kernel counted.

    "unknown" for an empty or unreadable file and where the kernel does not count for this process;
    "uncounted" where it does not count reads of this file system. `nfs` is the mount point of a file on NFS,
    whose client counts for itself. Never raises.
    """
    counted_before = nfs_direct_bytes(nfs) if nfs else None
    place = _place(direct_fd)
    cached_before = counted(direct_fd, place, BLOCK).resident_bytes
    if thread_io() is None:
        return "unknown"
    try:
        memory = mmap.mmap(-1, BLOCK)
    except OSError:
        return "unknown"
    with memory as block:
        block[0] = 0  # btrfs serves untouched memory from the page cache
        try:
            for _ in range(1 if cached_before is not None else 2):
                fetched = fetches(direct_fd, block, place)
                if not fetched:
                    break
        except OSError:
            return "no"
    if fetched is None:
        return "unknown"
    if cached_before is None:
        return "yes" if fetched else "no"
    cached_after = counted(direct_fd, place, BLOCK).resident_bytes
    if not fetched and cached_before == cached_after == 0:
        counted_after = nfs_direct_bytes(nfs) if nfs else None
        if counted_before is None or counted_after is None:
            return "uncounted"
        return "yes" if counted_after[0] - counted_before[0] >= BLOCK else "uncounted"
    if not fetched:
        return "no"
    return "yes" if cached_after is not None and cached_after <= cached_before else "no"


def _place(fd: int) -> int:
    """Where the first block lies that an O_DIRECT read should fetch from a disk; 0
    where FIEMAP does not tell."""
    with contextlib.suppress(OSError):
        for extent in extents(fd, 0, WINDOW):
            if extent.is_plain and extent.file_offset % BLOCK == 0:
                return extent.file_offset
    return 0


def fetches(direct_fd: int, block: mmap.mmap, file_offset: int) -> bool | None:
    """Whether reading a block makes the kernel fetch as much as it returns; None where it returns
    nothing or nothing is counted.

    A direct read fetches whatever the page cache holds; one that the page cache serves
    does not. Raises OSError.
    """
    before = thread_io()
    moved = _read(direct_fd, block, file_offset)
    after = thread_io()
    if moved == 0 or before is None or after is None:
        return None
    return after[0] - before[0] >= moved


def _read(fd: int, block: mmap.mmap, file_offset: int) -> int:
    """pread(2): os.preadv is preadv2(2), which a filter may refuse, and os.pread has no
    say in where the bytes go."""
    moved: int = _pread(fd, (ctypes.c_char * BLOCK).from_buffer(block), BLOCK, file_offset)
    if moved < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return moved
