"""How a safetensors file is laid out, and in which pieces it is written. Pure.

The format wants the ranges of all tensors to follow each other without a hole, so nothing can be padded but
the header: with spaces, so that the data section begins at a multiple of 4096. Tensors whose size is a
multiple of 4096 come first, each then at such a multiple itself; behind them the others, those with the
largest elements first: a range that begins at a multiple of the element's size ends at one, and so does every
range of smaller elements behind it. Otherwise the order is the caller's.

Pieces are cut at multiples of 4096 bytes of the file, wherever the device stays the same. What lies in memory
as it lies in the file, seen from a multiple of the alignment, is written from where it is ("straight"); all
else is gathered in scratch memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nobounce.errors import ArgumentError, FormatError, InternalError
from nobounce.formats import checksums
from nobounce.formats.header import HEADER_LIMIT, parse_header
from nobounce.formats.sources import Source

ALIGN = 4096
"""Bytes, a multiple of which the data section begins at."""
PIECE = 16 << 20
"""Bytes that are gathered at a time: one direct write of the engine. The best of 15 saves of 1 GiB took 0.37
s, of pieces of 8 MiB 0.40, of a plain writer 0.34."""
STRAIGHT = 16 << 20
"""Bytes that are written at a time from the caller's own memory."""
LEAST_STRAIGHT = 1 << 20
"""What is smaller is gathered: a request of its own costs more than copying it."""


class Placed(NamedTuple):
    """A tensor and where it goes: `start` counts from the start of the data section."""

    source: Source
    start: int


class Part(NamedTuple):
    """Bytes [start, stop) of a tensor."""

    source: Source
    start: int
    stop: int


class Piece(NamedTuple):
    """Bytes of the file that are written by one request. `straight`: from the memory of the one part."""

    file_offset: int
    nbytes: int
    straight: bool
    parts: tuple[Part, ...]


class Layout(NamedTuple):
    """A file before it is written: the header with its padding, and every tensor in the order of the file."""

    header: bytes
    placed: tuple[Placed, ...]
    nbytes: int
    sums: bool = False
    """Whether the header has room for checksums."""

    @property
    def data_offset(self) -> int:
        """Where the data section begins in the file."""
        return len(self.header)


def order(found: Sequence[Source]) -> list[Source]:
    """The tensors in the order of the file."""
    return sorted(found, key=lambda s: (s.nbytes % ALIGN != 0, -s.itemsize if s.nbytes % ALIGN else 0))


def lay_out(found: Sequence[Source], metadata: Mapping[str, str], path: str, *, sums: bool = False) -> Layout:
    """The layout of one file; with `sums`, its header has room for checksums. Checksums among the metadata
    are another file's and left out.

    Raises ArgumentError where no reader would open it: too long a header or metadata.
    """
    placed, at = [], 0
    entries: dict[str, object] = {}
    for source in order(found):
        end = at + source.nbytes
        entries[source.name] = {
            "dtype": source.dtype.name,
            "shape": list(source.shape),
            "data_offsets": [at, end],
        }
        placed.append(Placed(source, at))
        at = end
    metadata = checksums.without(metadata)
    header = _with_room(entries, metadata, at) if sums else _header(entries, metadata)
    if len(header) - 8 > HEADER_LIMIT:
        raise ArgumentError(
            f"the header would have {len(header) - 8} bytes, and no reader opens one of more than "
            f"{HEADER_LIMIT}: "
            f"save fewer tensors in a file"
        )
    nbytes = len(header) + at
    try:  # the reader's own judgement, before anything is written
        parse_header(header[8:], path=path, file_nbytes=nbytes, data_offset=len(header))
    except FormatError as e:
        raise ArgumentError(f"such a file could not be read: {e}") from e
    return Layout(header, tuple(placed), nbytes, sums)


def _header(entries: Mapping[str, object], metadata: Mapping[str, str], more: int = 0) -> bytes:
    """The bytes before the data section, `more` of them for nothing but their number."""
    table = {"__metadata__": metadata, **entries} if metadata else entries
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    raw = text + b" " * (-(8 + len(text)) % ALIGN + more)
    return len(raw).to_bytes(8, "little") + raw


def _with_room(entries: Mapping[str, object], metadata: Mapping[str, str], nbytes: int) -> bytes:
    """A header with as many places for sums as the file has blocks, which depends on
    where the header ends."""
    for more in range(0, 4 * ALIGN, ALIGN):
        for blocks in range(nbytes // checksums.BLOCK, nbytes // checksums.BLOCK + 3):
            header = _header(entries, {**checksums.reserved(blocks), **metadata}, more)
            if checksums.count(len(header), len(header) + nbytes) == blocks:
                return header
    raise InternalError(f"no header for {nbytes} bytes has room for their checksums")


def pieces(layout: Layout, grain: int) -> Iterator[Piece]:
    """What is written, in the order of the file. `grain` is the alignment in bytes
    that direct requests keep."""
    parts: list[Part] = []
    begin = at = layout.data_offset

    def gathered() -> Iterator[Piece]:
        nonlocal begin
        if parts:
            yield Piece(begin, at - begin, False, tuple(parts))
            parts.clear()
        begin = at

    for source, place in layout.placed:
        if parts and parts[-1].source.device != source.device:
            yield from gathered()
        first, last = _straight(source, layout.data_offset + place, grain)
        done = 0
        while done < source.nbytes:
            if first <= done < last:
                yield from gathered()
                step = STRAIGHT - at % STRAIGHT
                if last - done < step + LEAST_STRAIGHT:
                    step = last - done
                yield Piece(at, step, True, (Part(source, done, done + step),))
                begin = at = at + step
            else:
                limit = first if done < first else source.nbytes
                step = min(limit - done, PIECE - at % PIECE)
                parts.append(Part(source, done, done + step))
                at += step
                if at % PIECE == 0:
                    yield from gathered()
            done += step
    yield from gathered()


def _straight(source: Source, file_offset: int, grain: int) -> tuple[int, int]:
    """The bytes of a tensor that can be written from where they are; an empty range behind its
    end where there are none."""
    none = source.nbytes, source.nbytes
    if not source.contiguous or not source.in_memory or (source.start - file_offset) % grain:
        return none
    first = -file_offset % grain
    last = source.nbytes - (file_offset + source.nbytes) % grain
    return (first, last) if last - first >= LEAST_STRAIGHT else none
