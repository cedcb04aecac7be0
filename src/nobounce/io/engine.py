"""The process's pool of I/O threads, lazily made, bounded, and made anew in a forked child.

A waiting caller works too, so a small transfer never changes threads. Threads start when work is waiting
and nobody is idle: many streams held at their gates cost nothing, and N transfers under way at once do not
queue behind each other.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from typing import Protocol

from nobounce.clock import THREADS, Scheduler
from nobounce.config import settings
from nobounce.errors import NobounceError
from nobounce.facts.machine import own_cpus
from nobounce.io import hooks
from nobounce.io.job import Job
from nobounce.io.movers import uring
from nobounce.io.movers.bounce import Rings
from nobounce.io.strategy import Machine
from nobounce.runtimes import faults, registry
from nobounce.runtimes.base import Runtime

MAX_THREADS = 32
"""Threads of the process, unless NOBOUNCE_IO_THREADS asks for more."""


def machine_for(scheduler: Scheduler) -> Machine:
    """What a strategy has to know, now: affinity and injected faults may change while the process lives."""
    kernel_reads = scheduler is THREADS and not faults.ACTIVE and not uring.unavailable()
    return Machine(own_cpus(), kernel_reads)


class Work(Protocol):
    """Something I/O threads can take part in: `tickets` of them at most."""

    @property
    def tickets(self) -> int: ...

    def work(self) -> None: ...


class _Nothing:
    """What threads that are started ahead of their work find to do."""

    tickets = 1

    def work(self) -> None:
        return None


class _Start:
    """A thread being started; `sure` once it is certain to run."""

    sure = False


class Engine:
    """A pool of I/O threads and the bounce rings they share."""

    def __init__(self, scheduler: Scheduler = THREADS, *, most: int = 0) -> None:
        self.scheduler = scheduler
        self.rings = Rings(scheduler.lock)
        self._most = most or max(MAX_THREADS, settings().io_threads)
        self._changed = scheduler.condition()
        self._tickets: deque[Work] = deque()
        self._idle = self._threads = 0
        self._starting: set[_Start] = set()
        self._stopped = False

    def run(self, job: Job) -> None:
        """Carry the job out and return when it is done.

        The caller's thread works too, unless others are at work as well and a signal may interrupt
        this one at any moment: then it only waits, and an interrupt stops the job without leaving
        a chunk unaccounted for.
        """
        job.begin()
        interruptible = self.scheduler.interruptible()
        # A slot of the bounce ring is taken in several steps: cut off between two of them it would be lost.
        if job.alone and not (interruptible and job.target.ring is not None):
            job.work()
        elif interruptible:
            self._wait_for(job)
        else:
            self.assist(job)
            job.work()
            job.wait()

    def _wait_for(self, job: Job) -> None:
        interrupt: BaseException | None = None
        try:
            self.submit(job)
        except BaseException as e:
            interrupt = e
            job.stop()
            job.work()  # ends it if no other thread has begun, or ever will
        while not job.done:
            try:
                job.wait()
            except BaseException as e:
                interrupt = interrupt or e
                job.stop()
        if interrupt is not None:
            raise interrupt

    def submit(self, work: Work) -> None:
        """Have the pool carry the work out. One thread is enough for all of it; where there is none and none
        can be started, the scheduler keeps it for a thread that waits."""
        tickets = max(1, work.tickets)
        try:
            self._offer(work, tickets)
        except (RuntimeError, MemoryError) as e:
            if isinstance(e, NobounceError):
                raise
            for _ in range(tickets):
                self.scheduler.keep(work.work)

    def assist(self, job: Work) -> None:
        """Offer the job to other threads; the caller's own is about to work on it, alone where
        no other can be started."""
        try:
            self._offer(job, job.tickets - 1)
        except (RuntimeError, MemoryError) as e:
            if isinstance(e, NobounceError):
                raise

    def start_threads(self, count: int) -> None:
        """Have `count` threads started or idle already, for work that is about to come. None where none can
        be started: the work will say so."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self._offer(_Nothing(), count)

    def close(self) -> None:
        """Let idle threads end; jobs under way finish. A closed engine takes no more work."""
        with self._changed.mutex:
            self._stopped = True
            self._changed.notify_all()

    def _offer(self, job: Work, tickets: int) -> None:
        if tickets <= 0:
            return
        starts: list[_Start] = []
        try:
            with self._changed.mutex:
                room = self._most - self._threads - len(self._starting)
                # Where no thread is at work yet, those that others are starting may come to nothing.
                wanted = max(min(len(self._tickets) + tickets - self._idle, room), not self._threads)
                starts = [_Start() for _ in range(wanted)]
                self._starting.update(starts)
                self._tickets.extend([job] * tickets)
                self._changed.notify(tickets)
            for start in starts:
                self.scheduler.spawn(functools.partial(self._serve, start), name="nobounce-io")
                start.sure = True
        except BaseException as e:
            with self._changed.mutex:
                self._starting.difference_update([s for s in starts if not s.sure])
                served = self._threads > 0 or any(s.sure for s in self._starting)
                for _ in range(0 if served else min(tickets, self._tickets.count(job))):
                    self._tickets.remove(job)
            if not served or isinstance(e, NobounceError) or not isinstance(e, RuntimeError | MemoryError):
                raise

    def _serve(self, start: _Start) -> None:
        with self._changed.mutex:
            if start not in self._starting:
                return  # whoever started this thread was told that it had not come to be
            self._starting.discard(start)
            if self._threads >= self._most:
                return
            self._threads += 1
        while True:
            with self._changed.mutex:
                self._idle += 1
                while not self._tickets and not self._stopped:
                    self._changed.wait()
                self._idle -= 1
                if not self._tickets:
                    self._threads -= 1
                    return
                job = self._tickets.popleft()
            job.work()
            del job
            self.scheduler.help()


_engine: Engine | None = None
_making = THREADS.lock()


def engine_for(runtime: Runtime) -> Engine:
    """The process's engine, or the runtime's own where it does not live in real time."""
    global _engine
    if runtime.scheduler is not THREADS:
        own = runtime.engine
        if not isinstance(own, Engine):
            own = runtime.engine = Engine(runtime.scheduler)
            hooks.start()
        return own
    if _engine is None:
        hooks.start()
        with _making:
            if _engine is None:
                _engine = Engine()
    return _engine


def engines() -> list[Engine]:
    """Those that are there now."""
    own = [runtime.engine for runtime in registry.loaded()]
    return [e for e in (_engine, *own) if isinstance(e, Engine)]


def _forget() -> None:
    global _engine, _making
    _engine, _making = None, THREADS.lock()


os.register_at_fork(after_in_child=_forget)
