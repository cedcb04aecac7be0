"""Frees what garbage collection finds, on a thread of its own.

A finaliser runs on whatever thread happens to collect, perhaps inside a runtime that holds its own lock, or
on an I/O thread whose stream waits for it. Freeing device memory waits for the device (HIP rule 118), so
doing it there can stop the program for good. A finaliser therefore only puts the work into a SimpleQueue, the
one queue that a finaliser may touch, and this thread does it. Nothing is freed once the interpreter is going
down: the process gives everything back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from nobounce.clock import THREADS, Scheduler

Work = tuple[Callable[..., object], tuple[Any, ...]]


class _State:
    """What a fork child must not inherit."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.patient: deque[Work] = deque()
        self.starting = threading.Lock()
        self.working = threading.Lock()
        self.started = False


_state = _State()
_generation = 0
_exiting = False


def generation() -> int:
    """Changes in a fork child: what an earlier generation made belongs to the parent
    and is not freed here."""
    return _generation


def exiting() -> bool:
    """Whether the interpreter is going down; module globals become None then, hence the odd test."""
    return _exiting is not False


def start() -> None:
    """Make sure the thread runs; called where memory is made, because a finaliser must not start a thread."""
    if not _state.started:
        with _state.starting:
            if not _state.started:
                try:
                    THREADS.spawn(_run, name="nobounce-reaper")
                    _state.started = True
                except (RuntimeError, MemoryError):
                    drain()  # no thread can be started: then here, whenever memory is made


def later(scheduler: Scheduler, born: int, fn: Callable[..., object], *arguments: Any) -> None:
    """Call `fn` soon on the reaper's thread; never raises, safe in a finaliser.

    With a stepped scheduler a free-running thread would spoil the schedule: there the work waits for `drain`.
    """
    if _exiting is not False or born != _generation:
        return
    if scheduler is THREADS:
        _state.queue.put((fn, arguments))
    else:
        _state.patient.append((fn, arguments))


def drain() -> None:
    """Do everything that is waiting now, on this thread, and wait for what the reaper has begun."""
    with contextlib.suppress(IndexError):
        while True:
            _do(_state.patient.popleft())
    with contextlib.suppress(queue.Empty):
        while True:
            _do(_state.queue.get_nowait())
    with _state.working:
        pass


def patient() -> None:
    """Do what waits for a stepped scheduler; nearly free when nothing does."""
    while _state.patient:
        _do(_state.patient.popleft())


def _run() -> None:
    state = _state
    while True:
        work = state.queue.get()
        with state.working:
            _do(work)
        del work


def _do(work: Work) -> None:
    fn, arguments = work
    if not _exiting:
        with contextlib.suppress(
            Exception
        ):  # a lost device cannot be freed on, and no caller is there to tell
            fn(*arguments)


def _stop() -> None:
    global _exiting
    _exiting = True


def _forget() -> None:
    global _state, _generation
    _state = _State()
    _generation += 1


atexit.register(_stop)
os.register_at_fork(after_in_child=_forget)
