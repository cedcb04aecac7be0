"""torch tensors over one piece of memory, each with a storage of its own.

`torch.save` and `deepcopy` copy a tensor's storage. Views of one storage would make them copy a whole file
for each tensor, so each tensor comes in as a DLPack capsule: its storage is as long as the tensor, refuses
`resize_`, and keeps all of the memory alive. numpy makes the capsules (dlpack.py says why); only the 16 bytes
in which element type and device stand are written over. Measured on 2 cores: 1.3 us a tensor, a view 0.7.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from nobounce import dlpack
from nobounce.dtypes import array_shape, contiguous_strides, torch_dtype
from nobounce.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nobounce.dtypes import DType

_AT = dlpack.DLTensor.device.offset
"""Where device, number of dimensions and element type stand in a capsule's struct, `_HEAD` in all."""
_HEAD = dlpack.DLTensor.shape.offset - _AT


class _Kind:
    """How tensors of one element type come in: numpy's words for it, the type to view them as afterwards,
    the heads by dimensions."""

    __slots__ = ("code", "heads", "view", "words")

    def __init__(self, dtype: DType, module: Any) -> None:
        import numpy as np

        wanted = torch_dtype(dtype, module)
        self.words = np.dtype(_words(dtype.bits))
        self.view: Any = None
        self.heads: dict[int, bytes] = {}
        if dtype.dlpack is not None:
            self.code = (*dtype.dlpack, 2 if dtype.bits == 4 else 1)
            if _imports(module, self, wanted):
                return
        # A torch that has the type, and no DLPack name for it.
        self.code, self.view = (1 if self.words.itemsize == 1 else 0, self.words.itemsize * 8, 1), wanted

    def head(self, ndim: int, device: tuple[int, int]) -> bytes:
        """The bytes to write over those of numpy's capsule of `ndim` dimensions."""
        found = self.heads.get(ndim)
        if found is None:
            kind = dlpack.DLDataType(*self.code)
            whole = dlpack.DLTensor(device=dlpack.DLDevice(*device), ndim=ndim, dtype=kind)
            found = self.heads[ndim] = bytes(whole)[_AT : _AT + _HEAD]
        return found


def _words(bits: int) -> str:
    return "c16" if bits == 128 else f"u{max(bits, 8) // 8}"


def _imports(module: Any, kind: _Kind, wanted: Any) -> bool:
    import numpy as np

    try:
        capsule = np.zeros(1, kind.words).__dlpack__()
        head = kind.head(1, (dlpack.CPU, 0))
        ctypes.memmove(dlpack.pointer(capsule, b"dltensor") + _AT, head, _HEAD)
        return bool(module.from_dlpack(capsule).dtype == wanted)
    except (RuntimeError, BufferError, ValueError, TypeError):
        return False
    finally:
        kind.heads.clear()


def torch_storages(
    module: Any, base: Any, start: int, device: tuple[int, int], empty_on: Any
) -> Callable[[int, tuple[int, ...], DType, int], Any]:
    """make(offset, shape, dtype, nbytes) -> a torch tensor at `start` + `offset` bytes of `base`, a uint8
    array from `dlpack.base_array` or any other, which it keeps alive. `device` is DLPack's, `empty_on`
    torch's, for tensors without elements.

    Believes what it is told. Raises ArgumentError for a type that torch lacks,
    ExportError for read-only memory.
    """
    import numpy as np

    if not base.flags.writeable:
        raise ExportError("torch has no read-only tensors: this memory cannot be handed out")
    array, pointer, take, write = np.ndarray, dlpack.pointer, module.from_dlpack, ctypes.memmove
    kinds: dict[DType, _Kind] = {}

    def make(offset: int, shape: tuple[int, ...], dtype: DType, nbytes: int) -> Any:
        dims = array_shape(dtype, shape) if dtype.packed else shape
        kind = kinds.get(dtype)
        if kind is None:
            kind = kinds[dtype] = _Kind(dtype, module)
        if not nbytes:
            return module.empty(dims, dtype=torch_dtype(dtype, module), device=empty_on)
        capsule = array(dims, kind.words, base, start + offset).__dlpack__()
        write(pointer(capsule, b"dltensor") + _AT, kind.head(len(dims), device), _HEAD)
        made = take(capsule)
        return made if kind.view is None else made.view(kind.view)

    return make


def torch_views(
    module: Any, whole: Any, raw: Callable[[int, tuple[int, ...], DType, int], Any]
) -> Callable[[int, tuple[int, ...], DType, int], Any]:
    """The same, but views of `whole`, a torch tensor of bytes, whose storage they share. `raw` makes a
    nobounce.Tensor of the same memory."""
    room = whole.numel()
    views: dict[DType, Any] = {}
    layouts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def make(offset: int, shape: tuple[int, ...], dtype: DType, nbytes: int) -> Any:
        dims = array_shape(dtype, shape) if dtype.packed else shape
        size = max(1, dtype.bits // 8)
        if not nbytes:
            return module.empty(dims, dtype=torch_dtype(dtype, module), device=whole.device)
        if offset % size:
            # torch's views need an aligned place; a capsule of its own does not.
            return raw(offset, shape, dtype, nbytes).torch()
        words = views.get(dtype)
        if words is None:
            whole_words = whole[: room // size * size]
            words = views[dtype] = whole_words.view(torch_dtype(dtype, module))
        strides = layouts.get(dims)
        if strides is None:
            strides = layouts[dims] = contiguous_strides(dims)
        return words.as_strided(dims, strides, offset // size)

    return make
