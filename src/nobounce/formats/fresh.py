"""Reads into memory that was allocated for them: what a loader does.

Nobody else has seen that memory, which has three consequences: it may be made ready just ahead of the read,
the caller may use the time of the transfer to prepare what it will hand out, and the reads of several files
may be under way at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nobounce.clock import THREADS
from nobounce.config import settings
from nobounce.errors import InternalError, RouteError
from nobounce.io import hooks
from nobounce.io.engine import engine_for
from nobounce.io.hold import Hold
from nobounce.io.prepare import Held, make_job, make_request
from nobounce.io.receipt import Receipt, merge_segments
from nobounce.io.strategy import ALONE_NBYTES, HEAD_START, HEAD_START_NBYTES, threads_ahead
from nobounce.records import replace
from nobounce.route.judge import EDGE, judge
from nobounce.route.scores import alignments
from nobounce.route.types import Cache, MemoryFacts, Require, Route, RouteSegment

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.clock import Scheduler
    from nobounce.io.engine import Work
    from nobounce.io.file import File
    from nobounce.io.job import Job
    from nobounce.runtimes.base import Runtime


def get_ready(runtime: Runtime, nbytes: int, require: Require, cache: Cache) -> None:
    """Start the threads of a large read of `nbytes` that is about to come, where it will most likely go
    direct into memory of the host: in the time that a disk takes for something else, it costs none."""
    direct = require != "fallback" and cache != "use" and not settings().force_compat_mode
    if direct and runtime.scheduler is THREADS and runtime.capabilities.host_addressable:
        # And one that makes the memory ready.
        engine_for(runtime).start_threads(threads_ahead(settings(), nbytes) + 1)


class _Together:
    """A job's workers, who begin when all of them are there.

    A direct read holds the process's memory map while it pins its destination, for a millisecond or two where
    that is fresh; a thread that is started beside it must wait to map its stack.
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


class Part(NamedTuple):
    """`nbytes` bytes of the file from `file_offset` on go to `buffer_offset` of `buffer`."""

    buffer: Buffer
    file_offset: int
    buffer_offset: int
    nbytes: int


