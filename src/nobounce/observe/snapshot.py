"""Statistics as values: frozen snapshots that can be subtracted (an interval) and
added (several processes)."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nobounce.errors import FormatError, printable
from nobounce.observe import layout
from nobounce.observe.histogram import quantile
from nobounce.observe.layout import BACKENDS, GLOBALS, OPS, SIZE_BUCKETS, Flag, Header
from nobounce.observe.layout import Flow as Place

Numbers = tuple[int, ...]
NO_SIZES: Numbers = (0,) * SIZE_BUCKETS
NO_LATENCIES: Numbers = (0,) * layout.LATENCY_BUCKETS


@dataclass(frozen=True, slots=True)
class Flow:
    """What moved between storage and one device, one way (backend) and in one direction (op).

    The first four are histograms of 16 buckets by size (hipFile F-4): operations, bytes, nanoseconds
    from the start of a transfer to its end, and errors, by the bytes asked for. `latencies` counts
    operations by `histogram.latency_floor`. A transfer that went both ways is one operation in each
    flow, its time split by bytes.
    """

    device: str
    backend: str
    op: str
    operations_by_size: Numbers = NO_SIZES
    nbytes_by_size: Numbers = NO_SIZES
    nanoseconds_by_size: Numbers = NO_SIZES
    errors_by_size: Numbers = NO_SIZES
    latencies: Numbers = NO_LATENCIES
    unaligned: int = 0
    retries: int = 0
    async_operations: int = 0
    relayed_bytes: int = 0
    cached_bytes: int = 0
    queued_nanoseconds: int = 0
    short: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.device, self.backend, self.op

    @property
    def operations(self) -> int:
        return sum(self.operations_by_size)

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return sum(self.nbytes_by_size)

    @property
    def errors(self) -> int:
        return sum(self.errors_by_size)

    @property
    def seconds(self) -> float:
        """Sum of the operations' own times; operations side by side count each."""
        return sum(self.nanoseconds_by_size) / 1e9

    @property
    def bandwidth(self) -> float:
        """Bytes per second of operation time (hipFile F-14: not the aggregate rate); 0 without time."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def mean_latency(self) -> float:
        """Seconds; 0 without operations."""
        return self.seconds / self.operations if self.operations else 0.0

    def latency(self, share: float) -> float:
        """The seconds that `share` (0 to 1) of the operations stay within, to a bucket's width."""
        return quantile(self.latencies, share)

    def combine(self, other: Flow, how: Callable[[int, int], int]) -> Flow:
        """Each number of this and the other, put together by `how`."""
        values: dict[str, Any] = {}
        for f in fields(self)[3:]:
            a, b = getattr(self, f.name), getattr(other, f.name)
            values[f.name] = (
                tuple(how(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else how(a, b)
            )
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "backend": self.backend,
            "op": self.op,
            "operations": self.operations,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "errors": self.errors,
            "retries": self.retries,
            "unaligned": self.unaligned,
            "short": self.short,
            "async_operations": self.async_operations,
            "queued_seconds": self.queued_nanoseconds / 1e9,
            "relayed_bytes": self.relayed_bytes,
            "cached_bytes": self.cached_bytes,
            "bytes_per_second_of_operation": self.bandwidth,
            "latency": {
                "mean": self.mean_latency,
                **{name: self.latency(q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
            },
            "by_size": {
                "operations": list(self.operations_by_size),
                "nbytes": list(self.nbytes_by_size),
                "microseconds": [n // 1000 for n in self.nanoseconds_by_size],
                "errors": list(self.errors_by_size),
            },
        }


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a process at one moment; of an interval, as a difference; of several processes, as a sum.

    `counters` are the process-wide numbers by name, `refusals` counts the direct path's refusals by code,
    `reasons` has (transfers or segments, bytes) by reason code. `seconds` is wall-clock time: since the first
    I/O, or the interval's. Raises nothing; a level of 0 is a snapshot with nothing in it.
    """

    level: int = 0
    pids: tuple[int, ...] = ()
    command: str = ""
    started: float = 0.0
    taken: float = 0.0
    seconds: float = 0.0
    settings: int = Flag.ALLOW_COMPAT_MODE
    flows: tuple[Flow, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, tuple[int, int]] = field(default_factory=dict)
    torn: bool = False
    """Taken in the middle of a change that never ended: a process killed just there. Off by one transfer, or
    very rarely by the transfers of one kind (device, way, reason and size)."""

    def flow(self, *, device: str | None = None, backend: str | None = None, op: str | None = None) -> Flow:
        """The sum of the flows that match."""
        found = Flow(device or "", backend or "", op or "")
        for f in self.flows:
            if all(w is None or w == v for w, v in zip((device, backend, op), f.key, strict=True)):
                found = found.combine(f, lambda a, b: a + b)
        return found

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({f.device for f in self.flows}))

    @property
    def fastpath_bytes(self) -> int:
        return self.flow(backend="fastpath").nbytes

    @property
    def fallback_bytes(self) -> int:
        return self.flow(backend="fallback").nbytes

    @property
    def cached_bytes(self) -> int:
        """The part of fallback that came from the page cache by choice."""
        return self.flow(backend="fallback").cached_bytes

    @property
    def host_traffic_bytes(self) -> int:
        """Logical writes and reads of host memory that relaying cost."""
        return 2 * self.flow().relayed_bytes

    @property
    def errors(self) -> int:
        return self.flow().errors

    @property
    def allow_compat_mode(self) -> bool:
        return bool(self.settings & Flag.ALLOW_COMPAT_MODE)

    @property
    def force_compat_mode(self) -> bool:
        return bool(self.settings & Flag.FORCE_COMPAT_MODE)

    def __sub__(self, earlier: Stats) -> Stats:
        """What happened between two snapshots of the same processes."""
        return self._combine(earlier, lambda a, b: max(0, a - b), self.taken - earlier.taken)

    def __add__(self, other: Stats) -> Stats:
        """Two processes together; the time is from the first start to the last look."""
        both = self._combine(other, lambda a, b: a + b, 0.0)
        started, taken = min(self.started, other.started), max(self.taken, other.taken)
        named = [s.command for s in (self, other) if s.command]
        return replace(
            both,
            level=max(self.level, other.level),
            pids=tuple(dict.fromkeys((*self.pids, *other.pids))),
            command=named[0] if len(set(named)) == 1 else ", ".join(dict.fromkeys(named)),
            started=started,
            taken=taken,
            seconds=max(0.0, taken - started),
            torn=self.torn or other.torn,
        )

    def _combine(self, other: Stats, how: Callable[[int, int], int], seconds: float) -> Stats:
        theirs = {f.key: f for f in other.flows}
        mine = {f.key: f for f in self.flows}
        keys = dict.fromkeys((*mine, *theirs))
        flows = tuple(mine.get(k, Flow(*k)).combine(theirs.get(k, Flow(*k)), how) for k in sorted(keys))
        names = dict.fromkeys((*self.refusals, *other.refusals))
        reasons = dict.fromkeys((*self.reasons, *other.reasons))
        zero = (0, 0)
        return replace(
            self,
            seconds=seconds,
            flows=flows,
            counters={
                n: how(self.counters.get(n, 0), other.counters.get(n, 0))
                for n in dict.fromkeys((*self.counters, *other.counters))
            },
            refusals={n: how(self.refusals.get(n, 0), other.refusals.get(n, 0)) for n in names},
            reasons={
                n: (
                    how(self.reasons.get(n, zero)[0], other.reasons.get(n, zero)[0]),
                    how(self.reasons.get(n, zero)[1], other.reasons.get(n, zero)[1]),
                )
                for n in reasons
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """As --json prints it (docs/observe.md)."""
        return {
            "pids": list(self.pids),
            "command": self.command,
            "level": self.level,
            "allow_compat_mode": self.allow_compat_mode,
            "force_compat_mode": self.force_compat_mode,
            "seconds": self.seconds,
            "fastpath_bytes": self.fastpath_bytes,
            "fallback_bytes": self.fallback_bytes,
            "cached_bytes": self.cached_bytes,
            "host_traffic_bytes": self.host_traffic_bytes,
            "errors": self.errors,
            "torn": self.torn,
            "counters": dict(self.counters),
            "refusals": dict(self.refusals),
            "reasons": {k: {"count": n, "nbytes": b} for k, (n, b) in self.reasons.items()},
            "flows": [f.to_dict() for f in self.flows],
        }


def stats() -> Stats:
    """This process's statistics since its first I/O: frozen, subtractable. Empty while nothing was counted.

        before = nobounce.stats()
        ...
        print((nobounce.stats() - before).fastpath_bytes)

    Raises ConfigError for a setting that makes no sense.
    """
    from nobounce.config import settings
    from nobounce.observe import start

    counters = start.counters()
    if counters is None:
        return Stats(level=settings().stats_level, pids=(os.getpid(),))
    return parse(counters.block(), pid=os.getpid())


def total(parts: Iterable[Stats]) -> Stats:
    """The sum of several processes; empty for none."""
    result: Stats | None = None
    for part in parts:
        result = part if result is None else result + part
    return result or Stats()


def parse(block: bytes, *, pid: int | None = None, torn: bool = False) -> Stats:
    """A snapshot from a block of shared memory, which may be anybody's: every number is
    checked before it is used.

    `pid` is the process's number here; in a container it calls itself by another, which the block has.
    Raises FormatError for what cannot have been written by this version.
    """
    if len(block) != layout.NBYTES:
        raise FormatError(f"a statistics block has {layout.NBYTES} bytes, not {len(block)}")
    raw = struct.unpack(f"<{layout.WORDS}Q", block)
    w = raw
    if (w[Header.MAGIC], w[Header.VERSION], w[Header.NBYTES]) != (
        layout.MAGIC,
        layout.VERSION,
        layout.NBYTES,
    ):
        raise FormatError("not a statistics block of this version of nobounce")
    flows, codes = w[Header.FLOWS], w[Header.CODES]
    if flows > layout.MOST_FLOWS or codes > layout.MOST_CODES or w[Header.LEVEL] > 3:
        raise FormatError(
            f"the statistics block claims {flows} flows and {codes} codes at level {w[Header.LEVEL]}"
        )
    try:
        w = _added_up(raw)
    except ValueError as e:
        raise FormatError(f"the statistics block has {e}") from e
    now, started = time.monotonic_ns(), w[Header.STARTED_NS]
    if started > now:
        raise FormatError("the statistics block was started in the future")
    refusals: dict[str, int] = {}
    reasons: dict[str, tuple[int, int]] = {}
    for i in range(codes):
        at = layout.CODES_AT + i * layout.CODE_WORDS
        name = _text(block, at, layout.CODE_NAME_NBYTES)
        kind, count, nbytes = w[at + layout.CODE_KIND], w[at + layout.CODE_COUNT], w[at + layout.CODE_NBYTES]
        if kind == layout.REFUSAL:
            refusals[name] = refusals.get(name, 0) + count
        elif kind == layout.REASON:
            old = reasons.get(name, (0, 0))
            reasons[name] = (old[0] + count, old[1] + nbytes)
        else:
            raise FormatError(f"the statistics block has a code of kind {kind}")
    return Stats(
        level=w[Header.LEVEL],
        pids=(pid or w[Header.PID],),
        command=_text(block, Header.NAME, layout.NAME_NBYTES),
        started=started / 1e9,
        taken=now / 1e9,
        seconds=(now - started) / 1e9,
        settings=w[Header.SETTINGS],
        flows=tuple(sorted((_flow(block, w, i) for i in range(flows)), key=lambda f: f.key)),
        counters={name: w[layout.GLOBALS_AT + i] for i, name in enumerate(GLOBALS)},
        refusals=refusals,
        reasons=reasons,
        torn=torn,
    )


def _added_up(raw: Numbers) -> Numbers:
    words = list(raw[: layout.ROWS_AT])
    for word, value in layout.additions(raw):
        words[word] += value
    return tuple(words)


def _flow(block: bytes, w: Numbers, i: int) -> Flow:
    at = layout.FLOWS_AT + i * layout.FLOW_WORDS
    backend, op = w[at + Place.BACKEND], w[at + Place.OP]
    if backend >= len(BACKENDS) or op >= len(OPS):
        raise FormatError(f"the statistics block has a flow of backend {backend} and direction {op}")

    def sizes(word: Place) -> Numbers:
        return w[at + word : at + word + SIZE_BUCKETS]

    return Flow(
        _text(block, at, layout.DEVICE_NBYTES),
        BACKENDS[backend],
        OPS[op],
        operations_by_size=sizes(Place.OPERATIONS),
        nbytes_by_size=sizes(Place.NBYTES),
        nanoseconds_by_size=sizes(Place.TIME_NS),
        errors_by_size=sizes(Place.ERRORS),
        latencies=w[at + Place.LATENCY : at + Place.LATENCY + layout.LATENCY_BUCKETS],
        unaligned=w[at + Place.UNALIGNED],
        retries=w[at + Place.RETRIES],
        async_operations=w[at + Place.ASYNC],
        relayed_bytes=w[at + Place.RELAYED_NBYTES],
        cached_bytes=w[at + Place.CACHED_NBYTES],
        queued_nanoseconds=w[at + Place.QUEUED_NS],
        short=w[at + Place.SHORT],
    )


def _text(block: bytes, word: int, room: int) -> str:
    raw = block[word * layout.WORD : word * layout.WORD + room]
    return printable(raw.split(b"\0", 1)[0].decode("utf-8", "replace"))
