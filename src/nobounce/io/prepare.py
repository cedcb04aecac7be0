"""From a call to a Request, from a Route to a Job: everything a transfer needs is
gathered here, before it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nobounce import transferend
from nobounce.buffer import Buffer, as_buffer
from nobounce.config import ASYNC_BUFFER_NBYTES, settings
from nobounce.device import Device
from nobounce.errors import ArgumentError, InternalError, RouteError
from nobounce.facts.extents import IndirectRange
from nobounce.facts.types import FileFacts
from nobounce.io import hooks, kept, oncaller, small
from nobounce.io.engine import Engine, engine_for, machine_for
from nobounce.io.hold import Hold
from nobounce.io.job import Job
from nobounce.io.movers.bounce import Ring
from nobounce.io.plan import cached_ranges, retry_errnos
from nobounce.io.receipt import Receipt
from nobounce.io.strategy import HOST, SPREAD_NBYTES, STREAM_NBYTES, Call, Destination, Strategy, choose
from nobounce.io.target import Target, cut
from nobounce.records import replace
from nobounce.route.judge import judge, only_direct
from nobounce.route.scores import UNREPORTED_ALIGN, alignments, file_refusals
from nobounce.route.types import (
    CACHE,
    REQUIRE,
    Cache,
    CachedRange,
    DirectFacts,
    MemoryFacts,
    MemoryKind,
    Op,
    Request,
    Require,
    Route,
)

if TYPE_CHECKING:
    from nobounce.io.file import File

Held = tuple[CachedRange, ...] | None
"""What `look` found, where somebody has looked."""
Where = tuple[int | None, int, int]
"""(nbytes or None for the rest of the buffer, file_offset, buffer_offset), in bytes."""


def memory_of(view: Buffer) -> MemoryFacts:
    """The facts of a buffer that a request carries."""
    return MemoryFacts(view.memory_kind, view.handle, view.nbytes, view.device.name)


def transfer(
    file: File,
    op: Op,
    buffer: Any,
    where: Where,
    require: Require,
    cache: Cache,
    *,
    fsync: bool = False,
    progress: Callable[[str, int], None] | None = None,
    run: Callable[[Engine, Job], None] = Engine.run,
    call: Call = "now",
    held: Held = None,
) -> Receipt:
    """Carry a synchronous transfer out, after the work already in the buffer's stream. `run`
    brings the job to its end."""
    view = as_buffer(buffer, write=op == "read")
    hold = Hold(file, view)
    try:
        hold.take()
        view.wait()
        if view.allocation.arriving:
            in_order(file, op, view, where)
        if progress is None:
            nbytes, file_offset, buffer_offset = where
            exact = view.nbytes - buffer_offset if nbytes is None else nbytes, file_offset, buffer_offset
            receipt = _by_plan(file, op, view, exact, require, cache, fsync)
            if receipt is not None:
                return receipt
        request = make_request(file, op, memory_of(view), view.device, where, require, cache, held)
        pool = engine_for(view.device._runtime)
        try:
            route = judge(request)
        except RouteError as e:
            told = op, view.device.name, request.nbytes, None, e
            hooks.unrouted(*told, file_offset=request.file_offset, now=pool.scheduler.now())
            raise
        job = make_job(file, request, route, view, pool, call=call, fsync=fsync, progress=progress)
        kept.keep(file, request, job)
        run(pool, job)
    finally:
        try:
            hold.let_go()
        finally:
            if hold.held:  # the first was interrupted
                hold.let_go()
    if job.error is not None:
        raise job.error
    if job.receipt is None:
        raise InternalError(f"the transfer of {file.name!r} ended without a receipt")
    return job.receipt


def _by_plan(
    file: File,
    op: Op,
    view: Buffer,
    where: tuple[int, int, int],
    require: Require,
    cache: Cache,
    fsync: bool,
) -> Receipt | None:
    """The receipt of a request that goes as one like it did before; None where the
    whole way has to decide."""
    if op == "write":
        plan = kept.find(file, view, require, cache, where, op=op)
        return None if plan is None or hooks.watchers else oncaller.write_now(view, plan, where, fsync=fsync)
    plan = kept.find(file, view, require, cache, where, most=SPREAD_NBYTES)
    plan = plan or kept.first(file, view, require, cache, where)
    if plan is None:
        return None
    if not hooks.watchers:
        return oncaller.read_now(view, plan, where)
    return _small(file, view, plan, where, require, cache) if where[0] <= kept.MOST_HELD_NBYTES else None


def in_order(file: File, op: Op, view: Buffer, where: Where) -> None:
    """Among transfers in stream order that brought no bytes: a write does not write what they left undefined,
    and what a read brings, or raises, is this caller's to know."""
    arriving = view.allocation.arriving
    nbytes, file_offset, offset = where
    size = view.nbytes - offset if nbytes is None else nbytes
    start = view._address + offset
    if op == "read":
        transferend.overwrite(arriving, start, start + size)
    elif (lacks := transferend.lacking(tuple(arriving.items()), start, start + size)) is not None:
        raise lacks.refusal(file.name, file_offset, size, op)


