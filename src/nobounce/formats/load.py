"""Load a model file into device memory: headers are checked first, then a few large requests bring everything.

Every header of every file is read and checked before the first transfer, so a bad file moves nothing; a GPU's memory for the
first file may be taken meanwhile, and is given back then. Memory: the tensors' own bytes, less than a page per file beside them
(128 KiB for that first one), and one scratch of 16 MiB when tensors must be moved for their alignment.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from nobounce.device import DeviceLike, as_device
from nobounce.errors import ArgumentError, FileChangedError, printable
from nobounce.facts.pagecache import counted, estimate, residency
from nobounce.formats.columns import PART
from nobounce.formats.fresh import get_ready, read_fresh
from nobounce.formats.index import ModelFiles, resolve, verify_index
from nobounce.formats.nocollect import no_collection
from nobounce.formats.placement import Placement, check_align, place
from nobounce.formats.populate import MIN_NBYTES, Populate, populate_ahead
from nobounce.formats.reader import Descriptor, read_model
from nobounce.formats.sets import verify_split
from nobounce.formats.settle import check_copies, move, strided, swap
from nobounce.formats.slab import SlabAhead
from nobounce.formats.tensorinfo import Encoding, Header
from nobounce.io.file import File
from nobounce.io.file import open as open_file
from nobounce.io.prepare import look
from nobounce.io.receipt import Receipt, total
from nobounce.records import replace
from nobounce.route.types import Cache, Require
from nobounce.tensor import Tensor, import_framework, looks_on

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nobounce.buffer import Buffer
    from nobounce.device import Device
    from nobounce.formats.columns import Rows

Framework = Literal["numpy", "torch"]
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Progress = Callable[[str, int], None]
T = TypeVar("T")

KEEP_OPEN = 16
PIECE = 128 << 10
HEAD = 1 << 20
"""What is asked of the page cache first; the header of most models ends before it."""
RWF_DONTCACHE = 0x80


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


def _nothing(*_: object) -> None:
    return None


class Opened:
    """A checked file of the model; descriptors are bounded, so it may be closed and opened again."""

    def __init__(
        self,
        path: str,
        meanwhile: Callable[[int], None] = _nothing,
        announce: Callable[[int, int], None] = _nothing,
    ) -> None:
        self.path, self._meanwhile, self._announce = path, meanwhile, announce
        self.file = open_file(path)
        try:
            self._identity = self._look()
            self.header = self._read_header()
            self._check()
        except BaseException:
            self.file.close()
            raise

    def _look(self) -> tuple[int, int, int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read_header(self) -> Header:
        fd, nbytes = self.file.fileno(), self._identity[2]
        # A look at all of a cached file takes milliseconds, and is not worth it where its head is there.
        head = min(nbytes, HEAD)
        resident = counted(fd, 0, head).resident_bytes
        if resident is None or (resident != head and head < nbytes):
            resident = residency(fd, 0, nbytes).resident_bytes
        cold = resident == 0
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            source = Descriptor(
                fd, 0 if cold or resident == nbytes else RWF_DONTCACHE, hints=resident != nbytes
            )
            return read_model(
                source, path=self.path, file_nbytes=nbytes, announce=functools.partial(self._fetch, cold)
            )
        finally:
            if cold:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _fetch(self, cold: bool, data_offset: int) -> None:
        """Have the disk bring all of a long header at once, as with POSIX_FADV_RANDOM a read waits for it piece by piece; then tell
        where the data section begins."""
        if data_offset > PIECE:
            os.posix_fadvise(self.file.fileno(), 0, data_offset, os.POSIX_FADV_WILLNEED)
            nbytes = self._identity[2] - data_offset
            if cold and nbytes >= MIN_NBYTES:
                self._meanwhile(nbytes)
        self._announce(data_offset, self._identity[2])

    def _check(self) -> None:
        now = self._look()
        if now != self._identity:
            what = (
                f"its size went from {self._identity[2]} to {now[2]} bytes"
                if now[2] != self._identity[2]
                else "it was written to"
            )
            raise FileChangedError(
                f"{printable(self.path)}: the file changed while it was being loaded: {what}",
                errno.ESTALE,
                self.path,
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[File]:
        """The file, open; checks before and after that it is still the one whose header was read."""
        if self.file.closed:
            self.file = open_file(self.path)
        try:
            self._check()
            yield self.file
            self._check()
        finally:
            self.file.close()


def open_model(
    paths: Paths,
    meanwhile: Callable[[int], None] = _nothing,
    announce: Callable[[int, int], None] = _nothing,
) -> tuple[ModelFiles, list[Opened]]:
    """Resolve `paths` and read and check every header. At most `KEEP_OPEN` files stay open. `meanwhile` is called while a disk
    brings a long header, if there is much behind it; `announce` before the first file's header is read, with the offset of its
    data section and its size in bytes.

    Raises FileError, FormatError and ArgumentError; on an error nothing stays open.
    """
    files = resolve(paths)
    opened: list[Opened] = []
    try:
        for shard in files.shards:
            one = Opened(shard.path, meanwhile, _nothing if opened else announce)
            opened.append(one)
            if len(files.shards) > KEEP_OPEN:
                one.file.close()
        verify_index(files.index, {s.name: o.header for s, o in zip(files.shards, opened, strict=True)})
        warnings = verify_split([o.header for o in opened])
    except BaseException:
        close_model(opened)
        raise
    return replace(files, warnings=(*files.warnings, *warnings)), opened


def close_model(opened: list[Opened]) -> None:
    """Close the files of `open_model`."""
    for one in opened:
        one.file.close()


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
    time to make. `require="fastpath"`
    raises RouteError unless every byte of the data section can go direct. `align` asks that each tensor begin at a
    multiple of so many bytes. `progress(backend, nbytes)` is called from I/O threads as bytes arrive.

    Raises FormatError for a file that is not what it claims (before anything moves), FileError, FileChangedError,
    RouteError, TransferError, OutOfMemoryError, UnavailableError. A failed load leaves nothing behind.
    """
    if framework not in (None, "numpy", "torch"):
        raise ArgumentError(f"framework={framework!r} is not numpy or torch")
    if shared_storage and framework != "torch":
        raise ArgumentError('shared_storage=True is for framework="torch": others have no storages')
    want = check_align(align)
    target = as_device(device)
    model: Model[Any] = Model()
    receipts: list[Receipt] = []
    opened: list[Opened] = []
    slabs = SlabAhead(target)
    try:
        files, opened = open_model(
            paths, lambda nbytes: get_ready(target._runtime, nbytes, require, cache), slabs.begin
        )
        model.device, model.metadata, model.encodings = target, {}, {}
        if framework is None:
            for one in opened:
                check_copies(one.header)
        model.warnings = (*files.warnings, *(w for o in opened for w in o.header.warnings))
        import_framework(framework)
        for one in opened:
            receipts.append(
                _load_one(
                    model, one, slabs, target, framework, shared_storage, require, cache, want, progress
                )
            )
            model.metadata = {**one.header.metadata, **model.metadata}
            coded = {n: d.encoding for n, d in one.header.details.items() if d.encoding is not None}
            model.encodings.update(coded)
    except BaseException:
        model.clear()  # the error's traceback would keep it, and the memory with it
        raise
    finally:
        try:
            close_model(opened)
        finally:
            slabs.close()
    model.receipts = tuple(receipts)
    model.receipt = total(receipts)
    return model


