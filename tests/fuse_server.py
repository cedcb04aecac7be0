"""A file system served by a process, spoken straight to /dev/fuse (include/uapi/linux/fuse.h): the files of one folder, to read and write.

    python fuse_server.py FOLDER MOUNT_POINT [direct-io]

It mounts, serves until it is unmounted, and ends. With direct-io no read goes through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable

_IN, _OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_MS_NOSUID, _MS_NODEV = 2, 4
_FOPEN_DIRECT_IO = 1
_FATTR_SIZE = 1 << 3
_MAX_WRITE = 1 << 17


class Server:
    """Answers requests about the folder at `root`; node 1 is the folder, its files are nodes by inode."""

    def __init__(self, root: str, open_flags: int) -> None:
        self._root, self._open_flags = root, open_flags
        self._names: dict[int, str] = {1: ""}
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: lambda node, _: self._attr_out(node),
            4: self._setattr,
            10: self._unlink,
            14: lambda node, body: self._open(node, struct.unpack_from("=I", body)[0]),
            15: self._read,
            16: self._write,
            17: lambda *_: struct.pack("=QQQQQIIII24x", 1, 1, 1, 1, 1, 4096, 255, 4096, 0),
            18: self._release,
            20: self._fsync,
            25: lambda *_: b"",
            26: lambda *_: struct.pack("=IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 12, 9, _MAX_WRITE, 1, 0, 0, 0),
            27: lambda *_: struct.pack("=QII", 0, 0, 0),
            28: lambda *_: b"",
            29: lambda *_: b"",
            35: self._create,
            38: lambda *_: b"",
        }

    def serve(self, fd: int) -> None:
        """Until the file system is unmounted."""
        while True:
            try:
                request = os.read(fd, _MAX_WRITE + 4096)
            except OSError as e:
                if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (2, 36, 42):  # forget and interrupt have no answer
                continue
            try:
                answer, code = self._answers[opcode](node, request[_IN.size :]), 0
            except KeyError:
                answer, code = b"", errno.ENOSYS
            except OSError as e:
                answer, code = b"", e.errno or errno.EIO
            os.write(fd, _OUT.pack(_OUT.size + len(answer), -code, unique) + answer)

    def _path(self, node: int) -> str:
        return os.path.join(self._root, self._names[node])

    def _attr(self, path: str) -> bytes:
        s = os.stat(path)
        times = [ns // 10**9 for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        parts = [ns % 10**9 for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        ids = s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0
        return struct.pack("=6Q10I", s.st_ino, s.st_size, s.st_blocks, *times, *parts, *ids)

    def _attr_out(self, node: int) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + self._attr(self._path(node))

    def _entry(self, name: str) -> bytes:
        path = os.path.join(self._root, name)
        node = os.stat(path).st_ino
        self._names[node] = name
        return struct.pack("=QQQQII", node, 0, 0, 0, 0, 0) + self._attr(path)

    def _lookup(self, _: int, body: bytes) -> bytes:
        return self._entry(os.fsdecode(body.rstrip(b"\0")))

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, size = struct.unpack_from("=I12xQ", body)
        if valid & _FATTR_SIZE:
            os.truncate(self._path(node), size)
        return self._attr_out(node)

    def _unlink(self, _: int, body: bytes) -> bytes:
        os.unlink(os.path.join(self._root, os.fsdecode(body.rstrip(b"\0"))))
        return b""

    def _open(self, node: int, flags: int) -> bytes:
        wanted = flags & (os.O_ACCMODE | os.O_TRUNC)
        return struct.pack("=QII", os.open(self._path(node), wanted), self._open_flags, 0)

    def _create(self, _: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("=II", body)
        name = os.fsdecode(body[16:].rstrip(b"\0"))
        os.close(os.open(os.path.join(self._root, name), os.O_CREAT | os.O_WRONLY, mode & 0o777))
        entry = self._entry(name)
        return entry + self._open(struct.unpack_from("=Q", entry)[0], flags)

    def _read(self, _: int, body: bytes) -> bytes:
        fh, offset, size = struct.unpack_from("=QQI", body)
        return os.pread(fh, size, offset)

    def _write(self, _: int, body: bytes) -> bytes:
        fh, offset, size = struct.unpack_from("=QQI", body)
        return struct.pack("=II", os.pwrite(fh, body[40 : 40 + size], offset), 0)

    def _release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("=Q", body)[0])
        return b""

    def _fsync(self, _: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("=Q", body)[0])
        return b""


def main(folder: str, point: str, *options: str) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    data = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fuse_server", os.fsencode(point), b"fuse", _MS_NOSUID | _MS_NODEV, data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), point)
    Server(folder, _FOPEN_DIRECT_IO if "direct-io" in options else 0).serve(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
