"""Load a model file into device memory: headers are checked first, then a few large
requests bring everything.

Every header of every file is read and checked before the first transfer, so a bad file moves nothing; a GPU's
memory for the first file may be taken meanwhile, and is given back then. Memory: the tensors' own bytes, less
than a page per file beside them (128 KiB for that first one), and one scratch of 16 MiB when tensors must be
moved for their alignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from nobounce.device import DeviceLike, as_device
from nobounce.formats.fresh import get_ready
from nobounce.formats.loading import Framework, Progress
from nobounce.formats.model import Model as Model
from nobounce.formats.model import asked, bring
from nobounce.formats.opened import Opened, Paths, close_files, open_files
from nobounce.formats.slab import SlabAhead
from nobounce.route.types import Cache, MemoryKind, Require
from nobounce.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nobounce.formats.into import Into
    from nobounce.formats.selection import Names, Slices


@overload
def load(
    paths: Paths,
    *,
    device: DeviceLike = None,
    framework: None = None,
    require: Require = "auto",
    cache: Cache = "auto",
    align: int | None = None,
    progress: Progress | None = None,
    names: Names = None,
    slices: Slices | None = None,
    pinned: bool = False,
) -> Model[Tensor]: ...


@overload
def load(
    paths: Paths,
    *,
    device: DeviceLike = None,
    framework: Literal["numpy"],
    require: Require = "auto",
    cache: Cache = "auto",
    align: int | None = None,
    progress: Progress | None = None,
    names: Names = None,
    slices: Slices | None = None,
    pinned: bool = False,
) -> Model[np.ndarray[Any, Any]]: ...


@overload
def load(
    paths: Paths,
    *,
    device: DeviceLike = None,
    framework: Literal["torch"],
    require: Require = "auto",
    cache: Cache = "auto",
    align: int | None = None,
    progress: Progress | None = None,
    names: Names = None,
    slices: Slices | None = None,
    pinned: bool = False,
    shared_storage: bool = False,
) -> Model[torch.Tensor]: ...


@overload
def load(
    paths: Paths,
    *,
    device: DeviceLike = None,
    require: Require = "auto",
    cache: Cache = "auto",
    progress: Progress | None = None,
    names: Names = None,
    slices: Slices | None = None,
    into: Into,
    strict: bool = False,
) -> Model[Any]: ...


def load(
    paths: Paths,
    *,
    device: DeviceLike = None,
    framework: Framework | None = None,
    require: Require = "auto",
    cache: Cache = "auto",
    align: int | None = None,
    progress: Progress | None = None,
    names: Names = None,
    slices: Slices | None = None,
    shared_storage: bool = False,
    into: Any = None,
    strict: bool = False,
    pinned: bool = False,
) -> Model[Any]:
    """Load model files into memory of `device`; returns a Model: a dict of name -> tensor with a `receipt`.

    `paths` is a file, a folder (with an index or not) or several files, of safetensors, GGUF, PyTorch
    checkpoints, npy or npz (docs/formats.md). `device` is a name such as "cpu" or "cuda:0" (default: the
    first GPU that works, else cpu). `framework` None gives nobounce.Tensor, "numpy" arrays (bf16 and FP8 by
    ml_dtypes), "torch" tensors, without another copy where the framework can see the memory. Each torch
    tensor has a storage of its own, so `torch.save` and `deepcopy` copy one tensor; with
    `shared_storage=True` those of a file are views of one, which takes half the time to make. On a GPU
    their memory is torch's own (docs/loading.md). `require="fastpath"` raises RouteError unless every byte
    of the data section can go direct. `align` asks that each tensor begin at a multiple of so many bytes.
    `pinned=True` loads into page-locked host memory of `device`'s runtime, from which copies to it are
    fast: to offload, or to prefetch what is wanted later. `progress(backend, nbytes)` is called from I/O
    threads as bytes arrive.

    Less than everything (docs/loading.md): `names` is a name, a pattern such as "model.layers.0.*", an
    iterable of names or a function of a name; `slices={"w": ((0, 512), None)}` takes a box of a
    tensor. `into` is a mapping of names to tensors, arrays or buffers of any framework, of the same
    shape and type, or a torch module: they are written to where they are, on the devices that they are
    on, and are the model's values; with `strict` every tensor of the model needs one. An error then
    names those that it left undefined.

    Raises FormatError for a file that is not what it claims (before anything moves), FileError,
    FileChangedError, RouteError, TransferError, OutOfMemoryError, UnavailableError. A failed
    load leaves nothing behind.
    """
    how, wish = asked(
        framework, shared_storage, require, cache, align, progress, names, slices, into, strict, pinned
    )
    target = None if device is None and into is not None else as_device(device)
    slabs: SlabAhead | None = None
    if target is not None and wish.is_all:
        slabs = SlabAhead(target, MemoryKind.PINNED if pinned else MemoryKind.DEVICE)
    opened: list[Opened] = []

    def ready(nbytes: int) -> None:
        if target is not None:
            get_ready(target._runtime, nbytes, require, cache)

    try:
        # Memory that may be torch's is not taken ahead, as torch is not imported for a
        # file that will not load.
        announce = _nothing if slabs is None or (framework == "torch" and not pinned) else slabs.begin
        files, opened = open_files(paths, ready, announce)
        return bring(opened, files.warnings, target, how, wish, slabs)
    finally:
        try:
            close_files(opened)
        finally:
            if slabs is not None:
                slabs.close()


def _nothing(*_: object) -> None:
    return None
