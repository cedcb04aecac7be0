"""Boxes of tensors that are many runs of their file, such as a range of columns: cut on the host.

What the page cache holds is copied out of a mapping of the file by several threads, so that only what is
wanted is touched: on 2 cores 8 GiB/s of it and more where the file was written at one go, 2 to 3 where its
pages lie apart and are mapped one by one. But a page that vanishes from under a mapping, as when another
program truncates the file, ends the process by SIGBUS. So the file is mapped only under a read lease
(fcntl(2), F_SETLEASE), which has such a program wait until the copy is made. Where there is none to be had,
because somebody has the file open for writing, it is another user's, or its file system has none, whole rows
are read by the block and cut, 2.8 GiB/s where an eighth of each row is wanted, or where the gaps are long the
runs alone. Everything else goes as any read does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.buffer import as_buffer
from nobounce.config import settings
from nobounce.errors import FileChangedError, RouteError, TransferError, printable
from nobounce.facts.pagecache import estimate
from nobounce.formats.selection import GAP_NBYTES, Wanted
from nobounce.io.engine import engine_for, machine_for
from nobounce.io.receipt import Receipt, Segment, total
from nobounce.records import replace
from nobounce.route.types import Reason, Refusal

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device
    from nobounce.formats.loading import How
    from nobounce.io.engine import Engine
    from nobounce.io.file import File

BLOCK_NBYTES = 8 << 20
CACHED_NBYTES = 4 << 20
"""A block that a thread reads out of the page cache and cuts: smaller ones cost more Python, larger ones more
of the processor's cache."""
MOSTLY = 0.95
"""Part of a box's span that is in the page cache where the few pages that are not may come through it too."""
PAGE = mmap.PAGESIZE
HUGE = 2 << 20
"""One mapping that begins at a multiple of this in the file: large folios are then mapped at one go, 8
GiB/s where pieces give 3.5."""
CUT = Reason("strided-slice", "a slice that is many runs of its file is cut out of the page cache")
STRIDED = Refusal(
    "strided-slice",
    "a slice that is many runs of its file is cut in host memory",
    "slice the first dimension alone, or load the whole tensor",
)


