"""Page-cached bytes to a device without a host copy: the pages are mapped, pinned for the device and read by it directly.

A window of the file is mapped, its pages registered with the runtime (read-only), and copied from in place. Registering costs
about 0.03 s of CPU per GiB where a relay costs 0.2. Unregistering stalls the registrations and copies under way, so it is put
off until the data is there, and done on another thread; until then the pages stay pinned, which `BUDGET` bounds for the
process. The CPU never touches the mapping: a file that shrinks under it cannot raise SIGBUS (case C68), registering it fails.
"""

from __future__ import annotations

import errno
import os
import threading

from nobounce.errors import DeviceError
from nobounce.io.bounce import Ring
from nobounce.io.fallback import Relay
from nobounce.io.quiet import quiet_of
from nobounce.io.target import Chunk, Piece, Target
from nobounce.runtimes import libc
from nobounce.runtimes.base import Runtime

WINDOW = 64 << 20
"""Bytes one worker maps and registers at a time."""

BUDGET = min(16 << 30, os.sysconf("SC_PHYS_PAGES") * libc.PAGE // 4)
"""Bytes of page cache that may be pinned at once."""

_lock = threading.Lock()
_pinned = 0
_refused: set[str] = set()
"""Runtimes that would not register file pages."""


def _reserve(nbytes: int) -> bool:
    global _pinned
    with _lock:
        if _pinned + nbytes > BUDGET:
            return False
        _pinned += nbytes
        return True


def _release(nbytes: int) -> None:
    global _pinned
    with _lock:
        _pinned -= nbytes


class PageCacheDma:
    """One worker's share: windows of the page cache, and the relay where a window cannot be had."""

    def __init__(self, target: Target, ring: Ring) -> None:
        self._target, self._ring = target, ring
        self._relay = Relay(target, ring)
        self._stream: int | None = None
        self._held: list[tuple[int, int]] = []
        self._pieces: list[Piece] = []

    def move(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        """Begin the copy of a window; its piece comes out of `flush`. Raises as Relay does."""
        t = self._target
        first = chunk.file_offset // libc.PAGE * libc.PAGE
        size = os.fstat(t.buffered_fd).st_size
        nbytes = min(chunk.nbytes, max(0, size - chunk.file_offset))
        address = (
            self._window(first, libc.round_up(chunk.file_offset + nbytes, libc.PAGE) - first) if nbytes else 0
        )
        if not address:
            return self._relay.move(chunk)
        if self._stream is None:
            self._stream = self._ring.copy_stream()
        source = address + chunk.file_offset - first
        t.runtime.copy_async(t.address + chunk.buffer_offset, source, nbytes, self._stream)
        self._pieces.append(
            Piece("fallback", chunk.file_offset, chunk.buffer_offset, nbytes, chunk.reason, False)
        )
        return [], chunk.file_offset + nbytes if nbytes < chunk.nbytes else None

    def _window(self, file_offset: int, nbytes: int) -> int:
        """The address of pinned pages, or 0."""
        runtime = self._target.runtime
        if runtime.name in _refused or not _reserve(nbytes):
            return 0
        try:
            address = libc.map_file(self._target.buffered_fd, file_offset, nbytes)
        except OSError:
            _release(nbytes)
            return 0
        quiet = quiet_of(runtime)
        try:
            libc.populate_for_reading(address, nbytes)
            if quiet is None or not quiet.try_call():
                raise OSError(errno.EBUSY, "a stream is held at a gate")
            try:
                runtime.register_host(address, nbytes, read_only=True)
            finally:
                quiet.called()
        except (OSError, DeviceError) as e:
            libc.unmap(address, nbytes)
            _release(nbytes)
            if isinstance(e, DeviceError):
                _refused.add(runtime.name)
            return 0
        self._held.append((address, nbytes))
        return address

    def flush(self) -> list[Piece]:
        """Wait for every copy under way; returns their pieces. The pinned pages are given back by `GiveBack`."""
        pieces = self._relay.flush()
        if self._stream is not None:
            try:
                self._target.runtime.stream_sync(self._stream)
            finally:
                self._ring.return_stream(self._stream)
                self._stream = None
        pieces += self._pieces
        self._pieces = []
        return pieces

    def leftovers(self) -> GiveBack | None:
        """The work of unpinning what was held, for another thread; None where there is nothing."""
        held, self._held = self._held, []
        return GiveBack(self._target.runtime, held) if held else None


class GiveBack:
    """Unregisters and unmaps windows; a unit of work for the engine's pool."""

    tickets = 1

    def __init__(self, runtime: Runtime, held: list[tuple[int, int]]) -> None:
        self._runtime, self._held = runtime, held

    def work(self) -> None:
        while self._held:
            address, nbytes = self._held.pop()
            try:
                self._unregister(address)
            except DeviceError:
                continue  # still pinned: unmapping it would leave the device reading nothing of ours, so it stays mapped
            libc.unmap(address, nbytes)
            _release(nbytes)

    def _unregister(self, address: int) -> None:
        quiet = quiet_of(self._runtime)
        if quiet is None:
            return
        quiet.wait_to_call()
        try:
            self._runtime.unregister_host(address)
        finally:
            quiet.called()
