"""Nested dictionaries and lists of tensors as one dictionary, by names with dots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from nobounce.dtypes import DType
from nobounce.errors import clip
from nobounce.formats.assemble import MOST_TENSORS, stem
from nobounce.formats.unpickle import BadPickleError, Name, Pairs

_MOST_DEPTH = 64
_VISITS = 1 << 20
_MOST_NAMES = 32 << 20
"""Characters of all names together."""
_MOST_VALUES = 4096
_MOST_TEXT = 1000
_SHOWN = 16
"""Items of a list of plain values that metadata show."""


class Storage(NamedTuple):
    """A storage by its key in the archive; `dtype` None where its bytes have no type of their own."""

    key: str
    dtype: DType | None
    nbytes: int


class Tensor(NamedTuple):
    """How a tensor looks at a storage; offset and strides count elements."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Flat(NamedTuple):
    """The tensors by name, plain values as text, and what was left out of these."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    warnings: tuple[str, ...]


def flatten(root: Any, path: str, nbytes: int) -> Flat:
    """Every tensor of `root`, which a pickle of `nbytes` bytes made. One that is all there is has the name of
    the file at `path`. Raises BadPickleError where two tensors would have one name, where a key is neither
    text nor a whole number, for values that hold themselves, and beyond fixed bounds.
    """
    flat = Flat({}, {}, ())
    if type(root) is Tensor:
        return Flat({stem(path): root}, {}, ())
    left_out = visits = length = 0
    most = _VISITS + 2 * nbytes  # values that are reached in many ways could be visited without end
    stack: list[tuple[str | None, Iterator[tuple[Any, Any]], int]] = [("", _items(root), id(root))]
    above = {id(root)}
    while stack:
        prefix, items, mine = stack[-1]
        for key, value in items:
            visits += 1 + (len(value) if type(value) in (list, tuple) else 0)
            name = _name(prefix, key, len(stack))
            if type(value) is Tensor:
                if name is None:
                    raise BadPickleError(
                        f"has a tensor under a key of {clip(prefix or '')!r} that is neither text nor a "
                        "whole number"
                    )
                if name in flat.tensors:
                    raise BadPickleError(f"has two tensors that would be named {clip(name)!r}")
                flat.tensors[name] = value
                length += len(name)
            elif _nested(value):
                if id(value) in above or len(stack) == _MOST_DEPTH:
                    raise BadPickleError(f"is nested more than {_MOST_DEPTH} deep, or holds itself")
                above.add(id(value))
                stack.append((name, _items(value), id(value)))
                break
            elif name is not None and len(flat.metadata) < _MOST_VALUES:
                flat.metadata.setdefault(clip(name, _MOST_TEXT), _text(value))
            else:
                left_out += 1
            if visits > most or length > _MOST_NAMES or len(flat.tensors) > MOST_TENSORS:
                raise BadPickleError(f"has more than {MOST_TENSORS} tensors, or too many values beside them")
        else:
            stack.pop()
            above.discard(mine)
    warnings = (f"{left_out} values that are no tensors are not in the metadata",) if left_out else ()
    return flat._replace(warnings=warnings)


def _nested(value: Any) -> bool:
    """Whether it is a container that may hold tensors. A list of plain values is a value."""
    if isinstance(value, Pairs):
        return True
    return type(value) in (list, tuple) and any(type(v) in (Tensor, Pairs, list, tuple) for v in value)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Pairs):
        return iter(value.pairs)
    if type(value) in (list, tuple):
        return enumerate(value)
    raise BadPickleError(f"holds no tensors, but {clip(_text(value), 100)}")


def _name(prefix: str | None, key: Any, depth: int) -> str | None:
    if prefix is None or type(key) not in (str, int):
        return None
    return f"{prefix}.{key}" if depth > 1 else str(key)


def _text(value: Any) -> str:
    """A plain value for metadata."""
    if type(value) in (list, tuple):
        if len(value) > _SHOWN:
            return f"{len(value)} values"
        return f"[{', '.join(clip(_text(v), 100) for v in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, int | float):
        return "null" if value is None else repr(value)
    if isinstance(value, str):
        return clip(value, _MOST_TEXT)
    if isinstance(value, Name):
        return value.text
    return f"{len(value)} bytes" if isinstance(value, bytes) else "a storage"
