"""Small facts a request needs from the running process: what the page cache holds, which errors are retried."""

from __future__ import annotations

import errno

from nobounce.errors import ConfigError
from nobounce.facts.pagecache import residency
from nobounce.route.types import CachedRange, Request

WINDOW = 2 << 20
"""Bytes below which a half-cached range is not divided further."""

MOSTLY = 0.9
"""The part of a range that must be in the page cache for the cache to be the cheaper way."""


def cached_ranges(fd: int, file_offset: int, nbytes: int) -> tuple[CachedRange, ...]:
    """What the page cache holds of a range: asked as a whole first, and halved only where it is mixed."""
    found: list[CachedRange] = []
    todo = [(file_offset, nbytes)]
    while todo:
        start, size = todo.pop()
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


def retry_errnos(request: Request) -> frozenset[int]:
    """Errors of the direct path after which fallback may try (hipFile C-17); none where fallback is not allowed."""
    if request.require == "fastpath" or not request.settings.allow_compat_mode:
        return frozenset()
    names = [n.strip().upper() for n in request.settings.retry_errnos.split(",") if n.strip()]
    unknown = [n for n in names if not isinstance(getattr(errno, n, None), int)]
    if unknown:
        raise ConfigError(f"NOBOUNCE_RETRY_ERRNOS holds {unknown[0]!r}, which is no errno name")
    return frozenset(getattr(errno, n) for n in names)
