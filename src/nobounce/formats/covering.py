"""Whether the tensors of a header tile its data section: no hole, no overlap, no rest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from nobounce.errors import clip
from nobounce.formats import magic

if TYPE_CHECKING:
    from nobounce.formats.columns import Columns, Ints
    from nobounce.formats.tensorinfo import TensorInfo

Bad = Callable[..., NoReturn]
"""Raises the FormatError for (reason, tensor, offset)."""


def covering(
    tensors: dict[str, TensorInfo], data_nbytes: int, bad: Bad, data_offset: int
) -> dict[str, TensorInfo]:
    """`tensors` in the order of the file, once they tile the data section exactly."""
    infos = list(tensors.values())
    if [i[3] for i in infos[1:]] != [i[4] for i in infos[:-1]]:
        infos.sort(key=lambda i: (i[3], i[4]))
        tensors = {i[0]: i for i in infos}
    if (infos and infos[0].start != 0) or [i[3] for i in infos[1:]] != [i[4] for i in infos[:-1]]:
        furthest = infos[0]
        for info in infos[1:]:
            if info.start < furthest.end:
                _overlap(furthest, info, bad, data_offset)
            if info.end > furthest.end:
                furthest = info
        if infos[0].start > 0:
            _hole(None, infos[0], bad, data_offset)
        _hole(*next((a, b) for a, b in pairwise(infos) if b.start > a.end), bad, data_offset)
    covered = infos[-1].end if infos else 0
    if covered != data_nbytes:
        last = next((i for i in infos if i.end > data_nbytes), None)
        _other_end(covered, last, data_nbytes, bad, data_offset)
    return tensors


def covering_columns(columns: Columns, data_nbytes: int, bad: Bad, data_offset: int) -> Columns:
    """The same for columns."""
    import numpy as np

    order: Ints | None = None
    starts, ends = columns.starts, columns.ends
    if (starts[1:] != ends[:-1]).any():
        order = np.lexsort((ends, starts))  # those at one place keep theirs
        starts, ends = starts[order], ends[order]

    def described(*rows: int) -> list[TensorInfo]:
        return list(columns.only([row if order is None else int(order[row]) for row in rows]))

    furthest = np.maximum.accumulate(ends)
    below = np.flatnonzero(starts[1:] < furthest[:-1])
    if below.size:
        row = int(below[0]) + 1
        other, info = described(int(np.argmax(ends == furthest[row - 1])), row)
        _overlap(other, info, bad, data_offset)
    del furthest, below
    above = np.flatnonzero(starts > np.append(0, ends[:-1]))
    if above.size:
        row = int(above[0])
        _hole(described(row - 1)[0] if row else None, described(row)[0], bad, data_offset)
    covered = int(ends[-1])
    if covered != data_nbytes:
        last = described(int(np.argmax(ends > data_nbytes)))[0] if covered > data_nbytes else None
        _other_end(covered, last, data_nbytes, bad, data_offset)
    return columns if order is None else columns.ordered(order)


def _overlap(furthest: TensorInfo, info: TensorInfo, bad: Bad, data_offset: int) -> NoReturn:
    mine = f"[{number(info.start)}, {number(info.end)})"
    other = f"[{number(furthest.start)}, {number(furthest.end)}) of tensor {clip(furthest.name)!r}"
    bad(f"its data {mine} overlaps {other}", info.name, data_offset + min(info.start, 1 << 64))


def _hole(before: TensorInfo | None, after: TensorInfo, bad: Bad, data_offset: int) -> NoReturn:
    if before is None:
        reason = f"the first {number(after.start)} bytes of the data section are not covered by any tensor"
        bad(f"{reason} (the first byte, data offset 0, is not)", after.name, data_offset)
    hole = f"hole at data offset {before.end}: {number(after.start - before.end)} bytes belong to no tensor"
    bad(f"{hole}, after tensor {clip(before.name)!r}", after.name, data_offset + before.end)


def _other_end(
    covered: int, last: TensorInfo | None, data_nbytes: int, bad: Bad, data_offset: int
) -> NoReturn:
    """Tensors without a gap that end elsewhere than the file; `last` is the first that ends behind it."""
    if last is None:
        bad(f"{data_nbytes - covered} bytes at the end belong to no tensor", offset=data_offset + covered)
    reason = f"truncated: missing {number(covered - data_nbytes)} bytes"
    more = f"the tensors need {number(covered)} bytes of data, the file has {data_nbytes}"
    bad(f"{reason} ({more}); {magic.AGAIN}", last.name, data_offset + data_nbytes)


def number(value: int) -> str:
    """A number for a message; an absurd one as its size: Python refuses to print thousands of digits."""
    return str(value) if abs(value) < 1 << 128 else f"(a number of {value.bit_length()} bits)"