class FreshRead:
    """One read, from `begin` until `finish` or `abandon`, into memory that was allocated for it.

    `parts` are in the order of the file and apart from each other. The read spans them all and leaves out
    what is between them. What goes direct begins and ends at whole blocks: where a part does not, `is_split`
    says that it must be read by itself, or with `relax` falls back. `beside` runs on another of the pool's
    threads; `held` is what `look` found, if somebody has looked at the page cache. Raises as `File.read`.
    """

    def __init__(
        self,
        file: File,
        parts: Sequence[Part],
        require: Require,
        cache: Cache,
        *,
        beside: Work | None = None,
        progress: Callable[[str, int], None] | None = None,
        held: Held = None,
        relax: bool = False,
    ) -> None:
        self._file, self._parts, self._beside, self._progress = file, parts, beside, progress
        self._view = view = parts[0].buffer
        self._hold = Hold(file, view)
        self._job: Job | None = None
        self._failure: BaseException | None = None
        self._alone = False
        # Several allocations are one memory that begins at the lowest address; every piece of the route
        # then says where it goes.
        self._base = min(p.buffer.handle for p in parts)
        self._first = parts[0].file_offset
        nbytes = parts[-1].file_offset + parts[-1].nbytes - self._first
        at = parts[0].buffer_offset if len(parts) == 1 else 0
        room = view.nbytes if len(parts) == 1 else nbytes
        memory = MemoryFacts(view.memory_kind, self._base, room, view.device.name)
        where = nbytes, self._first, at
        self._request = make_request(file, "read", memory, view.device, where, require, cache, held)
        self._pool = engine_for(view.device._runtime)
        try:
            route = judge(self._request)
        except RouteError as e:
            told = "read", view.device.name, nbytes, None, e
            hooks.unrouted(*told, file_offset=self._first, now=self._pool.scheduler.now())  # type: ignore[arg-type]
            raise
        self._route = route
        self.is_split = False
        if len(parts) > 1:
            self._route, self.is_split = _spread(
                route, parts, self._base, max(alignments(self._request)), relax
            )

    @property
    def file_offset(self) -> int:
        """Where in the file it begins."""
        return self._first

    def within(self, file_nbytes: int) -> int:
        """Bytes asked for that a file of `file_nbytes` holds."""
        return sum(max(0, min(p.nbytes, file_nbytes - p.file_offset)) for p in self._parts)

    def begin(self) -> None:
        """Hand the read to the pool's threads; what little a thread would not be
        woken for waits for `finish`."""
        self._hold.take()
        for part in self._parts:
            part.buffer.wait()
        way = self._file, self._request, self._route, self._view, self._pool
        job = self._job = make_job(*way, call="fresh", progress=self._progress)
        for a, b in itertools.pairwise(self._parts):
            if a.file_offset + a.nbytes != b.file_offset:
                job.skips[a.file_offset + a.nbytes] = b.file_offset
        job.begin()
        self._alone = job.tickets <= 1 and job.requested <= ALONE_NBYTES
        if self._alone:
            return
        team = _Together(job, self._pool.scheduler)
        try:
            self._pool.submit(team)
            if self._beside is not None:
                self._pool.submit(self._beside)
        except BaseException as e:
            self._failure = e
            job.stop()
        finally:
            team.begin()

    def finish(self, meanwhile: Callable[[], None]) -> Receipt:
        """Run `meanwhile`, which should let other threads run now and then (Scheduler.sleep(0)),
        wait for the end, and return the receipt. What `meanwhile` raises is raised once no thread
        works on the transfer any more."""
        job = self._begun()
        try:
            if self._failure is None:
                if self._alone:
                    job.work()
                elif job.target.strategy.kernel_slots and job.requested >= HEAD_START_NBYTES:
                    self._pool.scheduler.sleep(HEAD_START)
                meanwhile()
        except BaseException as e:
            self._failure = self._failure or e
        self._settle()
        if self._failure is not None:
            raise self._failure
        if job.error is not None:
            raise job.error
        if job.receipt is None:
            raise InternalError(f"the transfer of {self._file.name!r} ended without a receipt")
        return job.receipt if len(self._parts) == 1 else self._one_memory(job.receipt)

    def abandon(self) -> None:
        """Have no more of it begun, and return when no thread works on it any more. Raises
        nothing of the transfer's own."""
        if self._job is not None:
            self._failure = self._failure or InternalError("the read was abandoned")
        self._settle()

    def _settle(self) -> None:
        """Wait until no thread works on the job, whatever interrupts the wait."""
        job = self._job
        try:
            if job is not None and self._failure is not None:
                job.stop()
            if job is not None and not job.done and (self._failure is not None or self._alone):
                try:
                    job.work()  # ends it if no other thread has begun, or ever will
                except BaseException as e:
                    self._failure = self._failure or e
            while job is not None and not job.done:
                try:
                    job.wait()
                except BaseException as e:
                    self._failure = self._failure or e
                    job.stop()
        finally:
            try:
                self._hold.let_go()
            finally:
                if self._hold.held:  # the first was interrupted
                    self._hold.let_go()

    def _begun(self) -> Job:
        if self._job is None:
            raise InternalError("the read has not begun")
        return self._job

    def _one_memory(self, receipt: Receipt) -> Receipt:
        """The receipt of several parts as if their memory were one, in the order of the file."""
        shifted = [replace(s, buffer_offset=s.file_offset - self._first) for s in receipt.segments]
        return replace(receipt, segments=merge_segments(shifted))


def read_fresh(
    file: File,
    buffer: Buffer,
    where: tuple[int, int, int],
    require: Require,
    cache: Cache,
    *,
    meanwhile: Callable[[], None],
    beside: Work | None = None,
    progress: Callable[[str, int], None] | None = None,
    held: Held = None,
) -> Receipt:
    """One read from its beginning to its end; `where` is (nbytes, file_offset, buffer_offset)."""
    nbytes, file_offset, offset = where
    part = Part(buffer, file_offset, offset, nbytes)
    read = FreshRead(file, [part], require, cache, beside=beside, progress=progress, held=held)
    try:
        read.begin()
        return read.finish(meanwhile)
    except BaseException:
        read.abandon()
        raise


def _spread(route: Route, parts: Sequence[Part], base: int, align: int, relax: bool) -> tuple[Route, bool]:
    """The same route of the parts alone, each piece with its place in memory as an offset from `base`, and
    whether a direct piece does not suit `align`; with `relax` such a piece falls back."""
    segments: list[RouteSegment] = []
    odd = False
    left = iter(parts)
    part = next(left)
    for s in route.segments:
        at, end = s.file_offset, s.file_offset + s.nbytes
        while at < end:
            while at >= part.file_offset + part.nbytes:
                part = next(left)
            at = max(at, part.file_offset)
            stop = min(end, part.file_offset + part.nbytes)
            if at >= stop:
                break
            place = part.buffer.handle - base + part.buffer_offset + at - part.file_offset
            piece = replace(s, file_offset=at, buffer_offset=place, nbytes=stop - at)
            if s.backend == "fastpath" and (at | (stop - at) | (base + place)) % align:
                if relax:
                    piece = replace(piece, backend="fallback", reason=EDGE)
                odd = odd or not relax
            segments.append(piece)
            at = stop
    return Route(tuple(segments), route.scores), odd
