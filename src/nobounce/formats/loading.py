"""One file of a model on its way into memory: begun, perhaps while the file before it
still arrives, and finished.

A file's tensors share one slab, or lie in groups of at most `GROUP_NBYTES` where the memory is torch's: one
kept tensor then keeps a group. One read brings them all the same.
"""

from __future__ import annotations

import errno
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from nobounce.errors import FileChangedError, printable
from nobounce.facts.pagecache import estimate
from nobounce.formats.columns import PART
from nobounce.formats.fresh import FreshRead, Part
from nobounce.formats.nocollect import no_collection
from nobounce.formats.opened import grain_of
from nobounce.formats.placement import Placement, place
from nobounce.formats.populate import Populate, populate_ahead
from nobounce.formats.settle import move, strided, swap
from nobounce.io.prepare import look
from nobounce.io.receipt import Receipt, total
from nobounce.records import replace
from nobounce.tensor import Tensor, looks_on

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device
    from nobounce.formats.columns import Rows
    from nobounce.formats.opened import Opened
    from nobounce.formats.tensorinfo import Header
    from nobounce.io.file import File
    from nobounce.route.types import Cache, Require

Framework = Literal["numpy", "torch"]
Progress = Callable[[str, int], None]

GROUP_NBYTES = 256 << 20
"""Bytes that share an allocation of torch's; a tensor of more has its own."""


class Memory(Protocol):
    """Where slabs come from."""

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least so many bytes that nobody else has seen."""

    def settle(self) -> None:
        """Wait until what was taken may be written to."""


class How(NamedTuple):
    """What `load` was asked for. `grouped`: the tensors of a file lie in groups; `pinned`: in
    page-locked host memory."""

    framework: Framework | None
    shared_storage: bool
    require: Require
    cache: Cache
    align: int
    progress: Progress | None
    grouped: bool = False
    pinned: bool = False


class Group(NamedTuple):
    """Tensors in one slab: bytes [start, end) of the data section, `lead` bytes after the slab's beginning,
    which holds the file from `file_offset` on, `nbytes` in all."""

    start: int
    end: int
    lead: int
    file_offset: int
    nbytes: int


def groups(header: Header, spot: Placement, grain: int, limit: int) -> list[Group]:
    """The groups of a file, at most `limit` bytes of tensors in each but where one tensor has more. One group
    where its layout is not the file's own."""
    whole = Group(0, header.data_nbytes, spot.lead, spot.file_offset, spot.slab_nbytes)
    if header.data_nbytes <= limit or spot.moves or spot.swaps or header.blocks is not None:
        return [whole]
    columns = header.columns
    starts = columns.starts.tolist() if columns is not None else [i.start for i in header.tensors.values()]
    ends = columns.ends.tolist() if columns is not None else [i.end for i in header.tensors.values()]
    if any(a > b for a, b in itertools.pairwise(ends)):
        return [whole]
    found: list[Group] = []
    first = 0
    while first < len(ends):
        start = starts[first]
        last = max(bisect_right(ends, start + limit), first + 1)
        end = ends[last - 1]
        at = header.data_offset + start
        begin, stop = at // grain * grain, -(-(header.data_offset + end) // grain) * grain
        found.append(Group(start, end, at - begin, begin, stop - begin))
        first = last
    return found


