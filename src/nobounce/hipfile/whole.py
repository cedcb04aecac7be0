"""hipFile's routing: one backend takes the whole request (C-1 to C-12), and its own region rule (A-36, A-37).

The object API splits a request and judges more kindly; here the published conditions hold to the
letter, on any runtime: device memory alone, ext4 (ordered), xfs or a block device for fastpath, and no
memory of earlier failures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from nobounce.config import Settings
from nobounce.errors import InternalError, RouteError, printable
from nobounce.hipfile.driver import STATE, published_profile
from nobounce.hipfile.status import OffsetError, Rejected
from nobounce.hipfile.store import KIB
from nobounce.hipfile.types import MAX_RW_COUNT, SizeTParameter
from nobounce.io import hooks
from nobounce.io.engine import engine_for
from nobounce.io.prepare import make_job, make_request, memory_of
from nobounce.route.judge import best
from nobounce.route.scores import score_fastpath
from nobounce.route.types import (
    BackendName,
    MemoryKind,
    Op,
    Reason,
    Refusal,
    Request,
    Route,
    RouteSegment,
    Score,
)

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.io.file import File
    from nobounce.io.receipt import Receipt

WHOLE = Reason("whole-request", "the backend with the highest score takes the whole request, as in hipFile")
DEVICE_ONLY = frozenset({MemoryKind.DEVICE})


class Scores(NamedTuple):
    """What each backend says of a request: 100, 1 or -1, and every failed condition."""

    fallback: Score
    fastpath: Score


def check_region(file_offset: int, nbytes: int, buffer_offset: int, buffer_nbytes: int) -> None:
    """A-36, with the offset strictly inside the buffer. Raises OffsetError for a negative
    offset (A-37), else Rejected."""
    if file_offset < 0 or buffer_offset < 0:
        raise OffsetError(f"negative offset: file {file_offset}, buffer {buffer_offset}")
    if buffer_offset >= buffer_nbytes or not 0 <= nbytes <= buffer_nbytes - buffer_offset:
        raise Rejected(
            f"{nbytes} bytes at {buffer_offset} do not lie within a buffer of {buffer_nbytes} bytes"
        )


def capped(nbytes: int) -> int:
    """At most MAX_RW_COUNT bytes move in one operation; the rest is left out in silence (A-13)."""
    return min(nbytes, MAX_RW_COUNT)


def adapt(request: Request, in_force: Settings) -> Request:
    """The request under hipFile's conditions (C-5 to C-12)."""
    direct = replace(
        request.direct, file_rule="hipfile", memory_kinds=DEVICE_ONLY, virtual_function="unknown"
    )
    # The published score does not look at the block stack (C-12): there a P2P failure is
    # the driver's ENODEV (J-29).
    file = replace(request.file, block=None) if published_profile() else request.file
    return replace(
        request, file=file, direct=direct, settings=in_force, earlier_failure=None, require="auto", cached=()
    )


def score(request: Request) -> Scores:
    """Both backends' scores of an adapted request."""
    return Scores(_score_fallback(request), _score_fastpath(request))


def _score_fallback(request: Request) -> Score:
    refusals = []
    if not request.settings.allow_compat_mode:
        refusals.append(
            Refusal(
                "fallback-disabled",
                "HIPFILE_ALLOW_COMPAT_MODE=false forbids fallback",
                "unset HIPFILE_ALLOW_COMPAT_MODE",
            )
        )
    if request.memory.kind is not MemoryKind.DEVICE:
        refusals.append(Refusal("memory-kind", f"the buffer is {request.memory.kind.value} memory (C-22)"))
    return Score("fallback", -1 if refusals else 1, tuple(refusals))


def _score_fastpath(request: Request) -> Score:
    scored = score_fastpath(request)
    if request.file_offset >= 0 and request.buffer_offset >= 0:
        return scored
    negative = Refusal("negative-offset", "an offset is negative, be it aligned or not (C-8)")
    return Score("fastpath", -1, (*scored.refusals, negative))


