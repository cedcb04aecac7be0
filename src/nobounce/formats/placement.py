"""Where each tensor of a file lands in its slab: one allocation per file, filled by one aligned request.

The slab keeps the file's own layout, so that a few large direct reads bring everything. A tensor whose place is not aligned
for its dtype (or for `align=`) is moved up after arrival, and those behind it as far as they must; moving starts at the end,
so nothing is overwritten before it has moved, and no second copy of the file is needed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nobounce.errors import ArgumentError
from nobounce.formats.header import Header

PAGE = 4096


class Move(NamedTuple):
    """`nbytes` bytes to be moved from `src` up to `dst`, offsets in the slab."""

    dst: int
    src: int
    nbytes: int


class Placement(NamedTuple):
    """One file's slab.

    `file_offset` and `nbytes`: the request, aligned to `grain`, that brings the data section (`nbytes` may reach past the
    end of the file, where it comes back short); `needed`: bytes of it that the file must deliver; `slab_nbytes`: the
    allocation; `offsets`: each tensor's final place, in the order of the header; `moves`, last first.
    """

    file_offset: int
    nbytes: int
    needed: int
    slab_nbytes: int
    offsets: list[int]
    moves: list[Move]


def check_align(align: int | None) -> int:
    """`align` in bytes, or 1 for None. Raises ArgumentError unless it is a power of two up to 4096."""
    if align is None:
        return 1
    if align < 1 or align > PAGE or align & (align - 1):
        raise ArgumentError(f"align={align} is not a power of two from 1 to {PAGE}")
    return align


def place(header: Header, *, align: int = 1, grain: int = PAGE) -> Placement:
    """Lay the tensors of a checked header out. `grain` is the alignment of direct requests in bytes, a power of two."""
    first = header.data_offset // grain * grain
    end = -(-header.file_nbytes // grain) * grain
    lead = header.data_offset - first
    offsets: list[int] = []
    moves: list[Move] = []
    position = 0
    for info in header.tensors.values():
        start, stop = lead + info.start, lead + info.end
        if start == stop:
            offsets.append(0)
            continue
        want = max(info.dtype.alignment, align)
        place_at = start if start >= position else position
        place_at += -place_at % want
        offsets.append(place_at)
        position = place_at + stop - start
        if place_at != start:
            last = moves[-1] if moves else None
            if last is not None and last.src + last.nbytes == start and last.dst + last.nbytes == place_at:
                moves[-1] = Move(last.dst, last.src, last.nbytes + stop - start)
            else:
                moves.append(Move(place_at, start, stop - start))
    moves.reverse()
    needed = header.file_nbytes - first if header.file_nbytes > header.data_offset else 0
    return Placement(first, end - first if needed else 0, needed, max(end - first, position), offsets, moves)


def rounds(moves: Iterable[Move], scratch: int) -> Iterator[list[Move]]:
    """The moves in groups of at most `scratch` bytes; larger ones are cut, their end first."""
    group: list[Move] = []
    room = scratch
    for move in moves:
        left = move.nbytes
        while left:
            n = min(left, room)
            left -= n
            room -= n
            group.append(Move(move.dst + left, move.src + left, n))
            if room == 0:
                yield group
                group, room = [], scratch
    if group:
        yield group
