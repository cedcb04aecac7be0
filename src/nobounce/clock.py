"""Threads and time behind one small interface, so that a schedule can be real or replayed from a seed.

`Threads` is the real thing. `Stepper` (nobounce.testing.stepper) runs real threads that pass a baton: one
runs at a time, a seeded generator picks the next at each blocking point, and time is virtual, so a second
of latency costs nothing.

A process may have no thread left to start (pids.max of its control group, `ulimit -u`, a filter on
clone3). Work is then kept, and done by the threads that are there: by one that submits, at the end of
its call, or that waits.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self


class Lock(Protocol):
    """A mutual-exclusion lock, used with `with`."""

    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Condition(Lock, Protocol):
    """A condition variable with its own lock; `wait` may return early, so always loop (or use `wait_for`).

    `with condition.mutex:` is safe where a signal handler may raise; `with condition:` is not: Python can run
    the handler after the lock is taken and before the block begins, and the lock is then never given back.
    """

    @property
    def mutex(self) -> Lock: ...

    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...


class Task(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Scheduler(ABC):
    """Where threads, waiting and the monotonic clock come from. Seconds everywhere."""

    _kept: deque[Callable[[], None]]

    def __new__(cls, *_: object, **__: object) -> Self:
        made = super().__new__(cls)
        made._kept = deque()
        return made

    @abstractmethod
    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass for this thread."""

    @abstractmethod
    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        """Start a daemon thread."""

    def keep(self, work: Callable[[], None]) -> None:
        """Take over work for which no thread could be started: the next thread that calls `help` does it."""
        self._kept.append(work)

    def help(self) -> None:
        """Do what was kept, on this thread. Called where one waits or has submitted, with
        no lock held; nearly free."""
        while self._kept:
            try:
                work = self._kept.popleft()
            except IndexError:
                return  # another thread was quicker
            work()

    def forget_kept(self) -> None:
        """In a forked child, where what was kept is the parent's."""
        self._kept.clear()

    def interruptible(self) -> bool:
        """Whether a signal handler may raise in the calling thread at any moment (Ctrl-C
        reaches the main thread)."""
        return False

    def is_own_thread(self) -> bool:
        """Whether `spawn` started the calling thread."""
        return False

    @abstractmethod
    def lock(self) -> Lock:
        """A new lock (not re-entrant)."""

    @abstractmethod
    def condition(self) -> Condition:
        """A new condition with a lock of its own (not re-entrant)."""

    def checkpoint(self) -> None:  # noqa: B027 - real threads need none
        """A point at which another thread may run; does nothing with real threads."""


class _Thread(threading.Thread):
    """One of this library's own."""


class Threads(Scheduler):
    """Real threads, real time."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        thread = _Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def is_own_thread(self) -> bool:
        return isinstance(threading.current_thread(), _Thread)

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self) -> Condition:
        return _Condition()

    def interruptible(self) -> bool:
        return threading.get_ident() == threading.main_thread().ident


class _Condition:
    """The standard library's condition, but for an interrupt: whatever comes out of
    `wait`, the lock is held again.

    There a signal handler that raises right behind the release, or while the lock is taken again, leaves it
    free, and the `with` around it then raises RuntimeError in the place of KeyboardInterrupt. Here one call
    into C both does and notes it.
    """

    __slots__ = ("_waiters", "mutex")

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self._waiters: deque[threading.Lock] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        return self.mutex.acquire(blocking)

    def release(self) -> None:
        self.mutex.release()

    def __enter__(self) -> bool:
        return self.mutex.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.mutex.release()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = threading.Lock()
        waiter.acquire()
        released: list[None] = []
        taken: list[bool] = []
        told = False
        try:
            self._waiters.append(waiter)
            released.extend(map(_release, (self.mutex,)))
            told = waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        finally:
            if released:
                try:
                    taken.extend(map(self.mutex.acquire, (True,)))
                finally:
                    if not taken:
                        taken.extend(map(self.mutex.acquire, (True,)))
            if not told:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        return told

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        limit = None if timeout is None else time.monotonic() + timeout
        while not (found := predicate()):
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        while n > 0 and self._waiters:
            n -= 1
            self._waiters.popleft().release()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


_release = operator.methodcaller("release")

THREADS = Threads()
"""The scheduler that everything uses unless a test hands it another."""

os.register_at_fork(after_in_child=THREADS.forget_kept)