def route(request: Request, backend: BackendName | None = None) -> Route:
    """The whole request to the highest score, or to `backend` where that was decided at submission (D-11).

    Raises RouteError with all refusals when no backend accepts (C-3).
    """
    scores = score(request)
    chosen = best(tuple(scores)) if backend is None else None
    if backend is None:
        if chosen is None:
            refusals = scores.fastpath.refusals + scores.fallback.refusals
            text = "; ".join(str(r) for r in refusals)
            path = request.file.path
            raise RouteError(
                f"{printable(path or '?')}: every backend refuses: {text}", refusals, filename=path
            )
        backend = chosen.backend
    segment = RouteSegment(backend, request.file_offset, request.buffer_offset, request.nbytes, WHOLE)
    return Route((segment,) if request.nbytes else (), tuple(scores))


class Decider:
    """Decides one operation; asked again at the head of a stream, it keeps its backend
    and checks the region anew."""

    def __init__(self, in_force: Settings, *, retry: bool = True) -> None:
        self._in_force = in_force if retry else replace(in_force, retry_errnos="")
        self._backend: BackendName | None = None

    def __call__(self, request: Request) -> tuple[Request, Route]:
        memory = request.memory.nbytes
        check_region(request.file_offset, request.nbytes, request.buffer_offset, memory)
        request = adapt(request, self._in_force)
        found = route(request, self._backend)
        if found.segments:
            self._backend = found.segments[0].backend
            if self._backend == "fastpath":
                request = replace(request, settings=replace(request.settings, chunk_nbytes=direct_nbytes()))
        return request, found


def direct_nbytes() -> int:
    """The largest direct call, in bytes: everything at once unless the parameter says less."""
    with STATE.lock:
        if not STATE.store.is_set(SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB):
            return MAX_RW_COUNT
        return min(MAX_RW_COUNT, KIB * int(STATE.store.get(SizeTParameter.PROPERTIES_MAX_DIRECT_IO_SIZE_KB)))


def settings_in_force() -> Settings:
    """The settings of the facade's I/O. Raises ConfigError, which names the variable."""
    in_force = STATE.settings()
    return replace(in_force, retry_errnos=PUBLISHED_RETRIES) if published_profile() else in_force


PUBLISHED_RETRIES = "ENODEV,EREMOTEIO"


def examine(file: File, op: Op, view: Buffer, nbytes: int, file_offset: int, buffer_offset: int) -> Scores:
    """The scores of a request, nothing moved."""
    where = capped(nbytes), file_offset, buffer_offset
    request = make_request(file, op, memory_of(view), view.device, where, "auto", "avoid")
    return score(adapt(request, settings_in_force()))


def carry_out(
    file: File, op: Op, view: Buffer, nbytes: int, file_offset: int, buffer_offset: int, in_force: Settings
) -> Receipt:
    """A synchronous operation on a file and a buffer that the caller holds in use.

    Fallback writes are on the disk when this returns (C-26). Raises Rejected, RouteError, TransferError,
    DeviceError, OutOfMemoryError.
    """
    size = capped(nbytes)
    check_region(file_offset, size, buffer_offset, view.nbytes)
    view.wait()
    where = size, file_offset, buffer_offset
    request = make_request(file, op, memory_of(view), view.device, where, "auto", "avoid")
    try:
        request, found = Decider(in_force)(request)
    except RouteError as e:
        hooks.unrouted(op, view.device.name, size, None, e, file_offset=file_offset)
        raise
    pool = engine_for(view.device._runtime)
    durable = op == "write" and any(s.backend == "fallback" for s in found.segments)
    job = make_job(file, request, found, view, pool, fsync=durable, one_call=True)
    pool.run(job)
    if job.error is not None:
        raise job.error
    receipt = job.receipt
    if receipt is None:
        raise InternalError(f"the {op} of {file.name!r} ended without a receipt")
    if receipt.retries and op == "write":
        file.sync()
    return receipt
