"""A GPU's memory from torch's caching allocator, for tensors that torch will hold.

So torch's accounting, its MemPools and what sleeps and wakes by them know of the memory, its cache is used
again, and a cache that is in the way is emptied before memory is short. What it hands out may still be in use
by work in torch's current stream, which `settle` waits for: the copies of a load are in streams of their own.

While the current stream captures a graph none of this is done: the capture would own the memory,
and waiting would end it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nobounce.allocation import Allocation
from nobounce.buffer import Buffer
from nobounce.device import torch_runtime
from nobounce.errors import OutOfMemoryError
from nobounce.route.types import MemoryKind

if TYPE_CHECKING:
    from nobounce.device import Device


class TorchMemory:
    """Memory of `device` by `torch.empty`, in torch's current stream."""

    def __init__(self, device: Device, torch: Any) -> None:
        self._device, self._torch = device, torch
        self._where = torch.device("cuda", device.ordinal)
        self._stream = torch.cuda.current_stream(self._where)

    def take(self, nbytes: int) -> Buffer:
        """`nbytes` bytes, given back to torch when nothing looks at them any more. OutOfMemoryError where
        torch, its cache emptied, has no more."""
        torch = self._torch
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._where)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{nbytes} bytes on {self._device.name}: {error}") from error
        address = memory.data_ptr() if nbytes else 0
        return Buffer._of(Allocation(address, nbytes, self._device, MemoryKind.DEVICE, owner=memory))

    def settle(self) -> None:
        """Wait for the work that torch's current stream has yet to do: it may use what was handed out."""
        if not self._stream.query():
            self._stream.synchronize()


def torch_memory(device: Device) -> TorchMemory | None:
    """Memory for torch's tensors on `device`; None where torch has none there, or captures a graph."""
    torch = sys.modules.get("torch")
    if (
        torch is None
        or device._runtime.name not in ("cuda", "hip")
        or device._runtime.name != torch_runtime()
    ):
        return None
    cuda = torch.cuda
    if not (cuda.is_initialized() or cuda.is_available()) or device.ordinal >= torch.cuda.device_count():
        return None
    with torch.cuda.device(device.ordinal):
        return None if torch.cuda.is_current_stream_capturing() else TorchMemory(device, torch)


def empty_cache() -> bool:
    """Have torch, if the process uses it on a GPU, give back what it keeps unused; whether there is
    anything to be had by it."""
    torch = sys.modules.get("torch")
    if torch is None or not getattr(getattr(torch, "cuda", None), "is_initialized", bool)():
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.empty_cache()
    return True
