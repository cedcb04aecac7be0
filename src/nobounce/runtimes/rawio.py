"""pread and pwrite on plain addresses, the GIL released.

EINTR comes back as an OSError: Python's own calls would try again, which hides what a direct transfer has to
handle. `flags` are RWF_* and go through preadv2(2) and pwritev2(2) with one vector. Where these calls are
refused, that is EOPNOTSUPP, as for a flag that the file system does not know.
"""

from __future__ import annotations

import ctypes
import errno
import os

from nobounce.clock import THREADS, Scheduler
from nobounce.facts.filtered import REFUSED
from nobounce.runtimes import faults

RWF_NOWAIT = 0x08
RWF_DONTCACHE = 0x80

_libc = ctypes.CDLL(None, use_errno=True)
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_OFFSET = ctypes.c_longlong


class _Vector(ctypes.Structure):
    _fields_ = (("base", _SIZE), ("nbytes", _SIZE))


for _name in ("pread64", "pwrite64"):
    getattr(_libc, _name).argtypes = [_INT, _SIZE, _SIZE, _OFFSET]
    getattr(_libc, _name).restype = ctypes.c_ssize_t
for _name in ("preadv2", "pwritev2"):
    getattr(_libc, _name).argtypes = [_INT, ctypes.POINTER(_Vector), _INT, _OFFSET, _INT]
    getattr(_libc, _name).restype = ctypes.c_ssize_t
_pread, _pwrite, _preadv2, _pwritev2 = _libc.pread64, _libc.pwrite64, _libc.preadv2, _libc.pwritev2


def pread_into(
    fd: int, address: int, nbytes: int, offset: int, flags: int = 0, *, scheduler: Scheduler = THREADS
) -> int:
    """Read up to `nbytes` from `offset` of the file into host memory at `address`; returns
    bytes read, 0 at the end.

    Raises OSError. Injected faults of op "pread" apply, their latency through `scheduler`.
    """
    if faults.ACTIVE:
        nbytes = faults.apply_io("pread", nbytes, scheduler)
    return read_plain(fd, address, nbytes, offset, flags)


def pwrite_from(
    fd: int, address: int, nbytes: int, offset: int, flags: int = 0, *, scheduler: Scheduler = THREADS
) -> int:
    """Write up to `nbytes` of host memory at `address` to `offset` of the file; returns bytes written.

    Raises OSError. Injected faults of op "pwrite" apply, their latency through `scheduler`.
    """
    if faults.ACTIVE:
        nbytes = faults.apply_io("pwrite", nbytes, scheduler)
    return write_plain(fd, address, nbytes, offset, flags)


def read_plain(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
    """`pread_into` without faults."""
    if flags:
        moved = _preadv2(fd, ctypes.byref(_Vector(address, nbytes)), 1, offset, flags)
    else:
        moved = _pread(fd, address, nbytes, offset)
    return _checked(moved, flags)


def try_read(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
    """Bytes read, or -1 for any error: for one whose caller has another way then."""
    if flags:
        return int(_preadv2(fd, ctypes.byref(_Vector(address, nbytes)), 1, offset, flags))
    return int(_pread(fd, address, nbytes, offset))


def write_plain(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
    """`pwrite_from` without faults."""
    if flags:
        moved = _pwritev2(fd, ctypes.byref(_Vector(address, nbytes)), 1, offset, flags)
    else:
        moved = _pwrite(fd, address, nbytes, offset)
    return _checked(moved, flags)


def _checked(moved: int, flags: int) -> int:
    if moved < 0:
        code = ctypes.get_errno()
        if flags and code in REFUSED:
            code = errno.EOPNOTSUPP
        raise OSError(code, os.strerror(code))
    return moved
