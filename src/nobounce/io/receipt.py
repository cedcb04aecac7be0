"""What happened: the receipt that every transfer returns. Frozen, printable, JSON-able, addable."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal, Protocol

from nobounce.errors import errno_name, printable
from nobounce.records import record, replace
from nobounce.route.types import BackendName, Op, Reason

Evidence = Literal["kernel", "reported", "none"]
_STRENGTH: dict[str, int] = {"none": 2, "kernel": 1, "reported": 0}


@record
class Segment:
    """A run of bytes that moved one way. Offsets and sizes in bytes; `relayed` bytes
    crossed a bounce buffer."""

    backend: BackendName
    file_offset: int
    buffer_offset: int
    nbytes: int
    reason: Reason
    relayed: bool = False


@record
class Retry:
    """A failed direct try that fallback repeated in its place (hipFile C-17)."""

    file_offset: int
    nbytes: int
    errno: int

    def __str__(self) -> str:
        return (
            f"fastpath failed with {errno_name(self.errno)} for {self.nbytes} bytes at {self.file_offset}, "
            "then fallback"
        )


@record
class Receipt:
    """What one transfer, or a sum of transfers, did.

    `nbytes` moved of the `requested` bytes, without a gap from the first byte on. `evidence` says how the
    fastpath bytes are known: "kernel" where the I/O threads' own /proc counters moved by them while the page
    cache did not grow (or the vendor's counters agree), "reported" where only the call that moved them says
    so, "none" where no byte went direct. Times are seconds of the scheduler's monotonic clock.
    """

    op: Op
    filename: str
    device: str
    requested: int
    nbytes: int
    segments: tuple[Segment, ...] = ()
    retries: tuple[Retry, ...] = ()
    evidence: Evidence = "none"
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    synced: bool = False
    notes: tuple[str, ...] = ()
    hole_bytes: int = 0
    """Of the fastpath bytes of a read, those that the file system answers with zeros without asking a disk:
    holes, and ranges that were allocated and never written."""

    @property
    def seconds(self) -> float:
        """Wall time from start to end."""
        return self.ended_at - self.started_at

    def _total(self, backend: BackendName) -> int:
        return sum(s.nbytes for s in self.segments if s.backend == backend)

    @property
    def fastpath_bytes(self) -> int:
        """Bytes that went direct; bytes of a failed direct try are not among them."""
        return self._total("fastpath")

    @property
    def fallback_bytes(self) -> int:
        """Bytes that went through host memory, the cached ones included."""
        return self._total("fallback")

    @property
    def cached_bytes(self) -> int:
        """The part of fallback that came from the page cache by choice."""
        return sum(s.nbytes for s in self.segments if s.reason.code in ("cached", "cache-use"))

    @property
    def host_traffic_bytes(self) -> int:
        """Logical writes and reads of host memory that relaying cost: each relayed byte is
        written once, read once."""
        return 2 * sum(s.nbytes for s in self.segments if s.relayed)

    @property
    def reasons(self) -> dict[str, int]:
        """Bytes by reason code."""
        totals: dict[str, int] = {}
        for s in self.segments:
            totals[s.reason.code] = totals.get(s.reason.code, 0) + s.nbytes
        return totals

    def to_dict(self) -> dict[str, Any]:
        """The receipt as --json prints it (docs/json.md)."""
        return {
            "fastpath_bytes": self.fastpath_bytes,
            "fallback_bytes": self.fallback_bytes,
            "cached_bytes": self.cached_bytes,
            "host_traffic_bytes": self.host_traffic_bytes,
            "reasons": self.reasons,
            "retries": [
                {"file_offset": r.file_offset, "nbytes": r.nbytes, "errno": errno_name(r.errno)}
                for r in self.retries
            ],
            "evidence": self.evidence,
            "hole_bytes": self.hole_bytes,
        }

    def explain(self) -> str:
        """Where each byte went and why, for a person."""
        verb = "read into" if self.op == "read" else "written from"
        lines = [
            f"{printable(self.filename)}: {self.nbytes:,} bytes {verb} {self.device} in {self.seconds:.3f} s"
        ]
        seen: dict[tuple[str, str], tuple[Segment, int]] = {}
        for s in self.segments:
            key = (s.backend, s.reason.code)
            seen[key] = (s, seen[key][1] + s.nbytes if key in seen else s.nbytes)
        for (backend, code), (s, total) in sorted(seen.items(), key=lambda item: -item[1][1]):
            relay = ", through a bounce buffer" if s.relayed else ""
            lines.append(f"  {backend:<8} {total:>15,} bytes  {code}: {s.reason.sentence}{relay}")
            if s.reason.cure:
                lines.append(f"  {'':<8} {'':>15}        cure: {s.reason.cure}")
        lines += [f"  retry: {r}" for r in self.retries[:8]]
        if len(self.retries) > 8:
            lines.append(f"  retry: ... and {len(self.retries) - 8} more")
        if self.nbytes < self.requested:
            lines.append(
                f"  short: {self.requested - self.nbytes:,} of {self.requested:,} bytes did not move"
            )
        if self.fastpath_bytes:
            lines.append(f"  evidence for fastpath: {EVIDENCE_TEXT[self.evidence]}")
        if self.hole_bytes:
            lines.append(f"  holes: {self.hole_bytes:,} bytes of them are zeros that no disk was asked for")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


EVIDENCE_TEXT: dict[str, str] = {
    "kernel": "the kernel's own counters of the I/O threads agree, and the page cache did not grow",
    "reported": "the direct call reported the bytes; no independent counter confirms it",
    "none": "no byte went direct",
}


def total(receipts: Iterable[Receipt], *, filename: str | None = None) -> Receipt:
    """The sum of receipts; the evidence is the weakest of those that moved bytes directly.

    Raises ValueError for no receipts.
    """
    parts = list(receipts)
    if not parts:
        raise ValueError("no receipts to add")
    first = parts[0]
    direct = [p.evidence for p in parts if p.fastpath_bytes]
    names = list(dict.fromkeys(p.filename for p in parts))
    return replace(
        first,
        filename=filename or (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"),
        requested=sum(p.requested for p in parts),
        nbytes=sum(p.nbytes for p in parts),
        segments=tuple(s for p in parts for s in p.segments),
        retries=tuple(r for p in parts for r in p.retries),
        evidence=min(direct, key=lambda e: _STRENGTH[e]) if direct else "none",
        queued_at=min(p.queued_at for p in parts),
        started_at=min(p.started_at for p in parts),
        ended_at=max(p.ended_at for p in parts),
        synced=all(p.synced for p in parts),
        notes=tuple(dict.fromkeys(n for p in parts for n in p.notes)),
        hole_bytes=sum(p.hole_bytes for p in parts),
    )


class Moved(Protocol):
    """What a Segment says of one part, however small."""

    @property
    def backend(self) -> BackendName: ...
    @property
    def file_offset(self) -> int: ...
    @property
    def buffer_offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def reason(self) -> Reason: ...
    @property
    def relayed(self) -> bool: ...


def merge_segments(parts: Iterable[Moved]) -> tuple[Segment, ...]:
    """Sort by file offset and join neighbours that went the same way for the same reason.

    A large transfer has thousands of parts and whoever waits for it waits for this: an object is
    made for each run alone.
    """
    merged: list[Segment] = []
    first: Moved | None = None
    nbytes = 0
    for p in sorted(parts, key=attrgetter("file_offset")):
        if (
            first is not None
            and first.file_offset + nbytes == p.file_offset
            and first.buffer_offset + nbytes == p.buffer_offset
            and first.backend == p.backend
            and first.relayed == p.relayed
            and first.reason.code == p.reason.code
        ):
            nbytes += p.nbytes
            continue
        if first is not None:
            merged.append(_run(first, nbytes))
        first, nbytes = p, p.nbytes
    if first is not None:
        merged.append(_run(first, nbytes))
    return tuple(merged)


def reassigned(
    segments: Iterable[Segment], ranges: Iterable[tuple[int, int]], reason: Reason
) -> list[Segment]:
    """The segments, but what fastpath moved of `ranges`, each (file_offset, nbytes), counted as
    fallback's for `reason`."""
    found: list[Segment] = []
    ranges = list(ranges)
    for s in segments:
        position, end = s.file_offset, s.file_offset + s.nbytes
        for start, nbytes in ranges if s.backend == "fastpath" else ():
            begin, finish = max(position, start), min(end, start + nbytes)
            if begin >= finish:
                continue
            found += [_part(s, position, begin)] if position < begin else []
            found.append(replace(_part(s, begin, finish), backend="fallback", reason=reason))
            position = finish
        found += [_part(s, position, end)] if position < end else []
    return found


def _part(s: Segment, start: int, end: int) -> Segment:
    return replace(
        s, file_offset=start, buffer_offset=s.buffer_offset + start - s.file_offset, nbytes=end - start
    )


def _run(first: Moved, nbytes: int) -> Segment:
    return Segment(first.backend, first.file_offset, first.buffer_offset, nbytes, first.reason, first.relayed)
