"""The judge's answer to many requests at once, which differ only in where their bytes lie.

Everything but the alignment is the same for all of them, and asked once, of the judge's own functions. What
is left is arithmetic over arrays. A test holds this module to `judge` for random requests: it may be
faster, never different.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nobounce.errors import NobounceError
from nobounce.route.judge import CACHE_USE, CACHED, PAGE, REQUIRED, judge
from nobounce.route.scores import INDIRECT, alignments, hard_refusals, score_fallback
from nobounce.route.types import CachedRange, Reason, Request

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

EMPTY, DIRECT, WHOLE, SPLIT, INVALID, REFUSED = range(6)
"""No bytes; all fastpath; all fallback, for the answer's reason; for `judge` alone;
a bad region; no backend."""

NONE, SOME, ALL = range(3)
"""What the page cache holds of a request."""
MISALIGNED = ("offset-align", "size-align", "memory-align")
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Answer:
    """`kinds` (one per request), and for WHOLE requests `reasons`: an index into `reason_list`, -1 elsewhere.

    `hopeless` says that every request is REFUSED whatever its place: the refusals are of the file,
    the device or settings. `cold_kinds` and `cold_reasons` are what the page cache changed: the
    answer where it holds nothing.
    """

    kinds: Array
    reasons: Array
    reason_list: tuple[Reason, ...]
    hopeless: bool = False
    cold_kinds: Array | None = None
    cold_reasons: Array | None = None


def judge_many(
    request: Request, file_offset: Array, nbytes: Array, buffer_offset: Array, *, cached: Array | None = None
) -> Answer:
    """Judge requests like `request` at other places (int64 arrays of one length; bytes).

    `cached` says NONE, SOME or ALL of each request, as the page cache holds it (cache="auto"). Raises
    ConfigError for variables that contradict each other; whatever is wrong with one request is in its kind,
    and `alone` raises its error.
    """
    import numpy as np

    request.settings.check_contradiction()
    kinds = np.full(len(nbytes), SPLIT, np.uint8)
    reasons = np.full(len(nbytes), -1, np.int8)
    size = request.memory.nbytes
    positive = (nbytes >= 0) & (file_offset >= 0) & (buffer_offset >= 0)
    fits = (buffer_offset <= size) & (nbytes <= size - np.minimum(buffer_offset, size))
    valid = positive & fits & (file_offset <= _MOST - np.maximum(nbytes, 0))
    only_direct = request.require == "fastpath" or not request.settings.allow_compat_mode
    accepts = score_fallback(request).accepts
    hard = hard_refusals(request)
    listed: tuple[Reason, ...] = ()
    hopeless = False
    asks = request.cache == "auto" and request.op == "read" and request.require == "auto"
    partly = np.zeros(len(nbytes), bool) if cached is None else cached == SOME

    if request.require == "fallback" or hard or (request.cache == "use" and not only_direct):
        if request.require == "fallback":
            hopeless, reason = not accepts, REQUIRED
        elif hard:
            hopeless = only_direct or not accepts
            reason = Reason(hard[0].code, hard[0].sentence, hard[0].cure)
            if request.cache == "use":
                reason = CACHE_USE
        else:
            reason = CACHE_USE
        kinds[:] = REFUSED if hopeless else WHOLE
        listed = (reason,)
        reasons[:] = 0
    else:
        misses = _misses(request, file_offset, nbytes, buffer_offset)
        any_miss = misses[0] | misses[1] | misses[2]
        touched, inside = _indirect(request, file_offset, nbytes)
        if only_direct:
            kinds[:] = np.where(any_miss | touched, REFUSED, DIRECT)
        else:
            kinds[~any_miss & ~touched] = DIRECT
            kinds[~any_miss & (inside >= 0)] = WHOLE
            whole = any_miss
            if any_miss.any():
                whole = any_miss & ~_has_middle(request, file_offset, nbytes, buffer_offset)
                kinds[whole] = WHOLE
            listed = tuple(
                Reason(code, f"the request is not aligned for direct I/O ({code})") for code in MISALIGNED
            )
            for index, miss in enumerate(misses):  # the last one that holds is the judge's reason too
                reasons[whole & miss] = index
            if (inside >= 0).any():
                aligned = ~any_miss & (inside >= 0)
                reasons[aligned] = inside[aligned] + len(listed)
                listed += tuple(INDIRECT.values())
            if asks and cached is not None:
                partly = (cached == SOME) & ~any_miss
    kinds[nbytes == 0] = EMPTY
    kinds[~valid] = INVALID
    reasons[kinds != WHOLE] = -1
    if not asks or hopeless or only_direct or cached is None or not cached.any():
        return Answer(kinds, reasons, listed, hopeless)
    answer = Answer(kinds.copy(), reasons.copy(), (*listed, CACHED), False, kinds, reasons)
    there = valid & (nbytes > 0)
    answer.kinds[partly & there], answer.kinds[there & (cached == ALL)] = SPLIT, WHOLE
    answer.reasons[answer.kinds != WHOLE] = -1
    answer.reasons[there & (cached == ALL)] = len(listed)
    return answer


def place(
    request: Request,
    file_offset: int,
    nbytes: int,
    buffer_offset: int,
    cached: tuple[CachedRange, ...] = (),
) -> Request:
    """`request` at another place."""
    return dataclasses.replace(
        request, file_offset=file_offset, nbytes=nbytes, buffer_offset=buffer_offset, cached=cached
    )


def error_of(request: Request) -> NobounceError | None:
    """What the judge raises for the request, or None."""
    try:
        judge(request)
    except NobounceError as error:
        return error
    return None


def misses(request: Request, file_offset: Array, nbytes: Array, buffer_offset: Array) -> Array:
    """A number per request, the same for those that the same conditions refuse."""
    found = _misses(request, file_offset, nbytes, buffer_offset)
    touched, _ = _indirect(request, file_offset, nbytes)
    together: Array = found[0] + 2 * found[1] + 4 * found[2] + 8 * touched
    return together


def _indirect(request: Request, file_offset: Array, nbytes: Array) -> tuple[Array, Array]:
    """Which requests touch ranges that the file system reads through the page cache, and for those that lie
    inside of one the index of its reason in INDIRECT, else -1."""
    import numpy as np

    ranges = request.indirect if request.op == "read" else ()
    inside = np.full(len(nbytes), -1, np.int8)
    if not ranges:
        return np.zeros(len(nbytes), bool), inside
    starts, ends, codes = (
        np.array(column, np.int64)
        for column in zip(
            *((r.file_offset, r.file_offset + r.nbytes, list(INDIRECT).index(r.code)) for r in ranges),
            strict=True,
        )
    )
    first = np.searchsorted(
        ends, file_offset, "right"
    )  # the first range that ends behind the request's start
    there = first < len(ranges)
    first = np.minimum(first, len(ranges) - 1)
    # Not file_offset + nbytes, which may be more than an int64 holds.
    touched = there & (starts[first] - file_offset < nbytes)
    covered = touched & (starts[first] <= file_offset) & (nbytes <= ends[first] - file_offset)
    inside[covered] = codes[first][covered]
    return touched, inside


def _misses(request: Request, file_offset: Array, nbytes: Array, buffer_offset: Array) -> tuple[Array, ...]:
    """Per condition of `alignment_refusals`, in its order, which requests miss it."""
    mem, offset = alignments(request)
    address = request.memory.address + buffer_offset
    return file_offset % offset != 0, nbytes % offset != 0, address % mem != 0


def _has_middle(request: Request, file_offset: Array, nbytes: Array, buffer_offset: Array) -> Array:
    """Whether `aligned_middle` finds bytes that can go direct."""
    import numpy as np

    mem, offset = alignments(request)
    start, end = (
        file_offset,
        np.where(file_offset > _MOST - np.maximum(nbytes, 0), file_offset, file_offset + nbytes),
    )
    shift = request.memory.address + buffer_offset - start
    grain = max(offset, PAGE) if request.op == "write" else offset
    residue = -shift % mem
    lines_up = residue % min(grain, mem) == 0
    target = residue if mem > grain else np.zeros_like(residue)
    first = start + (target - start) % max(grain, mem)
    aligned = (start % offset == 0) & ((start + shift) % mem == 0)
    first = np.where(aligned, start, first)
    last = np.where(end % offset == 0, end, end // grain * grain)
    found: Array = (aligned | lines_up) & (first < last)
    return found
