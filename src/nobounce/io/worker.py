"""One thread's share of a job: each chunk by its backend, failures kept in the job."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from nobounce.errors import DeviceError
from nobounce.io import fallback, fastpath, hooks, uring_relay
from nobounce.io.evidence import Meter
from nobounce.io.pagecache_dma import WINDOW, PageCacheDma
from nobounce.io.receipt import Retry
from nobounce.io.strategy import CACHED_CODES
from nobounce.io.target import Chunk, Piece
from nobounce.route.types import Reason

if TYPE_CHECKING:
    from nobounce.io.job import Job

RETRIED = Reason("direct-failed", "the direct path failed and fallback repeated the bytes in their place")


class Worker:
    """One thread's share of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._meter = Meter(job.target.op) if job._watch else None
        self._mover: fallback.Mover | None = None
        ring = job.target.ring
        self._dma: PageCacheDma | None = None
        if ring is not None and job._take_dma():
            # One relay for both: another could wait for a slot while this one holds some.
            self._mover = relay = fallback.Relay(job.target, ring)
            self._dma = PageCacheDma(job.target, relay)
        self.window = WINDOW if self._dma is not None else 0
        """Bytes that this worker likes to claim at once; 0 for single chunks."""

    def move(self, chunk: Chunk) -> None:
        """Move one chunk by its backend; failures go to the job, never out."""
        if not hooks.watchers:
            self._move(chunk)
            return
        now = self._job._scheduler.now
        began = now()
        self._move(chunk)
        ended = now()
        hooks.moved(self._job, chunk, began, ended)

    def _move(self, chunk: Chunk) -> None:
        try:
            if chunk.backend == "fastpath" and self._job._direct_errno is None:
                self._direct(chunk)
            elif chunk.backend == "fastpath":
                self._fallback(chunk._replace(backend="fallback", reason=RETRIED))
            else:
                self._fallback(chunk)
        except DeviceError as e:
            job = self._job
            error = job._error(errno.EIO, chunk.file_offset, chunk.nbytes, e.call, chunk.backend, str(e))
            error.__cause__ = e
            job._fail(chunk.file_offset, error)
        except Exception as e:
            # What a caller's `progress` raises is the transfer's error too, and ends no I/O thread.
            self._job._fail(chunk.file_offset, e)

    def _direct(self, chunk: Chunk) -> None:
        job = self._job
        if self._meter is not None:
            self._meter.on()
        try:
            done, ended = fastpath.move(job.target, chunk)
        except fastpath.DirectFailure as e:
            self._after_failure(chunk, e)
            return
        self._record(chunk, done)
        if ended:
            job._ended_at(chunk.file_offset + done)
        elif done < chunk.nbytes:
            self._rest(chunk, done, fastpath.SHORT)

    def _record(self, chunk: Chunk, done: int) -> None:
        if done:
            self._job._moved(
                [Piece("fastpath", chunk.file_offset, chunk.buffer_offset, done, chunk.reason, False)]
            )

    def _after_failure(self, chunk: Chunk, failure: fastpath.DirectFailure) -> None:
        job, done = self._job, failure.done
        self._record(chunk, done)
        if failure.errno not in job.target.retry_errnos:
            call = "direct read" if job.target.op == "read" else "direct write"
            error = job._error(failure.errno, chunk.file_offset + done, chunk.nbytes - done, call, "fastpath")
            error.__cause__ = failure.__cause__
            job._fail(chunk.file_offset + done, error)
            return
        with job._changed.mutex:
            job._note_cold()
            job._direct_errno = failure.errno
            job._retries.append(Retry(chunk.file_offset + done, chunk.nbytes - done, failure.errno))
        if job._on_direct_failure is not None:
            job._on_direct_failure(failure.errno)
        self._rest(chunk, done, RETRIED)

    def _rest(self, chunk: Chunk, done: int, reason: Reason) -> None:
        self._fallback(
            Chunk(
                "fallback", chunk.file_offset + done, chunk.buffer_offset + done, chunk.nbytes - done, reason
            )
        )

    def _fallback(self, chunk: Chunk) -> None:
        job = self._job
        if self._meter is not None:
            self._meter.off()
        mover: fallback.Mover
        if self._dma is not None and chunk.reason.code in CACHED_CODES:
            mover = self._dma
        else:
            mover = self._mover = self._mover or uring_relay.mover(job.target)
        try:
            pieces, end = mover.move(chunk)
        except fallback.PartialError as e:
            self._after_error(e, chunk.file_offset + chunk.nbytes)
            return
        self._moved(pieces)
        if end is not None:
            job._ended_at(end)

    def _moved(self, pieces: list[Piece]) -> None:
        if self._job._progress is not None and isinstance(self._mover, fallback.Relay):
            self._mover.step_out()  # the caller's function is to see its own device as the current one
        self._job._moved(pieces)

    def _after_error(self, e: fallback.PartialError, end: int) -> None:
        job = self._job
        self._moved(e.pieces)
        call = "pread" if job.target.op == "read" else "pwrite"
        rest = max(0, end - e.position)
        error = job._error(e.error.errno or errno.EIO, e.position, rest, call, "fallback")
        error.__cause__ = e.error
        job._fail(e.position, error)

    def close(self) -> None:
        """Wait for copies under way and hand the counters in."""
        job = self._job
        movers = [m for m in (self._dma, self._mover) if m is not None]  # the stream of both is the relay's
        for mover in movers:
            try:
                self._moved(mover.flush())
            except fallback.PartialError as e:
                self._after_error(e, job._file_offset + job._requested)
            except DeviceError as e:
                error = job._error(errno.EIO, job._file_offset, job._requested, e.call, "fallback", str(e))
                error.__cause__ = e
                job._fail(job._file_offset, error)
            except Exception as e:  # the other one has copies under way as well
                job._fail(job._file_offset, e)
        rest = self._dma.leftovers() if self._dma is not None else None
        if rest is not None:
            with job._changed.mutex:
                job.leftovers.append(rest)
        if self._meter is not None:
            self._meter.off()
            with job._changed.mutex:
                job._metered += self._meter.nbytes
                job._meter_usable = job._meter_usable and self._meter.usable
