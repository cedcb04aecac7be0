"""Hands the counters to whoever may see them, as hipFile does (F-9): shared memory behind a descriptor, over an abstract socket.

The block is a memfd sealed against shrinking, growing and new writers, so that a reader cannot be hit by SIGBUS and cannot
change what it reads; whoever holds the descriptor can read on after the process is gone. The socket's name is no secret and
has no file permissions, so the peer's credentials decide: only the same user, or root, is served.

Under `nobounce stats` a process also hands its descriptor to the collector at once, so that nothing is missed however soon
it ends, or is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
import threading
import time

from nobounce.observe.layout import NBYTES

_log = logging.getLogger("nobounce")

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1; Python does not name it."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
NAME = "NOBOUNCESTATS"
_CREDENTIALS = struct.Struct("3i")

_server: Server | None = None


def address_of(pid: int) -> str:
    """The abstract socket of a process: the name, and the process id as 8 hexadecimal digits."""
    return f"\0{NAME}{pid:08x}"


def make_memory() -> tuple[mmap.mmap, Server]:
    """The shared block and the server that will hand it out.

    A kernel that lacks memfd or its seals gives private memory: this process counts all the same, nobody else can look.
    """
    global _server
    fd = -1
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NBYTES)
        memory = mmap.mmap(fd, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, AttributeError) as e:  # the second where the interpreter was built for an old C library
        _log.warning("statistics are visible in this process alone: %s", e)
        if fd >= 0:
            os.close(fd)
        fd, memory = -1, mmap.mmap(-1, NBYTES)
    _server = Server(fd)
    return memory, _server


def stop() -> None:
    """Close this process's socket and descriptor."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


class Server:
    """Listens on the abstract socket and gives the descriptor to each peer that may have it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self, collector: str = "") -> None:
        """Listen, and introduce this process to the collector named, if one is. Never raises: statistics are no reason to fail."""
        if self._fd < 0:
            return
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(address_of(os.getpid()))
            self._socket.listen(16)
        except OSError as e:
            _log.warning("nobody can attach to the statistics of this process: %s", e)
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if collector:
            self._introduce(collector)
        if self._socket is not None:
            self._thread = threading.Thread(
                target=self._serve, args=(self._socket,), name="nobounce-stats", daemon=True
            )
            self._thread.start()

    def _introduce(self, collector: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
                s.settimeout(5)
                s.connect("\0" + collector)
                if may_see(s):
                    socket.send_fds(s, [b"N"], [self._fd])
                    s.recv(1)
        except OSError as e:
            _log.warning("the collector of `nobounce stats` cannot be reached: %s", e)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError as e:
                if self._socket is not listener:
                    return
                _log.debug("accept: %s", e)
                time.sleep(0.1)  # out of descriptors, say: the next one may go through
                continue
            with contextlib.suppress(OSError), peer:
                peer.settimeout(5)
                if may_see(peer):
                    socket.send_fds(peer, [b"N"], [self._fd])

    def close(self) -> None:
        """Stop listening; readers that hold the descriptor keep it."""
        listener, self._socket = self._socket, None
        if listener is not None:
            if self._pid == os.getpid():  # in a forked child it is still the parent's socket
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which a mere close does not
                if self._thread is not None:
                    self._thread.join(5)
            listener.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def peer_of(peer: socket.socket) -> tuple[int, int]:
    """(process id, user id) at the other end, as the kernel knows them. Raises OSError."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def may_see(peer: socket.socket) -> bool:
    """Whether the other end is the same user or root."""
    return peer_of(peer)[1] in (os.geteuid(), 0)
