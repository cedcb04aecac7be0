"""Transfers of one file on one device, each held against what the kernel counted: a group of the matrix of issue 20, truth 4.

    python truth_cases.py FILE DEVICE SEED COUNT DEBUGFS

DEBUGFS is where debugfs is mounted, "" where it is not. Prints one line for each case that does not hold, and the number of cases.
The slack is for metadata: PAGE for what a direct read ends in, DIRTY for what a file system writes beside the data.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nobounce
from nobounce.checks.machine import Machine
from nobounce.checks.report import check_paths
from nobounce.config import settings
from nobounce.errors import RouteError
from nobounce.facts.pagecache import counted
from nobounce.facts.source import LiveSource

PAGE, MIB = 4096, 1 << 20
DIRTY = 256 << 10
SIZES = [1, 511, 512, 4096, 4097, 20_000, 65_536, 200_000, MIB, MIB + 512, 2 * MIB]
BATCH = 4


class Kernel:
    """What the kernel counts: bytes that this process fetched, pages of the file, bytes dirtied on its disk."""

    def __init__(self, fd: int, debugfs: str) -> None:
        self._fd = fd
        device = os.fstat(fd).st_dev
        stats = Path(debugfs) / "bdi" / f"{os.major(device)}:{os.minor(device)}" / "stats"
        self._dirtied = stats if debugfs and os.major(device) and stats.exists() else None

    def fetched(self) -> int:
        text = Path("/proc/self/io").read_text()
        return int(text.split("\nread_bytes: ")[1].split()[0])

    def cached(self, start: int, nbytes: int) -> int:
        return counted(self._fd, start, nbytes).resident_bytes or 0

    def dirtied(self) -> int | None:
        if self._dirtied is None:
            return None
        lines = dict(
            line.split(":") for line in self._dirtied.read_text().splitlines() if line.count(":") == 1
        )
        return int(lines["BdiDirtied"].split()[0]) << 10


def whole_pages(start: int, nbytes: int) -> tuple[int, int]:
    """The pages that lie inside of a range."""
    first, last = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
    return first, max(0, last - first)


class Group:
    """One file on one device."""

    def __init__(self, path: str, device: str, seed: int, debugfs: str) -> None:
        self.path, self.device = path, nobounce.Device(device)
        self.random = random.Random(seed)
        self.data = bytearray(Path(path).read_bytes())
        writable = os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_RDONLY
        self.fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        self.file = nobounce.open(path, "r+" if writable else "r")
        self.ops = ["read", "read", "write"] if writable else ["read"]
        self.kernel = Kernel(self.fd, debugfs)
        system = self.file.facts().filesystem
        self.memory, self.packs = system.memory, system.fstype == "squashfs"

    def case(self) -> tuple[str, list[str]]:
        """(what was done, what does not hold)."""
        pick = self.random.choice
        op, how, state = pick(self.ops), pick(["sync", "async", "batch"]), pick(["cold", "warm", "half"])
        require, cache = pick(["auto", "auto", "fastpath", "fallback"]), pick(["auto", "avoid", "use"])
        nbytes = pick(SIZES)
        grain = pick([1, 512, 4096])
        file_offset = self.random.randrange(len(self.data)) // grain * grain
        shift = pick([0, 0, 512, 1])
        if how == "batch":
            nbytes = min(nbytes, 300_000)
        elif op == "write":
            nbytes = min(nbytes, len(self.data) - file_offset)
        says = f"{op} {how} {state} require={require} cache={cache} {nbytes} bytes at {file_offset}, memory + {shift}"
        self.prepare(state)
        return says, self.carry_out(op, how, require, cache, nbytes, file_offset, shift, state)

    def drop(self) -> None:
        for _ in range(20):  # a page under write-back stays
            if "write" in self.ops:
                os.fsync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if self.memory or self.packs or not self.kernel.cached(0, len(self.data)):
                break
            time.sleep(0.005)

    def prepare(self, state: str) -> None:
        self.drop()
        size = len(self.data)
        if state != "cold":
            os.pread(self.fd, size if state == "warm" else size // 2, 0)

    def carry_out(
        self, op: str, how: str, require: Any, cache: Any, nbytes: int, at: int, shift: int, state: str
    ) -> list[str]:
        starts = [at]
        if how == "batch":
            room = max(1, len(self.data) - nbytes)
            starts = [(at + n * 3 * MIB // 2 // BATCH) % room // 512 * 512 for n in range(BATCH)]
            starts = sorted(set(starts))
            if op == "write":  # writes that overlap have no order
                starts = [
                    s for s, after in zip(starts, [*starts[1:], 1 << 62], strict=True) if s + nbytes <= after
                ]
        spans = [(start, min(nbytes, len(self.data) - start)) for start in starts]
        fresh = [self._fresh(n) for _, n in spans] if op == "write" else []
        with self.device.allocate(shift + nbytes * len(starts) + PAGE) as buffer:
            if fresh:
                self._fill(buffer, fresh, shift, nbytes)
            cached = self.kernel.cached(0, len(self.data))
            fetched, dirtied = self.kernel.fetched(), self.kernel.dirtied()
            try:
                receipt = self._move(op, how, require, cache, nbytes, starts, shift, buffer)
            except RouteError as e:
                if require != "fastpath":
                    return [f"raised {e}"]
                return ["bytes moved before a refusal"] if e.receipt is not None else []
            after_fetched, after_dirtied = self.kernel.fetched(), self.kernel.dirtied()
            wrong = []
            if op == "read":
                found = buffer.numpy().tobytes()
                for n, (start, size) in enumerate(spans):
                    place = shift + n * nbytes
                    if found[place : place + size] != self.data[start : start + size]:
                        wrong.append(f"other bytes than the file's at {start}")
            for (start, size), new in zip(spans, fresh, strict=False):
                self.data[start : start + size] = new
        moved = sum(n for _, n in spans)
        if receipt.nbytes != moved or receipt.fastpath_bytes + receipt.fallback_bytes != moved:
            wrong.append(f"{receipt.nbytes} bytes of {moved}")
        if require == "fastpath" and receipt.fallback_bytes:
            wrong.append(f"{receipt.fallback_bytes} bytes of fallback where fastpath is required")
        if require == "fallback" and receipt.fastpath_bytes:
            wrong.append(f"{receipt.fastpath_bytes} bytes of fastpath where fallback is required")
        direct = receipt.fastpath_bytes - receipt.hole_bytes
        if op == "read" and direct > after_fetched - fetched + PAGE * len(spans):
            wrong.append(f"{direct} direct bytes, but the kernel fetched {after_fetched - fetched}")
        if op == "write" and dirtied is not None and after_dirtied is not None:
            buffered = after_dirtied - dirtied
            if buffered > receipt.fallback_bytes + DIRTY + 2 * PAGE * len(spans):
                wrong.append(f"{receipt.fallback_bytes} bytes of fallback, but {buffered} were dirtied")
        if op == "read" and state == "cold":
            direct_spans = [(g.file_offset, g.nbytes) for g in receipt.segments if g.backend == "fastpath"]
            if how == "batch":  # its segments are sums
                direct_spans = spans if receipt.fallback_bytes == 0 else []
            if cache != "avoid" and "encoded-extent" in receipt.reasons:
                direct_spans = []  # read-ahead of a compressed extent goes on into its neighbour
            # An edge may have brought the page that it shares with what went direct.
            grew = [span for span in direct_spans if self.kernel.cached(*whole_pages(*span))]
            if grew:
                wrong.append(f"pages appeared of what went direct: {grew}")
        if op == "read" and cache == "avoid" and not self.memory and not self.packs and state != "half":
            grown = self.kernel.cached(0, len(self.data)) - cached
            if grown > 0:
                wrong.append(f"cache=avoid left {grown} bytes in the page cache")
        return [f"{w}; {receipt.reasons}, evidence {receipt.evidence}" for w in wrong]

    def _fresh(self, nbytes: int) -> bytes:
        """Bytes that can be compressed, or not."""
        packs = self.random.random() < 0.7
        return (b"nobounce" * (nbytes // 8 + 1))[:nbytes] if packs else self.random.randbytes(nbytes)

    def _fill(self, buffer: nobounce.Buffer, fresh: list[bytes], shift: int, nbytes: int) -> None:
        with self.device.create_stream() as stream:
            whole = bytearray(buffer.nbytes)
            for n, new in enumerate(fresh):
                whole[shift + n * nbytes : shift + n * nbytes + len(new)] = new
            buffer.copy_from(bytes(whole), stream=stream)
            stream.sync()

    def _move(
        self,
        op: str,
        how: str,
        require: Any,
        cache: Any,
        nbytes: int,
        starts: list[int],
        shift: int,
        buffer: Any,
    ) -> nobounce.Receipt:
        ways: dict[str, Any] = {"require": require, "cache": cache}
        if how == "batch":
            with nobounce.Batch(strict=True) as batch:  # all of it, or none that would have moved
                places = shift + np.arange(len(starts)) * nbytes
                call = batch.read if op == "read" else batch.write
                call(
                    self.file,
                    buffer,
                    file_offsets=np.array(starts),
                    nbytes=nbytes,
                    buffer_offsets=places,
                    **ways,
                )
                result = batch.wait()
                result.check()
                return batch.receipt
        ways |= {"nbytes": nbytes, "file_offset": starts[0], "buffer_offset": shift}
        if how == "sync":
            return (self.file.read if op == "read" else self.file.write)(buffer, **ways)
        with self.device.create_stream() as stream:
            call = self.file.read_async if op == "read" else self.file.write_async
            return call(buffer, stream=stream, **ways).result()

    def check_says_what_a_route_is(self) -> list[str]:
        """`check`'s verdict is what the receipt of a plain read of the file says."""
        self.prepare("cold")
        (verdict,) = check_paths(Machine(LiveSource(), settings()), [self.path], [self.device.name])
        nbytes = -(-len(self.data) // PAGE) * PAGE
        with self.device.allocate(nbytes) as buffer:
            receipt = self.file.read(buffer)
        way = "fallback" if receipt.fallback_bytes else "fastpath"
        return [] if verdict.verdict == way else [f"check says {verdict.verdict}, the receipt {way}"]

    def the_file_holds_what_was_written(self) -> list[str]:
        self.drop()
        return (
            [] if Path(self.path).read_bytes() == self.data else ["the file does not hold what was written"]
        )


def main(path: str, device: str, seed: int, count: int, debugfs: str) -> None:
    group = Group(path, device, seed, debugfs)
    for wrong in group.check_says_what_a_route_is():
        print(f"check: {wrong}")
    for n in range(count):
        says, wrong = group.case()
        for one in wrong:
            print(f"case {n}: {says}: {one}")
    for wrong in group.the_file_holds_what_was_written():
        print(f"at the end: {wrong}")
    print(f"{count} cases")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
