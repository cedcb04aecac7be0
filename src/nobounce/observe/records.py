"""What the records of a trace and the limits of `bench` look like. Both are files, perhaps a stranger's: each
record is checked once, where it is read, so that what reckons with it needs no doubts of its own.

Fields that are not known are let through: other tools add theirs. What is known has its
type wherever it is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from nobounce.errors import json_kind, printable

_MOST_DEPTH = 64
"""Objects and lists in one another; records have 5, and what prints them again must be able to go as deep."""
_MOST_US = 1 << 53
"""Microseconds, 285 years: any sum of some is still a number to a browser."""


class _Kind(NamedTuple):
    """A plain value: what it is called, and whether a value is one."""

    name: str
    fits: Callable[[Any], bool]


Shape = _Kind | dict[str, Any] | list[Any]
"""A plain value, an object with the shapes of its fields ("*": of all), or a list
with the shape of each item."""

_COUNT = _Kind("a whole number from 0", lambda v: type(v) is int and 0 <= v < 1 << 63)
_NUMBER = _Kind("a number", lambda v: type(v) in (int, float) and abs(v) < _MOST_US)
_TIME = _Kind("a time in microseconds", lambda v: type(v) in (int, float) and 0 <= v < _MOST_US)
_RATE = _Kind("bytes per second", lambda v: type(v) in (int, float) and 0 <= v < 1e30)
_TEXT = _Kind("a string", lambda v: isinstance(v, str))
_ID = _Kind("a number or a string", lambda v: isinstance(v, str) or (type(v) is int and abs(v) < 1 << 63))
_CODES = _Kind(
    "a list of strings or an object of counts",
    lambda v: (
        all(isinstance(c, str) for c in v)
        if isinstance(v, list)
        else isinstance(v, dict) and all(map(_COUNT.fits, v.values()))
    ),
)
_RECEIPT: Shape = {
    "fastpath_bytes": _COUNT,
    "fallback_bytes": _COUNT,
    "cached_bytes": _COUNT,
    "host_traffic_bytes": _COUNT,
    "reasons": {"*": _COUNT},
    "retries": [{}],
}
_ARGS: dict[str, Shape] = {
    "filename": _TEXT,
    "device": _TEXT,
    "nbytes": _COUNT,
    "requests": _COUNT,
    "statuses": {"*": _COUNT},
    "refused": _CODES,
    "backend": _TEXT,
    "reason": _TEXT,
    "error": _TEXT,
    "receipt": _RECEIPT,
}
_ANY: dict[str, Shape] = {"pid": _ID, "tid": _ID}
_SLICE: dict[str, Shape] = {**_ANY, "name": _TEXT, "ts": _NUMBER, "dur": _TIME, "args": _ARGS}
_BY_CATEGORY = dict.fromkeys(("transfer", "batch", "chunk", "copy"), _SLICE)
_STATS = dict.fromkeys(("level", "fastpath_bytes", "fallback_bytes", "cached_bytes", "errors"), _COUNT)
_PROCESS: dict[str, Shape] = {"dropped": _COUNT, "stats": _STATS}
_END: Shape = {**_PROCESS, "processes": [_PROCESS]}


def loads(text: str) -> Any:
    """The JSON value of `text`. ValueError for what is none, for numbers that are not finite and for
    what is nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > _MOST_DEPTH and _deeper(value, _MOST_DEPTH):
        raise ValueError("nested too deeply")
    return value


def event_fault(event: Any) -> str:
    """What is wrong with an event of a trace, with its place, or ""."""
    if not isinstance(event, dict):
        return f"it is {_kind(event)}, expected an object"
    category = event.get("cat")
    known = _BY_CATEGORY.get(category, _ANY) if isinstance(category, str) else _ANY
    if event.get("ph") == "M" and event.get("name") == "thread_name":
        known = {**_ANY, "args": {"name": _TEXT}}
    return _fault(event, known, "")


def end_fault(other: Any) -> str:
    """What is wrong with what a trace says of its processes at its end, or ""."""
    return _fault(other, _END, "otherData")


def limits_fault(found: Any) -> str:
    """What is wrong with the object that `bench --json` printed, or ""."""
    if not isinstance(found, dict) or "limits" not in found:
        return "limits are missing"
    return _fault(found, {"limits": {"*": _RATE}}, "")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _deeper(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (left == 0 or any(_deeper(v, left - 1) for v in inner))


def _fault(value: Any, shape: Shape, place: str) -> str:
    if isinstance(shape, _Kind):
        return "" if shape.fits(value) else f"{place} is {_kind(value)}, expected {shape.name}"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place} is {_kind(value)}, expected a list"
        return next((w for i, v in enumerate(value) if (w := _fault(v, shape[0], f"{place}[{i}]"))), "")
    if not isinstance(value, dict):
        return f"{place or 'it'} is {_kind(value)}, expected an object"
    every = shape.get("*")
    pairs = (
        ((k, every) for k in value) if every is not None else ((k, s) for k, s in shape.items() if k in value)
    )
    for key, inner in pairs:
        if wrong := _fault(
            value[key], inner, f"{place}.{printable(key):.80}" if place else f"{printable(key):.80}"
        ):
            return wrong
    return ""


def _kind(value: Any) -> str:
    """A value in a message: a number as itself, all else by its kind."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value!r:.30}" if number else json_kind(value)
