"""Builds safetensors files byte by byte, in spellings and with faults that no writer offers."""

from __future__ import annotations

import json
import struct
from typing import Any

from nobounce.formats.header import Header, parse_header


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_bytes(header: Any, data: bytes | int = b"") -> bytes:
    """A file with `header` (JSON text, bytes, or an object to print as safetensors does) and `data` (or that
    many zeros).
    """
    if not isinstance(header, str | bytes):
        header = json.dumps(header, separators=(",", ":"))
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + (bytes(data) if isinstance(data, int) else data)


def parse(header: Any, data_nbytes: int = 0, *, strict: bool = True) -> Header:
    """What parse_header makes of a header and a data section of that many bytes."""
    raw = file_bytes(header)[8:]
    return parse_header(
        raw,
        path="m.safetensors",
        file_nbytes=8 + len(raw) + data_nbytes,
        data_offset=8 + len(raw),
        strict=strict,
    )


def spellings(tensors: dict[str, Any]) -> dict[str, str]:
    """The same header as different writers print it; the fast scan reads the first four, the JSON parser the
    rest.
    """
    compact = (",", ":")
    return {
        "compact": json.dumps(tensors, separators=compact, ensure_ascii=False),
        "padded": json.dumps(tensors, separators=compact, ensure_ascii=False) + "   ",
        "spaced": json.dumps(tensors, ensure_ascii=False),
        "sorted": json.dumps(tensors, separators=compact, sort_keys=True, ensure_ascii=False),
        "escaped": json.dumps(tensors, separators=compact).replace('"dtype"', '"d\\u0074ype"'),
        "indented": json.dumps(tensors, indent=1),
    }
