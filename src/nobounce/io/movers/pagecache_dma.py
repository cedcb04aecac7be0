"""Page-cached bytes to a device without a host copy: the pages are mapped, pinned for the device
and read by it directly.

A window of the file is mapped, its pages registered with the runtime (read-only), and copied from in place.
Registering costs about 0.03 s of CPU per GiB where a relay costs 0.2. Unregistering stalls the registrations
and copies under way, so it is put off until the data is there, and done on another thread; until then the
pages stay pinned, which `budget` bounds for the process. The CPU never touches the mapping: a file that
shrinks under it cannot raise SIGBUS (case C68), registering it fails.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import NamedTuple

from nobounce.clock import THREADS
from nobounce.errors import DeviceError
from nobounce.facts.machine import this_machine
from nobounce.io import hooks
from nobounce.io.movers.fallback import Relay
from nobounce.io.quiet import quiet_of
from nobounce.io.target import Chunk, Piece, Target
from nobounce.runtimes import libc
from nobounce.runtimes.base import Runtime
from nobounce.runtimes.powers import needed

IDLE_SECONDS = 0.5
"""How long after the last pinning pages are given back."""

MOST_PINNED = 16 << 30
"""Bytes of page cache that may be pinned at once, and no more than a quarter of the memory."""

_lock = threading.Lock()
_pinned = 0
_refused: set[str] = set()
"""Runtimes that would not register file pages."""


def budget() -> int:
    """Bytes of page cache that this process may pin at once."""
    return min(MOST_PINNED, this_machine().own_memory_nbytes // 4)


def _reserve(nbytes: int) -> bool:
    global _pinned
    with _lock:
        if _pinned + nbytes > budget():
            return False
        _pinned += nbytes
        return True


def _release(nbytes: int) -> None:
    global _pinned
    with _lock:
        _pinned -= nbytes


class PageCacheDma:
    """One worker's share: windows of the page cache, and the worker's relay where a window cannot be had."""

    def __init__(self, target: Target, relay: Relay) -> None:
        self._target, self._relay = target, relay
        self._stream: int | None = None
        self._held: list[tuple[int, int]] = []
        self._pieces: list[Piece] = []
        self._began = 0.0

    def move(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        """Begin the copy of a window; its piece comes out of `flush`. Raises as Relay does."""
        t = self._target
        first = chunk.file_offset // libc.PAGE * libc.PAGE
        nbytes = min(chunk.nbytes, max(0, self._size() - chunk.file_offset))
        address = (
            self._window(first, libc.round_up(chunk.file_offset + nbytes, libc.PAGE) - first) if nbytes else 0
        )
        if not address:
            return self._relay.move(chunk)
        if self._stream is None:
            # The relay's own: whoever has a stream, and maybe slots, waits for no other one.
            self._stream = self._relay.ready()[1]
            self._began = t.runtime.scheduler.now() if hooks.watchers else 0.0
        source = address + chunk.file_offset - first
        t.runtime.copy_async(t.address + chunk.buffer_offset, source, nbytes, self._stream)
        self._pieces.append(
            Piece("fallback", chunk.file_offset, chunk.buffer_offset, nbytes, chunk.reason, False)
        )
        return [], chunk.file_offset + nbytes if nbytes < chunk.nbytes else None

    def _size(self) -> int:
        return os.fstat(self._target.buffered_fd).st_size

    def _window(self, file_offset: int, nbytes: int) -> int:
        """The address of pinned pages, or 0."""
        runtime = self._target.runtime
        if runtime.name in _refused:
            return 0
        while not _reserve(nbytes):
            if not _keeper.make_room():
                return 0
        quiet = quiet_of(runtime)
        try:
            address = libc.map_file(self._target.buffered_fd, file_offset, nbytes)
        except OSError:
            _release(nbytes)
            return 0
        try:
            registration = runtime.host_registration
            if registration is None or quiet is None or not quiet.try_call():
                raise OSError(errno.EBUSY, "a stream is held at a gate")
            try:
                registration.register_host(address, nbytes, read_only=True)
            finally:
                quiet.called()
        except (OSError, DeviceError, MemoryError) as e:
            libc.unmap(address, nbytes)
            _release(nbytes)
            if isinstance(e, DeviceError) and file_offset + nbytes <= self._size() + libc.PAGE:
                _refused.add(runtime.name)  # not because the file has become shorter
            return 0
        self._held.append((address, nbytes))
        _keeper.busy()
        return address

    def flush(self) -> list[Piece]:
        """Wait for every copy under way, before the relay is flushed; returns their pieces.
        `GiveBack` gives the pages back."""
        if self._stream is not None:
            try:
                self._target.runtime.stream_sync(self._stream)
                if hooks.watchers and self._pieces:
                    t, nbytes = self._target, sum(p.nbytes for p in self._pieces)
                    hooks.copied(
                        t.device_name, self._stream, t.op, nbytes, self._began, t.runtime.scheduler.now()
                    )
            finally:
                self._stream = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def leftovers(self) -> GiveBack | None:
        """The work of unpinning what was held, for another thread; None where there is nothing."""
        held, self._held = self._held, []
        return GiveBack(self._target.runtime, held) if held else None


class GiveBack:
    """Windows whose copies are done, on their way to the keeper; a unit of work for the engine's pool."""

    tickets = 1

    def __init__(self, runtime: Runtime, held: list[tuple[int, int]]) -> None:
        self._runtime, self._held = runtime, held

    def work(self) -> None:
        held, self._held = self._held, []
        if self._runtime.scheduler is THREADS:
            _keeper.keep([Window(self._runtime, *h) for h in held])
            return
        for h in held:
            Window(self._runtime, *h).give_back()


