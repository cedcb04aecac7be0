"""Whom facts are asked of: this machine, or a capture of another one.

Every question goes through a Source, so that another machine's situation is a test and a bug report. An
answer is JSON-able; an error is kept as its errno. Questions about an open descriptor carry a label, which
stands for it in a capture.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from nobounce.facts import cachestat
from nobounce.facts.answers import malformed
from nobounce.facts.statx import Statx, statx
from nobounce.facts.types import FileSystemFacts

SCHEMA = "nobounce.capture/1"
MOUNTINFO = "/proc/self/mountinfo"


class Source(ABC):
    """Answers questions about a machine. Every method raises OSError with the machine's errno."""

    @abstractmethod
    def _ask(self, question: str, key: tuple[Any, ...], live: Callable[[], Any]) -> Any:
        """The JSON-able answer to `question` about `key`; `live` finds it on this machine."""

    def read_bytes(self, path: str, limit: int = 1 << 24) -> bytes:
        """The content of a file, at most `limit` bytes."""

        def live() -> str:
            with open(path, "rb") as f:
                return f.read(limit).decode("latin-1")

        return str(self._ask("read", (path,), live)).encode("latin-1")

    def forget(self) -> bool:
        """Drop what is kept between questions; False where nothing is."""
        return False

    def read_text(self, path: str) -> str:
        """The content of a text file; bytes that are no UTF-8 are kept as surrogates."""
        return self.read_bytes(path).decode("utf-8", "surrogateescape")

    def readlink(self, path: str) -> str:
        return str(self._ask("readlink", (path,), lambda: os.readlink(path)))

    def realpath(self, path: str) -> str:
        return str(self._ask("realpath", (path,), lambda: os.path.realpath(path, strict=True)))

    def listdir(self, path: str) -> list[str]:
        return list(self._ask("listdir", (path,), lambda: sorted(os.listdir(path))))

    def exists(self, path: str) -> bool:
        return bool(self._ask("exists", (path,), lambda: os.path.lexists(path)))

    def access(self, path: str, mode: int) -> bool:
        """Whether this user may do `mode` (os.R_OK, os.W_OK) with a path."""
        return bool(self._ask("access", (path, mode), lambda: os.access(path, mode)))

    def environment(self, name: str) -> str | None:
        """An environment variable, or None."""
        found = self._ask("environment", (name,), lambda: os.environ.get(name))
        return None if found is None else str(found)

    def uname(self) -> tuple[str, str, str, str, str]:
        """sysname, nodename, release, version, machine."""
        a, b, c, d, e = self._ask("uname", (), lambda: list(os.uname()))
        return str(a), str(b), str(c), str(d), str(e)

    def effective_uid(self) -> int:
        return int(self._ask("euid", (), os.geteuid))

    def statfs_type(self, path: str) -> int | None:
        """The magic number of the file system at a path (statfs f_type), or None where it cannot be had."""
        found = self._ask("statfs", (path,), lambda: cachestat.statfs_type(path))
        return None if found is None else int(found)

    def statx(self, fd: int, label: str) -> Statx:
        """statx of an open descriptor."""
        found = self._ask("statx", (label,), lambda: list(statx(fd)))
        fields: Any = (tuple(x) if isinstance(x, list) else x for x in found)
        return Statx(*fields)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A descriptor of a file for reading, without waiting for a pipe's other end; in a capture
        -1, which stands for it."""
        fd = -1

        def live() -> bool:
            nonlocal fd
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            return True

        self._ask("open", (path,), live)
        try:
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)

    def mode(self, path: str) -> int:
        """st_mode of what a path leads to."""
        return int(self._ask("mode", (path,), lambda: os.stat(path).st_mode))

    def open_direct(self, fd: int, label: str) -> int:
        """Open the descriptor's file again with O_DIRECT and close it: 0, or the errno."""

        def live() -> int:
            mode = os.O_RDONLY if os.access(f"/proc/self/fd/{fd}", os.R_OK) else os.O_WRONLY
            try:
                os.close(os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC | os.O_DIRECT))
            except OSError as e:
                return e.errno or errno.EIO
            return 0

        return int(self._ask("open_direct", (label,), live))

    def cached_nbytes(self, fd: int, label: str, file_offset: int, nbytes: int) -> int:
        """Bytes of a range in the page cache, by cachestat(2)."""
        key = (label, file_offset, nbytes)
        return int(self._ask("cachestat", key, lambda: cachestat.cached_nbytes(fd, file_offset, nbytes)))

    def probe(self, name: str, key: tuple[Any, ...], live: Callable[[], Any]) -> Any:
        """Any other question, such as whether a library loads; `live` must give something JSON-able."""
        return self._ask(f"probe:{name}", key, live)