class Loading:
    """One file, from `begin` until `finish` or `abandon`."""

    def __init__(self, one: Opened, memory: Memory, device: Device, how: How) -> None:
        self._one, self._memory, self._device, self._how = one, memory, device, how
        self._slabs: list[Buffer] = []
        self._reads: list[FreshRead] = []
        self._ahead: Populate | None = None
        self.made: dict[str, Any] = {}

    undefined: list[str] = []  # noqa: RUF012 - never written to
    """Tensors of the caller's that were written to in part: none, as all memory is new."""

    def begin(self) -> None:
        """Take the memory and hand the reads to the pool. Raises as `load`; `abandon` then cleans up."""
        one, how, header = self._one, self._how, self._one.header
        file = one.start()
        grain = grain_of(file)
        self._spot = spot = place(header, align=how.align, grain=grain)
        where = spot.nbytes, spot.file_offset, 0
        held = look(file, self._device, where, how.require, how.cache)
        self._groups = groups(header, spot, grain, GROUP_NBYTES if how.grouped else header.data_nbytes)
        for group in self._groups:
            self._slabs.append(self._memory.take(group.nbytes))
        self._memory.settle()
        slab = self._slabs[0]
        if slab.is_host_accessible and self._is_cold(file):
            self._ahead = populate_ahead(slab)
        options: dict[str, Any] = {"progress": how.progress, "held": held}
        read = FreshRead(file, self._parts(), how.require, how.cache, beside=self._ahead, **options)
        self._reads = [read]
        if read.is_split:
            self._reads = [
                FreshRead(file, [Part(s, g.file_offset, 0, g.nbytes)], how.require, how.cache, **options)
                for s, g in zip(self._slabs, self._groups, strict=True)
            ]
        for read in self._reads:
            read.begin()

    def finish(self) -> Receipt:
        """Wait for the bytes and make the tensors, `made`. Everything else is given
        back, also where this raises."""
        one, spot, header = self._one, self._spot, self._one.header
        try:
            # What only looks at the memory can be made while it is being filled.
            copied = self._how.framework is None and any(
                d.strides is not None for d in header.details.values()
            )
            early = not (spot.moves or spot.swaps or copied) and looks_on(self._slabs[0], self._how.framework)
            receipts: list[Receipt] = []
            for number, read in enumerate(self._reads):
                receipts.append(read.finish(self._hand_out if early and not number else _nothing))
                check_whole(self._one, read, receipts[-1])
            one.end()
            if spot.moves:
                move(self._slabs[0], spot, self._device)
            if spot.swaps:
                swap(self._slabs[0], spot.swaps)
            if not early:
                self._hand_out()
        except BaseException:
            self.abandon()
            raise
        self._give_back()
        receipt = receipts[0] if len(receipts) == 1 else total(receipts)
        # The request was rounded up past the end of the file.
        return replace(receipt, requested=spot.needed if len(receipts) == 1 else receipt.nbytes)

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
            for slab in self._slabs:
                slab.close()
            self._one.file.close()

    def _parts(self) -> list[Part]:
        """What the one read of all groups brings, each byte of the file once."""
        spot, offset = self._spot, self._one.header.data_offset
        if len(self._groups) == 1:
            return [Part(self._slabs[0], spot.file_offset, 0, spot.nbytes)]
        firsts = [spot.file_offset, *(offset + g.start for g in self._groups[1:])]
        lasts = [*firsts[1:], spot.file_offset + spot.nbytes]
        return [
            Part(slab, first, first - group.file_offset, last - first)
            for slab, group, first, last in zip(self._slabs, self._groups, firsts, lasts, strict=True)
        ]

    def _is_cold(self, file: File) -> bool:
        """Whether the read will mostly wait for the disk, so that there is time to make
        the memory ready beside it."""
        how, spot = self._how, self._spot
        if how.cache == "avoid" or how.require == "fastpath":
            return True
        return estimate(file.fileno(), spot.file_offset, spot.nbytes) < 0.5

    def _hand_out(self) -> None:
        """Make what the user gets, in the order of the file; other threads are let through now and then."""
        how, spot, header = self._how, self._spot, self._one.header
        makers = [Tensor.maker(s, how.framework, shared_storage=how.shared_storage) for s in self._slabs]
        details, made = header.details, self.made
        breathe = self._device._runtime.scheduler.sleep
        places = iter(spot.offsets or ())
        number, make, group = 0, makers[0], self._groups[0]
        moved = spot.offsets is not None and len(makers) == 1
        lead, limit = group.lead - group.start, group.end
        with no_collection():
            for rows in _rows(header):
                if made:
                    breathe(0)
                for name, dtype, shape, start, end in rows:
                    if end > limit and len(makers) > 1:
                        number = next(n for n in range(number, len(makers)) if end <= self._groups[n].end)
                        make, group = makers[number], self._groups[number]
                        lead, limit = group.lead - group.start, group.end
                    offset = next(places) if moved else lead + start
                    if details and (detail := details.get(name)) is not None and detail.strides is not None:
                        slab = self._slabs[number]
                        shared = how.shared_storage
                        made[name] = strided(
                            slab, offset, dtype, shape, detail.strides, how.framework, shared
                        )
                    else:
                        made[name] = make(offset, shape, dtype, end - start)


def check_whole(one: Opened, read: FreshRead, receipt: Receipt) -> None:
    """FileChangedError where the file had less than its header says."""
    if receipt.nbytes < read.within(one.header.file_nbytes):
        at = (
            receipt.segments[-1].file_offset + receipt.segments[-1].nbytes
            if receipt.segments
            else read.file_offset
        )
        raise FileChangedError(
            f"{printable(one.path)}: the file ended at offset {at} of {one.header.file_nbytes} while it was "
            "read",
            errno.ESTALE,
            one.path,
        )


def _nothing(*_: object) -> None:
    return None


def _rows(header: Header) -> Iterator[Rows]:
    if header.columns is not None:
        yield from header.columns.parts()
        return
    infos = iter(header.tensors.values())
    while rows := [(i.name, i.dtype, i.shape, i.start, i.end) for i in itertools.islice(infos, PART)]:
        yield rows
