"""K8: the fallback, synchronous: regions, reads and writes at every place of a file and of a buffer."""

from __future__ import annotations

import errno
import os

import pytest

from hipfile_rig import BLOCK, CHUNK, Rig, content, get, only, pattern, settings, size_of
from nobounce import hipfile
from nobounce.config import Settings
from nobounce.errors import RuntimeStatus
from nobounce.hipfile import whole
from nobounce.io.engine import engine_for
from nobounce.route.types import MAX_RW_COUNT, MemoryKind
from nobounce.testing.faults import inject
from situations import request


@pytest.fixture(autouse=True)
def fallback_alone() -> None:
    only("fallback")


def _fallback(in_force: Settings | None = None, **changes: object) -> int:
    return whole.score(whole.adapt(request(**changes), in_force or Settings())).fallback.value


def test_K117_device_memory_is_accepted_whatever_the_file_and_alignment() -> None:
    assert _fallback() == 1
    assert _fallback(file_offset=7, nbytes=3, file={"kind": "fifo", "direct_fd": "refused"}) == 1


@pytest.mark.parametrize("kind", [k for k in MemoryKind if k is not MemoryKind.DEVICE])
def test_K118_other_memory_is_refused(rig: Rig, kind: MemoryKind) -> None:
    assert _fallback(memory={"kind": kind}) == -1
    if kind is not MemoryKind.PAGEABLE:
        memory = rig.memory(BLOCK, kind=kind)
        assert hipfile.read(rig.file(pattern(BLOCK)), memory.handle, BLOCK, 0, 0) == -5013


def test_K119_disabled_refuses(rig: Rig) -> None:
    assert _fallback(Settings(allow_compat_mode=False)) == -1
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    settings(allow_compat_mode=False)
    assert hipfile.read(handle, memory.handle, 100, 1, 0) == -5030


def test_K120_negative_and_overrunning_regions(rig: Rig, op: str) -> None:
    call = hipfile.read if op == "read" else hipfile.write
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    for where in ((-1, 0), (0, -1)):
        assert call(handle, memory.handle, 1, *where) == -1
        assert hipfile.last_errno() == errno.EINVAL
    for size, offset in ((BLOCK + 1, 0), (1, BLOCK), (BLOCK, 1), (0, BLOCK), (-1, 0)):
        assert call(handle, memory.handle, size, 0, offset) == -5022
    assert get(memory) == b"\xee" * BLOCK


def test_K121_the_cap() -> None:
    assert whole.capped(MAX_RW_COUNT + 1) == MAX_RW_COUNT == (1 << 31) - BLOCK
    assert whole.capped(MAX_RW_COUNT) == MAX_RW_COUNT
    whole.check_region(0, whole.capped(4 << 30), 0, MAX_RW_COUNT)