def small_read(
    file: File,
    view: Buffer,
    plan: kept.Plan,
    where: tuple[int, int, int],
    require: Require,
    cache: Cache,
    stream: int | None = None,
) -> small.SmallRead:
    """A small read by its plan, with the whole way to fall back on."""

    def whole(operation: hooks.Operation | None) -> Job:
        request = make_request(file, "read", memory_of(view), view.device, where, require, cache)
        pool = engine_for(view.device._runtime)
        call: Call = "now" if stream is None else "stream"
        route, held = judge(request), stream is not None
        return make_job(
            file, request, route, view, pool, call=call, held=held, stream=stream, operation=operation
        )

    return small.SmallRead(plan, view._address, where, stream, whole)


def _small(
    file: File, view: Buffer, plan: kept.Plan, where: tuple[int, int, int], require: Require, cache: Cache
) -> Receipt:
    read = small_read(file, view, plan, where, require, cache)
    read.begin()
    read.work()
    if read.error is not None:
        raise read.error
    if read.receipt is None:
        raise InternalError(f"the read of {file.name!r} ended without a receipt")
    return read.receipt


def look(file: File, device: Device, where: tuple[int, int, int], require: Require, cache: Cache) -> Held:
    """What the page cache holds of a read's range; None where its route does not depend on that."""
    nbytes, file_offset, _ = where
    if cache != "auto" or require != "auto" or nbytes <= 0 or file_offset < 0:
        return None
    return cached_ranges(file._in_use(), file_offset, nbytes, engine_for(device._runtime))


def make_request(
    file: File,
    op: Op,
    memory: MemoryFacts,
    device: Device,
    where: Where,
    require: Require,
    cache: Cache,
    held: Held = None,
) -> Request:
    """The request with every fact its route depends on, `held` if that is known already. Raises ArgumentError
    for an unknown `require` or `cache`."""
    if require not in REQUIRE:
        raise ArgumentError(f"require={require!r} is not one of {', '.join(REQUIRE)}")
    if cache not in CACHE:
        raise ArgumentError(f"cache={cache!r} is not one of {', '.join(CACHE)}")
    in_force = settings()
    runtime = device._runtime
    direct = runtime.direct_io()
    direct_facts = (
        direct.facts(device.ordinal)
        if direct is not None
        else DirectFacts(runtime.name, False, f"{runtime.name} has no direct path")
    )
    usable = direct_facts.available and not in_force.force_compat_mode and require != "fallback"
    nbytes, file_offset, buffer_offset = where
    size = max(0, memory.nbytes - buffer_offset) if nbytes is None else nbytes
    facts = file.facts(direct=usable, block=usable and direct_facts.file_rule == "hipfile")
    indirect: tuple[IndirectRange, ...] = ()
    if op == "read":
        indirect = _indirect(file, facts, require, file_offset, size)
        if held is None:
            held = look(file, device, (size, file_offset, buffer_offset), require, cache)
    return Request(
        op=op,
        file=facts,
        memory=memory,
        direct=direct_facts,
        settings=in_force,
        file_offset=file_offset,
        nbytes=size,
        buffer_offset=buffer_offset,
        require=require,
        cache=cache,
        cached=held or (),
        indirect=indirect,
        earlier_failure=file._failed.get(device.name),
    )


def route_of(file: File, op: Op, buffer: Any, where: Where, require: Require, cache: Cache) -> Route:
    """The route of a request that is not made. `buffer` may be a Device: as for a fresh buffer there, of the
    rest of the file unless nbytes is given."""
    nbytes, file_offset, buffer_offset = where
    if isinstance(buffer, Device):
        size = max(0, file.nbytes - file_offset) if nbytes is None else nbytes
        memory = MemoryFacts(MemoryKind.DEVICE, 0, buffer_offset + max(size, 0), buffer.name)
        return judge(
            make_request(file, op, memory, buffer, (size, file_offset, buffer_offset), require, cache)
        )
    view = as_buffer(buffer, write=op == "read")
    return judge(make_request(file, op, memory_of(view), view.device, where, require, cache))


def _indirect(
    file: File, facts: FileFacts, require: Require, file_offset: int, nbytes: int
) -> tuple[IndirectRange, ...]:
    """What the file system reads through the page cache of a range of the file."""
    if require == "fallback" or (facts.direct_probe != "yes" and not file._extents.learnt):
        return ()  # statx answers for the whole file, or no byte of it goes direct
    return file._indirect(file_offset, nbytes)


