"""The two ends of a transfer, and the pieces it is cut into."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nobounce.errors import TransferError
from nobounce.facts import pagecache
from nobounce.io.movers.bounce import Ring
from nobounce.io.receipt import merge_segments
from nobounce.io.strategy import CACHED_CODES, TAIL_NBYTES, Strategy
from nobounce.records import record
from nobounce.route.types import BackendName, CachedRange, MemoryKind, Op, Reason, Route, RouteSegment
from nobounce.runtimes.base import DirectIO, Runtime

PAGE = 4096
CURES = {
    errno.ENOSPC: "The disk is full: free space and write again",
    errno.EDQUOT: "The quota is used up: free space and write again",
    errno.EFBIG: "The file would pass the largest size allowed here: check `ulimit -f`",
    errno.EBADF: "The file is not open for this: open it with a mode that allows it",
    errno.EROFS: "The file system is mounted read-only",
}
"""What the caller can do about an error of a transfer, single or of a batch, by errno."""


class Chunk(NamedTuple):
    """The unit one I/O thread moves at a time."""

    backend: BackendName
    file_offset: int
    buffer_offset: int
    nbytes: int
    reason: Reason
    direct: bool = False
    """For a relay: the host's side is O_DIRECT, so that no page stays behind and the CPU copies nothing."""


class Piece(NamedTuple):
    """Bytes that really moved."""

    backend: BackendName
    file_offset: int
    buffer_offset: int
    nbytes: int
    reason: Reason
    relayed: bool


def joined(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one transfer with neighbours made one, now, so that whoever waits for its end does
    not wait for that as well."""
    if len(pieces) < 2:
        return pieces
    return [
        Piece(s.backend, s.file_offset, s.buffer_offset, s.nbytes, s.reason, s.relayed)
        for s in merge_segments(pieces)
    ]


@record(frozen=False)
class Target:
    """Everything a worker needs to move a chunk; made once per transfer, before anything is held up by it.

    `address` is the buffer's base, `align` the file-offset alignment of direct I/O here, `drop_cache` asks
    fallback to leave no page behind, `own_fd` says that no caller shares the buffered descriptor, `ring` is
    there when the host cannot reach the memory itself.
    """

    op: Op
    filename: str
    device_name: str
    runtime: Runtime
    device: int
    kind: MemoryKind
    address: int
    buffered_fd: int
    own_fd: bool
    direct_fd: int
    direct: DirectIO | None
    align: int
    max_nbytes: int
    drop_cache: bool
    retry_errnos: frozenset[int]
    ring: Ring | None
    strategy: Strategy
    populate: bool = False
    """btrfs does not fault memory in during a direct read: what is not there yet it
    reads through the page cache."""
    relay_fd: int = -1
    """The O_DIRECT descriptor for a relay's own reads and writes; -1 where the file has no direct I/O."""
    relay_align: int = 4096
    vouched: bool = True
    """statx answers for the whole file (DIOALIGN); else reads of every size are
    checked against the page cache."""
    sparse: bool = False
    """The file has holes, or ranges that were never written."""
    only_direct: bool = False
    """Bytes that turn out not to have gone direct are an error."""
    one_call: bool = False
    """A direct call is made once and its count stands, short or not (hipFile C-19)."""

    def error(
        self, code: int, file_offset: int, nbytes: int, backend: str, *, call: str = "", detail: str = ""
    ) -> TransferError:
        """The error of `nbytes` bytes that `backend` could not move, with the cure where one is known."""
        plain = f"direct {self.op}" if backend == "fastpath" else "pread" if self.op == "read" else "pwrite"
        return TransferError(
            code or errno.EIO,
            filename=self.filename,
            file_offset=file_offset,
            nbytes=nbytes,
            backend=backend,
            call=call or plain,
            detail=detail,
            cure=CURES.get(code, ""),
        )

    @property
    def seekable_fd(self) -> int:
        """A descriptor whose position no caller shares."""
        return self.buffered_fd if self.own_fd and self.buffered_fd >= 0 else self.direct_fd

    def before_cold(self, cold: Sequence[CachedRange]) -> None:
        """Fallback is about to read ranges that the page cache does not hold, which
        `drop_cold` takes out of it again.

        Pages that read-ahead is still filling then could not be dropped: have none filled.
        """
        if cold and self.own_fd:
            os.posix_fadvise(self.buffered_fd, 0, 0, os.POSIX_FADV_RANDOM)

    def drop_cold(self, cold: Sequence[CachedRange]) -> None:
        """These were not in the page cache before fallback read them."""
        for one in cold:
            pagecache.drop(self.buffered_fd, one.file_offset, one.nbytes)
        if cold and self.own_fd:
            os.posix_fadvise(self.buffered_fd, 0, 0, os.POSIX_FADV_NORMAL)


def cut(route: Route, op: Op, strategy: Strategy, relay_align: int = 0) -> tuple[list[Chunk], list[Chunk]]:
    """(chunks, epilogue) of a route. `relay_align`: what is not cached is relayed by
    O_DIRECT with this alignment.

    Runs are cut to the pieces of the strategy. The unaligned edges of a write that also has a direct
    part are the epilogue: they go last, because buffered and direct bytes under way at once could
    land in one page (judge.py).
    """
    chunks: list[Chunk] = []
    epilogue: list[Chunk] = []
    mixed = op == "write" and any(s.backend == "fastpath" for s in route.segments)
    for s in route.segments:
        into = epilogue if mixed and s.backend == "fallback" else chunks
        relayed = bool(relay_align) and s.backend == "fallback" and s.reason.code not in CACHED_CODES
        first, last = s.file_offset, s.file_offset + s.nbytes
        if relayed and op == "write":
            grain = max(relay_align, PAGE)
            first, last = -(-first // grain) * grain, last // grain * grain
            edges = ((s.file_offset, first), (last, s.file_offset + s.nbytes)) if first < last else ()
            relayed = bool(edges)
            if not relayed:
                first, last = s.file_offset, s.file_offset + s.nbytes
            epilogue += [_part(s, a, b) for a, b in edges if a < b]
        direct = s.backend == "fastpath"
        step, grain = (
            (strategy.direct_nbytes, 1) if direct else (strategy.chunk_nbytes, max(relay_align, PAGE))
        )
        into += [_part(s, a, b)._replace(direct=relayed) for a, b in _cuts(first, last, step, grain)]
    if strategy.tail:
        chunks[-strategy.tail :] = [part for c in chunks[-strategy.tail :] for part in _tail(c)]
    return chunks, epilogue


def _tail(chunk: Chunk) -> Iterator[Chunk]:
    for done in range(0, chunk.nbytes, TAIL_NBYTES):
        at = chunk.file_offset + done, chunk.buffer_offset + done
        nbytes = min(TAIL_NBYTES, chunk.nbytes - done)
        yield chunk._replace(file_offset=at[0], buffer_offset=at[1], nbytes=nbytes)


def _cuts(first: int, last: int, step: int, grain: int) -> Iterator[tuple[int, int]]:
    """[first, last) in parts of at most `step` bytes, cut at multiples of `grain` where a part holds one.

    Relays read whole pages: a cut in the middle of one would have each neighbour read it, the first
    in a request of its own.
    """
    while first < last:
        end = min(first + step, last)
        if end < last and end // grain * grain > first:
            end = end // grain * grain
        yield first, end
        first = end


def _part(s: RouteSegment, start: int, end: int) -> Chunk:
    return Chunk(s.backend, start, s.buffer_offset + start - s.file_offset, end - start, s.reason)
