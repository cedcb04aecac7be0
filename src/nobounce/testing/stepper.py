"""A scheduler whose schedule comes from a seed and whose time is virtual.

The tasks of a `Stepper` are real threads of which exactly one runs (baton.py). At each point where real
threads could change places (a lock taken or released, a wait, a notify, a sleep, a join, a spawn, a
checkpoint, a task's end) a seeded generator picks who goes on: the same seed gives the same schedule, other
seeds explore other orders. Code between two points is atomic; `checkpoint()` adds a point. Time moves only
when no task can run: it jumps to the earliest timer.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from nobounce.clock import Condition, Lock, Scheduler, Task
from nobounce.errors import ArgumentError, InternalError
from nobounce.testing.baton import Baton, BatonTask, DeadlockError, StepLimitError, release_threads

__all__ = ["DeadlockError", "StepLimitError", "Stepper", "release_threads"]

T = TypeVar("T")

_after_close = threading.Lock()


class Stepper(Scheduler):
    """Real threads, one at a time, in an order drawn from `seed`; time is virtual and starts at 0.0 seconds.

    The creating thread is the first task, "main"; only main may `settle` and `close`. Use it as a context
    manager or through `run`: both end with `settle` and `close`, and hold automatic garbage collection
    back meanwhile, since a finalizer that takes a lock at an arbitrary allocation would make the schedule
    depend on what ran before.

    `spurious` is the chance that a wait ends for no reason, `step_limit` the number of points after
    which the program is taken to loop for ever (`StepLimitError`), `trace_limit` the number of
    points that `trace` remembers.

    When no task can ever run again, the others are unwound and main raises `DeadlockError` where it is
    blocked. A call from a thread that is no task raises `InternalError` and changes nothing. Once closed,
    free locks can still be taken, from any thread and without a schedule: objects outlive their program and
    their finalizers take locks.
    """

    def __init__(
        self, seed: int, *, spurious: float = 0.05, step_limit: int = 1_000_000, trace_limit: int = 10_000
    ) -> None:
        self.seed, self.spurious = seed, spurious
        self._baton = Baton(seed, step_limit, trace_limit)
        self._numbers = itertools.count(1)
        self._collecting = False

    @classmethod
    def run(cls, program: Callable[[Stepper], T], *, seed: int, spurious: float = 0.05) -> T:
        """Run `program(stepper)` as main, let the others settle, close; return what it returned.

        Raises what the program raised, else `DeadlockError`, else the first exception that ended a task.
        """
        with cls(seed, spurious=spurious) as stepper:
            return program(stepper)

    def __enter__(self) -> Self:
        self._collecting = gc.isenabled()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            try:
                if error is None and not self._baton.closed:
                    self.settle()
            finally:
                self._end()
        except BaseException as late:
            self._add_notes(late)
            raise
        finally:
            if self._collecting:
                gc.enable()
        if error is None:
            self._raise_errors()
        else:
            self._add_notes(error)

    @property
    def trace(self) -> list[tuple[str, str]]:
        """The last points that were passed, oldest first: (task, point)."""
        return list(self._baton.trace)

    def now(self) -> float:
        return self._baton.now

    def sleep(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ArgumentError(f"cannot sleep {seconds} seconds")
        task = self._baton.me()
        if seconds > 0:
            self._baton.block(task, "sleep", f"{seconds:g} s to pass", timeout=seconds)
        else:
            self._baton.point(task, "sleep")

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        """Start a task; its name gets a number when it is taken. An exception that ends
        it is raised by `close`."""
        parent = self._baton.me()
        self._baton.refuse_if_ended(parent)
        task = self._baton.start(target, name)
        self._baton.point(parent, f"spawn {task.name}")
        return _Handle(self._baton, task)

    def lock(self) -> Lock:
        return _Lock(self._baton, f"lock {next(self._numbers)}")

    def condition(self) -> Condition:
        return _Condition(self._baton, f"condition {next(self._numbers)}", self.spurious)

    def checkpoint(self) -> None:
        task = self._baton.me()
        self._baton.refuse_if_ended(task)
        self._baton.point(task, "checkpoint")

    def settle(self) -> None:
        """Let the other tasks run until each has ended or waits on a condition, with or without a timeout.

        Raises `DeadlockError` when one is stuck on a lock or a join.
        """
        baton, main = self._baton, self._me_as_main("settle")
        baton.settling = True
        try:
            baton.block(main, "settle", "the others to settle")
        finally:
            baton.settling = False

    def close(self) -> None:
        """Unwind the tasks that are left and raise the first exception that had ended a task.

        May be called again; then it does nothing.
        """
        self._end()
        self._raise_errors()

    def _end(self) -> None:
        if not self._baton.closed:
            self._me_as_main("close")
            try:
                self._baton.end_others()
            finally:
                self._baton.closed = True

    def _me_as_main(self, verb: str) -> BatonTask:
        task = self._baton.me()
        if task is not self._baton.main:
            raise InternalError(f"task {task.name} may not {verb} the Stepper: only main may")
        return task

    def _raise_errors(self) -> None:
        errors = self._baton.errors
        if errors:
            first = errors.pop(0)[1]
            self._add_notes(first)
            raise first

    def _add_notes(self, error: BaseException) -> None:
        for name, other in self._baton.errors:
            if other is not error and other is not error.__cause__:
                error.add_note(f"task {name} had ended with {other!r}")
        self._baton.errors.clear()


class _Handle:
    """What `spawn` returns."""

    def __init__(self, baton: Baton, task: BatonTask) -> None:
        self._baton, self._task = baton, task

    def join(self, timeout: float | None = None) -> None:
        baton, task = self._baton, self._task
        if baton.closed and not task.alive:
            return
        me = baton.me()
        if me is task:
            raise InternalError(f"task {me.name} joins itself")
        baton.point(me, f"join {task.name}")
        if task.alive and (timeout is None or timeout > 0):
            point, waiting = f"blocked join {task.name}", f"the end of {task.name}"
            baton.block(me, point, waiting, queue=task.joiners, timeout=timeout)

    def is_alive(self) -> bool:
        if self._baton.is_caller():
            self._baton.point(self._baton.me(), f"is_alive {self._task.name}")
        return self._task.alive


class _Lock:
    """A lock that only its holder may release (`threading.Lock` is laxer)."""

    def __init__(self, baton: Baton, name: str) -> None:
        self.name = name
        self.owner: BatonTask | None = None
        self._baton = baton
        self._contenders: list[BatonTask] = []
        self._acquire_point, self._release_point = f"acquire {name}", f"release {name}"
        self._blocked_point = f"blocked {name}"

    def acquire(self, blocking: bool = True) -> bool:
        baton = self._baton
        if baton.closed:
            return self._acquire_after_close(blocking)
        task = baton.me()
        baton.point(task, self._acquire_point)
        return self._take(task, blocking)

    def release(self) -> None:
        baton = self._baton
        if baton.closed:
            self.owner = None
            return
        task = baton.me()
        if self.owner is not task:
            if task.ended_early or baton.failed:
                return  # its wait was cut short and could not take the lock back
            held = f"which {self.owner.name} holds" if self.owner is not None else "which no task holds"
            raise InternalError(f"task {task.name} releases {self.name}, {held}")
        self._drop()
        baton.point(task, self._release_point)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()

    def _take(self, task: BatonTask, blocking: bool = True) -> bool:
        while self.owner is not None:
            if not blocking:
                return False
            self._baton.block(task, self._blocked_point, self.name, queue=self._contenders, source=self)
        self.owner = task
        return True

    def _drop(self) -> None:
        self.owner = None
        if self._contenders:
            self._baton.wake(self._baton.draw(self._contenders))

    def _acquire_after_close(self, blocking: bool) -> bool:
        with _after_close:
            if self.owner is None:
                self.owner = self._baton.main
                return True
        if not blocking:
            return False
        raise InternalError(f"{self.name} is held and its Stepper is closed: nothing can release it")


class _Condition(_Lock):
    """A condition: `notify` wakes waiters that the seed picks, and the seed now and then
    ends a wait for no reason."""

    def __init__(self, baton: Baton, name: str, spurious: float) -> None:
        super().__init__(baton, name)
        self._spurious = spurious
        self._waiters: list[BatonTask] = []
        self._wait_point, self._notify_point = f"wait {name}", f"notify {name}"

    @property
    def mutex(self) -> Lock:
        return self

    def wait(self, timeout: float | None = None) -> bool:
        baton = self._baton
        task = self._me_as_holder("waits on")
        baton.refuse_if_ended(task)
        self._drop()
        try:
            if timeout is not None and timeout <= 0:
                baton.point(task, self._wait_point)
                notified = False
            elif baton.random() < self._spurious:
                baton.point(task, self._wait_point)
                notified = True
            else:
                waiting = f"a notify of {self.name}"
                notified = baton.block(
                    task,
                    self._wait_point,
                    waiting,
                    queue=self._waiters,
                    source=self,
                    timeout=timeout,
                    idle=True,
                )
            self._take(task)
        except BaseException:
            if self.owner is None:
                self.owner = task  # the caller's `with` is going to release it
            raise
        return notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._baton.now + timeout
        while not (outcome := predicate()):
            left = None if deadline is None else deadline - self._baton.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return outcome

    def notify(self, n: int = 1) -> None:
        if self._baton.closed:
            return
        task = self._me_as_holder("notifies")
        for _ in range(min(n, len(self._waiters))):
            self._baton.wake(self._baton.draw(self._waiters))
        self._baton.point(task, self._notify_point)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    def _me_as_holder(self, doing: str) -> BatonTask:
        task = self._baton.me()
        if self.owner is not task and not task.ended_early and not self._baton.failed:
            raise InternalError(f"task {task.name} {doing} {self.name} without holding it")
        return task
