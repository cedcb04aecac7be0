"""Saving a model, written and synced: nobounce.save, a plain O_DIRECT writer, safetensors.

    python benchmarks/save.py [--dir DIR] [--shape large|small|straight] [--nbytes N] [--rounds 9] [--device cpu] [--quick] [--json [OUT]]

large: bf16 tensors in the shape of a llama, as torch or numpy has them in memory (no page alignment, so they are gathered). small: 20,000
tensors for each GiB. straight: one nobounce.Tensor a layer, aligned, written from where it is. Everybody writes a new file and
syncs it and its folder; the plain writer moves as many bytes from one aligned buffer by 4 threads with pwrite of 16 MiB.
Contestants take turns, each round beginning with another: a disk that saves up while it is little used gives less after a fast writer.
Printed are medians, ratios and every sample. Exit code 0; 1 where a floor was missed (0.95 of plain, 1.8 of safetensors); 2 for usage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import files
import numpy as np
from common import GIB, Refused

import nobounce

SCHEMA, VERSION = "nobounce.benchmarks.save", 1
PIECE, THREADS = 16 << 20, 4
FLOORS = {"plain": 0.95, "safetensors": 1.8}
SHAPES = ("large", "small", "straight")

Write = Callable[[Path], None]


def entries(shape: str, nbytes: int) -> list[files.Entry]:
    """Tensors of about `nbytes` bytes in all."""
    if shape == "small":
        return list(files.many(max(1, nbytes * 20_000 // GIB)))
    if shape == "straight":
        each = max(4096, nbytes // 32 // 4096 * 4096)
        return [files.Entry(f"layer.{i}", "U8", (each,)) for i in range(32)]
    dims = {"hidden": 2048, "kv": 512, "inner": 7872, "vocab": 32_000}
    if nbytes < GIB // 4:
        dims = {"hidden": 256, "kv": 64, "inner": 984, "vocab": 4000}
    base = sum(e.nbytes for e in files.llama(**dims, layers=0))
    layer = sum(e.nbytes for e in files.llama(**dims, layers=1)) - base
    return list(files.llama(**dims, layers=max(1, (nbytes - base) // layer)))


def tensors_of(table: Sequence[files.Entry], shape: str, device: str) -> dict[str, Any]:
    """Tensors of random bytes: arrays each in memory of its own, or nobounce.Tensors of a device."""
    source = np.random.Generator(np.random.SFC64(1))
    made: dict[str, Any] = {}
    where = nobounce.Device(device)
    kinds = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8}
    for e in table:
        words = source.integers(0, 1 << 64, -(-e.nbytes // 8), dtype=np.uint64).view(np.uint8)[: e.nbytes]
        if shape == "straight" or device != "cpu":
            buffer = where.allocate(e.nbytes)
            buffer.copy_from(words, stream=None)
            buffer.wait()
            made[e.name] = nobounce.Tensor(buffer, e.shape, e.dtype)
        else:
            made[e.name] = words.copy().view(kinds[e.dtype]).reshape(e.shape)
    return made


def plain_writer(nbytes: int) -> Write:
    """What anybody would write to be fast: threads, O_DIRECT, large aligned pieces of one buffer."""
    buffer = nobounce.Device("cpu").allocate(-(-nbytes // PIECE) * PIECE)
    buffer.fill(1, stream=None)
    buffer.wait()
    view = buffer.view()

    def write(path: Path) -> None:
        part = path.with_suffix(".part")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        offsets = iter(range(0, len(view), PIECE))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                os.pwrite(fd, view[offset : offset + PIECE], offset)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
        os.close(fd)
        part.replace(path)
        sync(path.parent)

    return write


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def contestants(tensors: dict[str, Any], nbytes: int, checksums: bool) -> dict[str, Write]:
    """Everybody who can run here: safetensors needs to be installed and memory of the host."""
    found: dict[str, Write] = {"nobounce": lambda path: drop_receipt(nobounce.save(tensors, path))}
    if checksums:
        found["checksums"] = lambda path: drop_receipt(nobounce.save(tensors, path, checksums=True))
    found["plain"] = plain_writer(nbytes)
    if common.version("safetensors") and all(
        isinstance(t, np.ndarray) or t.is_host_accessible for t in tensors.values()
    ):
        import safetensors.numpy

        arrays = {n: t if isinstance(t, np.ndarray) else t.numpy() for n, t in tensors.items()}

        def save_file(path: Path) -> None:
            part = path.with_suffix(".part")
            safetensors.numpy.save_file(arrays, part)
            sync(part)
            part.replace(path)
            sync(path.parent)

        found["safetensors"] = save_file
    return found


def drop_receipt(_: object) -> None:
    return None


def race(found: dict[str, Write], path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of every run. Each contestant runs once before."""
    names = list(found)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        clear(path)
        found[name](path)
    for n in range(rounds):
        for k in range(len(names)):
            name = names[(n + k) % len(names)]
            clear(path)
            begin = time.perf_counter()
            found[name](path)
            samples[name].append(time.perf_counter() - begin)
    return samples


