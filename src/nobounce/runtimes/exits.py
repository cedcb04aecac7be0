"""Gates that no thread is left to open when the program has ended.

At its end the interpreter first waits for every thread that is no daemon, and only then calls what atexit
has: a thread that waits for a stream held at a gate would wait for good, and the process with it, if the gate
was the main thread's to open. So once the main thread has ended, a daemon thread looks on. It opens the gates
that were left closed when, for half a second, every thread that the interpreter waits for has done nothing
but wait inside one call of a runtime or of a transfer: then none of them can open a gate, and daemons are
promised no time. While one of them does anything else it may still be about to, so the gates stay closed.

A transfer's gate is not among them. An I/O thread opens it when the bytes are there, and to open it sooner
would let the stream read what has not arrived; the maker of such a gate calls `promise`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

from nobounce.clock import THREADS
from nobounce.runtimes.base import Gate

PAUSE, LOOKS = 0.1, 5
"""Seconds between two looks, and how many must find the same."""

_WAITS = ("nobounce.runtimes.", "nobounce.io.transfer")
_MAKES = frozenset({"gate", "shut"})
"""Calls that may wait with a gate half made."""

_closed: list[Callable[[], Iterable[Gate]]] = []
_starting = threading.Lock()
_started = False


def promise(gate: Gate) -> Gate:
    """A thread of this library will open the gate, whatever happens; returns it."""
    gate.promised = True
    return gate


def closed_by(on_reached: Callable[[], None] | None) -> list[Gate]:
    """The closed gates that were made with this `on_reached`."""
    return [g for closed in list(_closed) for g in list(closed()) if g.on_reached == on_reached]


def look_after(closed: Callable[[], Iterable[Gate]]) -> None:
    """Of the gates that `closed()` lists, open those that no thread is left to open;
    called once for each kind of runtime."""
    _closed.append(closed)


def start() -> None:
    """Make sure that the thread that looks on runs; called where a gate is made."""
    global _started
    if not _started:
        with _starting:
            if not _started:
                with suppress(RuntimeError, MemoryError):  # no thread can be started: gates work without it
                    THREADS.spawn(_look_on, name="nobounce-exit")
                    _started = True


def _look_on() -> None:
    threading.main_thread().join()
    before, same = None, 0
    while True:
        now = _waiting()
        same = same + 1 if now is not None and now == before else 0
        before = now
        if same >= LOOKS:
            for gate in [g for closed in list(_closed) for g in list(closed())]:
                if not gate.promised:
                    gate.open()
        THREADS.sleep(PAUSE)


def _waiting() -> list[tuple[int, FrameType, int]] | None:
    """Where each thread that the interpreter waits for waits; None if one of them does
    anything else, or there is none."""
    alive = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    frames = sys._current_frames()
    found: list[tuple[int, FrameType, int]] = []
    for thread in alive:
        frame = frames.get(thread.ident or 0)
        if frame is None or not _in_a_wait(frame):
            return None
        found.append((thread.ident or 0, frame, frame.f_lasti))
    return found or None


def _in_a_wait(frame: FrameType | None) -> bool:
    """Whether the innermost call of this library, but for its clock, is one that waits for a stream."""
    innermost = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("nobounce.") and module != "nobounce.clock":
            innermost = innermost or module
            if frame.f_code.co_name in _MAKES:
                return False
        frame = frame.f_back
    return innermost.startswith(_WAITS)


def _forget() -> None:
    """In a forked child another thread is the main thread, and no gate of the parent's is left."""
    global _starting, _started
    _starting, _started = threading.Lock(), False


os.register_at_fork(after_in_child=_forget)
