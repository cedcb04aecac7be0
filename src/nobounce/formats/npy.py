"""An array as numpy.save writes it (numpy.org/doc/stable/reference/generated/numpy.lib.format.html).

The header is the text of a Python dictionary with three keys. It is parsed here by its own small grammar:
nothing is evaluated. The array's name is that of the file without its ending.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from nobounce.dtypes import C128, DTYPES, DType, contiguous_strides
from nobounce.errors import FormatError, clip
from nobounce.formats import magic
from nobounce.formats.assemble import MOST_DIMS, assemble, nbytes_or_reason, stem
from nobounce.formats.reader import Cursor, Source
from nobounce.formats.tensorinfo import Block, Detail, Header, TensorInfo

MOST_HEADER = 64 << 10
"""Bytes of a header's text; numpy itself stops at 10,000."""

_SPACE = r"[ \t\r\n]*"
_STRING = re.compile(r"'([^'\\]*)'|\"([^\"\\]*)\"")
_NUMBER = re.compile(r"([0-9]{1,20})L?")
_GAP = re.compile(_SPACE)
_KEYS = ("descr", "fortran_order", "shape")
_KINDS = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32", "u8": "U64",
    "i8": "I64", "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64",
}  # fmt: skip
_REFUSED = {
    "O": "Python objects, which only unpickling could make: save arrays of numbers",
    "U": "text: save arrays of numbers",
    "S": "text: save arrays of numbers",
    "M": "dates: save array.view('i8')",
    "m": "time differences: save array.view('i8')",
    "V": (
        "raw records without a type, as arrays of bfloat16 and FP8 become: save array.view('u1') or ('u2'), "
        "or safetensors"
    ),
}


