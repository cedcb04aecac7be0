"""A real seccomp filter, as a container's: given system calls answer with a given error in this process and its children.

    refuse({"statx": errno.EPERM})

There is no way back, so call it in a child.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

NUMBERS = {
    "x86_64": {
        "preadv2": 327,
        "pwritev2": 328,
        "statx": 332,
        "pidfd_send_signal": 424,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "pidfd_open": 434,
        "clone3": 435,
        "close_range": 436,
        "openat2": 437,
        "faccessat2": 439,
        "process_madvise": 440,
        "epoll_pwait2": 441,
        "cachestat": 451,
        "memfd_create": 319,
        "mincore": 27,
        "pread64": 17,
        "fallocate": 285,
        "linkat": 265,
        "renameat2": 316,
        "copy_file_range": 326,
        "clone": 56,
    },
    "aarch64": {
        "preadv2": 286,
        "pwritev2": 287,
        "statx": 291,
        "pidfd_send_signal": 424,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "pidfd_open": 434,
        "clone3": 435,
        "close_range": 436,
        "openat2": 437,
        "faccessat2": 439,
        "process_madvise": 440,
        "epoll_pwait2": 441,
        "cachestat": 451,
        "memfd_create": 279,
        "mincore": 232,
        "pread64": 67,
        "fallocate": 47,
        "linkat": 37,
        "renameat2": 276,
        "copy_file_range": 285,
        "clone": 220,
    },
}
"""System call numbers, by what os.uname() calls the machine."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("when_true", ctypes.c_uint8),
        ("when_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def refuse(calls: Mapping[str, int]) -> None:
    """From now on these system calls answer with these errnos. Raises OSError, and KeyError for a call without a number here."""
    numbers = NUMBERS[os.uname().machine]
    program = [_Instruction(_LOAD, 0, 0, 0)]  # the number of the call
    for name, code in calls.items():
        program += [
            _Instruction(_JUMP_EQUAL, 0, 1, numbers[name]),
            _Instruction(_RETURN, 0, 0, _ERRNO | code),
        ]
    program.append(_Instruction(_RETURN, 0, 0, _ALLOW))
    instructions = (_Instruction * len(program))(*program)
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    given = ctypes.byref(_Program(len(program), instructions))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), given, zero, zero
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