class LiveSource(Source):
    """This machine, now."""

    def __init__(self) -> None:
        self._mounts = _MountTable()
        self.file_systems: dict[tuple[int, tuple[int, int]], tuple[bytes, FileSystemFacts]] = {}
        """By mount id and device, with the mount table that they were learnt from: another
        table makes them worthless."""

    def read_bytes(self, path: str, limit: int = 1 << 24) -> bytes:
        return self._mounts.read() if path == MOUNTINFO else super().read_bytes(path, limit)

    def forget(self) -> bool:
        """The mount table is opened anew: after setns or unshare the open one is
        still the old namespace's."""
        self._mounts.close()
        return True

    def _ask(self, question: str, key: tuple[Any, ...], live: Callable[[], Any]) -> Any:
        return live()


class _MountTable:
    """mountinfo, read again only when it has changed: the kernel answers poll() on it
    with POLLERR then (proc(5)).

    Producing it costs 60 us and more, which every open would pay. Two changes go unannounced: another mount
    namespace for this process (a file's mount id is then missing here: `LiveSource.forget`), and superblock
    options set through fsconfig(CMD_RECONFIGURE) or from another namespace, so a kept table may be late
    about "ro" of a file system.
    """

    _owner = _fd = -1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._identity = (0, 0)
        self._text = b""
        _tables.add(self)

    def after_fork_in_child(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def read(self) -> bytes:
        with self._lock:
            if self._owner != os.getpid() or not self._ours():  # "self" is another process after a fork
                self._close()
                self._fd = os.open(MOUNTINFO, os.O_RDONLY | os.O_CLOEXEC)
                self._identity = _identity(self._fd)
                self._owner = os.getpid()
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLPRI)
                self._text = self._reread()
            elif self._poll.poll(0):
                self._text = self._reread()
            return self._text

    def close(self) -> None:
        with self._lock:
            self._close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # then names of this module are gone, and every descriptor soon
            self._close()

    def _close(self) -> None:
        if self._ours():
            with contextlib.suppress(OSError):  # the descriptor is gone all the same
                os.close(self._fd)
        self._fd = self._owner = -1

    def _ours(self) -> bool:
        """A daemon closes every descriptor and opens its own: the number may be another file's by now."""
        try:
            return self._fd >= 0 and _identity(self._fd) == self._identity
        except OSError:
            return False

    def _reread(self) -> bytes:
        pieces, position = [], 0
        while piece := os.pread(self._fd, 1 << 16, position):
            pieces.append(piece)
            position += len(piece)
        return b"".join(pieces)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


_tables: weakref.WeakSet[_MountTable] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for table in list(_tables):
        table.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class RecordingSource(Source):
    """Asks another source and keeps every answer, errors included, for `CapturedSource`."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self.answers: dict[str, dict[str, Any]] = {}

    def _ask(self, question: str, key: tuple[Any, ...], live: Callable[[], Any]) -> Any:
        try:
            value = self._inner._ask(question, key, live)
        except OSError as e:
            self.answers[_key(question, key)] = {"errno": e.errno or errno.EIO}
            raise
        self.answers[_key(question, key)] = {"value": value}
        return value

    def to_json(self) -> str:
        """The capture as text."""
        return _capture_text(self.answers)


_UNASKED: dict[str, Any] = {
    "environment": None,
    "exists": False,
    "access": False,
    "euid": 0,
    "uname": ["Linux", "", "", "", ""],
}
"""What a capture says to a question it was not asked; to all others, ENOENT."""


class CapturedSource(Source):
    """The answers of a capture; a question that was never asked is ENOENT, as a file that is not there."""

    def __init__(self, answers: dict[str, dict[str, Any]]) -> None:
        self._answers = answers

    @classmethod
    def from_json(cls, text: str) -> CapturedSource:
        """Raises ValueError for anything that is no capture."""
        try:
            data = json.loads(text)
        except RecursionError as e:
            raise ValueError("no capture: it is nested too deeply") from e
        if (
            not isinstance(data, dict)
            or data.get("schema") != SCHEMA
            or not isinstance(data.get("answers"), dict)
        ):
            raise ValueError(f"no capture of schema {SCHEMA}")
        for key, answer in data["answers"].items():
            if malformed(key, answer):
                raise ValueError(f"the answer to {key!r:.200} is malformed")
        return cls(data["answers"])

    def to_json(self) -> str:
        """The capture as text."""
        return _capture_text(self._answers)

    def _ask(self, question: str, key: tuple[Any, ...], live: Callable[[], Any]) -> Any:
        answer = self._answers.get(_key(question, key))
        if answer is None:
            if question in _UNASKED:
                return _UNASKED[question]
            answer = {"errno": errno.ENOENT}
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), *key[:1])
        return answer["value"]


def _key(question: str, key: tuple[Any, ...]) -> str:
    return json.dumps([question, *key])


def _capture_text(answers: dict[str, dict[str, Any]]) -> str:
    return json.dumps({"schema": SCHEMA, "answers": answers}, indent=1, sort_keys=True)
