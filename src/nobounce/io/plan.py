"""Small facts a request needs from the running process: what the page cache holds,
which errors are retried."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from nobounce.errors import ConfigError
from nobounce.facts.machine import own_cpus
from nobounce.facts.pagecache import counted, residency
from nobounce.route.types import CachedRange, Request

if TYPE_CHECKING:
    from nobounce.io.engine import Engine

WINDOW, PART = 2 << 20, 64 << 20
"""Where a range is mixed it is looked at in parts, and mixed parts in windows, which are not divided further:
a look takes as long as there are cached pages, and one that halves what is mixed would come by each page nine
times in a GiB, not three."""

MOSTLY = 0.9
"""The part of a range that must be in the page cache for the cache to be the cheaper way."""

SHARED_NBYTES, MOST_LOOKERS = 512 << 20, 8
"""Ranges from here on are looked at by several threads: a GiB that is cached in small
folios takes one 2 to 17 ms."""

Range = tuple[int, int]
"""(file_offset, nbytes)."""


class _Look:
    """Ranges looked at by the caller and by threads of the pool that have nothing else to do."""

    def __init__(self, fd: int, ranges: list[Range], pool: Engine) -> None:
        self.tickets = min(MOST_LOOKERS, own_cpus(), len(ranges))
        self._fd, self._ranges = fd, ranges
        self._changed = pool.scheduler.condition()
        self._next = self._ended = 0
        self.found: list[int | None] = [None] * len(ranges)

    def work(self) -> None:
        while True:
            with self._changed.mutex:
                if self._next == len(self._ranges):
                    return
                n, self._next = self._next, self._next + 1
            self.found[n] = residency(self._fd, *self._ranges[n]).resident_bytes
            with self._changed.mutex:
                self._ended += 1
                if self._ended == len(self._ranges):
                    self._changed.notify_all()

    def run(self, pool: Engine) -> list[int | None]:
        """Bytes of each range in the page cache, None where that cannot be told."""
        pool.assist(self)
        self.work()
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._ended == len(self._ranges))
        return self.found


def cached_ranges(
    fd: int, file_offset: int, nbytes: int, pool: Engine | None = None
) -> tuple[CachedRange, ...]:
    """What the page cache holds of a range: asked as a whole first, and in parts only where it is mixed."""
    shared = pool if nbytes >= SHARED_NBYTES and _is_counted(fd, file_offset) else None
    found: list[CachedRange] = []
    todo: list[Range] = [(file_offset, nbytes)]
    if shared is not None:
        # Several threads look at the parts of it; what they say of each is needed where the whole is mixed.
        parts = list(_cut(file_offset, nbytes, PART))
        residents = _Look(fd, parts, shared).run(shared)
        whole = None if None in residents else sum(n or 0 for n in residents)
        if _state(whole, nbytes) == "mixed":
            todo = parts
        else:
            residents = [whole]
    else:
        residents = _resident(fd, todo, None)
    while todo:
        mixed: list[Range] = []
        for (start, size), resident in zip(todo, residents, strict=True):
            state = _state(resident, size)
            if state == "mixed":
                counts = shared is not None or _is_counted(fd, start)
                mixed += _divide(start, size, counts=counts)
            else:
                found.append(CachedRange(start, size, state))
        todo, residents = mixed, _resident(fd, mixed, shared)
    return _joined(found)


def _state(resident: int | None, nbytes: int) -> bool | Literal["mixed"] | None:
    """What `CachedRange.resident` says of such a range, or that it has to be divided."""
    if resident is None:
        return None
    if resident >= nbytes * MOSTLY:
        return True
    return False if nbytes <= WINDOW or resident <= nbytes * (1 - MOSTLY) / 2 else "mixed"


def _resident(fd: int, ranges: list[Range], shared: Engine | None) -> list[int | None]:
    if shared is not None and sum(nbytes for _, nbytes in ranges) >= SHARED_NBYTES:
        return _Look(fd, ranges, shared).run(shared)
    return [residency(fd, *each).resident_bytes for each in ranges]


def _divide(start: int, nbytes: int, *, counts: bool) -> list[Range]:
    """The parts in which a mixed range is looked at next. Where a look is a sample, which has the kernel read
    what it misses, as few of them as find one place where cached and uncached bytes meet: halves."""
    if counts:
        return list(_cut(start, nbytes, PART if nbytes > PART else WINDOW))
    middle = (start + nbytes // 2) // WINDOW * WINDOW
    if not start < middle < start + nbytes:
        middle = start + nbytes // 2
    return [(start, middle - start), (middle, start + nbytes - middle)]


def _cut(start: int, nbytes: int, step: int) -> Iterator[Range]:
    """The pieces of a range between multiples of `step`."""
    end = start + nbytes
    while start < end:
        after = min(end, (start // step + 1) * step)
        yield start, after - start
        start = after


def _joined(found: list[CachedRange]) -> tuple[CachedRange, ...]:
    """In the order of the file, neighbours of one state as one."""
    joined: list[CachedRange] = []
    for each in sorted(found, key=lambda r: r.file_offset):
        last = joined[-1] if joined else None
        if last is not None and last.resident is each.resident:
            joined[-1] = CachedRange(last.file_offset, last.nbytes + each.nbytes, last.resident)
        else:
            joined.append(each)
    return tuple(joined)


def _is_counted(fd: int, file_offset: int) -> bool:
    """Whether a look at part of the file leaves nothing behind, as sampling does."""
    return counted(fd, file_offset, 1).resident_bytes is not None


def retry_errnos(request: Request) -> frozenset[int]:
    """Errors of the direct path after which fallback may try (hipFile C-17); none where
    fallback is not allowed."""
    if request.require == "fastpath" or not request.settings.allow_compat_mode:
        return frozenset()
    names = [n.strip().upper() for n in request.settings.retry_errnos.split(",") if n.strip()]
    unknown = [n for n in names if not isinstance(getattr(errno, n, None), int)]
    if unknown:
        raise ConfigError(f"NOBOUNCE_RETRY_ERRNOS holds {unknown[0]!r}, which is no errno name")
    return frozenset(getattr(errno, n) for n in names)
