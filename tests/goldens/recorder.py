"""What some 400 requests do, recorded at two seams: system calls that move bytes, and copies of the runtimes.

A redesign of io/ must not change it unasked. Each request runs on a fresh File and Buffer of `cpu`, `sim` or the double of HIP, on a
machine made equal: 4 CPUs, files that report 4096 bytes for direct I/O, page caches put into a state beforehand. Addresses become
offsets into the buffer or "slot", descriptors "direct" or "buffered", and what threads may do in any order is sorted.

    make goldens    records them anew (make goldens)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nobounce
from doubles.hip_bindings import HipDouble
from nobounce import config
from nobounce.config import Settings
from nobounce.device import Device
from nobounce.errors import NobounceError
from nobounce.facts import machine, source
from nobounce.facts.machine import MachineFacts
from nobounce.io.movers import uring
from nobounce.runtimes import rawio
from nobounce.runtimes.gpu import hip
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing import faults

GOLDENS = Path(__file__).with_name("goldens.jsonl")
COUNT, SEED = 400, 20
KIB, MIB = 1 << 10, 1 << 20
FILE_NBYTES = 6 * MIB + 1234
ALIGN = 4096

SIZES = (1, 512, 4096, 5000, 64 * KIB, 64 * KIB + 1, MIB, MIB + 4103, 3 * MIB, 4 * MIB + 13, 5 * MIB)
FILE_OFFSETS = (0, 0, 4096, 511, 4099, MIB, FILE_NBYTES - 3000)
BUFFER_OFFSETS = (0, 0, 0, 4096, 16, 3)
FAULTS: tuple[dict[str, Any], ...] = (
    {"op": "read", "error": errno.ENODEV, "times": 1},
    {"op": "read", "error": errno.EIO, "times": 1},
    {"op": "read", "short": 0.5, "times": 1},
    {"op": "write", "error": errno.EREMOTEIO, "times": 1},
    {"op": "pread", "error": errno.EIO, "times": 1},
    {"op": "pread", "error": errno.EINTR, "times": 2},
    {"op": "pwrite", "short": 0.5, "times": 1},
)


def requests() -> list[dict[str, Any]]:
    """The requests, the same ones each time."""
    draw, found = random.Random(SEED), []
    for number in range(COUNT):
        r: dict[str, Any] = {
            "device": draw.choice(("cpu", "cpu", "sim", "sim", "hip")),
            "op": draw.choice(("read", "read", "write")),
            "call": draw.choice(("sync", "sync", "stream", "batch")),
            "nbytes": draw.choice(SIZES),
            "file_offset": draw.choice(FILE_OFFSETS),
            "buffer_offset": draw.choice(BUFFER_OFFSETS),
            "cache": draw.choice(("auto", "auto", "use", "avoid")),
            "require": draw.choice(("auto", "auto", "auto", "fastpath", "fallback")),
            "pages": draw.choice(("cold", "warm", "half")),
        }
        if r["call"] == "batch":
            r |= {
                "nbytes": draw.choice((512, 4096, 64 * KIB)),
                "count": draw.choice((1, 7, 48)),
                "method": draw.choice(("threads", "io_uring")),
            }
            r |= {"buffer_offset": 0, "file_offset": draw.choice((0, 4096, 511))}
        if r["file_offset"] + r["nbytes"] > FILE_NBYTES and r["nbytes"] > MIB:
            r["file_offset"] = 0  # several threads may look behind the end, or not
        if number % 5 == 0 and r["call"] != "batch":
            r["fault"] = draw.randrange(len(FAULTS))
            _meet(r, FAULTS[r["fault"]]["op"], draw)
        found.append(r)
    return found


def _meet(r: dict[str, Any], op: str, draw: random.Random) -> None:
    """Change a request so that a fault of `op` can strike it: direct calls on `sim`, plain ones in fallback."""
    r |= {"device": "sim", "op": op.removeprefix("p"), "require": "fallback"}
    if op in ("read", "write"):
        r |= {"require": "auto", "cache": "avoid", "buffer_offset": 0, "file_offset": 4096}
        r["nbytes"] = draw.choice((4096, MIB, 3 * MIB))


class Seams:
    """What one request does, noted at the seams while `watch` is on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.events: list[str] = []
        self.buffer = (0, 0)
        self.on = False

    def clear(self, buffer: tuple[int, int]) -> None:
        self.calls, self.copies, self.events = Counter(), Counter(), []
        self.buffer = buffer

    def _at(self, address: int) -> str:
        start, nbytes = self.buffer
        return f"buffer+{address - start}" if start <= address < start + nbytes else "slot"

    def call(self, name: str, fd: int, address: int, nbytes: int, offset: int, flags: int) -> None:
        if not self.on:
            return
        try:
            kind = "direct" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else "buffered"
        except OSError:
            return
        # Memory of a simulated device lies elsewhere for the host: an address says something on cpu alone.
        with self._lock:
            self.calls[f"{name} {kind} {nbytes} at {offset} flags {flags:#x}"] += 1

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        if self.on:
            with self._lock:
                self.copies[f"{self._at(dst)} <- {self._at(src)} {nbytes}"] += 1


