"""What one thread gathers at a time: a window of requests, read in place or packed into a bounce
slot and copied from there."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.io.movers.gather import ADDRESS, NUMBER, Blocks, entries, moved
from nobounce.io.movers.scatter import TABLE_NBYTES
from nobounce.io.strategy import SLOT_NBYTES

if TYPE_CHECKING:
    import numpy as np

    from nobounce.io.batch.group import Group
    from nobounce.io.movers.bounce import Ring

    Array = np.ndarray[Any, Any]

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
        given = fd, at, nbytes, memory
        made = entries(*given, nowait=how == TRIED, write=group.op == "write")
        return cls(group, how, packed, slots, nbytes, to, made)

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

    def goes_with(self, other: Part) -> bool:
        """Whether both go the same way."""
        return self.ring is other.ring and (self.ring is None or self.group.op == other.group.op)

    def joins(self, other: Part) -> bool:
        """Whether one window may hold both."""
        return self.goes_with(other) and (self.how == DIRECT) == (other.how == DIRECT)


def numbered(reads: Array, nbytes: Array, packed: bool) -> Array:
    """The reads numbered anew and, if they are to lie packed, placed anew."""
    import numpy as np

    made = reads.copy()
    made[:, NUMBER] = np.arange(len(reads))
    if packed:
        made[:, ADDRESS] = nbytes.cumsum() - nbytes
    return made


class Ended(NamedTuple):
    """Requests that the lane is done with: bytes that are in the buffer, or minus the errno. `error`: the
    device's, of all of them."""

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
    most = nbytes
    for part in parts:
        nbytes = most if part.packed else min(most, SLOT_NBYTES - TABLE_NBYTES)
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


class Reading:
    """A window whose blocks are being read."""

    __slots__ = ("_by", "_known", "_started", "window")

    def __init__(self, window: Window, address: int | None, by: Blocks) -> None:
        """In place, or into the slot at `address`. Never raises: a request that is lost
        would be waited for for ever."""
        self.window, self._by = window, by
        self._known: Array | None = None
        try:
            reads = window.reads.copy() if address is None else moved(window.reads, address)
            self._started = by.start(reads)
        except (OSError, MemoryError) as e:
            self._known = _failure(window, e)

    def is_done(self) -> bool:
        return self._known is not None or self._by.is_done(self._started)

    def finish(self) -> Array:
        """The results; nothing is read into the memory any more. Never raises."""
        if self._known is None:
            try:
                self._known = self._by.finish(self._started)
            except (OSError, MemoryError) as e:
                self._by.drain()
                self._known = _failure(self.window, e)
        return self._known


def _failure(window: Window, e: OSError | MemoryError) -> Array:
    import numpy as np

    return np.full(len(window.nbytes), -(getattr(e, "errno", 0) or errno.ENOMEM), np.int64)


def nothing(window: Window) -> Array:
    import numpy as np

    return np.zeros(len(window.nbytes), np.int64)


class Copies(NamedTuple):
    """Arrays of one length; neighbours on both sides are one copy."""

    targets: Array
    sources: Array
    nbytes: Array


def out_of(window: Window, slot: int, results: Array) -> Copies:
    """Of what was read into a slot."""
    import numpy as np

    if window.packed and bool((results == window.nbytes).all()):
        return Copies(window.addresses[:1], np.array([slot]), results.sum(keepdims=True))
    there = results > 0
    sources = window.nbytes.cumsum() - window.nbytes + slot
    targets, sources, nbytes = window.addresses[there], sources[there], results[there]
    if len(targets) < 2:
        return Copies(targets, sources, nbytes)
    joined = (targets[1:] == targets[:-1] + nbytes[:-1]) & (sources[1:] == sources[:-1] + nbytes[:-1])
    if not bool(joined.any()):
        return Copies(targets, sources, nbytes)
    starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    return Copies(targets[starts], sources[starts], np.add.reduceat(nbytes, starts))


def into(window: Window, slot: int) -> Copies:
    """Of all of the window into a slot."""
    to = out_of(window, slot, window.nbytes)
    return Copies(to.sources, to.targets, to.nbytes)


def split(window: Window, results: Array, error: Exception | None = None) -> list[Ended]:
    found, at = [], 0
    for part in window.parts:
        n = len(part.slots)
        found.append(Ended(part.group, part.slots, results[at : at + n], part.how, error))
        at += n
    return found


def together(ended: list[Ended]) -> list[Ended]:
    """Those that ended alike as one: looking at the ends of a window costs the same for one
    request and for thousands."""
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
