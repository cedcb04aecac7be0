"""How a routed request is carried out: by which mover, how wide, in which pieces. Pure: (Request,
Route, Machine) -> Strategy.

The judge says which way bytes go and why; a strategy says how they get there fastest. It reads nothing but
its arguments and starts nothing, so a table of cases tests it. The sizes, widths and thresholds of the engine
are here, each with the measurement that set it (benchmarks/README.md and benchmarks/results); what a mover
does inside itself stays with the mover.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from nobounce.config import ASYNC_BUFFER_NBYTES, Settings
from nobounce.route.types import Request, Route

PAGE = 4096
CACHED_CODES = ("cached", "cache-use")
"""Reasons of bytes that come from the page cache by choice."""

FEW_CORES = 4
"""Up to so many cores, page-cached bytes go to a device by DMA from the page cache, beside a small relay:
threads lose less to each other there than io_uring's requests cost."""
LEAST_WIDTH, MOST_WIDTH = 4, 12
"""Threads of one transfer: 4 on 2 cores (2.57 of a disk's 2.6 GiB/s), 12 on 16 (46 GiB/s from the page
cache to a GPU, 8 give 37)."""
SLOT_NBYTES = 4 << 20
"""Bytes of a bounce slot: copies of 4 MiB one by one come to 0.96 of a link (benchmarks/README.md)."""
MAX_SLOTS = 32
"""Slots of a device's ring: 24 keep a transfer going, the rest is for small reads beside it."""
DMA_MIN_NBYTES = 32 << 20
"""Below this, pinning pages of the page cache costs more than relaying them."""
PAGE_CACHE_WINDOW = 64 << 20
"""Bytes that one worker maps and registers at a time; the copies of a relay beside it wait meanwhile."""
KERNEL_MIN_NBYTES = 16 << 20
"""Below this, a transfer is over before io_uring's workers have started."""
KERNEL_SLOTS = 24
"""Slots of the ring that a transfer's one thread keeps full while io_uring's workers read into them."""
KERNEL_CHUNK, KERNEL_CHUNK_CACHED = 64 << 20, 256 << 20
"""Bytes that this thread is given at a time. An interrupt waits for the end of them, which from a disk takes
its time; from the page cache the time between two of them is what counts."""
BESIDE_SLOTS = 4
"""Slots of a relay that works beside DMA from the page cache: registering pages holds up its copies, so a
few are enough; 0 for none."""
STREAM_NBYTES = KERNEL_SLOTS * SLOT_NBYTES
"""Bytes of the ring that one stream may hold where HIPFILE_ASYNC_BUFFER_SIZE says nothing: as much as a
synchronous transfer, divided when there are more of them. The hipfile module keeps hipFile's 16 MiB."""
FRESH_DIRECT_WIDTH, FRESH_DIRECT_NBYTES = 8, 16 << 20
"""Direct reads into fresh memory under way at once, and their size: together 3 to 5 % more than 4 of 8 MiB
from a disk that holds 2.6 GiB/s."""
WRITE_DIRECT_NBYTES = 16 << 20
"""Bytes of one direct write from memory of the host: ext4 lets one write at a time extend a file, and the
next begins when its thread has woken. With 8 MiB a save of 1 GiB came to 0.92 of a plain writer of 16 MiB
pieces, with 16 MiB to 1.0."""
TAIL_NBYTES = 4 << 20
"""The last pieces of a read into fresh memory are cut to this, so that the threads end together and no disk
waits for the last of them."""
URING_NBYTES = 16 << 20
"""Bytes up to which a direct request of a batch is one io_uring entry; larger ones are cut by a thread."""
GATHER_WIDTH, GATHER_WIDTH_LARGE, GATHER_LARGE_NBYTES = 4, 6, 32 << 10
"""Threads that gather blocks for one batch, of small ones and of larger ones: more wait for the interpreter,
not for memory. On 16 cores, to a GPU, 4 / 6 / 8 came to 868 / 617 / 507 thousand blocks of 4 KiB a second,
and to 15.0 / 16.9 / 15.8 GiB/s of 64 KiB."""
GATHER_ROWS, GATHER_LEAST_NBYTES = 1024, 1 << 20
"""Blocks that one thread gathers at a time at most, and the bytes of them that are worth another thread."""
GATHERED_NBYTES = SLOT_NBYTES
"""The largest block that is gathered: it fits a slot."""
FEW_ROWS = 8
"""Blocks of one file, of which nothing is known yet, that are looked for in the page cache before
anything is learnt of it."""
SAMPLED_ROWS, EACH_ROW = 16, 64
"""Blocks of a batch whose residency is asked first, and up to how many each is asked: a question takes 2 us,
reading a cached block of 4 KiB one."""
MOST_POLLERS = 12
"""Threads of the kernel that poll for reads of one of ours, on 16 cores: of 16 MiB in the page cache 1 / 2 /
4 / 8 / 12 take 2.3 / 1.2 / 0.66 / 0.47 / 0.27 ms."""
POLLED_NBYTES, POLLED_ROWS = 64 << 20, 2048
"""Bytes or blocks that as many are worth waking for: they go on polling for some 7 ms after the last."""
FEW_POLLERS = 4
"""Polling threads for a single read of less."""
SPREAD_EACH_NBYTES, SPREAD_EACH_ROWS = 256 << 10, 128
"""Bytes or blocks that are worth one more thread of the kernel: a sleeping one takes as long to
wake as 256 KiB to read."""
SPREAD_LEAST_NBYTES, SPREAD_NBYTES = 1 << 20, 1 << 30
"""A single page-cached read of so many bytes is spread over the kernel's threads by its caller,
which hands nothing over to a thread of ours. Of one core 1 MiB takes 170 us, and of eight, asleep,
as long as 256 KiB of one."""
ALONE_NBYTES = 1 << 20
"""Bytes that are read before another thread is awake."""
HEAD_START, HEAD_START_NBYTES = 1.5e-3, 256 << 20
"""Seconds that a relay of so many bytes, which takes 5 ms or more, has the interpreter to itself: until its
reads are under way it asks for the lock every few microseconds, and another thread that makes thousands of
objects holds it for longer."""

