"""Boxes of tensors that are many runs of their file, such as a range of columns: cut on the host.

What the page cache holds is copied from a mapping of the file by one strided copy, 5 to 10 GiB/s of what is wanted for runs of 192 B to
7 KiB on one core; reading the gaps as well would give 2. A page that vanishes from under a mapping, as when another program truncates the
file, would end the process by SIGBUS. So the file is mapped only under a read lease (fcntl(2), F_SETLEASE), which has such a program wait
until the copy is made. Where there is no lease, because somebody has the file open for writing, it is another user's, or its file system
has none, and where the page cache does not hold it all, blocks of whole rows are read and cut, or where the gaps are long the runs alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import signal
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from nobounce.buffer import as_buffer
from nobounce.config import settings
from nobounce.device import Device
from nobounce.errors import FileChangedError, RouteError, printable
from nobounce.facts.pagecache import counted
from nobounce.formats.selection import GAP_NBYTES, Wanted
from nobounce.io.receipt import Receipt, Segment, total
from nobounce.route.types import Reason, Refusal

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.formats.loading import How
    from nobounce.io.file import File

BLOCK_NBYTES = 8 << 20
MOSTLY = 0.95
"""Part of a box's span that is in the page cache where the few pages that are not may come through the mapping too."""
PAGE = mmap.PAGESIZE
CUT = Reason("strided-slice", "a slice that is many runs of its file is cut out of the page cache")
STRIDED = Refusal(
    "strided-slice",
    "a slice that is many runs of its file is cut in host memory",
    "slice the first dimension alone, or load the whole tensor",
)


def read(file: File, data_offset: int, want: Wanted, device: Device, buffer: Buffer, how: How) -> Receipt:
    """Bring the box, contiguous, into a buffer of its size on `device`. Raises as `File.read`; RouteError where every byte must go
    direct."""
    if how.require == "fastpath" or not settings().allow_compat_mode:
        name = printable(file.name)
        raise RouteError(
            f"{name}: fastpath is required, but {STRIDED}", (STRIDED,), filename=file.name, backend="fastpath"
        )
    import numpy as np

    kind = np.dtype("c16" if want.dtype.bits == 128 else f"u{want.dtype.bits // 8}")
    host = buffer.view() if buffer.is_host_accessible else memoryview(bytearray(want.nbytes))
    out = np.ndarray(want.shape, kind, host)
    receipt = _mapped(file, data_offset, want, device, out, how) or _blocks(file, data_offset, want, out, how)
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


def _mapped(file: File, data_offset: int, want: Wanted, device: Device, out: Any, how: How) -> Receipt | None:
    """By a mapping of what the page cache holds; None where that is not to be."""
    import numpy as np

    start, nbytes = data_offset + want.start, want.end - want.start
    fd = file.fileno()
    if how.cache == "avoid" or (counted(fd, start, nbytes).resident_bytes or 0) < MOSTLY * nbytes:
        return None
    with _leased(fd) as leased:
        if leased < 0 or os.fstat(leased).st_size < start + nbytes:
            return None
        begin = start // PAGE * PAGE
        # Closed by its last view, not here: numpy's hold it.
        mapping = mmap.mmap(
            leased, start - begin + nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin
        )
        strides, step = list[int](), out.dtype.itemsize
        for dim in reversed(want.whole):
            strides.append(step)
            step *= dim
        view: Any = np.ndarray(want.shape, out.dtype, mapping, start - begin, tuple(reversed(strides)))
        np.copyto(out, view)
        del view, mapping
    segment = Segment("fallback", start, 0, want.nbytes, CUT)
    return Receipt("read", file.name, device.name, want.nbytes, want.nbytes, (segment,))


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


def _blocks(file: File, data_offset: int, want: Wanted, out: Any, how: How) -> Receipt:
    """Whole rows by the block, cut; or the runs alone where what lies between them is long."""
    import numpy as np

    box, whole = want.box or (), want.whole
    last = max(n for n, (a, b) in enumerate(box) if (a, b) != (0, whole[n]))  # from here on a run is whole
    inner = out.dtype.itemsize * prod(whole[last + 1 :])
    row, lead = inner * whole[last], inner * box[last][0]
    run = inner * (box[last][1] - box[last][0])
    together = 1 if row - run >= GAP_NBYTES else max(1, BLOCK_NBYTES // row)
    flat = np.ndarray((out.nbytes // run, run), np.uint8, out.data)
    scratch = np.empty(together * row + 2 * PAGE, np.uint8)
    buffer = as_buffer(scratch, write=True)
    receipts: list[Receipt] = []
    done = 0
    for first, count in _rows(box[:last], whole[:last]):
        for at in range(0, count, together):
            rows = min(together, count - at)
            start = data_offset + _base(want) + (first + at) * row + lead
            begin, end = start // PAGE * PAGE, start + (rows - 1) * row + run
            nbytes = min(-(-end // PAGE) * PAGE, file.nbytes) - begin
            receipts.append(
                file.read(buffer, nbytes=nbytes, file_offset=begin, require=how.require, cache=how.cache)
            )
            if begin + receipts[-1].nbytes < end:
                raise FileChangedError(
                    f"{printable(file.name)}: the file ended while it was read", errno.ESTALE, file.name
                )
            strides = (row, 1)
            cut = np.lib.stride_tricks.as_strided(
                scratch[start - begin :], (rows, run), strides, writeable=False
            )
            np.copyto(flat[done : done + rows], cut)
            done += rows
    return total(receipts)


def _base(want: Wanted) -> int:
    """Where the whole tensor begins in the data section."""
    size = want.dtype.bits // 8
    return want.start - sum(a * size * prod(want.whole[n + 1 :]) for n, (a, _) in enumerate(want.box or ()))


def _rows(box: tuple[tuple[int, int], ...], whole: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first, how many) of the rows that a box of the leading dimensions has, numbered as in the whole tensor."""
    if not box:
        yield 0, 1
        return
    *outer, (a, b) = box
    for index in itertools.product(*(range(*bounds) for bounds in outer)):
        number = 0
        for n, i in enumerate(index):
            number = number * whole[n] + i
        yield number * whole[len(outer)] + a, b - a
