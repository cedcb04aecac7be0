"""Registered files (hipFile A-24 to A-30): the caller's own descriptor, and its twin with
the other kind of access.

A descriptor is O_DIRECT or it is not, so registration opens the other flavour through /proc/self/fd. The
caller's is used as it is, never closed and never changed; it must stay open until deregistration. Two
descriptors per file, as published.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from nobounce.errors import FileError, OpError
from nobounce.hipfile.dispatch import whole, whole_or
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.params import Place, store
from nobounce.hipfile.status import SUCCESS, Error, Refused, as_error
from nobounce.hipfile.types import Descr, FileHandleType
from nobounce.io import hooks
from nobounce.io.file import File

RETURNED = Place()
"""The default of `out`: the handle is only returned."""


def _forget(result: tuple[Error, int | None]) -> None:
    if result[1] is not None:
        handle_deregister(result[1])


@whole_or(_forget)
def handle_register(descr: Descr | int | None, out: Any = RETURNED) -> tuple[Error, int | None]:
    """Register a descriptor (a `Descr`, or its number); returns the handle, and stores it
    in `out` if that is given.

    An interrupt (Ctrl-C) takes the registration back, but for the moment in which the call returns:
    then `out` alone has it.

    5022 where `descr` or `out` is None, 5008 for a type other than OPAQUE_FD, 5028 for a descriptor that
    is registered, 5030 where the file cannot be examined or its twin cannot be opened. Opens the driver
    on success (A-19, A-24).
    """
    if descr is None or out is None:
        return Error(OpError.INVALID_VALUE), None
    if not isinstance(descr, Descr):
        descr = Descr(descr)
    if descr.type != FileHandleType.OPAQUE_FD:
        return Error(OpError.IO_NOT_SUPPORTED), None
    with STATE.lock:
        if descr.fd in STATE.handles:
            return Error(OpError.HANDLE_ALREADY_REGISTERED), None
        try:
            file = _open(descr.fd)
        except (OSError, Refused) as e:
            return as_error(e), None
        STATE.open_if_closed()
        handle = STATE.new_handle()
        STATE.files[handle] = file
        STATE.handles[descr.fd] = handle
    store(out, handle)
    return SUCCESS, handle


def _open(fd: int) -> File:
    """Raises OSError and Refused."""
    if not 0 <= fd < 1 << 31:
        raise Refused(OpError.INTERNAL_ERROR)
    file = File(fd, _name(fd), borrowed=True)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISREG(kind) or stat.S_ISBLK(kind):  # a pipe would block in open()
            direct = file._descriptor("direct")
            if direct < 0 and file._direct_errno != errno.EINVAL:
                raise Refused(OpError.INTERNAL_ERROR)
            if file._descriptor("buffered") < 0:
                raise Refused(OpError.INTERNAL_ERROR)
        else:
            file._fds["direct"] = -1
            file._fds.setdefault("buffered", fd)
            file._direct_errno = errno.EINVAL
        facts = file.facts()
        if facts.filesystem.error:
            raise Refused(OpError.INTERNAL_ERROR)
    except FileError as e:
        file.close()
        raise Refused(OpError.INTERNAL_ERROR) from e
    except BaseException:
        file.close()
        raise
    return file


def _name(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"fd {fd}"


@whole
def handle_deregister(handle: int | None) -> None:
    """Forget a file and close its twin. Unknown handles, null, and files in use are left
    alone in silence (A-29)."""
    with STATE.lock:
        file = STATE.files.get(handle) if handle is not None else None
        if file is None or handle is None or file._in_flight:
            hooks.registered("handle_deregister", False)
            return
        del STATE.files[handle]
        for fd in [fd for fd, h in STATE.handles.items() if h == handle]:
            del STATE.handles[fd]
    file.close()
    hooks.registered("handle_deregister", True)


def find_file(handle: Any) -> File:
    """The file, to be marked in use by a Hold while the caller holds the lock. Raises Refused with 5027."""
    file = STATE.files.get(handle) if isinstance(handle, int) else None
    if file is None:
        raise Refused(OpError.HANDLE_NOT_REGISTERED)
    return file
