"""K10, K11: transfers seen from outside, each backend forced, and the data that they leave."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import pytest

from hipfile_rig import (
    BLOCK,
    CHUNK,
    Rig,
    content,
    get,
    in_threads,
    only,
    part,
    pattern,
    put,
    settings,
    size_of,
)
from nobounce import hipfile

LINE = 64
PUBLISHED_CHUNK = 16 << 20


def test_K136_an_unregistered_buffer_at_an_offset(each: Rig, backend: str) -> None:
    data = pattern(BLOCK)
    memory = each.memory(3 * BLOCK)
    assert hipfile.read(each.file(data), memory.handle, BLOCK, 0, BLOCK) == BLOCK
    assert get(memory) == b"\xee" * BLOCK + data + b"\xee" * BLOCK


def test_K137_overflow_is_5022(each: Rig, backend: str, op: str) -> None:
    call = hipfile.read if op == "read" else hipfile.write
    handle, memory = each.file(pattern(2 * BLOCK)), each.memory(BLOCK)
    assert call(handle, memory.handle, 2 * BLOCK, 0, 0) == -5022
    assert call(handle, memory.handle, BLOCK, 0, BLOCK) == -5022


def test_K138_negative_offsets_are_einval_as_of_pread(each: Rig, backend: str, op: str) -> None:
    call = hipfile.read if op == "read" else hipfile.write
    handle, memory = each.file(pattern(BLOCK)), each.memory(BLOCK)
    for where in ((-BLOCK, 0), (0, -BLOCK), (-1, -1)):
        assert call(handle, memory.handle, BLOCK, *where) == -1
        assert hipfile.last_errno() == errno.EINVAL


def test_K139_what_was_read_is_visible_per_cache_line_within_5_s(cpu: Rig, backend: str) -> None:
    nbytes = 1 << 20
    data = bytes([0xA5]) * nbytes
    handle, memory = cpu.file(data), cpu.memory(nbytes)
    lines = range(memory.handle, memory.handle + nbytes, LINE)
    ready, seen = threading.Event(), threading.Event()

    def watch() -> None:
        waiting = list(lines)
        ready.set()
        while waiting:
            waiting = [a for a in waiting if ctypes.c_ubyte.from_address(a).value != 0xA5]
        seen.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert ready.wait(30)
    assert not seen.is_set()
    assert hipfile.read(handle, memory.handle, nbytes, 0, 0) == nbytes
    assert seen.wait(5)
    watcher.join(30)


def test_K140_zero_size_at_every_aligned_offset_and_beyond_eof(each: Rig, backend: str, op: str) -> None:
    call = hipfile.read if op == "read" else hipfile.write
    fd = each.fd(pattern(2 * BLOCK))
    handle, memory = each.file_of(fd), each.memory(BLOCK)
    for offset in range(0, 8 * BLOCK, BLOCK):
        assert call(handle, memory.handle, 0, offset, 0) == 0
    assert size_of(fd) == 2 * BLOCK
    assert get(memory) == b"\xee" * BLOCK


def test_K141_the_first_call_of_a_thread(each: Rig, backend: str, op: str) -> None:
    call = hipfile.read if op == "read" else hipfile.write
    handle, memory = each.file(pattern(BLOCK)), each.memory(BLOCK)
    results: list[int] = []
    assert in_threads(4, lambda i: results.append(call(handle, memory.handle, BLOCK, 0, 0))) == []
    assert results == [BLOCK] * 4


@pytest.mark.parametrize(
    "nbytes",
    [
        BLOCK,
        PUBLISHED_CHUNK - BLOCK,
        PUBLISHED_CHUNK,
        PUBLISHED_CHUNK + BLOCK,
        2 * PUBLISHED_CHUNK,
        CHUNK + BLOCK,
    ],
)
def test_K142_guard_bands_stay(rig: Rig, backend: str, nbytes: int) -> None:
    guard = b"\x5a" * BLOCK
    data = pattern(nbytes)
    fd = rig.fd(guard + data + guard)
    handle, memory = rig.file_of(fd), rig.memory(nbytes + 2 * BLOCK)
    assert hipfile.read(handle, memory.handle, nbytes, BLOCK, BLOCK) == nbytes
    assert get(memory) == b"\xee" * BLOCK + data + b"\xee" * BLOCK
    put(memory, b"\x00" * 100, BLOCK)
    assert hipfile.write(handle, memory.handle, nbytes, BLOCK, BLOCK) == nbytes
    assert content(fd) == guard + b"\x00" * 100 + data[100:] + guard


@pytest.mark.parametrize("stride", [2, 32, 64, 512])
def test_K143_what_the_device_changed_is_written(each: Rig, backend: str, stride: int) -> None:
    """The published test changes every stride-th byte in a kernel; here fills in stream order are the device's work."""
    nbytes = 2 * BLOCK if stride > 2 else BLOCK
    data = pattern(nbytes)
    fd = each.fd(data)
    handle, memory = each.file_of(fd), each.memory(nbytes)
    assert hipfile.read(handle, memory.handle, nbytes, 0, 0) == nbytes
    for at in range(0, nbytes, stride):
        each.runtime.fill_async(memory.handle + at, 0x77, 1, 0)
    each.device.sync()
    assert hipfile.write(handle, memory.handle, nbytes, 0, 0) == nbytes
    expected = bytearray(data)
    expected[::stride] = b"\x77" * len(expected[::stride])
    assert content(fd) == bytes(expected)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 511, 513])
