"""The protocol of model readers, and the registry that picks one by a file's first bytes.

A reader is a function of an open file that reads and checks its header and makes a `Header`: every tensor's
name, dtype, shape and place in the file. It never reads the data itself, takes no more memory than the file's
length and some fixed tables justify, and raises FormatError (FileError where reading fails) and nothing else,
whatever the bytes are. Loading, `inspect` and `explain` stand on the Header alone, so that a format is one
entry of `FORMATS` and a module of its own, which is imported when a file claims it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from nobounce import errors
from nobounce.errors import FormatError
from nobounce.facts.filtered import UNSUPPORTED
from nobounce.formats import magic
from nobounce.formats.header import HEADER_LIMIT, open_regular, read_header
from nobounce.formats.nocollect import no_collection
from nobounce.formats.tensorinfo import Header
from nobounce.records import record

Announce = Callable[[int], None]
"""Is told where the data section begins, before a long header is read, by readers that know."""

PIECE = 256 << 10
"""Bytes of a header that are looked at at once: with four times as many a vocabulary takes a
fifth longer, as caches miss."""
_AHEAD = 4 * PIECE
_FIRST = 64 << 10
_MOST_READ = 16 << 20


class Source(Protocol):
    """An open file as readers see it."""

    def pread(self, nbytes: int, offset: int, /) -> bytes:
        """Up to `nbytes` bytes at `offset`; b"" only at the end of the file. Raises OSError."""
        ...

    def will_need(self, nbytes: int, offset: int, /) -> None:
        """A hint: these bytes are going to be read, so a disk may begin to bring them."""
        ...


class InMemory:
    """A Source over bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, nbytes: int, offset: int, /) -> bytes:
        return self._data[offset : offset + nbytes]

    def will_need(self, nbytes: int, offset: int, /) -> None:
        pass


class Descriptor:
    """A Source over a file descriptor, whose position is not used. `flags` are those of preadv2: with
    RWF_DONTCACHE (Linux 6.14) what is read does not stay in the page cache, where the kernel can do that.
    Hints are passed on where `hints`: of a file that is not cached.
    """

    def __init__(self, fd: int, flags: int = 0, *, hints: bool = False) -> None:
        self._fd, self._flags, self._hints = fd, flags, hints

    def pread(self, nbytes: int, offset: int, /) -> bytes:
        if self._flags:
            buffer = bytearray(nbytes)
            try:
                return bytes(buffer[: os.preadv(self._fd, [buffer], offset, self._flags)])
            except OSError as e:
                if e.errno not in UNSUPPORTED:
                    raise
                self._flags = 0
        return os.pread(self._fd, nbytes, offset)

    def will_need(self, nbytes: int, offset: int, /) -> None:
        if self._hints and nbytes > 0:  # 0 would mean all of the file
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


class Stream:
    """A Source read from its beginning to its end, for readers that take a stream; its first bytes
    may have been read already."""

    def __init__(self, source: Source, head: bytes) -> None:
        self._source, self._head, self._position = source, head, 0

    def read(self, nbytes: int, /) -> bytes:
        at = self._position
        if at + nbytes <= len(self._head):
            piece = self._head[at : at + nbytes]
        else:
            piece = self._source.pread(nbytes, at)
        self._position += len(piece)
        return piece


