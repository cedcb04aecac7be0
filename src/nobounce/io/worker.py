"""One thread's share of a transfer or a batch: each chunk by its backend, a failed direct one again
by fallback, in its place.

What happens is told to a `Ledger`: a job, which several workers share, or a single request of a batch.
"""

from __future__ import annotations

import errno
from typing import Protocol

from nobounce.errors import DeviceError
from nobounce.io.evidence import Meter
from nobounce.io.movers import fallback, fastpath, uring_relay
from nobounce.io.movers.pagecache_dma import GiveBack, PageCacheDma
from nobounce.io.receipt import Retry
from nobounce.io.strategy import CACHED_CODES, PAGE_CACHE_WINDOW
from nobounce.io.target import Chunk, Piece, Target
from nobounce.route.types import Reason

RETRIED = Reason("direct-failed", "the direct path failed and fallback repeated the bytes in their place")


class Ledger(Protocol):
    """Who keeps account of what workers do. Positions are offsets in the file, in bytes."""

    @property
    def direct_errno(self) -> int | None:
        """The error by which the direct path has failed for this file: what was to go direct falls back."""

    @property
    def calls_out(self) -> bool:
        """Whether `moved` calls a function of the caller's."""

    def moved(self, pieces: list[Piece]) -> None:
        """These bytes are where they belong."""

    def end_of_file(self, position: int) -> None:
        """The file ends here."""

    def failed(self, position: int, error: Exception) -> None:
        """The bytes from here on could not be moved."""

    def stalled(self) -> None:
        """A direct call stopped before the end and brings nothing more: fallback is about to do the rest."""

    def direct_failed(self, retry: Retry) -> None:
        """A direct call failed with an error that fallback may repeat, and is about to."""


class Worker:
    """One thread's movers. With `meter`, the kernel is asked what the thread moves directly; with
    `page_cache`, the thread reads page-cached chunks by DMA."""

    def __init__(
        self, ledger: Ledger, target: Target, meter: Meter | None = None, *, page_cache: bool = False
    ) -> None:
        self._ledger, self._target, self.meter = ledger, target, meter
        self._mover: fallback.Mover | None = None
        self._dma: PageCacheDma | None = None
        if page_cache and target.ring is not None:
            # One relay for both: another could wait for a slot while this one holds some.
            self._mover = relay = fallback.Relay(target, target.ring)
            self._dma = PageCacheDma(target, relay)
        self.window = PAGE_CACHE_WINDOW if self._dma is not None else 0
        """Bytes that this worker likes to claim at once; 0 for single chunks."""

    def move(self, chunk: Chunk) -> None:
        """Move one chunk by its backend; failures go to the ledger, never out."""
        try:
            if chunk.backend == "fallback":
                self._fallback(chunk)
            elif self._ledger.direct_errno is None:
                self._direct(chunk)
            else:
                self._rest(chunk, 0, RETRIED)
        except DeviceError as e:
            self._fail(e, errno.EIO, chunk.file_offset, chunk.nbytes, chunk.backend, e.call, str(e))
        except Exception as e:
            # What a caller's `progress` raises is the transfer's error too, and ends no I/O thread.
            self._ledger.failed(chunk.file_offset, e)

    def close(self, position: int, nbytes: int) -> None:
        """Wait for copies under way. What then fails is told of the `nbytes` bytes at `position`."""
        for mover in (self._dma, self._mover):  # the stream of both is the relay's
            if mover is None:
                continue
            try:
                self._moved(mover.flush())
            except fallback.PartialError as e:
                self._after_error(e, position + nbytes)
            except DeviceError as e:
                self._fail(e, errno.EIO, position, nbytes, "fallback", e.call, str(e))
            except Exception as e:  # the other one has copies under way as well
                self._ledger.failed(position, e)

    def leftovers(self) -> GiveBack | None:
        """Pinned pages to be given back, once closed; None where there are none."""
        return self._dma.leftovers() if self._dma is not None else None

    def _direct(self, chunk: Chunk) -> None:
        if self.meter is not None:
            self.meter.on()
        try:
            done, ended = fastpath.move(self._target, chunk)
        except fastpath.DirectFailure as e:
            self._after_failure(chunk, e)
            return
        self._record(chunk, done)
        if ended:
            self._ledger.end_of_file(chunk.file_offset + done)
        elif done < chunk.nbytes:
            self._ledger.stalled()
            self._rest(chunk, done, fastpath.SHORT)

    def _after_failure(self, chunk: Chunk, failure: fastpath.DirectFailure) -> None:
        done, code = failure.done, failure.errno
        at, left = chunk.file_offset + done, chunk.nbytes - done
        self._record(chunk, done)
        if code in self._target.retry_errnos:
            self._ledger.direct_failed(Retry(at, left, code))
            self._rest(chunk, done, RETRIED)
        else:
            self._fail(failure.__cause__, code, at, left, "fastpath")

    def _record(self, chunk: Chunk, done: int) -> None:
        if done:
            at = chunk.file_offset, chunk.buffer_offset
            self._ledger.moved([Piece("fastpath", *at, done, chunk.reason, False)])

    def _rest(self, chunk: Chunk, done: int, reason: Reason) -> None:
        at = chunk.file_offset + done, chunk.buffer_offset + done
        self._fallback(Chunk("fallback", *at, chunk.nbytes - done, reason))

    def _fallback(self, chunk: Chunk) -> None:
        if self.meter is not None:
            self.meter.off()
        mover: fallback.Mover
        if self._dma is not None and chunk.reason.code in CACHED_CODES:
            mover = self._dma
        else:
            mover = self._mover = self._mover or uring_relay.mover(self._target)
        try:
            pieces, end = mover.move(chunk)
        except fallback.PartialError as e:
            self._after_error(e, chunk.file_offset + chunk.nbytes)
            return
        self._moved(pieces)
        if end is not None:
            self._ledger.end_of_file(end)

    def _moved(self, pieces: list[Piece]) -> None:
        if self._ledger.calls_out and isinstance(self._mover, fallback.Relay):
            self._mover.step_out()  # the caller's function is to see its own device as the current one
        self._ledger.moved(pieces)

    def _after_error(self, e: fallback.PartialError, end: int) -> None:
        self._moved(e.pieces)
        self._fail(e.error, e.error.errno or errno.EIO, e.position, max(0, end - e.position), "fallback")

    def _fail(
        self,
        cause: BaseException | None,
        code: int,
        position: int,
        nbytes: int,
        backend: str,
        call: str = "",
        detail: str = "",
    ) -> None:
        error = self._target.error(code, position, nbytes, backend, call=call, detail=detail)
        error.__cause__ = cause
        self._ledger.failed(position, error)
