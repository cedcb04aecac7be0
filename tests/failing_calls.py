"""Calls to the system that are counted, and one that fails: os, files, memory maps, sockets and new processes.

The n-th call of a kind raises the OSError that the kernel would give, and nothing is done. `close` fails as the kernel's
does: the descriptor is closed all the same.
"""

from __future__ import annotations

import builtins
import fcntl
import functools
import io
import json
import mmap
import os
import socket
import stat
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

OS_CALLS = (
    *(
        "open",
        "close",
        "read",
        "write",
        "pread",
        "pwrite",
        "preadv",
        "pwritev",
        "lseek",
        "dup",
        "pipe",
        "pipe2",
    ),
    *(
        "stat",
        "lstat",
        "fstat",
        "statvfs",
        "fstatvfs",
        "access",
        "readlink",
        "listdir",
        "scandir",
        "getxattr",
    ),
    *(
        "mkdir",
        "rmdir",
        "unlink",
        "remove",
        "rename",
        "replace",
        "link",
        "symlink",
        "chmod",
        "fchmod",
        "chown",
    ),
    *(
        "fchown",
        "truncate",
        "ftruncate",
        "fsync",
        "fdatasync",
        "posix_fallocate",
        "posix_fadvise",
        "sendfile",
    ),
    *(
        "copy_file_range",
        "memfd_create",
        "eventfd",
        "pidfd_open",
        "sched_getaffinity",
        "sysconf",
        "kill",
        "getcwd",
    ),
    *("setxattr", "listxattr", "removexattr", "utime", "splice", "waitpid"),
)
_OF_FILES = {"close", "read"}
"""Calls that fail for files alone: those on a process's own pipes do not."""
SOCKET_CALLS = (
    "bind",
    "connect",
    "listen",
    "accept",
    "send",
    "sendall",
    "sendmsg",
    "recv",
    "recvmsg",
    "getsockopt",
)


class Calls:
    """How often each kind was called, and the one that fails."""

    def __init__(self, kind: str, number: int, code: int) -> None:
        self._kind, self._number, self._code = kind, number, code
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._failed = False
        self._write, self._truncate = os.write, os.ftruncate

    def made(self, kind: str, filename: object = None) -> None:
        """Count a call of this kind. Raises OSError if it is the one that fails."""
        with self._lock:
            self._counts[kind] += 1
            if kind != self._kind or self._counts[kind] != self._number:
                return
            self._failed = True
        if isinstance(filename, str | bytes | os.PathLike):
            raise OSError(self._code, os.strerror(self._code), os.fspath(filename))
        raise OSError(self._code, os.strerror(self._code))

    def save(self, fd: int) -> None:
        """Write the counts as JSON."""
        self._write(fd, json.dumps({"calls": self._counts, "failed": self._failed}).encode())


def install(kind: str = "", number: int = 0, code: int = 0) -> Calls:
    """Count from now on; the `number`-th call of `kind` fails with errno `code`."""
    calls = Calls(kind, number, code)
    fstat = os.fstat

    def counted(kind: str, plain: Callable[..., Any], named: bool = False) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*arguments: Any, **options: Any) -> Any:
            if kind in _OF_FILES and not stat.S_ISREG(fstat(arguments[0]).st_mode):
                return plain(*arguments, **options)
            try:
                calls.made(kind, arguments[0] if named and arguments else None)
            except OSError:
                if kind == "close":
                    plain(*arguments, **options)
                raise
            return plain(*arguments, **options)

        return call

    for name in OS_CALLS:
        plain = getattr(os, name)
        setattr(os, name, counted(name, plain, named=True))
        for group in (
            os.supports_fd,
            os.supports_dir_fd,
            os.supports_follow_symlinks,
            os.supports_effective_ids,
        ):
            if plain in group:
                group.add(getattr(os, name))
    for name in SOCKET_CALLS:
        setattr(socket.socket, name, counted(f"socket.{name}", getattr(socket.socket, name)))
    for name in ("flock", "fcntl"):
        setattr(fcntl, name, counted(f"fcntl.{name}", getattr(fcntl, name)))
    subprocess._fork_exec = counted("fork", subprocess._fork_exec)  # type: ignore[attr-defined]
    mmap.mmap = _mapping(calls)  # type: ignore[misc]
    builtins.open = io.open = _opener(calls)  # type: ignore[assignment]
    return calls


def _mapping(calls: Calls) -> type:
    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            calls.made("mmap")
            return super().__new__(cls, *arguments, **options)

    return Mapping


def _opener(calls: Calls) -> Callable[..., Any]:
    plain = io.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> Any:
            calls.made("file.write", self.name)
            return super().write(data)

        def readinto(self, buffer: Any) -> Any:
            calls.made("file.read", self.name)
            return super().readinto(buffer)

        def readall(self) -> Any:
            calls.made("file.read", self.name)
            return super().readall()

    @functools.wraps(plain)
    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        calls.made("file.open", file)
        raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered: Any = (
            io.BufferedRandom(raw)
            if "+" in mode
            else io.BufferedReader(raw)
            if raw.readable()
            else io.BufferedWriter(raw)
        )
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
        text.mode = mode
        return text

    return open_
