"""`gpu.py --sections pieces`: what the pieces of a load cost one by one, as its figures in the sources and in README.md are chosen by."""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import common
import races
from common import GIB
from gpu_ways import Bench

from nobounce.runtimes import libc

MIB = 1 << 20
SLOT_NBYTES, SLOTS = 4 * MIB, 24
POPULATE_READ = 22
PORTABLE, READ_ONLY, NONBLOCKING, NO_TIMING = 1, 8, 1, 2
"""Flags of cudaHostAlloc, cudaHostRegister, cudaStreamCreateWithFlags and cudaEventCreateWithFlags."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


def ok(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) > 1 else None


def pieces_section(bench: Bench) -> None:
    """GiB/s of copies out of a ring, milliseconds for a ring's slots, GiB/s of mapping and registering page-cached windows."""
    from cuda.bindings import runtime

    copies(bench, runtime)
    slots(bench, runtime)
    windows(bench, runtime)


def _race(bench: Bench, name: str, ways: dict[str, Callable[[], float]], unit: str, runs: int = 5) -> None:
    """Run the ways in turns; one round is not counted."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for run, way in races.rounds(list(ways), runs + 1):
        value = ways[way]()
        if run:
            found[way].append(value)
    bench.notes[name] = found
    print(f"\n{name}, {unit}")
    for way, values in found.items():
        each = " ".join(f"{v:.1f}" for v in values)
        print(f"  {way:<34} {statistics.median(values):7.1f}  [{each}]", flush=True)


def copies(bench: Bench, runtime: Any, nbytes: int = 4 << 30) -> None:
    """4 GiB out of 128 MiB of pinned memory, an event behind each copy or batch."""
    import torch

    ring = 128 * MIB
    pinned = torch.empty(ring, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    stream = ok(runtime.cudaStreamCreateWithFlags(NONBLOCKING))
    events = [ok(runtime.cudaEventCreateWithFlags(NO_TIMING)) for _ in range(SLOTS)]
    each = runtime.cudaMemcpyAttributes()
    each.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice

    def way(size: int, count: int, *, batch: bool) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            for number, at in enumerate(range(0, nbytes, size * count)):
                dsts = [target.data_ptr() + at + n * size for n in range(count)]
                srcs = [pinned.data_ptr() + (at + n * size) % ring for n in range(count)]
                event = events[number % len(events)]
                ok(runtime.cudaEventSynchronize(event))
                if batch:
                    sizes = [size] * count
                    ok(runtime.cudaMemcpyBatchAsync(dsts, srcs, sizes, count, [each], [0], 1, stream))
                else:
                    for dst, src in zip(dsts, srcs, strict=True):
                        ok(runtime.cudaMemcpyAsync(dst, src, size, to_device, stream))
                ok(runtime.cudaEventRecord(event, stream))
            ok(runtime.cudaStreamSynchronize(stream))
            return nbytes / GIB / (time.perf_counter() - begin)

        return run

    ways = {
        "4 MiB, one by one": way(4 * MIB, 1, batch=False),
        "64 MiB, one by one": way(64 * MIB, 1, batch=False),
        "1 MiB, one by one": way(MIB, 1, batch=False),
        "4 x 4 MiB, one event": way(4 * MIB, 4, batch=False),
        "2 x 4 MiB in a batch": way(4 * MIB, 2, batch=True),
        "4 x 4 MiB in a batch": way(4 * MIB, 4, batch=True),
        "8 x 1 MiB in a batch": way(MIB, 8, batch=True),
    }
    _race(bench, "copies out of a ring", ways, "GiB/s")


def slots(bench: Bench, runtime: Any) -> None:
    """Two dozen slots of 4 MiB, allocated by CUDA or mapped, zeroed and registered."""

    def allocate() -> float:
        begin = time.perf_counter()
        made = [ok(runtime.cudaHostAlloc(SLOT_NBYTES, PORTABLE)) for _ in range(SLOTS)]
        seconds = time.perf_counter() - begin
        for address in made:
            ok(runtime.cudaFreeHost(address))
        return seconds * 1e3

    def register() -> float:
        begin = time.perf_counter()
        made = []
        for _ in range(SLOTS):
            made.append(libc.map_huge(SLOT_NBYTES))
            libc.populate(made[-1], SLOT_NBYTES)
            ok(runtime.cudaHostRegister(made[-1], SLOT_NBYTES, PORTABLE))
        seconds = time.perf_counter() - begin
        for address in made:
            ok(runtime.cudaHostUnregister(address))
            libc.unmap(address, SLOT_NBYTES)
        return seconds * 1e3

    _race(bench, "24 slots of a ring", {"cudaHostAlloc": allocate, "huge pages, registered": register}, "ms")


def windows(bench: Bench, runtime: Any, nbytes: int = 4 << 30) -> None:
    """Page-cached bytes mapped, their page tables filled, and registered, by several threads; GiB/s of each step."""
    common.warm(bench.path)
    nbytes = min(nbytes, bench.nbytes // (256 * MIB) * 256 * MIB)
    fd = os.open(bench.path, os.O_RDONLY)

    def side_by_side(threads: int, work: Callable[[int], None], places: Iterable[int]) -> float:
        todo, lock = iter(places), threading.Lock()

        def one() -> None:
            ok(runtime.cudaSetDevice(0))
            while True:
                with lock:
                    at = next(todo, None)
                if at is None:
                    return
                work(at)

        team = [threading.Thread(target=one) for _ in range(threads)]
        begin = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        return nbytes / GIB / (time.perf_counter() - begin)

    def way(threads: int, mib: int, step: str) -> Callable[[], float]:
        size = mib * MIB

        def run() -> float:
            places, address = range(0, nbytes, size), {}

            def mapping(at: int) -> None:
                address[at] = libc.map_file(fd, at, size)

            def filling(at: int) -> None:
                if _madvise(address[at], size, POPULATE_READ):
                    raise OSError(ctypes.get_errno(), "madvise")

            def registering(at: int) -> None:
                ok(runtime.cudaHostRegister(address[at], size, PORTABLE | READ_ONLY))

            side_by_side(threads, mapping, places)
            filled = side_by_side(threads, filling, places) if step != "registered" else 0.0
            registered = side_by_side(threads, registering, places)
            for at in places:
                ok(runtime.cudaHostUnregister(address[at]))
                libc.unmap(address[at], size)
            return filled if step == "filled" else registered

        return run

    ways = {
        f"{threads} threads, {mib} MiB: {step}": way(threads, mib, step)
        for threads, mib in ((1, 64), (1, 256), (2, 64), (4, 64))
        if threads <= len(os.sched_getaffinity(0))
        for step in ("filled", "registered", "registered, filled before")
    }
    _race(bench, "page-cached windows", ways, "GiB/s", runs=3)
    os.close(fd)
