"""Every file that nobounce writes on its own account: the old file or the new one, whole, and never
through another user's link.

A name in a folder that others may write to proves nothing: between two calls it may come to mean another
file. So all work is done on descriptors, the folder's own included, and a name is used at two moments only:
when it is looked up, and when the finished file takes it.

Where the kernel can (O_TMPFILE: ext4, xfs, btrfs, tmpfs, overlay), the file has no name until it is whole,
and kill -9 leaves nothing. linkat(2) then gives it its name in one step, but never over a name that exists:
to replace an old file, the new one is linked into a folder of this user alone, beside the old one, for the
moment before rename(2): no other user can put another file under the name that is renamed. Elsewhere it lies
there while it is written. Such folders are named `.nobounce-` and 16 hexadecimal digits; who writes holds a
flock(2) on the folder, so what a killed process has left is told from what a living one needs, and the next
run that makes such a name removes it. Where there are no modes (vfat), the file itself has such a name.

linkat of a descriptor goes through /proc/self/fd, which needs no privilege; AT_EMPTY_PATH
needs CAP_DAC_READ_SEARCH.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import tempfile
from types import TracebackType

from nobounce.errors import ArgumentError, FileError, named, named_errors
from nobounce.scratch import FOLDER, NEW, NO_TMPFILE, lock, make_named, make_private, names, new_name, path_of

_DESCRIPTOR = re.compile(r"/dev/std(?P<std>out|err)|/(?:dev|proc/self)/fd/(?P<fd>[0-9]{1,9})")
_MOST_LINKS = 40
"""As many links in a row as the kernel follows."""
_FS_IOC_GETFLAGS = 0x80086601 if struct.calcsize("l") == 8 else 0x80046601
_IMMUTABLE, _APPEND_ONLY = 0x10, 0x20
_ACL = "system.posix_acl_access"
CURES = {
    errno.ENOSPC: "Free some space there, or name another file system",
    errno.EDQUOT: "The quota is used up: free some space, or name another file system",
    errno.EROFS: "The file system is mounted read-only: name another",
    errno.EFBIG: "The limit is that of `ulimit -f` or of the file system",
    errno.ENOENT: "Its folder is not there, or takes no new files: name another",
}
"""What to do about an error of writing a file."""


class OutFile:
    """A file under way. `fd` is open for writing (and for reading, unless it leads to a device, a
    pipe or standard output).

    It becomes what its name means at `commit`; leaving the `with` block without it
    leaves everything as it was.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self._folder = self._found = self._private_folder = -1
        self._private_name = ""
        self._name = self._temporary = ""
        self._committed = self._in_place = self._private = False
        self._mode = 0
        self._old: os.stat_result | None = None
        self._acl: bytes | None = None

    def write(self, data: bytes) -> None:
        """Append the bytes. Raises FileError."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        except BrokenPipeError:  # the reader has gone: no error (docs/cli.md)
            return
        except OSError as e:
            raise FileError.from_oserror(e, self.path, "write", CURES.get(e.errno or 0, "")) from e

    def commit(self, *, durable: bool = False) -> None:
        """Give the file its name, in one step; with `durable`, data and name are on the
        disk when the call returns.

        Raises FileError; the old file, if there was one, is then still there.
        """
        with named_errors(self.path, "replace" if self._old is not None else "write", CURES):
            if self._in_place:
                if durable:
                    _fsync(self.fd)
                self._committed = True
                return
            self._dress()
            if durable:
                _fsync(self.fd)
            self._take_name()
            self._committed = True
            if durable:
                self._sync_folder()

    def close(self) -> None:
        """Close it; what has not been committed is gone."""
        if self._temporary and not self._committed and self._is_ours(self._temporary):
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._beside())
        self._drop_private_folder()
        for name in ("fd", "_folder", "_found"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> OutFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def folder(self) -> str:
        """Where to make what belongs to it: its own folder, or that for temporary files where
        it is a device or a pipe."""
        return tempfile.gettempdir() if self._in_place else path_of(self._folder)

    # beginning

    def _begin(self, mode: int, private: bool, whole: bool) -> None:
        self._private = private
        number = self._look_up()
        if number is not None or (self._found >= 0 and not stat.S_ISREG(os.fstat(self._found).st_mode)):
            if whole:
                raise ArgumentError(
                    f"{named(self.path)} is no regular file: it would be replaced, not written to"
                )
            self.fd = os.dup(number) if number is not None else self._open_special()
            self._in_place = True
            return
        if self._found >= 0:
            self._old = os.fstat(self._found)
            if self._cannot_be_replaced(whole):
                return self._write_in_place()
            if not private:
                with contextlib.suppress(OSError):  # none, or a file system that has none
                    self._acl = os.getxattr(path_of(self._found), _ACL)
        # For whom the owner's bits are wanted at the end: while it is written, a direct
        # descriptor is opened too.
        wanted = 0o600 if private or self._old is not None else mode | 0o600
        self._mode = mode
        try:
            self._make(wanted)
        except PermissionError:
            if self._old is None or whole:
                raise
            self._write_in_place()

    def _look_up(self) -> int | None:
        """Open the folder and what has the name there, following links of this user and of root alone; the
        number where the name stands for an open descriptor."""
        path = self.path
        for _ in range(_MOST_LINKS):
            descriptor = _DESCRIPTOR.fullmatch(path)
            if descriptor:
                return int(descriptor["fd"] or (1 if descriptor["std"] == "out" else 2))
            head, self._name = os.path.split(path)
            before = self._folder
            self._folder = os.open(head or ".", FOLDER, dir_fd=None if before < 0 else before)
            if before >= 0:
                os.close(before)
            if self._name in ("", ".", ".."):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            try:
                self._found = os.open(
                    self._name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder
                )
            except FileNotFoundError:
                return None
            status = os.fstat(self._found)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISLNK(status.st_mode):
                return None
            self._need_trusted(status, "link")
            path = os.readlink("", dir_fd=self._found)
            os.close(self._found)
            self._found = -1
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _need_trusted(self, status: os.stat_result, what: str) -> None:
        if status.st_uid not in (os.geteuid(), 0):
            raise FileError.because(
                self.path,
                errno.EACCES,
                f"is a {what} of another user (uid {status.st_uid}): name a file of your own",
            )

    def _open_special(self) -> int:
        status = os.fstat(self._found)
        if not stat.S_ISCHR(status.st_mode) and not stat.S_ISBLK(status.st_mode):  # those only root can make
            self._need_trusted(status, "pipe" if stat.S_ISFIFO(status.st_mode) else "socket")
        return os.open(path_of(self._found), os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)

    def _cannot_be_replaced(self, whole: bool) -> bool:
        """Whether the old file can only be written in place. Raises where it is not to be written at all,
        and, with `whole`, where it cannot be replaced: before any work is done."""
        old, folder = os.fstat(self._found), os.fstat(self._folder)
        flags = _flags(self._found)
        if flags & (_IMMUTABLE | _APPEND_ONLY):
            kind, letter = ("immutable", "i") if flags & _IMMUTABLE else ("append-only", "a")
            raise FileError.because(
                self.path, errno.EPERM, f"is {kind}: `chattr -{letter}` allows to replace it, or name another"
            )
        if not _may_write(self._found):
            raise FileError.because(
                self.path, errno.EACCES, "this user may not write it: `chmod u+w` it, or name another"
            )
        if _mount_id(self._found) != _mount_id(self._folder):
            if whole:
                raise FileError.because(
                    self.path,
                    errno.EBUSY,
                    "is a mount point of its own (bound into a container, say) and cannot be replaced: name "
                    "another file",
                )
            return True
        if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, old.st_uid, folder.st_uid):
            if whole:
                raise FileError.because(
                    self.path,
                    errno.EPERM,
                    f"belongs to another user (uid {old.st_uid}) in a sticky folder and cannot be replaced: "
                    "name another file",
                )
            return True
        return False

    def _write_in_place(self) -> None:
        self.fd = os.open(path_of(self._found), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        self._in_place = True
        if self._private:
            with contextlib.suppress(PermissionError):
                os.fchmod(self.fd, 0o600)

    def _make(self, mode: int) -> None:
        try:
            self.fd = os.open(".", NEW | os.O_TMPFILE, mode, dir_fd=self._folder)
        except OSError as e:
            if e.errno not in NO_TMPFILE:
                raise
        else:
            lock(self.fd)
            if os.path.exists(path_of(self.fd)):
                return
            os.close(self.fd)  # no /proc: it could never be given a name
            self.fd = -1
        self._make_private_folder()
        self.fd, self._temporary = make_named(self._beside(), mode)

    def _beside(self) -> int:
        """The folder that holds the temporary name."""
        return self._folder if self._private_folder < 0 else self._private_folder

    def _make_private_folder(self) -> None:
        self._private_folder, self._private_name = make_private(self._folder)

    def _drop_private_folder(self) -> None:
        if self._private_folder >= 0:
            fd, self._private_folder = self._private_folder, -1
            os.close(fd)
            with contextlib.suppress(OSError):
                os.rmdir(self._private_name, dir_fd=self._folder)

    # ending

    def _dress(self) -> None:
        """Owner, mode and access list: those of the old file where that may be, else
        as a new file gets them."""
        now, old = stat.S_IMODE(os.fstat(self.fd).st_mode), self._old
        if self._private:
            return self._set_mode(0o600)
        if old is None:  # the umask, or the folder's default list, is in it already
            return self._set_mode(now & (self._mode | 0o077))
        mode = old.st_mode & 0o777
        try:
            os.fchown(self.fd, old.st_uid, old.st_gid)
        except PermissionError:
            try:
                os.fchown(self.fd, -1, old.st_gid)
            except PermissionError:  # what its group might, another one may only if all might
                mode &= ~0o070 | (mode & 0o007) << 3
                self._acl = None
        if self._acl is not None:
            os.setxattr(self.fd, _ACL, self._acl)
        else:
            with contextlib.suppress(OSError):  # that of the folder, if it has one
                os.removexattr(self.fd, _ACL)
            self._set_mode(mode)

    def _set_mode(self, mode: int) -> None:
        """fchmod where it changes anything: some file systems have one mode for all their files."""
        if stat.S_IMODE(os.fstat(self.fd).st_mode) != mode:
            os.fchmod(self.fd, mode)

    def _take_name(self) -> None:
        if not self._temporary:
            if self._old is None:
                try:
                    os.link(path_of(self.fd), self._name, dst_dir_fd=self._folder, follow_symlinks=True)
                    return
                except FileExistsError:
                    pass  # made meanwhile: replaced, as any other
            self._make_private_folder()
            self._temporary = new_name()
            os.link(path_of(self.fd), self._temporary, dst_dir_fd=self._beside(), follow_symlinks=True)
        if not self._is_ours(self._temporary):
            raise FileError.because(
                self.path, errno.EBUSY, "another file took the place of the new one: nothing is replaced"
            )
        os.rename(self._temporary, self._name, src_dir_fd=self._beside(), dst_dir_fd=self._folder)
        if self._private_folder >= 0:
            self._drop_private_folder()
        elif not names(self._folder, self._name, self.fd):
            raise FileError.because(
                self.path,
                errno.EBUSY,
                "another process changed its folder: what has its name now is not the new file",
            )

    def _is_ours(self, name: str) -> bool:
        return self.fd >= 0 and names(self._beside(), name, self.fd)

    def _sync_folder(self) -> None:
        sync_folder(".", self._folder)


def create(path: str, *, mode: int = 0o666, private: bool = False, whole: bool = False) -> OutFile:
    """Begin the file that `path` is to name.

    A new file gets `mode`, less the umask; an old one keeps owner, mode and access list where this user may
    give them. With `private` it is this user's alone, 0600. With `whole`, what cannot be replaced in one step
    is refused now: a mount point, an immutable file. Without, such a file is written in place, and a pipe, a
    device or /dev/stdout is written to. A link is followed if it is this user's or root's. Raises FileError,
    and with `whole` ArgumentError for what is no regular file.
    """
    out = OutFile(path)
    try:
        with named_errors(path, "write", CURES):
            out._begin(mode, private, whole)
    except BaseException:
        out.close()
        raise
    return out


def _may_write(fd: int) -> bool:
    """Asked of access(2) where it answers for this user: other questions are faccessat2 (Linux 5.8),
    which filters may not know."""
    path = path_of(fd)
    if (os.getuid(), os.getgid()) == (os.geteuid(), os.getegid()):
        return os.access(path, os.W_OK)
    return os.access(path, os.W_OK, effective_ids=True)


def write(path: str, data: bytes, *, private: bool = False) -> None:
    """The whole of a small file, as `create` makes it. Raises FileError."""
    with create(path, private=private) as out:
        out.write(data)
        out.commit()


def _fsync(fd: int) -> None:
    """fsync(2) where there is one: pipes, devices and the folders of some file systems have none."""
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise


def sync_folder(path: str, within: int | None = None) -> None:
    """Put the names in a folder on the disk. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
    except PermissionError:  # a folder that may be entered and written, not listed
        return
    try:
        _fsync(fd)
    finally:
        os.close(fd)


def _mount_id(fd: int) -> bytes:
    """The mount that the open file was reached through; nothing where /proc does not say."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as f:
            return next((line for line in f if line.startswith(b"mnt_id:")), b"")
    except OSError:
        return b""


def _flags(found: int) -> int:
    """The file's attributes as chattr(1) shows them; 0 where they cannot be had."""
    try:
        fd = os.open(path_of(found), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))[:4])[0])
    except OSError:
        return 0
    finally:
        os.close(fd)
