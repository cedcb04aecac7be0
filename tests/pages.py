"""What the page cache holds of a file, for tests."""

from __future__ import annotations

import os
from pathlib import Path

from nobounce.facts.pagecache import residency


def resident(path: Path) -> int:
    """Bytes of the file in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return residency(fd, 0, os.path.getsize(path)).resident_bytes or 0
    finally:
        os.close(fd)
