"""Writes the pieces of a file, overlapped: while some are written, the next is gathered.

A device has a few lanes, each a stream and a slot of scratch memory. A piece takes a free lane: its tensors
are copied into the slot, on the host by numpy, on a device in the order of the stream, and the engine writes
the slot from there; a straight piece is written from the caller's memory on the same stream. A lane is free
when its last piece is written, so the scratch is bounded: 48 MiB a device. Writes end in any order (ext4 lets
one at a time extend a file), so waiting for a certain lane would leave all others idle.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nobounce.buffer import Buffer
from nobounce.device import Device
from nobounce.errors import InternalError
from nobounce.formats.layout import PIECE, Layout, Part, Piece
from nobounce.formats.sources import Source, fill
from nobounce.io.file import File
from nobounce.io.receipt import Receipt
from nobounce.io.transfer import Transfer
from nobounce.stream import Stream
from nobounce.tensor import Tensor

LANES = 3
"""Pieces under way at once on a device: one is written, one waits for its turn, one is gathered."""
SHOWN = 512 << 10
"""Bytes that are gathered before they are hashed: they are in the second cache then, where hashing is five
times as fast as from memory."""
LOOK_SECONDS = 0.1
"""How often one who waits looks for work that no thread could be started for."""

Progress = Callable[[str, int], None]
Each = Callable[[int, Any], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called while a save goes on.

    `progress(backend, nbytes)` as bytes are written; `prepare(layouts)`, once, with the layouts of all files
    before anything is written: it returns those that are written instead; `written(piece)` when a piece is;
    `check()` before a file gets its name: it may raise.
    """

    progress: Progress | None = None
    prepare: Callable[[list[Layout]], list[Layout]] | None = None
    written: Callable[[Piece], None] | None = None
    check: Callable[[], None] | None = None


NO_HOOKS = Hooks()


