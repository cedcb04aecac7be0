"""What is done to the bytes of a file after their arrival: misaligned tensors move, big-endian numbers turn,
strided tensors are copied.

Files that need none of it, which are nearly all, pay nothing. Moves are made by the device.
Turning and copying are the host's work: on a GPU the bytes go to the host and back, in pieces of
`SCRATCH` bytes where they can.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from nobounce.dtypes import DType, array_shape, numpy_dtype
from nobounce.errors import FormatError, clip
from nobounce.formats.placement import Placement, Swap, rounds
from nobounce.formats.tensorinfo import Header
from nobounce.tensor import Tensor

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device

SCRATCH = 16 << 20


def move(slab: Buffer, placement: Placement, device: Device) -> None:
    """Move misaligned tensors to their places, through a scratch in device memory, in stream order."""
    runtime, base = device._runtime, slab.handle
    largest = min(SCRATCH, sum(m.nbytes for m in placement.moves))
    with device.allocate(largest) as scratch, device.create_stream() as stream:
        for group in rounds(placement.moves, largest):
            out, back, position = [], [], scratch.handle
            for m in group:
                out.append((position, base + m.src, m.nbytes))
                back.append((base + m.dst, position, m.nbytes))
                position += m.nbytes
            runtime.copy_batch(out, stream.handle)
            runtime.copy_batch(back, stream.handle)
        stream.sync()


def swap(slab: Buffer, swaps: Iterable[Swap]) -> None:
    """Turn big-endian numbers into little-endian ones, in place."""
    for offset, nbytes, size in swaps:
        for at in range(offset, offset + nbytes, SCRATCH):
            piece = min(SCRATCH, offset + nbytes - at)
            array = _host(slab, at, piece)
            array.view(f"u{size}").byteswap(inplace=True)
            if not slab.is_host_accessible:
                _to_device(array, slab, at)


def check_copies(header: Header) -> None:
    """FormatError where copies of a file's strided tensors, which nobounce.Tensor needs, would take more than
    its data section: a tensor that was expanded may stand for any number of elements.
    """
    left = header.data_nbytes
    for name, detail in header.details.items():
        if detail.strides is not None:
            info = header.tensors[name]
            left -= header.nbytes_of(info)
            if left < 0:
                raise FormatError(
                    f"its strides {clip(str(list(detail.strides)))} repeat elements, so a contiguous copy "
                    "may take more than the file: "
                    'load it with framework="torch" or framework="numpy", which keep strides, or save it '
                    "with .contiguous()",
                    filename=header.path,
                    tensor=name,
                    offset=header.data_offset + info.start,
                )


def strided(
    slab: Buffer,
    offset: int,
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    framework: Literal["numpy", "torch"] | None,
    shared_storage: bool = False,
) -> Any:
    """The tensor of `shape` whose first element lies at `offset` of the slab; `strides` count elements. A
    nobounce.Tensor, being C-contiguous, is a copy; an array or a torch tensor looks at the slab.
    """
    if framework == "torch":
        span = _span(shape, strides)
        flat = Tensor.maker(slab, "torch", shared_storage=shared_storage)(
            offset, (span,), dtype, span * dtype.bits // 8
        )
        return flat.as_strided(shape, strides)
    import numpy as np

    size = dtype.bits // 8
    kind = numpy_dtype(dtype) if framework == "numpy" else np.dtype(f"V{size}")
    nbytes = _span(shape, strides) * size
    array: Any = np.ndarray(
        array_shape(dtype, shape), kind, _host(slab, offset, nbytes), 0, [s * size for s in strides]
    )
    if framework == "numpy":
        return array
    with slab.device.allocate(size * prod(shape)) as fresh:
        contiguous = np.ascontiguousarray(array)
        _to_device(contiguous.reshape(-1).view(np.uint8), fresh, 0)
        return Tensor(fresh, shape, dtype)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _host(slab: Buffer, offset: int, nbytes: int) -> Any:
    """Bytes of the slab as a uint8 array: the memory itself, or a copy where the host cannot reach it."""
    import numpy as np

    allocation, at = slab.allocation, slab._locate(offset, nbytes)
    if slab.is_host_accessible:
        allocation.wait()
        return allocation.array()[at : at + nbytes]
    return np.frombuffer(allocation.copy_to_host(at, nbytes), np.uint8)


def _to_device(array: Any, buffer: Buffer, offset: int) -> None:
    """Copy a uint8 array to `offset` of a buffer."""
    stream = buffer.device.default_stream
    Tensor(buffer, (len(array),), "U8", offset=offset).buffer.copy_from(array, stream=stream)
    stream.sync()
