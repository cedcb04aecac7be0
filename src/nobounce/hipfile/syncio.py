"""Synchronous reads and writes (hipFile A-34 to A-38)."""

from __future__ import annotations

import errno
from typing import Any

from nobounce.errors import ConfigError, NobounceError, OpError
from nobounce.hipfile.buffers import find_buffer
from nobounce.hipfile.dispatch import public
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.handles import find_file
from nobounce.hipfile.status import (
    SUCCESS,
    Error,
    Refused,
    Rejected,
    as_error,
    posix_failure,
    sync_result,
)
from nobounce.hipfile.whole import Scores, carry_out, examine, settings_in_force
from nobounce.io.hold import Hold
from nobounce.route.types import Op


@public
def read(fh: int | None, base: Any, size: int, file_offset: int, buffer_offset: int) -> int:
    """Read into device memory: bytes moved, -1 with `last_errno()`, or minus a status code (A-35).

    `base` is an address, or any memory that nobounce knows; sizes and offsets in bytes. Raises ConfigError,
    which names the variable, and nothing else.
    """
    return _transfer("read", fh, base, size, file_offset, buffer_offset)


@public
def write(fh: int | None, base: Any, size: int, file_offset: int, buffer_offset: int) -> int:
    """Write from device memory; results as `read`. What went through fallback is on
    the disk at return (C-26)."""
    return _transfer("write", fh, base, size, file_offset, buffer_offset)


def _transfer(op: Op, fh: int | None, base: Any, size: int, file_offset: int, buffer_offset: int) -> int:
    in_force = settings_in_force()
    hold: Hold | None = None
    try:
        with STATE.lock:
            if STATE.count == 0:
                return posix_failure(errno.EINVAL)
            file, view = find_file(fh), find_buffer(base)
            hold = Hold(file, view)
            hold.take()
        receipt = carry_out(file, op, view, size, file_offset, buffer_offset, in_force)
    except ConfigError:
        raise
    except (NobounceError, OSError, Refused, Rejected) as e:
        return sync_result(e)
    finally:
        if hold is not None:
            try:
                hold.let_go()
            finally:
                if hold.held:  # the first was interrupted
                    hold.let_go()
    return receipt.nbytes


@public
def score(
    fh: int | None, base: Any, size: int, file_offset: int, buffer_offset: int, *, op: Op = "read"
) -> tuple[Error, Scores | None]:
    """What the backends would say of a request: 100, 1 or -1, with each refusal (C-1). Not part of
    the C API; moves nothing."""
    hold: Hold | None = None
    try:
        with STATE.lock:
            if STATE.count == 0:
                return Error(OpError.DRIVER_NOT_INITIALIZED), None
            file, view = find_file(fh), find_buffer(base)
            hold = Hold(file, view)
            hold.take()
        return SUCCESS, examine(file, op, view, size, file_offset, buffer_offset)
    except (Refused, Rejected) as e:
        return as_error(e), None
    finally:
        if hold is not None:
            try:
                hold.let_go()
            finally:
                if hold.held:  # the first was interrupted
                    hold.let_go()
