"""A loaded model, and how all or some of the tensors of its checked files get there: file by file, the next
begun before the last ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from nobounce.errors import ArgumentError, NobounceError, clip, printable
from nobounce.formats.loading import Framework, How, Loading, Memory, Progress
from nobounce.formats.nocollect import no_collection
from nobounce.formats.opened import Opened
from nobounce.formats.placement import check_align
from nobounce.formats.settle import check_copies
from nobounce.formats.slab import SlabAhead
from nobounce.formats.tensorinfo import Encoding
from nobounce.formats.torchmem import torch_memory
from nobounce.io.receipt import Receipt, total
from nobounce.route.types import Cache, MemoryKind, Require
from nobounce.tensor import import_framework

if TYPE_CHECKING:
    from nobounce.device import Device
    from nobounce.formats.selection import Names, Slices

T = TypeVar("T")

AHEAD = 1
"""Files whose reads have begun while those of the one before are under way: its last copies
then leave no thread idle."""


class Model(dict[str, T]):
    """The tensors by name, in the order of the files, and how they got here.

    `Model[nobounce.Tensor]`, `Model[numpy.ndarray]` or `Model[torch.Tensor]`, as `load` was asked.

    Attributes: `receipt` (one Receipt for everything), `receipts` (one for each file), `device`,
    `metadata` (of the headers, first file wins), `warnings`, `encodings`: how each tensor that is
    quantised bytes encodes its elements.
    """

    receipt: Receipt
    receipts: tuple[Receipt, ...]
    device: Device
    metadata: dict[str, str]
    warnings: tuple[str, ...]
    encodings: dict[str, Encoding]


class Wish(NamedTuple):
    """What of a model is wanted, and where: all of it in fresh memory, unless something is said."""

    names: Names = None
    slices: Slices | None = None
    into: Any = None
    strict: bool = False

    @property
    def is_all(self) -> bool:
        return self.names is None and not self.slices and self.into is None


def asked(
    framework: Framework | None,
    shared_storage: bool,
    require: Require,
    cache: Cache,
    align: int | None,
    progress: Progress | None,
    names: Names,
    slices: Slices | None,
    into: Any,
    strict: bool,
    pinned: bool,
) -> tuple[How, Wish]:
    """The arguments of a load, checked. Raises ArgumentError."""
    if framework not in (None, "numpy", "torch"):
        raise ArgumentError(f"framework={framework!r} is not numpy or torch")
    if shared_storage and framework != "torch":
        raise ArgumentError('shared_storage=True is for framework="torch": others have no storages')
    if pinned and into is not None:
        raise ArgumentError("pinned=True is for new memory: into= takes tensors where they are")
    if into is not None and (framework is not None or align is not None):
        raise ArgumentError("into= takes tensors as they are: framework= and align= are for new ones")
    how = How(framework, shared_storage, require, cache, check_align(align), progress, pinned=pinned)
    return how, Wish(names, slices, into, strict)


class Load(Protocol):
    """Some of one file on its way: `Loading` or `PartLoading`."""

    made: dict[str, Any]

    def begin(self) -> None: ...
    def finish(self) -> Receipt: ...
    def abandon(self) -> None: ...

    @property
    def undefined(self) -> list[str]:
        """The caller's tensors that have been written to in part, perhaps."""


def bring(
    opened: list[Opened],
    warnings: tuple[str, ...],
    device: Device | None,
    how: How,
    wish: Wish,
    slabs: SlabAhead | None = None,
) -> Model[Any]:
    """Load what is wished of checked files. `device` None is for `into`, whose tensors say where they are;
    `slabs` may have memory for the first file. Raises as `load`."""
    model: Model[Any] = Model()
    receipts: list[Receipt] = []
    try:
        if device is not None and wish.is_all:
            if how.framework is None:
                for one in opened:
                    check_copies(one.header)
            import_framework(how.framework)
            memory = memory_on(device, how, slabs=slabs)
            grouped = how._replace(grouped=not isinstance(memory, SlabAhead))
            _run(model, receipts, [Loading(one, memory, device, grouped) for one in opened])
        else:
            from nobounce.formats.partial import part_loads

            import_framework(how.framework)
            with no_collection():
                parts = part_loads(opened, device, how, wish)
            for where, loads in parts:
                device = device or where
                _run(model, receipts, loads)
    except BaseException:
        model.clear()  # the error's traceback would keep it, and the memory with it
        raise
    if device is None:
        raise ArgumentError("into= names no tensor")
    model.device, model.metadata, model.encodings = device, {}, {}
    for one in opened:
        model.metadata = {**one.header.metadata, **model.metadata}
        coded = {n: d.encoding for n, d in one.header.details.items() if d.encoding is not None}
        model.encodings.update({n: e for n, e in coded.items() if n in model})
    model.warnings = (*warnings, *(w for o in opened for w in o.header.warnings))
    model.receipts = tuple(receipts)
    model.receipt = total(receipts) if receipts else Receipt("read", opened[0].path, device.name, 0, 0)
    return model


def memory_on(device: Device, how: How, *, torch: bool = False, slabs: SlabAhead | None = None) -> Memory:
    """Where memory on `device` comes from: torch, for its tensors on a GPU and where `torch`
    says so, or nobounce itself."""
    if how.pinned:
        return slabs or SlabAhead(device, MemoryKind.PINNED)
    torch = torch or how.framework == "torch"
    return (torch_memory(device) if torch else None) or slabs or SlabAhead(device)


def _run(model: Model[Any], receipts: list[Receipt], loads: Iterable[Load]) -> None:
    """Bring the files in their order; the reads of one begin before those of the one before it have ended."""
    under_way: deque[Load] = deque()

    def finish() -> None:
        receipts.append(under_way[0].finish())
        model.update(under_way.popleft().made)

    try:
        for one in loads:
            under_way.append(one)
            one.begin()
            if len(under_way) > AHEAD:
                finish()
        while under_way:
            finish()
    except BaseException as error:
        undefined = [name for one in under_way for name in one.undefined]
        for one in under_way:
            one.abandon()
        if undefined:
            few = ", ".join(printable(clip(name)) for name in undefined[:5])
            rest = f" and {len(undefined) - 5} more" if len(undefined) > 5 else ""
            error.add_note(f"undefined now: {few}{rest}")
            if isinstance(error, NobounceError):
                error.__dict__["undefined"] = tuple(undefined)
        raise
