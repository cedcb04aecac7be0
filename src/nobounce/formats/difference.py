"""What two models have in common, and what not: names, types, shapes, and the bits of every element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from nobounce.device import Device
from nobounce.dtypes import DType, numpy_dtype
from nobounce.errors import ArgumentError, counted
from nobounce.formats.modelsource import ModelSource
from nobounce.formats.sources import Source

PIECE = 16 << 20
"""Bytes of each model that are compared at a time."""

Kind = Literal["only in A", "only in B", "dtype", "shape", "values"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not the same in both. `a` and `b` say what it is in each, or "". Of values: how
    many elements differ, of how many; the index of the first; and by how much they differ at most, None
    where that is no number."""

    name: str
    kind: Kind
    a: str
    b: str
    count: int = 0
    total: int = 0
    first: tuple[int, ...] = ()
    most: float | None = None

    def __str__(self) -> str:
        if self.kind == "values":
            at = "" if not self.first else f", the first at {list(self.first)}"
            by = "" if self.most is None else f", by at most {self.most:g}"
            return f"{self.count} of {counted(self.total, 'element')} differ{at}{by}"
        if self.kind in ("dtype", "shape"):
            return f"{self.kind} {self.a} in A, {self.b} in B"
        return f"{self.kind}: {self.a or self.b}"


def compare(
    a: ModelSource, b: ModelSource, progress: Callable[[str, int], None] | None = None
) -> Iterator[Difference]:
    """Every tensor that is not the same in both, in the order of A, then what B alone has. Elements are
    compared bit by bit: a zero is not its negative, and a NaN is equal to the same NaN. Where types or shapes
    differ, values are not compared."""
    with ExitStack() as stack:
        device = Device("cpu")
        memory = [stack.enter_context(device.allocate(PIECE)) for _ in range(2)]
        for name, one in a.sources.items():
            other = b.sources.get(name)
            if other is None:
                yield Difference(name, "only in A", _described(a, one), "")
                continue
            kinds = _kind(a, one), _kind(b, other)
            if kinds[0] != kinds[1]:
                yield Difference(name, "dtype", *kinds)
            if one.shape != other.shape:
                yield Difference(name, "shape", str(list(one.shape)), str(list(other.shape)))
            if kinds[0] == kinds[1] and one.shape == other.shape:
                found = _values(one, other, memory, progress)
                if found is not None:
                    yield found
    for name, other in b.sources.items():
        if name not in a.sources:
            yield Difference(name, "only in B", "", _described(b, other))


def _kind(model: ModelSource, source: Source) -> str:
    encoding = model.encodings.get(source.name)
    return source.dtype.name if encoding is None else encoding.name


def _described(model: ModelSource, source: Source) -> str:
    return f"{_kind(model, source)} {list(source.shape)}"


def _values(
    one: Source, other: Source, memory: list[Any], progress: Callable[[str, int], None] | None
) -> Difference | None:
    import numpy as np

    size, count, first, most = one.itemsize, 0, -1, None
    made = [None if s.make is None else s.make() for s in (one, other)]
    for start in range(0, one.nbytes, PIECE):
        stop = min(start + PIECE, one.nbytes)
        left, right = (
            _bytes(s, m, whole, start, stop) for s, m, whole in zip((one, other), memory, made, strict=True)
        )
        if progress is not None:
            progress("", stop - start)
        if np.array_equal(left, right):
            continue
        left, right = left.view(f"u{size}"), right.view(f"u{size}")
        where = np.flatnonzero(left != right)
        count += len(where)
        if first < 0:
            first = start // size + int(where[0])
        most = _largest(most, _apart(left[where], right[where], one.dtype))
    if not count:
        return None
    total = one.nbytes // size
    index = np.unravel_index(first, one.shape) if not one.dtype.packed and one.shape else ()
    return Difference(one.name, "values", "", "", count, total, tuple(int(i) for i in index), most)


def _bytes(source: Source, memory: Any, whole: Any, start: int, stop: int) -> Any:
    import numpy as np

    if whole is not None:
        return whole[start:stop]
    if source.read is not None:
        source.read(memory, 0, start, stop)
    return np.frombuffer(memory.view(), np.uint8)[: stop - start]


def _apart(left: Any, right: Any, dtype: DType) -> float | None:
    """The largest distance of two arrays of elements, given as bits; None where it is no number."""
    import numpy as np

    if dtype.packed or dtype.name == "BOOL":
        return None
    try:
        kind = numpy_dtype(dtype)
    except ArgumentError:
        return None
    wide = np.complex128 if dtype.name == "C64" else np.float64
    with np.errstate(all="ignore"):
        far = np.abs(left.view(kind).astype(wide) - right.view(kind).astype(wide)).max()
    return float(far) if np.isfinite(far) else None


def _largest(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else max(one, other)