class Array(NamedTuple):
    """An array of a file: `begin` is where its elements begin; `order` is that of the
    dimensions, `swap` as in Block."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    fortran: bool
    swap: int

    def placed(self, name: str) -> tuple[TensorInfo, tuple[str, Block], Detail | None]:
        """The array as a tensor, its block and its detail."""
        end = self.begin + self.nbytes
        info = TensorInfo(name, self.dtype, self.shape, self.begin, end)
        detail = None
        if self.fortran and self.nbytes:
            strides = tuple(reversed(contiguous_strides(tuple(reversed(self.shape)))))
            # With one dimension that is longer than 1, both orders are the same.
            if any(
                n > 1 and a != b
                for n, a, b in zip(self.shape, strides, contiguous_strides(self.shape), strict=True)
            ):
                detail = Detail(strides=strides)
        return info, (name, Block(self.begin, end, self.dtype.alignment, self.swap)), detail


def read(source: Source, path: str, file_nbytes: int) -> Header:
    """Read and check the header. Raises FormatError, and FileError where reading fails."""
    name = stem(path)
    array = read_array(Cursor(source, path, file_nbytes, limit=MOST_HEADER + 12), None)
    left = file_nbytes - array.begin - array.nbytes
    if left > 0:
        raise FormatError(
            f"{left} bytes at the end belong to no array: numpy.save was called more than once, or the file "
            "is damaged",
            filename=path,
            offset=file_nbytes - left,
        )
    info, block, detail = array.placed(name)
    return assemble(
        [info],
        format="npy",
        path=path,
        file_nbytes=file_nbytes,
        header_nbytes=array.begin,
        metadata={},
        blocks=[block],
        details={} if detail is None else {name: detail},
    )


def read_array(cursor: Cursor, member: str | None) -> Array:
    """The array whose header begins here; `member` is its name in an archive. Raises FormatError."""

    def bad(reason: str) -> FormatError:
        return cursor.bad(reason, tensor=member, offset=begin)

    begin = cursor.position
    head = cursor.take(8, "the header of an array")
    if not magic.is_npy(head):
        raise bad("it does not begin as an array of NumPy")
    major = head[6]
    if major not in (1, 2, 3):
        raise bad(f"version {major}.{head[7]} of the format; 1, 2 and 3 are read")
    size = "<H" if major == 1 else "<I"
    (nbytes,) = struct.unpack(size, cursor.take(struct.calcsize(size), "the header of an array"))
    if nbytes > MOST_HEADER:
        raise bad(f"header too large: {nbytes} bytes are over the limit of {MOST_HEADER}")
    raw = cursor.take(nbytes, "the header of an array")
    try:
        text = raw.decode("utf-8" if major == 3 else "latin-1")
    except UnicodeDecodeError:
        raise bad("the header is not valid UTF-8") from None
    try:
        descr, fortran, shape = _Text(text).fields()
    except _BadError as error:
        raise bad(f"the header {error}") from None
    dtype, swap = _dtype(descr, bad)
    size_or_reason = nbytes_or_reason(dtype, shape)
    if isinstance(size_or_reason, str):
        raise bad(size_or_reason)
    return Array(dtype, shape, cursor.position, size_or_reason, fortran, swap)


def _dtype(descr: str, bad: Callable[[str], FormatError]) -> tuple[DType, int]:
    """The dtype of a descr such as "<f4", and the size of a number that has to be turned."""
    order, kind = descr[:1], descr[1:]
    if descr[:1] not in "<>|=":
        order, kind = "=", descr
    dtype = C128 if kind == "c16" else DTYPES.get(_KINDS.get(kind, ""))
    if dtype is None:
        what = _REFUSED.get(
            kind[:1], "a type that is not read: save array.astype('f8') or another type of numbers"
        )
        raise bad(f"dtype {clip(descr)!r}: {what}")
    return dtype, dtype.alignment if order == ">" else 1


class _BadError(ValueError):
    pass


class _Text:
    """The text of a header; `fields` reads all of it or raises `_BadError`."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def fields(self) -> tuple[str, bool, tuple[int, ...]]:
        """descr, fortran_order and shape."""
        found: dict[str, str | bool | tuple[int, ...]] = {}
        self._need("{")
        while not self._take("}"):
            key = self._string()
            if key in found:
                raise _BadError(f"has the key {clip(key)!r} twice")
            self._need(":")
            found[key] = self._value(key)
            if not self._take(","):
                self._need("}")
                break
        self._skip()
        if self._at < len(self._text):
            raise _BadError("goes on behind its dictionary")
        if sorted(found) != list(_KEYS):
            raise _BadError(f"has the keys {clip(str(sorted(found)))}, expected {', '.join(_KEYS)}")
        descr, fortran, shape = (found[key] for key in _KEYS)
        if not (isinstance(descr, str) and isinstance(fortran, bool) and isinstance(shape, tuple)):
            raise _BadError("has a value of another type than numpy writes")
        return descr, fortran, shape

    def _value(self, key: str) -> str | bool | tuple[int, ...]:
        for word, value in (("True", True), ("False", False)):
            if self._take(word):
                return value
        if self._take("("):
            return self._shape()
        if self._peek("["):
            raise _BadError(
                "describes records with fields (a structured dtype): save each field as an array of its own"
            )
        if self._peek("(") or not (self._peek("'") or self._peek('"')):
            raise _BadError(f"has a value for {clip(key)!r} that numpy does not write")
        return self._string()

    def _shape(self) -> tuple[int, ...]:
        dims: list[int] = []
        while not self._take(")"):
            number = _NUMBER.match(self._text, self._at)
            if number is None or len(dims) == MOST_DIMS:
                raise _BadError(f"has a shape that is no tuple of up to {MOST_DIMS} whole numbers")
            self._at = number.end()
            dims.append(int(number[1]))
            if not self._take(","):
                if len(dims) == 1:
                    raise _BadError("has a shape that is no tuple")
                self._need(")")
                break
            self._skip()
        return tuple(dims)

    def _string(self) -> str:
        self._skip()
        found = _STRING.match(self._text, self._at)
        if found is None:
            raise _BadError("is not the dictionary that numpy writes")
        self._at = found.end()
        return str(found[1] if found[1] is not None else found[2])

    def _skip(self) -> None:
        gap = _GAP.match(self._text, self._at)
        self._at = gap.end() if gap is not None else self._at

    def _peek(self, word: str) -> bool:
        self._skip()
        return self._text.startswith(word, self._at)

    def _take(self, word: str) -> bool:
        if self._peek(word):
            self._at += len(word)
            return True
        return False

    def _need(self, word: str) -> None:
        if not self._take(word):
            raise _BadError("is not the dictionary that numpy writes")
