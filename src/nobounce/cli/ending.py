"""Ctrl-C, SIGTERM and SIGHUP end a command alike: through every `finally`, so that no file of ours stays behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Each with the handler that is replaced; another one, or the SIG_IGN of nohup, stays."""
GRACE_SECONDS = 5.0
"""So long nothing more ends the tidying up. Who asks again later means it."""


class Ended(KeyboardInterrupt):
    """Raised where a signal asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def by_ctrl_c(asked: KeyboardInterrupt) -> bool:
    """Whether it was the person in front of the terminal."""
    return not isinstance(asked, Ended) or asked.number == signal.SIGINT


def words(asked: KeyboardInterrupt) -> str:
    """What ended a command, for its one line."""
    return "interrupted" if by_ctrl_c(asked) else f"ended by {signal.Signals(code(asked) - 128).name}"


def code(asked: KeyboardInterrupt) -> int:
    """The exit code: 128 and the signal's number, as a shell tells it."""
    return 128 + (asked.number if isinstance(asked, Ended) else signal.SIGINT)


@contextmanager
def orderly() -> Iterator[None]:
    """Have the signals raise Ended inside, on the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [number for number, usual in SIGNALS.items() if signal.getsignal(number) == usual]
    first: list[float] = []

    def end(number: int, _: object) -> None:
        if first:
            if time.monotonic() - first[0] > GRACE_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return None
        first.append(time.monotonic())
        raise Ended(number)

    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, SIGNALS[number])
