"""The tensors of a long header as arrays: some 25 bytes each beside the header's own text,
where objects would take 300.

Names and shapes stay text until the objects are made, so that what a stranger's header costs
is bounded by its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nobounce.dtypes import DTYPES, DType
from nobounce.formats.tensorinfo import TensorInfo

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[Any]]
    Rows = Iterable[tuple[str, DType, tuple[int, ...], int, int]]

PART = 512
"""Tensors described at a time: some 0.2 ms."""

DTYPE_LIST = tuple(DTYPES.values())


class Columns:
    """The tensors of a header, in the order of the file.

    `text` holds, as UTF-8, each one's name and the numbers of its shape; `names` and `shapes` say from where
    to where. `kinds` index `DTYPE_LIST`; `starts` and `ends` count bytes of the data section. `infos` and
    `parts` make the objects.
    """

    def __init__(
        self,
        text: bytes | bytearray,
        names: tuple[Ints, Ints],
        shapes: tuple[Ints, Ints],
        kinds: Ints,
        starts: Ints,
        ends: Ints,
    ) -> None:
        self._text, self._names, self._shapes, self._kinds = text, names, shapes, kinds
        self.starts, self.ends = starts, ends

    def __len__(self) -> int:
        return len(self.ends)

    def aligned(self, lead: int, align: int) -> bool:
        """Whether each tensor, `lead` bytes after its place in the data section, lies at a multiple of
        `align` and of what its dtype wants. Empty tensors lie nowhere."""
        import numpy as np

        wants = np.array([max(d.alignment, align) - 1 for d in DTYPE_LIST], np.int64)[self._kinds]
        return not ((self.starts + lead) & wants)[self.starts < self.ends].any()

    def ordered(self, order: Ints) -> Columns:
        """The same tensors, those at the places that `order` says one after the other."""
        names, shapes = ((a[order], b[order]) for a, b in (self._names, self._shapes))
        return Columns(self._text, names, shapes, self._kinds[order], self.starts[order], self.ends[order])

    def only(self, rows: Sequence[int]) -> Iterator[TensorInfo]:
        """These tensors, described."""
        for row in rows:
            yield from self._infos(slice(row, row + 1))

    def infos(self) -> Iterator[TensorInfo]:
        """Each tensor described, in the order of the file."""
        yield from self._infos()

    def _infos(self, rows: slice | None = None) -> Iterator[TensorInfo]:
        for part in self.parts(rows):
            yield from map(TensorInfo._make, part)

    def parts(self, rows: slice | None = None) -> Iterator[Rows]:
        """(name, dtype, shape, start, end) of each tensor, `PART` tensors at a time."""
        # Places in ASCII are the same in a str, of which pieces are cheaper.
        text = self._text.decode() if rows is None and self._text.isascii() else self._text
        first, last = (0, len(self)) if rows is None else (rows.start, rows.stop)
        for at in range(first, last, PART):
            part = slice(at, min(at + PART, last))
            names, numbers = _pieces(text, self._names, part), _pieces(text, self._shapes, part)
            shapes = map(tuple, json.loads(f"[[{'],['.join(numbers)}]]"))
            kinds = [DTYPE_LIST[k] for k in self._kinds[part].tolist()]
            yield zip(names, kinds, shapes, self.starts[part].tolist(), self.ends[part].tolist(), strict=True)


def _pieces(text: str | bytes | bytearray, bounds: tuple[Ints, Ints], part: slice) -> list[str]:
    firsts, lasts = bounds[0][part].tolist(), bounds[1][part].tolist()
    if isinstance(text, str):
        return [text[a:b] for a, b in zip(firsts, lasts, strict=True)]
    return [text[a:b].decode() for a, b in zip(firsts, lasts, strict=True)]
