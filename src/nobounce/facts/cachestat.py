"""cachestat(2) and statfs(2), the plain calls."""

from __future__ import annotations

import ctypes
import os

_SYS_CACHESTAT = 451
_PAGE = os.sysconf("SC_PAGESIZE")

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


def cached_nbytes(fd: int, file_offset: int, nbytes: int) -> int:
    """Bytes of the range that the page cache holds, counted in pages. Raises OSError: ENOSYS before Linux 6.5, EPERM for a
    file that the caller neither owns nor may write, EOPNOTSUPP on hugetlbfs."""
    counts = _Counts()
    if _syscall(_SYS_CACHESTAT, fd, ctypes.byref(_Range(file_offset, nbytes)), ctypes.byref(counts), 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(counts.cached) * _PAGE


def statfs_type(path: str) -> int | None:
    """f_type of statfs(2)."""
    block = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), block):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return ctypes.c_long.from_buffer(block).value & 0xFFFFFFFF
