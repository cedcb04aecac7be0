"""What is wanted of a model: tensors by name, boxes of them, and the runs of a file that bring these. Pure.

A gap between two wanted tensors is read too where that is cheaper than to leave it out: each run costs a
request, and the gap the bytes of one. It may not be longer than `GAP_NBYTES`, nor than what is read on either
side of it, so that no more is read for nothing than for something.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from nobounce.dtypes import DType
from nobounce.errors import ArgumentError, clip, printable
from nobounce.formats.tensorinfo import Header, TensorInfo

Names = str | Iterable[str] | Callable[[str], bool] | None
Slices = Mapping[str, Sequence[tuple[int, int] | None]]
"""By name: for each dimension (start, stop), or None for all of it. Dimensions that are left
out at the end are whole."""

GAP_NBYTES = 128 << 10
"""As long as a thread needs to begin another request: 30 us of Python, in which the page cache gives 300 KB
and a disk of 2.6 GiB/s, which serves 92,000 requests a second, 30 KB."""
ALWAYS_NBYTES = 4096
"""Gaps that are never worth a request of their own."""


class Wanted(NamedTuple):
    """One tensor, or a box of one: `shape` is the box's. Bytes [start, end) of the data section hold it; it
    is all of them unless `box` says which indices of each dimension of `whole` it has."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int
    whole: tuple[int, ...]
    box: tuple[tuple[int, int], ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor or box itself."""
        if self.box is None:
            return self.end - self.start
        return self.dtype.bits * prod(self.shape) // 8


def chosen(known: Iterable[str], names: Names) -> set[str] | None:
    """The names that `names` means, None for all. Raises ArgumentError for names that are not known and a
    pattern without a match."""
    if names is None:
        return None
    if callable(names):
        return {name for name in known if names(name)}
    if isinstance(names, str):
        everything = list(known)
        found = {names} if names in everything else {n for n in everything if fnmatch.fnmatchcase(n, names)}
        if not found:
            raise ArgumentError(f"names={names!r} matches none of the {len(everything)} tensors")
        return found
    found = set(names)
    missing = sorted(map(str, found.difference(known)))
    if missing:
        few = ", ".join(printable(clip(name)) for name in missing[:5])
        raise ArgumentError(f"{len(missing)} of the names are not in the model: {few}")
    return found


def wanted(header: Header, names: set[str] | None, slices: Slices) -> list[Wanted]:
    """What is wanted of one file, in its order. Raises ArgumentError for a box that
    does not fit its tensor."""
    return [
        _wanted(info, slices.get(info.name))
        for info in header.tensors.values()
        if names is None or info.name in names
    ]


def _wanted(info: TensorInfo, box: Sequence[tuple[int, int] | None] | None) -> Wanted:
    plain = Wanted(info.name, info.dtype, info.shape, info.start, info.end, info.shape)
    if box is None:
        return plain
    full = _checked(info, box)
    shape = tuple(b - a for a, b in full)
    if shape == info.shape:
        return plain
    if info.dtype.bits < 8:
        raise ArgumentError(
            f"tensor {printable(clip(info.name))!r}: {info.dtype.name} packs elements into bytes and cannot "
            "be cut"
        )
    size = info.dtype.bits // 8
    if not prod(shape):
        return plain._replace(shape=shape, end=info.start)
    steps = [size * prod(info.shape[n + 1 :]) for n in range(len(info.shape))]
    start = info.start + sum(a * step for (a, _), step in zip(full, steps, strict=True))
    end = info.start + sum((b - 1) * step for (_, b), step in zip(full, steps, strict=True)) + size
    whole = end - start == size * prod(shape)
    return Wanted(info.name, info.dtype, shape, start, end, info.shape, None if whole else tuple(full))


def _checked(info: TensorInfo, box: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]]:
    where = f"slices[{printable(clip(info.name))!r}]"
    if len(box) > len(info.shape):
        raise ArgumentError(f"{where} has {len(box)} dimensions, the tensor {len(info.shape)}")
    full: list[tuple[int, int]] = []
    for n, dim in enumerate(info.shape):
        one = box[n] if n < len(box) else None
        start, stop = (0, dim) if one is None else one
        if not 0 <= start <= stop <= dim:
            raise ArgumentError(f"{where}: ({start}, {stop}) is no part of dimension {n}, which has {dim}")
        full.append((start, stop))
    return full


class Run(NamedTuple):
    """Bytes [start, end) of a file, in whole grains, at `offset` of a slab."""

    start: int
    end: int
    offset: int


def runs(ranges: Iterable[tuple[int, int]], grain: int) -> list[Run]:
    """What to read for these ranges of a file, which are in its order, and where it goes in one slab. `grain`
    is the alignment of direct requests in bytes, a power of two."""
    spans: list[list[int]] = []  # begin, end, first and last wanted byte
    for first, last in ranges:
        if first == last:
            continue
        begin, end = first // grain * grain, -(-last // grain) * grain
        if spans:
            gap = first - spans[-1][3]
            if (
                gap <= ALWAYS_NBYTES
                or begin <= spans[-1][1]
                or gap <= min(GAP_NBYTES, spans[-1][3] - spans[-1][2], last - first)
            ):
                spans[-1][1], spans[-1][3] = max(spans[-1][1], end), max(spans[-1][3], last)
                continue
        spans.append([begin, end, first, last])
    found: list[Run] = []
    offset = 0
    for begin, end, _, _ in spans:
        found.append(Run(begin, end, offset))
        offset += end - begin
    return found
