"""The one judge: from a Request to a Route, or to a RouteError that carries every refusal.

A request may split (J-18): the aligned middle goes direct, unaligned edges through fallback. In a write the
edges are whole pages, because a page that holds both buffered and direct bytes could be written back over the
direct ones; they go by buffered pwrite, never by read-modify-write, which would lose a neighbour's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nobounce.errors import RouteError, printable
from nobounce.route.scores import (
    INDIRECT,
    alignment_refusals,
    alignments,
    check_region,
    hard_refusals,
    indirect_ranges,
    range_refusals,
    score_fallback,
    score_fastpath,
)
from nobounce.route.types import BackendName, Reason, Refusal, Request, Route, RouteSegment, Score

PAGE = 4096

DIRECT = Reason("direct", "aligned and accepted by the direct path")
CACHED = Reason("cached", "already in the page cache, which is cheaper than the disk")
CACHE_USE = Reason("cache-use", 'cache="use" asks for the page cache')
REQUIRED = Reason("required-fallback", 'require="fallback" asks for it')
EDGE = Reason(
    "unaligned-edge", "the edge of the request is not aligned for direct I/O", "align file_offset and nbytes"
)


def judge(request: Request) -> Route:
    """Decide which bytes go which way.

    Raises ArgumentError for a bad region, ConfigError for contradicting variables and RouteError, with all
    refusals, when no allowed backend accepts every byte.
    """
    request.settings.check_contradiction()
    check_region(
        file_offset=request.file_offset,
        nbytes=request.nbytes,
        buffer_offset=request.buffer_offset,
        buffer_nbytes=request.memory.nbytes,
    )
    scores = (score_fastpath(request), score_fallback(request))
    if request.nbytes == 0:
        return Route((), scores)
    hard = hard_refusals(request)
    fallback = scores[1]
    if request.require == "fallback":
        if not fallback.accepts:
            raise _refused(request, fallback.refusals)
        return Route((_whole(request, REQUIRED),), scores)
    if hard:
        if only_direct(request) or not fallback.accepts:
            raise _refused(request, (*hard, *(() if request.require == "fastpath" else fallback.refusals)))
        if request.cache == "use":
            return Route((_whole(request, CACHE_USE),), scores)
        # The page cache is the cheaper way through host memory too: a device may read it without a relay.
        whole = request.file_offset, request.file_offset + request.nbytes
        return Route(tuple(_merge(_by_residency(request, *whole, _reason(hard[0])))), scores)
    if only_direct(request):
        misses = alignment_refusals(request) + range_refusals(request)
        if misses:
            raise _refused(request, (*misses, *(() if request.require == "fastpath" else fallback.refusals)))
        return Route(
            (_segment(request, request.file_offset, request.file_offset + request.nbytes, DIRECT),), scores
        )
    if request.cache == "use":
        return Route((_whole(request, CACHE_USE),), scores)
    return Route(tuple(_merge(_split(request))), scores)


def only_direct(request: Request) -> bool:
    """Whether every byte must go direct, or none."""
    return request.require == "fastpath" or not request.settings.allow_compat_mode


def cold_reason(request: Request, hard: Sequence[Refusal]) -> Reason:
    """Why bytes of an aligned request take their way where the page cache does not hold them, whatever their
    offset is: for smaller requests like one that was judged. `hard` is what `hard_refusals` says of it."""
    if request.require == "fallback":
        return REQUIRED
    if request.cache == "use" and not only_direct(request):
        return CACHE_USE
    return _reason(hard[0]) if hard else DIRECT


def _refused(request: Request, refusals: tuple[Refusal, ...]) -> RouteError:
    name = printable(request.file.path or "?")
    wanted = "fastpath is required" if request.require == "fastpath" else "no backend accepts the request"
    refusals = tuple(dict.fromkeys(refusals))  # both backends may refuse for one reason
    lines = "; ".join(str(r) for r in refusals)
    return RouteError(
        f"{name}: {request.op} of {request.nbytes} bytes at offset {request.file_offset} on "
        f"{request.memory.device}: "
        f"{wanted}, but {lines}",
        refusals,
        filename=request.file.path,
        backend=_asked(request),
    )


def _asked(request: Request) -> BackendName | None:
    """The backend that `require` or the settings left, or None where both were open."""
    if request.require != "auto":
        return request.require
    return None if request.settings.allow_compat_mode else "fastpath"


def _reason(refusal: Refusal) -> Reason:
    return Reason(refusal.code, refusal.sentence, refusal.cure)


def _segment(request: Request, start: int, end: int, reason: Reason) -> RouteSegment:
    backend = "fastpath" if reason is DIRECT else "fallback"
    return RouteSegment(
        backend,  # type: ignore[arg-type]
        start,
        start - request.file_offset + request.buffer_offset,
        end - start,
        reason,
    )


def _whole(request: Request, reason: Reason) -> RouteSegment:
    return _segment(request, request.file_offset, request.file_offset + request.nbytes, reason)


def aligned_middle(request: Request) -> tuple[int, int] | None:
    """[start, end) of the bytes that can go direct, as file offsets; None where
    memory and file never line up.

    Alignments are powers of two. A direct run starts where the file offset is a multiple of the
    file's alignment while the memory address beside it is a multiple of the memory's, and ends at
    a multiple of the file's.
    """
    mem, offset = alignments(request)
    start, end = request.file_offset, request.file_offset + request.nbytes
    shift = request.memory.address + request.buffer_offset - start
    grain = max(offset, PAGE) if request.op == "write" else offset
    first: int | None = start
    if start % offset or (start + shift) % mem:
        first = _first_aligned(start, grain, mem, -shift % mem)
    last = end if end % offset == 0 else end // grain * grain
    return (first, last) if first is not None and first < last else None


def _first_aligned(start: int, grain: int, mem: int, residue: int) -> int | None:
    """The first x >= start that is 0 modulo `grain` and `residue` modulo `mem`; None where there is none."""
    if residue % min(grain, mem):
        return None
    step = max(grain, mem)
    target = residue if mem > grain else 0
    return start + (target - start) % step


def _split(request: Request) -> Iterator[RouteSegment]:
    start, end = request.file_offset, request.file_offset + request.nbytes
    if request.cache == "auto" and request.op == "read" and _is_resident(request):
        yield _whole(request, CACHED)  # its edges too, whatever their alignment
        return
    middle = aligned_middle(request)
    if middle is None:
        yield _whole(request, _edge_reason(request))
        return
    first, last = middle
    if start < first:
        yield _segment(request, start, first, EDGE)
    yield from _by_residency(request, first, last)
    if last < end:
        yield _segment(request, last, end, EDGE)


def _is_resident(request: Request) -> bool:
    """Whether one range that the page cache holds covers the request."""
    end = request.file_offset + request.nbytes
    return any(
        c.resident and c.file_offset <= request.file_offset and c.file_offset + c.nbytes >= end
        for c in request.cached
    )


def _edge_reason(request: Request) -> Reason:
    misses = alignment_refusals(request)
    return _reason(misses[-1]) if misses else EDGE


def _by_residency(request: Request, first: int, last: int, cold: Reason = DIRECT) -> Iterator[RouteSegment]:
    """[first, last) in turns: what the page cache holds from there, the rest the `cold` way."""
    position = first
    if request.cache == "auto" and request.op == "read":
        # `first` suits file and memory, so every place a multiple of both alignments behind it does too.
        step = max(alignments(request))
        for piece in request.cached:
            begin = max(position, first - (first - piece.file_offset) // step * step)
            finish = piece.file_offset + piece.nbytes
            finish = last if finish >= last else first + (finish - first) // step * step
            if not piece.resident or finish <= begin:
                continue
            yield from _cold(request, position, begin, cold)
            yield _segment(request, begin, finish, CACHED)
            position = finish
    yield from _cold(request, position, last, cold)


def _cold(request: Request, first: int, last: int, reason: Reason) -> Iterator[RouteSegment]:
    """[first, last) for `reason`, but for ranges that the file system would read through the
    page cache all the same."""
    position = first
    step = max(alignments(request))
    for piece in indirect_ranges(request) if reason is DIRECT else ():
        begin = max(position, first + (piece.file_offset - first) // step * step)
        finish = min(last, first - (first - piece.file_offset - piece.nbytes) // step * step)
        if finish <= begin:
            continue
        if position < begin:
            yield _segment(request, position, begin, reason)
        yield _segment(request, begin, finish, INDIRECT[piece.code])
        position = finish
    if position < last:
        yield _segment(request, position, last, reason)


def _merge(segments: Iterator[RouteSegment]) -> Iterator[RouteSegment]:
    last: RouteSegment | None = None
    for segment in segments:
        if last is not None and last.reason is segment.reason:
            last = RouteSegment(
                last.backend, last.file_offset, last.buffer_offset, last.nbytes + segment.nbytes, last.reason
            )
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last


def best(scores: tuple[Score, ...]) -> Score | None:
    """The highest accepting score, the earlier one on a tie (hipFile C-2); None when all refuse."""
    accepted = [s for s in scores if s.accepts]
    return max(accepted, key=lambda s: s.value) if accepted else None
