"""What the kernel itself says about direct bytes.

A direct read moves the thread's own read_bytes in /proc/thread-self/io by its size, but so does a cold buffered read: the
counter proves directness only together with a page cache that did not grow. One look costs about 24 us, so a worker looks
once before and once after its share of a transfer, and only for transfers of 1 MiB and more.
"""

from __future__ import annotations

from nobounce.facts.threadio import thread_io

MIN_NBYTES = 1 << 20
"""Direct bytes of a transfer from which on the kernel is asked."""


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
