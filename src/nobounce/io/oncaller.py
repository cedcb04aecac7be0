"""Requests that their caller's thread carries out by a kept plan: small ones, and page-cached reads that it
spreads over the kernel's threads.

What is out of the ordinary (a short read, an error, an unaligned edge) is left to the whole way, which begins
anew and reports in full.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nobounce.clock import THREADS
from nobounce.errors import DeviceError, NobounceError, OutOfMemoryError, TransferError
from nobounce.facts.filtered import REFUSED
from nobounce.io import hooks
from nobounce.io.engine import machine_for
from nobounce.io.kept import Plan, Way, is_held, seems_held, suits
from nobounce.io.receipt import Evidence, Receipt, Segment
from nobounce.io.strategy import MOST_POLLERS, SPREAD_LEAST_NBYTES, spreading
from nobounce.io.target import Target
from nobounce.route.types import Refusal
from nobounce.runtimes.rawio import try_read, write_plain

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.io.movers.bounce import Ring
    from nobounce.io.movers.pollers import KernelBlocks
    from nobounce.runtimes.base import CopyCalls

T = TypeVar("T")
HAS_FLAGS = hasattr(os, "RWF_NOWAIT")


class Ended(NamedTuple):
    """A read that has ended well, as those who count transfers look at it: like a `Job`."""

    target: Target
    receipt: Receipt
    requested: int
    refusals: tuple[Refusal, ...]
    stream: int | None = None
    error: BaseException | None = None
    direct_nbytes: int = 0
    operation: hooks.Operation | None = None


def read_now(view: Buffer, plan: Plan, where: tuple[int, int, int]) -> Receipt | None:
    """Read on the calling thread, with nobody watching; None where no way moves every byte, so
    that the whole way has to."""
    t = plan.target
    nbytes, _, buffer_offset = where
    address = view._address + buffer_offset
    began = monotonic()
    try:
        way = straight(plan, address, where) if t.ring is None else _relayed(plan, t.ring, address, where)
    except (OSError, NobounceError):
        return None
    if way is None:
        return None
    receipt = _receipt(t, way, where, began)
    if nbytes >= SPREAD_LEAST_NBYTES and t.ring is not None:
        from nobounce.io.movers import pollers

        pollers.ended(began, receipt.ended_at)
    _tell(plan, receipt, way)
    return receipt


def write_now(view: Buffer, plan: Plan, where: tuple[int, int, int], *, fsync: bool) -> Receipt | None:
    """Write on the calling thread, with nobody watching; None where not every byte was written, so that the
    whole way has to, from the beginning. Raises TransferError where the data cannot be put on the disk: asked
    once more, the kernel would not say so again."""
    t, way = plan.target, plan.ways[0]
    nbytes, file_offset, buffer_offset = where
    address = view._address + buffer_offset
    began = monotonic()
    if (file_offset | nbytes) % way.grain or (t.ring is None and address % way.memory_grain):
        return None
    try:
        if t.ring is None:
            written = write_plain(way.fd, address, nbytes, file_offset)
        else:
            written = _write_relayed(plan, t.ring, address, where)
    except (OSError, NobounceError):
        return None
    if written != nbytes:
        return None
    error: TransferError | None = None
    if fsync:
        try:
            os.fdatasync(t.buffered_fd)
        except OSError as e:
            error = t.error(e.errno or errno.EIO, file_offset, nbytes, "fallback", call="fdatasync")
            error.__cause__ = e
    receipt = _receipt(t, way, where, began, synced=fsync and error is None)
    if error is not None:
        error.receipt = receipt
    _tell(plan, receipt, way, error)
    if error is not None:
        raise error
    return receipt


def _write_relayed(plan: Plan, ring: Ring, address: int, where: tuple[int, int, int]) -> int:
    """From memory of a device; returns the bytes written. Raises OSError and NobounceError."""
    t, way = plan.target, plan.ways[0]
    nbytes, file_offset, _ = where

    def write(stream: int, slot: tuple[int, int]) -> int:
        with t.runtime.copy_calls(t.device) as calls:
            copy(t, calls, slot[0], address, nbytes, stream)
            return write_plain(way.fd, slot[0], nbytes, file_offset)

    return _lent(ring, write)


def _receipt(
    t: Target, way: Way, where: tuple[int, int, int], began: float, *, synced: bool = False
) -> Receipt:
    nbytes, file_offset, buffer_offset = where
    segment = Segment(way.backend, file_offset, buffer_offset, nbytes, way.reason, t.ring is not None)
    evidence: Evidence = "reported" if way.backend == "fastpath" else "none"
    known = t.op, t.filename, t.device_name, nbytes, nbytes, (segment,), (), evidence
    return Receipt(*known, began, began, monotonic(), synced)


def _tell(plan: Plan, receipt: Receipt, way: Way, error: TransferError | None = None) -> None:
    if hooks.observers:
        direct = way.backend == "fastpath"
        refusals, nbytes = () if direct else plan.refusals, receipt.nbytes
        told = Ended(plan.target, receipt, nbytes, refusals, None, error, nbytes if direct else 0)
        hooks.ended(told)  # type: ignore[arg-type]


def straight(plan: Plan, address: int, where: tuple[int, int, int]) -> Way | None:
    """Into memory of the host; the way by which every byte came."""
    nbytes, file_offset, _ = where
    for way in plan.ways:
        if way.if_held and not is_held(way.fd, file_offset, nbytes):
            continue
        if way.grain > 1 and not suits(way, address, nbytes, file_offset):
            return None
        if try_read(way.fd, address, nbytes, file_offset, way.flags) == nbytes:
            return way
    return None


def _relayed(plan: Plan, ring: Ring, address: int, where: tuple[int, int, int]) -> Way | None:
    """Into memory of a device; the way by which every byte came."""
    t, nbytes = plan.target, where[0]
    if nbytes >= SPREAD_LEAST_NBYTES:
        by = _kernel_blocks(plan, nbytes, ring, monotonic())
        if by is not None:
            return plan.ways[0] if _spread(plan, by, ring, address, where) else None
        if nbytes > ring.slot_nbytes:
            return None

    def read(stream: int, slot: tuple[int, int]) -> Way | None:
        with t.runtime.copy_calls(t.device) as calls:
            for way in plan.ways:
                lead = fill(way, ring, slot[0], where, 0)
                if lead is not None:
                    copy(t, calls, address, slot[0] + lead, nbytes, stream)
                    return way
        return None

    return _lent(ring, read)


def _lent(ring: Ring, use: Callable[[int, tuple[int, int]], T]) -> T:
    """`use(stream, slot)` with a copy stream and a slot of a bounce ring. Raises OutOfMemoryError,
    DeviceError and what it raises."""
    streams: list[int] = []
    slots: list[tuple[int, int]] = []
    try:
        ring.lend(streams, slots)
        if not slots:
            raise OutOfMemoryError("no slot of the bounce ring")
        return use(streams[0], slots[0])
    finally:
        try:
            ring.take_back(streams, slots)
        finally:
            if streams or slots:  # the first was interrupted
                ring.take_back(streams, slots)


def fill(way: Way, ring: Ring, slot: int, where: tuple[int, int, int], flags: int) -> int | None:
    """Read into a slot; returns where in it the bytes begin, None if one is missing."""
    nbytes, file_offset, _ = where
    if way.if_held and not is_held(way.fd, file_offset, nbytes):
        return None
    lead, grain = 0, way.grain
    if grain == 1:
        got = _read(way.fd, ring, slot, nbytes, file_offset, flags | way.flags)
    else:
        lead = file_offset % grain
        ask = -(-(lead + nbytes) // grain) * grain
        if ask > ring.slot_nbytes:
            return None
        got = try_read(way.fd, slot, ask, file_offset - lead, way.flags)
    return lead if got >= lead + nbytes else None


def copy(t: Target, calls: CopyCalls, to: int, of: int, nbytes: int, stream: int) -> None:
    """Copy between a slot and the device and wait. Raises DeviceError; nothing is under way then."""
    copied = False
    try:
        calls.copy(to, of, nbytes, stream)
        calls.finish(stream)
        copied = True
    finally:
        if not copied:  # the copy may still be under way, and the slot is about to be somebody else's
            with suppress(DeviceError):
                t.runtime.stream_sync(stream)


def _kernel_blocks(plan: Plan, nbytes: int, ring: Ring, now: float) -> KernelBlocks | None:
    """The kernel's threads that a read is worth; None where this thread alone is
    better, or there are none."""
    from nobounce.io.movers import pollers  # for those who need it: a first load does not

    streak = pollers.follows(now)
    if nbytes <= ring.slot_nbytes and not streak:
        return None
    width = spreading(plan.settings, machine_for(THREADS), nbytes, streak=streak)
    return pollers.polled(width, MOST_POLLERS) if width else None


def _spread(plan: Plan, by: KernelBlocks, ring: Ring, address: int, where: tuple[int, int, int]) -> bool:
    """Read through as many slots as it takes; whether every byte is where it belongs."""
    from nobounce.io.movers import spread

    t, way = plan.target, plan.ways[0]
    nbytes, file_offset, _ = where
    held = spread.Lease(by, ring)
    try:
        cut = spread.cutting(nbytes, ring.slot_nbytes)
        if way.grain > 1 or (way.if_held and not seems_held(way.fd, file_offset, nbytes)):
            return False
        if not held.take(cut):
            return False
        with t.runtime.copy_calls(t.device) as calls:
            what = spread.Range(way.fd, way.flags, file_offset, nbytes, address)
            return spread.spread(what, cut, held, calls)
    finally:
        held.close()


def _read(fd: int, ring: Ring, slot: int, nbytes: int, file_offset: int, flags: int) -> int:
    """Into a slot; -1 where it fails, or would wait. The interpreter's own call takes half of what one
    on an address does; built for an old C library it has no flags, and it is preadv2 also without any,
    which a filter may refuse."""
    if HAS_FLAGS or not flags:
        try:
            return os.preadv(fd, (ring.view(slot)[:nbytes],), file_offset, flags)
        except OSError as e:
            if e.errno not in REFUSED:
                return -1
    return try_read(fd, slot, nbytes, file_offset, flags)
