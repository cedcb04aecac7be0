"""Pointers to integers, in Python: late-bound parameters, and places for results."""

from __future__ import annotations

from typing import Any

from nobounce.errors import ArgumentError
from nobounce.hipfile.status import Rejected
from nobounce.hipfile.types import MAX_RW_COUNT
from nobounce.io import params
from nobounce.io.params import Cell as Cell


class Place(Cell):
    """A Cell that is not read."""


def store(out: Any, value: int) -> None:
    """Write a result to where the caller wants it."""
    if not isinstance(out, Place):
        params.write(out, value)


class CappedSize:
    """A late-bound size, read as at most MAX_RW_COUNT (A-13)."""

    __slots__ = ("_size",)

    def __init__(self, size: Any) -> None:
        self._size = size

    @property
    def value(self) -> int:
        return min(params.read(self._size, "size"), MAX_RW_COUNT)


def capped_size(size: Any) -> Any:
    """The size with its cap: an int at once, what is late-bound whenever it is read."""
    return CappedSize(size) if params.is_late(size) else min(params.read(size, "size"), MAX_RW_COUNT)


def check_place(out: Any) -> None:
    """Raise Rejected where no result can be written to `out`."""
    if isinstance(out, int):
        raise Rejected("an int cannot be written to")
    try:
        params.write(out, 0)
    except (ArgumentError, TypeError, ValueError) as e:
        raise Rejected(str(e)) from e
