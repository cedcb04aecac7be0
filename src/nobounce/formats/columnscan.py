"""Large headers checked column by column, with numpy, where it is loaded already.

A header of 20,000 tensors costs 27 ms in Python however it is cut up, because that is what making and
dropping 100,000 small strings costs, and until it is checked nothing may move. Here no string is made: the
quotes of the text are found in one pass, ten for each tensor; what stands between them is compared with what
has to stand there, and the numbers are read digit by digit, all tensors at once. Names are told apart by a
hash: if all hashes differ, so do the names. The strings and tuples are made later, when the bytes are already
moving. The text is read in windows, so that a long header costs a few bytes a tensor beside itself.

Only a header that is beyond doubt passes: ASCII in a writer's usual spelling, tensors in the order of the
file, no gap, no overlap, sizes as dtype and shape give them. All others go the way of `fastscan` and of the
JSON parser, which also words errors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.formats import fastscan
from nobounce.formats.columns import DTYPE_LIST, Columns

if TYPE_CHECKING:
    import numpy as np

    from nobounce.formats.columns import Ints

    Words = np.ndarray[Any, np.dtype[np.uint64]]

MIN_NBYTES = 128 << 10
"""Shorter headers are not worth the overhead of some 300 calls."""

LARGE = 4 << 20
"""From this size on a header is read by columns alone, and numpy is imported for it: objects would
take many times its size."""

_WINDOW = (
    5 << 19
)  # bytes of text looked at at once, in some twenty arrays of as many numbers as it has tensors
_HEAD = 64 << 10  # beginning of the text, in which metadata and the first entry are looked for
_HEAP = 16 << 20
_BLOCK = 256 << 10
_RESERVED = b"__metadata__"
_QUOTES = 10  # of one entry
_MOST_DIGITS = 18
_MOST_RANK = 8
_MOST_NAME = 512
_KINDS = {d.name.encode(): k for k, d in enumerate(DTYPE_LIST)}
_LIMIT = float(1 << 62)
_MULTIPLIER = 0x9E3779B97F4A7C15


class Found(NamedTuple):
    """The columns of a header and the value of __metadata__."""

    columns: Columns
    metadata: Any


def scan(raw: bytes, data_nbytes: int) -> Found | None:
    """The columns of a header of a data section of `data_nbytes` bytes, checked; None where
    others should look. Pure."""
    if len(raw) < MIN_NBYTES or not (len(raw) >= LARGE or "numpy" in sys.modules):
        return None
    if not raw.isascii() or b"\\" in raw:
        return None
    outline = fastscan.outline(raw[:_HEAD].decode(), raw[-fastscan.TAIL :].decode(), len(raw))
    if outline is None or outline.spelling.offsets_first:
        return None
    columns = _Scan(raw, outline).columns(data_nbytes)
    return None if columns is None else Found(columns, outline.metadata)


class _Window(NamedTuple):
    """What a stretch of the text has come to: as `Columns` wants it, and the names' hashes."""

    names: tuple[Ints, Ints]
    shapes: tuple[Ints, Ints]
    kinds: Ints
    ends: Ints
    hashes: Words


