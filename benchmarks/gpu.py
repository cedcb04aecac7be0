"""GPU benchmark: a large safetensors file into device memory, beside the ways its users have, everything in one run.

    python benchmarks/gpu.py [--dir DIR] [--gib 8] [--runs 5] [--sections limits,warm,cold,...] [--json OUT]

Prints the machine, the link's and the disk's limits first. "warm": the file is in the page cache (verified); "cold": it
is not. Every sample is printed; ratios are of medians. Exit code 1 when a floor is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import files
from common import GIB
from gpu_first import first_section
from gpu_floors import floors
from gpu_pieces import pieces_section
from gpu_tune import tune_section
from gpu_ways import Bench, direct_read, loaders

SECTIONS = (
    "limits",
    "warm",
    "cold",
    "async",
    "latency",
    "first",
    "write",
    "two-cores",
    "reread",
    "pieces",
    "tune",
)


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
    piece, ring = 4 << 20, 128 << 20
    rates = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for at in range(0, 8 << 30, piece):
            at %= ring
            target[at : at + piece].copy_(pinned[at : at + piece], non_blocking=True)
        torch.cuda.synchronize()
        rates.append(8 / (time.perf_counter() - begin))
    bench.notes["link_4_mib_gibps"] = statistics.median(rates)
    print(f"the same by copies of 4 MiB from a ring of 128 MiB: {statistics.median(rates):.2f} GiB/s")
    allocating(bench)


def allocating(bench: Bench) -> None:
    """Milliseconds to allocate memory for the whole file and to free it again, as each of our loads does."""
    import nobounce

    device, taken, freed = nobounce.Device(bench.device), [], []
    for _ in range(5):
        begin = time.perf_counter()
        buffer = device.allocate(bench.nbytes)
        middle = time.perf_counter()
        buffer.close()
        taken.append((middle - begin) * 1e3)
        freed.append((time.perf_counter() - middle) * 1e3)
    bench.notes["allocate_ms"], bench.notes["free_ms"] = statistics.median(taken), statistics.median(freed)
    print(
        f"device memory for the file: {statistics.median(taken):.1f} ms to allocate, {statistics.median(freed):.1f} ms to free"
    )


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(".bench"))
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sections", default=",".join(s for s in SECTIONS if s not in ("pieces", "tune")))
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
        "pieces": lambda: pieces_section(bench),
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
