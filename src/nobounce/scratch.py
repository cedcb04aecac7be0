"""Files and folders of ours that last as long as the work: nameless where the kernel can, else under a
name that says whose it is.

Such a name is `.nobounce-` and 16 hexadecimal digits. Who works on the file holds a flock(2) on it, so
what a killed process has left is told from what a living one needs; the next run that makes such a name
in the folder removes it.

Everything is done on descriptors: in a folder that others may write to, a name may come to mean
another file between two calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator

_OURS = re.compile(r"\.nobounce-[0-9a-f]{16}")
_TRACES = re.compile(r"trace\.[0-9]+\.json")
"""What a private folder is for: nothing else is ever removed from one that was left."""
NEW = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS, errno.EPERM})
"""Errors that may say: no nameless files here. Where another reason is behind them, a
named file meets it too."""
_SWAPPED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES})
"""Errors of opening a folder just made that say: its name means something else by now."""


def nameless(folder: str, flags: int = 0) -> int:
    """A descriptor, open for reading and writing, of a new file in `folder` that has no name: it goes with
    its last descriptor. `flags` are further flags of open(2). Raises OSError."""
    try:
        return os.open(folder, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE | os.O_EXCL | flags, 0o600)
    except OSError as e:
        if e.errno not in NO_TMPFILE:
            raise
    where = os.open(folder, FOLDER)
    try:
        fd, name = make_named(where, 0o600, flags)
        os.unlink(name, dir_fd=where)
        return fd
    finally:
        os.close(where)


@contextlib.contextmanager
def unnamed(folder: str, nbytes: int = 0) -> Iterator[tuple[str, int]]:
    """(path, descriptor) of a file of `nbytes` allocated bytes in `folder`, gone at the end and after kill
    -9. The path is good in this process, and in a child that inherits the descriptor. Raises OSError."""
    fd = nameless(folder)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
            os.fsync(fd)
        yield path_of(fd), fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def private_folder(parent: str) -> Iterator[str]:
    """A folder of this user alone in `parent`, for traces, removed at the end. Its path leads there
    whatever others do to the names in `parent`; it is good in every process of this user, while this
    one lives. Raises OSError."""
    where = os.open(parent, FOLDER)
    fd, name = -1, ""
    try:
        fd, name = make_private(where)
        if fd < 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        if fd >= 0:
            _empty(fd)
            os.close(fd)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=where)
        os.close(where)


def make_private(where: int) -> tuple[int, str]:
    """(descriptor, name) of a new folder of this user alone, locked: no other user changes what its names
    mean. (-1, "") where there is no such folder, as on file systems without modes. Raises OSError."""
    sweep(where)
    for _ in range(10):
        name = new_name()
        os.mkdir(name, 0o700, dir_fd=where)
        fd = -1
        try:
            fd = _open_fresh(where, name)
        finally:
            if fd < 0:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=where)
        if fd >= 0:
            return fd, name
    return -1, ""


def _open_fresh(where: int, name: str) -> int:
    """A descriptor of the folder just made, locked; -1 where the name means something else by now, or another
    run has swept it. Raises OSError."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=where)
    except OSError as e:
        if e.errno in _SWAPPED:
            return -1
        raise
    try:
        lock(fd)
        if _is_fresh(fd):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1


def _is_fresh(fd: int) -> bool:
    """Whether the folder is this user's alone, there and empty. Who holds it has what was made, though
    its name be taken at once."""
    status = os.fstat(fd)
    private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return private and status.st_nlink > 0 and not os.listdir(fd)


def make_named(where: int, mode: int, flags: int = 0) -> tuple[int, str]:
    """(descriptor, name) of a new file in the folder, locked. Raises OSError."""
    sweep(where)
    for _ in range(10):
        name = new_name()
        try:
            fd = os.open(name, NEW | os.O_CREAT | os.O_EXCL | flags, mode, dir_fd=where)
        except FileExistsError:
            continue
        except OSError:  # O_DIRECT where there is none is refused after the file was made
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=where)
            raise
        lock(fd)
        if names(where, name, fd):
            return fd, name
        os.close(fd)  # another run took it for a left one, in the moment before it was locked
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def sweep(where: int) -> None:
    """Remove from the folder what killed processes have left there; what cannot be removed stays."""
    try:
        listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where)
    except OSError:
        return
    try:
        ours = [name for name in os.listdir(listing) if _OURS.fullmatch(name)]
    finally:
        os.close(listing)
    for name in ours:
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where)
            try:
                status = os.fstat(fd)
                mine = status.st_uid == os.geteuid()
                if not lock(fd) or not names(where, name, fd):
                    continue
                if stat.S_ISREG(status.st_mode) and (mine or os.geteuid() == 0):
                    os.unlink(name, dir_fd=where)
                elif stat.S_ISDIR(status.st_mode) and mine:
                    _empty(fd)
                    os.rmdir(name, dir_fd=where)
            finally:
                os.close(fd)


def _empty(fd: int) -> None:
    for name in os.listdir(fd):
        if _TRACES.fullmatch(name) or _OURS.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)


def names(where: int, name: str, fd: int) -> bool:
    """Whether the name in the folder means the open file."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=where, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def lock(fd: int) -> bool:
    """Whether the file is now locked by us. Where it cannot be, nothing of ours is ever taken for left."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def new_name() -> str:
    return f".nobounce-{secrets.token_hex(8)}"


def path_of(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
