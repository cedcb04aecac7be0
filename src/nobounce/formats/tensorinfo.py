"""A checked header: each tensor's place in a file, and the size that a dtype and a shape give."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.dtypes import DTYPES, DType
from nobounce.errors import clip

if TYPE_CHECKING:
    from nobounce.formats.columns import Columns


FIELDS = ("dtype", "shape", "data_offsets")
"""What an entry of a header must have."""


class TensorInfo(NamedTuple):
    """Where a tensor lies. `start` and `end` are bytes from the start of the data section
    (`Header.data_offset`).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 for a tensor with a zero dimension."""
        return self.end - self.start


class Header:
    """A header that has been checked.

    Attributes: `path`; `file_nbytes`; `header_nbytes` (the JSON with its padding); `data_offset` (where the
    data section begins in the file: 8 + header_nbytes, of any alignment, case C70); `tensors` by name, in the
    order of the file; `metadata`; `warnings`, sentences about what is odd but allowed; `columns`, where a
    large header was checked column by column: `tensors` is then made from them on first use.
    """

    __slots__ = (
        "_tensors",
        "columns",
        "data_offset",
        "file_nbytes",
        "header_nbytes",
        "metadata",
        "path",
        "warnings",
    )

    def __init__(
        self,
        path: str,
        file_nbytes: int,
        header_nbytes: int,
        data_offset: int,
        tensors: dict[str, TensorInfo] | None,
        metadata: dict[str, str],
        warnings: tuple[str, ...] = (),
        *,
        columns: Columns | None = None,
    ) -> None:
        self.path, self.file_nbytes, self.header_nbytes = path, file_nbytes, header_nbytes
        self.data_offset, self.metadata, self.warnings = data_offset, metadata, warnings
        self._tensors, self.columns = tensors, columns

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors by name, in the order of the file."""
        if self._tensors is None:
            infos = self.columns.infos() if self.columns is not None else ()
            self._tensors = {i[0]: i for i in infos}
        return self._tensors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Header):
            return NotImplemented
        return self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> tuple[object, ...]:
        where = self.path, self.file_nbytes, self.data_offset
        return *where, list(self.tensors.values()), self.metadata, self.warnings

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data section."""
        return self.file_nbytes - self.data_offset


class Layout(NamedTuple):
    """A dtype and a shape, with the bytes that they need."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


def layout(dtype_name: Any, dims: Any) -> Layout | str:
    """The layout of a header's dtype and shape as JSON gave them, or the reason why there is none.

    Arithmetic is checked against 64 bits on the non-zero dimensions, so that [2**62, 2**62, 0] is refused
    although its product is zero (case C16): a reader with machine integers may wrap before it meets the zero.
    """
    if type(dtype_name) is not str:
        return "dtype is not a string"
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        return f"unknown dtype {clip(dtype_name)!r}"
    if type(dims) is not list:
        return "shape is not a list of integers"
    for dim in dims:
        if type(dim) is not int:
            return "shape holds something else than integers"
        if dim < 0:
            return "shape has a negative dimension"
    bits = dtype.bits
    for dim in dims:
        bits *= dim or 1
        if bits >> 64:
            return f"the size of {dtype.name} {clip(str(dims))} overflows 64 bits"
    bits = dtype.bits * prod(dims)
    if bits % 8:
        return f"{dtype.name} {clip(str(dims))} is no whole number of bytes ({bits} bits)"
    return Layout(dtype, tuple(dims), bits // 8)
