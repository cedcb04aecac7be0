"""Some of a file's tensors, or boxes of them, on their way into memory of their own or the caller's.

What is wanted goes into one slab, in runs that keep the places which direct I/O needs. A large tensor whose
destination is the caller's and contiguous is read straight into it; the others are copied there. A box that
is many runs is cut on the host.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nobounce.errors import ArgumentError, InternalError, clip, printable
from nobounce.facts.pagecache import estimate
from nobounce.formats import boxes
from nobounce.formats.columns import PART
from nobounce.formats.fresh import FreshRead, Part
from nobounce.formats.into import Target, Targets, destinations, match, put, written
from nobounce.formats.loading import GROUP_NBYTES, How, Loading, Memory, check_whole
from nobounce.formats.model import Wish, memory_on
from nobounce.formats.nocollect import no_collection
from nobounce.formats.opened import grain_of
from nobounce.formats.populate import Populate, populate_ahead
from nobounce.formats.selection import Wanted, chosen, runs, wanted
from nobounce.formats.slab import SlabAhead
from nobounce.io.receipt import Receipt, total
from nobounce.records import replace
from nobounce.tensor import Tensor, looks_on

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device
    from nobounce.formats.model import Load
    from nobounce.formats.opened import Opened
    from nobounce.formats.tensorinfo import Header
    from nobounce.io.file import File

STRAIGHT_NBYTES = 64 << 10
"""Bytes of a tensor that are worth a request of its own; copies of smaller ones cost less."""
PLACE = 256
"""Alignment in bytes of a tensor that the file holds at an odd place."""


class _Share:
    """What lies in one slab: tensors in the order of the file, the runs that bring them, and where each
    arrives. `odd` says where those are moved to that the file holds at an odd place."""

    __slots__ = ("begins", "odd", "places", "room", "runs", "slab", "wants")

    def __init__(self, wants: list[Wanted], data_offset: int, grain: int, align: int) -> None:
        self.wants = wants
        self.runs = runs([(data_offset + w.start, data_offset + w.end) for w in wants], grain)
        self.begins = [r.start for r in self.runs]
        self.room = self.runs[-1].offset + self.runs[-1].end - self.runs[-1].start if self.runs else 0
        self.places: dict[str, int] = {}
        self.odd: dict[str, int] = {}
        self.slab: Buffer | None = None
        for want in wants:
            if not want.nbytes:
                continue
            at = data_offset + want.start
            run = self.runs[bisect_right(self.begins, at) - 1]
            offset = self.places[want.name] = run.offset + at - run.start
            if offset % max(align, want.dtype.alignment):
                self.room += -self.room % PLACE
                self.odd[want.name] = self.room
                self.room += want.nbytes

    @property
    def buffer(self) -> Buffer:
        """The slab, once it was taken."""
        if self.slab is None:
            raise InternalError("no memory was taken")
        return self.slab

    def place(self, want: Wanted) -> int:
        """Where a tensor is in the end."""
        return self.odd.get(want.name) or self.places.get(want.name, 0)


class PartLoading:
    """Some tensors of one file, from `begin` until `finish` or `abandon`; as `Loading`."""

    def __init__(
        self,
        one: Opened,
        wants: Sequence[Wanted],
        targets: Mapping[str, Target],
        memory: Memory,
        device: Device,
        how: How,
    ) -> None:
        self._one, self._wants, self._targets = one, wants, targets
        self._memory, self._device, self._how = memory, device, how
        self._shares: list[_Share] = []
        self._reads: list[FreshRead] = []
        self._cut: dict[str, Buffer] = {}
        self._receipts: list[Receipt] = []
        self.made: dict[str, Any] = {}
        self._touched: list[str] = []
        self._ahead: Populate | None = None

    @property
    def undefined(self) -> list[str]:
        """The caller's tensors that may have been written to in part."""
        return list(self._touched)

    def begin(self) -> None:
        """Take the memory and hand the reads to the pool. Raises as `load`; `abandon` then cleans up."""
        how, header = self._how, self._one.header
        file = self._one.start()
        grain, data = grain_of(file), header.data_offset
        limit = GROUP_NBYTES if how.grouped else header.data_nbytes
        with no_collection():
            straight, rest, self._boxed = self._sorted()
            self._shares = [_Share(wants, data, grain, how.align) for wants in _groups(rest, limit)]
        for share in self._shares:
            share.slab = self._memory.take(share.room)
        self._memory.settle()
        options: dict[str, Any] = {"progress": how.progress}
        for share in self._shares:
            if share.runs:
                parts = [Part(share.buffer, r.start, r.offset, r.end - r.start) for r in share.runs]
                beside = self._populate(file, share, parts)
                self._reads.append(FreshRead(file, parts, how.require, how.cache, beside=beside, **options))
        if straight:
            parts = [Part(self._targets[w.name].buffer, data + w.start, 0, w.nbytes) for w in straight]
            self._reads.append(FreshRead(file, parts, how.require, how.cache, relax=True, **options))
        if straight and self._reads:
            self._touched = [w.name for w in straight]
        for read in self._reads:
            read.begin()
        for want in self._boxed:
            target = self._targets.get(want.name)
            if target is not None and target.address is not None:
                self._touched.append(want.name)
                place = target.buffer
            else:
                place = self._cut[want.name] = self._memory.take(want.nbytes)
                self._memory.settle()
            self._receipts.append(boxes.read(file, data, want, self._device, place, how))

    def finish(self) -> Receipt:
        """Wait for the bytes and make the tensors, `made`. Everything else is given
        back, also where this raises."""
        try:
            receipts = self._receipts
            # What only looks at the memory can be made while it is being filled.
            moved = bool(self._targets or self._boxed) or any(s.odd for s in self._shares)
            early = bool(self._reads) and not moved
            early = early and looks_on(self._shares[0].buffer, self._how.framework)
            for number, read in enumerate(self._reads):
                receipts.append(read.finish(self._make if early and not number else _nothing))
                check_whole(self._one, read, receipts[-1])
            self._one.end()
            with no_collection():
                self._deliver()
            if not early:
                self._make()
        except BaseException:
            self.abandon()
            raise
        self._give_back()
        needed = sum(w.nbytes for w in self._wants)
        if not receipts:
            return boxes.empty(self._one.path, self._device)
        receipt = total(receipts)
        over = receipt.nbytes - needed
        note = (
            (f"{over} bytes beside those asked for were read, as that is cheaper than to leave them out",)
            if over > 0
            else ()
        )
        return replace(receipt, requested=needed, notes=(*receipt.notes, *note))

    def abandon(self) -> None:
        """Stop what is under way and give everything back."""
        self.made.clear()
        try:
            for read in self._reads:
                read.abandon()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        try:
            if self._ahead is not None:
                self._ahead.stop()
        finally:
            for buffer in (*(s.slab for s in self._shares), *self._cut.values()):
                if buffer is not None:
                    buffer.close()
            self._one.file.close()

    def _populate(self, file: File, share: _Share, parts: Sequence[Part]) -> Populate | None:
        """Work that makes the first slab ready while the disk is waited for, where it is."""
        how, slab = self._how, share.buffer
        if self._ahead is not None or not slab.is_host_accessible:
            return None
        last = parts[-1].file_offset + parts[-1].nbytes
        cold = how.cache == "avoid" or how.require == "fastpath"
        if cold or estimate(file.fileno(), parts[0].file_offset, last - parts[0].file_offset) < 0.5:
            self._ahead = populate_ahead(slab)
        return self._ahead

    def _sorted(self) -> tuple[list[Wanted], list[Wanted], list[Wanted]]:
        """What is read straight into its destination, what goes through the slab, and what is cut on the
        host; each in the file's order."""
        straight: list[Wanted] = []
        rest: list[Wanted] = []
        cut: list[Wanted] = []
        for want in sorted(self._wants, key=attrgetter("start", "end")):
            target = self._targets.get(want.name)
            if want.box is not None:
                cut.append(want)
            elif (
                target is not None
                and target.address is not None
                and want.nbytes >= STRAIGHT_NBYTES
                and self._how.require != "fastpath"
                and (not straight or straight[-1].end <= want.start)
            ):
                straight.append(want)
            else:
                rest.append(want)
        return straight, rest, cut

    def _deliver(self) -> None:
        """Copy what is not where it belongs."""
        self._touched = [w.name for w in self._wants if w.name in self._targets]
        copies: list[tuple[int, int, int]] = []
        strided = [
            (w, self._cut[w.name], 0) for w in self._boxed if w.name in self._targets and w.name in self._cut
        ]
        for share in self._shares:
            base = share.buffer.handle
            for want in share.wants:
                target, source = self._targets.get(want.name), base + share.places.get(want.name, 0)
                if want.name in share.odd:
                    copies.append((base + share.odd[want.name], source, want.nbytes))
                if target is not None and target.address is None:
                    strided.append((want, share.buffer, share.place(want)))
                elif target is not None and want.nbytes:
                    copies.append((target.address or 0, source, want.nbytes))
        if copies:
            _copy(self._device, copies)
        for want, buffer, place in strided:
            put(self._targets[want.name], Tensor.maker(buffer)(place, want.shape, want.dtype, want.nbytes))
        written(self._targets[w.name] for w in self._wants if w.name in self._targets)
        self._touched = []

    def _make(self) -> None:
        """Make the tensors, `made`, in the order of the file."""
        how, made = self._how, self.made
        if self._targets:
            made.update((w.name, self._targets[w.name].obj) for w in self._wants)
            return
        made.update(dict.fromkeys(w.name for w in self._wants))
        breathe = self._device._runtime.scheduler.sleep
        with no_collection():
            for share in self._shares:
                make = Tensor.maker(share.buffer, how.framework, shared_storage=how.shared_storage)
                odd, places = share.odd, share.places
                for number, want in enumerate(share.wants, 1):
                    if not number % PART:
                        breathe(0)
                    place = odd.get(want.name) or places.get(want.name, 0)
                    made[want.name] = make(place, want.shape, want.dtype, want.nbytes)
            for want in self._boxed:
                make = Tensor.maker(self._cut[want.name], how.framework, shared_storage=how.shared_storage)
                made[want.name] = make(0, want.shape, want.dtype, want.nbytes)


