"""Calls beside a graph that is being captured.

A capture in CUDA's and HIP's default mode forbids whatever might be unsafe to every thread that is in that
mode itself, and ends when one does it all the same (HIP rule 88): asking an event, pinning memory, freeing.
I/O threads would end the captures of a program that never heard of them, so they leave that mode for good
with their first call here, and a caller's thread leaves it for the calls of a relay and for what allocates.
What is captured stays refused: the mode says nothing of the captured stream itself. The vendors' direct I/O
(cuFile, hipAmdFile) is called as it is.

The vendors' bindings swap the mode by value, or not at all; the function wants a pointer.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

Exchange = Callable[[Any], int]
"""(pointer to an int that holds the new mode and receives the old one) -> status."""

RELAXED = 2


class Captures:
    """The calling thread's capture mode. `find` looks for the vendor's function, once, and may find none."""

    def __init__(self, find: Callable[[], Exchange | None]) -> None:
        self._find, self._found = find, False
        self._exchange: Exchange | None = None
        self._local = threading.local()

    def relax(self) -> int:
        """Leave the default mode; the mode until now, for `restore`."""
        return self._swap(RELAXED)

    def restore(self, mode: int) -> None:
        """Take the mode of before; nothing where it was that already."""
        if mode != RELAXED:
            self._swap(mode)

    def undo(self) -> None:
        """After an interrupt somewhere in `relax`: what it replaced, if it got so far, lies where the
        vendor's function put it."""
        cell, _ = getattr(self._local, "cell", (None, None))
        if cell is not None:
            self.restore(int(cell.value))

    def forget(self) -> None:
        """In a forked child the vendor's library is of no use."""
        self._found, self._exchange = True, None

    def _swap(self, mode: int) -> int:
        if not self._found:
            self._exchange, self._found = self._find(), True
        if self._exchange is None:
            return RELAXED
        try:
            cell, pointer = self._local.cell
        except AttributeError:
            cell = ctypes.c_int(RELAXED)
            pointer = ctypes.pointer(cell)
            self._local.cell = cell, pointer
        cell.value = mode
        return RELAXED if self._exchange(pointer) else int(cell.value)


T = TypeVar("T")


class Apart(contextlib.AbstractContextManager[T]):
    """Inside, what `on` makes current is current, and no capture of another stream is disturbed."""

    __slots__ = ("_captures", "_mode", "_on")

    def __init__(self, captures: Captures, on: contextlib.AbstractContextManager[Any]) -> None:
        self._captures, self._on, self._mode = captures, on, RELAXED

    def inside(self) -> T:
        """What `as` gives."""
        return cast(T, None)

    def __enter__(self) -> T:
        self._on.__enter__()
        try:
            self._mode = self._captures.relax()
            return self.inside()
        except BaseException:
            try:
                self._captures.undo()
            finally:
                self._on.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._captures.restore(self._mode)
        except BaseException:
            self._captures.restore(self._mode)
            raise
        finally:
            self._on.__exit__(kind, error, trace)
