"""A synchronous read into memory that was allocated for it: what a loader does.

Nobody else has seen that memory, which has two consequences: it may be made ready just ahead of the read, and the caller may use
the time of the transfer to prepare what it will hand out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce.clock import THREADS
from nobounce.config import settings
from nobounce.io.engine import engine_for
from nobounce.io.prepare import Held, Where, transfer
from nobounce.io.receipt import Receipt
from nobounce.io.strategy import ALONE_NBYTES, HEAD_START, HEAD_START_NBYTES, threads_ahead
from nobounce.route.types import Cache, Require

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.clock import Scheduler
    from nobounce.io.engine import Engine, Work
    from nobounce.io.file import File
    from nobounce.io.job import Job
    from nobounce.runtimes.base import Runtime


def get_ready(runtime: Runtime, nbytes: int, require: Require, cache: Cache) -> None:
    """Start the threads of a large read of `nbytes` that is about to come, where it will most likely go direct into memory of the
    host: in the time that a disk takes for something else, it costs none."""
    direct = require != "fallback" and cache != "use" and not settings().force_compat_mode
    if direct and runtime.scheduler is THREADS and runtime.capabilities.host_addressable:
        # And one that makes the memory ready.
        engine_for(runtime).start_threads(threads_ahead(settings(), nbytes) + 1)


class _Together:
    """A job's workers, who begin when all of them are there.

    A direct read holds the process's memory map while it pins its destination, for a millisecond or two where that is fresh; a
    thread that is started beside it must wait to map its stack.
    """

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        self._job, self._changed, self._begun = job, scheduler.condition(), False

    @property
    def tickets(self) -> int:
        return self._job.tickets

    def work(self) -> None:
        with self._changed.mutex:
            self._changed.wait_for(lambda: self._begun)
        self._job.work()

    def begin(self) -> None:
        with self._changed.mutex:
            self._begun = True
            self._changed.notify_all()


def read_fresh(
    file: File,
    buffer: Buffer,
    where: Where,
    require: Require,
    cache: Cache,
    *,
    meanwhile: Callable[[], None],
    beside: Work | None = None,
    progress: Callable[[str, int], None] | None = None,
    held: Held = None,
) -> Receipt:
    """Read into a buffer that nobody has touched, while `meanwhile` runs on the caller's thread and `beside` on one of the pool.
    `held` is what `look` found, if somebody has looked at the page cache.

    `meanwhile` should let other threads run now and then (Scheduler.sleep(0)). What it raises is raised once no thread works on
    the transfer any more. Else as `prepare.transfer`.
    """

    def run(pool: Engine, job: Job) -> None:
        job.begin()
        failure: BaseException | None = None
        if job.tickets <= 1 and job.requested <= ALONE_NBYTES:
            job.work()
        else:
            team = _Together(job, pool.scheduler)
            try:
                pool.submit(team)
                if beside is not None:
                    pool.submit(beside)
            except BaseException as e:
                failure = e
                job.stop()
            finally:
                team.begin()
        try:
            if failure is None:
                if job.target.strategy.kernel_slots and job.requested >= HEAD_START_NBYTES:
                    pool.scheduler.sleep(HEAD_START)
                meanwhile()
            else:
                job.work()  # ends it if no other thread has begun, or ever will
        except BaseException as e:
            failure = failure or e
            job.stop()
        while not job.done:
            try:
                job.wait()
            except BaseException as e:
                failure = failure or e
                job.stop()
        if failure is not None:
            raise failure

    ways: dict[str, Any] = {"progress": progress, "run": run, "call": "fresh", "held": held}
    return transfer(file, "read", buffer, where, require, cache, **ways)