def test_K144_byte_granularity(each: Rig, size: int) -> None:
    only("fallback")
    data = pattern(BLOCK)
    fd = each.fd(data)
    handle, memory = each.file_of(fd), each.memory(BLOCK)
    assert hipfile.read(handle, memory.handle, size, 5, 3) == size
    assert get(memory) == b"\xee" * 3 + data[5 : 5 + size] + b"\xee" * (BLOCK - 3 - size)
    assert hipfile.write(handle, memory.handle, size, 1000, 2) == size
    assert content(fd) == data[:1000] + (b"\xee" + data[5 : 5 + size])[:size] + data[1000 + size :]


@pytest.mark.parametrize("file_offset", [0, 1, 511, BLOCK - 1, BLOCK])
@pytest.mark.parametrize("buffer_offset", [0, 1, 255, BLOCK])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_K145_unaligned_matrix(rig: Rig, file_offset: int, buffer_offset: int, size: int) -> None:
    only("fallback")
    data = pattern(4 * BLOCK)
    fd = rig.fd(data)
    handle, memory = rig.file_of(fd), rig.memory(3 * BLOCK)
    assert hipfile.read(handle, memory.handle, size, file_offset, buffer_offset) == size
    assert get(memory, buffer_offset, size) == data[file_offset : file_offset + size]
    assert get(memory, buffer_offset + size, 8) == b"\xee" * 8
    put(memory, pattern(size, 99), buffer_offset)
    assert hipfile.write(handle, memory.handle, size, file_offset, buffer_offset) == size
    assert content(fd) == data[:file_offset] + pattern(size, 99) + data[file_offset + size :]


@pytest.mark.parametrize(
    ("before", "file_offset", "size"),
    [
        pytest.param(0, 0, BLOCK, id="from_empty"),
        pytest.param(BLOCK, BLOCK, BLOCK, id="append"),
        pytest.param(BLOCK, 4 * BLOCK, BLOCK, id="hole"),
        pytest.param(2 * BLOCK, BLOCK, 2 * BLOCK, id="overwrite_and_append"),
        pytest.param(BLOCK, BLOCK, PUBLISHED_CHUNK + BLOCK, id="append_over_chunks"),
        pytest.param(0, 0, 77, id="from_empty_unaligned"),
        pytest.param(100, 100, 77, id="append_unaligned"),
        pytest.param(100, 5000, 77, id="hole_unaligned"),
        pytest.param(100, 50, 77, id="overwrite_and_append_unaligned"),
        pytest.param(33, 33, CHUNK + 77, id="append_over_chunks_unaligned"),
    ],
)
def test_K146_extending_writes(rig: Rig, before: int, file_offset: int, size: int) -> None:
    for forced in ("fallback", "fastpath"):
        if forced == "fastpath" and (file_offset % BLOCK or size % BLOCK):
            continue
        only(forced)
        old, new = pattern(before, 1), pattern(size, 2)
        fd = rig.fd(old)
        memory = rig.memory(size, new)
        assert hipfile.write(rig.file_of(fd), memory.handle, size, file_offset, 0) == size
        expected = bytearray(max(before, file_offset + size))
        expected[:before] = old
        expected[file_offset : file_offset + size] = new
        assert content(fd) == bytes(expected)


def test_a_read_of_a_sparse_file_is_zeroes(rig: Rig, backend: str) -> None:
    fd = rig.fd()
    os.ftruncate(fd, 4 * BLOCK)
    memory = rig.memory(4 * BLOCK)
    assert hipfile.read(rig.file_of(fd), memory.handle, 4 * BLOCK, 0, 0) == 4 * BLOCK
    assert get(memory) == bytes(4 * BLOCK)


def test_objects_stand_for_their_memory(each: Rig) -> None:
    settings()
    data = pattern(BLOCK)
    memory = each.memory(BLOCK)
    handle = each.file(data)
    for base in (memory, part(memory, 0, BLOCK), ctypes.c_void_p(memory.handle)):
        put(memory, bytes(BLOCK))
        assert hipfile.read(handle, base, BLOCK, 0, 0) == BLOCK
        assert get(memory) == data
