"""Does this descriptor really do direct I/O? Asked by reading one aligned block where statx does not say (DIOALIGN absent).

O_DIRECT may be accepted and mean nothing: the file system may serve it from the page cache. A read was direct if it moved the
thread's own read_bytes by its size and left no page behind: a cold buffered read moves the counter too, but leaves pages.
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

from nobounce.facts.pagecache import residency
from nobounce.facts.threadio import thread_io

BLOCK = 4096


def probe_direct(direct_fd: int) -> Literal["yes", "no", "unknown"]:
    """Read the first 4 KiB through `direct_fd` (opened O_DIRECT) and see what the kernel counted.

    "unknown" for an empty or unreadable file and where the kernel does not count. Never raises.
    """
    cached_before = residency(direct_fd, 0, BLOCK).resident_bytes
    before = thread_io()
    if before is None or cached_before is None:
        return "unknown"
    with mmap.mmap(-1, BLOCK) as block:
        block[0] = 0  # btrfs serves untouched memory from the page cache
        try:
            moved = os.preadv(direct_fd, [block], 0)
        except OSError:
            return "no"
    after = thread_io()
    if moved == 0 or after is None:
        return "unknown"
    cached_after = residency(direct_fd, 0, BLOCK).resident_bytes
    grew = cached_after is None or cached_after > cached_before
    return "yes" if after[0] - before[0] >= moved and not grew else "no"
