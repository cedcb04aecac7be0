"""JSON as files from strangers need it: no key twice, no NaN, no lone surrogate, and only ValueError on
failure.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn


class Repeated:
    """Stands for an object in which `key` was given twice; kept as a value so that the reader can name the
    place.
    """

    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
    """For `object_pairs_hook`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return Repeated(key)
            seen.add(key)
    return found


def no_constant(text: str) -> NoReturn:
    """For `parse_constant`: NaN and Infinity are refused."""
    raise ValueError(f"{text} is no JSON value")


def integer(text: str) -> int | float:
    """For `parse_int`."""
    # "-0" is a float to readers in other languages, and Python refuses to convert very long integers
    if text == "-0" or len(text) > 40:
        return float(text)
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=no_constant)
_CAREFUL = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=no_constant, parse_int=integer)
_ODD_INTEGER = re.compile(r"-0(?![.0-9])|[0-9]{41}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def loads(text: str) -> Any:
    """The value of `text`, with `Repeated` in the place of objects that give a key twice.

    Integers longer than 40 digits and "-0" come as floats. ValueError (JSONDecodeError where it has a
    position) for everything that is not strict JSON, including nesting too deep for the parser.
    """
    decoder = _CAREFUL if _ODD_INTEGER.search(text) else _DECODER
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _SURROGATE_ESCAPE.search(text) and lone_surrogate(value):
        raise ValueError("a string holds half of a surrogate pair")
    return value


def raw_decode(text: str, start: int) -> tuple[Any, int]:
    """Like `loads`, for one value that begins at `start`; also returns where it ends."""
    try:
        _, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return loads(text[start:end]), end


def lone_surrogate(value: Any) -> bool:
    """Whether a string anywhere in a JSON value holds half of a surrogate pair."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            if not item.isascii() and _SURROGATE.search(item):
                return True
        elif isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
        elif isinstance(item, Repeated):
            todo.append(item.key)
    return False
