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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return Repeated(key)
            seen.add(key)
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


def _integer(text: str) -> int | float:
    # "-0" is a float to readers in other languages, and Python refuses to convert very long integers
    if text == "-0" or len(text) > 40:
        return float(text)
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
_CAREFUL = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
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
    if _SURROGATE_ESCAPE.search(text) and _lone(value):
        raise ValueError("a string holds half of a surrogate pair")
    return value


def raw_decode(text: str, start: int) -> tuple[Any, int]:
    """Like `loads`, for one value that begins at `start`; also returns where it ends."""
    try:
        _, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return loads(text[start:end]), end


def _lone(value: Any) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                return True
        elif isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, Repeated):
            todo.append(item.key)
    return False


def clip(text: str, limit: int = 200) -> str:
    """`text` short enough for a message."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
