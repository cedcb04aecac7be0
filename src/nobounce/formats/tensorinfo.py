"""A checked header: each tensor's place in a file, and the size that a dtype and a shape give.

Every format's reader makes a Header, from which the loader plans. In safetensors each tensor is a
C-contiguous range of its own, and a Header says nothing else. What other formats add is told beside:
`details` of single tensors, and `blocks`, the ranges of the file that keep their inner layout
because tensors share them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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


class Encoding(NamedTuple):
    """How a tensor's bytes encode its elements, where no dtype does: the tensor itself is bytes (U8).

    `name` is the format's own ("Q4_K"); `shape` counts elements, the tensor's shape counts bytes;
    `block` elements take `block_nbytes` bytes, along the last dimension; `byteorder` is that of
    the numbers inside a block.
    """

    name: str
    shape: tuple[int, ...]
    block: int
    block_nbytes: int
    byteorder: Literal["little", "big"] = "little"


class Detail(NamedTuple):
    """What a tensor has beside its place: `strides` in elements, where it is not C-contiguous (its range then
    reaches from its first element to its last); `encoding`, where its bytes are quantised.
    """

    strides: tuple[int, ...] | None = None
    encoding: Encoding | None = None


class Block(NamedTuple):
    """Bytes [start, end) of the data section that keep their inner layout: a tensor, or a storage that
    several tensors look at.

    `align` is the alignment in bytes that its tensors want; `swap` the size in bytes of the numbers that are
    stored big-endian, 1 where none are.
    """

    start: int
    end: int
    align: int
    swap: int = 1


class Header:
    """A header that has been checked.

    Attributes: `path`; `file_nbytes`; `header_nbytes` (of safetensors: the JSON with its padding);
    `data_offset` (where the data section begins in the file, of any alignment, case C70) and `data_end`
    (where it ends); `tensors` by name, in the order of the file or, of a PyTorch checkpoint, of its
    dictionary; `metadata`; `warnings`, sentences about what is odd but allowed; `columns`, where a large
    header was checked column by column: `tensors` is then made from them on first use; `format`, the
    format's name; `details` by tensor; `blocks` in the order of the file and apart from each other, None
    where each tensor is its own.
    """

    __slots__ = (
        "_tensors",
        "blocks",
        "columns",
        "data_end",
        "data_offset",
        "details",
        "file_nbytes",
        "format",
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
        format: str = "safetensors",
        data_end: int | None = None,
        details: dict[str, Detail] | None = None,
        blocks: list[Block] | None = None,
    ) -> None:
        self.path, self.file_nbytes, self.header_nbytes = path, file_nbytes, header_nbytes
        self.data_offset, self.metadata, self.warnings = data_offset, metadata, warnings
        self._tensors, self.columns = tensors, columns
        self.format, self.details, self.blocks = format, details or {}, blocks
        self.data_end = file_nbytes if data_end is None else data_end

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
        where = self.path, self.file_nbytes, self.data_offset, self.data_end, self.format
        more = self.details, self.blocks
        return *where, list(self.tensors.values()), self.metadata, self.warnings, *more

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data section."""
        return self.data_end - self.data_offset

    def nbytes_of(self, info: TensorInfo) -> int:
        """Bytes of a tensor's elements: those of its range, unless strides leave some out or repeat some."""
        detail = self.details.get(info.name)
        if detail is None or detail.strides is None:
            return info.nbytes
        return info.dtype.bits * prod(info.shape) // 8


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
