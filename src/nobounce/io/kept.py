"""The ways of small requests that are kept with their file: the first one is judged in full, the next
ones like it take its plan.

What does not depend on where in the file a read begins is kept: what is tried first, and what the rest goes
by, for a reason of the file's, the device's or the caller's.
"""

from __future__ import annotations

import mmap
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from nobounce.clock import THREADS
from nobounce.config import Settings, settings
from nobounce.facts import cachestat, pagecache
from nobounce.io import hooks
from nobounce.io.engine import machine_for
from nobounce.io.strategy import CACHED_CODES, Strategy, spreading
from nobounce.io.target import Target
from nobounce.route.judge import CACHED, DIRECT, cold_reason, only_direct
from nobounce.route.scores import alignments, hard_refusals
from nobounce.route.types import BackendName, MemoryKind, Op, Reason, Refusal, Request
from nobounce.runtimes import faults
from nobounce.runtimes.rawio import RWF_NOWAIT

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.io.file import File
    from nobounce.io.job import Job
    from nobounce.io.movers.bounce import Ring

MOST_NBYTES = 256 << 10
"""Above this, direct reads take the usual way, which asks the kernel's counters for evidence."""
MOST_HELD_NBYTES = 4 << 20
"""Up to here, a slot of the bounce ring, what the page cache holds is read on the calling thread: to wake
another takes longer than it saves. Into an H200, 512 KiB took 390 us by threads, 256 KiB 65 by the caller."""
SAMPLES, SAMPLE_NBYTES = 8, 64 << 10
MOST_PLANS = 32
PAGE = mmap.PAGESIZE
ALONE = Strategy(1, MOST_HELD_NBYTES, MOST_HELD_NBYTES)
"""Of a read that one thread makes in one call."""


class Way(NamedTuple):
    """One try: it moves every byte, or the next way is tried."""

    fd: int
    flags: int
    """RWF_*."""
    backend: BackendName
    reason: Reason
    grain: int = 1
    """Alignment of O_DIRECT reads in the file, in bytes. Into memory of the host another request is not this
    way's; a relay reads around it."""
    memory_grain: int = 1
    if_held: bool = False
    """Only where the page cache holds every page of it. To ask by trying would not do: a read with
    RWF_NOWAIT of what is not there has the kernel fetch it (32 KiB for 8 were seen on Linux 6.18), and what
    then goes direct is read twice."""


class Plan(NamedTuple):
    """What two small requests with the same key have in common."""

    settings: Settings
    target: Target
    ways: tuple[Way, ...]
    refusals: tuple[Refusal, ...]
    process: int


_process = os.getpid()
"""A forked child starts anew: bounce rings are not inherited."""


def _forget() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_forget)


def find(
    file: File,
    view: Buffer,
    require: str,
    cache: str,
    where: tuple[int, int, int],
    *,
    most: int = MOST_HELD_NBYTES,
    op: Op = "read",
) -> Plan | None:
    """The plan for (nbytes, file_offset, buffer_offset), or None: then the whole way decides,
    and names what is wrong."""
    nbytes, file_offset, buffer_offset = where
    if not 0 < nbytes <= most or faults.ACTIVE:
        return None
    allocation = view.allocation
    plan = file._plans.get((op, allocation.device.name, allocation.kind, require, cache))
    if (
        plan is None
        or plan.settings is not settings()
        or plan.process != _process
        or plan.target.runtime is not allocation.device._runtime
        or allocation.device.name in file._failed
    ):
        return None
    if (
        file_offset < 0
        or buffer_offset < 0
        or buffer_offset + nbytes > view.nbytes
        or file_offset + nbytes >= 1 << 62
    ):
        return None
    if nbytes > MOST_NBYTES:
        if plan.ways[0].backend == "fastpath" or (
            op == "read" and plan.ways[0].reason.code not in CACHED_CODES
        ):
            return None
        if nbytes > MOST_HELD_NBYTES and (op == "write" or not is_spread(plan, nbytes)):
            return None
        plan = plan._replace(ways=plan.ways[:1])
    if len(plan.ways) == 1 and plan.target.ring is None:
        way = plan.ways[0]
        if way.grain > 1 and not is_aligned(way, view._address + buffer_offset, nbytes, file_offset):
            return None
    return plan


def is_spread(plan: Plan, nbytes: int) -> bool:
    """Whether a read of so many bytes is its caller's thread's to spread over threads of the kernel."""
    return plan.target.ring is not None and spreading(plan.settings, machine_for(THREADS), nbytes) > 0


def first(file: File, view: Buffer, require: str, cache: str, where: tuple[int, int, int]) -> Plan | None:
    """A plan for reads of a file of which nothing is known, into memory of the host: what the page cache
    holds comes from there, whatever else is true of the file. It serves until it does not; the whole way that
    follows puts its own in its place."""
    allocation, now, fd = view.allocation, settings(), file._fds.get("buffered", -1)
    runtime = allocation.device._runtime
    if (
        require != "auto"
        or cache != "auto"
        or file._facts is not None
        or fd < 0
        or not 0 < where[0] <= MOST_HELD_NBYTES
        or faults.ACTIVE
        or now.force_compat_mode
        or not now.allow_compat_mode
        or runtime.scheduler is not THREADS
        or not (runtime.capabilities.host_addressable or allocation.kind is not MemoryKind.DEVICE)
    ):
        return None
    hooks.start()  # it may be the first transfer of the process
    target = plain_target(file, view, None)
    ways = (Way(fd, RWF_NOWAIT, "fallback", CACHED, if_held=True),)
    key = "read", allocation.device.name, allocation.kind, require, cache
    file._plans[key] = Plan(now, target, ways, (), _process)
    return find(file, view, require, cache, where)


