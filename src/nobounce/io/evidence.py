"""What the kernel itself says about direct bytes.

A direct read moves the thread's own read_bytes in /proc/thread-self/io by its size, but so does a cold
buffered read: the counter proves directness only together with a page cache that did not grow. One look
costs about 24 us, so a worker looks once before and once after its share of a transfer, and only for
transfers of 1 MiB and more.

Pages that appear are a suspicion, no proof: another reader of the file brings them in too. So such
places are read again, a block each: a direct read fetches it once more, and the page cache serves it
without the counter moving.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nobounce.errors import RouteError, printable
from nobounce.facts.pagecache import counted
from nobounce.facts.probe import fetches
from nobounce.facts.threadio import thread_io
from nobounce.route.scores import INDIRECT
from nobounce.route.types import Refusal

if TYPE_CHECKING:
    from nobounce.io.receipt import Receipt
    from nobounce.io.target import Target

MIN_NBYTES = 1 << 20
"""Direct bytes of a transfer from which on the kernel is asked."""
SERVED = INDIRECT["page-cache-served"]
"""Why bytes that were read directly are fallback's: the kernel denies it."""


class Meter:
    """Sums the calling thread's counter while it is on; several threads' meters are added by the job."""

    __slots__ = ("_column", "_start", "nbytes", "usable")

    def __init__(self, op: str) -> None:
        self._column = 0 if op == "read" else 1
        self._start: int | None = None
        self.nbytes = 0
        self.usable = True

    def on(self) -> None:
        if self._start is None and self.usable:
            seen = thread_io()
            if seen is None:
                self.usable = False
            else:
                self._start = seen[self._column]

    def off(self) -> None:
        if self._start is not None:
            seen = thread_io()
            if seen is None:
                self.usable = False
            else:
                self.nbytes += seen[self._column] - self._start
            self._start = None


Range = tuple[int, int]
"""(file_offset, nbytes)."""
WINDOW = 2 << 20
"""Bytes that are judged together: one place in them speaks for all that the page cache holds of them."""


def served_by_cache(fd: int, direct_fd: int, ranges: Iterable[Range], align: int) -> list[Range]:
    """The parts of `ranges` that an O_DIRECT read through `direct_fd` gets from the page cache.

    In windows of 2 MiB: of each that the page cache holds something of, a block is read. `align` bytes is the
    alignment of direct reads. Never raises: what cannot be told is not in the answer. Costs 1.5 us a window,
    and 80 us more where one is held.
    """
    grain = max(align, mmap.PAGESIZE)
    windows = [
        (at, min(WINDOW, start + nbytes - at))
        for start, nbytes in ranges
        for at in range(start, start + nbytes, WINDOW)
    ]
    held = [(window, place) for window in windows if (place := _held(fd, *window, grain)) is not None]
    if not held:
        return []
    found: list[Range] = []
    with contextlib.suppress(OSError), mmap.mmap(-1, grain) as block:
        block[0] = 0  # btrfs serves untouched memory from the page cache
        found += [window for window, place in held if fetches(direct_fd, block, place) is False]
    return found


def _held(fd: int, file_offset: int, nbytes: int, grain: int) -> int | None:
    """Where a block of a range lies of which the page cache holds something, or None; the half that
    holds more is looked into."""
    first, last = file_offset // grain, -(-(file_offset + nbytes) // grain)
    if not counted(fd, file_offset, nbytes).resident_bytes:
        return None
    while last - first > 1:
        middle = (first + last) // 2
        held = counted(fd, first * grain, (middle - first) * grain).resident_bytes
        first, last = (first, middle) if held else (middle, last)
    return first * grain


def denied(
    target: Target, file_offset: int, nbytes: int, ranges: list[Range], receipt: Receipt | None = None
) -> RouteError:
    """The error of a request that had to go direct, of which the kernel denies `ranges`."""
    moved = sum(n for _, n in ranges)
    return RouteError(
        f"{printable(target.filename)}: {target.op} of {nbytes} bytes at offset {file_offset} on "
        f"{target.device_name}: fastpath is required, but "
        f"{SERVED.sentence}: {moved} bytes from {ranges[0][0]} on [{SERVED.code}]. The contents of the "
        "buffer are undefined",
        (Refusal(SERVED.code, SERVED.sentence, SERVED.cure),),
        filename=target.filename,
        backend="fastpath",
        receipt=receipt,
    )
