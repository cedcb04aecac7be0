"""GPU benchmark: a large safetensors file into device memory, beside the ways its users have, everything in one run.

    python benchmarks/gpu.py [--dir DIR] [--gib 8] [--runs 5] [--sections limits,warm,cold,...] [--json OUT]

Prints the machine, the link's and the disk's limits first. "warm": the file is in the page cache (verified); "cold": it
is not. Every sample is printed; ratios are of medians. Exit code 1 when a floor is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import files

GIB = common.GIB
# nobounce gives pinned pages back half a second after a load, on a thread of its own: nobody's clock may run then, but the CPU
# it costs is counted.
REST_SECONDS = 0.8
KVIKIO = {True: ((2, 16), (4, 4)), False: ((16, 8), (16, 16), (12, 16))}
"""(threads, MiB of a task and of a bounce buffer) that kvikio was fastest with, on up to 4 cores and on more."""
SECTIONS = ("limits", "warm", "cold", "async", "latency", "first", "write", "two-cores", "reread", "tune")


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
        """Run the ways in turns, the order rotated; one warming round is not counted."""
        found = self.samples.setdefault(section, {name: [] for name in ways})
        names = list(ways)
        for run in range(self.runs + 1):
            shift = run % len(names)
            for name in names[shift:] + names[:shift]:
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


def limits(bench: Bench) -> None:
    """The link (pinned host to device) and the disk (plain O_DIRECT, 8 threads x 8 MiB into touched memory)."""
    import torch

    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    rates = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(8):
            target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(8 / (time.perf_counter() - begin))
    bench.notes["link_gibps"] = statistics.median(rates)
    print(
        f"link, pinned host to device: {statistics.median(rates):.2f} GiB/s  [{' '.join(f'{r:.2f}' for r in rates)}]"
    )


def direct_read(bench: Bench, threads: int = 8, block: int = 8 << 20) -> Callable[[], None]:
    """A plain multi-threaded O_DIRECT read of the whole file into memory that is there already. Raises OSError."""
    import mmap

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


def verify(bench: Bench, cache: str) -> bool:
    """Every tensor bit for bit what safetensors reads."""
    import safetensors.torch
    import torch

    import nobounce

    model = nobounce.load(bench.path, device=bench.device, framework="torch", cache=cache)
    right = True
    for name, tensor in safetensors.torch.load_file(str(bench.path)).items():
        mine = model[name]
        same = mine.dtype == tensor.dtype and mine.shape == tensor.shape
        right &= same and torch.equal(mine.view(torch.uint8).cpu(), tensor.view(torch.uint8))
    return right


def warm_section(bench: Bench) -> None:
    common.warm(bench.path)
    bench.notes["verified_warm"] = verify(bench, "auto")
    common.warm(bench.path)
    bench.race("warm", loaders(bench), lambda: None)


def cold_section(bench: Bench) -> None:
    ways = {"nobounce": loaders(bench)["nobounce"], "plain O_DIRECT": direct_read(bench)}
    bench.race("cold", ways, lambda: common.drop(bench.path, everything=os.geteuid() == 0))
    common.drop(bench.path, everything=False)
    bench.notes["verified_cold"] = verify(bench, "avoid")


def async_section(bench: Bench) -> None:
    """Sync File.read beside read_async on 1, 4 and 8 streams, the same bytes, page-cached."""
    import nobounce

    device = nobounce.Device(bench.device)
    common.warm(bench.path)
    buffer = device.allocate(bench.nbytes // 4096 * 4096)
    f = nobounce.open(bench.path)

    def sync() -> None:
        f.read(buffer, cache="use")

    def on(count: int) -> Callable[[], None]:
        streams = [device.create_stream() for _ in range(count)]
        part = buffer.nbytes // count // 4096 * 4096

        def run() -> None:
            moves = []
            for n, stream in enumerate(streams):
                size = part if n < count - 1 else buffer.nbytes - part * (count - 1)
                moves.append(
                    f.read_async(
                        buffer,
                        stream=stream,
                        nbytes=size,
                        file_offset=n * part,
                        buffer_offset=n * part,
                        cache="use",
                    )
                )
            for m in moves:
                m.result()

        return run

    bench.race("async", {"sync": sync, **{f"{n} streams": on(n) for n in (1, 4, 8)}}, lambda: None)
    f.close()
    buffer.close()


def latency_section(bench: Bench) -> None:
    """A 4 KiB page-cached read in stream order while the caller waits, beside the same bytes by pread alone."""
    import nobounce

    device = nobounce.Device(bench.device)
    common.warm(bench.path)
    fd = os.open(bench.path, os.O_RDONLY)
    block = bytearray(4096)
    with nobounce.open(bench.path) as f, device.allocate(4096) as buffer, device.create_stream() as stream:
        plain, ordered, direct = [], [], []
        for n in range(600):
            at = n * 4096
            begin = time.perf_counter()
            os.preadv(fd, [block], at)
            middle = time.perf_counter()
            f.read_async(buffer, stream=stream, file_offset=at, cache="use").result()
            end = time.perf_counter()
            f.read(buffer, file_offset=at, cache="use")
            last = time.perf_counter()
            if n >= 100:
                plain.append(middle - begin)
                ordered.append(end - middle)
                direct.append(last - end)
    os.close(fd)
    for name, rows in (("pread", plain), ("in stream order", ordered), ("sync", direct)):
        rows.sort()
        bench.notes[f"latency_{name}_us"] = [rows[len(rows) * p // 100] * 1e6 for p in (1, 50, 90)]
        print(
            f"4 KiB {name}: p1/p50/p90 {' / '.join(f'{x:.1f}' for x in bench.notes[f'latency_{name}_us'])} us"
        )


FIRST = """
import sys, time, torch
torch.zeros(1, device=sys.argv[2]); torch.cuda.synchronize()
import nobounce, nobounce.formats.load
begin = time.perf_counter()
with nobounce.open(sys.argv[1]) as f, nobounce.Device(sys.argv[2]).allocate(64 << 20) as b:
    f.read(b, cache="use")
