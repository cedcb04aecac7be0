"""Large headers checked column by column, with numpy, where it is loaded already.

A header of 20,000 tensors costs 27 ms in Python however it is cut up, because that is what making and dropping 100,000 small
strings costs, and until it is checked nothing may move. Here no string is made: the quotes of the text are found in one pass, ten
for each tensor; what stands between them is compared with what has to stand there, and the numbers are read digit by digit, all
tensors at once. Names are told apart by a hash: if all hashes differ, so do the names. The strings and tuples are made later, when
the bytes are already moving.

Only a header that is beyond doubt passes: ASCII in a writer's usual spelling, tensors in the order of the file, no gap, no
overlap, sizes as dtype and shape give them. All others go the way of `fastscan` and of the JSON parser, which also words errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nobounce.dtypes import DTYPES, DType
from nobounce.formats import fastscan
from nobounce.formats.tensorinfo import TensorInfo

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Rows = Iterable[tuple[str, DType, tuple[int, ...], int, int]]
    Words = np.ndarray[Any, np.dtype[np.uint64]]

MIN_NBYTES = 128 << 10
"""Shorter headers are not worth the overhead of some 300 calls."""

PART = 512
"""Tensors described at a time: some 0.2 ms."""

_HEAD = 64 << 10  # beginning of the text, in which metadata and the first entry are looked for
_HEAP = 16 << 20
_BLOCK = 256 << 10
_RESERVED = b"__metadata__"
_QUOTES = 10  # of one entry
_MOST_DIGITS = 18
_MOST_RANK = 8
_MOST_NAME = 512
_MOST_KINDS = 64
_LIMIT = float(1 << 62)
_MULTIPLIER = 0x9E3779B97F4A7C15


class Columns:
    """The tensors of a header, in the order of the file, as arrays: where each begins and ends in the data section.

    `metadata` is the value of __metadata__. `infos` and `parts` make the objects.
    """

    def __init__(
        self,
        raw: bytes,
        names: tuple[Ints, Ints],
        dtypes: list[DType],
        kinds: Ints,
        dims: list[Ints],
        ranks: Ints,
        bounds: tuple[Ints, Ints],
        metadata: Any,
    ) -> None:
        self._raw, self._names, self._dtypes, self._kinds = raw, names, dtypes, kinds
        self._dims, self._ranks, self._bounds, self.metadata = dims, ranks, bounds, metadata

    def __len__(self) -> int:
        return len(self._ranks)

    def aligned(self, lead: int, align: int) -> bool:
        """Whether each tensor, `lead` bytes after its place in the data section, lies at a multiple of `align` and of what its
        dtype wants. Empty tensors lie nowhere."""
        import numpy as np

        wants = np.array([max(d.alignment, align) - 1 for d in self._dtypes], np.int64)[self._kinds]
        starts, ends = self._bounds
        return not ((starts + lead) & wants)[starts < ends].any()

    def infos(self) -> Iterator[TensorInfo]:
        """Each tensor described, in the order of the file."""
        for rows in self.parts():
            yield from map(TensorInfo._make, rows)

    def parts(self) -> Iterator[Rows]:
        """(name, dtype, shape, start, end) of each tensor, `PART` tensors at a time."""
        text, dtypes = self._raw.decode(), self._dtypes
        for at in range(0, len(self), PART):
            part = slice(at, at + PART)
            firsts, lasts = (n[part].tolist() for n in self._names)
            names = [text[a:b] for a, b in zip(firsts, lasts, strict=True)]
            kinds = [dtypes[k] for k in self._kinds[part].tolist()]
            starts, ends = (b[part].tolist() for b in self._bounds)
            yield zip(names, kinds, self._shapes(part), starts, ends, strict=True)

    def _shapes(self, part: slice) -> list[tuple[int, ...]]:
        ranks = self._ranks[part].tolist()
        whole = list(zip(*(d[part].tolist() for d in self._dims), strict=True)) if self._dims else []
        most = len(self._dims)
        # dims[0] is the last dimension: the text is read backwards
        return (
            [whole[i][r - 1 :: -1] if r else () for i, r in enumerate(ranks)] if most else [()] * len(ranks)
        )


def scan(raw: bytes, data_nbytes: int) -> Columns | None:
    """The columns of a header of a data section of `data_nbytes` bytes, checked; None where others should look. Pure."""
    if len(raw) < MIN_NBYTES or "numpy" not in sys.modules or not raw.isascii() or b"\\" in raw:
        return None
    found = fastscan.outline(raw[:_HEAD].decode(), raw[-fastscan.TAIL :].decode(), len(raw))
    if found is None or found.spelling.offsets_first:
        return None
    return _Scan(raw, found).columns(raw, found.metadata, data_nbytes)


class _Scan:
    """The text as bytes, and as the eight bytes that begin at each place."""

    def __init__(self, raw: bytes, found: fastscan.Outline) -> None:
        import numpy as np

        self._np = np
        # Freed, it has glibc keep the memory of smaller arrays for the next one, instead of mapping and zeroing it each time.
        np.empty(_HEAP, np.uint8)
        self._at, self._end, self._space = found.position, found.end, found.spelling.space
        self._bytes = np.frombuffer(raw, np.uint8)
        self._eight: Words = np.ndarray((len(raw) - 7,), "<u8", self._bytes, strides=(1,))
        self._masks: Words = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)

    def columns(self, raw: bytes, metadata: Any, data_nbytes: int) -> Columns | None:
        np, gap = self._np, len(self._space)
        count = raw.count(b'"', self._at, self._end)
        quotes = self._quotes(count) if count and count % _QUOTES == 0 else None
        if quotes is None:
            return None
        q = [column.astype(np.int64) for column in quotes.reshape(-1, _QUOTES).T]
        # what ends one entry and begins the next: ]}, and the quote
        after = np.append(q[0][1:], self._end + 1 + gap)
        if not self._printed_as_known(q, after):
            return None
        names = q[0] + 1, q[1]
        kinds = self._dtypes(q[4] + 1, q[5])
        shapes = self._dims(q[7] + 3 + gap, q[8] - 2 - gap)
        if kinds is None or shapes is None:
            return None
        needed = self._needed(*kinds, shapes[0])
        ends = self._ends(q[9] + 3 + gap, after - 3 - gap)
        if needed is None or ends is None or ends[-1] != data_nbytes:
            return None
        starts = np.append(0, ends[:-1])
        if (ends - starts != needed).any() or not self._named_well(*names):
            return None
        return Columns(raw, names, *kinds, *shapes, (starts, ends), metadata)

    def _quotes(self, count: int) -> Ints | None:
        """Where the `count` quotes stand; None where there is a control character. Fresh memory is what costs here: little of it."""
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

    def _dtypes(self, first: Ints, end: Ints) -> tuple[list[DType], Ints] | None:
        np = self._np
        length = end - first
        if (length < 1).any() or (length > 8).any():
            return None
        key = self._load(first) & self._masks[length]
        kind = np.full(len(key), -1, np.int64)
        found: list[DType] = []
        while (left := np.flatnonzero(kind < 0)).size:
            one = key[left[0]]
            name = int(one).to_bytes(8, "little").rstrip(b"\0").decode()
            dtype = DTYPES.get(name)
            if dtype is None or len(found) == _MOST_KINDS:
                return None
            kind[key == one] = len(found)
            found.append(dtype)
        return found, kind

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

    def _ends(self, first: Ints, end: Ints) -> Ints | None:
        """Where each range ends, if the first begins at 0 and each other where the one before ends, digit by digit."""
        upper = self._number(first, end)
        if upper is None or not self._comma(upper[1]):
            return None
        value, begin = upper
        length, want = begin - 1 - len(self._space) - first, end - begin
        if length[0] != 1 or self._bytes[first[0]] != 48 or (length[1:] != want[:-1]).any():
            return None
        for k in range(0, int(want.max()), 8):
            here, there = (self._load(p + k) for p in (first[1:], begin[:-1]))
            mask = self._masks[self._np.clip(want[:-1] - k, 0, 8)]
            if ((here ^ there) & mask).any():
                return None
        return value

    def _dims(self, first: Ints, end: Ints) -> tuple[list[Ints], Ints] | None:
        np, width = self._np, 1 + len(self._space)
        ranks = np.zeros(len(first), np.int64)
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
            ranks[rows] += 1
            more = found[1] != first[rows]
            rows, begin = rows[more], found[1][more]
            if not self._comma(begin):
                return None
            end = end.copy()
            end[rows] = begin - width
        return dims, ranks

    def _needed(self, dtypes: list[DType], kind: Ints, dims: list[Ints]) -> Ints | None:
        """Bytes that each tensor needs; None where 64 bits might not hold them or they are no whole bytes."""
        np = self._np
        bits = np.array([d.bits for d in dtypes], np.int64)[kind]
        rough = bits.astype(np.float64)
        for column in dims:
            rough *= np.maximum(column, 1)  # a zero must not hide an overflow (case C16)
        if (rough >= _LIMIT).any():
            return None
        for column in dims:
            bits = bits * column
        return None if (bits & 7).any() else bits >> 3

    def _named_well(self, first: Ints, end: Ints) -> bool:
        """Whether no name is given twice or reserved: true only if it is certain."""
        np = self._np
        length = end - first
        longest = int(length.max())
        reserved = np.uint64(int.from_bytes(_RESERVED[:8], "little"))
        if longest > _MOST_NAME or ((length == len(_RESERVED)) & (self._load(first) == reserved)).any():
            return False
        seen = length.astype(np.uint64)
        for k in range(0, longest, 8):
            word = self._load(first + k)
            seen = (seen ^ (word & self._masks[np.clip(length - k, 0, 8)])) * np.uint64(_MULTIPLIER)
            seen ^= seen >> np.uint64(29)
        seen.sort()
        return not (seen[1:] == seen[:-1]).any()