def _groups(wants: list[Wanted], limit: int) -> Iterator[list[Wanted]]:
    """The tensors, in the order of the file, in groups of at most `limit` bytes, larger ones alone."""
    group: list[Wanted] = []
    nbytes = 0
    for want in wants:
        if group and nbytes + want.nbytes > limit:
            yield group
            group, nbytes = [], 0
        group.append(want)
        nbytes += want.nbytes
    if group:
        yield group


def _copy(device: Device, copies: list[tuple[int, int, int]]) -> None:
    """Copy (to, from, nbytes) on the device."""
    if device._runtime.name == "cpu":  # 0.3 us each, where the runtime's checks take 8
        for to, of, nbytes in copies:
            ctypes.memmove(to, of, nbytes)
        return
    with device.create_stream() as stream:
        device._runtime.copy_batch(copies, stream.handle)
        stream.sync()


class _Picked:
    """Some tensors of a file that has to be loaded as a whole."""

    undefined: list[str] = []  # noqa: RUF012 - never written to

    def __init__(self, whole: Loading, names: set[str]) -> None:
        self._whole, self._names = whole, names
        self.made: dict[str, Any] = {}
        self.begin, self.abandon = whole.begin, whole.abandon

    def finish(self) -> Receipt:
        """As `Loading.finish`."""
        receipt = self._whole.finish()
        self.made = {name: tensor for name, tensor in self._whole.made.items() if name in self._names}
        self._whole.made.clear()
        return receipt