@pytest.fixture
def fresh_ring(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bounce buffer has been made yet."""
    rings = engine_for(rig.runtime).rings
    monkeypatch.setattr(rings, "_rings", {})


def test_K122_a_failed_bounce_allocation_is_an_error(rig: Rig, op: str, fresh_ring: None) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    call = hipfile.read if op == "read" else hipfile.write
    with inject(op="alloc_pinned", error=RuntimeStatus.OutOfMemory):
        assert call(handle, memory.handle, BLOCK, 0, 0) == -1
        assert hipfile.last_errno() == errno.ENOMEM
    assert call(handle, memory.handle, BLOCK, 0, 0) == BLOCK


def test_K123_one_small_transfer_allocates_one_bounce_buffer_and_later_ones_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fresh_ring: None
) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    made: list[int] = []
    real = rig.runtime.alloc_pinned

    def alloc(nbytes: int) -> int:
        made.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(rig.runtime, "alloc_pinned", alloc)
    assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK
    assert made == [CHUNK], "one, and not of the request's size"
    for _ in range(5):
        assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK
    assert made == [CHUNK]


def test_K124_zero_size(rig: Rig) -> None:
    fd = rig.fd(pattern(100))
    handle, memory = rig.file_of(fd), rig.memory(BLOCK)
    for offset in (0, 50, 100, 1000):
        assert hipfile.read(handle, memory.handle, 0, offset, 0) == 0
        assert hipfile.write(handle, memory.handle, 0, offset, 0) == 0
    assert size_of(fd) == 100
    assert get(memory) == b"\xee" * BLOCK


@pytest.mark.parametrize(
    ("fault", "op", "error", "result"),
    [
        ("pread", "read", errno.EIO, -1),
        ("pwrite", "write", errno.ENOSPC, -1),
        ("copy", "read", RuntimeStatus.LaunchFailure, -719),
        ("copy", "write", RuntimeStatus.IllegalAddress, -700),
    ],
)
def test_K125_errors_of_the_parts_come_out(rig: Rig, fault: str, op: str, error: int, result: int) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    call = hipfile.read if op == "read" else hipfile.write
    with inject(op=fault, error=error):
        assert call(handle, memory.handle, BLOCK, 0, 0) == result
    if result == -1:
        assert hipfile.last_errno() == error
    rig.device.sync()
    assert call(handle, memory.handle, BLOCK, 0, 0) == BLOCK


def test_K125_partial_progress_is_lost_with_an_error(rig: Rig) -> None:
    """C-27: no short count."""
    handle, memory = rig.file(pattern(3 * CHUNK)), rig.memory(3 * CHUNK)
    with inject(op="pread", error=errno.EIO, after=2):
        assert hipfile.read(handle, memory.handle, 3 * CHUNK, 0, 0) == -1


@pytest.mark.parametrize(
    ("before", "size", "file_offset", "buffer_offset"),
    [
        pytest.param(0, BLOCK, 0, 0, id="empty_file"),
        pytest.param(BLOCK, 100, 50, 0, id="at_file_offset"),
        pytest.param(BLOCK, 100, 0, 77, id="at_buffer_offset"),
        pytest.param(BLOCK, 100, 50, 77, id="at_both"),
        pytest.param(BLOCK, BLOCK, 0, 0, id="overwrite_all"),
        pytest.param(BLOCK, 1, 1000, 1, id="subregion"),
        pytest.param(100, BLOCK, 100, 0, id="append"),
        pytest.param(CHUNK + 5, CHUNK + 9, 3, 1, id="over_a_chunk"),
    ],
)
def test_K126_write(each: Rig, before: int, size: int, file_offset: int, buffer_offset: int) -> None:
    old, new = pattern(before, 1), pattern(size + buffer_offset + 10, 2)
    fd = each.fd(old)
    memory = each.memory(len(new), new)
    assert hipfile.write(each.file_of(fd), memory.handle, size, file_offset, buffer_offset) == size
    expected = bytearray(max(before, file_offset + size))
    expected[:before] = old
    expected[file_offset : file_offset + size] = new[buffer_offset : buffer_offset + size]
    assert content(fd) == bytes(expected)


@pytest.mark.parametrize(
    ("in_file", "size", "file_offset", "buffer_offset"),
    [
        pytest.param(2 * BLOCK, 100, 0, 0, id="within"),
        pytest.param(0, 100, 0, 0, id="empty_file"),
        pytest.param(50, 100, 0, 0, id="file_smaller"),
        pytest.param(100, 100, 0, 0, id="file_equal"),
        pytest.param(200, 100, 0, 0, id="file_larger"),
        pytest.param(3 * CHUNK, 2 * CHUNK, 0, 0, id="multiple_of_chunk"),
        pytest.param(3 * CHUNK, 2 * CHUNK + 11, 0, 0, id="no_multiple_of_chunk"),
        pytest.param(BLOCK, 100, 33, 0, id="offset"),
        pytest.param(BLOCK, 100, BLOCK - 100, 0, id="to_eof"),
        pytest.param(BLOCK, 200, BLOCK - 100, 0, id="past_eof"),
        pytest.param(BLOCK, 1, BLOCK - 1, 0, id="last_byte"),
        pytest.param(0, 100, 50, 0, id="empty_and_offset"),
        pytest.param(BLOCK, 100, 0, 21, id="buffer_offset"),
        pytest.param(BLOCK, 1, 0, BLOCK - 1, id="last_byte_of_buffer"),
        pytest.param(BLOCK, 100, 33, 21, id="both_offsets"),
    ],
)
def test_K127_read(each: Rig, in_file: int, size: int, file_offset: int, buffer_offset: int) -> None:
    data = pattern(in_file, 3)
    room = max(BLOCK, size + buffer_offset)
    memory = each.memory(room)
    got = data[file_offset : file_offset + size]
    assert hipfile.read(each.file(data), memory.handle, size, file_offset, buffer_offset) == len(got)
    expected = bytearray(b"\xee" * room)
    expected[buffer_offset : buffer_offset + len(got)] = got
    assert get(memory) == bytes(expected)


@pytest.mark.parametrize("how", [{"short": 1000}, {"error": errno.EINTR, "every": 2}])
def test_K127_short_and_interrupted_preads(rig: Rig, how: dict[str, int]) -> None:
    data = pattern(4 * BLOCK, 3)
    handle, memory = rig.file(data), rig.memory(4 * BLOCK)
    with inject(op="pread", **how) as rule:  # type: ignore[arg-type]
        assert hipfile.read(handle, memory.handle, 4 * BLOCK, 0, 0) == 4 * BLOCK
    assert rule.calls >= 2
    assert get(memory) == data


def test_K128_the_current_device_is_restored(rig: Rig, op: str) -> None:
    call = hipfile.read if op == "read" else hipfile.write
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    rig.runtime.set_current_device(1)
    try:
        assert call(handle, memory.handle, BLOCK, 0, 0) == BLOCK
        assert rig.runtime.current_device() == 1
        with inject(op="p" + op, error=errno.EIO):
            assert call(handle, memory.handle, BLOCK, 0, 0) == -1
        assert rig.runtime.current_device() == 1
    finally:
        rig.runtime.set_current_device(0)


def test_a_write_is_on_the_disk_at_return_a_retried_one_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-26."""
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))[1])
    fd = rig.fd()
    handle, memory = rig.file_of(fd), rig.memory(BLOCK)
    inode = os.fstat(fd).st_ino
    assert hipfile.write(handle, memory.handle, BLOCK, 0, 0) == BLOCK
    assert synced == [inode]
    settings()
    with inject(op="write", device="sim:0", error=errno.ENODEV):
        assert hipfile.write(handle, memory.handle, BLOCK, 0, 0) == BLOCK
    assert synced == [inode] * 2
    assert hipfile.write(handle, memory.handle, BLOCK, 0, 0) == BLOCK
    assert len(synced) == 2, "a direct write is not flushed"