def with_indirect(file: File, request: Request, file_offset: int, nbytes: int) -> Request:
    """The request of a read, with what the file system reads through the page cache of
    another range of the file."""
    if request.op != "read":
        return request
    found = _indirect(file, request.file, request.require, file_offset, nbytes)
    return replace(request, indirect=found) if found or request.indirect else request


def make_job(
    file: File,
    request: Request,
    route: Route,
    view: Buffer,
    pool: Engine,
    *,
    call: Call = "now",
    fsync: bool = False,
    held: bool = False,
    one_call: bool = False,
    progress: Callable[[str, int], None] | None = None,
    stream: int | None = None,
    operation: hooks.Operation | None = None,
) -> Job:
    """Everything a transfer needs, made now: its strategy, its pieces and, for a `call` in stream
    order, slots and streams.

    `held`: the stream is held at the gate already, so nothing may be pinned any more; what was
    made ahead of it has to do.
    """
    device = view.device
    ring = ring_for(view, request.memory.kind, pool)
    to = HOST if ring is None else Destination(True, device.capabilities.page_cache_dma, ring.slot_nbytes)
    share = ASYNC_BUFFER_NBYTES if one_call else STREAM_NBYTES
    strategy = choose(request, route, to, machine_for(pool.scheduler), call, share)
    if call == "stream" and ring is not None and not held:
        ring.prepare(strategy.kernel_slots or strategy.width * strategy.slots, strategy.width)
    relay_align = relay_alignment(file, request) if ring is not None and not one_call else 0
    chunks, epilogue = cut(route, request.op, strategy, relay_align)
    direct = any(c.backend == "fastpath" for c in chunks)
    target = make_target(file, request, view, ring, strategy, direct=direct, one_call=one_call)
    if relay_align:
        target.relay_fd, target.relay_align = file._descriptor("direct"), relay_align

    def remember(code: int) -> None:
        file._failed[device.name] = code

    return Job(
        target,
        chunks,
        epilogue,
        file_offset=request.file_offset,
        requested=request.nbytes,
        scheduler=pool.scheduler,
        fsync=fsync,
        keep=(file, view),
        on_direct_failure=remember,
        on_denial=file._extents.learn,
        progress=progress,
        stream=stream,
        operation=operation,
        refusals=hooks.refusals_of(route) if hooks.observers else (),
        hand_over=pool.submit,
    )


def relay_alignment(file: File, request: Request) -> int:
    """Alignment with which a relay may read or write this file by O_DIRECT; 0 where
    it may not or should not."""
    if request.cache == "use":
        return 0
    facts = file.facts()
    known = file._relay
    if known is None or known[0] is not facts or known[1] is not request.settings:
        rule = replace(request.direct, file_rule="probe")
        refused = file_refusals(replace(request, file=facts, direct=rule))
        align = max(facts.dio_offset_align or UNREPORTED_ALIGN, facts.dio_mem_align or UNREPORTED_ALIGN)
        known = file._relay = facts, request.settings, 0 if refused else align
    return known[2]


def make_target(
    file: File,
    request: Request,
    view: Buffer,
    ring: Ring | None,
    strategy: Strategy,
    *,
    direct: bool,
    one_call: bool = False,
) -> Target:
    """Both ends of a request's transfer, their descriptors opened; `direct` says that
    the direct one is needed."""
    device = view.device
    runtime = device._runtime
    vendor = runtime.direct_io() if direct else None
    if vendor is not None and not vendor.plain:
        file._vendors.add(vendor)
        if view.allocation.is_owned:
            vendor.register_buffer(view.allocation.address, view.allocation.nbytes)
    return Target(
        op=request.op,
        filename=file.name,
        device_name=device.name,
        runtime=runtime,
        device=device.ordinal,
        kind=request.memory.kind,
        address=request.memory.address,
        buffered_fd=file._descriptor("buffered"),
        own_fd=file._owns("buffered"),
        direct_fd=file._descriptor("direct") if direct else -1,
        direct=vendor,
        align=max(alignments(request)),
        max_nbytes=request.direct.max_nbytes,
        drop_cache=request.cache == "avoid",
        retry_errnos=retry_errnos(request),
        ring=ring,
        strategy=strategy,
        populate=request.op == "read" and request.file.filesystem.fstype == "btrfs",
        vouched=request.file.dio_offset_align is not None,
        sparse=request.file.sparse,
        only_direct=only_direct(request),
        one_call=one_call,
    )


def ring_for(view: Buffer, kind: MemoryKind, pool: Engine) -> Ring | None:
    """The bounce ring of the buffer's device, or None where the host reaches the memory itself."""
    device = view.device
    reachable = device._runtime.capabilities.host_addressable or kind is not MemoryKind.DEVICE
    return None if reachable else pool.rings.get(device._runtime, device.ordinal)
