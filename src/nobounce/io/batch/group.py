"""What the requests of one call share: the file, the buffer, the facts, and the judge's answer to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nobounce import reaper
from nobounce.clock import THREADS, Scheduler
from nobounce.config import settings
from nobounce.errors import InternalError, NobounceError, RouteError
from nobounce.facts.pagecache import counted, residency
from nobounce.io.engine import Engine
from nobounce.io.evidence import MIN_NBYTES, SERVED, Range, denied, served_by_cache
from nobounce.io.kept import plain_target
from nobounce.io.movers.gather import NOWAIT
from nobounce.io.plan import cached_ranges
from nobounce.io.prepare import (
    make_request,
    make_target,
    memory_of,
    relay_alignment,
    ring_for,
    with_indirect,
)
from nobounce.io.strategy import (
    EACH_ROW,
    FEW_ROWS,
    GATHERED_NBYTES,
    SAMPLED_ROWS,
    URING_NBYTES,
    one_of_many,
)
from nobounce.io.target import Chunk, Piece, cut
from nobounce.records import replace
from nobounce.route import many
from nobounce.route.judge import CACHED, DIRECT, judge
from nobounce.route.types import Cache, CachedRange, Op, Refusal, Request, Require
from nobounce.runtimes import faults

if TYPE_CHECKING:
    import numpy as np

    from nobounce.buffer import Buffer
    from nobounce.io.file import File

    Array = np.ndarray[Any, Any]

READ_AHEAD = 8 << 20
HELD = CACHED, SERVED
"""The reasons of reads that begin with what the page cache holds and nothing else known."""


class Group:
    """One call of `Batch.read` or `Batch.write`. Holds file and buffer until its last request has ended."""

    def __init__(
        self,
        file: File,
        op: Op,
        view: Buffer,
        where: tuple[Array, Array, Array],
        require: Require,
        cache: Cache,
        pool: Engine,
    ) -> None:
        """Raises ArgumentError, ConfigError, ClosedError, FileError; nothing is held then."""
        self.file, self.view, self.op = file, view, op
        self._require, self.cache, self._pool = require, cache, pool
        self._born = reaper.generation()
        self.file_offset, self.nbytes, self.buffer_offset = where
        self.settings = settings()
        real = pool.scheduler is THREADS and not faults.ACTIVE
        self.most_gathered = GATHERED_NBYTES if real else 0
        """Bytes of a request that is read or written as one of many; 0: none is."""
        self.nowait = bool(NOWAIT)
        """Whether the file system reads what the page cache holds and no more, where it is asked to."""
        self.scheduler: Scheduler = pool.scheduler
        self._lock = pool.scheduler.lock()
        self.direct_errno: int | None = None
        self._cold: list[CachedRange] | None = None
        self._before: dict[Range, int] = {}
        self.denied_nbytes = 0
        """Bytes that `finish` found not to have gone direct."""
        self.resident_before: int | None = None
        self.grew = False
        self.left = 0
        self.submitted_at = self.scheduler.now()
        self._request: Request | None = None
        self._begun_held = False
        self.cached_reason, self.served_reason = 0, 1
        """Indices of two reasons: what the page cache holds, taken by choice (-2: there is none),
        and what it served unasked."""
        file._enter()
        try:
            view._acquire()
        except BaseException:
            file._leave()
            raise
        self.held = True
        try:
            if not self._is_held_whole():
                self.learn()
        except BaseException:
            self.release()
            raise

    def _is_held_whole(self) -> bool:
        """Whether these few reads, of a file of which nothing is known, find every byte in the page cache:
        nothing else has to be learnt of it then."""
        import numpy as np

        count = len(self.nbytes)
        if (
            not 0 < count <= FEW_ROWS
            or self.file._facts is not None
            or not self._may_ask()
            or not self.most_gathered
            or not self.settings.allow_compat_mode
        ):
            return False
        if max(int(self.file_offset.max()), int(self.buffer_offset.max())) > 1 << 62:
            return False  # sums of these would not be what they seem
        ends = self.buffer_offset + self.nbytes
        if int(self.nbytes.max()) > self.most_gathered or int(ends.max()) > self.view.nbytes:
            return False
        if min(int(c.min()) for c in (self.nbytes - 1, self.buffer_offset, self.file_offset)) < 0:
            return False
        if not bool((self._ask(np.arange(count)) == many.ALL).all()):
            return False
        kinds, reasons = np.full(count, many.WHOLE, np.uint8), np.zeros(count, np.int8)
        self.answer = many.Answer(kinds, reasons, HELD)
        self._begun_held = True
        self.target = plain_target(
            self.file, self.view, ring_for(self.view, self.view.memory_kind, self._pool)
        )
        self.plain = self.watch = self.checked = False
        self.direct_nbytes, self.span = 0, (0, 0)
        return True

    @property
    def request(self) -> Request:
        """A request of the group, without its place."""
        if self._request is None:
            self.learn()
        request = self._request
        if request is None:
            raise InternalError("a group without facts")
        return request

    def learn(self) -> None:
        """Everything that the ways of the requests depend on."""
        import numpy as np

        if self._request is not None:
            return
        file, view, op = self.file, self.view, self.op
        whole = make_request(file, op, memory_of(view), view.device, (0, 0, 0), self._require, self.cache)
        hull = max(0, int(self.file_offset.min())) if len(self.nbytes) else 0
        end = int(self.file_offset.max()) + int(self.nbytes.max()) if len(self.nbytes) else 0
        self._request = with_indirect(file, whole, hull, end - hull)
        where = self.file_offset, self.nbytes, self.buffer_offset
        begun = self._begun_held
        answer = many.judge_many(self._request, *where, cached=None if begun else self._cached())
        if begun:  # its rows name those two
            reasons = np.where(answer.reasons >= 0, answer.reasons + len(HELD), -1).astype(np.int8)
            self.answer = replace(answer, reasons=reasons, reason_list=(*HELD, *answer.reason_list))
        else:
            self.cached_reason = len(answer.reason_list) - 1 if answer.cold_kinds is not None else -2
            self.answer = replace(answer, reason_list=(*answer.reason_list, SERVED))
            self.served_reason = len(answer.reason_list)
        kinds = answer.kinds
        direct = any(
            bool(((k == many.DIRECT) | (k == many.SPLIT)).any())
            for k in (kinds, answer.cold_kinds)
            if k is not None
        )
        ring = ring_for(view, whole.memory.kind, self._pool)
        self.target = make_target(file, whole, view, ring, one_of_many(whole.settings), direct=direct)
        if ring is not None and (align := relay_alignment(file, whole)):
            self.target.relay_fd, self.target.relay_align = file._descriptor("direct"), align
        self.plain = direct and self.target.direct is not None and self.target.direct.plain
        self.direct_nbytes = int(self.nbytes[kinds == many.DIRECT].sum())
        self.watch = self.direct_nbytes >= MIN_NBYTES
        self.checked = direct and not self.target.vouched and op == "read"
        """Whether each read is checked against the page cache as it ends."""
        self.span = self._span()

    def missed(self, rows: Array) -> tuple[Array, Array]:
        """(kinds, reasons) of requests that the page cache does not hold after all."""
        self.learn()
        answer = self.answer
        if answer.cold_kinds is None or answer.cold_reasons is None:
            return answer.kinds[rows], answer.reasons[rows]
        return answer.cold_kinds[rows], answer.cold_reasons[rows]

    def _may_ask(self) -> bool:
        """Whether the ways of these requests depend on the page cache."""
        asks = self.cache == "auto" and self.op == "read" and self._require == "auto"
        return asks and not self.settings.force_compat_mode

    def _direct_ranges(self) -> list[Range]:
        direct = self.answer.kinds == many.DIRECT
        return list(zip(self.file_offset[direct].tolist(), self.nbytes[direct].tolist(), strict=True))

    def _span(self) -> tuple[int, int]:
        moving = (self.answer.kinds != many.INVALID) & (self.answer.kinds != many.REFUSED)
        if not moving.any():
            return 0, 0
        start = int(self.file_offset[moving].min())
        return start, int((self.file_offset[moving] + self.nbytes[moving]).max()) - start

    def _cached(self) -> Array | None:
        """For cache="auto": what the page cache holds of each request (many.NONE, SOME or ALL).

        Of many, a few are asked. Where all of those are there, or none, the others are taken to be alike:
        reads will tell of those that are not there, and a direct read of one that is brings the same bytes.
        """
        import numpy as np

        count = len(self.nbytes)
        if not self._may_ask() or not count:
            return None
        chosen = np.arange(count)
        if self.nowait and count > EACH_ROW and int(self.nbytes.max()) <= self.most_gathered:
            some = self._ask(chosen[:: max(1, count // SAMPLED_ROWS)])
            if (some == some[0]).all() and some[0] != many.SOME:
                return np.full(count, some[0], np.uint8)
        return self._ask(chosen)

    def holds(self, rows: Array) -> Array:
        """Of which of these requests the page cache holds every byte."""
        held: Array = self._ask(rows) == many.ALL
        return held

    def _ask(self, rows: Array) -> Array:
        import numpy as np

        fd, size = self.file.fileno(), self.file.nbytes
        held = np.full(len(rows), many.ALL, np.uint8)
        places = zip(self.file_offset[rows].tolist(), self.nbytes[rows].tolist(), strict=True)
        for i, (file_offset, nbytes) in enumerate(places):
            there = min(nbytes, size - file_offset)
            if there > 0 and file_offset >= 0:  # else nothing will be read
                found = residency(fd, file_offset, there).resident_bytes or 0
                held[i] = many.ALL if found >= there else many.SOME if found else many.NONE
        return held

    def error_at(self, index: int) -> NobounceError | None:
        """What the judge raises for request `index` of the call."""
        place = (int(self.file_offset[index]), int(self.nbytes[index]), int(self.buffer_offset[index]))
        return self.error_of(*place)

    def refusals(self) -> list[tuple[tuple[Refusal, ...], int]]:
        """Why requests of the call have no backend, and how many alike: at most one entry per
        set of missed conditions."""
        import numpy as np

        refused = np.flatnonzero(self.answer.kinds == many.REFUSED)
        if not len(refused):
            return []
        alike = many.misses(
            self.request, *(p[refused] for p in (self.file_offset, self.nbytes, self.buffer_offset))
        )
        found = []
        for value in [0] if self.answer.hopeless else np.unique(alike).tolist():
            mine = refused if self.answer.hopeless else refused[alike == value]
            error = self.error_at(int(mine[0]))
            if isinstance(error, RouteError):
                found.append((error.refusals, len(mine)))
        return found

    def error_of(self, file_offset: int, nbytes: int, buffer_offset: int) -> NobounceError | None:
        """What the judge raises for a request at this place."""
        return many.error_of(many.place(self.request, file_offset, nbytes, buffer_offset))

    def chunks(
        self, kind: int, reason: int, file_offset: int, nbytes: int, buffer_offset: int
    ) -> list[Chunk]:
        """One request cut into what a thread moves at a time, in the order it must be moved in."""
        if kind == many.DIRECT and nbytes <= URING_NBYTES:
            return [Chunk("fastpath", file_offset, buffer_offset, nbytes, DIRECT)]
        if kind == many.WHOLE:
            return [Chunk("fallback", file_offset, buffer_offset, nbytes, self.answer.reason_list[reason])]
        request = many.place(self.request, file_offset, nbytes, buffer_offset)
        if request.cache == "auto" and request.op == "read":
            held = cached_ranges(self.file.fileno(), file_offset, nbytes)
            request = many.place(self.request, file_offset, nbytes, buffer_offset, held)
        chunks, epilogue = cut(judge(request), self.op, self.target.strategy)
        return chunks + epilogue

    # the page cache

    def note_cold(self) -> None:
        """Before fallback reads with cache="avoid": what the page cache does not hold, to be
        dropped again at the end."""
        t = self.target
        if self.op != "read" or not t.drop_cache:
            return
        with self._lock:
            if self._cold is not None:
                return
            start, nbytes = self.span
            if residency(t.buffered_fd, start, nbytes + READ_AHEAD).resident_bytes == 0:
                self._cold = [CachedRange(start, nbytes + READ_AHEAD, False)]
            else:
                self._cold = [
                    r
                    for o, n in zip(self.file_offset.tolist(), self.nbytes.tolist(), strict=True)
                    if n > 0 and o >= 0
                    for r in cached_ranges(t.buffered_fd, o, n)
                    if r.resident is False
                ]
            t.before_cold(self._cold)

    def resident(self) -> int | None:
        """Bytes of the file's span in the page cache, None where they cannot be counted."""
        if self.target.buffered_fd < 0:
            return None
        return counted(self.target.buffered_fd, *self.span).resident_bytes

    # what the kernel denies

    def note_before(self) -> None:
        """Before the requests start: what the page cache holds of each, where each is checked."""
        if self.checked:
            fd = self.target.buffered_fd
            for place in zip(self.file_offset.tolist(), self.nbytes.tolist(), strict=True):
                if place[0] >= 0 < place[1]:
                    self._before[place] = counted(fd, *place).resident_bytes or 0

    def served(self, file_offset: int, nbytes: int) -> bool:
        """Whether bytes that were read directly came from the page cache all the same: pages of them have
        appeared, and a direct read of one does not reach a disk."""
        t, place = self.target, (file_offset, nbytes)
        now = counted(t.buffered_fd, *place).resident_bytes or 0
        if now <= self._before.get(place, 0):
            return False
        found = served_by_cache(t.buffered_fd, t.direct_fd, [place], t.align)
        if found:
            self.file._extents.learn(t.buffered_fd, found)
        return bool(found)

    def checked_pieces(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, those that the page cache served counted as fallback's."""
        if not self.checked:
            return pieces
        return [
            p._replace(backend="fallback", reason=SERVED)
            if p.backend == "fastpath" and self.served(p.file_offset, p.nbytes)
            else p
            for p in pieces
        ]

    def denial(self, file_offset: int, nbytes: int) -> RouteError | None:
        """What a request ends with whose bytes the page cache served, where that is an error."""
        if not self.target.only_direct:
            return None
        return denied(self.target, file_offset, nbytes, [(file_offset, nbytes)])

    def failed_directly(self, code: int) -> None:
        """Remember that the direct path failed for this file on this device (hipFile J-17)."""
        self.direct_errno = code
        self.file._failed[self.view.device.name] = code
        self.note_cold()

    def release(self) -> None:
        """Let go of file and buffer; twice does nothing, and nothing is held in a forked child."""
        if self._born != reaper.generation():
            return
        with self._lock:
            held, self.held = self.held, False
        if held:
            self.view._release()
            self.file._leave()

    def finish(self) -> None:
        """The last request has ended: drop what fallback brought into the page cache, look at it, let go."""
        try:
            self.target.drop_cold(self._cold or ())
            if self.watch:
                before, after = self.resident_before, self.resident()
                self.grew = before is None or after is None or after > before
                if self.grew and self.op == "read" and not self.checked:
                    t = self.target
                    found = served_by_cache(t.buffered_fd, t.direct_fd, self._direct_ranges(), t.align)
                    self.denied_nbytes = sum(nbytes for _, nbytes in found)
        finally:
            self.release()
