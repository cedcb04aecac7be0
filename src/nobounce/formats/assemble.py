"""From what a reader has found in a file to a Header: ranges are checked against the file and against each
other, and made relative."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise

from nobounce.dtypes import DType
from nobounce.errors import FormatError, clip
from nobounce.formats import magic
from nobounce.formats.covering import number
from nobounce.formats.tensorinfo import Block, Detail, Header, TensorInfo

MOST_TENSORS = 1 << 18
"""Tensors of one file, other than safetensors, whose readers make objects of all of
them: some 200 MB at most."""

MOST_DIMS = 64
"""Dimensions of an array, as numpy and torch have it."""


def nbytes_or_reason(dtype: DType, shape: tuple[int, ...]) -> int | str:
    """Bytes of a dense tensor, or why there can be none. The non-zero dimensions are multiplied: machine
    integers may wrap before they meet a zero (case C16).
    """
    if len(shape) > MOST_DIMS:
        return f"{len(shape)} dimensions are more than the {MOST_DIMS} of any array"
    bits = dtype.bits
    for dim in shape:
        bits *= dim or 1
        if bits >> 66:
            return f"the size of {dtype.name} {clip(str(shape[:8]))} overflows 64 bits"
    return 0 if 0 in shape else bits // 8


def stem(path: str) -> str:
    """The name of a tensor in a file that has none for it: the file's own, without its ending."""
    return os.path.splitext(os.path.basename(path))[0]


def assemble(
    infos: Iterable[TensorInfo],
    *,
    format: str,  # as the attribute of Header
    path: str,
    file_nbytes: int,
    header_nbytes: int,
    metadata: dict[str, str],
    blocks: Iterable[tuple[str, Block]] | None = None,
    details: dict[str, Detail] | None = None,
    warnings: Iterable[str] = (),
) -> Header:
    """A Header of tensors whose ranges count from the start of the file, in the order that users shall see.

    `blocks` are (a tensor's name, the block), counted likewise; None where each tensor is its own.
    FormatError where a block ends behind the file, or where two overlap.
    """
    tensors = {i.name: i for i in infos}
    if blocks is None:
        blocks = ((i.name, Block(i.start, i.end, i.dtype.alignment)) for i in tensors.values())
    held = sorted((b for b in blocks if b[1].end > b[1].start), key=lambda b: b[1].start)
    for name, block in held:
        if block.end > file_nbytes:
            raise FormatError(
                f"truncated: its data ends at {number(block.end)}, the file has {file_nbytes} bytes; "
                f"{magic.AGAIN}",
                filename=path,
                tensor=name,
                offset=min(block.start, file_nbytes),
            )
    for (name, before), (other, after) in pairwise(held):
        if after.start < before.end:
            raise FormatError(
                f"its data [{after.start}, {after.end}) overlaps [{before.start}, {before.end}) of tensor "
                f"{clip(name)!r}",
                filename=path,
                tensor=other,
                offset=after.start,
            )
    first, end = (held[0][1].start, held[-1][1].end) if held else (file_nbytes, file_nbytes)
    return Header(
        path,
        file_nbytes,
        header_nbytes,
        first,
        {n: _moved(i, first) for n, i in tensors.items()},
        metadata,
        tuple(warnings),
        format=format,
        data_end=end,
        details=details,
        blocks=[Block(b.start - first, b.end - first, b.align, b.swap) for _, b in held],
    )


def _moved(info: TensorInfo, first: int) -> TensorInfo:
    """The same, counted from the start of the data section; an empty tensor lies at its start."""
    if info.start == info.end:
        return TensorInfo(info.name, info.dtype, info.shape, 0, 0)
    return TensorInfo(info.name, info.dtype, info.shape, info.start - first, info.end - first)
