"""What a caller says of many requests at once, as arrays of one length, and which file each of them is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np

    from nobounce.io.file import File

    Array = np.ndarray[Any, Any]


Places = tuple["Array", "Array", "Array"]
"""(file offsets, sizes, buffer offsets), int64 arrays of one length."""


class Share(NamedTuple):
    """The requests of one file: their places in the call's arrays."""

    file: File
    rows: Array
    all: bool
    """Whether the call has no others."""

    def of(self, places: Places) -> Places:
        """Of the call's places, those of this file."""
        a, b, c = places
        return places if self.all else (a[self.rows], b[self.rows], c[self.rows])


def requests(
    view_nbytes: int, file: File | Sequence[File], where: tuple[Any, Any, Any, Any]
) -> tuple[Places, list[Share]]:
    """The places of requests and who shares them, of (file_offsets, nbytes, buffer_offsets, file_index).
    Raises ArgumentError."""
    import numpy as np

    file_offsets, nbytes, buffer_offsets, index = where
    if not isinstance(file, Sequence):
        if index is not None:
            raise ArgumentError("file_index is for several files: give them as a sequence")
        places, _ = positions(view_nbytes, file_offsets, nbytes, buffer_offsets)
        return places, [Share(file, np.arange(len(places[0])), True)]
    if index is None:
        raise ArgumentError(f"{len(file)} files and no file_index: which request is of which file?")
    places, of = positions(view_nbytes, file_offsets, nbytes, buffer_offsets, integers(index, "file_index"))
    wrong = np.flatnonzero((of < 0) | (of >= len(file)))
    if len(wrong):
        raise ArgumentError(
            f"file_index[{int(wrong[0])}] is {int(of[wrong[0]])}: there are {len(file)} files"
        )
    order = np.argsort(of, kind="stable")
    used, starts = np.unique(of[order], return_index=True)
    parts = np.split(order, starts[1:]) if len(order) else []
    return places, [
        Share(file[k], rows, len(parts) == 1) for k, rows in zip(used.tolist(), parts, strict=True)
    ]


def positions(
    view_nbytes: int, file_offsets: Any, nbytes: Any, buffer_offsets: Any, file_index: Any = 0
) -> tuple[Places, Array]:
    """The places of requests, and their file indices, as int64 arrays of one length. Raises ArgumentError.

    Without buffer offsets the requests lie packed, one behind the other; one that no buffer
    could hold takes no room.
    """
    import numpy as np

    given = {"file_index": file_index, "file_offsets": file_offsets, "nbytes": nbytes}
    if buffer_offsets is not None:
        given["buffer_offsets"] = buffer_offsets
    columns = [integers(value, name) for name, value in given.items()]
    lengths = {c.size for c in columns if c.ndim}
    count = max(lengths, default=1)
    if len(lengths - {1}) > 1 or (0 in lengths and count > 1):
        each = ", ".join(f"{n} has {c.size}" for n, c in zip(given, columns, strict=True) if c.ndim)
        raise ArgumentError(f"the arrays differ in length: {each}")
    if 0 in lengths:
        count = 0
    of, at, sizes, *to = (np.ascontiguousarray(np.broadcast_to(c.reshape(-1), (count,))) for c in columns)
    if not to:
        room = np.where((sizes < 0) | (sizes > view_nbytes), 0, sizes)
        to = [np.cumsum(room) - room]
    return (at, sizes, to[0]), of


def integers(value: Any, name: str) -> Array:
    """A scalar or a flat sequence of integers as int64. Raises ArgumentError."""
    import numpy as np

    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):
        raise ArgumentError(f"{name} is no flat sequence of integers") from None
    if found.ndim > 1:
        raise ArgumentError(f"{name} has {found.ndim} dimensions: give an integer or a flat sequence of them")
    if found.size == 0 and not isinstance(value, np.ndarray):
        found = found.astype(np.int64)
    if found.dtype.kind in "ufO":  # integers past int64 make numpy choose these
        for index, one in enumerate(np.atleast_1d(np.asarray(value, object))):
            if isinstance(one, int) and not -(1 << 63) <= one < 1 << 63:
                raise ArgumentError(f"{name}[{index}] is {one}, past the largest offset there is")
    if found.dtype.kind not in "iu":
        raise ArgumentError(f"{name} is of {found.dtype}: give integers (bytes)")
    return found.astype(np.int64)


def largest(columns: Sequence[Any]) -> int:
    """The most entries that any of these has; a scalar has one."""
    import numpy as np

    return max(np.size(c) for c in columns if c is not None)
