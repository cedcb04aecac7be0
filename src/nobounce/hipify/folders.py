"""Which files a list of paths means: files as they are named, folders with every source in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from nobounce.hipify.convert import SUFFIXES

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def sources(paths: Iterable[str]) -> Iterator[str]:
    """Each path once. Of a folder: regular files with a suffix of a source, in order of their names; no
    links, no hidden folders, no virtual environments. A folder that cannot be listed is given itself, so
    that reading it says why."""
    seen: set[str] = set()
    for path in paths:
        for found in _in(path) if os.path.isdir(path) else (path,):
            if found not in seen:
                seen.add(found)
                yield found


def _in(folder: str) -> Iterator[str]:
    unlisted: list[str] = []
    for here, folders, files in os.walk(folder, onerror=lambda e: unlisted.append(str(e.filename))):
        folders[:] = sorted(f for f in folders if not _is_skipped(here, f))
        for name in sorted(files):
            path = os.path.join(here, name)
            if os.path.splitext(name)[1].lower() in SUFFIXES and _is_regular(path):
                yield path
    yield from unlisted


def _is_skipped(here: str, name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED or os.path.exists(os.path.join(here, name, "pyvenv.cfg"))


def _is_regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
