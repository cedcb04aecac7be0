"""Tensor: a place in memory with a shape and an element type; speaks DLPack and the array interfaces.

A tensor owns its memory together with every other tensor and array over it, so nothing that is handed out can
dangle (cases C72 to C75). Element types are never taken for one another (case C40).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast

from nobounce import dlpack
from nobounce.allocation import Allocation
from nobounce.buffer import Buffer
from nobounce.cudaarray import cuda_array_interface
from nobounce.device import Device
from nobounce.dtypes import DType, array_shape, lookup, numpy_dtype, torch_dtype
from nobounce.errors import ArgumentError, ExportError, UnavailableError
from nobounce.protocols import SupportsArrayInterface, SupportsDLPack
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import LEGACY_STREAM
from nobounce.stream import as_stream

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor as TorchTensor

Maker = Callable[[int, tuple[int, ...], DType, int], Any]


class Tensor:
    """`shape` elements of `dtype` at `offset` bytes of a Buffer, C-contiguous.

    `dtype` is a safetensors name such as "BF16", or a DType. ArgumentError where the bytes leave the
    buffer, or an element type smaller than a byte does not fill whole bytes. Closing the buffer
    leaves the tensor its memory.
    """

    __slots__ = ("__weakref__", "_allocation", "_dtype", "_nbytes", "_offset", "_shape")

    _allocation: Allocation
    _offset: int
    _shape: tuple[int, ...]
    _dtype: DType
    _nbytes: int

    def __init__(self, buffer: Buffer, shape: Iterable[int], dtype: str | DType, *, offset: int = 0) -> None:
        kind = dtype if isinstance(dtype, DType) else lookup(dtype)
        dims: tuple[Any, ...] = tuple(shape)  # of whatever a caller without a type checker gave
        bits = kind.bits
        for dim in dims:
            if not isinstance(dim, int) or dim < 0 or isinstance(dim, bool):
                raise ArgumentError(f"shape {list(dims)} is not made of whole numbers from 0 on")
            bits *= dim
        if bits % 8:
            raise ArgumentError(f"{kind.name} {list(dims)} has {bits} bits, which are no whole bytes")
        nbytes = bits // 8
        self._allocation = buffer.allocation
        self._offset = buffer._locate(offset, nbytes)
        self._shape, self._dtype, self._nbytes = dims, kind, nbytes

    @classmethod
    def maker(
        cls,
        buffer: Buffer,
        framework: Literal["numpy", "torch"] | None = None,
        *,
        shared_storage: bool = False,
    ) -> Maker:
        """A fast maker of many tensors over one buffer: make(offset, shape, dtype, nbytes) ->
        Tensor, array or torch tensor.

        It believes what it is told: for loaders that have checked. numpy and torch see the memory without a
        copy where they can reach it; else one host copy of the whole buffer is made, and shared. torch
        tensors have a storage each, or with `shared_storage` are views of one.
        """
        if framework == "numpy":
            return _numpy_maker(buffer)
        if framework == "torch":
            return _torch_maker(buffer, shared_storage)
        allocation, start, new = buffer.allocation, _start(buffer), cls.__new__

        def make(offset: int, shape: tuple[int, ...], dtype: DType, nbytes: int) -> Tensor:
            tensor = new(cls)
            tensor._allocation = allocation
            tensor._offset = start + offset
            tensor._shape = shape
            tensor._dtype = dtype
            tensor._nbytes = nbytes
            return tensor

        return make

    @classmethod
    def from_dlpack(cls, obj: SupportsDLPack | SupportsArrayInterface) -> Tensor:
        """A Tensor over the memory of any object with `__dlpack__`, without a copy; the memory
        lives as long as needed.

        numpy arrays of ml_dtypes types, which numpy does not export, are taken too. ArgumentError where
        the array is not C-contiguous, its type has no safetensors name or its device is unknown here;
        read-only memory stays read-only.
        """
        from nobounce.adopt import take_tensor

        buffer, shape, dtype = take_tensor(obj)
        return cls(buffer, shape, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension; () for a scalar."""
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def dtype(self) -> DType:
        """The element type; `str()` of it is its safetensors name."""
        return self._dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self._nbytes

    @property
    def address(self) -> int:
        """Where the first element lies; 0 for an empty tensor."""
        return self._allocation.address + self._offset if self._nbytes else 0

    @property
    def device(self) -> Device:
        return self._allocation.device

    @property
    def is_host_accessible(self) -> bool:
        """Whether the host can load and store the memory at its address."""
        return self._allocation.host

    @property
    def buffer(self) -> Buffer:
        """A Buffer of just this tensor's bytes, which shares the memory."""
        return Buffer._of(self._allocation, self._offset, self._nbytes)

    def tobytes(self) -> bytes:
        """A copy of the raw bytes."""
        if self.is_host_accessible:
            return bytes(self.buffer.view())
        return bytes(self._allocation.copy_to_host(self._offset, self._nbytes))

    def __buffer__(self, flags: int, /) -> memoryview:
        if not self.is_host_accessible:
            raise ExportError(f"the host cannot reach memory of {self.device}")
        try:
            return memoryview(cast(Any, self.numpy()))
        except ValueError as error:  # the buffer protocol has no name for bf16, FP8 and their kind
            raise ExportError(f"no buffer of {self._dtype.name}: {error}") from error

    def numpy(self) -> np.ndarray[Any, Any]:
        """An array over the memory, which it keeps alive; a fresh copy where the host cannot reach it.

        bf16 and FP8 are ml_dtypes types; F4 is uint8 with two elements in each byte (the last
        dimension is halved). Waits for work under way. ArgumentError where numpy has no such type,
        naming the raw bytes as the way out.
        """
        import numpy as np

        kind, dims = numpy_dtype(self._dtype), array_shape(self._dtype, self._shape)
        base, offset = self._host_bytes()
        return np.ndarray(dims, kind, base, offset)

    def torch(self) -> TorchTensor:
        """A torch tensor over the memory, which it keeps alive; on the GPU where the memory is a GPU's.

        A host copy where torch cannot see the memory (`sim`). UnavailableError without torch, ArgumentError
        where torch has no such type.
        """
        module = _torch()
        torch_dtype(self._dtype, module)
        array_shape(self._dtype, self._shape)
        if self._dlpack_device() is None:
            base, offset = self._host_bytes()
            return module.from_dlpack(
                dlpack.export(base, offset, self._shape, self._dtype, (dlpack.CPU, 0), versioned=False)
            )
        stream = _torch_stream(module, self._allocation)
        return module.from_dlpack(self.__dlpack__(stream=stream, max_version=dlpack.VERSION))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False and not self.is_host_accessible:
            raise ArgumentError(f"the host cannot reach memory of {self.device}: an array of it is a copy")
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ArgumentError(f"{self._dtype.name} as {dtype} is a copy")
            return array.astype(dtype)
        return array.copy() if copy and self.is_host_accessible else array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if not self.is_host_accessible or not self._nbytes:
            raise AttributeError("__array_interface__: no memory that the host can reach")
        self._allocation.wait()
        data = (self.address, self._allocation.read_only)
        return {"version": 3, "shape": self._dims(), "typestr": self._typestr(), "data": data}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return cuda_array_interface(self.buffer, self._dims(), self._typestr())

    def __dlpack_device__(self) -> tuple[int, int]:
        """(DLDeviceType, ordinal). ExportError for memory no framework knows, such as that of `sim`."""
        device = self._dlpack_device()
        if device is None:
            raise ExportError(
                f"no framework knows memory of {self.device}: numpy() and torch() copy it to the host"
            )
        return device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule (array API 2024.12); versioned where `max_version` is 1.0 or newer.

        `dl_device` may ask for host memory (1, 0), which is a copy unless the host reaches this memory.
        `stream` is the consumer's: it waits for work under way here; -1 asks for no such order. Raises
        ExportError, a BufferError.
        """
        versioned = max_version is not None and max_version[0] >= 1
        here = self._dlpack_device()
        wanted = here if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if wanted is None:
            raise ExportError(_unknown(self.device))
        if wanted != here and wanted != (dlpack.CPU, 0):
            raise ExportError(f"memory of {self.device} cannot be handed out as DLPack device {wanted}")
        if wanted == here and not copy:
            self._order(here, stream)
            base = dlpack.base_array(self._allocation)
            return dlpack.export(base, self._offset, self._shape, self._dtype, wanted, versioned=versioned)
        if copy is False:
            raise ExportError(
                f"memory of {self.device} reaches the host by a copy only, and copy=False forbids it"
            )
        base = self._copy_for(wanted)
        return dlpack.export(base, 0, self._shape, self._dtype, wanted, versioned=versioned, copied=True)

    def _copy_for(self, wanted: tuple[int, int] | None) -> Any:
        import numpy as np

        if wanted == (dlpack.CPU, 0):
            return np.frombuffer(self._allocation.copy_to_host(self._offset, self._nbytes), np.uint8)
        self._allocation.wait()
        stream = self.device.default_stream
        fresh = self.buffer.copy_to(stream=stream)
        stream.sync()
        return dlpack.base_array(fresh.allocation)

    def _order(self, here: tuple[int, int] | None, stream: int | None) -> None:
        if here == (dlpack.CPU, 0):
            self._allocation.wait()
        elif self._allocation.pending is not None and stream != -1:
            self._allocation.order(as_stream(LEGACY_STREAM if stream is None else stream, self.device))

    def _dlpack_device(self) -> tuple[int, int] | None:
        allocation = self._allocation
        kind = allocation.device.capabilities.dlpack_device_type
        if allocation.host and (kind in (None, dlpack.CPU) or allocation.kind is not MemoryKind.MANAGED):
            return dlpack.CPU, 0
        return None if kind is None else (kind, allocation.device.ordinal)

    def _host_bytes(self) -> tuple[Any, int]:
        import numpy as np

        if not self.is_host_accessible:
            return np.frombuffer(self._allocation.copy_to_host(self._offset, self._nbytes), np.uint8), 0
        self._allocation.wait()
        return self._allocation.array(), self._offset if self._nbytes else 0

    def _dims(self) -> tuple[int, ...]:
        try:
            return array_shape(self._dtype, self._shape)
        except ArgumentError as error:
            raise AttributeError(str(error)) from error

    def _typestr(self) -> str:
        try:
            kind = numpy_dtype(self._dtype)
        except ArgumentError as error:
            raise AttributeError(str(error)) from error
        if kind.kind == "V" or kind.isbuiltin != 1:
            raise AttributeError(f"the array interface has no name for {self._dtype.name}")
        return kind.str

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("a scalar tensor has no length")
        return self._shape[0]

    def __repr__(self) -> str:
        return f"<Tensor {self._dtype.name} {list(self._shape)} on {self.device.name}>"


def import_framework(framework: Literal["numpy", "torch"] | None) -> None:
    """Import what tensors of `framework` need, torch taking a second or more: before a transfer,
    whose clock would contain it.

    Raises UnavailableError without torch.
    """
    if framework == "torch":
        _torch()
    elif framework == "numpy":
        importlib.import_module("numpy")


def looks_on(buffer: Buffer, framework: Literal["numpy", "torch"] | None) -> bool:
    """Whether what `Tensor.maker` makes looks at the buffer's own memory, so that it can be made
    before the bytes are there."""
    if framework is None or buffer.is_host_accessible:
        return True
    return framework == "torch" and buffer.device.capabilities.dlpack_device_type is not None


def _unknown(device: Device) -> str:
    return f"no framework knows memory of {device}: numpy() and torch() copy it to the host"


def _start(buffer: Buffer) -> int:
    return buffer.handle - buffer.allocation.address if buffer.handle else 0


def _numpy_maker(buffer: Buffer) -> Maker:
    import numpy as np

    base = buffer.numpy()
    kinds: dict[DType, Any] = {}
    array = np.ndarray

    def make(offset: int, shape: tuple[int, ...], dtype: DType, nbytes: int) -> Any:
        kind = kinds.get(dtype)
        if kind is None:
            kind = kinds[dtype] = numpy_dtype(dtype)
        return array(
            array_shape(dtype, shape) if dtype.packed else shape, kind, base, offset if nbytes else 0
        )

    return make


def _torch_maker(buffer: Buffer, shared_storage: bool) -> Maker:
    from nobounce.ownstorage import torch_storages, torch_views

    module = _torch()
    bytes_of_it = Tensor(buffer, (buffer.nbytes,), "U8")
    whole = bytes_of_it.torch()
    if shared_storage:
        return torch_views(module, whole, Tensor.maker(buffer))
    device = bytes_of_it._dlpack_device()
    if device is None:  # a copy on the host
        return torch_storages(module, whole.numpy(), 0, (dlpack.CPU, 0), whole.device)
    base = dlpack.base_array(buffer.allocation)
    return torch_storages(module, base, _start(buffer), device, whole.device)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"torch cannot be imported ({error}): pip install nobounce[torch]") from error
    return torch


def _torch_stream(module: Any, allocation: Allocation) -> int | None:
    """The stream torch will use the tensor on; None where nothing has to wait."""
    if allocation.pending is None or allocation.host:
        return None
    return int(module.cuda.current_stream(allocation.device.ordinal).cuda_stream) or LEGACY_STREAM
