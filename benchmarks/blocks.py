"""How fast scattered blocks of one file come into a device's memory: nobounce.Batch, peers and plain Python, in turns.

    python benchmarks/blocks.py [--file FILE] [--device D] [--gib 2] [--runs 5] [--state cached|cold] [--quick] [--json [OUT]]

Each contestant brings the same random blocks, packed or scattered, into one buffer of the device. Its clock covers everything
that a caller pays for one call: making the Batch or the futures, the reads, the copies, waiting, and looking at every status. What
is made once (files, pools, pinned memory) stays outside. After the last run some blocks are compared with the file. Rates are of
the median run; every sample is in the JSON. Exit code 2: usage, or what was asked cannot be measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import GIB, Refused
from random_read import make_file

SCHEMA, VERSION = "nobounce.benchmarks.blocks", 1
KIB, MIB = 1 << 10, 1 << 20
CASES = (
    (4 * KIB, 64),
    (4 * KIB, 4096),
    (4 * KIB, 32768),
    (64 * KIB, 4096),
    (64 * KIB, 32768),
    (256 * KIB, 4096),
    (2 * MIB, 1024),
)
QUICK = ((4 * KIB, 64), (4 * KIB, 512), (64 * KIB, 64))
KVIKIO_THREADS = 16
CHECKED = 64


class Work:
    """One case: where the blocks lie in the file and in the buffer."""

    def __init__(
        self, path: Path, device: str, nbytes: int, count: int, seed: int, *, scattered: bool
    ) -> None:
        import nobounce

        self.path, self.nbytes, self.count = path, nbytes, count
        rng = np.random.default_rng(seed)
        blocks = path.stat().st_size // nbytes
        self.at = rng.choice(blocks, count, replace=count > blocks) * nbytes
        gap = nbytes if scattered else 0
        self.to = np.arange(count) * (nbytes + gap)
        if scattered:
            rng.shuffle(self.to)
        self.device = nobounce.Device(device)
        self.buffer = self.device.allocate(count * (nbytes + gap))
        self.buffer.fill(0, stream=None)
        self.file = nobounce.open(path)

    def check(self, name: str) -> None:
        """Some of the blocks are what the file holds."""
        held = self.buffer.numpy()
        with open(self.path, "rb") as f:
            for k in np.linspace(0, self.count - 1, min(CHECKED, self.count)).astype(int).tolist():
                f.seek(int(self.at[k]))
                at = int(self.to[k])
                if held[at : at + self.nbytes].tobytes() != f.read(self.nbytes):
                    raise Refused(f"{name}: block {k} is not what the file holds at {int(self.at[k])}")

    def close(self) -> None:
        self.file.close()
        self.buffer.close()


Run = Callable[[Work], None]


def batch(cache: str) -> Run:
    def run(work: Work) -> None:
        import nobounce

        with nobounce.Batch(capacity=work.count) as made:
            made.read(
                work.file,
                work.buffer,
                file_offsets=work.at,
                nbytes=work.nbytes,
                buffer_offsets=work.to,
                cache=cache,  # type: ignore[arg-type]
            )
            made.wait().check()

    return run


def kvikio(path: Path) -> Run:
    """`CuFile.pread` of every block, a future each, on its pool of threads; the buffer as CuPy sees it."""
    import cupy
    import kvikio as peer
    import kvikio.defaults as kvikio_defaults

    kvikio_defaults.set({"num_threads": KVIKIO_THREADS, "task_size": 4 * MIB})
    opened = peer.CuFile(str(path), "r")

    def run(work: Work) -> None:
        whole = cupy.asarray(work.buffer)
        futures = [
            opened.pread(whole[to : to + work.nbytes], work.nbytes, at)
            for at, to in zip(work.at.tolist(), work.to.tolist(), strict=True)
        ]
        for one in futures:
            if one.get() != work.nbytes:
                raise Refused("kvikio: a block came short")

    return run


def numpy_rows(path: Path) -> Run:
    """Indexing of a mapping, as loaders of token files do it, and for a GPU one copy through pinned memory."""
    mapped = np.memmap(path, np.uint8, "r")
    pinned: dict[int, Any] = {}

    def run(work: Work) -> None:
        rows = mapped[: mapped.size // work.nbytes * work.nbytes].reshape(-1, work.nbytes)
        index, total = work.at // work.nbytes, work.nbytes * work.count
        if work.device.name == "cpu":
            np.take(rows, index, axis=0, out=work.buffer.numpy()[:total].reshape(-1, work.nbytes))
            return
        import torch

        if total not in pinned:
            pinned.clear()
            pinned[total] = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        np.take(rows, index, axis=0, out=pinned[total].numpy().reshape(-1, work.nbytes))
        torch.as_tensor(work.buffer, device="cuda")[:total].copy_(pinned[total], non_blocking=True)
        torch.cuda.synchronize()

    return run


def contestants(path: Path, device: str, wanted: list[str]) -> dict[str, Run]:
    """Those that can run here, by name."""
    found: dict[str, Run] = {}
    for name in wanted:
        if name.startswith("nobounce-"):
            found[name] = batch(name.removeprefix("nobounce-"))
        elif name == "kvikio" and device.startswith("cuda"):
            try:
                found[name] = kvikio(path)
            except ImportError as e:
                print(f"kvikio is left out: {e}", file=sys.stderr)
        elif name == "numpy":
            found[name] = numpy_rows(path)
    return found


def prepare(path: Path, state: str) -> None:
    """Bring the file into the state, and see that it is there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if state == "cold":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            with open(path, "rb", buffering=0) as f:
                block = bytearray(16 * MIB)
                while f.readinto(block):
                    pass
    finally:
        os.close(fd)


