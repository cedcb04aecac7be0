"""statx(2): type, size, mount id and direct-I/O alignment of a file in one call.

The kernel sets a bit in stx_mask for what it really filled in. An absent DIOALIGN bit (Linux before 6.1, and
file systems that never report it) is not "4096": it says nothing. A present bit with alignment 0 says that
this file has no direct I/O (an encrypted or verity file, say). Python 3.11 has no os.statx. Where the call is
refused (`filtered`), fstat(2) and the mount id of /proc/self/fdinfo say all but the alignments.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from typing import NamedTuple

from nobounce.facts.filtered import REFUSED

_AT_EMPTY_PATH = 0x1000
_BASIC = 0x7FF
_MNT_ID = 0x1000
_DIOALIGN = 0x2000
_DIO_READ_ALIGN = 0x20000
_WANTED = _BASIC | _MNT_ID | _DIOALIGN | _DIO_READ_ALIGN
_NUMBERS = {"x86_64": 332, "aarch64": 291}

_libc = ctypes.CDLL(None, use_errno=True)


class Statx(NamedTuple):
    """The fields used here; None where the kernel did not fill one in. Times in nanoseconds."""

    mode: int
    nbytes: int
    inode: int
    device: tuple[int, int]
    rdev: tuple[int, int]
    mtime_ns: int
    ctime_ns: int
    mount_id: int | None
    dio_mem_align: int | None
    dio_offset_align: int | None
    dio_read_offset_align: int | None


def statx(fd: int) -> Statx:
    """statx of an open descriptor. Raises OSError."""
    block = ctypes.create_string_buffer(256)
    call = getattr(_libc, "statx", None)
    if call is not None:
        failed = call(fd, b"", _AT_EMPTY_PATH, _WANTED, block)
    else:
        number = _NUMBERS.get(os.uname().machine, -1)
        failed = _libc.syscall(number, fd, b"", _AT_EMPTY_PATH, _WANTED, block)
    if failed:
        code = ctypes.get_errno()
        if code in REFUSED:
            return _without_statx(fd)
        raise OSError(code, os.strerror(code))
    return parse(block.raw)


def _without_statx(fd: int) -> Statx:
    status = os.fstat(fd)
    mount_id = None
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/self/fdinfo/{fd}", "rb") as f:
        mount_id = int(f.read().split(b"mnt_id:")[1].split()[0])
    return Statx(
        status.st_mode,
        status.st_size,
        status.st_ino,
        (os.major(status.st_dev), os.minor(status.st_dev)),
        (os.major(status.st_rdev), os.minor(status.st_rdev)),
        status.st_mtime_ns,
        status.st_ctime_ns,
        mount_id,
        None,
        None,
        None,
    )


def parse(raw: bytes) -> Statx:
    """The 256 bytes of struct statx (include/uapi/linux/stat.h)."""
    mask = struct.unpack_from("=I", raw, 0)[0]
    mode = struct.unpack_from("=H", raw, 28)[0]
    inode, nbytes = struct.unpack_from("=QQ", raw, 32)
    ctime_s, ctime_ns = struct.unpack_from("=qI", raw, 96)
    mtime_s, mtime_ns = struct.unpack_from("=qI", raw, 112)
    rdev_major, rdev_minor, dev_major, dev_minor = struct.unpack_from("=IIII", raw, 128)
    mount_id, mem_align, offset_align = struct.unpack_from("=QII", raw, 144)
    read_align = struct.unpack_from("=I", raw, 180)[0]
    dio = bool(mask & _DIOALIGN)
    return Statx(
        mode,
        nbytes,
        inode,
        (dev_major, dev_minor),
        (rdev_major, rdev_minor),
        mtime_s * 10**9 + mtime_ns,
        ctime_s * 10**9 + ctime_ns,
        mount_id if mask & _MNT_ID else None,
        mem_align if dio else None,
        offset_align if dio else None,
        read_align if mask & _DIO_READ_ALIGN and read_align else None,
    )
