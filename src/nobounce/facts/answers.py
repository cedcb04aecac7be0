"""What the answers of a capture look like. A capture comes from another machine, or was made up:
it is checked once, when it is read, so that every question to it ends in an answer or an OSError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

from nobounce.facts.extents import IndirectCode

_MOST_ERRNO = 4095  # MAX_ERRNO of include/linux/err.h
_NEVER_FAIL = frozenset({"access", "environment", "euid", "exists", "uname"})
"""Questions that every machine answers: their askers expect no error."""


def malformed(key: str, answer: Any) -> bool:
    """Whether this is no answer that a source gives to the question `key`. What a child process prints
    is its asker's to judge."""
    if not isinstance(answer, dict) or len(answer) != 1:
        return True
    try:
        question = json.loads(key)
    except (ValueError, RecursionError):
        return True
    if not isinstance(question, list) or not question or not isinstance(question[0], str):
        return True
    if "errno" in answer:
        code = answer["errno"]
        return question[0] in _NEVER_FAIL or not (_number(code) and 0 < code <= _MOST_ERRNO)
    if "value" not in answer:
        return True
    shape = _SHAPES.get(question[0])
    return shape is not None and not shape(answer["value"])


def _number(value: Any) -> bool:
    return type(value) is int


def _count(value: Any) -> bool:
    return _number(value) and 0 <= value < 1 << 64


def _size(value: Any) -> bool:
    return _number(value) and 0 <= value < 1 << 63


def _align(value: Any) -> bool:
    return _number(value) and 0 <= value < 1 << 32


def _mode(value: Any) -> bool:
    return _number(value) and 0 <= value < 1 << 16


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _bytes(value: Any) -> bool:
    return isinstance(value, str) and all(ord(c) < 256 for c in value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _maybe(shape: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or shape(value)


def _row(*shapes: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def matches(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(shapes)
            and all(shape(x) for shape, x in zip(shapes, value, strict=True))
        )

    return matches


def _anything(value: Any) -> bool:
    return True


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _extents(value: Any) -> bool:
    return isinstance(value, list) and all(map(_EXTENT, value))


_PAIR = _row(_count, _count)
_EXTENT = _row(_size, _size, lambda code: code in get_args(IndirectCode))

_SHAPES: dict[str, Callable[[Any], bool]] = {
    "read": _bytes,
    "readlink": _text,
    "realpath": _text,
    "listdir": _texts,
    "exists": _flag,
    "access": _flag,
    "environment": _maybe(_text),
    "uname": _row(*[_text] * 5),
    "euid": _count,
    "statfs": _maybe(_count),
    "statx": _row(
        _mode, _size, _count, _PAIR, _PAIR, _number, _number, _maybe(_count), *[_maybe(_align)] * 3
    ),
    "open": _flag,
    "mode": _mode,
    "open_direct": _count,
    "cachestat": _count,
    "probe:access_mode": _count,
    "probe:affinity": _count,
    "probe:direct_in": _row(_count, _align, _align),
    "probe:direct_read": _text,
    "probe:dkms_status": _text,
    "probe:glob": _texts,
    "probe:groups": _texts,
    "probe:indirect": _extents,
    "probe:inode_flags": _align,
    "probe:kallsyms": _row(_flag, _flag),
    "probe:kernel_config": _texts,
    "probe:kfd_version": _PAIR,
    "probe:model_files": _row(_text, _texts),
    "probe:ldconfig": _texts,
    "probe:online_cpus": _count,
    "probe:open_node": _row(_count, _text),
    "probe:physical_memory": _count,
    "probe:rdev": _PAIR,
    "probe:sites": _texts,
    "probe:amdsmi": _anything,
    "probe:hip_library": _anything,
}
"""Every question there is. One that is not here was asked by a version with other
questions, and is not asked any more."""
