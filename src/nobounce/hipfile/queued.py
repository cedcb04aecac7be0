"""Reads and writes in stream order (hipFile D-1 to D-19).

Differs from the published library in one thing, unless the profile asks for it: a direct transfer that fails
with ENODEV or EREMOTEIO is repeated on fallback in its place in the stream.
"""

from __future__ import annotations

import os
from typing import Any

from nobounce.buffer import Buffer
from nobounce.errors import ConfigError, NobounceError, OpError
from nobounce.hipfile.buffers import find_buffer
from nobounce.hipfile.dispatch import public
from nobounce.hipfile.driver import STATE, published_profile
from nobounce.hipfile.handles import find_file
from nobounce.hipfile.params import capped_size, check_place
from nobounce.hipfile.status import SUCCESS, Error, Refused, Rejected, as_error, async_result
from nobounce.hipfile.whole import Decider, check_region, settings_in_force
from nobounce.io import params
from nobounce.io.file import File
from nobounce.io.hold import Hold
from nobounce.io.receipt import Receipt
from nobounce.io.submit import Params, Rules, submit
from nobounce.io.transfer import Transfer
from nobounce.route.types import Op
from nobounce.runtimes.base import NULL_STREAM

_outstanding: set[Transfer] = set()
"""Operations submitted and not ended."""


def outstanding() -> int:
    """How many asynchronous operations have not ended."""
    return len(_outstanding)


@public
def read_async(
    fh: int | None,
    base: Any,
    size: Any,
    file_offset: Any,
    buffer_offset: Any,
    bytes_done: Any,
    stream: Any = None,
) -> Error:
    """Read in stream order; returns at once. None for `stream` is the null stream.

    `size` and the offsets are ints or hold one (`Cell`, a ctypes integer, a 0-d integer array): read now, and
    again when the stream gets here unless it is registered with the FIXED flag (D-4). `bytes_done` is such a
    holder; valid after the stream has been waited for, it is the count, -1 for an error of fallback, -5030
    for one of fastpath, or minus another code. A ctypes integer for it should be a signed one.

    5022 for None, and whatever else while the driver is closed, which opens it (A-20); 5027 for an unknown
    file; 5022 for a bad region or a stream of another device; 5030 where every backend refuses; 5011 where
    memory or the runtime fails.
    """
    return _submit("read", fh, base, size, file_offset, buffer_offset, bytes_done, stream)


@public
def write_async(
    fh: int | None,
    base: Any,
    size: Any,
    file_offset: Any,
    buffer_offset: Any,
    bytes_done: Any,
    stream: Any = None,
) -> Error:
    """Write in stream order; parameters and statuses as `read_async`. The data is not
    forced to the disk (D-13)."""
    return _submit("write", fh, base, size, file_offset, buffer_offset, bytes_done, stream)


def _submit(
    op: Op,
    fh: int | None,
    base: Any,
    size: Any,
    file_offset: Any,
    buffer_offset: Any,
    bytes_done: Any,
    stream: Any,
) -> Error:
    in_force = settings_in_force()
    with STATE.lock:
        if STATE.count == 0:
            STATE.open()
            return Error(OpError.INVALID_VALUE)
    if base is None or any(p is None for p in (size, file_offset, buffer_offset, bytes_done)):
        return Error(OpError.INVALID_VALUE)
    hold: Hold | None = None
    try:
        with STATE.lock:
            file, view = find_file(fh), find_buffer(base)
            hold = Hold(file, view)
            hold.take()
        given = Params(capped_size(size), file_offset, buffer_offset, bytes_done)
        decide = Decider(in_force, retry=not published_profile())
        _enqueue(file, op, view, given, stream, Rules(decide, _report, check_claims=False, one_call=True))
    except ConfigError:
        raise
    except TypeError:
        return Error(OpError.INVALID_VALUE)
    except (NobounceError, OSError, Refused, Rejected) as e:
        return as_error(e)
    finally:
        if hold is not None:
            try:
                hold.let_go()
            finally:
                if hold.held:  # the first was interrupted
                    hold.let_go()
    return SUCCESS


def _enqueue(file: File, op: Op, view: Buffer, given: Params, stream: Any, rules: Rules) -> None:
    nbytes = params.read(given.nbytes, "size")
    at = params.read(given.file_offset, "file_offset"), params.read(given.buffer_offset, "buffer_offset")
    check_region(at[0], nbytes, at[1], view.nbytes)
    check_place(given.bytes_done)
    if nbytes == 0:
        return
    on = NULL_STREAM if stream is None else stream
    transfer = submit(file, op, view, on, given, "auto", "avoid", False, rules)
    _outstanding.add(transfer)
    transfer.add_done_callback(_outstanding.discard)


def _report(cell: Any, receipt: Receipt | None, error: BaseException | None) -> None:
    if error is not None:
        params.write(cell, async_result(error))
    elif receipt is not None:
        params.write(cell, receipt.nbytes)


os.register_at_fork(after_in_child=_outstanding.clear)
