"""What `gpu.py` races: the samples, and every way to bring the file to the device that is installed here."""

from __future__ import annotations

import mmap
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import races
from common import GIB

# nobounce gives pinned pages back half a second after a load, on a thread of its own: nobody's clock may run then, but the CPU
# it costs is counted.
REST_SECONDS = 0.8
KVIKIO = {True: ((2, 16), (4, 4)), False: ((16, 8), (16, 16), (12, 16))}
"""(threads, MiB of a task and of a bounce buffer) that kvikio was fastest with, on up to 4 cores and on more."""


class Bench:
    """What is measured on one file; `samples[section][name]` holds dicts of seconds and CPU seconds."""

    def __init__(self, path: Path, runs: int, device: str) -> None:
        self.path, self.runs, self.device = path, runs, device
        self.nbytes = path.stat().st_size
        self.only: tuple[str, ...] = ()
        """Beginnings of the names of the loaders to race; empty for all."""
        self.samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self.notes: dict[str, Any] = {}

    def race(self, section: str, ways: dict[str, Callable[[], Any]], prepare: Callable[[], None]) -> None:
        """Run the ways in turns, in another order each round; one warming round is not counted."""
        found = self.samples.setdefault(section, {name: [] for name in ways})
        for run, name in races.rounds(list(ways), self.runs + 1):
            prepare()
            before = resource.getrusage(resource.RUSAGE_SELF)
            begin = time.perf_counter()
            extra = ways[name]()
            seconds = time.perf_counter() - begin
            time.sleep(REST_SECONDS)
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if run:
                found[name].append({"seconds": seconds, "cpu": cpu, **(extra or {})})
        self.show(section)

    def show(self, section: str) -> None:
        print(f"\n{section}: {self.nbytes / GIB:.2f} GiB")
        for name, rows in self.samples[section].items():
            if not rows:
                continue
            rates = [self.nbytes / GIB / r["seconds"] for r in rows]
            cpu = statistics.median(r["cpu"] for r in rows) / (self.nbytes / GIB)
            every = " ".join(f"{r:.2f}" for r in rates)
            print(
                f"  {name:<26} {statistics.median(rates):6.2f} GiB/s  {cpu:.3f} s CPU/GiB  [{every}]",
                flush=True,
            )
            if rows[0].get("route"):
                print(f"  {'':<26} {rows[0]['route']}")

    def rate(self, section: str, name: str) -> float | None:
        rows = self.samples.get(section, {}).get(name)
        return statistics.median(self.nbytes / GIB / r["seconds"] for r in rows) if rows else None

    def best(self, section: str, start: str) -> str:
        """The fastest of the ways whose names begin so; `start` itself where there is none."""
        names = [n for n in self.samples.get(section, {}) if n.startswith(start)]
        return max(names, key=lambda n: self.rate(section, n) or 0.0, default=start)

    def cpu(self, section: str, name: str) -> float | None:
        rows = self.samples.get(section, {}).get(name)
        return statistics.median(r["cpu"] for r in rows) if rows else None


def loaders(bench: Bench, *, require: str = "auto", cache: str = "auto") -> dict[str, Callable[[], Any]]:
    """Every way to bring the file to the device that is installed here."""
    import torch

    path, device = str(bench.path), bench.device

    def nobounce_load() -> dict[str, Any]:
        import nobounce

        model = nobounce.load(path, device=device, framework="torch", require=require, cache=cache)
        torch.cuda.synchronize()
        r = model.receipt
        return {
            "route": f"fastpath {r.fastpath_bytes}, fallback {r.fallback_bytes}, cached {r.cached_bytes}, relayed {r.host_traffic_bytes // 2}, evidence {r.evidence}"
        }

    def safetensors_gpu() -> None:
        import safetensors.torch

        safetensors.torch.load_file(path, device=device)
        torch.cuda.synchronize()

    def safetensors_cuda() -> None:
        import safetensors.torch

        moved = {k: v.to(device) for k, v in safetensors.torch.load_file(path).items()}
        torch.cuda.synchronize()
        del moved

    ways: dict[str, Callable[[], Any]] = {"nobounce": nobounce_load}
    try:
        import cupy
        import kvikio
        import kvikio.defaults

        def kvikio_with(threads: int, mib: int) -> Callable[[], None]:
            def load() -> None:
                nbytes = mib << 20
                tuned = {"num_threads": threads, "task_size": nbytes, "bounce_buffer_size": nbytes}
                kvikio.defaults.set(tuned)
                target = cupy.empty(bench.nbytes, cupy.uint8)
                with kvikio.CuFile(path, "r") as f:
                    f.pread(target).get()

            return load

        for threads, mib in KVIKIO[len(os.sched_getaffinity(0)) <= 4]:
            ways[f"kvikio {threads} x {mib} MiB"] = kvikio_with(threads, mib)
    except ImportError as e:
        print(f"kvikio is not here: {e}")
    ways["safetensors .to"] = safetensors_cuda
    ways["safetensors device="] = safetensors_gpu
    return {n: way for n, way in ways.items() if not bench.only or n.startswith(bench.only)}


def direct_read(bench: Bench, threads: int = 8, block: int = 8 << 20) -> Callable[[], None]:
    """A plain multi-threaded O_DIRECT read of the whole file into memory that is there already. Raises OSError."""
    blocks = [mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]
    for touched in blocks:
        touched[:] = bytes(block)

    def work(fd: int, first: int, moved: list[int]) -> None:
        for start in range(first * block, bench.nbytes, threads * block):
            moved[first] += os.preadv(fd, [blocks[first]], start)

    def read() -> None:
        moved = [0] * threads
        fd = os.open(bench.path, os.O_RDONLY | os.O_DIRECT)
        workers = [threading.Thread(target=work, args=(fd, n, moved)) for n in range(threads)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        os.close(fd)
        if sum(moved) != bench.nbytes:
            raise OSError(f"read {sum(moved)} of {bench.nbytes} bytes")

    return read
