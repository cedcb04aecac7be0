"""Batches: many operations at once, done by the process's I/O threads on the synchronous
path (hipFile E-1 to E-12).

A batch is a capacity and what has been submitted and not yet been retrieved. Submission is all or nothing.
Every operation holds its file and its buffer from submission to its end, so the driver may be closed
meanwhile. What a call changes is changed on a thread that no interrupt reaches; what a wait that was
interrupted would have told, the next one tells.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

from nobounce.buffer import Buffer
from nobounce.clock import THREADS
from nobounce.config import Settings
from nobounce.errors import NobounceError, OpError
from nobounce.hipfile.buffers import find_buffer
from nobounce.hipfile.dispatch import public, whole, whole_or
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.handles import find_file
from nobounce.hipfile.states import OpState, check_move
from nobounce.hipfile.status import SUCCESS, Error, Refused, Rejected, as_error, batch_result
from nobounce.hipfile.types import BatchMode, IOEvents, IOParams, Opcode, SizeTParameter
from nobounce.hipfile.whole import capped, carry_out, check_region, settings_in_force
from nobounce.io.engine import engine_for
from nobounce.io.file import File
from nobounce.io.hold import Hold
from nobounce.route.types import Op
from nobounce.uninterrupted import GivenUp, uninterrupted

Timeout = float | tuple[int, int] | None
"""Seconds, a (seconds, nanoseconds) pair like C's timespec, or None to wait for ever."""

LOOK_SECONDS = 0.1
"""How long a wait may go on after its caller was interrupted."""


class _Operation:
    """One operation; `Work` of the engine."""

    tickets = 1

    def __init__(self, context: _Context, params: IOParams, file: File, view: Buffer, hold: Hold) -> None:
        self._context, self._file, self._view = context, file, view
        self.let_go = hold.let_go
        """Give file and buffer back."""
        self._op: Op = "read" if params.opcode == Opcode.BATCH_READ else "write"
        b = params.batch
        self._where = b.size, b.file_offset, b.dev_ptr_offset
        self.cookie, self.state, self.result = params.cookie, OpState.WAITING, 0

    def move(self, state: OpState) -> None:
        """To another state. Raises InternalError for a move that there is not. The caller
        holds the context's lock."""
        check_move(self.state, state)
        self.state = state

    def work(self) -> None:
        """On an I/O thread. What was cancelled meanwhile is left alone."""
        context = self._context
        with context.changed:
            if self.state is not OpState.PENDING:
                return
            self.move(OpState.RUNNING)
        ended, result = OpState.FAILED, -int(OpError.INTERNAL_ERROR)
        try:
            result = carry_out(self._file, self._op, self._view, *self._where, context.settings).nbytes
            ended = OpState.COMPLETE
        except (NobounceError, OSError, Refused, Rejected) as e:
            result = batch_result(e)
        finally:
            self.let_go()
            with context.changed:
                self.result = result
                self.move(ended)
                context.changed.notify_all()

    def event(self) -> IOEvents:
        """What the caller is told (E-9); negative results in two's complement, as in C."""
        return IOEvents(self.cookie, self.state.public, self.result & (1 << 64) - 1)

    def start(self) -> None:
        """Queue it. Where no thread can be started it has ended when this returns; without
        memory for it it has failed."""
        runtime = self._view.device._runtime
        try:
            engine_for(runtime).submit(self)
        except (RuntimeError, MemoryError):
            self._fail()
        runtime.scheduler.help()

    def _fail(self) -> None:
        with self._context.changed:
            if self.state is not OpState.PENDING:
                return
            self.move(OpState.RUNNING)
        self.let_go()
        with self._context.changed:
            self.result = -int(OpError.INTERNAL_ERROR)
            self.move(OpState.FAILED)
            self._context.changed.notify_all()


