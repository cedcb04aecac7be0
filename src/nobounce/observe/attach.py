"""Reading another process's counters: get the descriptor, look at it with distrust, and read on even
when the process is gone.

Nothing is mapped: `pread` on a memfd cannot fault, whatever its owner does to it. What is read is
judged by `snapshot.parse`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from nobounce.errors import ArgumentError, FileError, FileMissingError, FilePermissionError, FormatError
from nobounce.observe import export
from nobounce.observe.layout import NBYTES, WORD, Header
from nobounce.observe.snapshot import Stats, parse

TRIES = 64


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
            before = _word(self._fd, Header.SEQUENCE)
            block = os.pread(self._fd, NBYTES, 0)
            if before % 2 == 0 and _word(self._fd, Header.SEQUENCE) == before:
                return parse(block, pid=self.pid)
            if attempt > 8:
                time.sleep(0.001)
        return parse(block, pid=self.pid, torn=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(pid: int, *, wait: float = 0.0) -> Attached:
    """Attach to a running process, or a stopped one, trying for `wait` seconds while it
    has no counters yet (F-10).

    Raises ArgumentError for a number that is no process id, FileMissingError for a process that is not there,
    FilePermissionError for one that the kernel does not let this user look into, FileError for one without
    counters, FormatError for what is not ours.
    """
    if pid <= 0:
        raise ArgumentError(f"{pid} is no process id")
    until = time.monotonic() + wait
    pause = 0.001
    while True:
        try:
            fd = _find(pid)
        except OSError as e:
            raise _why_not(pid, e) from e
        if fd is not None:
            return Attached(fd, pid)
        if time.monotonic() >= until:
            raise FileError(
                f"process {pid} has no statistics: it has not used nobounce yet, or HIPFILE_STATS_LEVEL is "
                "0 there",
                errno.ENODATA,
                f"/proc/{pid}",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _find(pid: int) -> int | None:
    """A descriptor of the process's own counters, or None. Raises OSError where the kernel
    does not let this user look."""
    own = _own_number(pid)
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if not os.readlink(f"{folder}/{name}").startswith(f"/memfd:{export.NAME}"):
                continue
            # The number may mean another file by now: a pipe must not be waited for.
            fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:  # closed since it was listed
            continue
        # A child that was forked a moment ago still has its parent's.
        if _word(fd, Header.PID) == own:
            return fd
        os.close(fd)
    return None


def _own_number(pid: int) -> int:
    """What the process calls itself: in a container another number than here. Raises OSError,
    also for one that has ended."""
    fields = _status(pid)
    if fields[b"State"][0] in (b"Z", b"X"):
        raise ProcessLookupError(errno.ESRCH, "it has ended")
    return int(fields.get(b"NSpid", [b"%d" % pid])[-1])


def _status(pid: int) -> dict[bytes, list[bytes]]:
    """The words of each line of /proc/PID/status. Raises OSError."""
    with open(f"/proc/{pid}/status", "rb") as f:
        lines = [line.partition(b":") for line in f.read().splitlines()]
    return {name: words.split() for name, _, words in lines}


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped, by a signal or a debugger: it counts nothing until it is continued."""
    try:
        return _status(pid)[b"State"][0] in (b"T", b"t")
    except OSError:
        return False


def _why_not(pid: int, error: OSError) -> FileError:
    place = f"/proc/{pid}"
    if isinstance(error, FileNotFoundError) and not has_ended(pid):
        sentence = (
            f"/proc hides process {pid} from this user (hidepid): its own user or root can see its statistics"
        )
        return FilePermissionError(sentence, errno.EACCES, place)
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        return FileMissingError(f"there is no process {pid}", errno.ESRCH, place)
    if not isinstance(error, PermissionError):
        return FileError.from_oserror(error, place, "look for statistics")
    if os.geteuid() not in (0, _owner(place)):
        sentence = f"process {pid} belongs to another user: only that user or root can see its statistics"
    else:
        sentence = (
            f"the kernel does not let this user look into process {pid} (it has changed its user, has file "
            "capabilities, "
            "or lies outside this container): root outside containers can, with CAP_SYS_PTRACE"
        )
    return FilePermissionError(sentence, errno.EACCES, place)


def _owner(place: str) -> int:
    try:
        return os.stat(place).st_uid
    except OSError:  # gone since then
        return os.geteuid()


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or has ended and waits for its parent; not where it is
    only hidden from this user."""
    try:
        _own_number(pid)
        return False
    except ProcessLookupError:
        return True
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # another user's
        return False
    return False


def _word(fd: int, word: int) -> int:
    """0 where there is none."""
    try:
        return int.from_bytes(os.pread(fd, WORD, word * WORD), "little")
    except OSError:
        return 0


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