class Cursor:
    """Reads a header front to back through windows of `PIECE` bytes, and nothing at or behind `end`.

    What is asked for at once must be bounded by the caller. FormatError where the file, or the header's
    limit, ends before. `first` is the size of the first window in bytes.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        file_nbytes: int,
        position: int = 0,
        limit: int = HEADER_LIMIT,
        *,
        first: int = _FIRST,
    ) -> None:
        self._source, self.path, self.file_nbytes = source, path, file_nbytes
        self._window, self._base, self._at = b"", position, 0
        self._limit = limit
        self.end = min(file_nbytes, position + limit)
        self._piece = first

    @property
    def position(self) -> int:
        """Where the next byte lies in the file."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """Bytes before the end."""
        return self.end - self.position

    def take(self, nbytes: int, what: str) -> bytes:
        """The next bytes; `what` they are, for the error where they are not there."""
        at = self._at
        if at + nbytes > len(self._window):
            self._fill(nbytes, what)
            at = 0
        self._at = at + nbytes
        return self._window[at : at + nbytes]

    def window(self, nbytes: int, what: str) -> tuple[bytes, int]:
        """A window that holds at least the next `nbytes` bytes, and where they begin
        in it. Nothing is taken."""
        if self._at + nbytes > len(self._window):
            self._fill(nbytes, what)
        return self._window, self._at

    def skip(self, nbytes: int, what: str) -> None:
        """Go on without reading."""
        if nbytes > self.left:
            self._short(what)
        if self._at + nbytes <= len(self._window):
            self._at += nbytes
        else:
            self._base, self._window, self._at = self.position + nbytes, b"", 0

    def bad(self, reason: str, tensor: str | None = None, offset: int | None = None) -> FormatError:
        """The error for what was just read."""
        return FormatError(
            reason, filename=self.path, tensor=tensor, offset=self.position if offset is None else offset
        )

    def _fill(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            self._short(what)
        self._base, self._window, self._at = self.position, self._window[self._at :], 0
        pieces, have = [self._window], len(self._window)
        want = min(max(nbytes, self._piece), self.end - self._base)
        if self._piece == PIECE:  # not the first window, so a long header
            self._source.will_need(min(_AHEAD, self.end - self._base - want), self._base + want)
        self._piece = PIECE
        while have < want:
            piece = read_some(self._source, self.path, want - have, self._base + have)
            if not piece:
                break
            pieces.append(piece)
            have += len(piece)
        self._window = b"".join(pieces)
        if have < nbytes:
            raise FormatError(
                f"truncated: the file ends inside {what} (it had {self.file_nbytes} bytes when it was "
                "opened)",
                filename=self.path,
                offset=self._base + have,
            )

    def _short(self, what: str) -> None:
        if self.end == self.file_nbytes:
            reason = f"truncated: the file of {self.file_nbytes} bytes ends inside {what}; {magic.AGAIN}"
        else:
            reason = f"header too large: {what} goes beyond the limit of {self._limit} bytes"
        raise FormatError(reason, filename=self.path, offset=self.position)


def read_some(source: Source, path: str, nbytes: int, offset: int) -> bytes:
    """`source.pread`, with the system's errors as FileError."""
    try:
        return source.pread(nbytes, offset)
    except OSError as error:
        raise errors.FileError.from_oserror(error, path, "read the header") from error


def read_exactly(source: Source, path: str, nbytes: int, offset: int, what: str) -> bytes:
    """`nbytes` bytes at `offset`. FormatError where the file ends before, FileError where reading fails."""
    pieces, have = [], 0
    while have < nbytes:
        piece = read_some(source, path, min(nbytes - have, _MOST_READ), offset + have)
        if not piece:
            raise FormatError(
                f"truncated: the file ends inside {what}; {magic.AGAIN}", filename=path, offset=offset + have
            )
        pieces.append(piece)
        have += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@record
class Format:
    """A format that is told by its first bytes (`magic.HEAD` of them, or all): `claims` decides. `reader` is
    the name of a module of this package with `read(source, path, file_nbytes) -> Header`.
    """

    name: str
    claims: Callable[[bytes], bool]
    reader: str

    def read(self, source: Source, path: str, file_nbytes: int) -> Header:
        """Read and check the header."""
        reader = import_module(f"nobounce.formats.{self.reader}")
        with no_collection():
            header: Header = reader.read(source, path, file_nbytes)
        return header


FORMATS: tuple[Format, ...] = (
    Format("GGUF", magic.is_gguf, "gguf"),
    Format("npy", magic.is_npy, "npy"),
    Format("npz", magic.is_npz, "npz"),
    Format("PyTorch checkpoint", magic.is_checkpoint, "checkpoint"),
)
"""Every format with a signature. safetensors has none: it is what a file is taken for
that begins like no other."""


def format_of(head: bytes) -> Format | None:
    """The format of a file that begins with `head`; None for safetensors, and for what no reader knows."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= HEADER_LIMIT:
        return None  # a length and JSON, although the length's bytes may spell another signature
    return next((f for f in FORMATS if f.claims(head)), None)


def has_signature(path: str) -> bool:
    """Whether a file begins as one of `FORMATS` does. False where it cannot be read."""
    try:
        fd, _, _ = open_regular(path)
    except errors.NobounceError:
        return False
    try:
        return format_of(os.pread(fd, magic.HEAD, 0)) is not None
    except OSError:
        return False
    finally:
        os.close(fd)


def read_model(source: Source, *, path: str, file_nbytes: int, announce: Announce | None = None) -> Header:
    """Read and check the header of a model file of any known format.

    Raises FormatError, and FileError where reading fails.
    """
    head = read_some(source, path, min(magic.HEAD, file_nbytes), 0) if file_nbytes else b""
    found = format_of(head)
    if found is not None:
        return found.read(source, path, file_nbytes)
    return read_header(Stream(source, head), path=path, file_nbytes=file_nbytes, announce=announce)
