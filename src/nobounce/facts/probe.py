"""Does this descriptor really do direct I/O? Asked by reading one aligned block where statx does not say (DIOALIGN absent).

O_DIRECT may be accepted and mean nothing: the file system may serve it from the page cache. A read was direct if it moved the
thread's own read_bytes by its size and left no page behind: a cold buffered read moves the counter too, but leaves pages.
Where the kernel will not count pages (a file of somebody else's, Linux before 6.5), sampling would start reading the very page
in question, so the block is read a second time instead: what the first read left in the page cache, the second gets from
there, and the counter stands still.
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

from nobounce.facts.pagecache import counted
from nobounce.facts.threadio import thread_io

BLOCK = 4096


def probe_direct(direct_fd: int) -> Literal["yes", "no", "unknown"]:
    """Read the first 4 KiB through `direct_fd` (opened O_DIRECT) and see what the kernel counted.

    "unknown" for an empty or unreadable file and where the kernel does not count. Never raises.
    """
    cached_before = counted(direct_fd, 0, BLOCK).resident_bytes
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
                fetched = _fetched(direct_fd, block)
                if not fetched:
                    return "unknown" if fetched is None else "no"
        except OSError:
            return "no"
    if cached_before is None:
        return "yes"
    cached_after = counted(direct_fd, 0, BLOCK).resident_bytes
    return "yes" if cached_after is not None and cached_after <= cached_before else "no"


def _fetched(direct_fd: int, block: mmap.mmap) -> bool | None:
    """Whether a read made the kernel fetch as much as it returned; None where it returned nothing or nobody counted."""
    before = thread_io()
    moved = os.preadv(direct_fd, [block], 0)
    after = thread_io()
    if moved == 0 or before is None or after is None:
        return None
    return after[0] - before[0] >= moved
