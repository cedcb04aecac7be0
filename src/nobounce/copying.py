"""Copies between buffers, of one runtime or through host memory, in stream order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nobounce import transferend
from nobounce.errors import ArgumentError
from nobounce.protocols import StreamLike
from nobounce.route.types import MemoryKind
from nobounce.stream import as_stream

if TYPE_CHECKING:
    from nobounce.buffer import Buffer


def copy(dst: Buffer, src: Buffer, stream: StreamLike) -> None:
    """What `Buffer.copy_to` and `copy_from` do. Raises ArgumentError, TransferError, DeviceError."""
    to, of = dst.allocation, src.allocation
    if dst.nbytes != src.nbytes:
        raise ArgumentError(
            f"{src.nbytes} bytes do not fit a buffer of {dst.nbytes}: the sizes must be equal"
        )
    if to.read_only:
        raise ArgumentError("the memory copied to is read-only")
    lead, other = (of, to) if to.host and not of.host else (to, of)
    runtime = lead.device._runtime
    if other.device._runtime is not runtime:
        if not other.host:
            raise ArgumentError(f"no copy leads from {of.device} to {to.device}: go through host memory")
        other.wait()  # two runtimes know nothing of each other's streams
    where = as_stream(stream, lead.device)
    if dst.nbytes == 0:
        return
    if of.arriving or to.arriving:
        _carry(dst, src)
    if stream is None:  # nothing has put the copy behind earlier work elsewhere, on another device say
        to.order(where)
        of.order(where)
    with where._on():
        if (
            to.kind is of.kind is MemoryKind.DEVICE
            and to.device != of.device
            and other.device._runtime is runtime
            and (peers := runtime.peers) is not None
        ):
            peers.copy_peer(
                dst.handle, to.device.ordinal, src.handle, of.device.ordinal, dst.nbytes, where.handle
            )
        else:
            runtime.copy_async(dst.handle, src.handle, dst.nbytes, where.handle)
    to.used_on(where)
    of.used_on(where)


def _carry(dst: Buffer, src: Buffer) -> None:
    """A copy brings what its source was to get, or did not. Raises TransferError where that has failed
    by now, and is not known."""
    of, to = src.allocation.arriving, dst.allocation.arriving
    start, stop = src.handle, src.handle + src.nbytes
    lacks = transferend.lacking(tuple(of.items()), start, stop)
    if lacks is not None:
        raise lacks.refusal(lacks.filename, lacks.file_offset, src.nbytes, "copy")
    transferend.copied(of, start, stop, to, dst.handle - start)
