"""The file of a BlockStore: its header, the entries of its slot table, and where each slot lies. docs/kv.md draws it.

All numbers are little-endian. The sums of the header and of the entries need no library: they must be checked before anything in
the file is believed, with xxhash installed or not, and a million entries at once, so they are made of numpy's operations.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from nobounce.errors import ArgumentError, FormatError
from nobounce.records import record

Array = np.ndarray[Any, Any]

MAGIC = b"nbkvsto\0"
VERSION = 1
PAGE = 4096
ENTRY = np.dtype(
    [
        ("key", "<u8", 2),
        ("tag", "<u8"),
        ("generation", "<u8"),
        ("data_sum", "<u8"),
        ("flags", "<u4"),
        ("boot", "<u4"),
        ("slot", "<u8"),
        ("sum", "<u8"),
    ]
)
"""64 bytes: none ever spans two pages."""
WORDS = ENTRY.itemsize // 8
CHECKED, DURABLE = 1, 2
"""Flags of an entry: `data_sum` is the XXH3-64 of its slot; its data was synced before the entry was written."""

_HEADER = struct.Struct("<8sIIQQQQ16s16s16s")
_SUM = struct.Struct("<Q")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


@record
class Geometry:
    """What a store's file holds: `capacity` slots, each with one row of every tensor, at `part_offsets` in it.

    `row_nbytes` are the sizes of a row of each tensor, `slot_nbytes` a multiple of 4096; offsets are bytes in the file.
    """

    capacity: int
    row_nbytes: tuple[int, ...]
    part_offsets: tuple[int, ...]
    slot_nbytes: int
    identity: bytes
    state_offset: int
    table_offset: int
    data_offset: int
    file_nbytes: int


def geometry(capacity: int, row_nbytes: tuple[int, ...], identity: str) -> Geometry:
    """The places of everything. A row of a page or more begins on a page, so that direct I/O takes it."""
    offsets, at = [], 0
    for nbytes in row_nbytes:
        at = round_up(at, PAGE if nbytes >= PAGE else 8)
        offsets.append(at)
        at += nbytes
    slot = round_up(at, PAGE)
    data = 2 * PAGE + round_up(capacity * ENTRY.itemsize, PAGE)
    end = data + capacity * slot
    if end >= 1 << 63:
        raise ArgumentError(f"{capacity} slots of {slot} bytes are more than any file holds")
    called = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return Geometry(capacity, row_nbytes, tuple(offsets), slot, called, PAGE, 2 * PAGE, data, end)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def header(of: Geometry, store_id: bytes) -> bytes:
    """The first page: what the file is, and whose."""
    rows = hashlib.blake2b(np.array(of.row_nbytes, "<u8").tobytes(), digest_size=16).digest()
    fields = (MAGIC, VERSION, ENTRY.itemsize, of.capacity, of.slot_nbytes, len(of.row_nbytes), of.data_offset)
    page = _HEADER.pack(*fields, rows, of.identity, store_id).ljust(PAGE - _SUM.size, b"\0")
    return page + _SUM.pack(int(_sums(np.frombuffer(page, "<u8")[None, :], 0)[0]))


def store_id(page: bytes, want: Geometry, path: str) -> bytes:
    """The id of the store whose first page this is. Raises FormatError where it is another file than `want` describes."""

    def bad(reason: str) -> FormatError:
        return FormatError(reason, filename=path, offset=0)

    if len(page) < PAGE or page[: len(MAGIC)] != MAGIC:
        raise bad("is no file of a BlockStore")
    _, version, _, capacity, slot, parts, _, _, identity, found = _HEADER.unpack_from(page)
    if version != VERSION:
        raise bad(f"is a BlockStore of version {version}; version {VERSION} is known here")
    (told,) = _SUM.unpack_from(page, PAGE - _SUM.size)
    if told != int(_sums(np.frombuffer(page[: -_SUM.size], "<u8")[None, :], 0)[0]):
        raise bad(
            "the header does not match its own checksum: it was changed. Remove the file, and it is made anew"
        )
    for name, has, wants in (
        ("capacity", capacity, want.capacity),
        ("bytes in a slot", slot, want.slot_nbytes),
        ("tensors in the layout", parts, len(want.row_nbytes)),
    ):
        if has != wants:
            raise bad(f"the store has {has} {name}, and is opened with {wants}")
    if identity != want.identity:
        raise bad("the store was made with another identity: its blocks are of another model or setting")
    if header(want, found) != page:
        raise bad("the store was made with another layout: the rows have other sizes")
    return bytes(found)


def seed_of(store: bytes) -> int:
    """What the sums of a store's entries begin with: an entry of another store is none here."""
    return int.from_bytes(store[:8], "little")


def seal(entries: Array, seed: int) -> None:
    """Write each entry's sum into it."""
    words = entries.view("<u8").reshape(-1, WORDS)
    words[:, -1] = _sums(words[:, :-1], seed)


def whole(entries: Array, seed: int) -> Array:
    """Which entries are whole: in use, and as they were written (bool)."""
    words = entries.view("<u8").reshape(-1, WORDS)
    found: Array = (words[:, -1] == _sums(words[:, :-1], seed)) & (entries["generation"] != 0)
    return found


def _sums(words: Array, seed: int) -> Array:
    """A sum of each row of 64-bit words. Every step is one-to-one, so a change of one word is always seen."""
    sums = np.full(len(words), seed, np.uint64)
    for column in words.T:
        sums = (sums ^ column) * _MULTIPLIER
        sums ^= sums >> _SHIFT
    return sums


Key = bytes | int | str


def digest(key: Key) -> bytes:
    """24 bytes that stand for a key, the same in every process: 16 to find it by, 8 to tell it from others. A key of one kind never
    equals one of another. Raises ArgumentError for what is no key."""
    if isinstance(key, bytes):
        raw, kind = key, b"nobounce-kv-byte"
    elif isinstance(key, str):
        raw, kind = key.encode("utf-8", "surrogatepass"), b"nobounce-kv-text"
    elif type(key) is not bool and isinstance(key, int):
        raw, kind = key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True), b"nobounce-kv-int."
    else:
        raise ArgumentError(f"a key is bytes, an int or a str, not {type(key).__name__}")
    return hashlib.blake2b(raw, digest_size=24, person=kind).digest()