def part_loads(
    opened: Sequence[Opened], device: Device | None, how: How, wish: Wish
) -> list[tuple[Device, list[Load]]]:
    """By device, what to load of each file. Raises ArgumentError for what the files do not
    have, or have otherwise."""
    known = [name for one in opened for name in one.header.tensors]
    names = chosen(known, wish.names)
    slices = wish.slices or {}
    chosen(names if names is not None else known, list(slices))
    targets: dict[str, Target] = {}
    wants = [wanted(one.header, names, slices) for one in opened]
    if wish.into is not None:
        into = match(destinations(wish.into), known if names is None else names, strict=wish.strict)
        wants = [[w for w in those if w.name in into] for those in wants]
        checked = Targets()
        targets = {w.name: checked.of(into[w.name], w) for those in wants for w in those}
    places: dict[Device, list[Load]] = {}
    for one, those in zip(opened, wants, strict=True):
        by_device: dict[Device, list[Wanted]] = {}
        for want in those:
            where = targets[want.name].device if targets else device
            if where is None or (device is not None and where != device):
                raise ArgumentError(
                    f"into[{printable(clip(want.name))!r}] is on {where}, device= says {device}"
                )
            by_device.setdefault(where, []).append(want)
        for where, group in by_device.items():
            memory = memory_on(where, how, torch=bool(targets))
            load: Load
            if odd := [w.name for w in group if _is_odd(one.header, w)]:
                if targets or slices:
                    few = ", ".join(printable(clip(name)) for name in odd[:5])
                    raise ArgumentError(
                        f"{printable(one.path)}: big-endian or strided tensors come with the whole file "
                        f"alone: {few}"
                    )
                load = _Picked(Loading(one, memory, where, how), {w.name for w in group})
            else:
                grouped = how._replace(grouped=not isinstance(memory, SlabAhead))
                load = PartLoading(one, group, targets, memory, where, grouped)
            places.setdefault(where, []).append(load)
    return list(places.items())


def _is_odd(header: Header, want: Wanted) -> bool:
    """Whether a tensor's bytes in the file are not those of the tensor in memory, one after the other."""
    detail = header.details.get(want.name)
    if detail is not None and detail.strides is not None:
        return True
    return any(b.swap > 1 and b.start < want.end and want.start < b.end for b in header.blocks or ())


def _nothing(*_: object) -> None:
    return None
