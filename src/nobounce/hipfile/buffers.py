"""Registered buffers (hipFile A-31 to A-33). They belong to their owners: registration
remembers a range, no more."""

from __future__ import annotations

from typing import Any

from nobounce.buffer import Buffer
from nobounce.errors import OpError
from nobounce.hipfile.dispatch import whole
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.status import SUCCESS, Error, Refused
from nobounce.hipfile.where import Memory, find_memory, pointer_of


@whole
def buf_register(ptr: Any, length: int | None = None, flags: int = 0) -> Error:
    """Register `length` bytes of device memory at `ptr`; None means up to the end of the
    allocation. `flags` is unused.

    5022 for null, 5023 for a pointer that is registered, 5013 for other than device memory, 5014 past the
    allocation, 5011 for HIP errors. Opens the driver, even where it fails (A-19).
    """
    with STATE.lock:
        STATE.open_if_closed()
        try:
            if pointer_of(ptr) in STATE.buffers:
                raise Refused(OpError.MEMORY_ALREADY_REGISTERED)
            memory = find_memory(ptr)
            nbytes = memory.room if length is None else length
            if not 0 <= nbytes <= memory.room:
                raise Refused(OpError.HIP_POINTER_RANGE_ERROR)
        except Refused as e:
            return e.error
        STATE.buffers[memory.address] = _view(memory, nbytes)
    return SUCCESS


@whole
def buf_deregister(ptr: Any) -> Error:
    """Forget a registered pointer: 5006 with the driver closed, 5024 where unknown,
    5030 where in use (A-32)."""
    with STATE.lock:
        if STATE.count == 0:
            return Error(OpError.DRIVER_CLOSING)
        try:
            address = pointer_of(ptr)
        except Refused:
            address = 0
        buffer = STATE.buffers.get(address)
        if buffer is None:
            return Error(OpError.MEMORY_NOT_REGISTERED)
        if buffer._uses:
            return Error(OpError.INTERNAL_ERROR)
        del STATE.buffers[address]
    return SUCCESS


def find_buffer(base: Any) -> Buffer:
    """The registered buffer of exactly this pointer, else a temporary one to the end
    of its allocation (A-33).

    To be marked in use by a Hold while the caller holds the lock. Raises Refused: 5022 for null, 5013 for
    other than device memory.
    """
    buffer = STATE.buffers.get(pointer_of(base))
    if buffer is None:
        memory = find_memory(base)
        buffer = _view(memory, memory.room)
    return buffer


def _view(memory: Memory, nbytes: int) -> Buffer:
    return Buffer.from_handle(memory.address, nbytes, device=memory.device, owner=memory.owner)
