"""Standard streams as a command finds them: closed, full, no longer read, or in an
encoding that lacks letters.

A write to them never raises, so that no print stops the work half-way; what is lost is asked for at the end.
EPIPE is no loss: who closes a pipe has read what he wanted. The descriptors 0 to 2 are taken before any file
is opened: a file that got the number of a closed stream would receive what is meant for the stream.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO, cast

from nobounce.errors import errno_name


class _Descriptor(io.RawIOBase):
    """A descriptor to write to. The first error is kept; from then on what is written is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        nbytes = len(left)
        while len(left) and self.error is None:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another program made the terminal or the pipe non-blocking
                select.select([], [self._fd], [])
            except OSError as e:
                self.error = e
        return nbytes


class _Text(io.TextIOWrapper):
    """A standard stream for writing; letters that its encoding lacks are written as escapes."""

    def __init__(self, fd: int, before: TextIO | None) -> None:
        self.descriptor = _Descriptor(fd)
        direct = bool(getattr(before, "write_through", False))  # python -u
        super().__init__(
            io.BufferedWriter(self.descriptor) if not direct else cast("Any", self.descriptor),
            encoding=getattr(before, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=fd == 2 or bool(getattr(before, "line_buffering", False)),
            write_through=direct,
        )


def prepare() -> None:
    """Take the numbers of closed standard descriptors and put our streams in place of Python's."""
    # Opened the wrong way round: each use of such a descriptor still fails with EBADF.
    for fd, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(fd)
        except OSError as e:
            if e.errno != errno.EBADF:
                continue
            with contextlib.suppress(OSError):
                os.open(os.devnull, flags)
    sys.stdout, sys.stderr = _Text(1, sys.stdout), _Text(2, sys.stderr)


def lost(stream: TextIO) -> str:
    """Why something written to the stream is lost, once; "" where nothing is, and after a broken pipe."""
    if not isinstance(stream, _Text):
        return ""
    stream.flush()
    error = stream.descriptor.error
    if error is None or error.errno == errno.EPIPE or error.errno is None:
        return ""
    stream.descriptor.error = BrokenPipeError(errno.EPIPE, "told")
    return f"{os.strerror(error.errno)} ({errno_name(error.errno)})"


def can_show(text: str) -> bool:
    """Whether the encoding of stdout has every letter of `text`."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True
