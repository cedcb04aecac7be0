"""File: an open file with its buffered and its direct descriptor.

A descriptor is either buffered or O_DIRECT for its whole life, so both flavours are kept. The one that the caller did not
bring is opened through /proc/self/fd when it is first needed (hipFile A-25, but lazily: J-32); a descriptor of the caller is
duplicated, and its flags are never changed. Where the second one cannot be had, that is a refusal, not an error.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, overload

from nobounce import forked, transferend
from nobounce.config import Settings
from nobounce.device import Device
from nobounce.errors import ClosedError, FileError, printable
from nobounce.facts.extents import ExtentMap, IndirectRange, has_holes
from nobounce.facts.file import examine
from nobounce.facts.mountstats import NFS
from nobounce.facts.probe import probe_direct
from nobounce.facts.source import LiveSource
from nobounce.facts.types import FileFacts
from nobounce.io.descriptors import check_kind, duplicator, flavour_of, nbytes_of, sized, status_flags
from nobounce.io.kept import Plan
from nobounce.io.prepare import route_of, transfer
from nobounce.io.receipt import Receipt
from nobounce.io.submit import Params, submit
from nobounce.io.transfer import Transfer
from nobounce.protocols import BufferLike, IntArrayLike, IntCell, IntLike, SomeStream, StreamLike
from nobounce.records import replace
from nobounce.route.types import Cache, Op, Require, Route
from nobounce.runtimes.base import DirectIO

_SOURCE = LiveSource()


class File:
    """An open file. Reads and writes take any buffer: a Buffer, an array of the host or of a device, a tensor."""

    _borrowed: int | None

    def __init__(self, fd: int, name: str, *, shared: bool = False, borrowed: bool = False) -> None:
        """A `borrowed` descriptor may be of any kind and stays its owner's to close (hipFile A-25)."""
        flavour = flavour_of(fd)
        self._begin(name, flavour if shared or borrowed else None)
        self._borrowed = fd if borrowed else None
        self._fds[flavour] = fd
        if not borrowed:
            check_kind(os.fstat(fd).st_mode, name)

    @classmethod
    def _opened(cls, opener: Callable[[], int], name: str, flavour: str, *, shared: bool = False) -> File:
        """A File over the descriptor that `opener`, a function in C, returns. Raises OSError and FileError."""
        self = cls.__new__(cls)
        self._begin(name, flavour if shared else None)
        self._keep(flavour, opener)
        check_kind(os.fstat(self._fds[flavour]).st_mode, name)
        return self

    def _begin(self, name: str, shared: str | None) -> None:
        self._borrowed, self._shared = None, shared
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._closed, self._in_flight = False, 0
        self._facts: FileFacts | None = None
        self._sized: tuple[FileFacts, FileFacts] | None = None
        self._block_known = False
        self._extents = ExtentMap()
        self._vendors: set[DirectIO] = set()
        """Direct paths that have prepared the direct descriptor."""
        self._direct_errno: int | None = None
        self.name = name
        self._failed: dict[str, int] = {}
        forked.know(self)
        self._relay: tuple[FileFacts, Settings, int] | None = None  # prepare.relay_alignment's
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def _keep(self, flavour: str, opener: Callable[[], int]) -> None:
        """Open a descriptor and keep it, in one call into C: an interrupt between the two would lose it."""
        self._fds.update(zip((flavour,), map(operator.call, (opener,)), strict=True))

    @classmethod
    def from_fd(cls, fd: int, name: str | None = None) -> File:
        """A File over a duplicate of the caller's descriptor, whose flags stay as they are. Raises FileError."""
        if name is None:
            try:
                name = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                name = f"fd {fd}"
        try:
            return cls._opened(duplicator(fd), name, flavour_of(fd), shared=True)
        except OSError as e:
            if isinstance(e, FileError):
                raise
            raise FileError.from_oserror(e, name, "duplicate the descriptor of") from e

    # descriptors and facts

    def fileno(self) -> int:
        """The descriptor the file was opened with."""
        self._check_open()
        return next(iter(self._fds.values()))

    def _in_use(self) -> int:
        """The same for a transfer under way, which keeps a closed file's descriptors."""
        if not self._in_flight:
            self._check_open()
        return next(iter(self._fds.values()))

    @property
    def nbytes(self) -> int:
        """The size now, in bytes (of a block device too)."""
        fd = self.fileno()
        return nbytes_of(fd, os.fstat(fd))

    @property
    def closed(self) -> bool:
        return self._closed

    def _descriptor(self, flavour: str) -> int:
        """The buffered or direct descriptor, opened on first need; -1 where it cannot be had."""
        fd = self._fds.get(flavour)
        if fd is not None:
            return fd
        with self._lock:
            own = self._in_use()
            fd = self._fds.get(flavour)
            if fd is None:
                flags = status_flags(own) & (os.O_ACCMODE | os.O_SYNC | os.O_DSYNC)
                flags |= os.O_CLOEXEC | (os.O_DIRECT if flavour == "direct" else 0)
                try:
                    self._keep(flavour, functools.partial(os.open, f"/proc/self/fd/{own}", flags))
                except OSError as e:
                    self._direct_errno = e.errno
                    self._fds[flavour] = -1
            return self._fds[flavour]

    def _own_descriptor(self) -> int:
        """One whose position no caller shares; -1 where there is none yet."""
        return next((fd for name, fd in self._fds.items() if self._owns(name)), -1)

    def _owns(self, flavour: str) -> bool:
        """Whether no descriptor of a caller shares this one's state (its read-ahead, for one)."""
        return self._shared != flavour

    def facts(self, *, direct: bool = True, block: bool = False) -> FileFacts:
        """What is known about the file; with `direct`, the direct descriptor is opened and, where needed, probed; with
        `block`, the devices below it are looked up (once)."""
        own = self._in_use()
        known = self._facts
        if known is None:
            known = examine(_SOURCE, own, path=self.name)
        if direct and known.direct_fd == "unknown":
            fd = self._descriptor("direct")
            if fd < 0:
                known = replace(known, direct_fd="refused", direct_errno=self._direct_errno)
            else:
                sparse = known.kind == "regular" and has_holes(self._own_descriptor())
                known = replace(known, direct_fd="ok", direct_probe=self._probe(known, fd), sparse=sparse)
        if block and not self._block_known:
            from nobounce.facts.block import block_facts  # for few: most never ask

            known = replace(known, block=block_facts(_SOURCE, known))
            self._block_known = True
        self._facts = known
        self._sized = sized(own, known, self._sized)
        return self._sized[1]

    def _indirect(self, file_offset: int, nbytes: int) -> tuple[IndirectRange, ...]:
        """Ranges that touch [file_offset, file_offset + nbytes) and that O_DIRECT reads through the page cache."""
        return self._extents.ranges(self._in_use(), file_offset, nbytes) if nbytes > 0 <= file_offset else ()

    def _probe(self, known: FileFacts, fd: int) -> Any:
        if known.dio_offset_align is not None or known.filesystem.memory or known.access_mode == "w":
            return "unknown"
        # Asked of each file: on btrfs one file is direct and the next, which has checksums, is not.
        system = known.filesystem
        return probe_direct(fd, system.mount_point if system.fstype in NFS else None)

    # transfers

    def read(
        self,
        buffer: BufferLike,
        *,
        nbytes: int | None = None,
        file_offset: int = 0,
        buffer_offset: int = 0,
        require: Require = "auto",
        cache: Cache = "auto",
    ) -> Receipt:
        """Read `nbytes` bytes (default: the rest of the buffer) at `file_offset` into the buffer; returns the Receipt.

        Short at the end of the file: `receipt.nbytes` tells, and the bytes of the buffer behind it, up to `nbytes`, are undefined
        whichever way was taken (a direct read brings whole blocks). `require="fastpath"` never falls back: it raises
        RouteError before anything moves. `cache="auto"` takes from the page cache what it already holds, "use" reads through
        it, "avoid" leaves no page behind. Raises ArgumentError, RouteError, TransferError (its receipt: what moved), ClosedError.
        """
        return transfer(self, "read", buffer, (nbytes, file_offset, buffer_offset), require, cache)

    @overload
    def read_many(
        self,
        buffer: BufferLike,
        *,
        file_offsets: IntArrayLike,
        nbytes: IntArrayLike,
        buffer_offsets: IntArrayLike | None = None,
        require: Require = "auto",
        cache: Cache = "auto",
        stream: None = None,
    ) -> Receipt: ...

    @overload
    def read_many(
        self,
        buffer: BufferLike,
        *,
        file_offsets: IntArrayLike,
        nbytes: IntArrayLike,
        buffer_offsets: IntArrayLike | None = None,
        require: Require = "auto",
        cache: Cache = "auto",
        stream: SomeStream,
    ) -> Transfer: ...

    def read_many(
        self,
        buffer: BufferLike,
        *,
        file_offsets: IntArrayLike,
        nbytes: IntArrayLike,
        buffer_offsets: IntArrayLike | None = None,
        require: Require = "auto",
        cache: Cache = "auto",
        stream: StreamLike | None = None,
    ) -> Receipt | Transfer:
        """Read many blocks, side by side, with the arguments of `Batch.read`: the Receipt of all, or the first error once all have ended.
        With `stream` they go there behind one gate, and a Transfer is returned at once. Raises as `Batch.read` and `Batch.submit` do."""
        from nobounce.io.batch import many

        return many.read_many(self, buffer, (file_offsets, nbytes, buffer_offsets), require, cache, stream)

    def write(
        self,
        buffer: BufferLike,
        *,
        nbytes: int | None = None,
        file_offset: int = 0,
        buffer_offset: int = 0,
        require: Require = "auto",
        cache: Cache = "avoid",
        fsync: bool = False,
    ) -> Receipt:
        """Write `nbytes` bytes (default: the rest of the buffer) at `file_offset`; returns the Receipt.

        With `fsync` the data is on the disk when the call returns: one fdatasync at the end. Unaligned edges are written
        buffered, so bytes beside them are safe; `cache="avoid"` leaves no page behind. Raises as `read` does.
        """
        return transfer(
            self, "write", buffer, (nbytes, file_offset, buffer_offset), require, cache, fsync=fsync
        )

    def explain(
        self,
        buffer: BufferLike | Device,
        *,
        op: Op = "read",
        nbytes: int | None = None,
        file_offset: int = 0,
        buffer_offset: int = 0,
        require: Require = "auto",
        cache: Cache | None = None,
    ) -> Route:
        """The route a request would take, before any I/O; `cache` as in `read` or `write` unless given. Raises as `read` does.

        `buffer` may be a Device: then the route is that of a fresh buffer there, of `nbytes` bytes (default: the rest of the
        file), and nothing is allocated.
        """
        self._check_open()
        where = nbytes, file_offset, buffer_offset
        return route_of(self, op, buffer, where, require, cache or ("auto" if op == "read" else "avoid"))

    def sync(self) -> None:
        """Put written data on the disk (fdatasync). Raises FileError, and the error of a transfer of this file that has failed
        and whose caller has not heard of it; further ones are its notes. Transfers under way are not waited for."""
        try:
            os.fdatasync(self.fileno())
        except OSError as e:
            raise FileError.from_oserror(e, self.name, "sync") from e
        if transferend.untaken:
            transferend.raise_untaken(transferend.of_file(self))

    def truncate(self, nbytes: int) -> None:
        """Set the size in bytes. Raises FileError."""
        try:
            os.ftruncate(self.fileno(), nbytes)
        except OSError as e:
            raise FileError.from_oserror(e, self.name, f"set the size to {nbytes} of") from e

    def read_async(
        self,
        buffer: BufferLike,
        *,
        stream: StreamLike,
        nbytes: IntLike | None = None,
        file_offset: IntLike = 0,
        buffer_offset: IntLike = 0,
        require: Require = "auto",
        cache: Cache = "auto",
        bytes_done: IntCell | None = None,
    ) -> Transfer:
        """Read in stream order: after everything before it on `stream`, before everything after. Returns at once; on a GPU a
        read of up to 64 KiB of page-cached bytes, unless it is the first, into a stream with nothing to wait for has mostly
        ended by then.

        `nbytes`, `file_offset` and `buffer_offset` may be late-bound (a Cell, a ctypes integer, a 0-d integer array):
        checked now, and read again when the stream gets here unless it is registered with the FIXED flag. `bytes_done`, if
        given, is set at the end: the count, or minus the errno. Raises ArgumentError and RouteError now; what happens
        later comes out of the Transfer.
        """
        given = Params(nbytes, file_offset, buffer_offset, bytes_done)
        return submit(self, "read", buffer, stream, given, require, cache, False)

    def write_async(
        self,
        buffer: BufferLike,
        *,
        stream: StreamLike,
        nbytes: IntLike | None = None,
        file_offset: IntLike = 0,
        buffer_offset: IntLike = 0,
        require: Require = "auto",
        cache: Cache = "avoid",
        fsync: bool = False,
        bytes_done: IntCell | None = None,
    ) -> Transfer:
        """Write in stream order; parameters as in `read_async`, `fsync` as in `write`."""
        given = Params(nbytes, file_offset, buffer_offset, bytes_done)
        return submit(self, "write", buffer, stream, given, require, cache, fsync)

    # lifetime

    def _enter(self) -> None:
        with self._lock:
            self._check_open()
            self._in_flight += 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1
        self._close_if_left()

    def _inherited(self) -> None:
        self._lock, self._in_flight = threading.Lock(), 0
        if self._closed:
            self._close_descriptors()

    def close(self) -> None:
        """Close; transfers under way finish first, on their own. Closing twice is fine. Raises as `sync` does, once closed."""
        self._close()
        if transferend.untaken:
            transferend.raise_untaken(transferend.of_file(self))

    def _close(self) -> None:
        self._closed = True
        self._close_if_left()

    def _close_if_left(self) -> None:
        """Once the file is closed and no transfer uses it, its descriptors go; what was interrupted before goes on."""
        with self._lock:
            last = self._closed and self._in_flight == 0 and bool(self._fds)
        if last:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        direct = self._fds.get("direct", -1)
        with contextlib.suppress(KeyError):
            while self._vendors:
                self._vendors.pop().deregister_file(direct)
        for flavour in [name for name, fd in self._fds.items() if fd < 0 or fd == self._borrowed]:
            self._fds.pop(flavour, None)
        # Taken out and closed in one call into C: never left open, and never closed twice.
        with contextlib.suppress(KeyError):
            deque(map(os.close, map(operator.itemgetter(1), iter(self._fds.popitem, None))), maxlen=0)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{printable(self.name)} is closed")

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. An exception on its way keeps its place: what `close` would raise is the stream's to raise, or logged."""
        if kind is None:
            self.close()
            return
        self._close()
        if transferend.untaken:
            transferend.look_again()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return  # names of this module are gone by then, and every descriptor soon
        with contextlib.suppress(Exception):
            self._close()

    def __repr__(self) -> str:
        return f"<nobounce.File {printable(self.name)!r}{' closed' if self._closed else ''}>"