class _Context:
    """One batch. `operations` are those submitted and not retrieved (E-4)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.changed = threading.Condition()
        self.operations: list[_Operation] = []
        self.settings: Settings = settings_in_force()

    def take(self, least: int, most: int, seconds: float | None, given_up: GivenUp) -> list[_Operation]:
        """Up to `most` ended operations, no longer outstanding, once `least` have ended or time is up."""
        limit = None if seconds is None else THREADS.now() + seconds
        with self.changed:
            least = min(least, len(self.operations))
            while sum(op.state.terminal for op in self.operations) < min(least, len(self.operations)):
                left = LOOK_SECONDS if limit is None else min(LOOK_SECONDS, limit - THREADS.now())
                if left <= 0 or given_up():
                    break
                self.changed.wait(left)
            ended = [op for op in self.operations if op.state.terminal][:most]
            self.operations = [op for op in self.operations if op not in ended]
            return ended

    def put_back(self, taken: list[_Operation]) -> None:
        """As if they had not been taken: their caller was interrupted."""
        with self.changed:
            self.operations = taken + self.operations
            self.changed.notify_all()

    def cancel(self) -> None:
        """Queued operations are cancelled, running ones waited for (E-11)."""
        with self.changed:
            for op in self.operations:
                if op.state is OpState.PENDING:
                    op.move(OpState.CANCELED)
                    op.let_go()
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(op.state.terminal for op in self.operations))


_lock = threading.Lock()
_contexts: dict[int, _Context] = {}
_new_handle = itertools.count(0x42460001).__next__


def _find(handle: Any) -> _Context:
    context = _contexts.get(handle) if isinstance(handle, int) else None
    if context is None:
        raise Refused(OpError.INVALID_VALUE)
    return context


def _forget(result: tuple[Error, int | None]) -> None:
    batch_io_destroy(result[1])


@whole_or(_forget)
def batch_io_setup(max_nr: int) -> tuple[Error, int | None]:
    """A batch that holds up to `max_nr` operations (1 to 128, else 5022); needs no open driver (E-1)."""
    with STATE.lock:
        most = STATE.store.get(SizeTParameter.PROPERTIES_IO_BATCHSIZE)
    if not 1 <= max_nr <= most:
        return Error(OpError.INVALID_VALUE), None
    context = _Context(max_nr)
    with _lock:
        handle = _new_handle()
        _contexts[handle] = context
    return SUCCESS, handle


@whole
def batch_io_submit(batch: int | None, nr: int, params: Sequence[IOParams] | None, flags: int = 0) -> Error:
    """Submit the first `nr` of `params`, all or none (E-2); `flags` is ignored. The
    sequence may be reused at once.

    5022 for a bad batch, count or operation, 5037 over the capacity, 5027 for an unknown file,
    5030 with the driver closed.
    """
    in_force = settings_in_force()
    if params is None or not 1 <= nr <= len(params):
        return Error(OpError.INVALID_VALUE)
    taken: list[_Operation] = []
    try:
        context = _find(batch)
        with STATE.lock, context.changed:
            if len(context.operations) + nr > context.capacity:
                raise Refused(OpError.BATCH_FULL)
            if STATE.count == 0:
                raise Refused(OpError.INTERNAL_ERROR)
            for p in params[:nr]:
                taken.append(_accept(context, p))
            context.settings = in_force
            for op in taken:
                op.move(OpState.PENDING)
            context.operations += taken
    except (Refused, Rejected, NobounceError) as e:
        for op in taken:
            op.let_go()
        return as_error(e)
    for op in taken:
        op.start()
    return SUCCESS


def _accept(context: _Context, params: IOParams) -> _Operation:
    """A valid operation (E-3), its file and buffer in use. Raises Refused and Rejected."""
    if params.mode != BatchMode.BATCH or params.opcode not in (Opcode.BATCH_READ, Opcode.BATCH_WRITE):
        raise Refused(OpError.INVALID_VALUE)
    b = params.batch
    file = find_file(params.fh)
    try:
        view = find_buffer(b.dev_ptr_base)
    except Refused as e:
        hip = e.error.err == OpError.HIP_DRIVER_ERROR
        raise Refused(OpError.INTERNAL_ERROR if hip else OpError.INVALID_VALUE) from e
    check_region(b.file_offset, capped(b.size), b.dev_ptr_offset, view.nbytes)
    hold = Hold(file, view)
    try:
        hold.take()
    except BaseException:
        hold.let_go()
        raise
    return _Operation(context, params, file, view, hold)


@public
def batch_io_get_status(
    batch: int | None, min_nr: int, nr: int | None, timeout: Timeout = None
) -> tuple[Error, list[IOEvents]]:
    """Events of ended operations, each told once, in no order: at least `min_nr` if the
    timeout allows, at most `nr`.

    5022 for a bad batch, for nr None or 0, min_nr above nr, and a timeout with a negative part or a full
    second of nanoseconds (E-6). With nothing outstanding, success and no events (E-7).
    """
    try:
        seconds = _seconds(timeout)
        if not nr or nr < 0 or min_nr > nr:
            raise Refused(OpError.INVALID_VALUE)
        context = _find(batch)
    except Refused as e:
        return e.error, []
    taken = uninterrupted(lambda given_up: context.take(min_nr, nr, seconds, given_up), undo=context.put_back)
    return SUCCESS, [op.event() for op in taken]


def _seconds(timeout: Timeout) -> float | None:
    if timeout is None:
        return None
    whole, nano = timeout if isinstance(timeout, tuple) else (timeout, 0)
    if whole < 0 or not 0 <= nano < 1_000_000_000:
        raise Refused(OpError.INVALID_VALUE)
    return min(whole + nano / 1e9, threading.TIMEOUT_MAX)


@whole
def batch_io_cancel(batch: int | None) -> Error:
    """Cancel what is queued and wait for what runs; the batch can be used again. 5022 for
    an unknown batch (E-11)."""
    try:
        _find(batch).cancel()
    except Refused as e:
        return e.error
    return SUCCESS


@whole
def batch_io_destroy(batch: int | None) -> None:
    """Cancel and forget a batch. None, unknown and destroyed ones are left alone (E-12)."""
    with _lock:
        context = _contexts.pop(batch, None) if isinstance(batch, int) else None
    if context is not None:
        context.cancel()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _contexts.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
