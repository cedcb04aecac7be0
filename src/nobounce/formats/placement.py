"""Where each tensor of a file lands in its slab: one allocation per file, filled by one aligned request.

The slab keeps the file's own layout, so that a few large direct reads bring everything. A tensor whose
place is not aligned for its dtype (or for `align=`) is moved up after arrival, and those behind it as far
as they must; moving starts at the end, so nothing is overwritten before it has moved, and no second copy of
the file is needed. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nobounce.errors import ArgumentError
from nobounce.formats.tensorinfo import Block, Header

PAGE = 4096


class Move(NamedTuple):
    """`nbytes` bytes to be moved from `src` up to `dst`, offsets in the slab."""

    dst: int
    src: int
    nbytes: int


class Swap(NamedTuple):
    """`nbytes` bytes at `offset` of the slab are big-endian numbers of `size` bytes each."""

    offset: int
    nbytes: int
    size: int


class Placement(NamedTuple):
    """One file's slab.

    `file_offset` and `nbytes`: the request, aligned to `grain`, that brings the data section (`nbytes` may
    reach past the end of the file, where it comes back short); `needed`: bytes of it that the file must
    deliver; `slab_nbytes`: the allocation; `lead`: where the data section begins in it; `offsets`: each
    tensor's final place, in the order of the header, or None where each has the place that the file gives it;
    `moves`, last first; `swaps`: what is stored big-endian, by its final place.
    """

    file_offset: int
    nbytes: int
    needed: int
    slab_nbytes: int
    offsets: list[int] | None
    moves: list[Move]
    lead: int
    swaps: tuple[Swap, ...] = ()


def check_align(align: int | None) -> int:
    """`align` in bytes, or 1 for None. Raises ArgumentError unless it is a power of two up to 4096."""
    if align is None:
        return 1
    if align < 1 or align > PAGE or align & (align - 1):
        raise ArgumentError(f"align={align} is not a power of two from 1 to {PAGE}")
    return align


def extent(data_offset: int, file_nbytes: int, grain: int) -> tuple[int, int]:
    """[first, end) of the file in whole grains: what the request brings, and what the slab holds
    unless tensors must move."""
    return data_offset // grain * grain, -(-file_nbytes // grain) * grain


def place(header: Header, *, align: int = 1, grain: int = PAGE) -> Placement:
    """Lay the tensors of a checked header out. `grain` is the alignment of direct requests
    in bytes, a power of two."""
    first, end = extent(header.data_offset, header.data_end, grain)
    lead = header.data_offset - first
    # Rounded up past the end of the file, a request comes back short; past the end of the
    # data section it does not.
    needed = min(end, header.file_nbytes) - first if header.data_end > header.data_offset else 0
    nbytes = end - first if needed else 0
    if header.columns is not None and header.columns.aligned(lead, align):
        return Placement(first, nbytes, needed, end - first, None, [], lead)
    infos = header.tensors.values()
    blocks = header.blocks
    if blocks is None:
        # Objects of the same few dtypes, often 20,000 of them: what a dtype wants is asked once.
        wants = {key: max(d.alignment, align) for key, d in {id(i[1]): i[1] for i in infos}.items()}
        if not any((lead + i[3]) % wants[id(i[1])] for i in infos if i[3] < i[4]):
            return Placement(first, nbytes, needed, end - first, None, [], lead)
        blocks = [Block(i[3], i[4], wants[id(i[1])]) for i in infos]
    places, moves, position = _settle(blocks, lead, align)
    swaps: tuple[Swap, ...] = ()
    if header.blocks is not None:
        swaps = tuple(
            Swap(place_at, b.end - b.start, b.swap)
            for place_at, b in zip(places, blocks, strict=True)
            if b.swap > 1 and b.end > b.start
        )
        starts = [b.start for b in blocks]
        # An empty tensor lies nowhere; one of a block keeps its place in it.
        at = [bisect_right(starts, i.start) - 1 if i.nbytes else -1 for i in infos]
        places = [places[k] + i.start - starts[k] if k >= 0 else 0 for k, i in zip(at, infos, strict=True)]
    return Placement(first, nbytes, needed, max(end - first, position), places, moves, lead, swaps)


def _settle(blocks: Iterable[Block], lead: int, align: int) -> tuple[list[int], list[Move], int]:
    """(each block's place in the slab, the moves that bring them there, last first,
    where the last one ends)."""
    places: list[int] = []
    moves: list[Move] = []
    position = 0
    for block in blocks:
        start, stop = lead + block.start, lead + block.end
        if start == stop:
            places.append(0)
            continue
        place_at = start if start >= position else position
        place_at += -place_at % max(block.align, align)
        places.append(place_at)
        position = place_at + stop - start
        if place_at != start:
            last = moves[-1] if moves else None
            if last is not None and last.src + last.nbytes == start and last.dst + last.nbytes == place_at:
                moves[-1] = Move(last.dst, last.src, last.nbytes + stop - start)
            else:
                moves.append(Move(place_at, start, stop - start))
    moves.reverse()
    return places, moves, position


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
