#!/usr/bin/env python3
"""Less than everything: tensors by name, ranges of columns, and tensors that are there, page-cached, on `cpu`.

    python benchmarks/parts.py [--dir DIR] [--mib 128] [--rounds 9] [--json OUT]

Contestants take turns; the file is read through the page cache before each sample; medians, least and every sample. Of slices what counts is the
bytes that were wanted, an eighth of each row. safetensors' slice for torch looks at a mapping, so it is cloned; the one for numpy is a copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import races
from safetensors import safe_open
from safetensors.numpy import save_file

import nobounce

SCHEMA, VERSION = "nobounce.benchmarks.parts", 1
RUNS = (192, 2048, 7168)
"""Bytes of a row that a slice of the second dimension takes, of 8 times as many."""

Ways = dict[str, Callable[[], Any]]


def race(title: str, ways: Ways, path: Path, nbytes: dict[str, int], rounds: int) -> list[dict[str, Any]]:
    """Every contestant `rounds` times after a first time that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _, name in races.rounds(list(ways), rounds):
        common.warm(path)
        begin = time.perf_counter()
        held = ways[name]()
        samples[name].append(time.perf_counter() - begin)
        del held
    print(f"\n{title}")
    for name, found in samples.items():
        median = statistics.median(found)
        each = " ".join(f"{s * 1e3:.2f}" for s in found)
        print(
            f"  {name:28s} {median * 1e3:8.2f} ms  least {min(found) * 1e3:8.2f}"
            f"  {nbytes[name] / common.GIB / median:6.2f} GiB/s  all, ms: {each}"
        )
    return [
        {"section": title, "contestant": n, "nbytes": nbytes[n], "seconds": s} for n, s in samples.items()
    ]


def by_name(folder: Path, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """All of a model, every second tensor of it, and all of it into tensors that are there."""
    path = folder / f"names-{nbytes >> 20}.safetensors"
    if not path.exists():
        save_file({f"t{n:03}": np.full(nbytes // 100, n, np.uint8) for n in range(100)}, path)
    with nobounce.open_model(path) as m:
        names = list(m.keys())
        there = {n: np.zeros(m.info(n).shape, np.uint8) for n in names}
        ways: Ways = {
            "all": lambda: m.load(device="cpu"),
            "every second tensor": lambda: m.load(device="cpu", names=names[::2]),
            "the first half": lambda: m.load(device="cpu", names=names[:50]),
            "all, into": lambda: m.load(into=there),
        }
        halves = {
            name: nbytes // (2 if name in ("every second tensor", "the first half") else 1) for name in ways
        }
        return race("by name, 100 tensors", ways, path, halves, rounds)


def slices(folder: Path, nbytes: int, run: int, rounds: int) -> list[dict[str, Any]]:
    """An eighth of the columns of a matrix."""
    columns = run * 8 // 2
    rows = max(1, nbytes // (columns * 2))
    first, stop = columns // 8 * 3, columns // 8 * 4
    path = folder / f"slices-{nbytes >> 20}-{run}.safetensors"
    if not path.exists():
        rng = np.random.default_rng(run)
        save_file({"w": rng.integers(0, 60000, (rows, columns), np.uint16).view(np.float16)}, path)
    box = {"w": (None, (first, stop))}
    there = {"w": np.zeros((rows, stop - first), np.float16)}

    def numpy_slice() -> Any:
        with safe_open(path, framework="np") as f:
            return f.get_slice("w")[:, first:stop]

    def torch_clone() -> Any:
        with safe_open(path, framework="pt") as f:
            return f.get_slice("w")[:, first:stop].clone()

    with nobounce.open_model(path) as m:
        ways: Ways = {
            "nobounce": lambda: m.load(device="cpu", framework="numpy", slices=box),
            "nobounce, into": lambda: m.load(into=there, slices=box),
            "safetensors numpy": numpy_slice,
        }
        try:
            import torch as torch

            ways["safetensors torch, cloned"] = torch_clone
        except ImportError:
            pass
        ours, theirs = (way().view(np.uint16) for way in (lambda: ways["nobounce"]()["w"], numpy_slice))
        if not np.array_equal(ours, theirs):
            raise common.Refused("the slices differ")
        wanted = dict.fromkeys(ways, rows * run)
        return race(f"a slice of dimension 1, runs of {run} bytes", ways, path, wanted, rounds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(".bench/parts"))
    parser.add_argument("--mib", type=int, default=128, help="size of each file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = common.machine(options.dir, ["nobounce", "safetensors", "torch", "numpy"])
    common.print_machine(facts)
    nbytes = options.mib << 20
    try:
        rows = by_name(options.dir, nbytes, options.rounds)
        for run in RUNS:
            rows += slices(options.dir, nbytes, run, options.rounds)
    except common.Refused as e:
        print(e, file=sys.stderr)
        return 2
    if options.json:
        result = {"schema": SCHEMA, "version": VERSION, "machine": facts, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
