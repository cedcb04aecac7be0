"""Reading another process's counters: get the descriptor, look at it with distrust, and read on even when the process is gone.

Nothing is mapped: `pread` on a memfd cannot fault, whatever its owner does to it. What is read is judged by `snapshot.parse`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import socket
import stat
import threading
import time

from nobounce.errors import ArgumentError, FileError, FileMissingError, FilePermissionError, FormatError
from nobounce.observe import export
from nobounce.observe.layout import NBYTES, WORD, Header
from nobounce.observe.snapshot import Stats, parse

TRIES = 64
PATIENCE = 5.0


class Attached:
    """One process's counters. `read` works as long as this is open, whether the process lives or not."""

    def __init__(self, fd: int, pid: int) -> None:
        """Takes the descriptor over. Raises FormatError for one that is no sealed block of ours."""
        try:
            _check(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self.pid = fd, pid

    def read(self) -> Stats:
        """The counters now. Raises FormatError where the block makes no sense."""
        block = b""
        for attempt in range(TRIES):
            before = self._sequence()
            block = os.pread(self._fd, NBYTES, 0)
            if before % 2 == 0 and self._sequence() == before:
                return parse(block, pid=self.pid)
            if attempt > 8:
                time.sleep(0.001)
        return parse(block, pid=self.pid, torn=True)

    def _sequence(self) -> int:
        return int.from_bytes(os.pread(self._fd, WORD, Header.SEQUENCE * WORD), "little")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(pid: int, *, wait: float = 0.0) -> Attached:
    """Attach to a running process, trying for `wait` seconds while it has no counters yet (F-10).

    Raises ArgumentError for a number that is no process id, FileMissingError for a process that is not there,
    FilePermissionError for another user's, FileError for one without counters, FormatError for what is not ours.
    """
    if pid <= 0:
        raise ArgumentError(f"{pid} is no process id")
    until = time.monotonic() + wait
    pause = 0.001
    while True:
        try:
            return _connect(pid)
        except ConnectionRefusedError:
            _check_alive(pid)
            if time.monotonic() >= until:
                raise FileError(
                    f"process {pid} has no statistics: it has not used nobounce yet, or HIPFILE_STATS_LEVEL is 0 there",
                    errno.ECONNREFUSED,
                    f"/proc/{pid}",
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _check_alive(pid: int) -> None:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        raise FileMissingError(f"there is no process {pid}", errno.ESRCH, f"/proc/{pid}") from None
    if os.geteuid() not in (0, owner):
        raise FilePermissionError(
            f"process {pid} belongs to another user: only that user or root can see its statistics",
            errno.EACCES,
            f"/proc/{pid}",
        )


def _connect(pid: int) -> Attached:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(PATIENCE)
        s.connect(export.address_of(pid))
        owner, uid = export.peer_of(s)
        # The name is anybody's to take: believe it only of the process itself, and of a user who may do this to us.
        if owner != pid or (uid not in (os.geteuid(), 0) and os.geteuid() != 0):
            raise FilePermissionError(
                f"the statistics of process {pid} are offered by process {owner} of user {uid}: not believed, or not yours",
                errno.EACCES,
                f"/proc/{pid}",
            )
        fd = receive(s)
    if fd is None:
        raise FilePermissionError(
            f"process {pid} does not show its statistics to this user", errno.EACCES, f"/proc/{pid}"
        )
    return Attached(fd, pid)


def receive(s: socket.socket) -> int | None:
    """The descriptor that the other end sends, or None. More than one are closed: nobody honest sends two."""
    try:
        _, fds, _, _ = socket.recv_fds(s, 1, 4)
    except (TimeoutError, ConnectionError):
        return None
    for extra in fds[1:]:
        os.close(extra)
    if not fds:
        return None
    os.set_inheritable(fds[0], False)
    return fds[0]


def _check(fd: int) -> None:
    wanted = fcntl.F_SEAL_SHRINK | export.F_SEAL_FUTURE_WRITE
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError as e:
        raise FormatError(f"what was handed over is no sealed memory: {os.strerror(e.errno or 0)}") from e
    if not stat.S_ISREG(status.st_mode) or seals & wanted != wanted:
        raise FormatError("the statistics block is not sealed against changes of its size and new writers")
    if status.st_size != NBYTES:
        raise FormatError(
            f"the statistics block has {status.st_size} bytes, not {NBYTES}: another version of nobounce?"
        )


class Collector:
    """Waits for processes that `nobounce stats` has started to hand over their counters."""

    def __init__(self) -> None:
        self.name = f"{export.NAME}-{os.getpid():x}-{secrets.token_hex(8)}"
        self.attached: list[Attached] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="nobounce-collect", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._wake], [], [])
            if self._listener not in ready:
                return
            try:
                peer, _ = self._listener.accept()
            except OSError:
                continue
            with contextlib.suppress(OSError, FormatError), peer:
                peer.settimeout(PATIENCE)
                pid, uid = export.peer_of(peer)
                if uid not in (os.geteuid(), 0) and os.geteuid() != 0:
                    continue
                fd = receive(peer)
                if fd is not None:
                    attached = Attached(fd, pid)
                    with self._lock:
                        self.attached.append(attached)
                peer.send(b"K")

    def read(self) -> list[Stats]:
        """The counters of every process so far, in the order of their arrival. A block that makes no sense is left out."""
        with self._lock:
            attached = list(self.attached)
        found = []
        for one in attached:
            with contextlib.suppress(FormatError):
                found.append(one.read())
        return found

    def close(self) -> None:
        """Take in who is waiting already, then stop."""
        self._waker.send(b"x")
        self._thread.join(PATIENCE)
        self._listener.close()
        self._wake.close()
        self._waker.close()
        for one in self.attached:
            one.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
