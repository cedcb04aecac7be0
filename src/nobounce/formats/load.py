"""Load a model file into device memory: headers are checked first, then a few large requests bring everything.

Every header of every file is read and checked before the first transfer, so a bad file moves nothing; a GPU's memory for the
first file may be taken meanwhile, and is given back then. Memory: the tensors' own bytes, less than a page per file beside them
(128 KiB for that first one), and one scratch of 16 MiB when tensors must be moved for their alignment.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from nobounce.device import DeviceLike, as_device
from nobounce.errors import ArgumentError
from nobounce.formats.fresh import get_ready
from nobounce.formats.loading import Framework, How, Loading, Memory, Progress
from nobounce.formats.opened import Opened, Paths, close_files, open_files
from nobounce.formats.placement import check_align
from nobounce.formats.settle import check_copies
from nobounce.formats.slab import SlabAhead
from nobounce.formats.tensorinfo import Encoding
from nobounce.formats.torchmem import torch_memory
from nobounce.io.receipt import Receipt, total
from nobounce.route.types import Cache, Require
from nobounce.tensor import Tensor, import_framework

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nobounce.device import Device

T = TypeVar("T")

AHEAD = 1
"""Files whose reads have begun while those of the one before are under way: its last copies then leave no thread idle."""


class Model(dict[str, T]):
    """The tensors by name, in the order of the files, and how they got here.

    `Model[nobounce.Tensor]`, `Model[numpy.ndarray]` or `Model[torch.Tensor]`, as `load` was asked.

    Attributes: `receipt` (one Receipt for everything), `receipts` (one for each file), `device`, `metadata` (of the
    headers, first file wins), `warnings`, `encodings`: how each tensor that is quantised bytes encodes its elements.
    """

    receipt: Receipt
    receipts: tuple[Receipt, ...]
    device: Device
    metadata: dict[str, str]
    warnings: tuple[str, ...]
    encodings: dict[str, Encoding]


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
    shared_storage: bool = False,
) -> Model[torch.Tensor]: ...


def load(
    paths: Paths,
    *,
    device: DeviceLike = None,
    framework: Framework | None = None,
    require: Require = "auto",
    cache: Cache = "auto",
    align: int | None = None,
    progress: Progress | None = None,
    shared_storage: bool = False,
) -> Model[Any]:
    """Load model files into memory of `device`; returns a Model: a dict of name -> tensor with a `receipt`.

    `paths` is a file, a folder (with an index or not) or several files, of safetensors, GGUF, PyTorch checkpoints, npy or npz
    (docs/formats.md). `device` is a name such as "cpu" or "cuda:0"
    (default: the first GPU that works, else cpu). `framework` None gives nobounce.Tensor, "numpy" arrays (bf16 and FP8
    by ml_dtypes), "torch" tensors, without another copy where the framework can see the memory. Each torch tensor has a storage of its
    own, so `torch.save` and `deepcopy` copy one tensor; with `shared_storage=True` those of a file are views of one, which takes half the
    time to make. On a GPU their memory is torch's own (docs/loading.md). `require="fastpath"`
    raises RouteError unless every byte of the data section can go direct. `align` asks that each tensor begin at a
    multiple of so many bytes. `progress(backend, nbytes)` is called from I/O threads as bytes arrive.

    Raises FormatError for a file that is not what it claims (before anything moves), FileError, FileChangedError,
    RouteError, TransferError, OutOfMemoryError, UnavailableError. A failed load leaves nothing behind.
    """
    if framework not in (None, "numpy", "torch"):
        raise ArgumentError(f"framework={framework!r} is not numpy or torch")
    if shared_storage and framework != "torch":
        raise ArgumentError('shared_storage=True is for framework="torch": others have no storages')
    target = as_device(device)
    how = How(framework, shared_storage, require, cache, check_align(align), progress)
    model: Model[Any] = Model()
    opened: list[Opened] = []
    slabs = SlabAhead(target)
    try:
        # Memory that may be torch's is not taken ahead, as torch is not imported for a file that will not load.
        announce = _nothing if framework == "torch" else slabs.begin
        files, opened = open_files(
            paths, lambda nbytes: get_ready(target._runtime, nbytes, require, cache), announce
        )
        if framework is None:
            for one in opened:
                check_copies(one.header)
        import_framework(framework)
        torches = torch_memory(target) if framework == "torch" else None
        memory = slabs if torches is None else torches
        receipts = _load_all(model, opened, memory, target, how._replace(grouped=torches is not None))
    except BaseException:
        model.clear()  # the error's traceback would keep it, and the memory with it
        raise
    finally:
        try:
            close_files(opened)
        finally:
            slabs.close()
    model.device, model.metadata, model.encodings = target, {}, {}
    for one in opened:
        model.metadata = {**one.header.metadata, **model.metadata}
        coded = {n: d.encoding for n, d in one.header.details.items() if d.encoding is not None}
        model.encodings.update(coded)
    model.warnings = (*files.warnings, *(w for o in opened for w in o.header.warnings))
    model.receipts = tuple(receipts)
    model.receipt = total(receipts)
    return model


def _load_all(
    model: Model[Any], opened: list[Opened], memory: Memory, device: Device, how: How
) -> list[Receipt]:
    """Load the files in their order; the reads of one begin before those of the one before it have ended."""
    receipts: list[Receipt] = []
    under_way: deque[Loading] = deque()

    def finish() -> None:
        receipts.append(under_way[0].finish())
        model.update(under_way.popleft().made)

    try:
        for one in opened:
            under_way.append(Loading(one, memory, device, how))
            under_way[-1].begin()
            if len(under_way) > AHEAD:
                finish()
        while under_way:
            finish()
    except BaseException:
        for loading in under_way:
            loading.abandon()
        raise
    return receipts


def _nothing(*_: object) -> None:
    return None
