"""The header of a GGUF file: versions 2 and 3, of either byte order
(github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A file is the magic, a version, two counts, so many keys with values, so many descriptions of tensors, and the
data, each tensor at a multiple of `general.alignment`. ggml writes dimensions fastest first: here they are
reversed, as in every array. Numbers become arrays of their dtype; a quantised tensor becomes bytes (U8), the
last dimension counted in bytes as the gguf package has it, and its `Encoding` says what they are.

Most of a header is the vocabulary: some 450,000 strings that no tensor needs. They are passed over, many at a
time, and only described in the metadata; `read_values` reads them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection
from typing import Any

from nobounce.dtypes import DTYPES
from nobounce.errors import FormatError, clip, printable
from nobounce.formats.assemble import MOST_TENSORS, assemble, nbytes_or_reason
from nobounce.formats.entries import METADATA_KEYS, METADATA_LIMIT
from nobounce.formats.ggml import REMOVED, TYPES
from nobounce.formats.header import open_regular
from nobounce.formats.reader import Cursor, Descriptor, Source
from nobounce.formats.tensorinfo import Block, Detail, Encoding, Header, TensorInfo

ALIGNMENT = 32
"""Of the data, where the file does not say."""
_ALIGNMENT_KEY = "general.alignment"
_MOST_NAME = 4096
_MOST_KEY = (1 << 16) - 1
_MOST_RANK = 8
_MOST_STRING = 1 << 20
"""Bytes of a metadata value that is kept; a longer one is described."""
_SHOWN = 16
"""Elements of an array of numbers that is shown as a list."""
_DEPTH = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NAMES = [
    "UINT8",
    "INT8",
    "UINT16",
    "INT16",
    "UINT32",
    "INT32",
    "FLOAT32",
    "BOOL",
    "STRING",
    "ARRAY",
    "UINT64",
    "INT64",
    "FLOAT64",
]
_UINT32, _STRING, _ARRAY = 4, 8, 9
_LEAST = {**{k: struct.calcsize(v) for k, v in _SCALARS.items()}, _STRING: 8, _ARRAY: 12}
"""Bytes that a value of each type takes at least."""


def read(source: Source, path: str, file_nbytes: int) -> Header:
    """Read and check the header. Raises FormatError, and FileError where reading fails."""
    walk = _Walk(Cursor(source, path, file_nbytes))
    metadata: dict[str, str] = {}
    room = METADATA_LIMIT
    alignment = ALIGNMENT
    for _ in range(walk.keys):
        key, kind = walk.key(metadata)
        at = walk.cursor.position
        shown = walk.shown(kind, room)
        metadata[key] = shown
        room = max(0, room - len(key) - len(shown))
        if key == _ALIGNMENT_KEY:
            alignment = _alignment(kind, shown, walk.cursor, at)
    found = _tensors(walk, alignment)
    return assemble(
        found.infos,
        format="GGUF",
        path=path,
        file_nbytes=file_nbytes,
        header_nbytes=walk.cursor.position,
        metadata=metadata,
        blocks=found.blocks,
        details=found.details,
    )


def read_values(
    path: str | os.PathLike[str], keys: Collection[str] | None = None, *, limit: int = 64 << 20
) -> dict[str, Any]:
    """The metadata of a GGUF file as values: int, float, bool, str, lists of str, and
    numpy arrays of numbers.

    `keys` chooses; None means all. FormatError where one value takes more than `limit` bytes of the
    file. Raises as `read` too.
    """
    fd, nbytes, name = open_regular(path)
    try:
        walk = _Walk(Cursor(Descriptor(fd), name, nbytes))
        found: dict[str, Any] = {}
        seen: dict[str, str] = {}
        for _ in range(walk.keys):
            key, kind = walk.key(seen)
            seen[key] = ""
            if keys is None or key in keys:
                found[key] = walk.value(kind, limit)
            else:
                walk.skip(kind)
        return found
    finally:
        os.close(fd)


def _alignment(kind: int, shown: str, cursor: Cursor, offset: int) -> int:
    value = int(shown) if kind == _UINT32 else 0
    if value == 0 or value & (value - 1):
        what = f"{_ALIGNMENT_KEY} is {clip(shown)} ({_NAMES[kind]}); it must be a power of two, as UINT32"
        raise cursor.bad(what, offset=offset)
    return value


class _Found:
    def __init__(self) -> None:
        self.infos: list[TensorInfo] = []
        self.blocks: list[tuple[str, Block]] = []
        self.details: dict[str, Detail] = {}


def _tensors(walk: _Walk, alignment: int) -> _Found:
    """Every tensor, its range counted from the start of the file."""
    cursor, order = walk.cursor, walk.order
    raw = []
    names: set[str] = set()
    for _ in range(walk.tensors):
        name = walk.text(_MOST_NAME, "a tensor's name")
        if name in names:
            raise cursor.bad(f"{clip(name)!r} is given twice", tensor=name)
        names.add(name)
        rank = walk.number("I", "a tensor's description")
        if rank > _MOST_RANK:
            raise cursor.bad(f"{rank} dimensions are more than the {_MOST_RANK} that are read", tensor=name)
        described = cursor.take(8 * rank + 12, "a tensor's description")
        *dims, kind, offset = struct.unpack(f"{order}{rank}QIQ", described)
        raw.append((name, tuple(reversed(dims)), kind, offset))
    data = -(-cursor.position // alignment) * alignment
    found = _Found()
    for name, shape, kind, offset in raw:
        described_type = TYPES.get(kind)
        if described_type is None:
            raise cursor.bad(_no_type(kind), tensor=name)
        if offset % alignment:
            raise cursor.bad(f"its offset {offset} is no multiple of the alignment {alignment}", tensor=name)
        dtype = described_type.dtype or DTYPES["U8"]
        inner = shape
        if described_type.dtype is None:
            if not shape or shape[-1] % described_type.block:
                raise cursor.bad(
                    f"{described_type.name} {list(shape)}: its rows are not made of whole blocks of "
                    f"{described_type.block} elements",
                    tensor=name,
                )
            inner = *shape[:-1], shape[-1] // described_type.block * described_type.nbytes
            encoding = Encoding(
                described_type.name, shape, described_type.block, described_type.nbytes, walk.byteorder
            )
            found.details[name] = Detail(encoding=encoding)
        nbytes = nbytes_or_reason(dtype, inner)
        if isinstance(nbytes, str):
            raise cursor.bad(nbytes, tensor=name)
        start = data + offset
        found.infos.append(TensorInfo(name, dtype, inner, start, start + nbytes))
        swap = dtype.alignment if walk.byteorder == "big" else 1
        found.blocks.append((name, Block(start, start + nbytes, dtype.alignment, swap)))
    return found


def _no_type(kind: int) -> str:
    gone = REMOVED.get(kind)
    if gone is not None:
        return (
            f"its type {gone} ({kind}) was removed from ggml: fetch or make the model anew, with a type of "
            "today"
        )
    return f"unknown ggml type {kind}"


class _Walk:
    """The fields of a header one after the other. `order` is struct's sign of the byte order; `tensors`
    and `keys` are the counts."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor, self.order = cursor, "<"
        head = cursor.take(8, "the magic and version")
        version = int.from_bytes(head[4:], "little")
        if version & 0xFFFF == 0:
            self.order, version = ">", int.from_bytes(head[4:], "big")
        if version not in (2, 3):
            old = (
                "; the version of 2023 has to be converted with the tools of its time" if version == 1 else ""
            )
            raise FormatError(
                f"GGUF version {version}; versions 2 and 3 are read{old}", filename=cursor.path, offset=4
            )
        self.tensors, self.keys = self.number("Q", "the counts"), self.number("Q", "the counts")
        if self.keys > min(METADATA_KEYS, cursor.left // 13):
            raise cursor.bad(
                f"{self.keys} keys of metadata are more than the file holds or anybody needs", offset=16
            )
        if self.tensors > min(MOST_TENSORS, cursor.left // 24):
            raise cursor.bad(
                f"{self.tensors} tensors are more than the file describes, or than {MOST_TENSORS}", offset=8
            )

    @property
    def byteorder(self) -> Any:
        """ "little" or "big"."""
        return "little" if self.order == "<" else "big"

    def number(self, code: str, what: str) -> Any:
        """A number of this struct code."""
        return struct.unpack(self.order + code, self.cursor.take(struct.calcsize("<" + code), what))[0]

    def text(self, most: int, what: str) -> str:
        """A string of at most `most` bytes that must be UTF-8."""
        at = self.cursor.position
        nbytes = self.number("Q", what)
        if nbytes > most:
            raise self.cursor.bad(f"{what} of {nbytes} bytes is longer than {most}", offset=at)
        try:
            return self.cursor.take(nbytes, what).decode()
        except UnicodeDecodeError:
            raise self.cursor.bad(f"{what} is not valid UTF-8", offset=at) from None

    def key(self, seen: Collection[str]) -> tuple[str, int]:
        """The next key and the type of its value."""
        at = self.cursor.position
        key = self.text(_MOST_KEY, "a metadata key")
        if key in seen:
            raise self.cursor.bad(f"the key {clip(key)!r} is given twice", offset=at)
        return key, self._kind(f"the value of {printable(clip(key))}")

    def _kind(self, what: str) -> int:
        at = self.cursor.position
        kind = int(self.number("I", what))
        if kind not in _LEAST:
            raise self.cursor.bad(f"{what} has the unknown type {kind}", offset=at)
        return kind

    def shown(self, kind: int, room: int) -> str:
        """The next value as text; long ones, and those for which there is no room, are described."""
        what = "a metadata value"
        if kind == _STRING:
            nbytes = self.number("Q", what)
            if nbytes > min(_MOST_STRING, room):
                self.cursor.skip(nbytes, what)
                return f"a string of {nbytes} bytes"
            return self.cursor.take(nbytes, what).decode(errors="replace")
        if kind != _ARRAY:
            return _as_text(self._numbers(kind, 1)[0])
        inner, count = self._array()
        if inner in _SCALARS and count <= _SHOWN:
            return "[" + ", ".join(map(_as_text, self._numbers(inner, count))) + "]"
        self._skip_many(inner, count, 1)
        return f"an array of {count} {_NAMES[inner]}"

    def value(self, kind: int, limit: int) -> Any:
        """The next value."""
        what = "a metadata value"
        if kind == _STRING:
            nbytes = self.number("Q", what)
            self._within(nbytes, limit)
            return self.cursor.take(nbytes, what).decode(errors="replace")
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        inner, count = self._array()
        self._within(count * _LEAST[inner], limit)
        if inner in _SCALARS:
            return self._numbers(inner, count)
        end = self.cursor.position + limit
        many = []
        for _ in range(count):
            left = end - self.cursor.position
            many.append(self.value(_STRING, left) if inner == _STRING else self._inner(left))
        return many

    def _inner(self, limit: int) -> Any:
        inner, count = self._array()
        if inner not in _SCALARS:
            raise self.cursor.bad("an array of arrays of anything but numbers is not read")
        self._within(count * _LEAST[inner], limit)
        return self._numbers(inner, count)

    def _within(self, nbytes: int, limit: int) -> None:
        if nbytes > limit:
            raise self.cursor.bad(f"a metadata value takes more than the limit of {limit} bytes")

    def skip(self, kind: int) -> None:
        """Pass over the next value."""
        self._skip_many(kind, 1, 0)

    def _array(self) -> tuple[int, int]:
        """The type and the number of an array's elements."""
        at = self.cursor.position
        inner, count = self._kind("an array"), int(self.number("Q", "an array"))
        if count * _LEAST[inner] > self.cursor.left:
            raise self.cursor.bad(
                f"truncated: an array of {count} {_NAMES[inner]} reaches beyond the header", offset=at
            )
        return inner, count

    def _numbers(self, kind: int, count: int) -> Any:
        import numpy as np

        code = np.dtype(_SCALARS[kind]).newbyteorder("<" if self.order == "<" else ">")
        raw = np.frombuffer(self.cursor.take(count * code.itemsize, "a metadata value"), code)
        return raw.astype(code.newbyteorder("="))

    def _skip_many(self, kind: int, count: int, depth: int) -> None:
        if kind in _SCALARS:
            self.cursor.skip(count * _LEAST[kind], "a metadata value")
        elif kind == _STRING:
            self._skip_strings(count)
        elif depth > _DEPTH:
            raise self.cursor.bad("arrays nested too deeply")
        else:
            for _ in range(count):
                self._skip_many(*self._array(), depth + 1)

    def _skip_strings(self, count: int) -> None:
        cursor, unpack = self.cursor, struct.Struct(self.order + "Q").unpack_from
        what = "an array of strings"
        # Strings to pass over one by one before the next look at a window; more after
        # each look that was in vain.
        alone = 0
        again = _FEW
        while count:
            window, at = cursor.window(8, what)
            passed = nbytes = 0
            if not alone and count > _FEW and self.order == "<":
                passed, nbytes = _short_strings(window, at, count)
                again = _FEW if passed > _FEW else 4 * again
                alone = 0 if passed > _FEW else again
            if passed <= _FEW:
                last, begin = len(window) - 8, at
                passed, most = 0, min(count, alone or count)
                while at <= last and passed < most:
                    at += 8 + unpack(window, at)[0]
                    passed += 1
                nbytes = at - begin
                alone = max(0, alone - passed)
            cursor.skip(nbytes, what)
            count -= passed


_FEW = 256
"""Strings for which a look at the whole window costs more than it saves: 430,000 take 29 ms one by
one, 7 ms window by window."""


def _short_strings(window: bytes, at: int, count: int) -> tuple[int, int]:
    """How many strings that begin at `at` can be passed over, and their bytes; of little-endian files.

    The length of a string below 256 bytes is one byte and seven zeros, and among seven zeros there is just
    one word of four at a multiple of four. From each such word one goes back to the byte that is not zero:
    there a string of that length may begin. Those that do begin where the one before them ends; the first
    candidate for which this is not so ends the count.
    """
    import numpy as np

    words = np.frombuffer(window, "<u4", len(window) // 4)
    zero = np.flatnonzero(words == 0)
    zero = zero[np.searchsorted(zero, at // 4 + 1) : np.searchsorted(zero, len(words) - 1)][:count]
    if not len(zero):
        return 0, 0
    before, after = words[zero - 1], words[zero + 1]
    # The place in the word before, 0 to 3, and as many bytes of the word after belong to the length.
    place = (before > 0xFF).astype(np.uint8) + (before > 0xFFFF) + (before > 0xFFFFFF)
    begins = 4 * zero - 4 + place
    ends = begins + 8 + (before >> (8 * place))
    rest = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)[place]
    right = (begins == np.append(at, ends[:-1])) & (after & rest == 0)
    passed = len(right) if right.all() else int(np.argmin(right))
    return passed, int(ends[passed - 1]) - at if passed else 0


def _as_text(value: Any) -> str:
    """A number of numpy as its shortest text; true and false as in JSON."""
    return json.dumps(bool(value)) if value.dtype.kind == "b" else str(value)
