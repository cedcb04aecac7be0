"""A synchronous read into memory that was allocated for it: what a loader does.

Nobody else has seen that memory, which has two consequences: it may be made ready just ahead of the read, and the caller may use
the time of the transfer to prepare what it will hand out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nobounce.config import settings
from nobounce.io.prepare import Where, transfer
from nobounce.io.receipt import Receipt
from nobounce.route.types import Cache, Require

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.clock import Scheduler
    from nobounce.io.engine import Engine, Work
    from nobounce.io.file import File
    from nobounce.io.job import Job


SMALL = 1 << 20
"""Bytes that are read before another thread is awake."""

DIRECT_WIDTH = 8
"""Direct reads under way at once, of a chunk each: 8 of them bring 2 to 3 % more than 4 from a disk that holds 2.6 GiB/s."""

TAIL_NBYTES = 2 << 20
"""The last chunks are cut to this, so that the threads end together and no disk waits for the last of them."""


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
) -> Receipt:
    """Read into a buffer that nobody has touched, while `meanwhile` runs on the caller's thread and `beside` on one of the pool.

    `meanwhile` should let other threads run now and then (Scheduler.sleep(0)). What it raises is raised once no thread works on
    the transfer any more. Else as `prepare.transfer`.
    """

    def run(pool: Engine, job: Job) -> None:
        job.target.fresh = job.target.runtime.capabilities.host_addressable
        if job.target.fresh:
            _divide(job)
        job.begin()
        failure: BaseException | None = None
        if job.tickets <= 1 and job.requested <= SMALL:
            job.work()
        else:
            team = _Together(job, pool.scheduler)
            try:
                pool.submit(team)
                if beside is not None:
                    pool.submit(beside)
            finally:
                team.begin()
        try:
            meanwhile()
        except BaseException as e:
            failure = e
            job.stop()
        while not job.done:
            try:
                job.wait()
            except BaseException as e:
                failure = failure or e
                job.stop()
        if failure is not None:
            raise failure

    return transfer(file, "read", buffer, where, require, cache, progress=progress, run=run)


def _divide(job: Job) -> None:
    """More direct reads at once than copies from the page cache, and a fine end."""
    if job.direct_nbytes and not settings().io_threads:
        job.width = max(job.width, DIRECT_WIDTH)
    keep = max(0, len(job._chunks) - job.width)
    job._chunks[keep:] = [
        chunk._replace(
            file_offset=chunk.file_offset + done,
            buffer_offset=chunk.buffer_offset + done,
            nbytes=min(TAIL_NBYTES, chunk.nbytes - done),
        )
        for chunk in job._chunks[keep:]
        for done in range(0, chunk.nbytes, TAIL_NBYTES)
    ]
