"""nobounce.kv.BlockStore: blocks put, acknowledged and durable, and got out of the page cache.

    python benchmarks/kv.py [--dir DIR] [--device cpu] [--row 262144] [--tensors 1] [--blocks 1024] [--rounds 9] [--quick] [--json [OUT]]

A block is one row of each tensor. Each sample is one call for all blocks, over blocks that are there already, in rows and keys of random
order; a sample in stream order ends with the stream. `put` returns when kill -9 loses nothing any more, `put durable` when a power cut does
not. Before the samples of `get` every byte of the store is read into the page cache. With and without checksums take turns.
`written` is a plain O_DIRECT writer of as many bytes, by 4 threads with pwrite of 16 MiB, fdatasync
counted. Exit code 0; 2 for usage.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import GIB, Refused

import nobounce

SCHEMA, VERSION = "nobounce.benchmarks.kv", 1
PIECE, THREADS = 16 << 20, 4


class Case:
    """A store and the tensors that its blocks come from and go to."""

    def __init__(self, path: Path, device: str, row: int, tensors: int, blocks: int, checksums: bool) -> None:
        self.device = nobounce.Device(device)
        self.buffers = [self.device.allocate(blocks * row) for _ in range(tensors)]
        source = np.random.Generator(np.random.SFC64(1)).integers(0, 256, blocks * row, np.uint8)
        for buffer in self.buffers:
            buffer.copy_from(source, stream=None)
            buffer.wait()
        path.unlink(missing_ok=True)
        # Room for two of everything: new blocks are written beside the old ones, and nothing is evicted.
        layout = [(b, row) for b in self.buffers]
        self.store = nobounce.kv.BlockStore(path, layout=layout, capacity=2 * blocks, checksums=checksums)
        self.stream = self.device.create_stream()
        self.path, self.blocks = path, blocks
        self._order = np.random.Generator(np.random.SFC64(2))

    def put(self, *, durable: bool = False) -> float:
        return self._timed(lambda keys, rows: self.store.put(keys, rows, durable=durable))

    def warm_up(self) -> None:
        for _ in range(2):
            self.put()

    def put_in_stream(self) -> float:
        return self._timed(lambda keys, rows: self.store.put(keys, rows, stream=self.stream).result())

    def get(self) -> float:
        return self._timed(lambda keys, rows: self._whole(self.store.get(keys, rows)))

    def get_in_stream(self) -> float:
        def call(keys: list[int], rows: Any) -> None:
            transfer = self.store.get(keys, rows, stream=self.stream)
            self.stream.sync()
            self._whole(transfer.result())

        return self._timed(call)

    def _whole(self, result: Any) -> None:
        if not result.check().found.all():
            raise Refused("blocks are missing: no figure of this run counts")

    def _timed(self, call: Callable[[list[int], Any], object]) -> float:
        keys, rows = self._order.permutation(self.blocks).tolist(), self._order.permutation(self.blocks)
        begin = time.perf_counter()
        call(keys, rows)
        return time.perf_counter() - begin

    def close(self) -> None:
        self.store.close()
        for buffer in self.buffers:
            buffer.close()
        self.path.unlink(missing_ok=True)


def written(path: Path, nbytes: int) -> float:
    """Seconds that a plain O_DIRECT writer takes for the bytes of a call, in a file that is allocated."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        piece = mmap.mmap(-1, PIECE)
        offsets = range(0, nbytes, PIECE)

        def work(first: int) -> None:
            for offset in offsets[first::THREADS]:
                os.pwrite(fd, memoryview(piece)[: min(PIECE, nbytes - offset)], offset)

        for _ in range(2):  # the first fills new extents, which counts for nothing
            threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
            begin = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os.fdatasync(fd)
            seconds = time.perf_counter() - begin
        return seconds
    finally:
        os.close(fd)


def race(given: argparse.Namespace, samples: dict[str, list[float]]) -> None:
    """Every sample, seconds by name."""
    nbytes = given.blocks * given.row * given.tensors
    for n in range(given.rounds + 1):  # the first round counts for nothing
        for checksums in (False, True) if n % 2 else (True, False):
            word = " checked" if checksums else ""
            case = Case(
                given.dir / "kv.store", given.device, given.row, given.tensors, given.blocks, checksums
            )
            try:
                case.warm_up()  # no extent of the file is new any more
                found = {"put": case.put(), "put in stream": case.put_in_stream()}
                found["put durable"] = case.put(durable=True)
                common.warm(case.path)
                found |= {"get": case.get(), "get in stream": case.get_in_stream()}
            finally:
                case.close()
            if n:
                for name, seconds in found.items():
                    samples.setdefault(name + word, []).append(seconds)
        plain = given.dir / "kv.plain"
        try:
            seconds = written(plain, nbytes)
        finally:
            plain.unlink(missing_ok=True)
        if n:
            samples.setdefault("written", []).append(seconds)


def show(samples: dict[str, list[float]], nbytes: int, blocks: int) -> None:
    print(f"{'call':<22} {'GiB/s':>6} {'blocks/s':>9}   every sample, GiB/s")
    for name, times in sorted(samples.items()):
        middle = statistics.median(times)
        each = " ".join(f"{nbytes / t / GIB:.2f}" for t in times)
        print(f"{name:<22} {nbytes / middle / GIB:>6.2f} {blocks / middle:>9.0f}   {each}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(".bench"))
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    parser.add_argument("--row", type=int, default=256 << 10, help="bytes of a row")
    parser.add_argument("--tensors", type=int, default=1, help="rows in a block")
    parser.add_argument("--blocks", type=int, default=1024, help="blocks in a call")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="32 blocks, two rounds")
    parser.add_argument(
        "--json", nargs="?", const="-", help="write every sample to OUT, or to standard output"
    )
    given = parser.parse_args(arguments)
    if given.quick:
        given.blocks, given.rounds = 32, 2
    given.dir.mkdir(exist_ok=True)
    facts = common.machine(given.dir, ["nobounce", "numpy", "xxhash"])
    nbytes = given.blocks * given.row * given.tensors
    samples: dict[str, list[float]] = {}
    try:
        common.refuse_memory(given.dir)
        common.print_machine(facts)
        print(
            f"blocks    {given.blocks} of {given.tensors} x {given.row} bytes, {nbytes:,} in a call, on {given.device}\n"
        )
        race(given, samples)
    except (Refused, OSError, nobounce.NobounceError) as e:
        print(f"kv: {e}", file=sys.stderr)
        return 2
    show(samples, nbytes, given.blocks)
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "machine": facts,
        "device": given.device,
        "row_nbytes": given.row,
        "tensors": given.tensors,
        "blocks": given.blocks,
        "nbytes": nbytes,
        "seconds": samples,
    }
    if given.json == "-":
        print(json.dumps(document))
    elif given.json:
        Path(given.json).write_text(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
