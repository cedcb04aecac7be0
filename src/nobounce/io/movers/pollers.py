"""Blocks read by threads of the kernel side by side, driven by one thread of ours.

Threads of this process hand the interpreter's lock to one another at every call, and one that sleeps takes
longer to wake than a megabyte to copy. A ring with IORING_SETUP_SQPOLL has a thread of its own that keeps
looking for work for a moment after the last request: on 16 cores one Python thread has 16 MiB of page-cached
bytes read in 0.27 ms by twelve of them, where twelve of its own threads take 0.44 and io_uring's workers,
which are woken one after the other, 0.45 to 0.9 (benchmarks/README.md). But that moment keeps a core busy for
some 7 ms, so few do where a read is alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from nobounce.io.movers import uring
from nobounce.io.movers.gather import NUMBER

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

IDLE_MS = 1
"""Milliseconds that such a thread looks for work before it sleeps: it keeps a core busy meanwhile."""
DEPTH = 2048
"""Entries of such a ring: two windows of a batch."""
FOLLOWS = 2
"""A read that begins within so many times as long as the last one took follows on it: polling
is not for nothing then."""


class Started:
    """Reads under way in one ring, and their results as far as they have ended."""

    __slots__ = ("base", "left", "results", "ring")

    def __init__(self, ring: uring.Ring, base: int, results: Array) -> None:
        self.ring, self.base, self.results, self.left = ring, base, results, len(results)


class KernelBlocks:
    """Some of the process's rings, for one thread until it closes it."""

    def __init__(self, rings: list[uring.Ring], home: list[uring.Ring]) -> None:
        """`home`: where they go then."""
        self._rings, self._home = rings, home
        self._started: dict[int, list[Started]] = {}
        self._turn = self._number = 0

    def begin(self) -> int:
        """Call once all the rings are there; returns how many."""
        self._started = {id(r): [] for r in self._rings}
        return len(self._rings)

    @property
    def ahead(self) -> int:
        """Calls of `start` that are worth having under way."""
        return len(self._rings) + 1

    @property
    def rings(self) -> list[uring.Ring]:
        """Each of which reads on its own."""
        return self._rings

    def start(self, reads: Array) -> Started:
        """As `Blocks.start`: by the next ring in turn. At most DEPTH reads."""
        import numpy as np

        n = len(reads)
        ring = self._rings[self._turn]
        self._turn = (self._turn + 1) % len(self._rings)
        while ring.room < n:
            self._collect(ring, wait=1)
        base, self._number = self._number, self._number + n
        reads[:, NUMBER] = np.arange(base, base + n, dtype=np.uint64)
        started = Started(ring, base, np.zeros(n, np.int64))
        self._started[id(ring)].append(started)
        ring.put(reads)
        ring.hand_over()
        return started

    def is_done(self, started: Started) -> bool:
        """Whether all of it has ended."""
        if started.left and started.ring.waiting:
            self._collect(started.ring, wait=0)
        return not started.left

    def finish(self, started: Started) -> Array:
        """As `Blocks.finish`."""
        while started.left:
            self._collect(started.ring, wait=started.left)
        return started.results

    def _collect(self, ring: uring.Ring, *, wait: int) -> None:
        """What has ended, once `wait` reads have."""
        if ring.waiting < wait:
            ring.enter(wait)
        ends = ring.take()
        numbers = ends["user_data"].view("int64")
        mine = self._started[id(ring)]
        if len(mine) == 1:
            one = mine[0]
            one.results[numbers - one.base] = ends["result"]
            one.left -= len(ends)
            if not one.left:
                mine.clear()
            return
        for one in list(mine):
            at = numbers - one.base
            here = (at >= 0) & (at < len(one.results))
            count = int(here.sum())
            if count:
                one.results[at[here]] = ends["result"][here]
                one.left -= count
                if not one.left:
                    mine.remove(one)

    def drain(self) -> None:
        """Wait until the kernel writes nowhere any more."""
        for ring in self._rings:
            while ring.in_flight:
                ring.enter(1)
                ring.take()
        for started in self._started.values():
            started.clear()

    def close(self) -> None:
        """Give the rings back, once nothing is under way; goes on where an interrupt has cut it short."""
        self.drain()
        with contextlib.suppress(IndexError):
            self._home.extend(iter(self._rings.pop, None))

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and getattr(self, "_rings", None):
            self.close()


class _Pool:
    """Polling rings that are kept for the next reads."""

    def __init__(self) -> None:
        self.free: list[uring.Ring] = []
        self.made: list[None] = []
        """An entry for each ring that was made."""
        self.refused: list[OSError] = []
        self.next_until = -math.inf
        """Until when a read follows on the last one."""

    def close(self) -> None:
        """In a forked child: the rings and their threads are the parent's."""
        for ring in self.free:
            ring.close()


_pool = _Pool()


def polled(wanted: int, most: int) -> KernelBlocks | None:
    """Up to `wanted` polling rings, of at most `most` in the process; None where
    there is none to be had now."""
    pool, rings = _pool, list[uring.Ring]()
    found = KernelBlocks(rings, pool.free)
    with contextlib.suppress(IndexError):
        # Taken out and kept in one call into C, which no interrupt cuts in two.
        rings.extend(islice(iter(pool.free.pop, None), wanted))
    while len(rings) < wanted and len(pool.made) < most and not pool.refused:
        pool.made.append(None)
        try:
            rings.extend(map(_polling_ring, (IDLE_MS,)))
        except OSError as e:
            pool.made.pop()
            pool.refused.append(e)
    return found if found.begin() else None


def trim() -> None:
    """Close the rings that nobody uses, and end their threads."""
    pool = _pool
    with contextlib.suppress(IndexError):
        while True:
            pool.free.pop().close()
            pool.made.pop()


def follows(now: float) -> bool:
    """Whether a read that is worth several threads of the kernel ended just before `now`."""
    return now < _pool.next_until


def ended(began: float, now: float) -> None:
    """Such a read has ended."""
    _pool.next_until = now + FOLLOWS * (now - began)


def _polling_ring(idle_ms: int) -> uring.Ring:
    return uring.Ring(DEPTH, idle_ms=idle_ms)


def _forget() -> None:
    global _pool
    _pool.close()
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)
