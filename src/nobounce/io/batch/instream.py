"""Requests of a batch in their place in a stream: one gate for all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from nobounce.errors import ArgumentError, InternalError, NobounceError
from nobounce.io.engine import engine_for
from nobounce.io.hold import Hold
from nobounce.io.movers.scatter import ready
from nobounce.io.quiet import KnownGate
from nobounce.io.strategy import slots_ahead
from nobounce.io.transfer import Transfer
from nobounce.stream import as_stream
from nobounce.transferend import TransferEnd
from nobounce.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from nobounce.io.batch.driver import Driver
    from nobounce.io.batch.group import Group
    from nobounce.io.batch.table import BatchResult
    from nobounce.io.receipt import Receipt
    from nobounce.protocols import StreamLike
    from nobounce.stream import Stream


class BatchTransfer:
    """Requests that a batch has put into a stream: after everything before them there,
    before everything after.

    Future-like and awaitable. Dropping it loses nothing: they go on and keep what they need alive.
    """

    def __init__(self, transfer: Transfer, job: BatchJob) -> None:
        self._transfer, self._job = transfer, job

    def done(self) -> bool:
        """Whether all requests have ended, or none will begin any more."""
        return self._transfer.done()

    def running(self) -> bool:
        """Whether the stream has come to them and they have not all ended."""
        return self._transfer.running()

    def cancelled(self) -> bool:
        return self._transfer.cancelled()

    def cancel(self) -> bool:
        """Cancel all of them if the stream has not come to them; returns whether that worked. The
        stream goes on behind them."""
        return self._transfer.cancel()

    def result(self, timeout: float | None = None) -> BatchResult:
        """Wait for the end and return every request's own result, the failed ones' too, as `Batch.wait` does.

        Raises TransferTimeoutError after `timeout` seconds, TransferCancelledError, and what kept all of
        them from being carried out.
        """
        self._transfer._heard(timeout)
        if self._job.result is None:
            self._transfer.result(0)
            raise InternalError("the batch ended without a result")
        return self._job.result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; the first failed request's error, or that of them all, or None.
        Raises TransferTimeoutError."""
        return self._transfer.exception(timeout)

    @property
    def receipt(self) -> Receipt | None:
        """The sum of what they moved, once they have ended; None before, and where none has begun."""
        return self._job.receipt if self.done() else None

    def add_done_callback(self, fn: Callable[[BatchTransfer], object]) -> None:
        """Call `fn(transfer)` once at the end, on the thread that ends it, or now if it has ended.
        Errors of `fn` are its own."""
        self._transfer.add_done_callback(lambda _: fn(self))

    def __await__(self) -> Generator[Any, None, BatchResult]:
        """As `result`, in a task; as `Transfer` where the task, or the transfer, is cancelled."""
        try:
            yield from self._transfer.__await__()
        except NobounceError:
            if self._job.result is None:
                raise
        return self.result(0)

    def __repr__(self) -> str:
        return repr(self._transfer).replace("Transfer", "BatchTransfer", 1)


class BatchJob:
    """The requests of one driver, which nobody else uses; to the transfer that
    carries it out it is a `Job`."""

    tickets = 1
    direct_nbytes = 0

    def __init__(self, driver: Driver, groups: list[Group], holds: list[Hold]) -> None:
        self._driver, self._holds = driver, holds
        self.scheduler = driver.scheduler
        self.result: BatchResult | None = None
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        self._on_done: Callable[[Any], None] | None = None
        self.asked = sum(int(g.nbytes.sum()) for g in groups)

    def begin(self, on_done: Callable[[Any], None]) -> BatchJob:
        self._on_done = on_done
        return self

    def work(self) -> None:
        try:
            uninterrupted(self._run, self.scheduler)
        except BaseException as e:
            self.error = e if isinstance(e, Exception) else InternalError("the transfer was interrupted")
            if not isinstance(e, Exception):
                raise
        finally:
            if self._on_done is not None:
                self._on_done(self)

    def _run(self, _: object) -> None:
        driver = self._driver
        with driver.lock:
            driver.run(None, None, lambda: False)
            self.result, self.receipt = driver.retrieve(), driver.tally.receipt()
        if self.result.errors:
            first, *others = self.result.errors.values()
            if others:
                first.add_note(f"{len(others)} more of the {len(self.result)} requests failed")
            self.error = first

    def release(self) -> None:
        """Nothing works on any of them, or will: let go of files and buffers. Twice does nothing."""

        def end(_: object) -> None:
            with self._driver.lock:
                if self.result is None:
                    self._driver.cancel(None)
                self._driver.drain()
                self._driver.close()

        try:
            uninterrupted(end, self.scheduler)
        finally:
            for hold in self._holds:
                hold.let_go()


def put(driver: Driver, groups: list[Group], stream: StreamLike) -> BatchTransfer:
    """Put everything that was added to `driver`, which is the transfer's from now on, into
    `stream`. `groups` are its.

    Raises ArgumentError where the stream is another device's than a buffer, and ClosedError; the
    requests are cancelled then.
    """
    driver.in_stream = True
    holds = [Hold(g.file, g.view, in_order=True) for g in groups]
    job = BatchJob(driver, groups, holds)
    transfer: Transfer | None = None
    try:
        views = [g.view for g in groups]
        on = _stream_of(stream, groups)
        for hold in holds:
            hold.take()
        pool = engine_for(on.device._runtime)
        for ring in {g.target.ring for g in groups if g.target.ring is not None}:
            # Behind the gate nothing is pinned any more.
            ring.prepare(slots_ahead(job.asked, ring.slot_nbytes), 1)
            if not all(_is_packed(g) for g in groups):
                ready(ring)
        transfer = Transfer(pool, job.begin, job.release)  # type: ignore[arg-type]
        first = groups[0]
        place = first.op, job.asked, int(first.file_offset[0])
        transfer._ending = TransferEnd(on, first.file, place, first.target.address)
        gate = KnownGate(on.device._runtime)
        transfer._hold(gate)  # before it closes: whatever interrupts that, the end of the transfer opens it
        gate.shut(on.handle, transfer._reached, patient=False)
        for view in views:
            view.allocation.used_on(on)  # whoever looks at the buffer next waits for this stream
        transfer._scheduler.help()
        return BatchTransfer(transfer, job)
    except BaseException:
        if transfer is None:
            job.release()
        else:
            transfer.cancel()  # its end gives back what it holds, also where it runs already
        raise


def _is_packed(group: Group) -> bool:
    """Whether the blocks lie one behind the other in the buffer."""
    to = group.buffer_offset
    return bool((to[1:] == to[:-1] + group.nbytes[:-1]).all())


def _stream_of(stream: StreamLike, groups: list[Group]) -> Stream:
    device = groups[0].view.device
    on = as_stream(stream, device)
    where = on.device.ordinal if on._owned else device._runtime.stream_device(on.handle)
    for group in groups:
        theirs = group.view.device
        if theirs._runtime is not device._runtime or theirs.ordinal != where:
            raise ArgumentError(
                f"the stream belongs to another device than a buffer, which is on {theirs.name}"
            )
    return on
