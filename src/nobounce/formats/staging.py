"""Copies of tensors on the host, so that their own memory is free again before the copies are written.

As many tensors as fit into a budget are copied, the last ones of the last file first: what does not fit is
written from where it is, before them, and is free when that is done. A copy is an image of the file's own
bytes, page for page, so large tensors are written straight from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from nobounce.buffer import Buffer
from nobounce.device import Device
from nobounce.formats.filewriter import Hooks, Progress, span
from nobounce.formats.layout import ALIGN, Layout, Piece, Placed
from nobounce.formats.sources import Source, fill
from nobounce.stream import Stream


class Staging:
    """Copies tensors within `budget` bytes, and calls `freed` once no tensor's own
    memory is needed any more."""

    def __init__(self, budget: int, freed: Callable[[], None]) -> None:
        self._budget, self._freed = budget, freed
        self._left = 0
        self._copies: set[int] = set()
        """The ids of the sources that are copies; the layouts keep them alive."""

    def hooks(self, progress: Progress | None) -> Hooks:
        """For the save that is to be staged."""
        return Hooks(progress, self._prepare, self._written)

    def _prepare(self, layouts: list[Layout]) -> list[Layout]:
        room, staged = self._budget, []
        for layout in reversed(layouts):
            first = len(layout.placed)
            while first and layout.placed[first - 1].source.nbytes <= room:
                first -= 1
                room -= layout.placed[first].source.nbytes
            staged.append(self._copied(layout, first))
            self._left += sum(p.source.nbytes for p in layout.placed[:first])
            if first:
                room = -1
        if not self._left:
            self._freed()
        return staged[::-1]

    def _written(self, piece: Piece) -> None:
        if not self._left:
            return
        self._left -= sum(p.stop - p.start for p in piece.parts if id(p.source) not in self._copies)
        if not self._left:
            self._freed()

    def _copied(self, layout: Layout, first: int) -> Layout:
        """The layout, with copies in the place of its tensors from `first` on."""
        originals = layout.placed[first:]
        nbytes = sum(p.source.nbytes for p in originals)
        if not nbytes:
            return layout
        begin = layout.data_offset + originals[0].start
        copies = []
        with ExitStack() as stack:
            memory = stack.enter_context(Device("cpu").allocate(begin % ALIGN + nbytes))  # the copies keep it
            view = memory.numpy()
            # Streams of their own: on a default stream the work of others would wait for the copies.
            streams: dict[str, Stream] = {}
            for source, start in originals:
                name = source.device.name
                if source.array is None and name not in streams:
                    streams[name] = stack.enter_context(source.device.create_stream())
                at = layout.data_offset + start - begin + begin % ALIGN
                copies.append(Placed(_copy(source, memory, view, at, streams.get(name)), start))
        self._copies |= {id(copy.source) for copy in copies}
        return layout._replace(placed=(*layout.placed[:first], *copies))


def _copy(source: Source, memory: Buffer, view: Any, at: int, stream: Stream | None) -> Source:
    """A tensor's bytes, as the file has them, at `at` of a buffer of the host; a
    device's come by its `stream`."""
    end = at + source.nbytes
    if source.array is not None:
        fill(view[at:end], source, 0, source.nbytes)
    elif source.nbytes and stream is not None:
        span(memory, at, end).copy_from(source.buffer(), stream=stream)
        stream.sync()
    address = int(view.__array_interface__["data"][0]) + at
    place = (address, address + source.nbytes) if source.nbytes else (0, 0)
    return Source(
        source.name, source.dtype, source.shape, source.nbytes, Device("cpu"), *place, array=view[at:end]
    )
