"""The backend through host memory: pread and pwrite, with a relay through the bounce ring where the host
cannot reach the device's memory (on `cpu` it can: there the page cache alone is on the way).

With cache="avoid" nothing stays in the page cache: RWF_DONTCACHE (Linux 6.14) drops what the call itself
brought in and leaves what was there. Read-ahead and file systems without it leave pages all the same: the job
drops those that were not there before.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from nobounce.errors import DeviceError, NobounceError
from nobounce.facts.filtered import UNSUPPORTED
from nobounce.io import hooks
from nobounce.io.movers.bounce import Ring
from nobounce.io.target import Chunk, Piece, Target
from nobounce.route.types import MAX_RW_COUNT
from nobounce.runtimes import rawio
from nobounce.runtimes.base import CopyCalls

RWF_DONTCACHE = 0x80
FRESH_STEP = 2 << 20
"""Bytes of fresh memory that are made ready at once: a huge page, which is read into while
it is in the CPU's cache."""

_no_dontcache: set[int] = set()
"""st_dev of file systems that refused RWF_DONTCACHE."""


class Straight:
    """Fallback into memory that the host can reach."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def move(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        """Move the chunk; returns its piece and where the file ended, if it did. Raises PartialError."""
        t = self._target
        call = _into_fresh if t.strategy.fresh else _host_io
        moved, ended, error = call(t, t.address + chunk.buffer_offset, chunk.file_offset, chunk.nbytes)
        pieces = (
            [Piece("fallback", chunk.file_offset, chunk.buffer_offset, moved, chunk.reason, False)]
            if moved
            else []
        )
        if error is not None:
            raise PartialError(error, pieces, chunk.file_offset + moved) from error
        return pieces, chunk.file_offset + moved if ended else None

    def flush(self) -> list[Piece]:
        """Nothing is ever under way here."""
        return []


class Relay:
    """One worker's share of a relayed transfer. Copies to the device run behind the
    reads; `flush` waits for them."""

    def __init__(self, target: Target, ring: Ring) -> None:
        self._target, self._ring = target, ring
        self._stream: int | None = None
        self._pending: deque[tuple[tuple[int, int], Piece, float]] = deque()
        self._entered: AbstractContextManager[CopyCalls] | None = None

    def move(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        """Move the chunk; returns the pieces complete by now and where the file ended, if it did.

        A read's piece may come out of a later call or of `flush`. Raises PartialError and DeviceError.
        """
        return self._read(chunk) if self._target.op == "read" else self._write(chunk)

    def _read(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        t, ring = self._target, self._ring
        calls, stream = self.ready()
        pieces: list[Piece] = []
        done, ended = 0, False
        while done < chunk.nbytes and not ended:
            slot = self._slot(pieces)
            try:
                at = chunk.file_offset + done
                lead = at % t.relay_align if chunk.direct else 0
                n = min(ring.slot_nbytes - lead, chunk.nbytes - done)
                moved, ended, error = self._fill(slot[0], at, n, lead, direct=chunk.direct)
                if moved:
                    began = self._now()
                    calls.copy(t.address + chunk.buffer_offset + done, slot[0] + lead, moved, stream)
                    calls.record(slot[1], stream)
                    piece = Piece("fallback", at, chunk.buffer_offset + done, moved, chunk.reason, True)
                    self._pending.append((slot, piece, began))
            except BaseException:
                self._quiesce()
                ring.release(slot)
                raise
            if not moved:
                ring.release(slot)
            done += moved
            if error is not None:
                raise PartialError(error, pieces, chunk.file_offset + done) from error
        return pieces, chunk.file_offset + done if ended else None

    def _write(self, chunk: Chunk) -> tuple[list[Piece], int | None]:
        t, ring = self._target, self._ring
        calls, stream = self.ready()
        pieces: list[Piece] = []
        done = 0
        while done < chunk.nbytes:
            slot = self._slot(pieces)
            try:
                n = min(ring.slot_nbytes, chunk.nbytes - done)
                began = self._now()
                try:
                    calls.copy(slot[0], t.address + chunk.buffer_offset + done, n, stream)
                    calls.record(slot[1], stream)
                except BaseException:
                    self._quiesce()
                    raise
                self._sync(slot[1])
                if hooks.watchers:
                    self._tell(n, began)
                fd = t.relay_fd if chunk.direct else -1
                moved, _, error = _host_io(t, slot[0], chunk.file_offset + done, n, fd)
            finally:
                ring.release(slot)
            if moved:
                at = chunk.file_offset + done, chunk.buffer_offset + done
                pieces.append(Piece("fallback", *at, moved, chunk.reason, True))
            done += moved
            if error is not None:
                raise PartialError(error, pieces, chunk.file_offset + done) from error
        return pieces, None

    def _fill(
        self, slot: int, file_offset: int, nbytes: int, lead: int, *, direct: bool
    ) -> tuple[int, bool, OSError | None]:
        """Read into a slot, `lead` bytes behind its start: (bytes, end of file met, error)."""
        t = self._target
        if not direct:
            return _host_io(t, slot, file_offset, nbytes)
        ask = -(-(lead + nbytes) // t.relay_align) * t.relay_align
        moved, ended, error = _host_io(t, slot, file_offset - lead, ask, t.relay_fd)
        return max(0, min(moved - lead, nbytes)), ended and moved < lead + nbytes, error

    def ready(self) -> tuple[CopyCalls, int]:
        """The runtime's calls and a copy stream, had at the first chunk and kept until `flush`."""
        if self._stream is None:
            self._stream = self._ring.copy_stream()
        if self._entered is None:
            entered = self._target.runtime.copy_calls(self._target.device)
            self._calls = entered.__enter__()
            self._entered = entered
        return self._calls, self._stream

    def step_out(self) -> None:
        """Have the thread's own device current again, for a caller's function, until the next call."""
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _step_in(self) -> None:
        with suppress(NobounceError):  # what is under way is waited for all the same
            self.ready()

    def _slot(self, finished: list[Piece]) -> tuple[int, int]:
        most = max(1, self._target.strategy.slots)
        while True:
            if len(self._pending) < most:
                slot = self._ring.acquire(wait=not self._pending)
                if slot is not None:
                    return slot
            piece, slot = self._settle()
            finished.append(piece)
            if not self._ring.wanted:
                return slot
            self._ring.release(slot)

    def _sync(self, event: int) -> None:
        """Wait for a copy. An error is no answer to whether it still runs."""
        try:
            self._calls.sync(event)
        except BaseException:
            self._quiesce()
            raise

    def _quiesce(self) -> None:
        """Wait for copies that no event tells of: what they read or write is about to be somebody else's."""
        if self._stream is not None:
            with suppress(DeviceError):
                self._target.runtime.stream_sync(self._stream)

    def _now(self) -> float:
        return self._target.runtime.scheduler.now() if hooks.watchers else 0.0

    def _tell(self, nbytes: int, began: float) -> None:
        t = self._target
        now = t.runtime.scheduler.now()
        hooks.copied(t.device_name, self._stream or 0, t.op, nbytes, began, now)

    def _settle(self) -> tuple[Piece, tuple[int, int]]:
        """Wait for the oldest copy: its piece, and its slot, which is the caller's now."""
        slot, piece, began = self._pending.popleft()
        try:
            self._sync(slot[1])
        except BaseException:
            self._ring.release(slot)
            raise
        if hooks.watchers:
            self._tell(piece.nbytes, began)
        return piece, slot

    def flush(self) -> list[Piece]:
        """Wait for every copy under way and give slots and stream back; returns their
        pieces. Raises the first error."""
        pieces = []
        first: BaseException | None = None
        try:
            if self._pending:
                self._step_in()
            while self._pending:
                try:
                    piece, slot = self._settle()
                except BaseException as e:  # an interrupt too: the others' slots have to go back as well
                    if first is None or not isinstance(e, Exception):
                        first = e
                    continue
                self._ring.release(slot)
                pieces.append(piece)
        finally:
            self.step_out()
        if self._stream is not None:
            self._ring.return_stream(self._stream, aside=True)
            self._stream = None
        if first is not None:
            raise first
        return pieces


