"""K4: registered buffers."""

from __future__ import annotations

from typing import Any

import pytest

from hipfile_rig import BLOCK, OK, Rig, fails, get, pattern, put
from nobounce import hipfile
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.hipfile.buffers import find_buffer
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.status import Refused
from nobounce.route.types import MemoryKind


def test_K053_device_memory_is_accepted(each: Rig) -> None:
    memory = each.memory(BLOCK)
    assert hipfile.buf_register(memory.handle, BLOCK) == OK
    other = each.memory(BLOCK)
    assert hipfile.buf_register(other) == OK, "an object stands for its address and its size"
    assert STATE.buffers[other.handle].nbytes == BLOCK


def test_K054_an_interior_pointer_is_accepted(rig: Rig) -> None:
    memory = rig.memory(2 * BLOCK)
    assert hipfile.buf_register(memory.handle + 100, BLOCK) == OK
    assert hipfile.buf_register(memory.handle, BLOCK) == OK, "the key is the exact pointer"


def test_K055_past_the_allocation_is_5014(rig: Rig) -> None:
    memory = rig.memory(BLOCK)
    assert hipfile.buf_register(memory.handle, BLOCK + 1) == fails(5014)
    assert hipfile.buf_register(memory.handle, BLOCK) == OK


def test_K056_past_the_allocation_from_an_interior_pointer_is_5014(rig: Rig) -> None:
    memory = rig.memory(BLOCK)
    assert hipfile.buf_register(memory.handle + 1, BLOCK) == fails(5014)
    assert hipfile.buf_register(memory.handle + 1, BLOCK - 1) == OK


@pytest.mark.parametrize("length", [(1 << 64) - 1, (1 << 63) - 1, -1])
def test_K057_a_length_that_overflows_is_5014(rig: Rig, length: int) -> None:
    assert hipfile.buf_register(rig.memory(BLOCK).handle, length) == fails(5014)


def test_K058_null_is_5022() -> None:
    assert hipfile.buf_register(None, BLOCK) == fails(5022)
    assert hipfile.buf_register(0, BLOCK) == fails(5022)


@pytest.mark.parametrize("kind", [MemoryKind.PINNED, MemoryKind.MANAGED])
def test_K059_other_memory_is_5013(each: Rig, kind: MemoryKind) -> None:
    memory = each.memory(BLOCK, kind=kind)
    assert hipfile.buf_register(memory.handle, BLOCK) == fails(5013)
    pageable = bytearray(BLOCK)
    assert hipfile.buf_register(pageable, BLOCK) == fails(5013)


def _failing(monkeypatch: pytest.MonkeyPatch, rig: Rig, status: RuntimeStatus) -> None:
    def broken(address: int) -> Any:
        raise DeviceError("hipPointerGetAttributes", status)

    monkeypatch.setattr(rig.runtime, "pointer_info", broken)


def test_K060_a_hip_attribute_error_is_mapped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = rig.memory(BLOCK)
    _failing(monkeypatch, rig, RuntimeStatus.InvalidValue)
    assert hipfile.buf_register(memory.handle, BLOCK) == fails(5022)
    _failing(monkeypatch, rig, RuntimeStatus.NotInitialized)
    assert hipfile.buf_register(memory.handle, BLOCK) == fails(5011, 3)
    monkeypatch.undo()
    assert hipfile.buf_register(memory.handle, BLOCK) == OK


def test_K061_an_address_range_error_is_mapped(rig: Rig) -> None:
    memory = rig.memory(BLOCK)
    address = memory.handle
    memory.close()
    assert hipfile.buf_register(address, BLOCK) == fails(5022), "HIP calls freed memory an invalid value"


def test_K062_dup_is_5023(rig: Rig) -> None:
    memory = rig.memory(2 * BLOCK)
    assert hipfile.buf_register(memory.handle, BLOCK) == OK
    assert hipfile.buf_register(memory.handle, 2 * BLOCK) == fails(5023)


def test_K063_deregister_unknown_is_5024(rig: Rig) -> None:
    hipfile.driver_open()
    memory = rig.memory(BLOCK)
    assert hipfile.buf_deregister(memory.handle) == fails(5024)
    assert hipfile.buf_deregister(None) == fails(5024)


def test_K064_double_deregister_is_5024(rig: Rig) -> None:
    memory = rig.registered(BLOCK)
    assert hipfile.buf_deregister(memory.handle) == OK
    assert hipfile.buf_deregister(memory.handle) == fails(5024)


def test_K065_deregistering_a_buffer_in_use_is_5030(rig: Rig) -> None:
    handle, memory, stream, done = (
        rig.file(pattern(BLOCK)),
        rig.registered(BLOCK),
        rig.stream(),
        hipfile.Cell(),
    )
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, BLOCK, 0, 0, done, stream) == OK
        assert hipfile.buf_deregister(memory.handle) == fails(5030)
    rig.sync(stream)
    assert get(memory) == pattern(BLOCK)
    assert hipfile.buf_deregister(memory.handle) == OK


def test_K066_a_deregistered_buffer_is_not_found(rig: Rig) -> None:
    memory = rig.memory(2 * BLOCK)
    assert hipfile.buf_register(memory.handle, BLOCK) == OK
    assert STATE.buffers[memory.handle].nbytes == BLOCK
    hipfile.buf_deregister(memory.handle)
    assert memory.handle not in STATE.buffers
    assert find_buffer(memory.handle).nbytes == 2 * BLOCK, "only the allocation bounds it now"


def test_K067_a_temporary_buffer_reaches_to_the_end_of_the_allocation(rig: Rig) -> None:
    memory = rig.memory(2 * BLOCK)
    handle = rig.file(pattern(2 * BLOCK))
    inner = memory.handle + BLOCK
    assert hipfile.read(handle, inner, BLOCK, 0, 0) == BLOCK
    assert get(memory) == b"\xee" * BLOCK + pattern(BLOCK)
    assert hipfile.read(handle, inner, BLOCK + 1, 0, 0) == -5022
    with pytest.raises(Refused):
        find_buffer(None)


def test_K068_the_registered_buffer_is_preferred(rig: Rig) -> None:
    memory = rig.memory(2 * BLOCK)
    put(memory, pattern(2 * BLOCK))
    handle = rig.file()
    assert hipfile.buf_register(memory.handle, BLOCK) == OK
    assert hipfile.write(handle, memory.handle, 2 * BLOCK, 0, 0) == -5022, "its length bounds the request"
    assert hipfile.write(handle, memory, 2 * BLOCK, 0, 0) == -5022, "an object is its address"
    assert hipfile.write(handle, memory.handle, BLOCK, 0, 0) == BLOCK
