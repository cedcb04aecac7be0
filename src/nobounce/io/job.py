"""One transfer being carried out: workers claim its chunks until none is left, and the last
one out makes the receipt.

Nothing is allocated or pinned here per byte. A job never blocks a worker on another job.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from nobounce.clock import Scheduler
from nobounce.errors import InternalError, TransferError
from nobounce.facts.extents import hole_nbytes
from nobounce.facts.pagecache import counted
from nobounce.io import hooks
from nobounce.io.evidence import MIN_NBYTES, SERVED, Meter, Range, denied, served_by_cache
from nobounce.io.movers.pagecache_dma import GiveBack
from nobounce.io.plan import cached_ranges
from nobounce.io.receipt import Evidence, Receipt, Retry, Segment, merge_segments, reassigned
from nobounce.io.strategy import CACHED_CODES
from nobounce.io.target import Chunk, Piece, Target
from nobounce.io.worker import Worker
from nobounce.route.types import CachedRange, Refusal

PAGE = 4096
READ_AHEAD = 8 << 20
"""Bytes beyond a buffered read that the kernel's read-ahead may bring in."""


class Job:
    """A route under way: made, begun, worked on by any number of threads, done."""

    def __init__(
        self,
        target: Target,
        chunks: list[Chunk],
        epilogue: list[Chunk],
        *,
        file_offset: int,
        requested: int,
        scheduler: Scheduler,
        fsync: bool = False,
        keep: object = None,
        on_direct_failure: Callable[[int], None] | None = None,
        on_denial: Callable[[int, list[Range]], None] | None = None,
        progress: Callable[[str, int], None] | None = None,
        stream: int | None = None,
        operation: hooks.Operation | None = None,
        refusals: tuple[Refusal, ...] = (),
        hand_over: Callable[[GiveBack], None] | None = None,
    ) -> None:
        self.target, self.stream, self.requested = target, stream, requested
        self.refusals = refusals
        self._chunks, self._epilogue = chunks, epilogue
        self._file_offset, self._requested, self._fsync = file_offset, requested, fsync
        self._scheduler, self._keep = scheduler, keep
        self._hand_over = hand_over or GiveBack.work
        self._on_direct_failure, self._on_denial, self._progress = on_direct_failure, on_denial, progress
        self._on_done: Callable[[Job], None] | None = None
        self.skips: dict[int, int] = {}
        """Where a part of the file ends that is wanted, and where the next begins."""
        self._changed = scheduler.condition()
        self._next = self._active = 0
        self._pieces: list[Piece] = []
        self._retries: list[Retry] = []
        self._failure: tuple[int, BaseException] | None = None
        self._grew: bool | None = None
        self._denied: list[Range] = []
        self._end: int | None = None
        self.direct_errno: int | None = None
        self._closed = self.done = False
        self._dma_left = (
            target.strategy.dma_workers if any(c.reason.code in CACHED_CODES for c in chunks) else 0
        )
        self.leftovers: list[GiveBack] = []
        self._metered, self._meter_usable = 0, True
        self.direct_nbytes = sum(c.nbytes for c in chunks if c.backend == "fastpath")
        self._watch = self.direct_nbytes >= MIN_NBYTES
        self._look = self._watch or (self.direct_nbytes > 0 and not target.vouched and target.op == "read")
        self._resident_before: int | None = None
        self._cold: list[CachedRange] | None = None
        self.queued_at = scheduler.now()
        self.started_at = self.ended_at = self.queued_at
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        if operation is None and hooks.watchers:
            where = target.op, target.filename, target.device_name, file_offset, requested
            operation = hooks.enter(*where, stream, self.queued_at)
        elif operation is not None:
            self.queued_at = operation.queued_at
        self.operation = operation

    @property
    def tickets(self) -> int:
        """How many workers the job can use."""
        return min(self.target.strategy.width, len(self._chunks))

    @property
    def alone(self) -> bool:
        """Whether its one worker may be the thread that asked; io_uring's is to be one
        that no signal interrupts."""
        return self.tickets <= 1 and not self.target.strategy.kernel_slots

    def begin(self, on_done: Callable[[Job], None] | None = None) -> None:
        """Once, before any thread works: the transfer starts now. `on_done(job)` is called at its end."""
        self._on_done = on_done
        self.started_at = self._scheduler.now()
        if self.operation is not None:
            hooks.begin(self.operation, self.started_at)
        if self._look:
            self._resident_before = self._resident()
        if any(c.backend == "fallback" for c in self._chunks):
            self._note_cold()

    def _note_cold(self) -> None:
        """Before fallback reads: which ranges the page cache does not hold, so that
        they can be dropped again."""
        if self.target.drop_cache and self.target.op == "read" and self._cold is None:
            ranges = cached_ranges(self.target.buffered_fd, self._file_offset, self._requested + READ_AHEAD)
            self._cold = [r for r in ranges if r.resident is False]
            self.target.before_cold(self._cold)

    # workers

    def work(self) -> None:
        """Move chunks until none is left; any number of threads may be in here."""
        with self._changed.mutex:
            if self._closed:
                return
            self._active += 1
        worker = self._worker()
        try:
            while (chunk := self._claim(worker.window)) is not None:
                self._move(worker, chunk)
        except BaseException:
            # An exception from outside (KeyboardInterrupt in the caller's thread) ends the
            # job, not the process's pool.
            self.failed(self._file_offset, InternalError("the transfer was interrupted"))
            raise
        finally:
            try:
                self._close(worker)
            except Exception as e:
                self.failed(self._file_offset, e)
            finally:
                with self._changed.mutex:
                    self._active -= 1
                    last = self._active == 0 and not self._claimable()
                    if last:
                        self._closed = True
                if last:
                    self._finish()

    def wait(self) -> None:
        """Block until the job is done."""
        self._scheduler.help()
        with self._changed.mutex:
            self._changed.wait_for(lambda: self.done)

    def stop(self) -> None:
        """Have no further chunk begun; what is under way ends."""
        self.failed(self._file_offset, InternalError("the transfer was interrupted"))

    def _claimable(self) -> bool:
        return (
            self._next < len(self._chunks)
            and self._failure is None
            and (self._end is None or self._chunks[self._next].file_offset < self._end)
        )

    def _claim(self, window: int = 0) -> Chunk | None:
        """The next chunk; with a `window`, as many neighbours as one window holds, joined."""
        with self._changed.mutex:
            if not self._claimable():
                return None
            chunk = self._chunks[self._next]
            self._next += 1
            while window and self._claimable() and chunk.backend == "fallback":
                more = self._chunks[self._next]
                if more.reason is not chunk.reason or more.file_offset != chunk.file_offset + chunk.nbytes:
                    break
                if more.buffer_offset != chunk.buffer_offset + chunk.nbytes:
                    break  # a load's memory may be several allocations
                if chunk.nbytes + more.nbytes > window:
                    break
                chunk = chunk._replace(nbytes=chunk.nbytes + more.nbytes)
                self._next += 1
            return chunk

    def _worker(self) -> Worker:
        meter = Meter(self.target.op) if self._watch else None
        return Worker(self, self.target, meter, page_cache=self._take_dma())

    def _move(self, worker: Worker, chunk: Chunk) -> None:
        if not hooks.watchers:
            worker.move(chunk)
            return
        began = self._scheduler.now()
        worker.move(chunk)
        hooks.moved(self, chunk, began, self._scheduler.now())

    def _close(self, worker: Worker) -> None:
        """Wait for what the worker has under way, and take its counters and what it
        leaves to be given back."""
        worker.close(self._file_offset, self._requested)
        rest = worker.leftovers()
        with self._changed.mutex:
            if rest is not None:
                self.leftovers.append(rest)
            if worker.meter is not None:
                worker.meter.off()
                self._metered += worker.meter.nbytes
                self._meter_usable = self._meter_usable and worker.meter.usable

    def _take_dma(self) -> bool:
        """Whether one more worker may read page-cached ranges straight from the page cache."""
        with self._changed.mutex:
            if self._dma_left <= 0:
                return False
            self._dma_left -= 1
            return True

    def moved(self, pieces: list[Piece]) -> None:
        if pieces:
            with self._changed.mutex:
                self._pieces += pieces
            if self._progress is not None:
                for piece in pieces:
                    self._progress(piece.backend, piece.nbytes)

    @property
    def calls_out(self) -> bool:
        return self._progress is not None

    def stalled(self) -> None:
        self._note_cold()

    def direct_failed(self, retry: Retry) -> None:
        with self._changed.mutex:
            self._note_cold()
            self.direct_errno = retry.errno
            self._retries.append(retry)
        if self._on_direct_failure is not None:
            self._on_direct_failure(retry.errno)

    def end_of_file(self, position: int) -> None:
        with self._changed.mutex:
            self._end = position if self._end is None else min(self._end, position)

    def failed(self, position: int, error: BaseException) -> None:
        with self._changed.mutex:
            if self._failure is None or position < self._failure[0]:
                self._failure = position, error

    # the end

    def _finish(self) -> None:
        try:
            if self._failure is None and self._epilogue:
                worker = self._worker()
                try:
                    for chunk in self._epilogue:
                        self._move(worker, chunk)
                finally:
                    self._close(worker)
            if self._fsync and self._failure is None:
                self._sync()
            self.target.drop_cold(self._cold or ())
        except BaseException as e:
            self.failed(self._file_offset, e)
        self.ended_at = self._scheduler.now()
        try:
            self.receipt = self._make_receipt()
            if self._failure is not None:
                self.error = self._failure[1]
                if isinstance(self.error, TransferError):
                    self.error.receipt = self.receipt
            elif self._denied and self.target.only_direct:
                self.error = denied(
                    self.target, self._file_offset, self._requested, self._denied, self.receipt
                )
        except BaseException as e:
            self.error = e
        self._keep = None
        hooks.ended(self)
        with self._changed.mutex:
            self.done = True
            self._changed.notify_all()
        own = []
        for rest in self.leftovers:
            try:
                self._hand_over(rest)
            except (RuntimeError, MemoryError):  # no thread can be started
                own.append(rest)
        if self._on_done is not None:
            self._on_done(self)
        for rest in own:
            rest.work()

    def _sync(self) -> None:
        try:
            os.fdatasync(self.target.buffered_fd)
        except OSError as e:
            self.failed(
                self._file_offset,
                self.target.error(
                    e.errno or errno.EIO, self._file_offset, self._requested, "fallback", call="fdatasync"
                ),
            )

    def _make_receipt(self) -> Receipt:
        segments = merge_segments(self._pieces)
        kept: list[Segment] = []
        position = self._file_offset
        moved = 0
        for s in segments:
            position = self.skips.get(position, position)
            if s.file_offset != position:
                break
            kept.append(s)
            position += s.nbytes
            moved += s.nbytes
        beyond = sum(s.nbytes for s in segments) - moved
        notes = (f"{beyond} bytes beyond the first gap moved too",) if beyond else ()
        direct = sum(s.nbytes for s in kept if s.backend == "fastpath")
        holes = self._holes(kept)
        evidence = self._evidence(direct, holes)
        if self._look and evidence != "kernel":
            self._denied = self._check(kept, direct - holes)
        if self._denied:
            kept = reassigned(kept, self._denied, SERVED)
            direct = sum(s.nbytes for s in kept if s.backend == "fastpath")
            holes, evidence = self._holes(kept), "reported" if direct else "none"
            if self._on_denial is not None:
                self._on_denial(self.target.buffered_fd, self._denied)
        return Receipt(
            op=self.target.op,
            filename=self.target.filename,
            device=self.target.device_name,
            requested=self._requested,
            nbytes=moved,
            segments=tuple(kept),
            retries=tuple(self._retries),
            evidence=evidence,
            queued_at=self.queued_at,
            started_at=self.started_at,
            ended_at=self.ended_at,
            synced=self._fsync and self._failure is None,
            notes=notes,
            hole_bytes=holes,
        )

    def _holes(self, segments: list[Segment]) -> int:
        """Direct bytes that no disk was asked for."""
        if not self.target.sparse or self.target.op == "write":
            return 0
        fd = self.target.seekable_fd
        return sum(hole_nbytes(fd, s.file_offset, s.nbytes) for s in segments if s.backend == "fastpath")

    def _evidence(self, direct: int, holes: int) -> Evidence:
        if direct == 0:
            return "none"
        if self._look:
            before, after = self._resident_before, self._resident()
            self._grew = None if before is None or after is None else after > before
        if not self._watch or not self._meter_usable or self._failure is not None:
            return "reported"
        if self._grew is not False:
            return "reported"
        slack = PAGE * (len(self._chunks) + 1)
        return "kernel" if direct - holes <= self._metered <= direct - holes + slack else "reported"

    def _check(self, segments: list[Segment], fetched: int) -> list[Range]:
        """Ranges that are said to have gone direct and did not. Looked for where pages appeared, or where the
        kernel fetched less than it should have."""
        missing = self._watch and self._meter_usable and self._failure is None and self._metered < fetched
        if self.target.op == "write" or not (self._grew or missing):
            return []
        ranges = [(s.file_offset, s.nbytes) for s in segments if s.backend == "fastpath"]
        t = self.target
        return served_by_cache(t.buffered_fd, t.direct_fd, ranges, t.align)

    def _resident(self) -> int | None:
        """Counted bytes in the page cache: samples see no growth between them, so they prove nothing."""
        return counted(self.target.buffered_fd, self._file_offset, self._requested).resident_bytes
