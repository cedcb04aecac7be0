"""Makes model files of other formats than safetensors byte by byte, right ones and such as no writer makes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

GGUF_CODES = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "str": 8,
    "array": 9,
}
GGUF_CODES |= {"u64": 10, "i64": 11, "f64": 12}
_STRUCT = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
_STRUCT |= {"u64": "Q", "i64": "q", "f64": "d"}

GgufValue = tuple[str, Any]
"""A type's name and the value; of an array (element type, list)."""


def gguf_text(text: str | bytes, order: str = "<") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack(order + "Q", len(raw)) + raw


def gguf_value(value: GgufValue, order: str = "<") -> bytes:
    """The bytes of a value, without its type."""
    kind, content = value
    if kind == "str":
        return gguf_text(content, order)
    if kind == "array":
        inner, items = content
        head = struct.pack(order + "IQ", GGUF_CODES[inner], len(items))
        return head + b"".join(gguf_value((inner, item), order) for item in items)
    return struct.pack(order + _STRUCT[kind], content)


def gguf_file(
    keys: dict[str, GgufValue] | None = None,
    tensors: Iterable[tuple[str, Sequence[int], int, bytes]] = (),
    *,
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """A GGUF file of (name, dimensions as ggml has them, type, data) each. `counts` and `offsets` replace the right ones."""
    keys, tensors = keys or {}, list(tensors)
    if alignment != 32:
        keys = {**keys, "general.alignment": ("u32", alignment)}
    count, keyed = (len(tensors), len(keys)) if counts is None else counts
    out = b"GGUF" + struct.pack(order + "IQQ", version, count, keyed)
    for key, value in keys.items():
        out += (
            gguf_text(key, order) + struct.pack(order + "I", GGUF_CODES[value[0]]) + gguf_value(value, order)
        )
    at, data = 0, b""
    for number, (name, dims, kind, raw) in enumerate(tensors):
        where = at if offsets is None else offsets[number]
        out += gguf_text(name, order) + struct.pack(f"{order}I{len(dims)}QIQ", len(dims), *dims, kind, where)
        padded = raw + bytes(-len(raw) % alignment)
        data, at = data + padded, at + len(padded)
    return out + bytes(-len(out) % alignment) + data
