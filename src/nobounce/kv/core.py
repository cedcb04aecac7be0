"""What the calls of a store share: its file, its table, its lock, and what is under way."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce import forked
from nobounce.buffer import as_buffer
from nobounce.errors import ArgumentError, ClosedError, named, named_errors
from nobounce.io.batch.columns import integers
from nobounce.io.file import File
from nobounce.kv import fileformat, opening
from nobounce.kv.fileformat import Key
from nobounce.kv.moves import Mover, Part, xxhash
from nobounce.kv.pins import Pins
from nobounce.kv.slots import Slots
from nobounce.kv.table import Table
from nobounce.protocols import BufferLike, IntArrayLike

if TYPE_CHECKING:
    from nobounce.route.types import Cache

    Array = np.ndarray[Any, Any]


class Core:
    """One open store. `lock` is held around every use of `table`, `slots` and `pins`, and never while bytes move."""

    def __init__(
        self,
        path: str,
        layout: Sequence[tuple[BufferLike, int]],
        capacity: int,
        identity: str,
        cache: Cache,
        *,
        readonly: bool,
        checksums: bool,
    ) -> None:
        self.path, self.closed = path, False
        self.parts = _parts(layout)
        if type(capacity) is not int or capacity < 1:
            raise ArgumentError(f"capacity={capacity!r}: give the number of blocks, at least 1")
        self.of = fileformat.geometry(capacity, tuple(p.row_nbytes for p in self.parts), identity)
        if checksums:
            xxhash()
        self.readonly, self.checksums, self.pid = readonly, checksums, os.getpid()
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.under_way = 0
        with contextlib.ExitStack() as undo:
            self.fd, own = opening.opened(self.path, self.of, writer=not readonly)
            undo.callback(os.close, self.fd)
            self.file = File.from_fd(self.fd, self.path)
            undo.callback(self.file.close)
            self.mover = Mover(self.file, self.of, self.parts, cache, sums=checksums)
            self.pins = Pins(self.fd, self.path, self.of, writer=not readonly)
            self.table = Table(self.fd, self.path, self.of, fileformat.seed_of(own))
            if readonly:
                self.table.refresh()
            else:
                self.table.claim()
            self.slots = Slots(self.table, self.pins, self.sync)
            undo.pop_all()

    def close(self) -> None:
        """Wait for what is under way, and close. Twice does nothing."""
        if self.closed:
            return
        if self.pid != os.getpid():
            self.closed = True
            os.close(self.fd)
            return
        with self.idle:
            first, self.closed = not self.closed, True
            if not first:
                return  # another thread was here since
            self.idle.wait_for(lambda: not self.under_way)
        self.mover.close()
        self.file.close()
        os.close(self.fd)

    def check_open(self) -> None:
        if self.pid != os.getpid():
            raise forked.error("store")
        if self.closed:
            raise ClosedError(f"{named(self.path)}: the store is closed")

    def ended_one(self) -> None:
        self.under_way -= 1
        self.idle.notify_all()

    def sync(self) -> None:
        with named_errors(self.path, "sync"):
            os.fdatasync(self.fd)

    def checked(self, keys: Sequence[Key], rows: IntArrayLike) -> tuple[list[bytes], Array]:
        """The digests of keys, and their rows. Raises ArgumentError."""
        if isinstance(keys, (str, bytes)):
            raise ArgumentError("keys is one key: give a sequence of them")
        digests = list(map(fileformat.digest, keys))
        where = np.atleast_1d(integers(rows, "rows"))
        if len(where) != len(digests):
            raise ArgumentError(f"{len(digests)} keys and {len(where)} rows: give one row for each key")
        most = min(p.rows for p in self.parts)
        wrong = np.flatnonzero((where < 0) | (where >= most))
        if len(wrong):
            raise ArgumentError(
                f"rows[{int(wrong[0])}] is {int(where[wrong[0]])}: the tensors have {most} rows"
            )
        return digests, where


def _parts(layout: Sequence[tuple[BufferLike, int]]) -> list[Part]:
    """The tensors of a layout. Raises ArgumentError."""
    parts = []
    for index, pair in enumerate(layout):
        try:
            memory, nbytes = pair
        except (TypeError, ValueError):
            raise ArgumentError(f"layout[{index}] is no pair of (memory, bytes of a row)") from None
        if type(nbytes) is not int or nbytes < 1:
            raise ArgumentError(f"layout[{index}] has rows of {nbytes!r} bytes: give an int, at least 1")
        part = Part(as_buffer(memory, write=False), nbytes)
        if not part.rows:
            raise ArgumentError(f"layout[{index}] has {part.view.nbytes} bytes, less than a row of {nbytes}")
        parts.append(part)
    if not parts:
        raise ArgumentError("the layout is empty: give at least one tensor")
    return parts
