"""One synchronous read at a time, by size and cache policy, beside what the system calls alone take: who pays for asking?

    python benchmarks/sizes.py [--file FILE] [--device cpu] [--runs 200] [--quick] [--json [OUT]]

Cached: every page of the file is in the page cache; nobounce with cache="auto" and "use", and preadv into the same memory (on a
device that the host does not reach: into memory of the host). Cold: before each read its range is dropped; nobounce with
cache="auto" and "avoid", preadv, and preadv with O_DIRECT. Contestants take turns at every offset, and each begins as often as the
others. Printed are medians; the JSON holds all samples. Exit code 0, or 2 for usage and for what cannot be measured here.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
from common import GIB, Refused

import nobounce

SCHEMA, VERSION = "nobounce.benchmarks.sizes", 1
SIZES = [4096, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
MOST_NBYTES = 1 << 30
"""Bytes that a contestant reads at most for one size."""

Read = Callable[[int], object]


def race(
    contestants: dict[str, Read], offsets: Sequence[int], before: Callable[[int], None]
) -> dict[str, list[float]]:
    """Seconds of every read by contestant; `before(offset)` is outside of the clock."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for n, offset in enumerate(offsets):
        for k in range(len(names)):
            name = names[(n + k) % len(names)]
            before(offset)
            began = time.perf_counter()
            contestants[name](offset)
            found[name].append(time.perf_counter() - began)
    return found


def measure(path: Path, device: nobounce.Device, nbytes: int, runs: int) -> dict[str, dict[str, list[float]]]:
    """Samples by state and contestant. Raises Refused where the file cannot be made cold."""
    total = path.stat().st_size
    count = max(5, min(runs, MOST_NBYTES // nbytes))
    offsets = [(n * 7919 * 4096) % (total - nbytes + 1) // 4096 * 4096 for n in range(count)]
    plain, direct = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY | os.O_DIRECT)
    host = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(host)
    view[:] = bytes(nbytes)

    def policy(name: Any) -> Read:
        return lambda offset: file.read(buffer, file_offset=offset, cache=name)

    def cool(offset: int) -> None:
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)

    try:
        with nobounce.open(path) as file, device.allocate(nbytes) as buffer:
            buffer.fill(0, stream=None)
            cached: dict[str, Read] = {
                "auto": policy("auto"),
                "use": policy("use"),
                "preadv": lambda offset: os.preadv(plain, [view], offset),
            }
            cold: dict[str, Read] = {
                "auto": policy("auto"),
                "avoid": policy("avoid"),
                "preadv": lambda offset: os.preadv(plain, [view], offset),
                "O_DIRECT": lambda offset: os.preadv(direct, [view], offset),
            }
            for read in (*cached.values(), *cold.values()):
                read(0)
            common.warm(path)
            warm = race(cached, offsets, lambda _: None)
            common.drop(path, everything=False)
            return {"cached": warm, "cold": race(cold, offsets[: max(5, count // 4)], cool)}
    finally:
        view.release()
        host.close()
        os.close(plain)
        os.close(direct)


def show(nbytes: int, found: dict[str, dict[str, list[float]]]) -> None:
    for state, samples in found.items():
        middle = {name: statistics.median(times) for name, times in samples.items()}
        words = [
            f"{name} {s * 1e6:9.1f} us {nbytes / s / GIB:6.2f} GiB/s ({middle['preadv'] / s:.2f})"
            for name, s in middle.items()
        ]
        print(f"{nbytes >> 10:>6} KiB {state:>6}  " + "   ".join(words), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a file of at least 256 MiB; made if it is not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=200, help="reads of each contestant and size, at most")
    parser.add_argument("--quick", action="store_true", help="two sizes and few reads, to see that it runs")
    parser.add_argument(
        "--json", nargs="?", const="-", help="write every sample to OUT, or to standard output"
    )
    given = parser.parse_args(arguments)
    sizes, runs = (SIZES[:2], 20) if given.quick else (SIZES, given.runs)
    path = given.file or Path(".bench/sizes.bin")
    if given.file is None:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            with path.open("wb") as f:
                for _ in range(16 if given.quick else 64):
                    f.write(os.urandom(16 << 20))
                os.fsync(f.fileno())
    device = nobounce.Device(given.device)
    facts = common.machine(path.parent, ["nobounce"])
    common.print_machine(facts)
    print(f"device    {device.name}; in brackets: times as fast as preadv\n")
    document: dict[str, Any] = {"schema": SCHEMA, "version": VERSION, "machine": facts, "device": device.name}
    document["samples"] = {}
    try:
        for nbytes in sizes:
            found = measure(path, device, nbytes, runs)
            document["samples"][str(nbytes)] = found
            show(nbytes, found)
    except (Refused, OSError) as e:
        print(f"sizes: {e}", file=sys.stderr)
        return 2
    if given.json == "-":
        print(json.dumps(document))
    elif given.json:
        Path(given.json).write_text(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
