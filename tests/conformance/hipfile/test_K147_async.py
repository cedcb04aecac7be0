"""K12: reads and writes in stream order. A stream is held by a gate where a test needs it to stand still."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import threading
from typing import Any

import numpy as np
import pytest

from hipfile_rig import BLOCK, OK, Rig, content, fails, get, only, pattern, put, settings
from nobounce import hipfile
from nobounce.device import Device
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.hipfile import Cell
from nobounce.hipfile.driver import STATE
from nobounce.io.engine import engine_for
from nobounce.testing.faults import inject

MIB = 1 << 20
FIXED = hipfile.STREAM_FIXED_BUF_OFFSET | hipfile.STREAM_FIXED_FILE_OFFSET | hipfile.STREAM_FIXED_FILE_SIZE


class Cells:
    """The four pointers of an operation."""

    def __init__(self, size: int, file_offset: int = 0, buffer_offset: int = 0) -> None:
        self.size, self.file_offset, self.buffer_offset = Cell(size), Cell(file_offset), Cell(buffer_offset)
        self.done = Cell(-77)

    @property
    def all(self) -> tuple[Cell, Cell, Cell, Cell]:
        return self.size, self.file_offset, self.buffer_offset, self.done


def _call(op: str) -> Any:
    return hipfile.read_async if op == "read" else hipfile.write_async


def test_K147_null_arguments(rig: Rig, op: str) -> None:
    handle, memory, stream = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream()
    good = [memory.handle, BLOCK, 0, 0, Cell()]
    for i in range(5):
        bad = [None if k == i else v for k, v in enumerate(good)]
        assert _call(op)(handle, *bad, stream) == fails(5022)
    assert _call(op)(handle, memory.handle, BLOCK, 0, 0, 5, stream) == fails(5022), (
        "an int is no place for a count"
    )
    assert _call(op)(handle, memory.handle, "4096", 0, 0, Cell(), stream) == fails(5022)
    assert _call(op)(handle, *good, stream) == OK
    rig.sync(stream)


def test_K148_an_unregistered_file_is_5027(rig: Rig, op: str) -> None:
    hipfile.driver_open()
    memory, stream = rig.memory(BLOCK), rig.stream()
    assert _call(op)(12345, memory.handle, BLOCK, 0, 0, Cell(), stream) == fails(5027)


def test_K149_a_failed_allocation_is_5011_out_of_memory(
    rig: Rig, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("fallback")
    monkeypatch.setattr(engine_for(rig.runtime).rings, "_rings", {})
    handle, memory, stream, done = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream(), Cell(-77)
    with inject(op="alloc_pinned", error=RuntimeStatus.OutOfMemory):
        assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == fails(5011, 2)
    assert hipfile.outstanding() == 0
    assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
    rig.sync(stream)
    assert done.value == BLOCK


def test_K150_bad_regions_are_refused_at_once(rig: Rig, op: str) -> None:
    handle, memory, stream = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream(15)
    for size, file_offset, buffer_offset in (
        (BLOCK + 1, 0, 0),
        (BLOCK, -1, 0),
        (BLOCK, 0, -1),
        (1, 0, BLOCK),
        (0, 0, BLOCK),
        (-1, 0, 0),
    ):
        cells = Cells(size, file_offset, buffer_offset)
        assert _call(op)(handle, memory.handle, *cells.all, stream) == fails(5022)
    assert hipfile.outstanding() == 0


def test_K151_another_gpus_stream_is_5022(rig: Rig, op: str) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    other = rig.stream(device=Device("sim:1"))
    assert _call(op)(handle, memory.handle, BLOCK, 0, 0, Cell(), other) == fails(5022)


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("flags", range(16))
def test_K152_every_combination_of_flags(rig: Rig, flags: int, unit: int) -> None:
    nbytes = 4 * BLOCK
    data = pattern(3 * nbytes)
    handle, stream = rig.file(data), rig.stream(flags)
    for size, file_offset, buffer_offset in (
        (nbytes, 0, 0),
        (nbytes - 3 * unit, 0, 0),
        (nbytes - 5 * unit, 7 * unit, 0),
        (nbytes - 5 * unit, 0, 3 * unit),
        (nbytes - 9 * unit, 7 * unit, 3 * unit),
    ):
        memory = rig.memory(nbytes)
        cells = Cells(size, file_offset, buffer_offset)
        assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
        rig.sync(stream)
        assert cells.done.value == size
        assert get(memory, buffer_offset, size) == data[file_offset : file_offset + size]
        assert get(memory, 0, buffer_offset) == b"\xee" * buffer_offset if buffer_offset else True


def test_K152_fixed_values_are_captured_and_the_others_read_again(rig: Rig) -> None:
    data = pattern(4 * BLOCK)
    handle = rig.file(data)
    for flags in range(8):
        memory, stream, cells = rig.memory(2 * BLOCK), rig.stream(flags), Cells(BLOCK)
        with rig.held(stream):
            assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
            cells.size.value, cells.file_offset.value, cells.buffer_offset.value = BLOCK // 2, BLOCK, 512
        rig.sync(stream)
        size = BLOCK if flags & hipfile.STREAM_FIXED_FILE_SIZE else BLOCK // 2
        at = 0 if flags & hipfile.STREAM_FIXED_FILE_OFFSET else BLOCK
        to = 0 if flags & hipfile.STREAM_FIXED_BUF_OFFSET else 512
        assert cells.done.value == size
        assert get(memory, to, size) == data[at : at + size]


def test_K153_zero_size_leaves_zero_and_enqueues_nothing(rig: Rig, op: str) -> None:
    fd = rig.fd(pattern(BLOCK))
    handle, memory, stream, cells = rig.file_of(fd), rig.memory(BLOCK), rig.stream(), Cells(0)
    with rig.held(stream):
        assert _call(op)(handle, memory.handle, *cells.all, stream) == OK
        assert cells.done.value == 0
        assert hipfile.outstanding() == 0
    assert content(fd) == pattern(BLOCK)


def test_K154_overlapping_operations_on_one_stream_are_sequential(each: Rig, backend: str) -> None:
    size, step = 16384, 8192
    total = 16 * step + size
    data = pattern(total)
    fd = each.fd(data)
    handle, memory, stream = each.file_of(fd), each.memory(total), each.stream(FIXED)
    cells = [Cells(size, i * step, i * step) for i in range(17)]
    for c in cells:
        assert hipfile.read_async(handle, memory.handle, *c.all, stream) == OK
    out = each.fd(bytes(total))
    back = each.file_of(out)
    written = [Cells(size, i * step, i * step) for i in range(17)]
    for c in written:
        assert hipfile.write_async(back, memory.handle, *c.all, stream) == OK
    each.sync(stream)
    assert [c.done.value for c in cells + written] == [size] * 34
    assert get(memory) == data
    assert content(out) == data


def test_K154_a_write_after_a_read_needs_no_sync(each: Rig, backend: str) -> None:
    data = pattern(8 * BLOCK)
    out = each.fd()
    source, target = each.file(data), each.file_of(out)
    memory, stream = each.memory(8 * BLOCK), each.stream()
    cells = [Cells(8 * BLOCK), Cells(8 * BLOCK)]
    with each.held(stream):
        assert hipfile.read_async(source, memory.handle, *cells[0].all, stream) == OK
        assert hipfile.write_async(target, memory.handle, *cells[1].all, stream) == OK
        assert [c.done.value for c in cells] == [0, 0], "set to 0 at submission"
    each.sync(stream)
    assert [c.done.value for c in cells] == [8 * BLOCK] * 2
    assert content(out) == data


def test_K155_a_read_past_eof_is_short(each: Rig, backend: str) -> None:
    data = pattern(BLOCK + 512)
    handle, memory, stream, cells = each.file(data), each.memory(4 * BLOCK), each.stream(), Cells(4 * BLOCK)
    assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
    each.sync(stream)
    assert cells.done.value == BLOCK + 512
    assert get(memory, 0, BLOCK + 512) == data


class TestK156:
    """An unfixed stream that stands still while the caller changes the values."""

    @pytest.fixture
    def paused(self, rig: Rig, backend: str) -> Any:
        data = pattern(8 * BLOCK)
        handle, memory, stream = rig.file(data), rig.memory(4 * BLOCK), rig.stream(0)

        def run(cells: Cells, change: Any) -> tuple[int, bytes]:
            with rig.held(stream):
                assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
                change(cells)
            rig.sync(stream)
            return cells.done.value, get(memory)

        return run

    def test_K156_a_smaller_size(self, paused: Any) -> None:
        done, got = paused(Cells(4 * BLOCK), lambda c: setattr(c.size, "value", BLOCK))
        assert done == BLOCK
        assert got == pattern(BLOCK) + b"\xee" * (3 * BLOCK)

    def test_K156_a_larger_size(self, paused: Any) -> None:
        done, got = paused(Cells(BLOCK), lambda c: setattr(c.size, "value", 2 * BLOCK))
        assert done == -5022
        assert got == b"\xee" * (4 * BLOCK)

    @pytest.mark.parametrize(
        ("which", "value"), [("buffer_offset", 4 * BLOCK), ("buffer_offset", -1), ("file_offset", -1)]
    )
    def test_K156_an_offset_that_breaks_the_region(self, paused: Any, which: str, value: int) -> None:
        done, got = paused(Cells(BLOCK), lambda c: setattr(getattr(c, which), "value", value))
        assert done == -5022
        assert got == b"\xee" * (4 * BLOCK)

    def test_K156_size_and_offsets_are_honoured(self, paused: Any) -> None:
        def change(c: Cells) -> None:
            c.size.value, c.file_offset.value, c.buffer_offset.value = BLOCK, 3 * BLOCK, 2 * BLOCK

        done, got = paused(Cells(2 * BLOCK), change)
        assert done == BLOCK
        assert got == b"\xee" * (2 * BLOCK) + pattern(8 * BLOCK)[3 * BLOCK : 4 * BLOCK] + b"\xee" * BLOCK


def test_K157_each_backend_is_forced(each: Rig, backend: str, op: str) -> None:
    data = pattern(4 * BLOCK)
    fd = each.fd(data if op == "read" else b"")
    handle, memory, stream, cells = each.file_of(fd), each.memory(4 * BLOCK), each.stream(), Cells(4 * BLOCK)
    if op == "write":
        put(memory, data)
    with inject(op="p" + op) as fallback:
        assert _call(op)(handle, memory.handle, *cells.all, stream) == OK
        each.sync(stream)
    assert bool(fallback.calls) == (backend == "fallback")
    assert cells.done.value == 4 * BLOCK
    assert (get(memory) if op == "read" else content(fd)) == data


def test_K158_64_mib_in_many_chunks(rig: Rig, backend: str) -> None:
    data = pattern(64 * MIB)
    handle, memory, stream, cells = rig.file(data), rig.memory(64 * MIB), rig.stream(FIXED), Cells(64 * MIB)
    assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
    rig.sync(stream)
    assert cells.done.value == 64 * MIB
    assert get(memory) == data


def test_K159_64_mib_shrunk_to_24(rig: Rig, backend: str) -> None:
    data = pattern(64 * MIB)
    handle, memory, stream, cells = rig.file(data), rig.memory(64 * MIB), rig.stream(0), Cells(64 * MIB)
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
        cells.size.value = 24 * MIB
    rig.sync(stream)
    assert cells.done.value == 24 * MIB
    assert get(memory, 0, 24 * MIB) == data[: 24 * MIB]
    assert get(memory, 24 * MIB) == b"\xee" * (40 * MIB)


def test_K160_a_failed_submission_leaves_nothing_behind(
    rig: Rig, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, memory, stream, done = rig.file(pattern(BLOCK)), rig.registered(BLOCK), rig.stream(), Cell()

    def broken(stream: int, on_reached: Any, **_: Any) -> Any:
        from nobounce.errors import DeviceError

        raise DeviceError("hipStreamWaitValue64", RuntimeStatus.InvalidResourceHandle)

    with monkeypatch.context() as m:
        m.setattr(rig.runtime, "gate", broken)
        assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == fails(5011, 400)
    assert hipfile.outstanding() == 0
    assert hipfile.buf_deregister(memory.handle) == OK
    hipfile.handle_deregister(handle)
    assert handle not in STATE.files


def test_K161_outstanding_operations_are_kept_counted_and_told(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    data = pattern(BLOCK)
    handle, memory, stream, cells = rig.file(data), rig.registered(BLOCK), rig.stream(), Cells(BLOCK)
    with rig.held(stream):
        for n in (1, 2, 3):
            assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
            assert hipfile.outstanding() == n
        assert hipfile.read_async(handle, memory.handle, BLOCK + 1, 0, 0, Cell(), stream) == fails(5022)
        assert hipfile.outstanding() == 3
        gc.collect()
        with caplog.at_level(logging.CRITICAL, "nobounce"):
            hipfile.driver_close()
        assert "1 buffer(s) and 1 file(s) are in use" in caplog.text
    rig.sync(stream)
    assert hipfile.outstanding() == 0
    assert cells.done.value == BLOCK, "a closed driver does not stop what was submitted"
    assert get(memory) == data


def test_K162_eintr_is_repeated_and_errors_are_minus_1(rig: Rig, op: str) -> None:
    only("fallback")
    handle, memory, stream, done = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream(), Cell()
    with inject(op="p" + op, error=errno.EINTR, times=3) as rule:
        assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
        rig.sync(stream)
    assert (done.value, rule.hits) == (BLOCK, 3)
    with inject(op="p" + op, error=errno.EIO):
        assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
        rig.sync(stream)
    assert done.value == -1
    assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
    rig.sync(stream)
    assert done.value == BLOCK, "an error poisons nothing behind it"


class TestK163:
    """The published copy kernel's own checks. Here the runtime's copies and the head of the stream make them."""

    @pytest.mark.parametrize("which", ["size", "file_offset", "buffer_offset"])
    def test_K163_what_is_bound_to_no_integer_at_the_head_moves_nothing(
        self, each: Rig, backend: str, op: str, which: str
    ) -> None:
        data = pattern(2 * BLOCK)
        fd = each.fd(data)
        handle, memory = each.file_of(fd), each.memory(2 * BLOCK)
        stream, cells = each.stream(0), Cells(BLOCK)
        with each.held(stream):
            assert _call(op)(handle, memory.handle, *cells.all, stream) == OK
            getattr(cells, which).value = None
        each.sync(stream)
        assert cells.done.value == -5022
        assert get(memory) == b"\xee" * (2 * BLOCK)
        assert content(fd) == data
        assert hipfile.outstanding() == 0

    @pytest.mark.parametrize("kind", ["to device", "from device"])
    def test_K163_a_copy_from_or_to_no_memory_is_refused_and_not_enqueued(self, each: Rig, kind: str) -> None:
        memory, stream = each.memory(BLOCK), each.stream()
        pair = (memory.handle, 0) if kind == "to device" else (0, memory.handle)
        for copy in (
            lambda: each.runtime.copy_async(*pair, BLOCK, stream),
            lambda: each.runtime.copy_batch([(*pair, BLOCK)], stream),
        ):
            with pytest.raises(DeviceError) as caught:
                copy()
            assert caught.value.status is RuntimeStatus.InvalidValue
        each.sync(stream)
        assert get(memory) == b"\xee" * BLOCK

    def test_K163_a_bounce_slot_that_is_no_memory_carries_nothing(
        self, rig: Rig, op: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        only("fallback")
        data = pattern(BLOCK)
        fd = rig.fd(data)
        handle, memory, stream, done = rig.file_of(fd), rig.memory(BLOCK), rig.stream(), Cell(-77)
        with monkeypatch.context() as patch:
            patch.setattr(engine_for(rig.runtime).rings, "_rings", {})
            patch.setattr(rig.runtime, "alloc_pinned", lambda *_, **__: 0)
            patch.setattr(rig.runtime, "free_pinned", lambda *_: None)
            error = _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream)
            rig.sync(stream)
        assert error == fails(5011, 2)
        assert hipfile.outstanding() == 0
        assert get(memory) == b"\xee" * BLOCK
        assert content(fd) == data


class TestK164:
    """Failover: by default in its place in the stream; never under the profile."""

    @pytest.mark.parametrize("code", [errno.ENODEV, errno.EREMOTEIO])
    def test_K164_failover_engages_on_enodev(self, rig: Rig, op: str, code: int) -> None:
        data = pattern(4 * BLOCK)
        fd = rig.fd(data if op == "read" else b"")
        handle, memory, stream = rig.file_of(fd), rig.memory(4 * BLOCK), rig.stream()
        if op == "write":
            put(memory, data)
        cells = Cells(4 * BLOCK)
        with inject(op=op, device="sim:0", error=code):
            assert _call(op)(handle, memory.handle, *cells.all, stream) == OK
            rig.runtime.fill_async(memory.handle, 0, BLOCK, stream)
            rig.sync(stream)
        assert cells.done.value == 4 * BLOCK
        assert (get(memory) if op == "read" else content(fd))[BLOCK:] == data[BLOCK:]
        assert get(memory, 0, BLOCK) == bytes(BLOCK), "the fill came after"

    def test_K164_not_on_eio_and_the_destination_stays(self, rig: Rig) -> None:
        handle, memory, stream, cells = (
            rig.file(pattern(BLOCK)),
            rig.memory(BLOCK),
            rig.stream(),
            Cells(BLOCK),
        )
        with inject(op="read", device="sim:0", error=errno.EIO), inject(op="pread") as fallback:
            assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
            rig.sync(stream)
        assert cells.done.value == -5030
        assert fallback.calls == 0
        assert get(memory) == b"\xee" * BLOCK

    def test_K164_the_published_profile_does_not_retry(self, rig: Rig) -> None:
        settings(profile="hipfile-0.5")
        handle, memory, stream, cells = (
            rig.file(pattern(BLOCK)),
            rig.memory(BLOCK),
            rig.stream(),
            Cells(BLOCK),
        )
        with inject(op="read", device="sim:0", error=errno.ENODEV):
            assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
            rig.sync(stream)
            assert cells.done.value == -5030
            assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK, "sync does (C-17)"


def test_K165_io_runs_on_the_pool_and_not_in_a_callback(
    rig: Rig, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, memory, stream, done = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream(), Cell()
    direct, names = rig.runtime.direct_io(), []
    real = getattr(direct, op)

    def call(*args: int) -> int:
        names.append(threading.current_thread().name)
        return int(real(*args))

    monkeypatch.setattr(direct, op, call)
    assert _call(op)(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
    rig.sync(stream)
    assert names == ["nobounce-io"]


def test_hip_errors_at_run_time_are_minus_5011(rig: Rig) -> None:
    handle, memory, stream, done = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream(), Cell()
    with inject(op="read", device="sim:0", error=RuntimeStatus.LaunchFailure):
        assert hipfile.read_async(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
        rig.sync(stream)
    assert done.value == -5011


@pytest.mark.parametrize(
    "make",
    [ctypes.c_int64, lambda v: np.array(v, np.int64), Cell],
    ids=["ctypes", "numpy", "Cell"],
)
def test_what_holds_an_integer_is_a_pointer(rig: Rig, make: Any) -> None:
    data = pattern(4 * BLOCK)
    handle, memory, stream = rig.file(data), rig.memory(2 * BLOCK), rig.stream(0)
    size, file_offset, buffer_offset, done = make(BLOCK), make(0), make(0), make(0)
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, size, file_offset, buffer_offset, done, stream) == OK
        if hasattr(file_offset, "value"):
            file_offset.value = BLOCK
        else:
            file_offset[()] = BLOCK
    rig.sync(stream)
    assert (done.value if hasattr(done, "value") else int(done)) == BLOCK
    assert get(memory, 0, BLOCK) == data[BLOCK : 2 * BLOCK]


def test_the_backend_is_chosen_at_submission(rig: Rig) -> None:
    """D-11: a change that breaks the alignment after fastpath was chosen is an error at run time."""
    handle, memory, stream, cells = (
        rig.file(pattern(4 * BLOCK)),
        rig.memory(2 * BLOCK),
        rig.stream(0),
        Cells(BLOCK),
    )
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
        cells.file_offset.value = 1
    rig.sync(stream)
    assert cells.done.value == -5030


def test_deregistering_a_stream_cancels_nothing(rig: Rig) -> None:
    """D-7."""
    handle, memory, stream, cells = (
        rig.file(pattern(BLOCK)),
        rig.memory(BLOCK),
        rig.stream(FIXED),
        Cells(BLOCK),
    )
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, *cells.all, stream) == OK
        assert hipfile.stream_deregister(stream) == OK
        cells.size.value = 1
    rig.sync(stream)
    assert cells.done.value == BLOCK