print(time.perf_counter() - begin)
"""


def first_section(bench: Bench) -> None:
    """First use beyond context creation: a 64 MiB read in a fresh process whose context is there."""
    common.warm(bench.path)
    found = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST, str(bench.path), bench.device],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found.append(float(done.stdout) * 1e3)
    bench.notes["first_use_ms"] = found
    print(
        "first use beyond the context, 64 MiB read included: " + " ".join(f"{x:.0f}" for x in found) + " ms"
    )


def write_section(bench: Bench, nbytes: int = 4 << 30) -> None:
    """4 GiB from the device to a file, on the disk when it returns."""
    import safetensors.torch
    import torch

    import nobounce

    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=bench.device)
    target = bench.path.with_name("written.bin")

    def ours() -> dict[str, Any]:
        with nobounce.open(target, "w+") as f:
            r = f.write(tensor, fsync=True)
        return {
            "route": f"fastpath {r.fastpath_bytes}, fallback {r.fallback_bytes}, relayed {r.host_traffic_bytes // 2}"
        }

    def theirs() -> None:
        safetensors.torch.save_file({"t": tensor}, str(target))
        fd = os.open(target, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    def clear() -> None:
        target.unlink(missing_ok=True)
        os.sync()

    keep, bench.nbytes = bench.nbytes, nbytes
    runs, bench.runs = bench.runs, min(3, bench.runs)
    try:
        bench.race("write", {"nobounce": ours, "safetensors save + fsync": theirs}, clear)
    finally:
        bench.nbytes, bench.runs = keep, runs
        clear()


def tune_section(bench: Bench) -> None:
    """Ring threads x page-cache DMA threads, page-cached, one by one (a figure for the choice, not a race)."""
    from nobounce import config

    common.warm(bench.path)
    ways = {}
    for ring, dma in (
        (1, 1),
        (1, 2),
        (2, 1),
        (4, 1),
        (6, 1),
        (8, 1),
        (4, 2),
        (8, 2),
        (8, 0),
        (12, 0),
        (16, 0),
    ):

        def one(ring: int = ring, dma: int = dma) -> Any:
            config.override(config.Settings(io_threads=ring, page_cache_dma=str(dma)))
            return loaders(bench)["nobounce"]()

        ways[f"ring {ring} + dma {dma}"] = one
    runs, bench.runs = bench.runs, 3
    bench.race("tune", ways, lambda: None)
    bench.runs = runs
    config.override(None)


def reread(bench: Bench, args: argparse.Namespace) -> None:
    """The warm races against kvikio again, with the file brought into the page cache by reading it.

    Read-ahead leaves it in small folios, where writing it left large ones: copying them, and registering them, takes longer.
    """
    common.drop(bench.path, everything=False)
    common.warm(bench.path)
    bench.only, kept = ("nobounce", "kvikio"), bench.only
    try:
        bench.race("reread", loaders(bench), lambda: None)
        two_cores(bench, args, "two-cores, reread", "nobounce,kvikio")
    finally:
        bench.only = kept


def two_cores(bench: Bench, args: argparse.Namespace, name: str = "two-cores", only: str = "") -> None:
    """The warm race again on 2 of the cores."""
    command = [
        "taskset",
        "-c",
        "0,1",
        sys.executable,
        __file__,
        "--dir",
        str(bench.path.parent),
        "--gib",
        str(args.gib),
    ]
    command += [
        "--runs",
        "3",
        "--sections",
        "warm",
        "--label",
        "two-cores",
        "--json",
        str(bench.path.parent / "two.json"),
        "--device",
        bench.device,
    ]
    subprocess.run([*command, "--ways", only], check=False, timeout=300)
    found = json.loads((bench.path.parent / "two.json").read_text())
    bench.samples[name] = found["samples"]["warm"]


def floors(bench: Bench) -> list[tuple[str, float | None, str]]:
    """(what, measured, wanted) of the floors that were measured."""

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    rate, found = bench.rate, []
    kvikio, kvikio_two = bench.best("warm", "kvikio"), bench.best("two-cores", "kvikio")
    best = max(
        (r for r in (rate("warm", "safetensors .to"), rate("warm", "safetensors device=")) if r), default=None
    )
    found.append(
        (
            "warm, against kvikio at its best",
            ratio(rate("warm", "nobounce"), rate("warm", kvikio)),
            ">= 1.3",
        )
    )
    found.append(("warm, against safetensors", ratio(rate("warm", "nobounce"), best), ">= 10"))
    found.append(
        (
            "warm on 2 cores, against kvikio",
            ratio(rate("two-cores", "nobounce"), rate("two-cores", kvikio_two)),
            ">= 3",
        )
    )
    found.append(
        (
            "CPU per GiB, of kvikio's",
            ratio(bench.cpu("warm", "nobounce"), bench.cpu("warm", kvikio)),
            "<= 1",
        )
    )
    found.append(
        (
            "cold, of the plain O_DIRECT read",
            ratio(rate("cold", "nobounce"), rate("cold", "plain O_DIRECT")),
            ">= 0.95",
        )
    )
    for n in (1, 4, 8):
        found.append(
            (
                f"async on {n} streams, of sync",
                ratio(rate("async", f"{n} streams"), rate("async", "sync")),
                ">= 0.95",
            )
        )
    found.append(
        (
            "write + fsync, against safetensors",
            ratio(rate("write", "nobounce"), rate("write", "safetensors save + fsync")),
            ">= 1.5",
        )
    )
    first = bench.notes.get("first_use_ms")
    found.append(("first use, ms", min(first) if first else None, "<= 250"))
    ordered, plain = bench.notes.get("latency_in stream order_us"), bench.notes.get("latency_pread_us")
    found.append(
        (
            "4 KiB in stream order, us beyond pread",
            ordered[1] - plain[1] if ordered and plain else None,
            "<= 60",
        )
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(".bench"))
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sections", default=",".join(s for s in SECTIONS if s != "tune"))
    parser.add_argument("--ways", default="", help="beginnings of names of loaders, by commas; all if empty")
    parser.add_argument("--label", default="gpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    path = args.dir / f"gpu-{args.gib:g}.safetensors"
    fresh = not path.exists()
    files.ensure_llama(path, int(args.gib * GIB))
    facts = common.machine(
        args.dir, ["nobounce", "torch", "safetensors", "kvikio-cu13", "cupy-cuda13x", "cuda-bindings"]
    )
    facts["cores_used"] = len(os.sched_getaffinity(0))
    import torch

    facts["gpu"] = torch.cuda.get_device_name(0)
    common.print_machine(facts)
    print(
        f"{facts['gpu']}, {facts['cores_used']} cores, {path.name}: {path.stat().st_size / GIB:.2f} GiB",
        flush=True,
    )
    bench = Bench(path, args.runs, args.device)
    bench.only = tuple(w for w in args.ways.split(",") if w)
    bench.notes["file_written_now"] = fresh
    sections: dict[str, Callable[[], None]] = {
        "limits": lambda: limits(bench),
        "warm": lambda: warm_section(bench),
        "cold": lambda: cold_section(bench),
        "async": lambda: async_section(bench),
        "latency": lambda: latency_section(bench),
        "first": lambda: first_section(bench),
        "write": lambda: write_section(bench),
        "two-cores": lambda: two_cores(bench, args),
        "reread": lambda: reread(bench, args),
        "tune": lambda: tune_section(bench),
    }
    for name in args.sections.split(","):
        try:
            sections[name]()
        except Exception as e:
            bench.notes[f"failed_{name}"] = f"{type(e).__name__}: {e}"
            print(f"{name} failed: {type(e).__name__}: {e}", flush=True)
        if args.json:
            data = {
                "schema": "nobounce.benchmark.gpu/1",
                "machine": facts,
                "nbytes": bench.nbytes,
                "samples": bench.samples,
                "notes": bench.notes,
            }
            args.json.write_text(json.dumps(data, indent=1))
    missed = 0
    print("\nfloors")
    for what, value, wanted in floors(bench):
        if value is None:
            continue
        sign, bound = wanted.split()
        met = value >= float(bound) if sign == ">=" else value <= float(bound)
        missed += not met
        print(f"  {'met   ' if met else 'MISSED'} {what}: {value:.2f} (wanted {wanted})")
    for name in ("verified_warm", "verified_cold"):
        if name in bench.notes:
            missed += not bench.notes[name]
            print(f"  {'equal ' if bench.notes[name] else 'DIFFER'} every tensor, bit for bit ({name[9:]})")
    return 1 if missed or any(n.startswith("failed_") for n in bench.notes) else 0


if __name__ == "__main__":
    sys.exit(main())
