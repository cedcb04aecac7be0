"""Writes the pieces of a file, overlapped: while some are written, the next is gathered.

A device has a few lanes, each a stream and a slot of scratch memory. A piece takes a free lane: its tensors are copied into the slot, on
the host by numpy, on a device in the order of the stream, and the engine writes the slot from there; a straight piece is written from the
caller's memory on the same stream. A lane is free when its last piece is written, so the scratch is bounded: 32 MiB a device. Writes end in
any order (ext4 lets one at a time extend a file), and whoever waited for a certain lane would find all others idle by then.
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

LANES = 4
"""Pieces under way at once on a device: 4 of 8 MiB hold the speed of a plain writer with as many threads."""
LOOK_SECONDS = 0.1
"""How often one who waits looks for work that no thread could be started for."""

Progress = Callable[[str, int], None]
Each = Callable[[int, Any], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called while a save goes on.

    `progress(backend, nbytes)` as bytes are written; `prepare(layouts)`, once, with the layouts of all files before anything is written: it
    returns those that are written instead; `written(piece)` when a piece is; `check()` before a file gets its name: it may raise.
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
    """Writes pieces to one file. A context manager: leaving it by an error cancels what has not begun and waits for the rest."""

    def __init__(
        self,
        file: File,
        pieces: Sequence[Piece],
        grain: int,
        hooks: Hooks = NO_HOOKS,
        each: Each | None = None,
    ) -> None:
        """`each` is called with all bytes in the order of the file, (file_offset, array of the host), before they are written."""
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
        part, source = piece.parts[0], piece.parts[0].source
        if piece.straight:
            buffer, offset = self._buffer_of(source), part.start
            data = None if source.array is None else source.array[part.start : part.stop]
        else:
            if lane.slot is None:
                raise InternalError("a lane without scratch was given bytes to gather")
            buffer, offset = lane.slot, piece.file_offset % self._grain
            data = None if lane.view is None else lane.view[offset : offset + piece.nbytes]
            self._gather(lane, piece.parts, offset)
        if self._each is not None:
            self._tell(self._each, lane, piece.file_offset, data, span(buffer, offset, offset + piece.nbytes))
        lane.piece = piece
        lane.writing = self._file.write_async(
            buffer,
            stream=lane.stream,
            nbytes=piece.nbytes,
            file_offset=piece.file_offset,
            buffer_offset=offset,
        )

    def _tell(self, each: Each, lane: _Lane, file_offset: int, data: Any, memory: Buffer) -> None:
        """Show the host what is about to be written: of a device, a copy made beside."""
        if data is not None or lane.copy is None:
            each(file_offset, data)
            return
        for start in range(0, memory.nbytes, lane.copy.nbytes):
            stop = min(start + lane.copy.nbytes, memory.nbytes)
            here = span(lane.copy, 0, stop - start)
            here.copy_from(span(memory, start, stop), stream=lane.stream)
            lane.stream.sync()
            each(file_offset + start, here.view())

    def _gather(self, lane: _Lane, parts: Iterable[Part], at: int) -> None:
        for source, start, stop in parts:
            end = at + stop - start
            if source.read is not None and lane.slot is not None:
                source.read(lane.slot, at, start, stop)
            elif source.make is not None:
                lane.view[at:end] = self._made_of(source, source.make)[start:stop]
            elif lane.view is not None:
                fill(lane.view[at:end], source, start, stop)
            elif lane.slot is not None:
                span(lane.slot, at, end).copy_from(
                    span(self._buffer_of(source), start, stop), stream=lane.stream
                )
            at = end

    def _buffer_of(self, source: Source) -> Buffer:
        """Its bytes as a Buffer. That of the last tensor is kept: a strided one of a device is made contiguous once."""
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
