"""What this machine can do at most, measured in a moment: disk, host memory, and the link to a
device. Bytes per second.

Only what is asked for is touched: an existing file is only read; writing happens in a file of our
own, in the folder given.

Memory and descriptors belong to the threads that use them and go with the last one. An interrupt does
not wait for threads: a disk may hold them for good, and Python 3.11 takes a thread whose join was
interrupted for one that has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

from nobounce.device import Device
from nobounce.errors import NobounceError
from nobounce.facts.machine import own_cpus, this_machine
from nobounce.route.types import MemoryKind

CHUNK = 4 << 20
THREADS = 4


def host_memory(nbytes: int = 256 << 20, seconds: float = 0.4) -> float:
    """Copying between two touched blocks of `nbytes`, less where memory is short, with every core:
    bytes copied per second."""
    nbytes = min(nbytes, this_machine().own_memory_nbytes // 8)
    workers = min(THREADS, own_cpus())
    share = nbytes // workers // CHUNK * CHUNK or CHUNK
    pairs = [(_block(share), _block(share)) for _ in range(workers)]
    for a, b in pairs:
        for block in (a, b):
            address = ctypes.addressof(ctypes.c_char.from_buffer(block))
            ctypes.memset(address, 1, share)

    def copy(i: int) -> int:
        a, b = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in pairs[i])
        ctypes.memmove(a, b, share)
        return share

    return _rate(copy, workers, seconds)


def _block(nbytes: int) -> mmap.mmap:
    """Private memory, in huge pages where the kernel has them: shared memory gets none."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def disk_read(path: str, seconds: float = 0.6) -> float:
    """O_DIRECT reads all over an existing file, several at once; 0 where the file cannot be
    read so, or is too small."""
    try:
        file = _Direct(path, os.O_RDONLY)
    except OSError:
        return 0.0
    return _disk(file, os.lseek(file.fd, 0, os.SEEK_END), os.preadv, seconds)


def disk_write(path: str, nbytes: int, seconds: float = 0.6) -> float:
    """O_DIRECT writes into a file of our own, fsync included; 0 where that cannot be done."""
    try:
        file = _Direct(path, os.O_WRONLY)
    except OSError:
        return 0.0
    return _disk(file, nbytes, os.pwritev, seconds, lambda: os.fsync(file.fd))


class _Direct:
    """A descriptor for O_DIRECT that is closed when nothing holds this any more."""

    fd = -1

    def __init__(self, path: str, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            try:
                close(self.fd)
            except OSError:
                return  # the descriptor is gone all the same


def _disk(
    file: _Direct,
    nbytes: int,
    call: Callable[..., int],
    seconds: float,
    after: Callable[[], None] | None = None,
) -> float:
    chunks = nbytes // CHUNK
    if not chunks:
        return 0.0
    blocks = [_block(CHUNK) for _ in range(THREADS)]
    positions = _round(chunks)
    lock = threading.Lock()

    def move(i: int) -> int:
        with lock:
            at = next(positions)
        try:
            return call(file.fd, [blocks[i]], at * CHUNK)
        except OSError:
            return -1

    return _rate(move, THREADS, seconds, after)


def _round(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def _rate(
    work: Callable[[int], int], workers: int, seconds: float, after: Callable[[], None] | None = None
) -> float:
    done = [0] * workers
    failed: list[int] = []
    begin = time.perf_counter()

    def run(i: int) -> None:
        while time.perf_counter() - begin < seconds and not failed:
            moved = work(i)
            if moved < 0:
                failed.append(i)
                return
            done[i] += moved

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(workers)]
    try:
        for t in threads:
            try:
                t.start()
            except (RuntimeError, MemoryError):
                break  # no further thread may be started: those that run have to do
        if threads[0].ident is None:
            run(0)
        for t in threads:
            if t.ident is not None:
                t.join()
    except BaseException:
        failed.append(-1)  # they end by themselves
        raise
    if after is not None:
        after()
    return 0.0 if failed else sum(done) / (time.perf_counter() - begin)


def link(device: Device, nbytes: int = 32 << 20, seconds: float = 0.4) -> tuple[float, float]:
    """(to the device, from it): copies between pinned host memory and device memory. 0
    on cpu, which has no link."""
    if device._runtime.capabilities.host_addressable:
        return 0.0, 0.0
    try:
        with (
            device.allocate(nbytes) as far,
            device.allocate(nbytes, kind=MemoryKind.PINNED) as near,
            device.create_stream() as stream,
        ):
            rates = []
            for target, source in ((far, near), (near, far)):
                target.copy_from(source, stream=stream)
                stream.sync()
                begin, moved = time.perf_counter(), 0
                while time.perf_counter() - begin < seconds:
                    target.copy_from(source, stream=stream)
                    stream.sync()
                    moved += nbytes
                rates.append(moved / (time.perf_counter() - begin))
            return rates[0], rates[1]
    except NobounceError:
        return 0.0, 0.0
