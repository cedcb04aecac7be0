"""How many cases a test tries: a few in every run, the full figure under `make thorough`."""

from __future__ import annotations

import os


def cases(full: int, usual: int) -> int:
    """`full` where NOBOUNCE_THOROUGH is set, else `usual`: the same test either way, so that the long run never rots."""
    return full if os.environ.get("NOBOUNCE_THOROUGH") else usual