@contextlib.contextmanager
def seams() -> Iterator[Seams]:
    """The seams, in place for the length of the block."""
    made = Seams()
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, replacement: Any) -> None:
            old = getattr(owner, name)
            setattr(owner, name, replacement)
            stack.callback(setattr, owner, name, old)

        def plain(name: str, op: str) -> None:
            real = getattr(rawio, name)

            def seen(fd: int, address: int, nbytes: int, offset: int) -> int:
                made.call(op, fd, address, nbytes, offset, 0)
                return int(real(fd, address, nbytes, offset))

            put(rawio, name, seen)

        def flagged(name: str, op: str) -> None:
            real = getattr(rawio, name)

            def seen(fd: int, vector: Any, count: int, offset: int, flags: int) -> int:
                one = vector._obj
                made.call(op, fd, one.base, one.nbytes, offset, flags)
                return int(real(fd, vector, count, offset, flags))

            put(rawio, name, seen)

        plain("_pread", "read")
        plain("_pwrite", "write")
        flagged("_preadv2", "read")
        flagged("_pwritev2", "write")
        preadv, ring_put = os.preadv, uring.Ring.put

        def seen_preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            nbytes = sum(len(b) for b in buffers)
            if nbytes > 1:  # a byte is a sample of the page cache
                made.call("read", fd, 0, nbytes, offset, flags)
            return preadv(fd, buffers, offset, flags)

        def seen_put(ring: uring.Ring, entries: Any) -> None:
            for head, offset, address, size, *_ in entries.tolist():
                op = {uring.OP_READ: "read", uring.OP_WRITE: "write"}.get(head & 0xFF)
                if op is not None:
                    made.call(op, head >> 32, address, size & 0xFFFFFFFF, offset, size >> 32)
            ring_put(ring, entries)

        put(os, "preadv", seen_preadv)
        put(uring.Ring, "put", seen_put)
        put(os, "sched_getaffinity", lambda _: set(range(4)))
        put(machine, "_live", MachineFacts(16 << 30, "", 4, "", 4, None, "", 1, 1))
        statx = source.statx
        aligned = {"dio_mem_align": ALIGN, "dio_offset_align": ALIGN, "dio_read_offset_align": None}
        put(source, "statx", lambda fd: statx(fd)._replace(**aligned))
        subscription = nobounce.subscribe(
            on_enter=lambda o: made.events.append(f"enter {o.op} {o.nbytes} at {o.file_offset}"),
            on_start=lambda o: made.events.append("start"),
            on_exit=lambda o: made.events.append(f"exit {type(o.error).__name__ if o.error else 'done'}"),
        )
        stack.callback(subscription.close)
        yield made


def _recorded(runtime: SimRuntime, made: Seams) -> SimRuntime:
    """Its copies are noted."""
    copy_async, copy_batch = runtime.copy_async, runtime.copy_batch

    def one(dst: int, src: int, nbytes: int, *rest: Any) -> None:
        made.copy(dst, src, nbytes)
        copy_async(dst, src, nbytes, *rest)

    def many(copies: Any, stream: int) -> None:
        for copy in copies:
            made.copy(*copy)
        copy_batch(copies, stream)

    runtime.copy_async, runtime.copy_batch = one, many  # type: ignore[method-assign]
    return runtime


