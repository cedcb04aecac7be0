"""The caller's own tensors as the destination of a load: recognised by protocol, checked, and written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nobounce.buffer import Buffer, as_buffer
from nobounce.device import as_device
from nobounce.dtypes import C32, C128, DTYPES, DType, array_shape
from nobounce.errors import ArgumentError, clip, printable
from nobounce.tensor import Tensor

if TYPE_CHECKING:
    from nobounce.device import Device
    from nobounce.formats.selection import Wanted

_TYPES = (*DTYPES.values(), C128, C32)
_BY_TORCH = {f"torch.{d.torch}": d for d in _TYPES if d.torch is not None}
_BY_NUMPY = {d.numpy: d for d in _TYPES if d.numpy is not None and d.name != "F4"}


class Module(Protocol):
    """A torch module, by what is asked of it."""

    def state_dict(self, *, keep_vars: bool = ...) -> Mapping[str, Any]: ...


Into = Mapping[str, Any] | Module
"""Destinations by name: tensors, arrays and buffers of any framework, or a torch module, whose
parameters and buffers they are."""


class Target(NamedTuple):
    """One destination: `obj` as the caller gave it, where it lies, and the address of its bytes, None where
    they are not C-contiguous."""

    name: str
    obj: Any
    device: Device
    address: int | None

    @property
    def buffer(self) -> Buffer:
        """Its memory."""
        return as_buffer(self.obj, write=True)


def destinations(into: Any) -> dict[str, Any]:
    """Destinations by name: a mapping, or a torch module's parameters and buffers."""
    if isinstance(into, Mapping):
        return dict(into)
    state = getattr(into, "state_dict", None)
    if callable(state):
        return dict(state(keep_vars=True))
    raise TypeError(f"into= is a mapping of names to tensors, or a torch module, not {type(into).__name__}")


def match(into: Mapping[str, Any], known: Iterable[str], *, strict: bool) -> dict[str, Any]:
    """The destinations that the model has tensors for. Tied ones (one memory, several names)
    need one name of the file's.

    Raises ArgumentError for a destination that the model lacks, and with `strict` for a tensor
    that has no destination.
    """
    names = set(known)
    found = {name: obj for name, obj in into.items() if name in names}
    places = {_place(obj) for obj in found.values()} - {None}
    missing = [name for name, obj in into.items() if name not in names and _place(obj) not in places]
    extra = sorted(names.difference(into)) if strict else []
    for kind, which in (
        ("destinations are not in the model", missing),
        ("tensors of the model have no destination", extra),
    ):
        if which:
            few = ", ".join(printable(clip(name)) for name in which[:5])
            raise ArgumentError(
                f"into=: {len(which)} {kind}: {few}"
                + (" (strict=False leaves them)" if which is extra else "")
            )
    return found


def _place(obj: Any) -> tuple[int, tuple[int, ...]] | None:
    """Where a torch tensor lies and its shape, by which tied ones are known."""
    try:
        return (int(obj.data_ptr()), tuple(obj.shape)) if obj.numel() else None
    except (AttributeError, RuntimeError, TypeError):
        return None


class Targets:
    """Makes checked destinations; what is asked of each device and element type is asked once."""

    def __init__(self) -> None:
        self._devices: dict[Any, Device] = {}
        self._types: dict[Any, DType] = {}

    def of(self, obj: Any, want: Wanted) -> Target:
        """A destination, checked against what it is to hold. Raises ArgumentError for another type or shape,
        read-only or foreign memory."""
        module = type(obj).__module__.partition(".")[0]
        torch = sys.modules.get("torch") if module != "numpy" else None
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._of_torch(obj, want)
        dtype, shape = _described(want.name, obj)
        _check(
            want, dtype, shape, want.shape if isinstance(obj, Tensor) else array_shape(want.dtype, want.shape)
        )
        if module == "numpy" and not (obj.flags.c_contiguous and obj.flags.aligned):
            if not obj.flags.writeable:
                raise _mismatch(want.name, "is read-only")
            return Target(want.name, obj, as_device("cpu"), None)
        buffer = as_buffer(obj, write=True)
        return Target(want.name, obj, buffer.device, buffer.handle)

    def _of_torch(self, obj: Any, want: Wanted) -> Target:
        dtype = self._types.get(obj.dtype)
        if dtype is None:
            dtype = self._types[obj.dtype] = _type(want.name, obj.dtype)
        _check(
            want, dtype, tuple(obj.shape), array_shape(want.dtype, want.shape) if dtype.packed else want.shape
        )
        device = self._devices.get(obj.device)
        if device is None:
            device = self._devices[obj.device] = as_device(obj.device)
        try:
            lazy = obj.is_conj() or obj.is_neg()
            address = obj.data_ptr() if obj.is_contiguous() and not lazy else None
        except RuntimeError:  # sparse, meta and fake tensors: as_buffer says so
            address = as_buffer(obj, write=True).handle
        return Target(want.name, obj, device, address)


def _check(want: Wanted, dtype: DType | None, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if dtype is not None and dtype is not want.dtype:
        raise _mismatch(want.name, f"is {dtype.name}, the tensor {want.dtype.name}")
    if shape != expected and not (dtype is None and shape == (want.nbytes,)):
        raise _mismatch(want.name, f"has shape {list(shape)}, the tensor {list(want.shape)}")


def _mismatch(name: str, what: str) -> ArgumentError:
    return ArgumentError(f"into[{printable(clip(name))!r}] {what}")


def _type(name: str, kind: Any) -> DType:
    dtype = _BY_TORCH.get(str(kind)) or _BY_NUMPY.get(str(kind))
    if dtype is None:
        raise _mismatch(name, f"is of a type that no tensor has: {printable(clip(str(kind)))}")
    return dtype


def _described(name: str, obj: Any) -> tuple[Any, tuple[int, ...]]:
    """(element type, None where the memory is plain bytes; shape)."""
    if isinstance(obj, Tensor):
        return obj.dtype, obj.shape
    if isinstance(obj, Buffer):
        return None, (obj.nbytes,)
    kind, shape = getattr(obj, "dtype", None), getattr(obj, "shape", None)
    if kind is not None and shape is not None:
        return _type(name, kind), tuple(shape)
    view = memoryview(obj)
    if view.format in ("B", "b", "c"):
        return None, (view.nbytes,)
    import numpy as np

    array = np.asarray(view)
    return _BY_NUMPY.get(str(array.dtype)), array.shape


def put(target: Target, tensor: Tensor) -> None:
    """Copy a tensor to a destination of any strides."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target.obj, torch.Tensor):
        with torch.no_grad():
            target.obj.copy_(tensor.torch())
        return
    import numpy as np

    np.copyto(target.obj, tensor.numpy())


def written(targets: Iterable[Target]) -> None:
    """Tell torch that its tensors have changed, as autograd must know."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for target in targets:
        if isinstance(target.obj, torch.Tensor) and not target.obj.is_inference():
            torch.autograd.graph.increment_version(target.obj)