class _Lane:
    """A stream, its scratch memory, which is there if it is needed, and the write that uses both."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.slot: Buffer | None = None
        self.view: Any = None
        self.copy: Buffer | None = None
        self.writing: Transfer | None = None
        self.piece: Piece | None = None


class _Lanes:
    """The lanes of a device, and which of them wait for a piece."""

    def __init__(self, device: Device, lanes: list[_Lane]) -> None:
        self.all = lanes
        self._free = deque(lanes)
        self._scheduler = device._runtime.scheduler
        self._changed = self._scheduler.condition()

    def take(self) -> _Lane:
        """A lane whose write, if it had one, has ended."""
        while True:
            self._scheduler.help()
            with self._changed.mutex:
                if self._free:
                    return self._free.popleft()
                self._changed.wait(LOOK_SECONDS)

    def give_back(self, lane: _Lane, _: Transfer) -> None:
        with self._changed.mutex:
            self._free.append(lane)
            self._changed.notify()


class FileWriter:
    """Writes pieces to one file. A context manager: leaving it by an error cancels what has not
    begun and waits for the rest."""

    def __init__(
        self,
        file: File,
        pieces: Sequence[Piece],
        grain: int,
        hooks: Hooks = NO_HOOKS,
        each: Each | None = None,
    ) -> None:
        """`each` is called with all bytes in the order of the file, (file_offset, array of the host),
        before they are written."""
        self._file, self._pieces, self._grain, self._hooks = file, pieces, grain, hooks
        self._each = each
        self._stack = contextlib.ExitStack()
        self._lanes: dict[str, _Lanes] = {}
        self._fetched: tuple[Source, Buffer] | None = None
        self._made: tuple[Source, Any] | None = None
        self.receipts: list[Receipt] = []

    def __enter__(self) -> FileWriter:
        counts: dict[str, int] = {}
        largest: dict[str, int] = {}
        devices: dict[str, Device] = {}
        for piece in self._pieces:
            device = piece.parts[0].source.device
            devices[device.name] = device
            counts[device.name] = counts.get(device.name, 0) + 1
            if not piece.straight:
                largest[device.name] = max(largest.get(device.name, 0), piece.nbytes)
        try:
            for name, device in devices.items():
                lanes = [self._lane(device, largest.get(name, 0)) for _ in range(min(LANES, counts[name]))]
                self._lanes[name] = _Lanes(device, lanes)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is not None:
                lanes = [lane for each in self._lanes.values() for lane in each.all]
                under_way = [lane.writing for lane in lanes if lane.writing is not None]
                for transfer in reversed(under_way):
                    transfer.cancel()
                for transfer in under_way:
                    transfer.exception()
        finally:
            self._fetched = self._made = None
            self._stack.close()

    def write(self) -> None:
        """Write all pieces. Raises TransferError, RouteError, OutOfMemoryError, DeviceError."""
        for piece in self._pieces:
            lanes = self._lanes[piece.parts[0].source.device.name]
            lane = lanes.take()
            self._settle(lane)
            self._begin(lane, piece)
            if lane.writing is not None:
                lane.writing.add_done_callback(functools.partial(lanes.give_back, lane))
        for lanes in self._lanes.values():
            for lane in lanes.all:
                self._settle(lane)

    def _lane(self, device: Device, nbytes: int) -> _Lane:
        lane = _Lane(self._stack.enter_context(device.create_stream()))
        if nbytes:
            lane.slot = self._stack.enter_context(device.allocate(min(nbytes, PIECE) + self._grain))
            if lane.slot.is_host_accessible:
                lane.view = lane.slot.numpy()
        if self._each is not None and device.name != "cpu":
            # Made now: pinning memory while a transfer waits in its stream may wait for that transfer.
            lane.copy = self._stack.enter_context(device.allocate(PIECE, kind="pinned"))
        return lane

    def _begin(self, lane: _Lane, piece: Piece) -> None:
        source, start, stop = piece.parts[0]
        if piece.straight:
            buffer, offset = self._buffer_of(source), start
            if self._each is not None and source.array is not None:
                self._each(piece.file_offset, source.array[start:stop])
        elif lane.slot is None:
            raise InternalError("a lane without scratch was given bytes to gather")
        else:
            buffer, offset = lane.slot, piece.file_offset % self._grain
            if lane.view is not None:
                self._gather(lane, lane.slot, piece)
            else:
                self._gather_there(lane.stream, lane.slot, piece.parts, offset)
        if self._each is not None and lane.copy is not None:
            memory = span(buffer, offset, offset + piece.nbytes)
            self._show(self._each, lane.copy, lane.stream, piece.file_offset, memory)
        lane.piece = piece
        lane.writing = self._file.write_async(
            buffer,
            stream=lane.stream,
            nbytes=piece.nbytes,
            file_offset=piece.file_offset,
            buffer_offset=offset,
        )

    def _show(self, each: Each, copy: Buffer, stream: Stream, file_offset: int, memory: Buffer) -> None:
        """Show the host what a device has, by a copy made beside."""
        for start in range(0, memory.nbytes, copy.nbytes):
            stop = min(start + copy.nbytes, memory.nbytes)
            here = span(copy, 0, stop - start)
            here.copy_from(span(memory, start, stop), stream=stream)
            stream.sync()
            each(file_offset + start, here.view())

    def _gather(self, lane: _Lane, slot: Buffer, piece: Piece) -> None:
        """Into a slot of the host; what is to be shown is shown while it is in the processor's cache."""
        lead = piece.file_offset % self._grain
        at = shown = lead

        def show() -> None:
            nonlocal shown
            if self._each is not None and at > shown:
                self._each(piece.file_offset + shown - lead, lane.view[shown:at])
            shown = at

        for source, start, stop in piece.parts:
            step = stop - start if self._each is None else SHOWN
            for first in range(start, stop, step):
                last = min(first + step, stop)
                end = at + last - first
                if source.read is not None:
                    source.read(slot, at, first, last)
                elif source.make is not None:
                    lane.view[at:end] = self._made_of(source, source.make)[first:last]
                else:
                    fill(lane.view[at:end], source, first, last)
                at = end
                if at - shown >= SHOWN:
                    show()
        show()

    def _gather_there(self, stream: Stream, slot: Buffer, parts: Iterable[Part], at: int) -> None:
        """Into a slot of a device, in the order of its stream."""
        for source, start, stop in parts:
            end = at + stop - start
            span(slot, at, end).copy_from(span(self._buffer_of(source), start, stop), stream=stream)
            at = end

    def _buffer_of(self, source: Source) -> Buffer:
        """Its bytes as a Buffer. That of the last tensor is kept: a strided one of a device
        is made contiguous once."""
        if self._fetched is None or self._fetched[0] is not source:
            self._fetched = None
            self._fetched = source, source.buffer()
        return self._fetched[1]

    def _made_of(self, source: Source, make: Callable[[], Any]) -> Any:
        """Its bytes, made once for all its pieces."""
        if self._made is None or self._made[0] is not source:
            self._made = None
            self._made = source, make()
        return self._made[1]

    def _settle(self, lane: _Lane) -> None:
        transfer, lane.writing = lane.writing, None
        if transfer is None:
            return
        try:
            receipt = transfer.result()
        except BaseException:
            if not transfer.done():
                lane.writing = transfer
            raise
        self.receipts.append(receipt)
        if self._hooks.progress is not None:
            self._hooks.progress("fastpath" if receipt.fastpath_bytes else "fallback", receipt.nbytes)
        if self._hooks.written is not None and lane.piece is not None:
            self._hooks.written(lane.piece)


def span(buffer: Buffer, start: int, stop: int) -> Buffer:
    """Bytes [start, stop) of a buffer, which share its memory."""
    return Tensor(buffer, (stop - start,), "U8", offset=start).buffer