class Mover(Protocol):
    """One worker's fallback."""

    def move(self, chunk: Chunk) -> tuple[list[Piece], int | None]: ...

    def flush(self) -> list[Piece]: ...


def mover(target: Target) -> Mover:
    """A worker's own fallback for this target, without io_uring."""
    return Straight(target) if target.ring is None else Relay(target, target.ring)


class PartialError(Exception):
    """An OSError met at `position` of the file, after `pieces` had moved."""

    def __init__(self, error: OSError, pieces: list[Piece], position: int) -> None:
        super().__init__(str(error))
        self.error, self.pieces, self.position = error, pieces, position


def _into_fresh(t: Target, address: int, file_offset: int, nbytes: int) -> tuple[int, bool, OSError | None]:
    """`_host_io` into memory that is made ready a step ahead."""
    direct = t.runtime.direct_io()
    done, ended = 0, False
    while done < nbytes and not ended:
        ask = min(nbytes - done, FRESH_STEP - (address + done) % FRESH_STEP)
        if direct is not None:
            direct.prepare(t.device, address + done, ask)
        moved, ended, error = _host_io(t, address + done, file_offset + done, ask)
        done += moved
        if error is not None:
            return done, ended, error
    return done, ended, None


def _host_io(
    t: Target, address: int, file_offset: int, nbytes: int, direct_fd: int = -1
) -> tuple[int, bool, OSError | None]:
    """pread or pwrite until done: (bytes moved, end of file met, error). With `direct_fd` by
    O_DIRECT as far as that goes."""
    call = rawio.pread_into if t.op == "read" else rawio.pwrite_from
    fd = direct_fd if direct_fd >= 0 else t.buffered_fd
    flags = host_flags(t) if fd == t.buffered_fd else 0
    done = 0
    while done < nbytes:
        ask = min(nbytes - done, t.max_nbytes, MAX_RW_COUNT)
        try:
            moved = call(fd, address + done, ask, file_offset + done, flags, scheduler=t.runtime.scheduler)
        except OSError as e:
            if e.errno == errno.EINTR:
                continue
            if flags and e.errno in UNSUPPORTED:
                _no_dontcache.add(os.fstat(fd).st_dev)
                flags = 0
                continue
            if fd == direct_fd and e.errno == errno.EINVAL:
                fd, flags = (
                    t.buffered_fd,
                    host_flags(t),
                )  # a short transfer left an unaligned rest, or worse: O_DIRECT is done
                continue
            return done, False, e
        if moved == 0:
            if t.op == "write":
                return done, False, OSError(errno.EIO, "pwrite wrote nothing")
            return done, True, None
        done += moved
    return done, False, None


def host_flags(t: Target) -> int:
    """RWF_* for buffered reads and writes of this target."""
    if t.drop_cache and (not _no_dontcache or os.fstat(t.buffered_fd).st_dev not in _no_dontcache):
        return RWF_DONTCACHE
    return 0
