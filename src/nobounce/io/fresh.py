"""A synchronous read into memory that was allocated for it: what a loader does.

Nobody else has seen that memory, which has two consequences: it may be made ready just ahead of the read, and the caller may use
the time of the transfer to prepare what it will hand out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nobounce.io.prepare import Where, transfer
from nobounce.io.receipt import Receipt
from nobounce.route.types import Cache, Require

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.io.engine import Engine
    from nobounce.io.file import File
    from nobounce.io.job import Job


SMALL = 1 << 20
"""Bytes that are read before another thread is awake."""


def read_fresh(
    file: File,
    buffer: Buffer,
    where: Where,
    require: Require,
    cache: Cache,
    *,
    meanwhile: Callable[[], None],
    progress: Callable[[str, int], None] | None = None,
) -> Receipt:
    """Read into a buffer that nobody has touched, while `meanwhile` runs on the caller's thread.

    `meanwhile` should let other threads run now and then (Scheduler.sleep(0)). What it raises is raised once no thread works on
    the transfer any more. Else as `prepare.transfer`.
    """

    def run(pool: Engine, job: Job) -> None:
        job.target.fresh = job.target.runtime.capabilities.host_addressable
        job.begin()
        failure: BaseException | None = None
        if job.tickets <= 1 and job.requested <= SMALL:
            job.work()
        else:
            pool.submit(job)
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
