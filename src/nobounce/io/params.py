"""Parameters of an async transfer that may be bound late: integers that somebody else can still write.

hipFile reads size and offsets through pointers, at submission where the stream is registered as FIXED and
again at the head of the stream where it is not (D-4). Here any object with a writable integer stands for such
a pointer: a `Cell`, a ctypes integer (`.value`), a 0-d numpy int64 (`[()]`). A plain int is fixed by nature.
"""

from __future__ import annotations

import enum
import operator
from typing import Any

from nobounce.errors import ArgumentError


class StreamFlags(enum.IntFlag):
    """Promises about the transfers of a registered stream (hipFile A-11)."""

    NONE = 0
    FIXED_BUFFER_OFFSET = 1
    FIXED_FILE_OFFSET = 2
    FIXED_NBYTES = 4
    PAGE_ALIGNED_INPUTS = 8
    ALL = 15


class Cell:
    """A writable integer, for sizes and offsets that are known only when the stream gets there."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __index__(self) -> int:
        return operator.index(self.value)

    def __repr__(self) -> str:
        return f"Cell({self.value})"


def is_late(parameter: Any) -> bool:
    """Whether the parameter can still change after submission."""
    return not isinstance(parameter, int) and (hasattr(parameter, "value") or _is_scalar_array(parameter))


def _is_scalar_array(parameter: Any) -> bool:
    return getattr(parameter, "shape", None) == () and hasattr(parameter, "__setitem__")


def read(parameter: Any, name: str) -> int:
    """The parameter's value now. Raises ArgumentError for anything that holds no integer."""
    if type(parameter) is int:  # nearly always, and looking for attributes that are not there takes its time
        return parameter
    held = parameter.value if hasattr(parameter, "value") and not isinstance(parameter, int) else parameter
    try:
        return operator.index(held[()] if _is_scalar_array(held) else held)
    except TypeError:
        raise ArgumentError(
            f"{name} is a {type(parameter).__name__}: give an int, a Cell, a ctypes integer or a 0-d "
            "integer array"
        ) from None


def write(parameter: Any, value: int) -> None:
    """Set a late-bound integer (bytes_done)."""
    if hasattr(parameter, "value"):
        parameter.value = value
    elif _is_scalar_array(parameter):
        parameter[()] = value
    else:
        raise ArgumentError(f"bytes_done is a {type(parameter).__name__}, which cannot be written")
