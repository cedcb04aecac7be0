"""Submission of async transfers: what is checked at once, what is read again at the head of the stream.

Whatever can allocate, open or pin is done before the gate closes the stream: an I/O thread behind a closed
gate then only reads, copies and records events.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.buffer import Buffer, as_buffer
from nobounce.errors import ArgumentError, RouteError, TransferError
from nobounce.io import hooks, kept, params
from nobounce.io.engine import engine_for
from nobounce.io.hold import Hold
from nobounce.io.params import StreamFlags
from nobounce.io.prepare import make_job, make_request, memory_of, small_read, with_indirect
from nobounce.io.quiet import KnownGate
from nobounce.io.receipt import Receipt
from nobounce.io.streams import flags_of
from nobounce.io.transfer import DONE, Transfer, ended
from nobounce.records import replace
from nobounce.route.judge import judge
from nobounce.route.types import Cache, Op, Request, Require, Route
from nobounce.stream import Stream, as_stream
from nobounce.transferend import TransferEnd, lacking, overwrite

if TYPE_CHECKING:
    from collections.abc import Callable

    from nobounce.io.engine import Engine
    from nobounce.io.file import File
    from nobounce.io.job import Job

PAGE = 4096


class Rules(NamedTuple):
    """Where the ways of the hipFile module differ: who routes, whether claims are
    checked, how an end is reported."""

    decide: Callable[[Request], tuple[Request, Route]]
    report: Callable[[Any, Receipt | None, BaseException | None], None]
    check_claims: bool = True
    one_call: bool = False


class Params(NamedTuple):
    """Size and offsets as the caller gave them: integers, or objects that hold one."""

    nbytes: Any
    file_offset: Any
    buffer_offset: Any
    bytes_done: Any = None


def submit(
    file: File,
    op: Op,
    buffer: Any,
    stream: Any,
    given: Params,
    require: Require,
    cache: Cache,
    fsync: bool,
    rules: Rules | None = None,
) -> Transfer:
    """Put a transfer into `stream`. Raises ArgumentError, RouteError, ClosedError and ConfigError now;
    nothing is enqueued then."""
    rules = rules or RULES
    view = as_buffer(buffer, write=op == "read")
    runtime, device = view.device._runtime, view.device
    on = as_stream(stream, device)
    where = on.device.ordinal if on._owned else runtime.stream_device(on.handle)
    if where != device.ordinal:
        raise ArgumentError(
            f"the stream belongs to another device than the buffer, which is on {device.name}"
        )
    flags = flags_of(runtime, on.handle) or StreamFlags.NONE
    now = _values(given, view)
    if flags and flags & StreamFlags.PAGE_ALIGNED_INPUTS and rules.check_claims:
        _check_claim(view, now)
    hold = Hold(file, view, in_order=True)
    release = hold.let_go
    seen: hooks.Operation | None = None
    transfer: Transfer | None = None
    try:
        hold.take()
        pool = engine_for(runtime)
        if op == "read" and given.bytes_done is None and rules is RULES and not _late(given, flags):
            plan = kept.find(file, view, require, cache, now)
            if plan is not None:
                transfer = _small(file, view, plan, (now, require, cache), pool, on, release)
                if transfer._state == DONE:
                    if view.allocation.arriving:
                        _filled(view, now)
                else:
                    transfer._ending = _ending(file, op, view, on, now, late=False)
                    _enqueue(transfer, on, view)
                return transfer
        request = make_request(file, op, memory_of(view), device, now, require, cache)
        try:
            request, route = rules.decide(request)
        except RouteError as e:
            told = op, device.name, request.nbytes, on.handle, e
            hooks.unrouted(*told, file_offset=request.file_offset, now=pool.scheduler.now())
            raise
        if given.bytes_done is not None:
            params.write(given.bytes_done, 0)
        late = _late(given, flags)
        if hooks.watchers:
            seen = hooks.enter(op, file.name, device.name, now[1], now[0], on.handle, pool.scheduler.now())
        ways: dict[str, Any] = {"call": "stream", "fsync": fsync, "one_call": rules.one_call}
        ways |= {"stream": on.handle, "operation": seen}
        # Made for a late-bound one too: what its job will need behind the gate is allocated by that.
        prepared = make_job(file, request, route, view, pool, **ways)
        ahead = None if late else prepared
        if ahead is not None and rules is RULES:
            kept.keep(file, request, ahead)

        def make(on_done: Callable[[Job], None]) -> Job:
            ending = made._ending
            if ahead is not None:
                if ending is not None and ending.seen:
                    _check_defined(ending, request)
                ahead.begin(on_done)
                return ahead
            latest = _reread(request, now, given, flags, view)
            latest = with_indirect(file, latest, latest.file_offset, latest.nbytes)
            again, way = rules.decide(latest)
            if ending is not None:
                ending.start = view._address + again.buffer_offset
                ending.stop = ending.start + again.nbytes
                _check_defined(ending, again)
            job = make_job(file, again, way, view, pool, held=True, **ways)
            job.begin(on_done)
            return job

        transfer = made = Transfer(pool, make, release)
        transfer._small = ahead is not None and ahead.alone
        if hooks.observers:
            refusals = ahead.refusals if ahead is not None else ()
            transfer._subject = hooks.Subject(op, device.name, now[0], on.handle, seen, refusals)
        if given.bytes_done is not None:
            cell, report = given.bytes_done, rules.report
            transfer._on_end = lambda receipt, error: report(cell, receipt, error)
        if rules is RULES:
            transfer._ending = _ending(file, op, view, on, now, late=late)
        _enqueue(transfer, on, view)
        return transfer
    except BaseException as e:
        if transfer is not None:  # its end gives back what it holds, also where it runs already
            transfer.cancel()
            raise
        if seen is not None:
            hooks.leave(seen, None, e, seen.queued_at)
        try:
            release()
        finally:
            release()  # the first may have been interrupted
        raise


def _small(
    file: File,
    view: Buffer,
    plan: kept.Plan,
    what: tuple[tuple[int, int, int], Require, Cache],
    pool: Engine,
    on: Stream,
    release: Callable[[], None],
) -> Transfer:
    read: Any = small_read(file, view, plan, *what, stream=on.handle)
    ring = plan.target.ring
    try:
        if read.at_once():
            release()
            return ended(read.receipt)
        if ring is not None:
            ring.prepare(1, 1)
    except BaseException as e:
        read.gone(e)
        raise

    def make(on_done: Callable[[Any], None]) -> Any:
        read.begin(on_done)
        return read

    transfer = Transfer(pool, make, release)
    transfer._small = True
    if hooks.observers:
        nbytes = what[0][0]
        transfer._subject = hooks.Subject(
            "read", view.device.name, nbytes, on.handle, read.operation, plan.refusals
        )
    return transfer


def _ending(
    file: File, op: Op, view: Buffer, on: Stream, now: tuple[int, int, int], *, late: bool
) -> TransferEnd:
    """What the caller is told of the end, whoever asks; and what writes queued later look at."""
    allocation, (nbytes, file_offset, offset) = view.allocation, now
    arriving, start = allocation.arriving, view._address + offset
    if op == "write":
        return TransferEnd(on, file, (op, nbytes, file_offset), start, tuple(arriving.items()))
    ending = TransferEnd(on, file, (op, nbytes, file_offset), start)
    if late:
        ending.start, ending.stop = view._address, view._address + view.nbytes
    witness = allocation if allocation.owner is None else allocation.owner
    ending.fills(arriving, witness, ending.start, ending.stop)
    return ending


def _check_defined(ending: TransferEnd, request: Request) -> None:
    """At the head of the stream: a write does not write what a read before it did not bring."""
    lacks = lacking(ending.seen, ending.start, ending.stop)
    if lacks is not None:
        raise lacks.refusal(request.file.path, request.file_offset, request.nbytes, request.op)


def _filled(view: Buffer, now: tuple[int, int, int]) -> None:
    """These bytes are there already."""
    start = view._address + now[2]
    overwrite(view.allocation.arriving, start, start + now[0])


def _enqueue(transfer: Transfer, on: Stream, view: Buffer) -> None:
    """Where this is interrupted, the caller cancels the transfer."""
    gate = KnownGate(view.device._runtime)
    transfer._hold(gate)  # before it closes: whatever interrupts that, the end of the transfer opens it
    gate.shut(on.handle, transfer._reached, patient=transfer._small)
    view.allocation.used_on(on)  # whoever looks at the buffer next waits for this stream
    transfer._scheduler.help()


def _values(given: Params, view: Buffer) -> tuple[int, int, int]:
    offset = params.read(given.buffer_offset, "buffer_offset")
    nbytes = view.nbytes - offset if given.nbytes is None else params.read(given.nbytes, "nbytes")
    return nbytes, params.read(given.file_offset, "file_offset"), offset


def _late(given: Params, flags: StreamFlags) -> bool:
    return (
        (given.nbytes is not None and params.is_late(given.nbytes) and not flags & StreamFlags.FIXED_NBYTES)
        or (params.is_late(given.file_offset) and not flags & StreamFlags.FIXED_FILE_OFFSET)
        or (params.is_late(given.buffer_offset) and not flags & StreamFlags.FIXED_BUFFER_OFFSET)
    )


def _reread(
    request: Request, then: tuple[int, int, int], given: Params, flags: StreamFlags, view: Buffer
) -> Request:
    """The request with the values of now, where they are not fixed (hipFile D-5: a size
    may shrink, never grow)."""
    values = _values(given, view)
    fixed = (StreamFlags.FIXED_NBYTES, StreamFlags.FIXED_FILE_OFFSET, StreamFlags.FIXED_BUFFER_OFFSET)
    now = [old if flags & flag else new for flag, old, new in zip(fixed, then, values, strict=True)]
    if now[0] > then[0]:
        raise ArgumentError(f"nbytes grew from {then[0]} at submission to {now[0]} at the head of the stream")
    return replace(request, nbytes=now[0], file_offset=now[1], buffer_offset=now[2])


def _check_claim(view: Buffer, now: tuple[int, int, int]) -> None:
    for name, value in zip(("nbytes", "file_offset", "buffer_offset"), now, strict=True):
        if value % PAGE:
            raise ArgumentError(
                f"{name} is {value}, but the stream is registered with PAGE_ALIGNED_INPUTS ({PAGE} bytes)"
            )
    if (view.handle + now[2]) % PAGE:
        raise ArgumentError(
            f"the memory at buffer_offset {now[2]} is not page-aligned, as PAGE_ALIGNED_INPUTS claims"
        )


def _report(cell: Any, receipt: Receipt | None, error: BaseException | None) -> None:
    if error is None and receipt is not None:
        params.write(cell, receipt.nbytes)
    elif isinstance(error, TransferError) and error.receipt is not None and error.receipt.nbytes:
        params.write(cell, error.receipt.nbytes)
    else:
        params.write(cell, -(getattr(error, "errno", None) or errno.EINVAL))


RULES = Rules(lambda request: (request, judge(request)), _report)