class Rows(NamedTuple):
    """`number` rows, `step` bytes apart, of which the first has its run of `run` bytes at `file_offset`; they
    are rows `first` on of the box."""

    file_offset: int
    number: int
    step: int
    run: int
    first: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file from the first run's beginning to the last one's end."""
        return (self.number - 1) * self.step + self.run


def read(file: File, data_offset: int, want: Wanted, device: Device, buffer: Buffer, how: How) -> Receipt:
    """Bring the box, contiguous, into a buffer of its size on `device`. Raises as `File.read`; RouteError
    where every byte must go direct."""
    if how.require == "fastpath" or not settings().allow_compat_mode:
        name = printable(file.name)
        raise RouteError(
            f"{name}: fastpath is required, but {STRIDED}", (STRIDED,), filename=file.name, backend="fastpath"
        )
    import numpy as np

    host = buffer.view() if buffer.is_host_accessible else memoryview(bytearray(want.nbytes))
    rows, run = _rows_of(want, data_offset)
    out = np.ndarray((want.nbytes // run, run), np.uint8, host)
    start, nbytes = data_offset + want.start, want.end - want.start
    if how.cache != "avoid" and estimate(file.fileno(), start, nbytes) >= MOSTLY:
        receipt = _cached(file, rows, out, device)
    else:
        receipt = replace(_blocks(file, rows, out, how), device=device.name)
    if not buffer.is_host_accessible:
        stream = device.default_stream
        buffer.copy_from(host, stream=stream)
        stream.sync()
    if how.progress is not None:
        how.progress("fallback", receipt.nbytes)
    return receipt


def empty(path: str, device: Device) -> Receipt:
    """The receipt of nothing."""
    return Receipt("read", path, device.name, 0, 0)


def _blocks(file: File, rows: Sequence[Rows], out: Any, how: How) -> Receipt:
    """By reads like any other."""
    import numpy as np

    receipts: list[Receipt] = []
    scratch = np.empty(0, np.uint8)
    for block in _cut_up(rows, BLOCK_NBYTES):
        begin, end = block.file_offset // PAGE * PAGE, block.file_offset + block.nbytes
        room = -(-end // PAGE) * PAGE - begin
        if len(scratch) < room:
            scratch = np.empty(room, np.uint8)
        buffer = as_buffer(scratch, write=True)
        nbytes = min(begin + room, file.nbytes) - begin
        receipts.append(
            file.read(buffer, nbytes=nbytes, file_offset=begin, require=how.require, cache=how.cache)
        )
        if begin + receipts[-1].nbytes < end:
            raise _ended(file)
        _copy(scratch, block.file_offset - begin, block, out)
    return total(receipts)


def _cached(file: File, rows: Sequence[Rows], out: Any, device: Device) -> Receipt:
    """By several threads, out of the page cache."""
    pool = engine_for(device._runtime)
    started = pool.scheduler.now()
    moved = out.nbytes
    with _leased(file.fileno()) as leased:
        if leased >= 0 and os.fstat(leased).st_size >= rows[-1].file_offset + rows[-1].nbytes:
            _copy_mapped(leased, rows, out, pool)
        else:
            moved = _read_cached(file, rows, out, pool)
    segment = Segment("fallback", rows[0].file_offset, 0, moved, CUT)
    times = started, started, pool.scheduler.now()
    return Receipt("read", file.name, device.name, moved, moved, (segment,), (), "none", *times)


@contextlib.contextmanager
def _leased(fd: int) -> Iterator[int]:
    """A descriptor of the same file with a read lease on it; -1 where there is none to be had."""
    own = -1
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGURG)  # which nobody hears; SIGIO would end the process
        fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        if own >= 0:
            os.close(own)
        own = -1
    try:
        yield own
    finally:
        if own >= 0:
            os.close(own)


def _copy_mapped(leased: int, rows: Sequence[Rows], out: Any, pool: Engine) -> None:
    """Out of mappings of a file that nobody can truncate meanwhile."""
    import numpy as np

    blocks = list(_cut_up(rows, BLOCK_NBYTES))
    begin = rows[0].file_offset // HUGE * HUGE
    # Unmapped with the last array over it.
    nbytes = rows[-1].file_offset + rows[-1].nbytes - begin
    mapping = mmap.mmap(leased, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin)
    source = np.frombuffer(mapping, np.uint8)

    def one(_: Any, number: int) -> None:
        _copy(source, blocks[number].file_offset - begin, blocks[number], out)

    _Together(pool, len(blocks), one, lambda: None).run()


def _read_cached(file: File, rows: Sequence[Rows], out: Any, pool: Engine) -> int:
    """By reads of blocks; returns how many bytes they were."""
    import numpy as np

    fd = file.fileno()
    blocks = list(_cut_up(rows, CACHED_NBYTES))

    def one(scratch: Any, number: int) -> None:
        block, done = blocks[number], 0
        # A single run needs no cutting.
        into = out[block.first] if block.number == 1 else scratch[: block.nbytes]
        view = memoryview(into)
        while done < block.nbytes:
            try:
                n = os.preadv(fd, [view[done:]], block.file_offset + done)
            except OSError as e:
                raise TransferError(
                    e.errno or errno.EIO,
                    filename=file.name,
                    file_offset=block.file_offset + done,
                    nbytes=block.nbytes - done,
                    backend="fallback",
                    call="pread",
                ) from e
            if not n:
                raise _ended(file)
            done += n
        if block.number > 1:
            _copy(into, 0, block, out)

    largest = max((b.nbytes for b in blocks if b.number > 1), default=0)
    _Together(pool, len(blocks), one, lambda: np.empty(largest, np.uint8)).run()
    return sum(b.nbytes for b in blocks)


class _Together:
    """Pieces of work by number, carried out by the caller and by threads of the pool."""

    def __init__(
        self, pool: Engine, count: int, one: Callable[[Any, int], None], scratch: Callable[[], Any]
    ) -> None:
        self._pool, self._count, self._one, self._scratch = pool, count, one, scratch
        self.tickets = min(machine_for(pool.scheduler).cores, count)
        self._changed = pool.scheduler.condition()
        self._next = self._active = 0
        self._error: BaseException | None = None

    def run(self) -> None:
        """Return when all is done; raises the first error."""
        try:
            self._pool.assist(self)
            self.work()
        finally:
            with self._changed.mutex:
                self._next = self._count
                self._changed.wait_for(lambda: not self._active)
        if self._error is not None:
            raise self._error

    def work(self) -> None:
        """What each thread does."""
        with self._changed.mutex:
            if self._next >= self._count:
                return
            self._active += 1
        try:
            scratch = self._scratch()
            while (number := self._claim()) is not None:
                self._one(scratch, number)
        except BaseException as e:
            with self._changed.mutex:
                self._error = self._error or e
                self._next = self._count
        finally:
            with self._changed.mutex:
                self._active -= 1
                self._changed.notify_all()

    def _claim(self) -> int | None:
        with self._changed.mutex:
            if self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1


def _ended(file: File) -> FileChangedError:
    return FileChangedError(
        f"{printable(file.name)}: the file ended while it was read", errno.ESTALE, file.name
    )


def _copy(source: Any, offset: int, rows: Rows, out: Any) -> None:
    """The runs of `rows`, the first at `offset` bytes of `source`, to their place, as words as
    wide as all of it allows."""
    import numpy as np

    to = out[rows.first : rows.first + rows.number]
    odd = rows.run | rows.step | (source.ctypes.data + offset) | to.ctypes.data
    size = next(n for n in (8, 4, 2, 1) if not odd % n)
    kind, width = np.dtype(f"u{size}"), rows.run // size
    view: Any = np.ndarray((rows.number, width), kind, source, offset, (rows.step, size))
    np.copyto(to.view(kind), view)


def _cut_up(rows: Sequence[Rows], limit: int) -> Iterator[Rows]:
    """Blocks of at most `limit` bytes, where a row is not longer; of single runs where the
    gaps between them are long."""
    for r in rows:
        together = 1 if r.step - r.run >= GAP_NBYTES else max(1, limit // r.step)
        for at in range(0, r.number, together):
            count = min(together, r.number - at)
            yield r._replace(file_offset=r.file_offset + at * r.step, number=count, first=r.first + at)


def _rows_of(want: Wanted, data_offset: int) -> tuple[list[Rows], int]:
    """The rows of a box, and the bytes of one's run."""
    box, whole, size = want.box or (), want.whole, want.dtype.bits // 8
    last = max(
        n for n, (a, b) in enumerate(box) if (a, b) != (0, whole[n])
    )  # what follows this dimension is whole
    inner = size * prod(whole[last + 1 :])
    step, run = inner * whole[last], inner * (box[last][1] - box[last][0])
    # Where the tensor begins, and in each row the run.
    base = want.start - sum(a * size * prod(whole[n + 1 :]) for n, (a, _) in enumerate(box))
    base += data_offset + inner * box[last][0]
    *outer, (first, stop) = box[:last]
    found: list[Rows] = []
    for index in itertools.product(*(range(*bounds) for bounds in outer)):
        number = 0
        for n, i in enumerate(index):
            number = number * whole[n] + i
        number = number * whole[len(outer)] + first
        found.append(Rows(base + number * step, stop - first, step, run, len(found) * (stop - first)))
    return found, run
