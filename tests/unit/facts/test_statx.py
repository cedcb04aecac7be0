"""statx: the struct's fields and what an unset bit of the mask means."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from nobounce.facts.statx import parse, statx

BASIC, MOUNT, DIO, READ = 0x7FF, 0x1000, 0x2000, 0x20000


def raw(mask: int = BASIC | MOUNT | DIO, *, mem: int = 512, offset: int = 4096, read: int = 0) -> bytes:
    block = bytearray(256)
    struct.pack_into("=I", block, 0, mask)
    struct.pack_into("=H", block, 28, 0o100644)
    struct.pack_into("=QQ", block, 32, 77, 1 << 40)
    struct.pack_into("=qI", block, 96, 5, 6)
    struct.pack_into("=qI", block, 112, 7, 8)
    struct.pack_into("=IIII", block, 128, 1, 2, 259, 3)
    struct.pack_into("=QII", block, 144, 42, mem, offset)
    struct.pack_into("=I", block, 180, read)
    return bytes(block)


def test_every_field() -> None:
    found = parse(raw())
    assert (found.mode, found.inode, found.nbytes) == (0o100644, 77, 1 << 40)
    assert (found.device, found.rdev, found.mount_id) == ((259, 3), (1, 2), 42)
    assert (found.ctime_ns, found.mtime_ns) == (5 * 10**9 + 6, 7 * 10**9 + 8)
    assert (found.dio_mem_align, found.dio_offset_align, found.dio_read_offset_align) == (512, 4096, None)


def test_an_absent_bit_says_nothing_and_a_zero_says_no() -> None:
    absent = parse(raw(BASIC))
    assert (absent.mount_id, absent.dio_mem_align, absent.dio_offset_align) == (None, None, None)
    none = parse(raw(mem=0, offset=0))
    assert (none.dio_mem_align, none.dio_offset_align) == (0, 0)
    assert parse(raw(BASIC | READ, read=512)).dio_read_offset_align == 512
    assert parse(raw(BASIC, read=512)).dio_read_offset_align is None


def test_too_short_a_block_is_an_error() -> None:
    with pytest.raises(struct.error):
        parse(b"\0" * 100)


def test_a_real_file_and_a_closed_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 1000)
    fd = os.open(path, os.O_RDONLY)
    try:
        found, known = statx(fd), os.fstat(fd)
    finally:
        os.close(fd)
    assert (found.mode, found.inode, found.nbytes) == (known.st_mode, known.st_ino, 1000)
    assert found.device == (os.major(known.st_dev), os.minor(known.st_dev))
    assert found.mtime_ns == known.st_mtime_ns
    with pytest.raises(OSError):
        statx(fd)