_DEFAULTS = Settings()

Call = Literal["now", "fresh", "stream"]
"""How the request was made: synchronously, synchronously into memory never touched, or in stream order."""


class Machine(NamedTuple):
    """What a strategy has to know of the machine and the process: cores it may use, and whether
    io_uring's workers may read for it (allowed, in real time, with no faults injected into pread, which
    the kernel would not meet)."""

    cores: int
    kernel_reads: bool


class Destination(NamedTuple):
    """`relayed`: the host does not reach the memory, so that fallback needs slots of the bounce ring, of
    `slot_nbytes` bytes each. `page_cache_dma`: the device can read registered pages of a file itself."""

    relayed: bool
    page_cache_dma: bool = False
    slot_nbytes: int = SLOT_NBYTES


HOST = Destination(False)
"""Memory that the host reaches."""


class Strategy(NamedTuple):
    """How one transfer is carried out. Sizes in bytes."""

    width: int
    """Threads that may work on it at once."""
    chunk_nbytes: int
    """The largest piece that one thread is given of bytes that fall back."""
    direct_nbytes: int
    """The same of direct bytes."""
    slots: int = 2
    """Slots of the bounce ring for each thread."""
    dma_workers: int = 0
    """Threads that may read page-cached ranges straight out of the page cache (pagecache_dma)."""
    kernel_slots: int = 0
    """Slots that one thread may hold while io_uring's workers read into them
    (uring_relay); 0: no io_uring."""
    tail: int = 0
    """How many of the last pieces are cut to TAIL_NBYTES."""
    fresh: bool = False
    """Fallback makes the memory ready just ahead of each read, while it is in the CPU's cache."""


def default_width(cores: int, io_threads: int) -> int:
    """Threads one transfer uses, unless NOBOUNCE_IO_THREADS says how many."""
    return io_threads or max(LEAST_WIDTH, min(MOST_WIDTH, cores))


def choose(
    request: Request,
    route: Route,
    to: Destination,
    machine: Machine,
    call: Call = "now",
    stream_nbytes: int = STREAM_NBYTES,
) -> Strategy:
    """The strategy for a request that the judge has routed. `stream_nbytes` of the ring are a stream's share,
    unless the settings say otherwise."""
    chosen = request.settings
    plain = Strategy(
        default_width(machine.cores, chosen.io_threads), chosen.chunk_nbytes, chosen.chunk_nbytes
    )
    if to.relayed:
        found = _relayed(plain, request, route, to, machine, call)
        return _within_share(found, chosen, to, request.nbytes, stream_nbytes) if call == "stream" else found
    if request.op == "write" and chosen.chunk_nbytes == _DEFAULTS.chunk_nbytes:
        return plain._replace(direct_nbytes=WRITE_DIRECT_NBYTES)
    return _fresh(plain, route, chosen, machine) if call == "fresh" else plain


