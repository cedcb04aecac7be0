"""The direct backend: O_DIRECT or the vendor's call, straight between storage and the buffer.

Who raises what: the system's errors come out as `DirectFailure` with the bytes that had moved before, so
that the engine can let fallback finish the chunk in its place; a runtime's own failure (DeviceError) is
never retried (hipFile C-17).

A short direct transfer is not an end: the loop goes on, from an aligned place (an unaligned start would fail
with EINVAL for ever), and gives up to fallback when three tries in a row bring nothing.
"""

from __future__ import annotations

import errno
import os

from nobounce.io.target import Chunk, Target
from nobounce.route.types import Reason

SHORT = Reason("direct-stalled", "the direct call kept stopping before the end")
STALLS = 3


class DirectFailure(Exception):
    """A direct call failed with `errno` after `done` bytes of the chunk."""

    def __init__(self, code: int, done: int) -> None:
        super().__init__(code, done)
        self.errno, self.done = code, done


def move(target: Target, chunk: Chunk) -> tuple[int, bool]:
    """Move the chunk; returns (bytes moved from its start on, whether the end of the file was met).

    Fewer bytes without an end of file means that the direct path stalled. Raises
    DirectFailure and DeviceError.
    """
    direct = target.direct
    if direct is None or target.direct_fd < 0:
        raise DirectFailure(errno.ENODEV, 0)
    call = direct.read if target.op == "read" else direct.write
    address = target.address + chunk.buffer_offset
    if target.populate:
        direct.prepare(target.device, address, chunk.nbytes)
    if target.one_call:
        try:
            moved = call(target.device, target.direct_fd, address, chunk.nbytes, chunk.file_offset)
        except OSError as e:
            raise DirectFailure(e.errno or errno.EIO, 0) from e
        return moved, moved < chunk.nbytes
    done = stalls = furthest = 0
    while done < chunk.nbytes:
        ask = min(chunk.nbytes - done, target.max_nbytes // target.align * target.align or target.align)
        try:
            moved = call(target.device, target.direct_fd, address + done, ask, chunk.file_offset + done)
        except OSError as e:
            if e.errno == errno.EINTR:
                continue
            raise DirectFailure(e.errno or errno.EIO, done) from e
        if moved == 0:
            if target.op == "read":
                return done, True
            stalls += 1
        done += moved
        if done >= chunk.nbytes:
            break
        if done % target.align:
            if target.op == "read" and _at_end(target.direct_fd, chunk.file_offset + done):
                return done, True
            done -= done % target.align
        stalls = 0 if done > furthest else stalls + 1
        furthest = max(furthest, done)
        if stalls >= STALLS:
            break
    return min(done, chunk.nbytes), False


def _at_end(fd: int, position: int) -> bool:
    return position >= os.lseek(fd, 0, os.SEEK_END)
