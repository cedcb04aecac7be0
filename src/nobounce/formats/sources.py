"""Tensors to be saved, whatever library they come from: a dtype, a shape, and where their bytes are.

No framework is imported to recognise its tensors. The elements of a file lie in C order and
little-endian. What lies so in memory already is written, or copied, as it is; transposed, sliced,
Fortran-ordered, channels-last and big-endian memory of the host is brought into that order piece by piece
(`fill`), so that a large one needs no second copy of itself. The elements are copied as plain integers of
their size: no NaN changes its bits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from nobounce import transferend
from nobounce.buffer import Buffer, as_buffer
from nobounce.device import Device, as_device
from nobounce.dtypes import DTYPES, DType
from nobounce.errors import ArgumentError, NobounceError, clip, printable
from nobounce.formats.nocollect import no_collection
from nobounce.tensor import Tensor

_BY_NUMPY = {d.numpy: d for d in DTYPES.values() if d.numpy is not None and d.name != "F4"}
_BY_TORCH = {f"torch.{d.torch}": d for d in DTYPES.values() if d.torch is not None}
_KNOWN: dict[Any, DType] = {}
"""The types of arrays met so far: to ask numpy for a type's name takes microseconds."""
_CPU = "cpu"
_HARD = 100_000
"""How much of a riddle numpy may solve to tell whether two strided arrays have an element in common; what is
harder counts as shared."""


