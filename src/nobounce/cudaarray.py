"""Memory of a GPU handed to others by `__cuda_array_interface__`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nobounce.buffer import Buffer


def cuda_array_interface(buffer: Buffer, shape: tuple[int, ...], typestr: str) -> dict[str, Any]:
    """`__cuda_array_interface__` version 3. AttributeError, as the protocol wants, where
    the memory is not a GPU's."""
    if (
        buffer._closed
        or buffer.device._runtime.name not in ("cuda", "hip")
        or not buffer.is_device_accessible
    ):
        raise AttributeError("__cuda_array_interface__: not the memory of a GPU")
    buffer._exported = True  # consumers keep this object, not the allocation
    allocation = buffer.allocation
    stream = allocation.pending
    return {
        "version": 3,
        "shape": shape,
        "typestr": typestr,
        "data": (buffer._address, allocation.read_only),
        "strides": None,
        "stream": (stream.handle or 1) if stream is not None and not stream.is_closed else None,
    }
