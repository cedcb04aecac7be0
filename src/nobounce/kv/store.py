"""BlockStore: blocks of many tensors under keys, in one preallocated file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from nobounce.errors import ArgumentError, named
from nobounce.kv import fileformat
from nobounce.kv.core import Core
from nobounce.kv.fileformat import Key
from nobounce.kv.getting import get, pinned
from nobounce.kv.putting import put
from nobounce.kv.result import BlockResult, BlockTransfer
from nobounce.protocols import BufferLike, IntArrayLike, SomeStream

if TYPE_CHECKING:
    from nobounce.route.types import Cache

    Array = np.ndarray[Any, Any]


class BlockStore:
    """Blocks under keys in one preallocated file, for one writer and several readers. A context manager.

        with nobounce.kv.BlockStore("kv.store", layout=[(k, 65536), (v, 65536)], capacity=4096) as store:
            store.put(["a", "b"], rows=[0, 7])         # rows 0 and 7 of k and of v
            found = store.get(["b", "c"], rows=[1, 2]).found    # [True, False]

    One key's block is a row of every tensor of the layout. A `put` that has returned survives the end of the process, kill -9 included;
    with `durable=True` a power cut. Where the file is full the least recently used blocks go, but none that is being read or written.
    Several threads may use one store. It does not survive a fork: the child opens its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Sequence[tuple[BufferLike, int]],
        capacity: int,
        readonly: bool = False,
        checksums: bool = True,
        cache: Cache = "auto",
        identity: str = "",
    ) -> None:
        """Open the store at `path`, or make it: `capacity` slots, each of a row of every tensor of `layout`, a sequence of
        (memory, bytes of a row). Row i of a tensor begins at byte i * row_nbytes of its memory.

        A process that reads gives `readonly=True` and sees what the writer adds. With `checksums` blocks are stored with an XXH3-64, and
        those that have one are checked when they are read (extra `[checksums]`). `cache` is that of `Batch`; `put` passes the page cache
        unless it is "use". `identity` names what the blocks belong to, a model and its settings say: a store that was made with another
        is refused, as is one of another layout or capacity.

        Raises ArgumentError, FormatError for a file that is another or was damaged, BusyError where another store writes to it,
        FileError where the disk is full or the file was truncated, UnavailableError without xxhash.
        """
        self._core = Core(
            os.fspath(path), layout, capacity, identity, cache, readonly=readonly, checksums=checksums
        )

    # blocks

    @overload
    def put(
        self, keys: Sequence[Key], rows: IntArrayLike, *, stream: None = None, durable: bool = False
    ) -> BlockResult: ...

    @overload
    def put(
        self, keys: Sequence[Key], rows: IntArrayLike, *, stream: SomeStream, durable: bool = False
    ) -> BlockTransfer: ...

    def put(
        self,
        keys: Sequence[Key],
        rows: IntArrayLike,
        *,
        stream: SomeStream | None = None,
        durable: bool = False,
    ) -> BlockResult | BlockTransfer:
        """Store the block of each key, different bytes, ints or strs, from its row of every tensor.

        What a key had before stays until its new block is in the file. With `durable` everything is synced before the call returns. With
        `stream` the rows are read in their place there, and a BlockTransfer is returned at once; the blocks can be found, and are
        acknowledged, once it has ended.

        Raises the error of the first block that failed, once all have ended: the others are stored. Raises ArgumentError, BusyError
        where too many blocks are in use to make room, FileChangedError where the file was truncated, ClosedError.
        """
        return put(self._core, keys, rows, stream, durable)

    @overload
    def get(self, keys: Sequence[Key], rows: IntArrayLike, *, stream: None = None) -> BlockResult: ...

    @overload
    def get(self, keys: Sequence[Key], rows: IntArrayLike, *, stream: SomeStream) -> BlockTransfer: ...

    def get(
        self, keys: Sequence[Key], rows: IntArrayLike, *, stream: SomeStream | None = None
    ) -> BlockResult | BlockTransfer:
        """Bring the block of each key into its row of every tensor; the result's `found` says which there were.

        A block that is damaged or cannot be read is not `found`, and its error is in `errors`: `check()` raises it. With `stream` the
        rows are written in their place there, and a BlockTransfer is returned at once, with `found`. Blocks with checksums, and rows
        whose size is no multiple of 4096, are read into host memory and checked before the call returns, and only copied in the stream.

        Raises ArgumentError, FileChangedError where the file was truncated, ClosedError.
        """
        return get(self._core, keys, rows, stream)

    # keys

    def contains(self, keys: Sequence[Key]) -> Array:
        """Which keys have a block (bool). Nothing is read but the table."""
        self._core.check_open()
        digests = [fileformat.digest(k) for k in keys]
        with self._core.lock:
            self._core.check_open()
            if self._core.readonly:
                self._core.table.refresh()
            found: Array = self._core.table.look_up(digests) >= 0 if digests else np.zeros(0, bool)
            return found

    def discard(self, keys: Sequence[Key]) -> int:
        """Forget the blocks of these keys; returns how many there were. Transfers that use them go on."""
        self._core.check_open()
        if self._core.readonly:
            raise ArgumentError(f"{named(self._core.path)} was opened with readonly=True")
        digests = list({fileformat.digest(k) for k in keys})
        with self._core.lock:
            self._core.check_open()
            slots = self._core.table.look_up(digests) if digests else np.zeros(0, np.int64)
            self._core.slots.discard(slots[slots >= 0])
            return int((slots >= 0).sum())

    @contextlib.contextmanager
    def pinned(self, keys: Sequence[Key]) -> Iterator[Array]:
        """While inside, the blocks of these keys are not evicted, by this process or another; gives which there are (bool)."""
        self._core.check_open()
        digests = list(map(fileformat.digest, keys))
        with self._core.lock:
            self._core.check_open()
            slots = pinned(self._core, digests)[0] if digests else np.zeros(0, np.int64)
        held = slots[slots >= 0]
        try:
            yield slots >= 0
        finally:
            with self._core.lock:
                if not self._core.closed:
                    self._core.pins.remove(held)

    def __contains__(self, key: Key) -> bool:
        return bool(self.contains([key])[0])

    def __len__(self) -> int:
        """Blocks in the store."""
        self._core.check_open()
        with self._core.lock:
            self._core.check_open()
            if self._core.readonly:
                self._core.table.refresh()
            return len(self._core.table.slots)

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._core.of.capacity

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot in the file: a multiple of 4096."""
        return self._core.of.slot_nbytes

    @property
    def closed(self) -> bool:
        return self._core.closed

    # lifetime

    def sync(self) -> None:
        """Put what has been stored on the disk (fdatasync). Blocks that were put without `durable` and without checksums are not believed
        after a restart of the machine all the same. Raises FileError."""
        self._core.check_open()
        self._core.sync()

    def close(self) -> None:
        """Wait for what is under way, and close. Closing twice is fine."""
        self._core.close()

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return  # the descriptors go with the process
        with contextlib.suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._core.closed else f"{len(self._core.table.slots)} of {self.capacity} blocks"
        return f"<nobounce.kv.BlockStore {named(self._core.path)}, {state}>"
