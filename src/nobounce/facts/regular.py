"""What a regular file is, and what it holds: a pipe without a writer would keep open() waiting for
ever, a device may act on it."""

from __future__ import annotations

import os
import stat

from nobounce.errors import ArgumentError, printable

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def opener(path: str, flags: int) -> int:
    """For the `opener` of open(): looks before it opens. Raises ArgumentError for what is no
    regular file, else OSError.

    What the shell's `<(...)` or `|` hands over as /dev/fd/N or /dev/stdin is let through:
    a pipe that the shell made has a writer.
    """
    if os.path.basename(os.path.realpath(path)).startswith("pipe:["):
        return os.open(path, flags | os.O_CLOEXEC)
    _need_regular(os.stat(path).st_mode, path)
    # O_NONBLOCK: a pipe may have taken the file's place since. It means nothing to a regular file.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _need_regular(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def true_size(fd: int, nbytes: int) -> int | None:
    """`nbytes`, the size that the file claims, or None where that is not what it holds: files of /proc claim
    0 bytes, those of /sys 4096, some FUSE file systems whatever they like. Raises OSError."""
    if nbytes == 0:
        return None if os.pread(fd, 1, 0) else 0
    if os.fstat(fd).st_blocks == 0 and not os.pread(fd, 1, nbytes - 1):
        return None
    return nbytes


def _need_regular(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ArgumentError(f"{printable(path)}: is {kind}: name a regular file")
