"""What nobounce takes of others, by protocol: memory, streams and devices of frameworks,
integers that are read late.

Type checkers see here which objects a signature means. At run time nothing asks `isinstance` of
these: `as_buffer`, `as_stream` and `Device` look at the attributes themselves, and raise
TypeError naming what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

if TYPE_CHECKING:
    import numpy as np

# memory


class SupportsBuffer(Protocol):
    """The buffer protocol (PEP 688): bytes, bytearray, memoryview, mmap, array.array,
    ctypes arrays, Buffer, Tensor."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsArrayInterface(Protocol):
    """numpy's array interface: host memory."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """The CUDA array interface: memory of a GPU, in CuPy, Numba and PyTorch."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsDLPack(Protocol):
    """DLPack: memory of any device. `torch.Tensor` is one."""

    def __dlpack__(self) -> object: ...


BufferLike = SupportsBuffer | SupportsArrayInterface | SupportsCudaArrayInterface | SupportsDLPack
"""Memory: a Buffer, a Tensor, a numpy array, a torch tensor, or any object with one of these protocols. It
must be C-contiguous, and writable where it is read into."""

# streams and devices


class SupportsCudaStream(Protocol):
    """The stream protocol of cuda.core: (0, handle). A Stream is one."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A stream as PyTorch has them."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """A stream as CuPy has them."""

    @property
    def ptr(self) -> int: ...


SomeStream = SupportsCudaStream | TorchStream | CupyStream | int
StreamLike = SomeStream | None
"""A Stream, a handle, None for the device's legacy default stream, or the stream of a framework."""


class FrameworkDevice(Protocol):
    """A device as PyTorch has them: `type` "cuda" with an `index`, which may be None for the current one."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


# integers


class SupportsValue(Protocol):
    """A writable integer: a Cell, or one of ctypes."""

    value: int


class ScalarArray(Protocol):
    """A 0-d array of integers, written through `array[()]`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __setitem__(self, key: tuple[()], value: int, /) -> None: ...


class SupportsIntArray(Protocol):
    """An array of integers, as numpy's are."""

    def __array__(self) -> np.ndarray[Any, np.dtype[np.integer[Any]]]: ...


IntLike = SupportsIndex | SupportsValue
"""An integer, or an object that holds one and may be written until the stream gets there: a Cell, a
ctypes integer, a 0-d array."""

IntCell = SupportsValue | ScalarArray
"""An integer that is written: a Cell, a ctypes integer, a 0-d array."""

IntArrayLike = SupportsIndex | Sequence[SupportsIndex] | SupportsIntArray
"""An integer, a flat sequence of them, or an array of one dimension."""