class _Scan:
    """The text as bytes, and as the eight bytes that begin at each place. `_at` and
    `_end` bound the window."""

    def __init__(self, raw: bytes, found: fastscan.Outline) -> None:
        import numpy as np

        self._np = np
        # Freed, it has glibc keep the memory of smaller arrays for the next one, instead of mapping
        # and zeroing it each time.
        np.empty(_HEAP, np.uint8)
        self._raw, self._last, self._space = raw, found.end, found.spelling.space
        self._at = self._end = self._from = found.position
        self._bytes = np.frombuffer(raw, np.uint8)
        self._eight: Words = np.ndarray((len(raw) - 7,), "<u8", self._bytes, strides=(1,))
        self._masks: Words = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)

    def columns(self, data_nbytes: int) -> Columns | None:
        np = self._np
        windows: list[_Window] = []
        covered = 0
        while self._from < self._last:
            window = self._next(covered) if self._advance() else None
            if window is None:
                return None
            windows.append(window)
            covered = int(window.ends[-1])
        if covered != data_nbytes or not windows:
            return None
        hashes = np.concatenate([w.hashes for w in windows])
        hashes.sort()
        if (hashes[1:] == hashes[:-1]).any():
            return None
        del hashes
        ends = np.concatenate([w.ends for w in windows])
        names, shapes = (
            tuple(np.concatenate([getattr(w, what)[side] for w in windows]) for side in (0, 1))
            for what in ("names", "shapes")
        )
        kinds = np.concatenate([w.kinds for w in windows])
        return Columns(self._raw, names, shapes, kinds, np.append(0, ends[:-1]), ends)

    def _advance(self) -> bool:
        """Move on to the next window, which ends behind the "}" of an entry; False where
        no entry ends near enough."""
        self._at, self._end = self._from, self._last
        if self._last - self._at > _WINDOW:
            between = f']}},{self._space}"'.encode()
            self._end = self._raw.rfind(between, self._at, self._at + _WINDOW) + len("]}")
        self._from = self._end + 1 + len(self._space)
        return self._end > self._at

    def _next(self, covered: int) -> _Window | None:
        """The tensors of the window, the first of which must begin at `covered`."""
        np, gap = self._np, len(self._space)
        count = self._raw.count(b'"', self._at, self._end)
        quotes = self._quotes(count) if count and count % _QUOTES == 0 else None
        if quotes is None:
            return None
        q = [column.astype(np.int64) for column in quotes.reshape(-1, _QUOTES).T]
        # what ends one entry and begins the next: ]}, and the quote
        after = np.append(q[0][1:], self._end + 1 + gap)
        if not self._printed_as_known(q, after):
            return None
        kinds = self._dtypes(q[4] + 1, q[5])
        shapes = q[7] + 3 + gap, q[8] - 2 - gap
        dims = self._dims(*shapes)
        if kinds is None or dims is None:
            return None
        needed = self._needed(kinds, dims)
        ends = self._ends(q[9] + 3 + gap, after - 3 - gap, covered)
        if needed is None or ends is None:
            return None
        hashes = self._hashes(q[0] + 1, q[1]) if (np.diff(ends, prepend=covered) == needed).all() else None
        if hashes is None:
            return None
        small = np.uint32  # a header is shorter than 4 GiB
        bounds = [(a.astype(small), b.astype(small)) for a, b in ((q[0] + 1, q[1]), shapes)]
        return _Window(bounds[0], bounds[1], kinds, ends, hashes)

    def _quotes(self, count: int) -> Ints | None:
        """Where the `count` quotes stand; None where there is a control character. Fresh memory is what
        costs here: little of it."""
        np = self._np
        found: Ints = np.empty(count, np.int32)
        have = 0
        for at in range(self._at, self._end, _BLOCK):
            block = self._bytes[at : min(at + _BLOCK, self._end)]
            if block.min() < 32:
                return None
            here = np.flatnonzero(block == 34)
            np.add(here, at, out=found[have : have + len(here)], casting="same_kind")
            have += len(here)
        return found

    def _load(self, place: Ints) -> Words:
        """The eight bytes that begin at each place, zeros behind the end of the text."""
        np, last = self._np, len(self._eight) - 1
        if place.size and place.max() <= last:
            words: Words = self._eight[place]
            return words
        near = np.minimum(place, last)
        beyond = np.minimum(place - near, 7).astype(np.uint64)
        shifted: Words = self._eight[near] >> (beyond * np.uint64(8))
        return shifted

    def _printed_as_known(self, q: list[Ints], after: Ints) -> bool:
        s, gap = self._space, len(self._space)
        end = q[9] + 3 + gap  # at least; what lies between is read as numbers
        known = (
            (q[1], f'":{s}{{"dtype":{s}"', q[4] + 1),
            (q[5], f'",{s}"shape":{s}[', None),
            (q[8] - 2 - gap, f'],{s}"data_offsets":{s}[', end),
        )
        if not (
            q[0][0] == self._at
            and (after - 3 - gap >= end).all()
            and (q[8] - 2 - gap >= q[7] + 3 + gap).all()
        ):
            return False
        for place, literal, until in known:
            if until is not None and not (place + len(literal) == until).all():
                return False
            if not self._reads(place, literal):
                return False
        # the last entry has no comma after it
        return self._reads(after[:-1] - 3 - gap, f"]}},{s}") and self._reads(after[-1:] - 3 - gap, "]}")

    def _reads(self, place: Ints, literal: str) -> bool:
        """Whether these characters stand at each of the places."""
        np, data = self._np, literal.encode()
        if (place < 0).any():
            return False
        for k in range(0, len(data), 8):
            part = data[k : k + 8]
            mask = np.uint64((1 << 8 * len(part)) - 1)
            if (place[-1:] + k >= len(self._bytes)).any():
                return False
            if ((self._load(place + k) & mask) != np.uint64(int.from_bytes(part, "little"))).any():
                return False
        return True

    def _dtypes(self, first: Ints, end: Ints) -> Ints | None:
        np = self._np
        length = end - first
        if (length < 1).any() or (length > 8).any():
            return None
        key = self._load(first) & self._masks[length]
        kind: Ints = np.full(len(key), -1, np.int8)
        while (left := np.flatnonzero(kind < 0)).size:
            one = key[left[0]]
            index = _KINDS.get(int(one).to_bytes(8, "little").rstrip(b"\0"))
            if index is None:
                return None
            kind[key == one] = index
        return kind

    def _number(self, first: Ints, end: Ints) -> tuple[Ints, Ints] | None:
        """(values, places where each begins) of the numbers that end before `end`, not before `first`."""
        np = self._np
        value, place = np.zeros(len(end), np.int64), end - 1
        going, unit = np.ones(len(end), np.bool_), 1
        digit = np.zeros(len(end), np.int64)
        for _ in range(_MOST_DIGITS + 1):
            digit = self._bytes[place].astype(np.int64) - 48
            going &= (digit >= 0) & (digit <= 9) & (place >= first)
            if not going.any():
                break
            value += np.where(going, digit, 0) * unit
            place -= going
            unit *= 10
        else:
            return None
        begin = place + 1
        if (begin >= end).any() or ((self._bytes[begin] == 48) & (end - begin > 1)).any():
            return None  # no digit, or a zero in front of others
        return value, begin

    def _comma(self, before: Ints) -> bool:
        """Whether a comma, and a space in this spelling, stands right before each of the places."""
        return self._reads(before - 1 - len(self._space), f",{self._space}")

    def _ends(self, first: Ints, end: Ints, covered: int) -> Ints | None:
        """Where each range ends, if the first begins at `covered` and each other where the one
        before ends, digit by digit."""
        upper = self._number(first, end)
        if upper is None or not self._comma(upper[1]):
            return None
        value, begin = upper
        length, want = begin - 1 - len(self._space) - first, end - begin
        at = int(first[0])
        if self._raw[at : at + int(length[0])] != str(covered).encode() or (length[1:] != want[:-1]).any():
            return None
        for k in range(0, int(want.max()), 8):
            here, there = (self._load(p + k) for p in (first[1:], begin[:-1]))
            mask = self._masks[self._np.clip(want[:-1] - k, 0, 8)]
            if ((here ^ there) & mask).any():
                return None
        return value

    def _dims(self, first: Ints, end: Ints) -> list[Ints] | None:
        """The dimensions, the last of each shape first, 1 where there is none."""
        np, width = self._np, 1 + len(self._space)
        dims: list[Ints] = []
        rows = np.flatnonzero(first < end)
        while rows.size:
            if len(dims) == _MOST_RANK:
                return None
            found = self._number(first[rows], end[rows])
            if found is None:
                return None
            column = np.ones(len(first), np.int64)
            column[rows] = found[0]
            dims.append(column)
            more = found[1] != first[rows]
            rows, begin = rows[more], found[1][more]
            if not self._comma(begin):
                return None
            end = end.copy()
            end[rows] = begin - width
        return dims

    def _needed(self, kind: Ints, dims: list[Ints]) -> Ints | None:
        """Bytes that each tensor needs; None where 64 bits might not hold them or they are no whole bytes."""
        np = self._np
        bits = np.array([d.bits for d in DTYPE_LIST], np.int64)[kind]
        rough = bits.astype(np.float64)
        for column in dims:
            rough *= np.maximum(column, 1)  # a zero must not hide an overflow (case C16)
        if (rough >= _LIMIT).any():
            return None
        for column in dims:
            bits = bits * column
        return None if (bits & 7).any() else bits >> 3

    def _hashes(self, first: Ints, end: Ints) -> Words | None:
        """A hash of each name, equal for equal names; None where one is reserved or very long."""
        np = self._np
        length = end - first
        longest = int(length.max())
        reserved = np.uint64(int.from_bytes(_RESERVED[:8], "little"))
        if longest > _MOST_NAME or ((length == len(_RESERVED)) & (self._load(first) == reserved)).any():
            return None
        seen = length.astype(np.uint64)
        for k in range(0, longest, 8):
            word = self._load(first + k)
            seen = (seen ^ (word & self._masks[np.clip(length - k, 0, 8)])) * np.uint64(_MULTIPLIER)
            seen ^= seen >> np.uint64(29)
        return seen
