"""The two ends of a transfer, and the pieces it is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nobounce.io.bounce import Ring
from nobounce.route.types import BackendName, MemoryKind, Op, Reason, Route
from nobounce.runtimes.base import DirectIO, Runtime


class Chunk(NamedTuple):
    """The unit one I/O thread moves at a time."""

    backend: BackendName
    file_offset: int
    buffer_offset: int
    nbytes: int
    reason: Reason


class Piece(NamedTuple):
    """Bytes that really moved."""

    backend: BackendName
    file_offset: int
    buffer_offset: int
    nbytes: int
    reason: Reason
    relayed: bool


@dataclass(slots=True)
class Target:
    """Everything a worker needs to move a chunk; made once per transfer, before anything is held up by it.

    `address` is the buffer's base, `align` the file-offset alignment of direct I/O here, `drop_cache` asks fallback to
    leave no page behind, `own_fd` says that no caller shares the buffered descriptor, `ring` is there when the host cannot reach the memory itself.
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
    slots: int = 2
    populate: bool = False
    """btrfs does not fault memory in during a direct read: what is not there yet it reads through the page cache."""
    dma_workers: int = 0
    """How many workers may read page-cached ranges straight out of the page cache (pagecache_dma)."""
    one_call: bool = False
    """A direct call is made once and its count stands, short or not (hipFile C-19)."""


def cut(route: Route, op: Op, chunk_nbytes: int) -> tuple[list[Chunk], list[Chunk]]:
    """(chunks, epilogue) of a route.

    Direct and cached runs are cut to `chunk_nbytes`. The unaligned edges of a write that also has a direct part are the
    epilogue: they go last, because buffered and direct bytes under way at once could land in one page (judge.py).
    """
    chunks: list[Chunk] = []
    epilogue: list[Chunk] = []
    mixed = op == "write" and any(s.backend == "fastpath" for s in route.segments)
    for s in route.segments:
        into = epilogue if mixed and s.backend == "fallback" else chunks
        for start in range(0, s.nbytes, chunk_nbytes):
            n = min(chunk_nbytes, s.nbytes - start)
            into.append(Chunk(s.backend, s.file_offset + start, s.buffer_offset + start, n, s.reason))
    return chunks, epilogue