class Recorder:
    """Carries requests out in a folder, each on a new File and Buffer."""

    def __init__(self, folder: Path, made: Seams) -> None:
        self._seams, self._path = made, folder / "data.bin"
        self._path.write_bytes(random.Random(SEED).randbytes(FILE_NBYTES))
        double = HipDouble(devices=1)
        _recorded(double.sim, made)
        self._devices = {
            "cpu": Device("cpu"),
            "sim": Device._of(_recorded(SimRuntime(devices=1), made), 0),
            "hip": Device._of(hip.load(double), 0),
        }

    def record(self, request: dict[str, Any]) -> dict[str, Any]:
        """What became of a request, and what it did."""
        r = request
        self._prepare(r["pages"])
        device, fault = self._devices[r["device"]], r.get("fault")
        found: dict[str, Any] = {"error": None, "receipt": None}
        # Which of several threads a fault strikes is anybody's guess.
        config.override(Settings(chunk_nbytes=MIB, io_threads=0 if fault is None else 1))
        nbytes = r["buffer_offset"] + r["nbytes"] * r.get("count", 1)
        injected: Any = contextlib.nullcontext() if fault is None else faults.inject(**FAULTS[fault])
        with nobounce.open(self._path, "r+") as file, device.allocate(nbytes) as buffer:
            self._seams.clear((buffer.handle, nbytes))
            with injected, self._watched():
                try:
                    found["receipt"] = _receipt(self._do(r, device, file, buffer))
                except NobounceError as e:
                    found["error"] = [type(e).__name__, getattr(e, "errno", None)]
                    if getattr(e, "receipt", None) is not None:
                        found["receipt"] = _receipt(e.receipt)  # type: ignore[attr-defined]
                finally:
                    device.sync()
        for name in ("calls", "copies"):
            counted: Counter[str] = getattr(self._seams, name)
            found[name] = [f"{n} x {what}" if n > 1 else what for what, n in sorted(counted.items())]
        found["events"] = list(self._seams.events)
        return found

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._seams.on = True
        try:
            yield
        finally:
            self._seams.on = False

    def _prepare(self, pages: str) -> None:
        """The file in its size, with a page cache in this state."""
        fd = os.open(self._path, os.O_RDWR)
        try:
            os.ftruncate(fd, FILE_NBYTES)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            wanted = {"cold": 0, "half": FILE_NBYTES // 2 // MIB * MIB, "warm": FILE_NBYTES}[pages]
            at = 0
            while at < wanted:
                at += len(os.pread(fd, min(MIB, wanted - at), at))
        finally:
            os.close(fd)

    def _do(self, r: dict[str, Any], device: Device, file: Any, buffer: Any) -> Any:
        where = {"file_offset": r["file_offset"], "buffer_offset": r["buffer_offset"], "nbytes": r["nbytes"]}
        how = {"cache": r["cache"], "require": r["require"]}
        if r["call"] == "sync":
            call: Callable[..., Any] = file.read if r["op"] == "read" else file.write
            return call(buffer, **where, **how)
        if r["call"] == "stream":
            with device.create_stream() as stream:
                queue = file.read_async if r["op"] == "read" else file.write_async
                return queue(buffer, stream=stream, **where, **how).result(30)
        count, step = r["count"], r["nbytes"]
        places = [n * step for n in range(count)]
        with nobounce.Batch(method=r["method"]) as batch:
            add = batch.read if r["op"] == "read" else batch.write
            spread = [r["file_offset"] + 3 * place for place in places]
            add(file, buffer, file_offsets=spread, buffer_offsets=places, nbytes=step, **how)
            batch.wait(timeout=30)
            return batch.receipt


def _receipt(receipt: Any) -> dict[str, Any]:
    segments = [
        f"{s.backend} {s.nbytes} at {s.file_offset} buffer+{s.buffer_offset} {s.reason.code}{' relayed' if s.relayed else ''}"
        for s in receipt.segments
    ]
    return {
        "nbytes": receipt.nbytes,
        "fastpath": receipt.fastpath_bytes,
        "fallback": receipt.fallback_bytes,
        "segments": sorted(segments),
        "retries": sorted(str(x) for x in receipt.retries),
    }


def record_all(folder: Path) -> list[dict[str, Any]]:
    """Every request with what it did, in files of `folder`."""
    with seams() as made:
        recorder = Recorder(folder, made)
        try:
            return [{"request": r, **recorder.record(r)} for r in requests()]
        finally:
            config.override(None)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = record_all(Path(folder))
    GOLDENS.write_text("".join(json.dumps(one, sort_keys=True) + "\n" for one in found))
    print(f"{len(found)} requests in {GOLDENS.name}")


if __name__ == "__main__":
    main()