def clear(path: Path) -> None:
    """Remove the file, and wait until the file system has done with it: that of a buffered writer takes longer to remove."""
    path.unlink(missing_ok=True)
    os.sync()


def show(samples: dict[str, list[float]], nbytes: int) -> list[str]:
    """Print the table; returns the floors that were missed."""
    print(f"{'writer':<12} {'GiB/s':>6} {'nobounce is':>12}   every sample, GiB/s")
    ours, missed = statistics.median(samples["nobounce"]), []
    for name, times in samples.items():
        middle = statistics.median(times)
        each = " ".join(f"{nbytes / t / GIB:.2f}" for t in times)
        print(f"{name:<12} {nbytes / middle / GIB:>6.2f} {middle / ours:>11.2f}x   {each}")
        if name in FLOORS and middle / ours < FLOORS[name]:
            missed.append(f"{middle / ours:.2f} of {name}, the floor is {FLOORS[name]}")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(".bench"))
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--nbytes", type=int, default=GIB, help="bytes of the tensors, about")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    parser.add_argument("--checksums", action="store_true", help="race nobounce with checksums too")
    parser.add_argument("--quick", action="store_true", help="16 MiB, two rounds, no floors")
    parser.add_argument(
        "--json", nargs="?", const="-", help="write every sample to OUT, or to standard output"
    )
    given = parser.parse_args(arguments)
    nbytes, rounds = (16 << 20, 2) if given.quick else (given.nbytes, given.rounds)
    given.dir.mkdir(exist_ok=True)
    facts = common.machine(given.dir, ["nobounce", "safetensors", "numpy"])
    path = given.dir / "save.safetensors"
    try:
        common.refuse_memory(given.dir)
        common.print_machine(facts)
        table = entries(given.shape, nbytes)
        tensors = tensors_of(table, given.shape, given.device)
        total = sum(e.nbytes for e in table)
        receipt = nobounce.save(tensors, path)
        print(
            f"file      {given.shape}: {len(table)} tensors, {total:,} bytes on {given.device}; route: fastpath"
            f" {receipt.fastpath_bytes / receipt.nbytes:.4f} ({receipt.evidence})\n"
        )
        samples = race(contestants(tensors, total, given.checksums), path, rounds)
    except (Refused, OSError) as e:
        print(f"save: {e}", file=sys.stderr)
        return 2
    finally:
        path.unlink(missing_ok=True)
    missed = show(samples, total)
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "machine": facts,
        "device": given.device,
        "shape": given.shape,
        "nbytes": total,
        "fastpath_bytes": receipt.fastpath_bytes,
        "seconds": samples,
    }
    if given.json == "-":
        print(json.dumps(document))
    elif given.json:
        Path(given.json).write_text(json.dumps(document) + "\n")
    for line in missed if not given.quick else ():
        print(f"missed: {line}")
    return 1 if missed and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
