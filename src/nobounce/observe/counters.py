"""Counters of this process, in shared memory from the start, so that a reader needs nothing from us
and a kill loses nothing.

A transfer costs two sequence words, its time, its latency and the sums of its kind, under one lock: a
microsecond or two. What changes is visible at once; there is no thread that gathers anything.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nobounce.config import PUBLISHED, Settings
from nobounce.errors import TransferCancelledError
from nobounce.io.hooks import Observer
from nobounce.observe import layout
from nobounce.observe.batches import fallback_code
from nobounce.observe.histogram import latency_bucket, size_bucket
from nobounce.observe.layout import (
    BACKENDS,
    CODE_COUNT,
    CODE_NBYTES,
    MAGIC,
    NBYTES,
    REASON,
    REFUSAL,
    VERSION,
    Flag,
    Flow,
    Header,
)
from nobounce.observe.places import (
    AT,
    CACHED,
    CACHED_AT,
    LATENCY,
    NBYTES_AT,
    OPERATIONS,
    RELAYED,
    TIME,
    UNALIGNED,
    Places,
    put_text,
)

if TYPE_CHECKING:
    from nobounce.io.batch.group import Group
    from nobounce.io.hooks import BatchEnds
    from nobounce.io.job import Job
    from nobounce.io.receipt import Receipt, Segment
    from nobounce.route.types import Op, Refusal

SEQUENCE = int(Header.SEQUENCE)
ASYNC_SUBMITTED, ASYNC, QUEUED, ERRORS = (
    AT["async_submitted"],
    int(Flow.ASYNC),
    int(Flow.QUEUED_NS),
    int(Flow.ERRORS),
)
CODE_OF = attrgetter("code")
SHORT_LATENCIES = bytes(latency_bucket(us * 1000) for us in range(4096))
BY_CHOICE = frozenset(
    {"cached", "cache-use", "required-fallback", "direct-failed", "direct-stalled", "unaligned-edge"}
)
"""Reasons for fallback that are no refusal of the direct path."""


class Counters(Places, Observer):
    """Counts into `memory`, a writable block of `layout.NBYTES` bytes (private memory if none is given)."""

    def __init__(self, settings: Settings, memory: mmap.mmap | None = None) -> None:
        super().__init__(memory or mmap.mmap(-1, NBYTES))
        self._lock = threading.Lock()
        w = self.words
        w[Header.VERSION], w[Header.NBYTES], w[Header.PID] = VERSION, NBYTES, os.getpid()
        w[Header.PARENT] = os.getppid()
        w[Header.LEVEL] = settings.stats_level
        w[Header.STARTED_WALL_NS], w[Header.STARTED_NS] = time.time_ns(), time.monotonic_ns()
        w[Header.SETTINGS] = _flags(settings)
        put_text(self.memory, Header.NAME, layout.NAME_NBYTES, " ".join(_command()))
        w[Header.MAGIC] = MAGIC

    def block(self) -> bytes:
        """The whole block, not in the middle of a change."""
        with self._lock:
            return bytes(self.words)

    # what is told

    def ended(self, job: Job) -> None:
        receipt = job.receipt
        segments = () if receipt is None else receipt.segments
        if receipt is None or job.error is not None or not 0 < len(segments) < 4 or receipt.hole_bytes:
            self._ended_oddly(job)
            return
        # The common cases, written out: every call and every name looked up is a part
        # of what a transfer pays.
        a = segments[0]
        if len(segments) > 1:
            b = segments[1]
            strange = a.backend == b.backend or not receipt.nbytes
            if strange or (len(segments) == 3 and segments[2].reason is not a.reason):
                self._ended_oddly(job)
            else:
                self._split(job, receipt, a, b)
            return
        nanoseconds, nbytes = int((receipt.ended_at - receipt.started_at) * 1e9), a.nbytes
        key = (
            *(receipt.device, receipt.op, a.backend, a.reason.code, nbytes.bit_length(), a.relayed),
            *map(CODE_OF, job.refusals),
        )
        us = nanoseconds // 1000
        late = SHORT_LATENCIES[us] if us < 4096 else latency_bucket(nanoseconds)
        w = self.words
        with self._lock:
            w[SEQUENCE] |= 1
            row, spent, latencies = self._ones.get(key) or self._one(key)
            w[row] += 1
            w[row + 1] += nbytes
            w[spent] += nanoseconds
            w[latencies + late] += 1
            if job.stream is not None:
                self._queued(w, latencies - LATENCY, receipt)
            if receipt.retries or nbytes < receipt.requested:
                self._odd(w, latencies - LATENCY, receipt, None)
            w[SEQUENCE] += 1

    def _split(self, job: Job, receipt: Receipt, a: Segment, b: Segment) -> None:
        """Both ways at once, `a`'s perhaps on both sides of `b`: an operation of each,
        the time shared by bytes."""
        nanoseconds, whole, m = int((receipt.ended_at - receipt.started_at) * 1e9), receipt.nbytes, b.nbytes
        n = whole - m
        late = nanoseconds * m // whole
        soon = nanoseconds - late
        key = (
            *(receipt.device, receipt.op, a.backend, a.reason.code, n.bit_length(), a.relayed),
            *(len(receipt.segments), b.backend, b.reason.code, m.bit_length(), b.relayed),
            *map(CODE_OF, job.refusals),
        )
        w = self.words
        with self._lock:
            w[SEQUENCE] |= 1
            row, spent_a, spent_b, late_a, late_b = self._twos.get(key) or self._two(key)
            w[row] += 1
            w[row + 1] += n
            w[row + 2] += m
            w[spent_a] += soon
            w[spent_b] += late
            us = soon // 1000
            w[late_a + (SHORT_LATENCIES[us] if us < 4096 else latency_bucket(soon))] += 1
            us = late // 1000
            w[late_b + (SHORT_LATENCIES[us] if us < 4096 else latency_bucket(late))] += 1
            if job.stream is not None:
                self._queued(w, late_b - LATENCY, receipt)
            if receipt.retries or whole < receipt.requested:
                self._odd(w, late_b - LATENCY, receipt, None)
            w[SEQUENCE] += 1

    def _queued(self, w: memoryview, at: int, receipt: Receipt) -> None:
        w[ASYNC_SUBMITTED] += 1
        w[at + ASYNC] += 1
        w[at + QUEUED] += max(0, int((receipt.started_at - receipt.queued_at) * 1e9))

    def _ended_oddly(self, job: Job) -> None:
        """Failed, empty or many ways at once: what need not be quick."""
        receipt, error = job.receipt, job.error
        op, device = job.target.op, job.target.device_name
        with self._lock, self._change() as w:
            if job.stream is not None:
                w[ASYNC_SUBMITTED] += 1
            if receipt is not None:
                self._moved(w, op, device, receipt, job)
            if error is not None:
                at = self._flow(device, _backend(error), op)
                w[at + ERRORS + size_bucket(job.requested)] += 1
            for at in self._refusal(device, op, [r.code for r in job.refusals]):
                w[at] += 1

    def _moved(self, w: memoryview, op: str, device: str, receipt: Receipt, job: Job) -> None:
        whole = int((receipt.ended_at - receipt.started_at) * 1e9)
        sums: dict[str, int] = {}
        for s in receipt.segments:
            sums[s.backend] = sums.get(s.backend, 0) + s.nbytes
            c = self._code(REASON, s.reason.code)
            w[c + CODE_COUNT] += 1
            w[c + CODE_NBYTES] += s.nbytes
            if s.reason.code != "direct":
                self._bounced(w, self._flow(device, s.backend, op), s.reason.code, s.nbytes, s.relayed)
        if not sums:
            if job.error is not None:
                return
            sums = {"fallback" if job.direct_nbytes == 0 else "fastpath": 0}
        shares = {b: whole * n // receipt.nbytes if receipt.nbytes else 0 for b, n in sums.items()}
        shares[next(iter(sums))] += whole - sum(shares.values())  # so that no time is lost by rounding
        at = 0
        for backend, nbytes in sums.items():
            at = self._flow(device, backend, op)
            share = shares[backend]
            bucket = at + size_bucket(nbytes)
            w[bucket + OPERATIONS] += 1
            w[bucket + NBYTES_AT] += nbytes
            w[bucket + TIME] += share
            w[at + LATENCY + latency_bucket(share)] += 1
        if job.stream is not None:
            w[at + ASYNC] += 1
            w[at + QUEUED] += max(0, int((receipt.started_at - receipt.queued_at) * 1e9))
        self._odd(w, at, receipt, job.error)
        w[AT["hole_read_bytes"]] += receipt.hole_bytes

    def _odd(self, w: memoryview, at: int, receipt: Receipt, error: BaseException | None) -> None:
        if receipt.retries:
            w[self._flow(receipt.device, "fastpath", receipt.op) + Flow.RETRIES] += len(receipt.retries)
        if receipt.nbytes < receipt.requested and error is None:
            w[at + Flow.SHORT] += 1

    def _bounced(self, w: memoryview, at: int, code: str, nbytes: int, relayed: bool) -> None:
        if relayed:
            w[at + RELAYED] += nbytes
        if code in CACHED:
            w[at + CACHED_AT] += nbytes

    def unstarted(
        self, op: Op, device: str, nbytes: int, stream: int | None, error: BaseException | None
    ) -> None:
        with self._lock, self._change() as w:
            if isinstance(error, TransferCancelledError):
                w[AT["cancelled"]] += 1
                return
            w[AT["refused"]] += 1
            at = self._flow(device, _backend(error), op)
            w[at + Flow.ERRORS + size_bucket(max(0, nbytes))] += 1

    def refused(self, op: Op, device: str, refusals: tuple[Refusal, ...], *, routed: bool) -> None:
        with self._lock, self._change() as w:
            words = self._refusal(device, op, [r.code for r in refusals])
            for at in words if routed else words[: len(refusals) + 1]:  # unaligned is a count of fallback's
                w[at] += 1

    def lost(self) -> None:
        with self._lock, self._change() as w:
            w[AT["unretrieved_errors"]] += 1

    def registered(self, what: str, ok: bool) -> None:
        at = AT.get(f"{what}_{'ok' if ok else 'err'}")
        if at is not None:
            with self._lock, self._change() as w:
                w[at] += 1

    def pinned(self, device: str, nbytes: int) -> None:
        with self._lock, self._change() as w:
            w[AT["bounce_pinned_bytes"]] += nbytes

    def batch_ended(self, group: Group, ends: BatchEnds, status: str, seconds: float) -> None:
        import numpy as np

        op, device = group.op, group.target.device_name
        requested, done, ways = ends.requested, ends.done, ends.ways
        nanoseconds = max(0, int(seconds * 1e9))
        with self._lock, self._change() as w:
            name = AT.get(f"batch_requests_{status}")
            if name is not None:
                w[name] += len(done)
            if status != "complete":
                if status in ("failed", "timeout"):
                    at = self._flow(device, "fallback" if not ways.any() else BACKENDS[0], op)
                    for bucket, n in _by_bucket(np, requested):
                        w[at + Flow.ERRORS + bucket] += n
                return
            total = int(done.sum())
            w[AT[f"batch_{op}_bytes"]] += total
            w[AT[f"last_batch_{op}_bytes"]] = total
            w[AT["batch_time_ns"]] += nanoseconds
            w[AT["hole_read_bytes"]] += ends.holes
            bounced = (ways & 2) != 0
            for backend, chosen, moved in (
                ("fastpath", ((ways & 1) != 0) | ~bounced, ends.direct),
                ("fallback", bounced, done - ends.direct),
            ):
                part = moved[chosen]
                if not len(part):
                    continue
                if backend == "fastpath":
                    c = self._code(REASON, "direct")
                    w[c + CODE_COUNT] += len(part)
                    w[c + CODE_NBYTES] += int(part.sum())
                else:
                    self._batch_reasons(w, group, device, part, ends.reasons[chosen], ends.split[chosen])
                at = self._flow(device, backend, op)
                for bucket, n, nbytes in _sums(np, part):
                    w[at + OPERATIONS + bucket] += n
                    w[at + NBYTES_AT + bucket] += nbytes
                    w[at + TIME + bucket] += nanoseconds * n
                w[at + LATENCY + latency_bucket(nanoseconds)] += len(part)

    def batch_refused(self, group: Group, refusals: tuple[Refusal, ...], count: int) -> None:
        with self._lock, self._change() as w:
            w[AT["refused"]] += count
            for at in self._refusal(group.target.device_name, group.op, [r.code for r in refusals])[
                : len(refusals) + 1
            ]:
                w[at] += count

    def _batch_reasons(
        self, w: memoryview, group: Group, device: str, moved: Any, reasons: Any, split: Any
    ) -> None:
        """Bytes of fallback by reason, refusals, and what else the reason says of them."""
        at = self._flow(device, "fallback", group.op)
        for index, edge in kinds(reasons, split):
            mine = moved[(reasons == index) & (split == edge)]
            nbytes = int(mine.sum())
            code = fallback_code(group, index, edge)
            c = self._code(REASON, code)
            w[c + CODE_COUNT] += len(mine)
            w[c + CODE_NBYTES] += nbytes
            if code not in BY_CHOICE:
                w[AT["fastpath_rejections"]] += len(mine)
                w[self._code(REFUSAL, code) + CODE_COUNT] += len(mine)
            if code == "direct-failed":
                w[self._flow(device, "fastpath", group.op) + Flow.RETRIES] += len(mine)
            elif code in UNALIGNED or code == "unaligned-edge":
                w[at + Flow.UNALIGNED] += len(mine)
            elif code in CACHED:
                w[at + Flow.CACHED_NBYTES] += nbytes
            if group.target.ring is not None:
                w[at + Flow.RELAYED_NBYTES] += nbytes

    # places

    def _change(self) -> _Change:
        return _Change(self)


class _Change:
    """The sequence word around a change; the lock is held.

    Not taken here: Ctrl-C between a method of ours and the lock would leave it locked. Where it hits the
    word, the next change puts that right.
    """

    __slots__ = ("_counters",)

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> memoryview:
        w = self._counters.words
        w[SEQUENCE] |= 1
        return w

    def __exit__(self, *_: object) -> None:
        w = self._counters.words
        w[SEQUENCE] = (w[SEQUENCE] | 1) + 1


def _flags(settings: Settings) -> int:
    return (
        Flag.ALLOW_COMPAT_MODE * settings.allow_compat_mode
        | Flag.FORCE_COMPAT_MODE * settings.force_compat_mode
        | Flag.UNSUPPORTED_FILE_SYSTEMS * settings.unsupported_file_systems
        | Flag.PUBLISHED_PROFILE * (settings.profile == PUBLISHED)
    )


def _command() -> list[str]:
    return [os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]] if sys.argv else ["python"]


def _buckets(np: Any, sizes: Any) -> Any:
    return np.minimum(
        np.where(sizes < 4096, 0, np.log2(np.maximum(sizes, 1)).astype(np.int64) - 11),
        layout.SIZE_BUCKETS - 1,
    )


def _sums(np: Any, sizes: Any) -> list[tuple[int, int, int]]:
    """(bucket, count, bytes) of each that there is."""
    if int(sizes.min()) == int(sizes.max()):
        return [(size_bucket(int(sizes[0])), len(sizes), int(sizes[0]) * len(sizes))]
    buckets = _buckets(np, sizes)
    sums = np.bincount(buckets, sizes, layout.SIZE_BUCKETS).tolist()
    counts = enumerate(np.bincount(buckets).tolist())
    return [(bucket, n, int(sums[bucket])) for bucket, n in counts if n]


def kinds(reasons: Any, split: Any) -> list[tuple[int, bool]]:
    """The pairs that there are, in order; both arrays are of one length."""
    import numpy as np

    packed = np.unique(reasons.astype(np.int32) * 2 + split)
    return [(one >> 1, bool(one & 1)) for one in packed.tolist()]


def _by_bucket(np: Any, sizes: Any) -> Iterable[tuple[int, int]]:
    return enumerate(np.bincount(_buckets(np, sizes)).tolist())


def _backend(error: BaseException | None) -> str:
    named = getattr(error, "backend", None)
    return named if named in BACKENDS else "fallback"