def plain_target(file: File, view: Buffer, ring: Ring | None) -> Target:
    """Both ends of reads through the page cache, for which nothing has to be known of the file."""
    allocation = view.allocation
    return Target(
        op="read",
        filename=file.name,
        device_name=allocation.device.name,
        runtime=allocation.device._runtime,
        device=allocation.device.ordinal,
        kind=allocation.kind,
        address=view.handle,
        buffered_fd=file._descriptor("buffered"),
        own_fd=file._owns("buffered"),
        direct_fd=-1,
        direct=None,
        align=PAGE,
        max_nbytes=0,
        drop_cache=False,
        retry_errnos=frozenset(),
        ring=ring,
        strategy=ALONE,
    )


def keep(file: File, request: Request, job: Job) -> None:
    """Keep the ways of a request that was judged in full, for those after it, whatever their offsets."""
    target = job.target
    key = (request.op, request.memory.device, request.memory.kind, request.require, request.cache)
    file._plans.pop(key, None)  # one that knew nothing of the file
    if (
        target.runtime.scheduler is not THREADS
        or request.earlier_failure is not None
        or len(file._plans) >= MOST_PLANS
    ):
        return
    hard = tuple(hard_refusals(request))
    reason = cold_reason(request, hard)
    cold = (_cold_way if request.op == "read" else _write_way)(file, request, target, reason)
    ways = () if cold is None else (cold,)
    if request.op == "read" and request.cache == request.require == "auto" and not only_direct(request):
        if not _is_counted(target.buffered_fd):
            return
        ways = (Way(target.buffered_fd, RWF_NOWAIT, "fallback", CACHED, if_held=True), *ways)
    if not ways:
        return
    file._plans[key] = Plan(request.settings, target, ways, hard, _process)


def _is_counted(fd: int) -> bool:
    """Whether cachestat tells of this file page by page: on overlay it says nothing of the layers below."""
    try:
        cachestat.cached_nbytes(fd, 0, PAGE)
        return cachestat.descriptor_type(fd) != pagecache.OVERLAY
    except OSError:
        return False


def is_held(fd: int, file_offset: int, nbytes: int) -> bool:
    """Whether the page cache holds every page of a range: 3 us."""
    first = file_offset // PAGE * PAGE
    whole = -(-(file_offset + nbytes - first) // PAGE) * PAGE
    try:
        return cachestat.cached_nbytes(fd, first, whole) >= whole
    except OSError:
        return False


def seems_held(fd: int, file_offset: int, nbytes: int) -> bool:
    """`is_held` for a large range: of a few pieces of it, which takes no longer the larger it is. Reads that
    would wait then say no (RWF_NOWAIT)."""
    if nbytes <= SAMPLES * SAMPLE_NBYTES:
        return is_held(fd, file_offset, nbytes)
    step = (nbytes - SAMPLE_NBYTES) // (SAMPLES - 1)
    return all(is_held(fd, file_offset + n * step, SAMPLE_NBYTES) for n in range(SAMPLES))


def _cold_way(file: File, request: Request, t: Target, reason: Reason) -> Way | None:
    """The way of bytes that the page cache does not hold; None where it depends on
    more than their alignment."""
    if reason is not DIRECT:
        if t.ring is not None and t.relay_fd >= 0:
            # btrfs reads what it has compressed through the page cache, and such pages have to be dropped.
            return (
                None
                if t.drop_cache and not t.vouched
                else Way(t.relay_fd, 0, "fallback", reason, t.relay_align)
            )
        # With "avoid", pages would have to be dropped behind it.
        return None if t.drop_cache else Way(t.buffered_fd, 0, "fallback", reason)
    direct = t.runtime.direct_io()
    # Where statx vouches for the file, no byte of it needs a second look.
    if direct is None or not direct.plain or t.sparse or not t.vouched or t.populate or file._extents.learnt:
        return None
    memory, offset = alignments(request)
    return Way(file._descriptor("direct"), 0, "fastpath", DIRECT, offset, memory)


def _write_way(file: File, request: Request, t: Target, reason: Reason) -> Way | None:
    """The way of an aligned write; None where there is more to do than to write."""
    if reason is DIRECT:
        direct = t.runtime.direct_io()
        if direct is None or not direct.plain:
            return None
        memory, offset = alignments(request)
        return Way(file._descriptor("direct"), 0, "fastpath", DIRECT, max(offset, PAGE), memory)
    if t.ring is not None and t.relay_fd >= 0:
        return Way(t.relay_fd, 0, "fallback", reason, max(t.relay_align, PAGE))
    # With "avoid", pages would have to be dropped behind it.
    return None if t.drop_cache else Way(t.buffered_fd, 0, "fallback", reason)


def is_aligned(way: Way, address: int, nbytes: int, file_offset: int) -> bool:
    """Whether O_DIRECT may read just this into memory of the host."""
    return not ((file_offset | nbytes) % way.grain or address % way.memory_grain)


def suits(way: Way, address: int, nbytes: int, file_offset: int) -> bool:
    """Whether a direct read may be made just so: aligned, and with no hole in the file since."""
    if not is_aligned(way, address, nbytes, file_offset):
        return False
    status = os.fstat(way.fd)
    return status.st_blocks * 512 >= status.st_size or not stat.S_ISREG(status.st_mode)
