"""The words of a routing decision: plain, frozen data that runtimes, io and checks share."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Literal

from nobounce.records import record

if TYPE_CHECKING:
    from nobounce.config import Settings
    from nobounce.facts.extents import IndirectRange
    from nobounce.facts.types import FileFacts

Op = Literal["read", "write"]
BackendName = Literal["fastpath", "fallback"]
Require = Literal["auto", "fastpath", "fallback"]
Cache = Literal["auto", "use", "avoid"]
Known = Literal["yes", "no", "unknown"]

REQUIRE: tuple[Require, ...] = ("auto", "fastpath", "fallback")
CACHE: tuple[Cache, ...] = ("auto", "use", "avoid")

MAX_RW_COUNT = 0x7FFFF000
"""Bytes one system call or vendor call moves at most (Linux MAX_RW_COUNT with 4 KiB pages; hipFile A-13)."""


class MemoryKind(enum.Enum):
    """What a pointer points to, as hipPointerGetAttributes tells it (HIP rule 133)."""

    DEVICE = "device"
    PINNED = "pinned"
    MANAGED = "managed"
    PAGEABLE = "pageable"


@record
class MemoryFacts:
    """The memory a request moves to or from: `address` and `nbytes` of the whole buffer, in bytes."""

    kind: MemoryKind
    address: int
    nbytes: int
    device: str


@record
class DirectFacts:
    """What direct I/O to one device's memory can do; filled by a runtime's DirectIO or,
    for a check, from facts.

    It decides nothing: the judge does. `file_rule` says which files qualify: "probe" (any file that
    really does direct I/O: statx DIOALIGN, or an aligned probe read that moved read_bytes) or
    "hipfile" (hipFile C-9).
    """

    runtime: str
    available: bool
    because: str = ""
    code: str = "no-direct-io-on-device"
    cure: str = ""
    file_rule: Literal["probe", "hipfile"] = "probe"
    memory_kinds: frozenset[MemoryKind] = frozenset({MemoryKind.DEVICE})
    min_mem_align: int = 1
    min_offset_align: int = 1
    max_nbytes: int = MAX_RW_COUNT
    p2p: Known = "unknown"
    virtual_function: Known = "unknown"


@record
class Refusal:
    """One failed condition of a backend: a stable code, a sentence, and what would cure it (may be empty)."""

    code: str
    sentence: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} [{self.code}]" + (f". Cure: {self.cure}" if self.cure else "")


@record
class Score:
    """A backend's answer to one request: 100 for fastpath, 1 for fallback, -1 with
    the refusals (hipFile C-1)."""

    backend: BackendName
    value: int
    refusals: tuple[Refusal, ...] = ()

    @property
    def accepts(self) -> bool:
        return self.value >= 0


@record
class Reason:
    """Why bytes took the way they took: a stable code (docs/reasons.md lists them), a sentence and a cure."""

    code: str
    sentence: str
    cure: str = ""


@record
class CachedRange:
    """`nbytes` of the file from `file_offset` on, and whether the page cache holds them (None: not known)."""

    file_offset: int
    nbytes: int
    resident: bool | None


@record
class Request:
    """One read or write, with every fact its route depends on. Offsets and sizes in bytes."""

    op: Op
    file: FileFacts
    memory: MemoryFacts
    direct: DirectFacts
    settings: Settings
    file_offset: int
    nbytes: int
    buffer_offset: int = 0
    require: Require = "auto"
    cache: Cache = "avoid"
    cached: tuple[CachedRange, ...] = ()
    indirect: tuple[IndirectRange, ...] = ()
    """Ranges of the file that O_DIRECT reads through the page cache, in the order of the file
    and apart from each other."""
    earlier_failure: int | None = None
    """errno of an earlier direct failure of this file on this device (hipFile J-17)."""


@record
class RouteSegment:
    """A run of bytes that goes through one backend for one reason."""

    backend: BackendName
    file_offset: int
    buffer_offset: int
    nbytes: int
    reason: Reason


@record
class Route:
    """The decision for one request: its segments in file order, and how each backend scored."""

    segments: tuple[RouteSegment, ...]
    scores: tuple[Score, ...] = ()

    def nbytes(self, backend: BackendName) -> int:
        return sum(s.nbytes for s in self.segments if s.backend == backend)
