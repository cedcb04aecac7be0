"""The receiving end of `nobounce stats -- PROGRAM`: takes over the counters of each process
that the program becomes.

The socket's name is no secret (/proc/net/unix shows it), so a process proves that it belongs to the
program by a secret that it has inherited in its environment, which the kernel shows to the same user
and to root alone. Environments outlive exec and subprocess.Popen's closing of descriptors; an
inherited descriptor would not.

Everybody may connect, and may then say nothing. So no peer is waited for: one thread serves all, each has a
deadline, and where too many wait, the user with most of them loses the oldest.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, deque
from typing import NamedTuple

from nobounce.errors import FileError, FormatError
from nobounce.observe import export
from nobounce.observe.attach import Attached, has_ended
from nobounce.observe.snapshot import Stats

PATIENCE = 5.0
"""Seconds that a peer has for its one message. An honest one has sent it before it is accepted,
or within a millisecond."""
MOST_WAITING = 64
BACKLOG = 1024
MOST_OPEN = 256
"""Open descriptors of counters above which those of ended processes are closed."""
_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK


class _Peer(NamedTuple):
    socket: socket.socket
    pid: int
    uid: int
    until: float


class Collector:
    """Waits for the processes of one program to hand over their counters. `address`
    goes into their environment.

    Raises FileError where no socket can be made.
    """

    def __init__(self) -> None:
        name = f"{export.NAME}-{os.getpid():x}-{secrets.token_hex(8)}"
        secret = secrets.token_hex(16)
        self.address = f"{name}:{secret}"
        self._secret = secret.encode()
        self._found: list[Attached | Stats] = []
        self._missed = self._unread = 0
        self._open: deque[int] = deque()
        """Where `_found` has a descriptor."""
        room, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST_OPEN if room == resource.RLIM_INFINITY else max(1, min(MOST_OPEN, room // 4))
        self._lock = threading.Lock()
        self._waiting: dict[int, _Peer] = {}
        """By descriptor, the oldest first."""
        with contextlib.ExitStack() as made:
            try:
                self._selector = made.enter_context(selectors.DefaultSelector())
                self._listener = made.enter_context(socket.socket(socket.AF_UNIX, _STREAM))
                self._listener.bind("\0" + name)
                self._listener.listen(BACKLOG)
                self._wake, self._waker = map(made.enter_context, socket.socketpair())
            except OSError as e:
                raise FileError.from_oserror(e, f"the socket of the collector, {name}", "listen") from e
            self._made = made.pop_all()
        for s in (self._listener, self._wake):
            self._selector.register(s, selectors.EVENT_READ)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name="nobounce-collect", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            # No further thread may be started: what waits in the queue is taken in at the end.
            self._thread = None

    def _serve(self) -> None:
        stop = False
        while not stop:
            oldest = next(iter(self._waiting.values()), None)
            ready = self._selector.select(
                None if oldest is None else max(0.0, oldest.until - time.monotonic())
            )
            named = [key.fileobj for key, _ in ready]
            stop = self._wake in named
            if stop or self._listener in named:
                for _ in range(BACKLOG):
                    if not self._welcome():
                        break
            for key, _ in ready:
                peer = self._waiting.get(key.fd)
                if peer is not None and self._heard(peer):
                    self._drop(peer)
            now = time.monotonic()
            for peer in [p for p in self._waiting.values() if stop or p.until <= now]:
                self._drop(peer)

    def _welcome(self) -> bool:
        """Take the next connection in; False where there is none, or none can be taken now."""
        try:
            s, _ = self._listener.accept()
            peer = _Peer(s, *export.peer_of(s), time.monotonic() + PATIENCE)
        except BlockingIOError:
            return False
        except OSError:  # no descriptor left
            if self._waiting:
                self._drop(next(iter(self._waiting.values())))
            else:
                time.sleep(0.01)
            return False
        if self._heard(peer):
            s.close()
            return True
        self._waiting[s.fileno()] = peer
        self._selector.register(s, selectors.EVENT_READ)
        if len(self._waiting) > MOST_WAITING:
            crowd = Counter(p.uid for p in self._waiting.values()).most_common(1)[0][0]
            self._drop(next(p for p in self._waiting.values() if p.uid == crowd))
        return True

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        del self._waiting[peer.socket.fileno()]
        peer.socket.close()

    def _heard(self, peer: _Peer) -> bool:
        """Whether the peer is done with: its one message decides. False while it has said nothing."""
        try:
            said, fd = _receive(peer.socket)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not hmac.compare_digest(said, self._secret):
            if fd >= 0:
                os.close(fd)
            return True
        with self._lock:
            try:
                if fd < 0:
                    raise FormatError("no descriptor came, or none was left for it")
                self._found.append(Attached(fd, peer.pid))
            except FormatError:
                self._missed += 1
            else:
                self._open.append(len(self._found) - 1)
                if len(self._open) > self._most:
                    self._finish_ended()
        return True

    def _finish_ended(self) -> None:
        """Close the descriptors of two processes, if they have ended, after a last look. The lock is held.

        No more at once: a look takes a millisecond or two, and meanwhile the queue of connections
        fills where it is attacked.
        """
        for i in (self._open.popleft(), self._open.popleft()):
            one = self._found[i]
            if isinstance(one, Attached):
                if has_ended(one.pid):
                    with contextlib.suppress(FormatError):
                        self._found[i] = one.read()
                        one.close()
                        continue
                self._open.append(i)

    def read(self) -> list[Stats]:
        """The counters of every process so far, in the order of their arrival."""
        parts, unread = [], 0
        for i in range(len(self._found)):
            with self._lock:  # for one at a time: who arrives meanwhile is not to wait for all
                one = self._found[i]
                try:
                    parts.append(one.read() if isinstance(one, Attached) else one)
                except FormatError:
                    unread += 1
        self._unread = unread
        return parts

    @property
    def missed(self) -> int:
        """How many processes proved that they belong to the program, but `read` could not give their
        counters: those of another version of nobounce, or no descriptor was left for them."""
        return self._missed + self._unread

    def finish(self) -> None:
        """Take in what has been handed over by now, then stop listening; `read` goes on."""
        self._waker.send(b"x")
        if self._thread is None:
            self._serve()
        else:
            self._thread.join(PATIENCE)
        self._listener.close()

    def close(self) -> None:
        """Finish, and let go of every descriptor."""
        if self._listener.fileno() >= 0:
            self.finish()
        self._made.close()
        for one in self._found:
            if isinstance(one, Attached):
                one.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(s: socket.socket) -> tuple[bytes, int]:
    """What was said, and the descriptor that came with it or -1. The kernel closes those
    for which there is no room."""
    said, ancillary, _, _ = s.recvmsg(64, socket.CMSG_LEN(4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return said, fds[0] if fds else -1
