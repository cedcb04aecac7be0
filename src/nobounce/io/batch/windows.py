"""What one thread gathers at a time: a window of requests, read in place or packed into a bounce slot and copied from there."""

from __future__ import annotations

import errno
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.errors import DeviceError, NobounceError
from nobounce.io.movers.gather import ADDRESS, NUMBER, Blocks, entries, moved

if TYPE_CHECKING:
    import numpy as np

    from nobounce.io.batch.group import Group
    from nobounce.io.movers.bounce import Ring
    from nobounce.runtimes.base import CopyCalls

    Array = np.ndarray[Any, Any]

SLOTS = 2
"""Bounce slots of one thread: one is read into while the other's copies are under way."""
BUFFERED, TRIED, DIRECT = range(3)
"""Through the page cache; only what it holds; past it, into a slot."""


class Part(NamedTuple):
    """Requests of one call that are read alike; slots, sizes and reads are of one length."""

    group: Group
    how: int
    packed: bool
    """Neighbours here are neighbours in the buffer."""
    slots: Array
    nbytes: Array
    addresses: Array
    """In the buffer."""
    reads: Array
    """Entries of a ring; through bounce slots, as if the first slot of all began at address 0."""

    @classmethod
    def of(cls, group: Group, how: int, slots: Array, places: tuple[Array, Array, Array]) -> Part:
        """Requests at (file offsets, sizes, addresses in the buffer)."""
        at, nbytes, to = places
        t = group.target
        fd = t.relay_fd if how == DIRECT else t.buffered_fd
        memory = to if t.ring is None else nbytes.cumsum() - nbytes
        packed = bool((to[1:] == to[:-1] + nbytes[:-1]).all())
        return cls(
            group, how, packed, slots, nbytes, to, entries(fd, at, nbytes, memory, nowait=how == TRIED)
        )

    def rows(self, start: int, stop: int) -> Part:
        """Some of them."""
        here = slice(start, stop)
        return Part(*self[:3], *(column[here] for column in self[3:]))

    def without(self, gone: Array) -> Part:
        """Those that `gone` does not mark."""
        left = Part(self.group, self.how, False, *(column[~gone] for column in self[3:]))
        return left._replace(reads=numbered(left.reads, left.nbytes, self.ring is not None))

    @property
    def ring(self) -> Ring | None:
        """The bounce slots that these go through."""
        return self.group.target.ring

    def joins(self, other: Part) -> bool:
        """Whether one window may hold both."""
        return self.ring is other.ring and (self.how == DIRECT) == (other.how == DIRECT)


def numbered(reads: Array, nbytes: Array, packed: bool) -> Array:
    """The reads numbered anew and, if they are to lie packed, placed anew."""
    import numpy as np

    made = reads.copy()
    made[:, NUMBER] = np.arange(len(reads))
    if packed:
        made[:, ADDRESS] = nbytes.cumsum() - nbytes
    return made


class Ended(NamedTuple):
    """Requests that the lane is done with: bytes that are in the buffer, or minus the errno. `error`: the device's, of all of them."""

    group: Group
    slots: Array
    results: Array
    how: int
    error: Exception | None = None


class Window(NamedTuple):
    """What a thread reads at a time, part behind part in the arrays."""

    parts: list[Part]
    packed: bool
    nbytes: Array
    addresses: Array
    reads: Array


def window(parts: list[Part]) -> Window:
    """The parts as one."""
    import numpy as np

    if len(parts) == 1:
        (p,) = parts
        return Window(parts, p.packed, p.nbytes, p.addresses, p.reads)
    nbytes, addresses, reads = (np.concatenate(c) for c in zip(*(p[4:] for p in parts), strict=True))
    return Window(parts, False, nbytes, addresses, numbered(reads, nbytes, parts[0].ring is not None))


def cut(parts: list[Part], rows: int, nbytes: int) -> list[list[Part]]:
    """The parts of each window: at most so many requests and bytes, but at least one request."""
    found: list[list[Part]] = []
    rows_left = room = 0
    for part in parts:
        ends, start, count = part.nbytes.cumsum(), 0, len(part.slots)
        while start < count:
            before = int(ends[start - 1]) if start else 0
            fits = (
                int(ends[start : start + rows].searchsorted(before + min(room, nbytes), "right"))
                if found
                else 0
            )
            fits = min(fits, rows_left)
            if not fits or not part.joins(found[-1][-1]):
                found.append([])
                rows_left, room = rows, nbytes
                fits = max(1, int(ends[start : start + rows].searchsorted(before + room, "right")))
            found[-1].append(part.rows(start, start + fits))
            start += fits
            rows_left, room = rows_left - fits, room - (int(ends[start - 1]) - before)
    return found


class _Slot(NamedTuple):
    """A window on its way from a bounce slot to the device."""

    window: Window
    results: Array
    slot: tuple[int, int]


