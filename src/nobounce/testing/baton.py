"""Who runs: real threads that pass a baton, one running at a time, in an order drawn from a seed.

A task is blocked on a lock of its own (its baton); handing over is one release and one acquire. The threads
come from a pool that later programs use again, because starting a thread costs more than a small program. So
a `threading.local` may still hold what an earlier program left there; context variables start empty.

Everything here runs on the thread of the running task, which alone may touch the state: no lock guards it.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import NoReturn, Protocol

from nobounce.errors import InternalError

_SIGNALS_S = 1.0  # real seconds: a signal that comes just before main blocks is handled when this has passed
_PATIENCE_S = (
    10.0  # real seconds that main waits for a task which should end or reach a point, then gives it up
)


class DeadlockError(InternalError):
    """No task can run and no timer is left; the message lists every task and what it waits for."""


class StepLimitError(InternalError):
    """The program passed more points than its limit: it loops without an end, or polls
    a clock that never moves."""


class Ended(BaseException):
    """Unwinds a task that the program has left behind. Not an Exception, so that `except
    Exception` lets it through."""


class Owned(Protocol):
    """What a blocked task may wait for, as far as the list of a deadlock needs it."""

    owner: BatonTask | None


class BatonTask:
    """One thread of the program."""

    def __init__(self, name: str, baton: threading.Lock, ident: int) -> None:
        self.name, self.baton, self.ident = name, baton, ident
        self.alive = True
        self.ended_early = False
        self.waiting = ""  # what it is blocked on, "" while it can run
        self.idle = False  # waits on a condition: may go on doing so when the program ends
        self.source: Owned | None = None
        self.queue: list[BatonTask] | None = None
        self.serial = 0  # counts wake-ups: a timer set before the last one is void
        self.timed_out = False
        self.joiners: list[BatonTask] = []


class Baton:
    """The tasks of one program, who of them can run, the timers, and virtual time in seconds."""

    def __init__(self, seed: int, step_limit: int, trace_limit: int) -> None:
        self.seed, self.step_limit = seed, step_limit
        self.random = random.Random(seed).random
        self.now = 0.0
        self.trace: deque[tuple[str, str]] = deque(maxlen=trace_limit)
        self.errors: list[tuple[str, BaseException]] = []
        self.closed = False
        self.failed = (
            False  # main has been told of a failure: locks cut short by it may be released by anybody
        )
        self.settling = False
        self.main = self._current = BatonTask("main", _held_lock(), get_ident())
        self.tasks: dict[BatonTask, None] = {self.main: None}
        self._ready: list[BatonTask] = []  # those that can run, without the one that does
        self._timers: list[tuple[float, int, BatonTask, int]] = []
        self._sequence = itertools.count()
        self._names = {"main": 1}
        self._steps = 0
        self._failure: BaseException | None = None  # on its way to main

    def me(self) -> BatonTask:
        """The running task, which must be the caller."""
        task = self._current
        if task.ident != get_ident() or self.closed:
            self._refuse()
        return task

    def is_caller(self) -> bool:
        """Whether the calling thread is the running task."""
        return not self.closed and self._current.ident == get_ident()

    def _refuse(self) -> NoReturn:
        if self.closed:
            raise InternalError("this Stepper is closed: nothing can wait, sleep, start or end in it")
        ident = get_ident()
        name = next((t.name for t in threading.enumerate() if t.ident == ident), f"number {ident}")
        raise InternalError(
            f"thread {name} is not a task of this Stepper: only threads it spawned may use it"
        )

    def draw(self, tasks: list[BatonTask]) -> BatonTask:
        """Take a task that the seed picks out of a list."""
        last = tasks.pop()
        index = int(self.random() * (len(tasks) + 1))
        if index == len(tasks):
            return last
        chosen, tasks[index] = tasks[index], last
        return chosen

    def point(self, task: BatonTask, point: str) -> None:
        """Another task may go on here; `task` stays able to run."""
        if task.ended_early:
            return
        self._note(task, point)
        ready = self._ready
        if ready and (index := int(self.random() * (len(ready) + 1))) < len(ready):
            chosen, ready[index] = ready[index], task
            self._switch(task, chosen)

    def block(
        self,
        task: BatonTask,
        point: str,
        waiting: str,
        *,
        queue: list[BatonTask] | None = None,
        source: Owned | None = None,
        timeout: float | None = None,
        idle: bool = False,
    ) -> bool:
        """Let others run until `task` is woken (True) or `timeout` seconds have passed (False)."""
        self.refuse_if_ended(task)
        self._note(task, point)
        if queue is not None:
            queue.append(task)
        task.queue, task.source, task.waiting, task.idle, task.timed_out = queue, source, waiting, idle, False
        if timeout is not None and timeout <= threading.TIMEOUT_MAX:
            heapq.heappush(self._timers, (self.now + timeout, next(self._sequence), task, task.serial))
        chosen = self._next()
        if chosen is not task:
            self._switch(task, chosen)
        elif self._failure is not None and task is self.main:
            self._fail(self._failure)
        return not task.timed_out

    def wake(self, task: BatonTask) -> None:
        """Make a task able to run; it has left its queue already."""
        task.queue, task.source, task.waiting, task.idle = None, None, "", False
        task.serial += 1
        self._ready.append(task)

    def refuse_if_ended(self, task: BatonTask) -> None:
        """A task being unwound may take free locks and notify, but neither block nor start others."""
        if task.ended_early:
            raise Ended

    def start(self, target: Callable[[], None], name: str) -> BatonTask:
        """A new task that can run; its name gets a number when it is taken."""
        worker = _borrow()  # first: where no thread can be started nothing has happened
        count = self._names[name] = self._names.get(name, 0) + 1
        task = BatonTask(name if count == 1 else f"{name}#{count}", worker.baton, worker.ident)
        worker.job = self._job(task, target)
        self.tasks[task] = None
        self._ready.append(task)
        return task

    def end_others(self) -> None:
        """Unwind every task but main, one by one in the order of their starts. Called by main."""
        main = self.main
        for task in [t for t in self.tasks if t is not main]:
            if task.queue is not None:
                task.queue.remove(task)
                task.queue = None
            task.serial += 1
            task.ended_early = True
            self._current = task
            task.baton.release()
            if not self._reclaim(main):
                raise InternalError(
                    f"task {task.name} does not end: it catches BaseException, or blocks for real"
                )
        self._ready.clear()

    # The schedule

    def _next(self) -> BatonTask:
        """Who goes on when the running task cannot."""
        if not self._ready:
            self._advance()
        return self.draw(self._ready)

    def _advance(self) -> None:
        """No task can run: end the settling, or move time, or report a deadlock to main."""
        main = self.main
        if self.settling and all(task.idle for task in self.tasks if task is not main):
            self.wake(main)
            return
        while self._timers:
            when, _, task, serial = self._timers[0]
            if task.serial == serial:
                if self._ready and when > self.now:
                    return
                self.now = when
                task.timed_out = True
                self._interrupt(task)
            heapq.heappop(self._timers)
        if not self._ready:
            if self._failure is None:
                self._failure = DeadlockError(self._describe("no task can run and no timer is left"))
                self._failure.__cause__ = self.errors[0][1] if self.errors else None
            self._interrupt(main)

    def _interrupt(self, task: BatonTask) -> None:
        if task.queue is not None:
            task.queue.remove(task)
        self.wake(task)

    def _note(self, task: BatonTask, point: str) -> None:
        self.trace.append((task.name, point))
        self._steps += 1
        if self._steps > self.step_limit or self._failure is not None:
            self._give_up(task)

    def _give_up(self, task: BatonTask) -> None:
        """The step limit is passed, or main was interrupted: hand over to main, which raises."""
        if self._failure is None:
            self._failure = StepLimitError(self._describe(f"no end after {self.step_limit} steps"))
        self._steps = 0
        main = self.main
        if task is main:
            self._fail(self._failure)
        if main not in self._ready:
            self._interrupt(main)
        self._ready.remove(main)
        self._switch(task, main)

    def _switch(self, task: BatonTask, chosen: BatonTask) -> None:
        self._current = chosen
        if task is not self.main:
            chosen.baton.release()
            task.baton.acquire()
            if task.ended_early:
                raise Ended
            return
        try:
            chosen.baton.release()
            while not task.baton.acquire(timeout=_SIGNALS_S):
                pass
        except BaseException as error:  # from a signal handler: it travels on once the others have stopped
            self._failure = error
            if self._current is task:
                task.baton.acquire(blocking=False)
            else:
                back = False
                try:
                    back = self._reclaim(task)
                finally:
                    self.closed = not back
                if not back:
                    raise
        if self._failure is not None:
            self._fail(self._failure)

    def _reclaim(self, main: BatonTask) -> bool:
        """Wait for the running task to hand over to main; else the program is lost, with its threads."""
        back = False
        try:
            back = main.baton.acquire(timeout=_PATIENCE_S)
        finally:
            self.closed = not back
        return back

    def _fail(self, failure: BaseException) -> NoReturn:
        self._failure, self.failed = None, True
        self.end_others()
        raise failure

    def _job(self, task: BatonTask, target: Callable[[], None] | None) -> Callable[[], threading.Lock | None]:
        def job() -> threading.Lock | None:
            nonlocal target
            try:
                if target is not None and not task.ended_early:
                    contextvars.Context().run(target)
            except (Ended, SystemExit):
                pass
            except BaseException as error:  # noqa: BLE001 - kept for close() to raise
                if not task.ended_early:  # what unwinding raises can happen in no real program
                    self.errors.append((task.name, error))
            target = None  # what only it held is finalised here, while the task can still take locks
            return self._finish(task)

        return job

    def _finish(self, task: BatonTask) -> threading.Lock | None:
        """Called on the thread of a task that has ended: whose baton to pass, None
        when no task waits any more."""
        if self.closed:
            return None
        task.alive = False
        del self.tasks[task]
        while task.joiners:
            self.wake(task.joiners.pop())
        if task.ended_early:
            chosen = self.main
        else:
            self.trace.append((task.name, "end"))
            chosen = self._next()
        self._current = chosen
        return chosen.baton

    def _describe(self, what: str) -> str:
        frames = sys._current_frames()
        lines = [f"{what} (seed {self.seed}, {self.now:g} virtual seconds)"]
        for task in self.tasks:
            line = f"{task.name} waits for {task.waiting}" if task.waiting else f"{task.name} can run"
            if task.source is not None and task.source.owner is not None and not task.idle:
                line += f", held by {task.source.owner.name}"
            frame = frames.get(task.ident)
            while frame is not None and frame.f_code.co_filename in _OWN_FILES:
                frame = frame.f_back
            if frame is not None:
                line += f", at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                line += f" in {frame.f_code.co_name}"
            lines.append(line)
        return "\n  ".join(lines)


_OWN_FILES = {__file__, os.path.join(os.path.dirname(__file__), "stepper.py"), threading.__file__}


# The pool


class _Worker:
    """A thread that runs one task after another and lies idle in between."""

    def __init__(self) -> None:
        self.baton = _held_lock()
        self.job: Callable[[], threading.Lock | None] | None = None
        self.thread = threading.Thread(target=self._work, name="nobounce-stepper", daemon=True)
        self.thread.start()
        self.ident = self.thread.ident or 0

    def _work(self) -> None:
        while True:
            self.baton.acquire()
            job, self.job = self.job, None
            following = job() if job is not None else None
            if following is None:
                return
            job = None
            _idle.append(self)  # before the baton goes on, so that the next program finds it
            following.release()


_idle: list[_Worker] = []


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _borrow() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


def release_threads() -> None:
    """End the idle threads of the pool and wait until they are gone."""
    while _idle:
        worker = _idle.pop()
        worker.baton.release()
        worker.thread.join()


os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork
