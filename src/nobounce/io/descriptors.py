"""Descriptors as they come: what kind of file they are of, their flags, and duplicates that stay ours."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable

from nobounce.errors import FileError, printable
from nobounce.facts.types import FileFacts
from nobounce.records import replace

MODES = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "x+": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


def check_kind(mode: int, name: str) -> None:
    """Raises FileError for what is neither a regular file nor a block device."""
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        return
    if stat.S_ISDIR(mode):
        raise FileError.from_oserror(IsADirectoryError(errno.EISDIR, ""), name, "open")
    kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "character device"
    raise FileError(
        f"{printable(name)}: is a {kind}, which has no offsets to read or write at: use a regular file or a "
        "block device",
        errno.ESPIPE,
        name,
    )


def status_flags(fd: int) -> int:
    """The flags it was opened with."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


def flavour_of(fd: int) -> str:
    return "direct" if status_flags(fd) & os.O_DIRECT else "buffered"


def duplicator(fd: int) -> Callable[[], int]:
    """What makes another number for the same open file, not inherited by programs that are
    started. It raises OSError."""
    import fcntl

    return functools.partial(fcntl.fcntl, fd, fcntl.F_DUPFD_CLOEXEC, 0)


def nbytes_of(fd: int, status: os.stat_result) -> int:
    """The size of a file or a block device, in bytes."""
    return os.lseek(fd, 0, os.SEEK_END) if stat.S_ISBLK(status.st_mode) else status.st_size


def sized(fd: int, known: FileFacts, last: tuple[FileFacts, FileFacts] | None) -> tuple[FileFacts, FileFacts]:
    """What is known of a file, and the same with its size of now and whether it has holes now; `last` is
    what this returned before."""
    status = os.fstat(fd)
    nbytes = nbytes_of(fd, status)
    sparse = known.sparse or (known.kind == "regular" and status.st_blocks * 512 < status.st_size)
    if last is not None and last[0] is known and (last[1].nbytes, last[1].sparse) == (nbytes, sparse):
        return last
    return known, replace(known, nbytes=nbytes, sparse=sparse)