def race(
    path: Path, device: str, state: str, runs: int, cases: Any, names: list[str], *, scattered: bool
) -> list[dict[str, Any]]:
    """Every case, the contestants in turns."""
    rows: list[dict[str, Any]] = []
    runners = contestants(path, device, names)
    for nbytes, count in cases:
        if count * nbytes * (1 + scattered) > 6 * GIB:
            continue
        taken: dict[str, list[float]] = {name: [] for name in runners}
        work = Work(path, device, nbytes, count, 0, scattered=scattered)
        try:
            for turn in range(runs + 1):  # the first is not counted: pools and pinned memory are made in it
                order = list(runners) if turn % 2 else list(runners)[::-1]
                for name in order:
                    if name == "numpy" and scattered:
                        continue
                    if state == "cold":
                        prepare(path, state)
                    began = time.perf_counter()
                    runners[name](work)
                    took = time.perf_counter() - began
                    if turn:
                        taken[name].append(took)
            for name, run in runners.items():
                if taken[name]:
                    work.buffer.fill(0, stream=None)
                    run(work)
                    work.check(name)
        finally:
            work.close()
        for name, samples in taken.items():
            if not samples:
                continue
            median = statistics.median(samples)
            row = {
                "contestant": name,
                "nbytes": nbytes,
                "count": count,
                "scattered": scattered,
                "blocks_per_second": count / median,
                "gib_per_second": nbytes * count / median / GIB,
                "seconds": samples,
            }
            rows.append(row)
            print(
                f"{nbytes // KIB:6} KiB x {count:6} {'scattered' if scattered else 'packed':9} {name:16} "
                f"{row['blocks_per_second'] / 1e3:9.1f} k/s {row['gib_per_second']:7.2f} GiB/s   "
                + " ".join(f"{s * 1e3:.2f}" for s in samples),
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, default=Path(".bench/blocks.bin"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file, where it has to be made")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--state", choices=("cached", "cold"), default="cached")
    parser.add_argument(
        "--scattered", action="store_true", help="blocks with gaps between them, in random order, too"
    )
    parser.add_argument("--contestants", default="nobounce-auto,nobounce-use,kvikio,numpy")
    parser.add_argument(
        "--quick", action="store_true", help="a few blocks of a small file: is everything in order?"
    )
    parser.add_argument("--json", nargs="?", const="-", type=str)
    asked = parser.parse_args()
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    nbytes = 64 * MIB if asked.quick else int(asked.gib * GIB) // (16 * MIB) * (16 * MIB)
    try:
        make_file(asked.file, nbytes)
        facts = common.machine(asked.file.parent, ["nobounce", "kvikio-cu13", "numpy", "torch"])
        common.print_machine(facts)
        prepare(asked.file, asked.state)
        cases, runs = (QUICK, 1) if asked.quick else (CASES, asked.runs)
        names = asked.contestants.split(",")
        rows = race(asked.file, asked.device, asked.state, runs, cases, names, scattered=False)
        if asked.scattered:
            rows += race(asked.file, asked.device, asked.state, runs, cases, names, scattered=True)
    except (Refused, OSError) as e:
        print(f"blocks: {e}", file=sys.stderr)
        return 2
    if asked.json:
        document = {
            "schema": SCHEMA,
            "version": VERSION,
            "machine": facts,
            "device": asked.device,
            "state": asked.state,
            "rows": rows,
        }
        text = json.dumps(document, indent=1)
        if asked.json == "-":
            print(text)
        else:
            Path(asked.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