class Window(NamedTuple):
    """Pinned pages of a file."""

    runtime: Runtime
    address: int
    nbytes: int

    def give_back(self, *, wait: bool = True) -> bool:
        """Unregister and unmap; whether that was done. Without `wait` not while a
        stream is held at a gate."""
        quiet = quiet_of(self.runtime)
        if quiet is not None:
            if wait:
                quiet.wait_to_call()
            elif not quiet.try_call():
                return False
            try:
                needed(
                    self.runtime.host_registration, self.runtime.name, "registered memory"
                ).unregister_host(self.address)
            except DeviceError:
                # Still pinned: unmapped, it would leave the device reading what is not
                # ours, so it stays mapped.
                return True
            finally:
                quiet.called()
        libc.unmap(self.address, self.nbytes)
        _release(self.nbytes)
        return True


class Keeper:
    """Holds pinned windows until nothing has been pinned for `IDLE_SECONDS`, and gives them
    back on a thread of its own.

    Unregistering stalls registering, so doing it while the next file is being read would cost that a third of
    its speed. Whoever finds the budget spent takes the oldest ones back at once.
    """

    def __init__(self) -> None:
        self._changed = THREADS.condition()
        self._held: deque[Window] = deque()
        self._busy_at = 0.0
        self._serving = False

    def keep(self, windows: list[Window]) -> None:
        with self._changed.mutex:
            self._held += windows
            self._busy_at = THREADS.now()
            if self._serving or not self._held:
                return
            self._serving = True
        try:
            THREADS.spawn(self._serve, name="nobounce-unpin")
        except BaseException as e:
            with self._changed.mutex:
                self._serving = False
            if not isinstance(e, RuntimeError | MemoryError):
                raise
            # No thread can be started: now, then. What a closed gate keeps pinned waits for the next
            # who keeps or makes room.
            while self.make_room():
                pass

    def busy(self) -> None:
        """Pages are being pinned now."""
        self._busy_at = THREADS.now()

    def make_room(self) -> bool:
        """Give the oldest window back now; False where there is none, or may not be now."""
        with self._changed.mutex:
            if not self._held:
                return False
            oldest = self._held.popleft()
        if oldest.give_back(wait=False):
            return True
        with self._changed.mutex:
            self._held.appendleft(oldest)
        return False

    def _serve(self) -> None:
        while True:
            with self._changed.mutex:
                left = self._busy_at + IDLE_SECONDS - THREADS.now()
                if left > 0:
                    self._changed.wait(left)
                    continue
                if not self._held:
                    self._serving = False
                    return
                oldest = self._held.popleft()
            oldest.give_back()


_keeper = Keeper()


def _forget() -> None:
    """In a forked child the pages are the parent's to give back."""
    global _lock, _pinned, _keeper
    _lock, _pinned, _keeper = threading.Lock(), 0, Keeper()


os.register_at_fork(after_in_child=_forget)
