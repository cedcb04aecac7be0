"""A second opinion: what the kernel counted for a process and for the block devices, against
what we say went direct.

`/proc/PID/io` read_bytes counts what the process had fetched from storage: every direct byte, and every byte
that was not in the page cache. So direct bytes can never exceed it; and bytes that we call cached must not
show up in it. It goes with the process, so it is sampled while the process lives, each time just after our
own; what the kernel tells the parent of an ended process (ru_inblock, ru_oublock) is the same count. Of holes
and of ranges that were never written no disk is asked: they are counted as they are read, and left out here.
A block device's counters are everybody's: they only bound from below.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Any

from nobounce.observe.snapshot import Stats

SECTOR = 512
PAGE = 4096


@dataclass(frozen=True, slots=True)
class ProcessIO:
    """Bytes that the kernel counted for a process: fetched from, and sent to, storage."""

    read_bytes: int
    write_bytes: int

    def __add__(self, other: ProcessIO) -> ProcessIO:
        return ProcessIO(self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)

    def __sub__(self, other: ProcessIO) -> ProcessIO:
        return ProcessIO(self.read_bytes - other.read_bytes, self.write_bytes - other.write_bytes)


def process_io(pid: int) -> ProcessIO | None:
    """The kernel's counters of a process and its ended threads, or None where they cannot be
    read (gone, another user's)."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as f:
            values = dict(line.split(": ") for line in f.read().splitlines())
        return ProcessIO(int(values["read_bytes"]), int(values["write_bytes"]))
    except (OSError, ValueError, KeyError):
        return None


def children_io() -> ProcessIO:
    """The kernel's counters of every child that this process has waited for, and of
    those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ProcessIO(used.ru_inblock * SECTOR, used.ru_oublock * SECTOR)


def device_io() -> dict[str, ProcessIO]:
    """Bytes read and written by whole block devices (no partitions), from /proc/diskstats."""
    found: dict[str, ProcessIO] = {}
    try:
        with open("/proc/diskstats", encoding="ascii") as f:
            lines = f.read().splitlines()
    except OSError:
        return found
    for line in lines:
        parts = line.split()
        if len(parts) >= 10 and os.path.isdir(f"/sys/block/{parts[2].replace('/', '!')}"):
            found[parts[2]] = ProcessIO(int(parts[5]) * SECTOR, int(parts[9]) * SECTOR)
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the kernel's figures agree with ours, and why. `agrees` is None where they cannot tell."""

    agrees: bool | None
    lines: tuple[str, ...]
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {"agrees": self.agrees, "lines": list(self.lines), **self.figures}


def verify(interval: Stats, kernel: ProcessIO | None, devices: dict[str, ProcessIO]) -> Verdict:
    """Compare an interval's direct and cached bytes with the kernel's over the same interval."""
    reads, writes = (interval.flow(backend="fastpath", op=op) for op in ("read", "write"))
    fallback = interval.flow(backend="fallback", op="read")
    figures: dict[str, Any] = {
        "direct_read_bytes": reads.nbytes,
        "direct_write_bytes": writes.nbytes,
        "cached_bytes": fallback.cached_bytes,
        "kernel_read_bytes": kernel.read_bytes if kernel else None,
        "kernel_write_bytes": kernel.write_bytes if kernel else None,
        "devices": {
            n: [d.read_bytes, d.write_bytes] for n, d in devices.items() if d.read_bytes or d.write_bytes
        },
    }
    if kernel is None:
        return Verdict(None, ("the kernel's counters of the process could not be read",), figures)
    lines: list[str] = []
    agrees: bool | None = True
    holes = min(interval.counters.get("hole_read_bytes", 0), reads.nbytes)
    figures["hole_bytes"] = holes
    for op, ours, theirs in (
        ("read", reads.nbytes - holes, kernel.read_bytes),
        ("written", writes.nbytes, kernel.write_bytes),
    ):
        enough = ours <= theirs + PAGE
        agrees = bool(agrees and enough)
        sign = "at most" if enough else "MORE THAN"
        beside = f" (beside {holes} of holes, which no disk was asked for)" if holes and op == "read" else ""
        lines.append(
            f"direct bytes {op}: {ours}{beside}, which is {sign} the {theirs} that the kernel counted for "
            "the process"
        )
    room = kernel.read_bytes - (reads.nbytes - holes)
    uncached = fallback.nbytes - fallback.cached_bytes
    if fallback.cached_bytes:
        # What was read beyond the direct bytes must be fallback's uncached bytes, read-ahead, or
        # the program's own reads.
        hidden = max(0, room - uncached)
        clean = hidden < fallback.cached_bytes
        lines.append(
            f"cached bytes: {fallback.cached_bytes}; of what the kernel fetched, {hidden} bytes are neither "
            "direct nor uncached fallback"
            + (
                ""
                if clean
                else ": no fewer than we call cached, so whether these came from the disk cannot be told"
            )
        )
        agrees = agrees and (True if clean else None)
    whole = sum(d.read_bytes for d in devices.values()), sum(d.write_bytes for d in devices.values())
    if devices and reads.nbytes - holes > whole[0] + PAGE:
        lines.append(
            f"block devices: read {whole[0]} bytes in all, fewer than our direct bytes (network or stacked "
            "storage?)"
        )
    elif devices:
        lines.append(
            f"block devices: read {whole[0]} and wrote {whole[1]} bytes in all, everybody's included"
        )
    words = {True: "the kernel agrees", False: "THE KERNEL DISAGREES", None: "the kernel cannot tell"}
    lines.append(words[agrees])
    return Verdict(agrees, tuple(lines), figures)