@dataclass(slots=True)
class Source:
    """One tensor to be saved.

    Attributes: `name`, `dtype`, `shape` (in elements, as the file counts them), `nbytes`; `device`, where the
    memory is; `start` and `stop`, the addresses between which it lies (0 for an empty tensor); `array`, on
    the host: a flat uint8 array where the bytes lie as in the file, else an array of the tensor's dimensions;
    `fetch`, elsewhere: makes the contiguous Buffer.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    device: Device
    start: int
    stop: int
    array: Any = None
    fetch: Callable[[], Buffer] | None = None
    contiguous: bool = True
    read: Callable[[Buffer, int, int, int], None] | None = None
    make: Callable[[], Any] | None = None

    @property
    def in_memory(self) -> bool:
        """Whether its bytes are there before they are wanted."""
        return self.read is None and self.make is None

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 1 for the packed types, which are moved as bytes."""
        return max(1, self.dtype.bits // 8)

    def buffer(self) -> Buffer:
        """The bytes as a Buffer, in the order of the file. Only for contiguous ones
        and for those of devices."""
        return self.fetch() if self.fetch is not None else as_buffer(self.array, write=False)


def sources(tensors: Mapping[str, Any]) -> list[Source]:
    """Every tensor of a mapping, checked.

    Raises ArgumentError, or TypeError where a name is no str and a value no memory, naming the tensor: a type
    that safetensors cannot hold, the reserved name `__metadata__`, two names for the same memory, bytes that
    a failed read left undefined.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is a mapping of names to tensors, not {type(tensors).__name__}")
    found = []
    with no_collection():
        for name, value in tensors.items():
            _check_name(name)
            try:
                found.append(_source(name, value))
            except ArgumentError as e:
                raise ArgumentError(f"{_tensor(name)}: {e}") from e
            except TypeError as e:
                raise TypeError(f"{_tensor(name)}: {e}") from e
        _check_shared(found)
    return found


def fill(target: Any, source: Source, start: int, stop: int) -> None:
    """Copy bytes [start, stop) of a tensor of the host, as the file has them, into a flat uint8 array.
    Both are whole elements."""
    import numpy as np

    if source.contiguous:
        np.copyto(target, source.array[start:stop])
        return
    size, array = source.itemsize, source.array
    _copy(target.view(array.dtype.newbyteorder("=")), array, start // size, stop // size)


def _copy(target: Any, array: Any, first: int, last: int) -> None:
    """Elements [first, last) of an array, counted in C order: whole rows at once, and what is
    left of a row by itself."""
    import numpy as np

    if last - first == array.size:
        np.copyto(target.reshape(array.shape), array)
        return
    if array.ndim == 1:
        np.copyto(target, array[first:last])
        return
    row = array.size // array.shape[0]
    at = first
    while at < last:
        begin, inside = divmod(at, row)
        rows = 1 if inside else max(1, (last - at) // row)
        end = min(last, (begin + rows) * row)
        part = target[at - first : end - first]
        if inside or end - at < row:
            _copy(part, array[begin], inside, end - begin * row)
        else:
            np.copyto(part.reshape(rows, *array.shape[1:]), array[begin : begin + rows])
        at = end


def _tensor(name: str) -> str:
    return f"tensor {printable(clip(name))!r}"


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a str, not {type(name).__name__}: {clip(repr(name))}")
    if name == "__metadata__":
        raise ArgumentError(
            "'__metadata__' is no name for a tensor: in the header of a file it holds the metadata"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ArgumentError(f"{_tensor(name)}: its name holds half of a surrogate pair") from None


def _source(name: str, value: Any) -> Source:
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None and type(value) is numpy.ndarray
    ):  # the most frequent, of which there may be thousands
        return _of_array(name, value)
    if isinstance(value, Tensor):
        return _of_buffer(name, value.buffer, value.dtype, value.shape)
    if isinstance(value, Buffer):
        return _of_buffer(name, value, DTYPES["U8"], (value.nbytes,))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(name, value, torch)
    if not isinstance(value, type | int | str):
        if isinstance(getattr(value, "__array_interface__", None), dict):
            return _of_array(name, value)
        interface = getattr(value, "__cuda_array_interface__", None)
        if isinstance(interface, dict):
            return _of_cuda_array(name, value, interface)
        view = _memory(value)
        if view is not None:
            return _of_array(name, view)
        if hasattr(value, "__dlpack__"):
            return _of_dlpack(name, value)
    as_buffer(value, write=False)  # says what would do
    raise TypeError(f"{type(value).__name__} is no tensor")


def _of_buffer(name: str, buffer: Buffer, dtype: DType, shape: tuple[int, ...]) -> Source:
    if dtype.name not in DTYPES:
        _no_such_type(dtype.name)
    buffer.wait()
    allocation = buffer.allocation
    start, stop = (buffer.handle, buffer.handle + buffer.nbytes) if buffer.nbytes else (0, 0)
    if allocation.arriving:
        lacks = transferend.lacking(tuple(allocation.arriving.items()), start, stop)
        if lacks is not None:
            raise lacks.refusal(lacks.filename, lacks.file_offset, buffer.nbytes, "save")
    source = Source(name, dtype, shape, buffer.nbytes, buffer.device, start, stop)
    if buffer.is_host_accessible:
        import numpy as np

        source.array, source.device = np.frombuffer(buffer.view(), np.uint8), _cpu()
    if buffer.device.name == _CPU or source.array is None:
        source.fetch = lambda: buffer
    return source


def _of_torch(name: str, value: Any, torch: Any) -> Source:
    dtype = _BY_TORCH.get(str(value.dtype))
    if dtype is None:
        _no_such_type(str(value.dtype))
    if value.layout is not torch.strided or value.device.type == "meta":
        what = "meta" if value.device.type == "meta" else str(value.layout).removeprefix("torch.")
        raise ArgumentError(f"a {what} tensor has no plain memory to save: call to_dense(), or leave it out")
    try:
        value = value.detach().resolve_conj().resolve_neg()
        shape = tuple(value.shape)
        if dtype.packed:
            if not shape:
                raise ArgumentError(f"a {value.dtype} without dimensions has no shape in elements")
            shape = (*shape[:-1], shape[-1] * 2)
        if value.device.type == "cpu":
            kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            array = value.view(kinds[value.element_size()]).numpy()
            return _of_strided(name, dtype, shape, array)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as e:
        if isinstance(e, NobounceError):
            raise
        raise ArgumentError(f"the {type(value).__name__} does not give its memory: {e}") from e
    nbytes = value.numel() * value.element_size()
    start = value.data_ptr() if nbytes else 0
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1 if nbytes else 0
    stop = start + reach * value.element_size()
    source = Source(name, dtype, shape, nbytes, as_device(value.device), start, stop)
    source.contiguous = value.is_contiguous()
    source.fetch = lambda: as_buffer(value.contiguous(), write=False)
    torch.cuda.current_stream(value.device).synchronize()
    return source


def _of_array(name: str, value: Any) -> Source:
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError("a masked array has a mask that the file cannot hold: call filled() first")
    array = np.asarray(value)
    kind = array.dtype
    dtype = _KNOWN.get(kind)
    if dtype is None:
        dtype = _BY_NUMPY.get(kind.newbyteorder("=").name)
        if dtype is None:
            _no_such_type(f"numpy's {kind}")
        _KNOWN[kind] = dtype
    if kind.isnative or kind.itemsize == 1:
        array = array.view(f"u{kind.itemsize}")
    return _of_strided(name, dtype, array.shape, array)


def _of_strided(name: str, dtype: DType, shape: tuple[int, ...], array: Any) -> Source:
    """An array of the host of plain integers, or of big-endian numbers."""
    import numpy as np

    contiguous = array.flags.c_contiguous and array.dtype.isnative
    start, stop = _bounds(array) if array.nbytes else (0, 0)
    if contiguous:
        array = array.reshape(-1).view(np.uint8)
    return Source(
        name,
        dtype,
        shape,
        array.nbytes,
        _cpu(),
        start,
        stop,
        array=array,
        contiguous=contiguous,
    )


@functools.cache
def _cpu() -> Device:
    return Device(_CPU)


def _bounds(array: Any) -> tuple[int, int]:
    """The address of the first byte of an array, and that behind its last."""
    first = last = int(array.__array_interface__["data"][0])
    if array.flags.c_contiguous:
        return first, first + array.nbytes
    for dim, stride in zip(array.shape, array.strides, strict=True):
        reach = (dim - 1) * stride
        first, last = first + min(reach, 0), last + max(reach, 0)
    return first, last + array.itemsize


def _of_cuda_array(name: str, value: Any, interface: dict[str, Any]) -> Source:
    import numpy as np

    typestr = str(interface["typestr"])
    if typestr[0] == ">":
        raise ArgumentError("big-endian memory of a device is not turned: bring it to the host first")
    kind = np.dtype(typestr).name if typestr[1] != "V" else str(getattr(value, "dtype", typestr))
    dtype = _BY_NUMPY.get(kind)
    if dtype is None:
        _no_such_type(kind)
    return _of_buffer(name, as_buffer(value, write=False), dtype, tuple(interface["shape"]))


def _of_dlpack(name: str, value: Any) -> Source:
    import numpy as np

    try:
        taken = Tensor.from_dlpack(value)
    except ArgumentError:
        device = getattr(value, "__dlpack_device__", lambda: (0, 0))()
        if int(device[0]) != 1:
            raise
        try:
            return _of_array(name, np.from_dlpack(value))  # which takes strides, and fewer types
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass
        raise
    if not taken.is_host_accessible:
        taken.device.default_stream.sync()  # behind which the producer has put its work
    return _of_buffer(name, taken.buffer, taken.dtype, taken.shape)


def _memory(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except TypeError:
        return None
    except (ValueError, BufferError) as e:
        raise ArgumentError(f"the {type(value).__name__} does not give its memory: {e}") from e


def _no_such_type(name: str) -> NoReturn:
    raise ArgumentError(
        f"safetensors has no element type for {name}; it has {', '.join(DTYPES)}: convert it first"
    )


def _check_shared(found: Iterable[Source]) -> None:
    """Raise ArgumentError where two tensors have bytes in common: a file has each byte once, and a load
    would part them in silence."""
    by_place: dict[str, list[Source]] = {}
    for source in found:
        if source.nbytes:
            by_place.setdefault(source.device.name, []).append(source)
    for place in by_place.values():
        place.sort(key=lambda s: (s.start, s.stop))
        reaching: list[Source] = []
        for source in place:
            reaching = [other for other in reaching if other.stop > source.start]
            for other in reaching:
                if _share(other, source):
                    raise ArgumentError(
                        f"{_tensor(other.name)} and {_tensor(source.name)} share memory: leave one of them "
                        "out, or save a copy of it"
                    )
            reaching.append(source)


def _share(one: Source, other: Source) -> bool:
    """Whether two tensors, which overlap from first to last byte, have an element in common."""
    if (one.contiguous and other.contiguous) or one.array is None or other.array is None:
        return True
    import numpy as np

    try:
        return bool(np.shares_memory(one.array, other.array, max_work=cast(Any, _HARD)))
    except np.exceptions.TooHardError:
        return True
