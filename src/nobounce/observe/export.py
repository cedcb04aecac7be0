"""Lets others see the counters: a sealed memfd, open in this process under a name that a reader
looks for in /proc/PID/fd.

The kernel decides who may open it there, as it does for tracing (ptrace(2), PTRACE_MODE_READ): the same user,
and root. So nothing listens, no thread runs and no name can be taken by another user or by another container.
hipFile (F-9) hands the descriptor out over an abstract socket instead, whose name belongs to the process that
binds it first in the network namespace. The seals keep the block's size and forbid new writers: a reader
cannot be hit by SIGBUS and cannot change what it reads, and it reads on after the process is gone.

Under `nobounce stats` a process also hands its descriptor to the collector at once, so that nothing is missed
however soon it ends, or is killed.
"""

from __future__ import annotations

import array
import fcntl
import logging
import mmap
import os
import struct
from typing import TYPE_CHECKING

from nobounce.observe.layout import NBYTES

if TYPE_CHECKING or "NOBOUNCE_STATS_COLLECTOR" in os.environ:
    # Now, where it will be needed: a program that gives up root may not be able to read it later.
    import socket

_log = logging.getLogger("nobounce")

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1; Python does not name it."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
NAME = "NOBOUNCESTATS"
COLLECTOR_PATIENCE = 1
"""Seconds that a process waits for room in the collector's queue of connections; it is
full only under an attack."""
_CREDENTIALS = struct.Struct("iII")

_fd = -1


def make_memory() -> tuple[mmap.mmap, int]:
    """The shared block and its descriptor, which stays open until `stop`.

    A kernel that lacks memfd or its seals gives private memory and -1: this process
    counts, and no other can look.
    """
    global _fd
    fd = -1
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NBYTES)
        memory = mmap.mmap(fd, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, AttributeError) as e:  # the second where the interpreter was built for an old C library
        _log.info("statistics are visible in this process alone: %s", e)
        if fd >= 0:
            os.close(fd)
        fd, memory = -1, mmap.mmap(-1, NBYTES)
    _fd = fd
    return memory, fd


def stop() -> None:
    """Close the descriptor: the counters cannot be found any more. Readers that hold them keep them."""
    global _fd
    fd, _fd = _fd, -1
    if fd >= 0:
        os.close(fd)


def introduce(fd: int, collector: str) -> None:
    """Hand the descriptor to the collector at "NAME:SECRET" (NOBOUNCE_STATS_COLLECTOR).

    Never raises OSError and waits for no answer: statistics are no reason to fail, nor to be late.
    """
    import socket  # 2 ms, and few processes have a collector

    name, _, secret = collector.partition(":")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            # Python's own timeout makes the socket non-blocking, and a full queue is then
            # an error at once (EAGAIN).
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", COLLECTOR_PATIENCE, 0))
            s.connect("\0" + name)
            _, uid = peer_of(s)
            if uid not in (os.geteuid(), 0):
                raise PermissionError(1, f"it belongs to user {uid}")
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            s.sendmsg([secret.encode()], [rights], socket.MSG_NOSIGNAL)
    except (OSError, ValueError) as e:  # a ValueError is a name that is no name
        _log.info("the collector of `nobounce stats` gets no statistics of this process: %s", e)


def peer_of(peer: socket.socket) -> tuple[int, int]:
    """(process id, user id) at the other end, as the kernel knows them. Raises OSError."""
    import socket

    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
