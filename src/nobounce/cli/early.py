"""Ctrl-C while the command line is being loaded: nothing has been done yet, so the process ends on the spot.

An exception would not do: what raises inside an import may come out as another error, or not at all.
"""

from __future__ import annotations

import os
import signal

LINE = b"nobounce: interrupted\n"


def end(number: int, _: object) -> None:
    """The handler."""
    try:
        os.write(2, LINE)
    finally:
        os._exit(128 + number)


def begin() -> None:
    """From now on; an ignored SIGINT, as under nohup, stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
