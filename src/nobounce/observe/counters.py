"""Counters of this process, in shared memory from the start, so that a reader needs nothing from us and a kill loses nothing.

A transfer costs two sequence words, four histogram words and a word per reason, under one lock: a microsecond or two.
What changes is visible at once; there is no thread that gathers anything.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nobounce.config import PUBLISHED, Settings
from nobounce.errors import TransferCancelledError
from nobounce.io.hooks import Observer
from nobounce.observe import layout
from nobounce.observe.histogram import latency_bucket, size_bucket
from nobounce.observe.layout import (
    BACKENDS,
    CODE_COUNT,
    CODE_KIND,
    CODE_NAME_NBYTES,
    CODE_NBYTES,
    CODE_WORDS,
    CODES_AT,
    FLOW_WORDS,
    FLOWS_AT,
    GLOBALS,
    GLOBALS_AT,
    MAGIC,
    MOST_CODES,
    MOST_FLOWS,
    NBYTES,
    OPS,
    REASON,
    REFUSAL,
    VERSION,
    Flag,
    Flow,
    Header,
)

if TYPE_CHECKING:
    from nobounce.io.batch_group import Group
    from nobounce.io.hooks import BatchEnds
    from nobounce.io.job import Job
    from nobounce.io.receipt import Receipt
    from nobounce.route.types import Op, Refusal

SEQUENCE = int(Header.SEQUENCE)
OPERATIONS, NBYTES_AT, TIME, LATENCY = (
    int(Flow.OPERATIONS),
    int(Flow.NBYTES),
    int(Flow.TIME_NS),
    int(Flow.LATENCY),
)
AT = {name: GLOBALS_AT + i for i, name in enumerate(GLOBALS)}
ASYNC_SUBMITTED, ERRORS, RELAYED = AT["async_submitted"], int(Flow.ERRORS), int(Flow.RELAYED_NBYTES)
ASYNC, QUEUED = int(Flow.ASYNC), int(Flow.QUEUED_NS)
# Plain integers: arithmetic on members of an IntEnum takes longer than the counting itself.
CACHED, CACHED_AT = frozenset({"cached", "cache-use"}), int(Flow.CACHED_NBYTES)
MOST_PLACES = 1024
SHORT_LATENCIES = bytes(latency_bucket(us * 1000) for us in range(4096))
OTHERS = "(others)"
UNALIGNED = frozenset({"offset-align", "size-align", "memory-align"})
BY_CHOICE = frozenset(
    {"cached", "cache-use", "required-fallback", "direct-failed", "direct-stalled", "unaligned-edge"}
)
"""Reasons for fallback that are no refusal of the direct path."""


class Counters(Observer):
    """Counts into `memory`, a writable block of `layout.NBYTES` bytes (private memory if none is given)."""

    def __init__(self, settings: Settings, memory: mmap.mmap | None = None) -> None:
        self.memory = memory or mmap.mmap(-1, NBYTES)
        self.words = memoryview(self.memory).cast("Q")
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, str, str], int] = {}
        self._codes: dict[tuple[int, str], int] = {}
        self._places: dict[
            tuple[str, str, str, str, int, bool], tuple[int, int, int, int, int, int, bool]
        ] = {}
        w = self.words
        w[Header.VERSION], w[Header.NBYTES], w[Header.PID] = VERSION, NBYTES, os.getpid()
        w[Header.PARENT] = os.getppid()
        w[Header.LEVEL] = settings.stats_level
        w[Header.STARTED_WALL_NS], w[Header.STARTED_NS] = time.time_ns(), time.monotonic_ns()
        w[Header.SETTINGS] = _flags(settings)
        _put_text(self.memory, Header.NAME, layout.NAME_NBYTES, " ".join(_command()))
        w[Header.MAGIC] = MAGIC

    def block(self) -> bytes:
        """The whole block, not in the middle of a change."""
        with self._lock:
            return bytes(self.words)

    # what is told

    def ended(self, job: Job) -> None:
        receipt, error = job.receipt, job.error
        if error is None and receipt is not None and len(receipt.segments) == 1:
            # The common case, written out: every call and every name looked up is a part of what a transfer pays.
            s = receipt.segments[0]
            nanoseconds = int((receipt.ended_at - receipt.started_at) * 1e9)
            nbytes = s.nbytes
            us = nanoseconds // 1000
            late = SHORT_LATENCIES[us] if us < len(SHORT_LATENCIES) else latency_bucket(nanoseconds)
            key = receipt.device, s.backend, receipt.op, s.reason.code, nbytes, s.relayed
            w = self.words
            with self._lock:
                sequence = w[SEQUENCE]
                w[SEQUENCE] = sequence + 1
                operations, bytes_moved, spent, latencies, pieces, by_reason, plain = self._places.get(
                    key
                ) or self._place(key)
                w[operations] += 1
                w[bytes_moved] += nbytes
                w[spent] += nanoseconds
                w[latencies + late] += 1
                w[pieces] += 1
                w[by_reason] += nbytes
                if job.stream is not None:
                    at = latencies - LATENCY
                    w[ASYNC_SUBMITTED] += 1
                    w[at + ASYNC] += 1
                    w[at + QUEUED] += max(0, int((receipt.started_at - receipt.queued_at) * 1e9))
                if not plain:
                    self._bounced(w, self._flow(*key[:3]), key[3], nbytes, s.relayed)
                if receipt.retries or nbytes < receipt.requested:
                    self._odd(w, self._flow(*key[:3]), receipt, None)
                w[SEQUENCE] = sequence + 2
            return
        op, device = job.target.op, job.target.device_name
        with self._change() as w:
            if job.stream is not None:
                w[ASYNC_SUBMITTED] += 1
            if receipt is not None:
                self._moved(w, op, device, receipt, job)
            if error is not None:
                at = self._flow(device, _backend(error), op)
                w[at + ERRORS + size_bucket(job.requested)] += 1

    def _place(self, key: tuple[str, str, str, str, int, bool]) -> tuple[int, int, int, int, int, int, bool]:
        """The words that a transfer of this size, way and reason counts in, and whether there are no others."""
        device, backend, op, code, nbytes, relayed = key
        at, c = self._flow(device, backend, op), self._code(REASON, code)
        bucket = at + size_bucket(nbytes)
        if len(self._places) >= MOST_PLACES:
            self._places.clear()
        plain = not relayed and code not in CACHED
        made = (
            bucket + OPERATIONS,
            bucket + NBYTES_AT,
            bucket + TIME,
            at + LATENCY,
            c + CODE_COUNT,
            c + CODE_NBYTES,
            plain,
        )
        self._places[key] = made
        return made

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
        at = 0
        for backend, nbytes in sums.items():
            at = self._flow(device, backend, op)
            share = whole * nbytes // receipt.nbytes if receipt.nbytes else whole
            bucket = at + size_bucket(nbytes)
            w[bucket + OPERATIONS] += 1
            w[bucket + NBYTES_AT] += nbytes
            w[bucket + TIME] += share
            w[at + LATENCY + latency_bucket(share)] += 1
        if job.stream is not None:
            w[at + ASYNC] += 1
            w[at + QUEUED] += max(0, int((receipt.started_at - receipt.queued_at) * 1e9))
        self._odd(w, at, receipt, job.error)

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
        with self._change() as w:
            if isinstance(error, TransferCancelledError):
                w[AT["cancelled"]] += 1
                return
            w[AT["refused"]] += 1
            at = self._flow(device, _backend(error), op)
            w[at + Flow.ERRORS + size_bucket(max(0, nbytes))] += 1

    def refused(self, op: Op, device: str, refusals: tuple[Refusal, ...], *, routed: bool) -> None:
        with self._change() as w:
            w[AT["fastpath_rejections"]] += 1
            for refusal in refusals:
                w[self._code(REFUSAL, refusal.code) + CODE_COUNT] += 1
            if routed and any(r.code in UNALIGNED for r in refusals):
                w[self._flow(device, "fallback", op) + Flow.UNALIGNED] += 1

    def registered(self, what: str, ok: bool) -> None:
        at = AT.get(f"{what}_{'ok' if ok else 'err'}")
        if at is not None:
            with self._change() as w:
                w[at] += 1

    def pinned(self, device: str, nbytes: int) -> None:
        with self._change() as w:
            w[AT["bounce_pinned_bytes"]] += nbytes

    def batch_ended(self, group: Group, ends: BatchEnds, status: str, seconds: float) -> None:
        import numpy as np

        op, device = group.op, group.target.device_name
        requested, done, ways = ends.requested, ends.done, ends.ways
        nanoseconds = max(0, int(seconds * 1e9))
        with self._change() as w:
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
                buckets = _buckets(np, part)
                sums = np.bincount(buckets, part, layout.SIZE_BUCKETS).tolist()
                for bucket, n in enumerate(np.bincount(buckets).tolist()):
                    if n:
                        w[at + OPERATIONS + bucket] += n
                        w[at + NBYTES_AT + bucket] += int(sums[bucket])
                        w[at + TIME + bucket] += nanoseconds * n
                w[at + LATENCY + latency_bucket(nanoseconds)] += len(part)

    def _batch_reasons(
        self, w: memoryview, group: Group, device: str, moved: Any, reasons: Any, split: Any
    ) -> None:
        """Bytes of fallback by reason, refusals, and what else the reason says of them."""
        known = group.answer.reason_list
        at = self._flow(device, "fallback", group.op)
        for index, edge in sorted(set(zip(reasons.tolist(), split.tolist(), strict=True))):
            mine = moved[(reasons == index) & (split == edge)]
            nbytes = int(mine.sum())
            code = (
                known[index].code
                if 0 <= index < len(known)
                else "unaligned-edge"
                if edge
                else "direct-failed"
            )
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

    def _flow(self, device: str, backend: str, op: str) -> int:
        found = self._flows.get((device, backend, op))
        return found if found is not None else self._new_flow(device, backend, op)

    def _new_flow(self, device: str, backend: str, op: str) -> int:
        count = len(self._flows)
        if count >= MOST_FLOWS - len(BACKENDS) * len(OPS) and device != OTHERS:
            self.words[AT["dropped_flows"]] += 1
            return self._flow(OTHERS, backend, op)
        at = FLOWS_AT + count * FLOW_WORDS
        self._flows[device, backend, op] = at
        _put_text(self.memory, at, layout.DEVICE_NBYTES, device)
        self.words[at + Flow.BACKEND], self.words[at + Flow.OP] = BACKENDS.index(backend), OPS.index(op)
        self.words[Header.FLOWS] = count + 1
        return at

    def _code(self, kind: int, code: str) -> int:
        found = self._codes.get((kind, code))
        if found is not None:
            return found
        count = len(self._codes)
        if count >= MOST_CODES - 2 and code != OTHERS:
            self.words[AT["dropped_codes"]] += 1
            return self._code(kind, OTHERS)
        at = CODES_AT + count * CODE_WORDS
        self._codes[kind, code] = at
        _put_text(self.memory, at, CODE_NAME_NBYTES, code)
        self.words[at + CODE_KIND] = kind
        self.words[Header.CODES] = count + 1
        return at


class _Change:
    """The lock, and the sequence word around it."""

    __slots__ = ("_counters",)

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> memoryview:
        self._counters._lock.acquire()
        w = self._counters.words
        w[SEQUENCE] += 1
        return w

    def __exit__(self, *_: object) -> None:
        self._counters.words[SEQUENCE] += 1
        self._counters._lock.release()


def _flags(settings: Settings) -> int:
    return (
        Flag.ALLOW_COMPAT_MODE * settings.allow_compat_mode
        | Flag.FORCE_COMPAT_MODE * settings.force_compat_mode
        | Flag.UNSUPPORTED_FILE_SYSTEMS * settings.unsupported_file_systems
        | Flag.PUBLISHED_PROFILE * (settings.profile == PUBLISHED)
    )


def _command() -> list[str]:
    return [os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]] if sys.argv else ["python"]


def _put_text(memory: mmap.mmap, word: int, room: int, text: str) -> None:
    raw = text.encode("utf-8", "replace")[: room - 1]
    memory[word * 8 : word * 8 + len(raw)] = raw


def _buckets(np: Any, sizes: Any) -> Any:
    return np.minimum(
        np.where(sizes < 4096, 0, np.log2(np.maximum(sizes, 1)).astype(np.int64) - 11),
        layout.SIZE_BUCKETS - 1,
    )


def _by_bucket(np: Any, sizes: Any) -> Iterable[tuple[int, int]]:
    return enumerate(np.bincount(_buckets(np, sizes)).tolist())


def _backend(error: BaseException | None) -> str:
    named = getattr(error, "backend", None)
    return named if named in BACKENDS else "fallback"