def read(window: Window, address: int | None, by: Blocks) -> Array:
    """The results of a window's reads, in place or into the slot at `address`. Never raises: a request that is lost would be waited
    for for ever."""
    import numpy as np

    try:
        return by.read(window.reads if address is None else moved(window.reads, address))
    except (OSError, MemoryError) as e:
        return np.full(len(window.nbytes), -(getattr(e, "errno", 0) or errno.ENOMEM), np.int64)


def nothing(window: Window) -> Array:
    import numpy as np

    return np.zeros(len(window.nbytes), np.int64)


def _copies(window: Window, slot: int, results: Array) -> list[tuple[int, int, int]]:
    """(dst, src, nbytes) of what was read: neighbours on both sides are one copy."""
    import numpy as np

    if window.packed and bool((results == window.nbytes).all()):
        return [(int(window.addresses[0]), slot, int(results.sum()))]
    there = results > 0
    sources = window.nbytes.cumsum() - window.nbytes + slot
    targets, sources, nbytes = window.addresses[there], sources[there], results[there]
    if not len(targets):
        return []
    joined = (targets[1:] == targets[:-1] + nbytes[:-1]) & (sources[1:] == sources[:-1] + nbytes[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    sizes = np.add.reduceat(nbytes, starts)
    return list(zip(targets[starts].tolist(), sources[starts].tolist(), sizes.tolist(), strict=True))


def split(window: Window, results: Array, error: Exception | None = None) -> list[Ended]:
    found, at = [], 0
    for part in window.parts:
        n = len(part.slots)
        found.append(Ended(part.group, part.slots, results[at : at + n], part.how, error))
        at += n
    return found


class Relay:
    """One thread's slots of a device's bounce ring, two where there are two, and its copy stream."""

    def __init__(self, ring: Ring) -> None:
        """Raises DeviceError and OutOfMemoryError, and holds nothing then."""
        self._ring = ring
        self._under_way: deque[_Slot] = deque()
        self._free: list[tuple[int, int]] = []
        with ExitStack() as made:
            self._stream = ring.copy_stream()
            made.callback(ring.return_stream, self._stream)
            self._calls: CopyCalls = made.enter_context(ring.runtime.copy_calls(ring.device))
            first = ring.acquire(wait=True)
            if first is not None:
                self._free.append(first)
            self._undo = made.pop_all()

    def close(self) -> None:
        """Give slots and stream back; nothing is under way, but where its thread ends by an error of its own."""
        with self._undo:
            if self._under_way:
                self._calls.finish(self._stream)
            for slot in self._free + [one.slot for one in self._under_way]:
                self._ring.release(slot)

    def move(self, window: Window, by: Blocks) -> list[Ended]:
        """Read a window into a slot and start its copies; returns what has ended meanwhile."""
        ended: list[Ended] = []
        if not self._free:
            more = self._ring.acquire(wait=False) if len(self._under_way) < SLOTS else None
            if more is None:
                ended += self._finish_one()
            else:
                self._free.append(more)
        slot = self._free.pop()
        results = read(window, slot[0], by)
        self._under_way.append(_Slot(window, results, slot))
        try:
            copies = _copies(window, slot[0], results)
            if len(copies) == 1:
                self._calls.copy(*copies[0], self._stream)
            elif copies:
                self._calls.copy_many(copies, self._stream)
            self._calls.record(slot[1], self._stream)
        except (NobounceError, MemoryError) as e:
            ended += self._failed(e)
        return ended

    def finish(self) -> list[Ended]:
        """Everything that is under way."""
        ended: list[Ended] = []
        while self._under_way:
            ended += self._finish_one()
        return ended

    def _finish_one(self) -> list[Ended]:
        oldest = self._under_way[0]
        try:
            self._calls.sync(oldest.slot[1])
        except DeviceError as e:
            return self._failed(e)
        self._under_way.popleft()
        self._free.append(oldest.slot)
        return split(oldest.window, oldest.results)

    def _failed(self, error: Exception) -> list[Ended]:
        """The device has refused copies: those of every window under way are in doubt, and none is under way afterwards."""
        try:
            self._calls.finish(self._stream)
        except DeviceError as e:
            error.add_note(str(e))
        ended: list[Ended] = []
        while self._under_way:
            one = self._under_way.popleft()
            self._free.append(one.slot)
            ended += split(one.window, one.results, error)
        return ended


def together(ended: list[Ended]) -> list[Ended]:
    """Those that ended alike as one: looking at the ends of a window costs the same for one request and for thousands."""
    import numpy as np

    if len(ended) < 2:
        return ended
    alike: dict[tuple[int, int], list[Ended]] = {}
    for one in ended:
        alike.setdefault((id(one.group) if one.error is None else id(one), one.how), []).append(one)
    return [
        parts[0]
        if len(parts) == 1
        else parts[0]._replace(
            slots=np.concatenate([p.slots for p in parts]), results=np.concatenate([p.results for p in parts])
        )
        for parts in alike.values()
    ]
