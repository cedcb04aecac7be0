"""The entries of a long header in a spelling of its own, gathered into `Columns` batch by batch.

A batch is judged as a whole where all of it is as it should be, a few calls into C for each step; where
anything is odd, its entries are judged one by one by the function that also words the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from nobounce.formats.columns import DTYPE_LIST, PART, Columns
from nobounce.formats.tensorinfo import FIELDS, TensorInfo

if TYPE_CHECKING:
    from nobounce.formats.columns import Ints
    from nobounce.formats.entries import Pairs

LARGEST = 1 << 62
"""No range of a file ends here or beyond: sums of two are still 64 bits."""

_TYPES = (*[np.uint32] * 4, np.int8, *[np.int64] * 3)
"""Where names and shapes begin and end, kinds, starts, ends, hashes of the names."""

_FEW = 16
_LONG = 32
_MOST_ELEMENTS = 1 << 53
"""Larger tensors are judged one by one: here numbers have 64 bits, counts of bits included."""

_BITS = {d.name: d.bits for d in DTYPE_LIST}
_nonzero = partial(filter, None)
_KINDS = {d.name: k for k, d in enumerate(DTYPE_LIST)}


def _printed(shapes: list[list[int]]) -> list[str]:
    """The numbers of each shape as JSON. Python prints lists of integers alike and faster; long ones,
    once each, as most repeat."""
    if len(max(shapes, key=len)) < _LONG:
        return str(shapes)[2:-2].split("], [")
    keys = list(map(tuple, shapes))
    known = {key: str(list(key))[1:-1] for key in set(keys)}
    return [known[key] for key in keys]


class Gather:
    """`judge` describes one entry or raises; `note` is told of a field that is not known, with the
    first tensor that has it."""

    def __init__(self, judge: Callable[[str, Any], TensorInfo], note: Callable[[str, str], None]) -> None:
        self._judge, self._note = judge, note
        self._text = bytearray()
        # They grow in place: thousands of small arrays would leave holes as large as themselves.
        self._stores = [bytearray() for _ in _TYPES]

    def add(self, pairs: Pairs) -> None:
        """One batch of names and values. Raises what `judge` raises."""
        if not pairs:
            return
        names = [name for name, _ in pairs]
        found = self._as_a_whole(names, [entry for _, entry in pairs])
        if found is None:
            infos = [self._judge(name, entry) for name, entry in pairs]
            spans = [n for i in infos for n in (i.start, i.end)]
            found = [i.dtype.name for i in infos], [list(i.shape) for i in infos], spans
        dtypes, shapes, spans = found
        kinds = np.array([_KINDS[d] for d in dtypes], np.int8)
        bounds = np.array(spans, np.int64)
        numbers = _printed(shapes)
        columns = *self._keep([n.encode() for n in names]), *self._keep([n.encode() for n in numbers])
        hashes = np.array(list(map(hash, names)), np.int64)
        made: tuple[np.ndarray[Any, Any], ...] = (*columns, kinds, bounds[::2], bounds[1::2], hashes)
        for store, column in zip(self._stores, made, strict=True):
            store += column.tobytes()

    def _keep(self, words: Sequence[bytes]) -> tuple[Ints, Ints]:
        """Where these words begin and end in the text, which they are put into."""
        ends = len(self._text) + np.cumsum(list(map(len, words)))
        begins = np.append(len(self._text), ends[:-1])
        self._text += b"".join(words)
        return begins.astype(np.uint32), ends.astype(np.uint32)

    def _as_a_whole(
        self, names: list[str], entries: list[Any]
    ) -> tuple[list[str], list[list[int]], list[int]] | None:
        """(dtypes, shapes, starts and ends in turn) of entries that are all sound;
        None where one may not be."""
        if set(map(type, entries)) != {tuple}:
            return None
        found = self._alike(entries) or self._one_by_one(names, entries)
        if found is None:
            return None
        dtypes, shapes, spans = found
        if (
            {*map(type, shapes), *map(type, spans)} != {list}
            or set(map(len, spans)) != {2}
            or set(map(type, dtypes)) != {str}
        ):
            return None
        flat, dims = list(chain.from_iterable(spans)), list(chain.from_iterable(shapes))
        if {int, *map(type, flat), *map(type, dims)} != {int}:
            return None
        if min(flat) < 0 or max(flat) >= LARGEST or min(dims, default=0) < 0:
            return None
        elements = list(map(prod, shapes))
        # A zero does not hide an overflow (case C16).
        largest = max(elements if min(elements) else map(prod, map(_nonzero, shapes)))
        if not _BITS.keys() >= set(dtypes) or largest >= _MOST_ELEMENTS:
            return None
        bits = np.array(elements, np.int64) * np.array([_BITS[d] for d in dtypes], np.int64)
        bounds = np.array(flat, np.int64)
        if (bits & 7).any() or (bounds[1::2] - bounds[::2] != bits >> 3).any():
            return None
        return dtypes, shapes, flat

    def _alike(self, entries: list[Any]) -> list[list[Any]] | None:
        """Their dtypes, shapes and data_offsets where all have just these fields in one order;
        without a dict for each."""
        if set(map(len, entries)) != {len(FIELDS)}:
            return None
        found = {}
        for column in zip(*entries, strict=True):
            keys, values = zip(*column, strict=True)
            if len(set(keys)) > 1:
                return None
            found[keys[0]] = list(values)
        return [found[field] for field in FIELDS] if found.keys() == set(FIELDS) else None

    def _one_by_one(self, names: list[str], entries: list[Any]) -> list[list[Any]] | None:
        """The same of entries in any order and with further fields; None where one lacks
        a field or has one twice."""
        fields = list(map(dict, entries))
        if list(map(len, fields)) != list(map(len, entries)):
            return None
        try:
            found = [[f[field] for f in fields] for field in FIELDS]
        except KeyError:
            return None
        for name, entry in zip(names, fields, strict=True):
            for field in () if len(entry) == len(FIELDS) else entry:
                if field not in FIELDS:
                    self._note(field, name)
        return found

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self._stores[0]

    def columns(self) -> Columns:
        """All that was added."""
        stores = zip(self._stores, _TYPES, strict=True)
        a, b, c, d, kinds, starts, ends, _ = (np.frombuffer(store, dtype) for store, dtype in stores)
        return Columns(self._text, (a, b), (c, d), kinds, starts, ends)

    def repeated(self, columns: Columns) -> str | None:
        """A name that was added twice, or None. Equal names have equal hashes; the other way
        round they are looked at."""
        hashes = np.frombuffer(self._stores[-1], np.int64)
        ordered = np.sort(hashes)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        del ordered
        for at in range(
            0, len(twice), _FEW
        ):  # so few that numpy makes no sorted copies, and mostly only once
            rows = np.flatnonzero(np.isin(hashes, twice[at : at + _FEW]))
            seen: set[str] = set()
            for k in range(0, len(rows), PART):
                for info in columns.only(rows[k : k + PART].tolist()):
                    if info.name in seen:
                        return info.name
                    seen.add(info.name)
        return None
