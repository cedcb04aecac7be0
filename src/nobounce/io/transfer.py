"""Transfer: an operation in its place in a stream. Future-like, awaitable, and the
owner of everything it needs.

How it keeps its place: the stream is held at a gate; when the stream gets there, an I/O thread (never a host
callback, which HIP serves from one thread per process) reads the late-bound parameters, moves the bytes and
opens the gate. The gate opens whatever happens, so a failed transfer poisons nothing behind it; its error
comes out of `result()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from nobounce import forked, reaper
from nobounce.errors import InternalError, NobounceError, TransferCancelledError, TransferTimeoutError
from nobounce.io.receipt import Receipt
from nobounce.transferend import TransferEnd, untaken

if TYPE_CHECKING:
    import asyncio

    from nobounce.clock import Scheduler
    from nobounce.io.engine import Engine
    from nobounce.io.hooks import Subject
    from nobounce.io.job import Job
    from nobounce.runtimes.base import Gate

_log = logging.getLogger("nobounce")

LOOK_SECONDS = 100e-6
"""How long a waiting caller looks by itself; a stream with nothing before the transfer
gets there within 10 us."""

_QUEUED, _RUNNING, DONE = "queued", "running", "done"


class Transfer:
    """A read or write under way. Dropping it loses nothing: the operation goes on and
    keeps what it needs alive."""

    _state = _QUEUED
    _cancelled = _arrived = _looking = _small = False
    _receipt: Receipt | None = None
    _error: BaseException | None = None
    _gate: Gate | None = None
    _on_end: Callable[[Receipt | None, BaseException | None], None] | None = None
    _subject: Subject | None = None
    _ending: TransferEnd | None = None

    def __init__(
        self, engine: Engine, make_job: Callable[[Callable[[Job], None]], Job], release: Callable[[], None]
    ) -> None:
        self._engine, self._make_job, self._release = engine, make_job, release
        self._scheduler: Scheduler = engine.scheduler
        self._born = reaper.generation()
        self._changed = self._scheduler.condition()
        self._callbacks: list[Callable[[Transfer], object]] = []

    # what users call

    def done(self) -> bool:
        """Whether the transfer has ended: with a receipt, an error or by cancellation."""
        return self._state == DONE or self._is_parent_s()

    def _is_parent_s(self) -> bool:
        """Whether this is a forked child, where nobody works on it: then it has ended,
        with an error that says so."""
        if self._born == reaper.generation():
            return False
        self._error, self._state = forked.error("transfer"), DONE
        return True

    def running(self) -> bool:
        """Whether an I/O thread works on it now."""
        return not self.done() and self._state == _RUNNING

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        """Cancel if it has not started; returns whether that worked. The stream goes on behind it."""
        if self.done():
            return self._cancelled
        with self._changed.mutex:
            if self._state != _QUEUED:
                return self._cancelled
            self._cancelled = True
        self._end_unstarted(TransferCancelledError("the transfer was cancelled before it started"))
        return True

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the end and return the Receipt. Raises what the transfer raised,
        TransferTimeoutError after `timeout` s."""
        self._heard(timeout)
        if self._error is not None:
            raise self._error
        if self._receipt is None:
            raise NobounceError("the transfer ended without a receipt")
        return self._receipt

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error, or None. Raises TransferTimeoutError
        after `timeout` seconds."""
        self._heard(timeout)
        return self._error

    def _heard(self, timeout: float | None) -> None:
        """Wait for the end; what has become of the transfer is the caller's affair from here on."""
        self._wait(timeout)
        if untaken and self._ending is not None:
            self._ending.take()

    def add_done_callback(self, fn: Callable[[Transfer], object]) -> None:
        """Call `fn(transfer)` once at the end, on the thread that ends it, or now if it has ended.
        Errors of `fn` are its own."""
        if not self.done():
            with self._changed.mutex:
                if self._state != DONE:
                    self._callbacks.append(fn)
                    return
        fn(self)

    def __await__(self) -> Generator[Any, None, Receipt]:
        """As `result`, in a task. A task that is cancelled while it awaits cancels the transfer, if that has
        not started; of a transfer that was cancelled it raises AwaitedCancelledError, which asyncio takes
        for a cancelled Future's."""
        from asyncio import (
            CancelledError,
            get_running_loop,
        )  # 25 ms to import, and a program that awaits has it

        from nobounce.io.awaited import AwaitedCancelledError

        loop = get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: Transfer) -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                return  # the loop was closed while the transfer ran: nobody waits any more

        self.add_done_callback(wake)
        try:
            yield from future
        except CancelledError:
            self.cancel()
            raise
        try:
            return self.result(0)
        except TransferCancelledError as e:
            raise AwaitedCancelledError(*e.args) from None

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else "failed" if self._error is not None else self._state
        return f"<nobounce.Transfer {state}>"

    # what the gate and the engine call

    def _reached(self) -> None:
        """The stream is here; only hand over to an I/O thread, unless the caller waits for just this."""
        with self._changed.mutex:
            self._arrived = True
            if self._looking:
                return
        try:
            self._engine.submit(self)
        except Exception as e:  # no thread can be started: the stream must not wait for one for ever
            self._end_unstarted(e)

    @property
    def tickets(self) -> int:
        return 1

    def work(self) -> None:
        """On an I/O thread, or the one that waits: start for real."""
        mine = False
        try:
            with self._changed.mutex:
                if self._state != _QUEUED or self._cancelled:
                    return
                mine = True
                self._state = _RUNNING
            try:
                job = self._make_job(self._finished)
            except BaseException as e:
                self._end_unstarted(e)
                return
            if job.tickets > 1:
                self._engine.assist(job)
            job.work()
        except BaseException:
            # Interrupted on a thread that waited, where nobody else works on it: its end, as far
            # as it did not get there.
            if mine and self._state != _QUEUED:
                self._end(None, InternalError("the transfer was interrupted"))
            raise

    def _end_unstarted(self, error: BaseException) -> None:
        if self._subject is not None:
            self._subject.unstarted(error, self._scheduler.now())
        self._end(None, error)

    def _finished(self, job: Job) -> None:
        self._end(job.receipt, job.error)

    def _end(self, receipt: Receipt | None, error: BaseException | None) -> None:
        """Whatever is done here is done once, also if it is interrupted and called again."""
        on_end, self._on_end = self._on_end, None
        try:
            try:
                if self._ending is not None:
                    moved, asked = (0, 1) if receipt is None else (receipt.nbytes, receipt.requested)
                    self._ending.settle(self, moved, asked, error)
            finally:
                self._release()  # which does it once
            self._release = _nothing
            if on_end is not None:
                on_end(receipt, error)
        except Exception:  # raised here it would end an I/O thread, and whoever waits would not be told
            _log.exception("telling of the end of %r failed", self)
        finally:
            with self._changed.mutex:
                if self._state != DONE:
                    self._receipt, self._error = receipt, error
                self._state = DONE
                self._make_job = _spent
                self._changed.notify_all()
            if self._gate is not None:
                self._gate.open()
                self._gate = None
        while self._callbacks:
            fn = self._callbacks.pop(0)
            try:
                fn(self)
            except Exception:
                _log.exception("a done callback of %r failed", self)

    def _hold(self, gate: Gate) -> None:
        """Keep the gate for the end; open it now if the end has been."""
        with self._changed.mutex:
            if self._state != DONE:
                self._gate = gate
                return
        gate.open()

    def _wait(self, timeout: float | None) -> None:
        if self._state == DONE or self._is_parent_s():  # the state is the last thing that is set
            return
        if timeout is None and self._small and self._state == _QUEUED:
            self._look()
        self._scheduler.help()
        with self._changed.mutex:
            if not self._changed.wait_for(self.done, timeout):
                raise TransferTimeoutError(f"the transfer has not ended within {timeout} s; it goes on")

    def _look(self) -> None:
        """Look for the stream's arrival for a moment, and start then: the waiting thread is
        quicker than waking another."""
        gate = self._gate
        if gate is None:
            return
        try:
            with self._changed.mutex:
                self._looking = not self._arrived
            until = self._scheduler.now() + LOOK_SECONDS
            while self._looking and gate.can_look and not self._arrived:
                gate.look()
                if self._scheduler.now() > until:
                    break
            with self._changed.mutex:
                self._looking = False
            if self._arrived:
                self.work()
        except BaseException:
            with self._changed.mutex:
                self._looking = False
            if self._state == _QUEUED and (self._arrived or gate.look()):
                self._engine.submit(self)  # interrupted: somebody has to open the gate
            if self._state == DONE:
                self._heard(0)  # the interrupt tells the caller
            raise


def ended(receipt: Receipt) -> Transfer:
    """A transfer that was carried out already: nobody will wait for it, so it has nothing to wait with."""
    transfer = Transfer.__new__(Transfer)
    transfer._receipt, transfer._state = receipt, DONE
    return transfer


def _spent(_: Callable[[Job], None]) -> Job:
    raise NobounceError("the transfer has ended")


def _nothing() -> None:
    return None
