"""A synchronous read into memory that was allocated for it: what a loader does.

Nobody else has seen that memory, which has two consequences: it may be made ready just ahead of the read, and the caller may use
the time of the transfer to prepare what it will hand out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nobounce.clock import THREADS
from nobounce.config import Settings, settings
from nobounce.io.engine import engine_for
from nobounce.io.prepare import Held, Where, transfer
from nobounce.io.receipt import Receipt
from nobounce.route.types import Cache, Require

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.clock import Scheduler
    from nobounce.io.engine import Engine, Work
    from nobounce.io.file import File
    from nobounce.io.job import Job
    from nobounce.io.target import Chunk
    from nobounce.runtimes.base import Runtime


SMALL = 1 << 20
"""Bytes that are read before another thread is awake."""

DIRECT_WIDTH = 8
DIRECT_NBYTES = 16 << 20
"""Direct reads under way at once, and their size: together 3 to 5 % more than 4 of 8 MiB from a disk that holds 2.6 GiB/s."""

HEAD_START, HEAD_START_NBYTES = 1.5e-3, 256 << 20
"""Seconds that a relay of so many bytes, which takes 5 ms or more, has the interpreter to itself: until its reads are under way it asks
for the lock every few microseconds, and whoever makes thousands of objects beside it holds it for longer."""

TAIL_NBYTES = 4 << 20
"""The last chunks are cut to this, so that the threads end together and no disk waits for the last of them."""


def get_ready(runtime: Runtime, nbytes: int, require: Require, cache: Cache) -> None:
    """Start the threads of a large read of `nbytes` that is about to come, where it will most likely go direct into memory of the
    host: in the time that a disk takes for something else, it costs none."""
    direct = require != "fallback" and cache != "use" and not settings().force_compat_mode
    if direct and runtime.scheduler is THREADS and runtime.capabilities.host_addressable:
        width = min(settings().io_threads or DIRECT_WIDTH, -(-nbytes // TAIL_NBYTES))
        engine_for(runtime).start_threads(width + 1)  # and one that makes the memory ready


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
            except BaseException as e:
                failure = e
                job.stop()
            finally:
                team.begin()
        try:
            if failure is None:
                if job.target.kernel_slots and job.requested >= HEAD_START_NBYTES:
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

    return transfer(file, "read", buffer, where, require, cache, progress=progress, run=run, held=held)


def _divide(job: Job) -> None:
    """As many workers and such chunks as suit memory that the host reaches, where the settings leave it open."""
    chosen, chunks = settings(), job._chunks
    if not chosen.io_threads:
        cores = max(2, len(os.sched_getaffinity(0)))
        # Copying keeps a core busy, and what it was about to write in that core's cache.
        job.width = max(job.width, DIRECT_WIDTH) if job.direct_nbytes else min(job.width, cores)
        if chosen.chunk_nbytes == Settings().chunk_nbytes:
            chunks[:] = _joined(chunks)
    last = max(0, len(chunks) - max(1, job.width // 2))
    chunks[last:] = [part for chunk in chunks[last:] for part in _parts(chunk)]


def _joined(chunks: list[Chunk]) -> list[Chunk]:
    """Direct neighbours in reads of at most `DIRECT_NBYTES`."""
    found: list[Chunk] = []
    for chunk in chunks:
        before = found[-1] if found else None
        if (
            before is not None
            and before.backend == chunk.backend == "fastpath"
            and before.reason is chunk.reason
            and before.file_offset + before.nbytes == chunk.file_offset
            and before.nbytes + chunk.nbytes <= DIRECT_NBYTES
        ):
            found[-1] = before._replace(nbytes=before.nbytes + chunk.nbytes)
        else:
            found.append(chunk)
    return found


def _parts(chunk: Chunk) -> Iterator[Chunk]:
    for done in range(0, chunk.nbytes, TAIL_NBYTES):
        at = chunk.file_offset + done, chunk.buffer_offset + done
        nbytes = min(TAIL_NBYTES, chunk.nbytes - done)
        yield chunk._replace(file_offset=at[0], buffer_offset=at[1], nbytes=nbytes)