def grain_of(file: File) -> int:
    """Alignment in bytes that direct requests to this file keep; at least a page (case C69: never assume 4096)."""
    facts = file.facts()
    return max(4096, facts.dio_offset_align or 0, facts.dio_mem_align or 0)


def _load_one(
    model: Model[Any],
    one: Opened,
    slabs: SlabAhead,
    device: Device,
    framework: Framework | None,
    shared_storage: bool,
    require: Require,
    cache: Cache,
    align: int,
    progress: Progress | None,
) -> Receipt:
    slab: Buffer | None = None
    ahead: Populate | None = None
    made: dict[str, Any] = {}
    try:
        with one.reading() as file:
            spot = place(one.header, align=align, grain=grain_of(file))
            where = spot.nbytes, spot.file_offset, 0
            held = look(file, device, where, require, cache)
            slab = slabs.take(spot.slab_nbytes)
            build = functools.partial(_hand_out, made, one.header, spot, slab, framework, shared_storage)
            # What only looks at the memory can be made while it is being filled.
            copied = framework is None and any(d.strides is not None for d in one.header.details.values())
            early = not (spot.moves or spot.swaps or copied) and looks_on(slab, framework)
            if slab.is_host_accessible and _is_cold(file, spot, require, cache):
                ahead = populate_ahead(slab)
            meanwhile = build if early else _nothing
            receipt = read_fresh(
                file,
                slab,
                where,
                require,
                cache,
                meanwhile=meanwhile,
                beside=ahead,
                progress=progress,
                held=held,
            )
            if receipt.nbytes < spot.needed:
                at = spot.file_offset + receipt.nbytes
                raise FileChangedError(
                    f"{printable(one.path)}: the file ended at offset {at} of {one.header.file_nbytes} while it was read",
                    errno.ESTALE,
                    one.path,
                )
        if spot.moves:
            move(slab, spot, device)
        if spot.swaps:
            swap(slab, spot.swaps)
        if not early:
            build()
        model.update(made)
    except BaseException:
        made.clear()
        raise
    finally:
        if ahead is not None:
            ahead.stop()
        if slab is not None:
            slab.close()
    # The request was rounded up past the end of the file.
    return replace(receipt, requested=spot.needed)


def _is_cold(file: File, spot: Placement, require: Require, cache: Cache) -> bool:
    """Whether the read will mostly wait for the disk, so that there is time to make the memory ready beside it."""
    if cache == "avoid" or require == "fastpath":
        return True
    return estimate(file.fileno(), spot.file_offset, spot.nbytes) < 0.5


def _hand_out(
    made: dict[str, Any],
    header: Header,
    spot: Placement,
    buffer: Buffer,
    framework: Framework | None,
    shared_storage: bool,
) -> None:
    """Make what the user gets, in the order of the file; other threads are let through now and then."""
    make = Tensor.maker(buffer, framework, shared_storage=shared_storage)
    details = header.details
    breathe = buffer.device._runtime.scheduler.sleep
    places, lead = iter(spot.offsets or ()), spot.lead
    with no_collection():
        for rows in _parts(header):
            for name, dtype, shape, start, end in rows:
                offset = lead + start if spot.offsets is None else next(places)
                if details and (detail := details.get(name)) is not None and detail.strides is not None:
                    made[name] = strided(buffer, offset, dtype, shape, detail.strides, framework)
                else:
                    made[name] = make(offset, shape, dtype, end - start)
            breathe(0)


def _parts(header: Header) -> Iterator[Rows]:
    if header.columns is not None:
        yield from header.columns.parts()
        return
    infos = iter(header.tensors.values())
    while rows := [(i.name, i.dtype, i.shape, i.start, i.end) for i in itertools.islice(infos, PART)]:
        yield rows
