"""Calls that an interrupt must not cut in two: a thread that runs no signal handlers carries them out.

Python runs signal handlers on the main thread, between any two byte codes, and Ctrl-C's raises there. What
takes several steps to change (a batch's table, counters, queues and ring) would be left half changed. So the
main thread hands such a call over and waits: an interrupt ends the waiting alone. A hand-over and back takes
18 us, where a call of a batch takes 300 and more.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from nobounce.clock import THREADS, Scheduler

P = ParamSpec("P")
T = TypeVar("T")
LOOK_SECONDS = 0.1
"""A signal that comes just before a thread sleeps does not wake it: the waiting thread looks so often."""
GivenUp = Callable[[], bool]
"""Whether the caller was interrupted, so that nothing waits for the call any more."""


class _Call(Generic[T]):
    """A call handed over. Its outcome is there once `ended` can be taken."""

    result: T
    error: BaseException | None = None

    def __init__(self, fn: Callable[[GivenUp], T], undo: Callable[[T], object] | None = None) -> None:
        self._fn: Callable[[GivenUp], T] | None = fn
        self._undo = [] if undo is None else [undo]
        """Taken out by the one that has to call it."""
        self._given_up = self._done = False
        self.ended = threading.Lock()
        self.ended.acquire()

    def given_up(self) -> bool:
        return self._given_up

    def give_up(self) -> None:
        self._given_up = True
        if self._done and self._undo:
            _threads.put(_Call(lambda _: self._take_back()))

    def _take_back(self) -> None:
        try:
            undo = self._undo.pop()
        except IndexError:
            return
        undo(self.result)

    def run(self) -> None:
        fn, self._fn = (
            self._fn,
            None,
        )  # what it holds goes with the caller, not some time later on this thread
        try:
            if fn is not None and not self._given_up:
                self.result = fn(self.given_up)
                self._done = True
                if self.given_up():
                    self._take_back()
        except BaseException as e:
            self.error = e


class _Threads:
    """The threads that calls are handed to. One is enough, unless interrupted calls
    still keep others busy."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[object]] = SimpleQueue()
        self._idle: list[None] = []
        """An entry for each thread that waits for a call and for which none is queued: two calls
        must not count on one thread."""

    def put(self, call: _Call[object]) -> bool:
        """Hand a call over; False where no thread can be started."""
        try:
            self._idle.pop()
        except IndexError:
            try:
                THREADS.spawn(self._serve, name="nobounce-calls")
            except (RuntimeError, MemoryError):
                return False
        self._calls.put(call)
        return True

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            call.run()
            self._idle.append(None)
            call.ended.release()
            del call


_threads = _Threads()


def uninterrupted(
    fn: Callable[[GivenUp], T], scheduler: Scheduler = THREADS, *, undo: Callable[[T], object] | None = None
) -> T:
    """`fn(given_up)`, from its first step to its last. Raises what it raises, and what a signal
    handler of the caller raises.

    Then the call goes on. One that waits looks at `given_up()` now and then, and ends when it says so. A
    result that no longer reaches the caller is given to `undo`.
    """
    if not scheduler.interruptible():
        return fn(_never)
    call = _Call(fn, undo)
    try:
        if not _threads.put(call):  # type: ignore[arg-type]
            return fn(_never)  # no thread can be started: better interruptible than not at all
        while not call.ended.acquire(timeout=LOOK_SECONDS):
            pass
    except BaseException:
        call.give_up()
        raise
    try:
        if call.error is not None:
            raise call.error
        return call.result
    finally:
        del call  # the error's traceback holds this frame


def unbroken(fn: Callable[P, T], undo: Callable[[T], object] | None = None) -> Callable[P, T]:
    """The function, each call of it `uninterrupted`."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return uninterrupted(lambda _: fn(*args, **kwargs), undo=undo)

    return call


def _never() -> bool:
    return False


def _forget() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget)