def _relayed(
    plain: Strategy, request: Request, route: Route, to: Destination, machine: Machine, call: Call
) -> Strategy:
    chosen, nbytes, reads = request.settings, request.nbytes, request.op == "read"
    all_cached = all(s.reason.code in CACHED_CODES for s in route.segments)
    all_fallback = all(s.backend == "fallback" for s in route.segments)
    found = plain
    # Not behind a gate: registering memory waits for work on the device, and the gate would wait for it.
    dma = 0 if call == "stream" or not reads else dma_workers(chosen, to, machine, nbytes)
    found = found._replace(dma_workers=dma)
    if dma and all_cached:
        found = found._replace(width=(chosen.io_threads or 1) + dma)
    beside = dma > 0 and all_cached
    kernels = reads and all_fallback and (beside or not dma)
    if kernels and kernel_relay(chosen, machine, nbytes, beside=beside):
        if beside:
            slots = BESIDE_SLOTS
            found = found._replace(width=dma + bool(BESIDE_SLOTS))
        else:
            slots = KERNEL_SLOTS
            large = KERNEL_CHUNK_CACHED if all_cached else KERNEL_CHUNK
            found = found._replace(width=1, chunk_nbytes=max(found.chunk_nbytes, large))
        found = found._replace(kernel_slots=min(slots, -(-nbytes // to.slot_nbytes)))
    return found


def dma_workers(chosen: Settings, to: Destination, machine: Machine, nbytes: int) -> int:
    """Threads that read page-cached bytes by DMA from the page cache.

    It costs a quarter of a relay's CPU, but registering pages is serial in the driver, at 14 to 49 GiB/s by
    machine and by how the file came into the cache: with a small relay on the other core beside it, it is the
    faster way on few cores; a dozen kernel workers are on many. NOBOUNCE_PAGE_CACHE_DMA overrides.
    """
    if chosen.page_cache_dma != "auto":
        return int(chosen.page_cache_dma)
    return int(to.page_cache_dma and machine.cores <= FEW_CORES and nbytes >= DMA_MIN_NBYTES)


def kernel_relay(chosen: Settings, machine: Machine, nbytes: int, *, beside: bool = False) -> bool:
    """Whether io_uring's workers read for the ring: one thread of ours then, however large the transfer.

    Not on few cores unless `beside` DMA from the page cache. NOBOUNCE_RELAY and NOBOUNCE_IO_THREADS override.
    """
    if chosen.relay == "threads" or not machine.kernel_reads:
        return False
    if chosen.relay == "io_uring":
        return True
    return (beside or machine.cores > FEW_CORES) and not chosen.io_threads and nbytes >= KERNEL_MIN_NBYTES


def _within_share(
    found: Strategy, chosen: Settings, to: Destination, nbytes: int, stream_nbytes: int
) -> Strategy:
    """No more of the ring than one stream may hold."""
    share = _stream_share(chosen, stream_nbytes)
    share = min(share, -(-max(1, nbytes) // to.slot_nbytes) * to.slot_nbytes)
    slots = max(1, share // to.slot_nbytes)
    if found.kernel_slots:
        return found._replace(kernel_slots=min(found.kernel_slots, slots))
    each = 2 if slots >= 2 else 1
    chunk = max(PAGE, share // PAGE * PAGE)
    return found._replace(
        width=max(1, min(found.width, slots // each)),
        slots=each,
        chunk_nbytes=min(found.chunk_nbytes, chunk),
        direct_nbytes=min(found.direct_nbytes, chunk),
    )


def _stream_share(chosen: Settings, otherwise: int) -> int:
    """Bytes of the ring that one stream may hold; `otherwise` where HIPFILE_ASYNC_BUFFER_SIZE is not set."""
    said = chosen.async_buffer_nbytes
    set_by = dict(chosen.origin).get("async_buffer_nbytes", "default")
    return said if said != ASYNC_BUFFER_NBYTES or set_by != "default" else otherwise


def _fresh(plain: Strategy, route: Route, chosen: Settings, machine: Machine) -> Strategy:
    """As many threads and such pieces as suit fresh memory of the host, where the settings leave it open."""
    found = plain._replace(fresh=True)
    if not chosen.io_threads:
        if route.nbytes("fastpath"):
            found = found._replace(width=max(found.width, FRESH_DIRECT_WIDTH))
        else:
            # Copying keeps a core busy, and what it was about to write in that core's cache.
            found = found._replace(width=min(found.width, max(2, machine.cores)))
        if chosen.chunk_nbytes == _DEFAULTS.chunk_nbytes:
            found = found._replace(direct_nbytes=FRESH_DIRECT_NBYTES)
    return found._replace(tail=max(1, found.width // 2))


def one_of_many(chosen: Settings) -> Strategy:
    """A request of a batch: many run at once, so each is one thread's, with one slot."""
    return Strategy(1, chosen.chunk_nbytes, chosen.chunk_nbytes, slots=1)


class Gathering(NamedTuple):
    """How the blocks of a batch are gathered: threads of ours, the most that one is given at a time, and
    polling threads of the kernel that read for it (0: each thread reads itself)."""

    width: int
    rows: int
    nbytes: int
    polled: int = 0


def gathering(
    chosen: Settings, machine: Machine, count: int, nbytes: int, *, direct: bool = False
) -> Gathering:
    """For `count` blocks of `nbytes` bytes in all: as many threads as cores, two windows or more for each,
    none for a few blocks. `direct`: some go past the page cache, and storage wants no more of them at once
    than the rings of a few threads hold."""
    polled = 0 if direct else spreading(chosen, machine, nbytes, count)
    if polled and (chosen.relay == "polled" or nbytes >= POLLED_NBYTES or count >= POLLED_ROWS):
        share = max(SPREAD_EACH_NBYTES, min(SLOT_NBYTES, nbytes // (2 * polled)))
        rows = max(SPREAD_EACH_ROWS, min(GATHER_ROWS, count // (2 * polled)))
        return Gathering(1, rows, share, polled)
    most = GATHER_WIDTH_LARGE if nbytes >= GATHER_LARGE_NBYTES * count else GATHER_WIDTH
    width = chosen.io_threads or min(most, max(1, machine.cores))
    width = max(1, min(width, count, nbytes // GATHER_LEAST_NBYTES))
    share = max(GATHER_LEAST_NBYTES, min(SLOT_NBYTES, nbytes // (2 * width)))
    return Gathering(width, max(1, min(GATHER_ROWS, -(-count // width))), share)


def spreading(
    chosen: Settings, machine: Machine, nbytes: int, count: int = 0, *, streak: bool = False
) -> int:
    """Polling threads of the kernel for a read of `nbytes` bytes, in `count` blocks if there are several; 0
    on few cores, for few bytes, or where the settings ask for other ways. `streak`: others came just before,
    so that more are likely to follow."""
    if not machine.kernel_reads or chosen.relay not in ("auto", "polled") or chosen.io_threads:
        return 0
    if chosen.relay == "polled":
        return max(2, min(MOST_POLLERS, machine.cores))
    worth = max(nbytes // SPREAD_EACH_NBYTES, count // SPREAD_EACH_ROWS)
    if machine.cores <= FEW_CORES or worth < 2:
        return 0
    most = min(MOST_POLLERS, machine.cores - machine.cores // 4)
    if not (streak or nbytes >= POLLED_NBYTES or count >= POLLED_ROWS):
        most = min(FEW_POLLERS, most)
    return min(most, worth)


def slots_ahead(nbytes: int, slot_nbytes: int) -> int:
    """Slots of a bounce ring to have ready for a batch of `nbytes` bytes in stream order: for its polling
    threads and a spare one, no more than it fills."""
    return max(2, min(MOST_POLLERS + 2, -(-nbytes // slot_nbytes)))


def threads_ahead(chosen: Settings, nbytes: int) -> int:
    """Threads worth starting before a direct read of `nbytes` bytes into fresh memory is asked for."""
    return min(chosen.io_threads or FRESH_DIRECT_WIDTH, -(-nbytes // TAIL_NBYTES))
