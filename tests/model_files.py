"""Makes model files of other formats than safetensors byte by byte, right ones and such as no writer makes."""

from __future__ import annotations

import struct
import zlib
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
    out = bytearray(b"GGUF" + struct.pack(order + "IQQ", version, count, keyed))
    for key, value in keys.items():
        out += (
            gguf_text(key, order) + struct.pack(order + "I", GGUF_CODES[value[0]]) + gguf_value(value, order)
        )
    at, data = 0, bytearray()
    for number, (name, dims, kind, raw) in enumerate(tensors):
        where = at if offsets is None else offsets[number]
        out += gguf_text(name, order) + struct.pack(f"{order}I{len(dims)}QIQ", len(dims), *dims, kind, where)
        padded = raw + bytes(-len(raw) % alignment)
        data += padded
        at += len(padded)
    return bytes(out) + bytes(-len(out) % alignment) + data


def npy_file(
    descr: str = "<f4",
    shape: str = "(2,)",
    data: bytes = bytes(8),
    *,
    fortran: str = "False",
    version: int = 1,
    text: str | None = None,
) -> bytes:
    """A .npy file; `text` replaces the whole dictionary."""
    said = (
        text
        if text is not None
        else f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    )
    raw = said.encode("utf-8" if version == 3 else "latin-1") + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(raw))
    return b"\x93NUMPY" + bytes([version, 0]) + size + raw + data


def zip_file(members: Iterable[tuple[str, bytes]], *, method: int = 0, align: int = 1) -> bytes:
    """A zip archive; the bytes of each member begin at a multiple of `align`, as torch has it."""
    out, directory, count = bytearray(), bytearray(), 0
    for name, raw in members:
        named = name.encode()
        pad = -(len(out) + 30 + len(named)) % align
        pad += align if 0 < pad < 4 else 0
        extra = struct.pack("<2sH", b"FB", pad - 4) + bytes(pad - 4) if pad else b""
        fields = (0x800, method, 0, 0, zlib.crc32(raw), len(raw), len(raw), len(named))
        directory += struct.pack(
            "<4s2H4H3I5H2I", b"PK\1\2", 20, 20, *fields[:4], *fields[4:], 0, 0, 0, 0, 0, len(out)
        )
        directory += named
        out += struct.pack("<4s5H3I2H", b"PK\3\4", 20, *fields, len(extra)) + named + extra + raw
        count += 1
    end = b""
    if count >= 0xFFFF:
        sizes = count, count, len(directory), len(out)
        end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *sizes)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, len(out) + len(directory), 1)
    end += struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), len(directory), len(out), 0
    )
    return bytes(out + directory + end)


class Call:
    """Something that a pickle makes by calling `name` ("module.function") with `arguments`; without arguments, the name itself."""

    def __init__(self, name: str, *arguments: Any, called: bool = True) -> None:
        self.name, self.arguments, self.called = name, arguments, called


def storage(kind: str, key: str, count: int, location: str = "cpu") -> Any:
    """A storage as checkpoints name it: a persistent id."""
    return Call("", "storage", Call(f"torch.{kind}Storage", called=False), key, location, count)


def pickled(value: Any) -> bytes:
    """`value` by protocol 2, as opcodes."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        if 0 <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        return b"\x8a\x10" + value.to_bytes(16, "little", signed=True)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_opcodes, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(k) + _opcodes(v) for k, v in value.items()) + b"u"
    if not value.name:
        return _opcodes(value.arguments) + b"Q"
    module, _, name = value.name.rpartition(".")
    named = f"c{module}\n{name}\n".encode()
    return named + _opcodes(value.arguments) + b"R" if value.called else named


def tensor(kept: Any, offset: Any = 0, shape: Any = (2,), strides: Any = (1,), *more: Any) -> Call:
    """A tensor as torch has written it since 0.4."""
    return Call(
        "torch._utils._rebuild_tensor_v2",
        kept,
        offset,
        shape,
        strides,
        False,
        Call("collections.OrderedDict"),
        *more,
    )


def checkpoint(
    value: Any, storages: dict[str, bytes], *, byteorder: str = "little", root: str = "archive"
) -> bytes:
    """A checkpoint: `value`, or a whole pickle as bytes, and the bytes of each storage."""
    raw = value if isinstance(value, bytes) else pickled(value)
    members = [(f"{root}/data.pkl", raw), (f"{root}/byteorder", byteorder.encode())]
    members += [(f"{root}/data/{key}", data) for key, data in storages.items()]
    return zip_file([*members, (f"{root}/version", b"3\n")], align=64)
