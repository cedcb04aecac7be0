"""Small facts a request needs from the running process: what the page cache holds, which errors are retried."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from nobounce.errors import ConfigError
from nobounce.facts.pagecache import counted, residency
from nobounce.route.types import CachedRange, Request

if TYPE_CHECKING:
    from nobounce.io.engine import Engine

WINDOW = 2 << 20
"""Bytes below which a half-cached range is not divided further."""

MOSTLY = 0.9
"""The part of a range that must be in the page cache for the cache to be the cheaper way."""


SHARED_NBYTES, MOST_PARTS = 512 << 20, 8
"""Ranges from here on are looked at by several threads: a GiB that is cached in small folios takes one 2 ms."""


class _Look:
    """One range looked at in parts, by the caller and by threads of the pool that have nothing else to do."""

    def __init__(self, fd: int, file_offset: int, nbytes: int, pool: Engine) -> None:
        self.tickets = min(MOST_PARTS, len(os.sched_getaffinity(0)))
        self._fd, self._begin, self._nbytes = fd, file_offset, nbytes
        self._changed = pool.scheduler.condition()
        self._next = 0
        self._found: list[int | None] = []

    def work(self) -> None:
        while True:
            with self._changed.mutex:
                if self._next == self.tickets:
                    return
                n, self._next = self._next, self._next + 1
            start, end = (self._nbytes * at // self.tickets for at in (n, n + 1))
            resident = residency(self._fd, self._begin + start, end - start).resident_bytes
            with self._changed.mutex:
                self._found.append(resident)
                self._changed.notify_all()

    def resident(self, pool: Engine) -> int | None:
        """Bytes of the range in the page cache, None where that cannot be told."""
        pool.assist(self)
        self.work()
        with self._changed.mutex:
            self._changed.wait_for(lambda: len(self._found) == self.tickets)
        return None if None in self._found else sum(n or 0 for n in self._found)


def cached_ranges(
    fd: int, file_offset: int, nbytes: int, pool: Engine | None = None
) -> tuple[CachedRange, ...]:
    """What the page cache holds of a range: asked as a whole first, and halved only where it is mixed."""
    found: list[CachedRange] = []
    todo = [(file_offset, nbytes)]
    while todo:
        start, size = todo.pop()
        if pool is not None and size >= SHARED_NBYTES and _is_counted(fd, start):
            resident = _Look(fd, start, size, pool).resident(pool)
        else:
            resident = residency(fd, start, size).resident_bytes
        if resident is None:
            found.append(CachedRange(start, size, None))
        elif resident >= size * MOSTLY:
            found.append(CachedRange(start, size, True))
        elif resident <= size * (1 - MOSTLY) / 2 or size <= WINDOW:
            found.append(CachedRange(start, size, False))
        else:
            middle = (start + size // 2) // WINDOW * WINDOW
            if not start < middle < start + size:
                middle = start + size // 2
            todo += [(middle, start + size - middle), (start, middle - start)]
    return tuple(found)


def _is_counted(fd: int, file_offset: int) -> bool:
    """Whether a look at part of the file leaves nothing behind, as sampling does."""
    return counted(fd, file_offset, 1).resident_bytes is not None


def retry_errnos(request: Request) -> frozenset[int]:
    """Errors of the direct path after which fallback may try (hipFile C-17); none where fallback is not allowed."""
    if request.require == "fastpath" or not request.settings.allow_compat_mode:
        return frozenset()
    names = [n.strip().upper() for n in request.settings.retry_errnos.split(",") if n.strip()]
    unknown = [n for n in names if not isinstance(getattr(errno, n, None), int)]
    if unknown:
        raise ConfigError(f"NOBOUNCE_RETRY_ERRNOS holds {unknown[0]!r}, which is no errno name")
    return frozenset(getattr(errno, n) for n in names)
