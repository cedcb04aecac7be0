"""The requests of a batch as columns, and what a batch hands back.

A request is a slot in a few arrays from its submission until its result is taken; then the slot is free
again. Memory is bounded by the batch's capacity, and grows to it only as needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Status = Literal["complete", "failed", "invalid", "cancelled", "timeout"]
Way = Literal["", "fastpath", "fallback", "both"]

FREE, ADDED, QUEUED, RUNNING, COMPLETE, FAILED, INVALID, CANCELLED, TIMEOUT = range(9)
STATUS_NAMES: tuple[str, ...] = (
    *("free", "added", "queued", "running"),
    *("complete", "failed", "invalid", "cancelled", "timeout"),
)
NO_WAY, FASTPATH, FALLBACK = 0, 1, 2
WAY_NAMES: tuple[Way, ...] = ("", "fastpath", "fallback", "both")
"""Indexed by the bits FASTPATH | FALLBACK."""


class BatchEvent(NamedTuple):
    """The end of one request: its id, bytes moved, errno (0: none), status, backend, cookie and,
    if it failed, the error."""

    id: int
    nbytes: int
    errno: int
    status: Status
    backend: Way
    cookie: Any
    error: Exception | None


@dataclass(frozen=True)
class BatchResult:
    """Requests that have ended, in the order in which they did, as arrays of one length;
    iterates as BatchEvents.

    `ids` and `nbytes` (bytes moved) are int64, `errnos` int32 (0 where nothing failed). `errors` holds
    the exception of each request that is not complete, by id. A read that met the end of the file is
    complete, with fewer bytes.
    """

    ids: Array
    nbytes: Array
    errnos: Array
    codes: Array = field(repr=False)
    ways: Array = field(repr=False)
    cookies: tuple[Any, ...] | None = None
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def statuses(self) -> list[str]:
        """complete, failed, invalid, cancelled or timeout, each."""
        return [STATUS_NAMES[c] for c in self.codes]

    @property
    def backends(self) -> list[str]:
        """fastpath, fallback, both, or "" where nothing moved."""
        return [WAY_NAMES[w] for w in self.ways]

    @property
    def ok(self) -> bool:
        """Whether every request here is complete."""
        return not self.errors

    def check(self) -> BatchResult:
        """Raise the first error here, if there is one; returns the result itself."""
        for error in self.errors.values():
            raise error
        return self

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[BatchEvent]:
        for i, key in enumerate(self.ids.tolist()):
            yield BatchEvent(
                key,
                int(self.nbytes[i]),
                int(self.errnos[i]),
                STATUS_NAMES[self.codes[i]],
                WAY_NAMES[self.ways[i]],
                self.cookies[i] if self.cookies is not None else None,
                self.errors.get(key),
            )


class Table:
    """The columns. `take` and `give` hand slots out and back; everything else is the batch's to write."""

    COLUMNS = (
        ("id", "i8"),
        ("group", "i8"),
        ("row", "i8"),
        ("file_offset", "i8"),
        ("buffer_offset", "i8"),
        ("nbytes", "i8"),
        ("done", "i8"),
        ("deadline", "f8"),
        ("errno", "i4"),
        ("status", "u1"),
        ("way", "u1"),
        ("kind", "u1"),
        ("reason", "i1"),
        ("left", "?"),
    )
    id: Array
    group: Array
    row: Array
    """Its place among the requests of its group."""
    file_offset: Array
    buffer_offset: Array
    nbytes: Array
    done: Array
    deadline: Array
    errno: Array
    status: Array
    way: Array
    kind: Array
    reason: Array
    left: Array
    """Its result has been taken although it still runs (a timeout): the slot is free when it ends."""

    def __init__(self, capacity: int) -> None:
        import numpy as np

        self.capacity = capacity
        self._room = 0
        for name, kind in self.COLUMNS:
            setattr(self, name, np.zeros(0, kind))
        self._free: Array = np.zeros(0, np.int64)

    @property
    def used(self) -> int:
        """Slots in use."""
        return self._room - len(self._free)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def take(self, count: int) -> Array:
        """`count` free slots; the caller has looked at `free`."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        taken = self._free[len(self._free) - count :][::-1].copy()
        self._free = self._free[: len(self._free) - count]
        return taken

    def give(self, slots: Array) -> None:
        """These slots are free again."""
        import numpy as np

        self.status[slots] = FREE
        self.left[slots] = False
        self._free = np.concatenate([self._free, slots[::-1]])

    def _grow(self, by: int) -> None:
        import numpy as np

        room = min(self.capacity, max(self._room * 2, self._room + by, 64))
        more = room - self._room
        for name in (n for n, _ in self.COLUMNS):
            old = getattr(self, name)
            new = np.zeros(more, old.dtype)
            setattr(self, name, np.concatenate([old, new]) if self._room else new)
        fresh = np.arange(room - 1, self._room - 1, -1, dtype=np.int64)
        self._free = np.concatenate([fresh, self._free])
        self._room = room
