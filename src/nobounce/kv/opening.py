"""The file of a store: made whole under another name, or opened and locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets

from nobounce import scratch
from nobounce.errors import BusyError, FileError, named, named_errors
from nobounce.kv import fileformat
from nobounce.kv.fileformat import Geometry

CURES = {errno.ENOSPC: "Free some, or give a smaller capacity", errno.EDQUOT: "Give a smaller capacity"}


def opened(path: str, geometry: Geometry, *, writer: bool) -> tuple[int, bytes]:
    """(descriptor, id) of the store's file, made if `writer` and it is not there. Raises FileError, FormatError, BusyError."""
    with named_errors(path, "open", CURES):
        while True:
            try:
                fd = os.open(path, (os.O_RDWR if writer else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                if not writer:
                    raise
                with contextlib.suppress(FileExistsError):
                    return _made(path, geometry)
                continue
            try:
                return fd, _looked_at(fd, path, geometry, writer)
            except BaseException:
                os.close(fd)
                raise


def _looked_at(fd: int, path: str, geometry: Geometry, writer: bool) -> bytes:
    if writer:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{named(path)}: another BlockStore writes to this store: open it with readonly=True, or close the other"
            ) from None
    found = fileformat.store_id(os.pread(fd, fileformat.PAGE, 0), geometry, path)
    nbytes = os.fstat(fd).st_size
    if nbytes < geometry.file_nbytes:
        why = f"the store was truncated to {nbytes} of {geometry.file_nbytes} bytes: remove it, and it is made anew"
        raise FileError.because(path, errno.EIO, why)
    if writer:
        # A writer that was killed may have left direct writes with the kernel. Setting the size waits for them (inode_dio_wait in
        # ext4 and xfs), and the sync makes the table that is believed from now on the one that a power cut leaves.
        os.ftruncate(fd, nbytes)
        os.fdatasync(fd)
    return found


def _made(path: str, geometry: Geometry) -> tuple[int, bytes]:
    """The file is complete, allocated and locked before it has its name, so no other process ever sees a part of one."""
    folder, name = os.path.split(os.path.abspath(path))
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fd, temporary = -1, ""
    try:
        fd, temporary = scratch.make_named(where, 0o666)
        os.posix_fallocate(fd, 0, geometry.file_nbytes)
        own = secrets.token_bytes(16)
        os.pwrite(fd, fileformat.header(geometry, own), 0)
        os.fsync(fd)
        os.link(temporary, name, src_dir_fd=where, dst_dir_fd=where)
        os.fsync(where)
        made, fd = fd, -1
        return made, own
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=where)
        if fd >= 0:
            os.close(fd)
        os.close(where)
