"""One look at the GPU runtime on real hardware: devices, first use, latencies of gates, and their cost.

    PYTHONPATH=src python3 tools/gpu_smoke.py [cuda|hip] [info] [first] [gates] [long] [exit] [torch]

Prints one line per measurement, all samples summed up as min/median/p90/max.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any


def spread(label: str, seconds: list[float]) -> None:
    us = sorted(s * 1e6 for s in seconds)
    print(
        f"{label}: n={len(us)} min {us[0]:.1f} median {statistics.median(us):.1f} "
        f"p90 {us[int(len(us) * 0.9)]:.1f} max {us[-1]:.1f} us"
    )


def info(runtime: Any) -> None:
    print(runtime.name, runtime.capabilities)
    for device in range(runtime.device_count()):
        print(device, runtime.device_info(device))
        print(device, runtime.direct_io().facts(device))
    p, a, m = runtime.alloc_pinned(100), runtime.alloc(0, 8192), runtime.alloc_managed(0, 4096)
    for what, address in (("pinned", p), ("device", a + 5), ("managed", m), ("unknown", id(runtime))):
        print(what, hex(address), runtime.pointer_info(address))
    runtime.free_pinned(p), runtime.free(a), runtime.free(m)
    for nbytes in (1 << 62, 1 << 50):
        try:
            runtime.alloc(0, nbytes)
        except Exception as e:
            print(type(e).__name__, e)
    print("last error", runtime.last_error(), "cost of calls, us:")
    s, e = runtime.stream_create(0), runtime.event_create(0, timing=False)
    a, b = runtime.alloc(0, 4096), runtime.alloc_pinned(4096)
    for name, call in (
        ("stream_query", lambda: runtime.stream_query(s)),
        ("event_record", lambda: runtime.event_record(e, s)),
        ("copy_async 4 KiB", lambda: runtime.copy_async(a, b, 4096, s)),
        ("pointer_info", lambda: runtime.pointer_info(a)),
        ("adapter.stream_query", lambda: runtime._adapter.stream_query(s)),
    ):
        call()
        began = time.perf_counter()
        for _ in range(500):
            call()
        print(f"  {name} {(time.perf_counter() - began) / 500 * 1e6:.2f}")
        runtime.stream_sync(s)


def gates(runtime: Any) -> None:
    s = runtime.stream_create(0)
    flag, at = threading.Event(), [0.0]

    def reached() -> None:
        at[0] = time.perf_counter()
        flag.set()

    for pause in (0.0, 0.002):
        made, seen, released = [], [], []
        for i in range(300):
            flag.clear()
            began = time.perf_counter()
            gate = runtime.gate(s, reached)
            done = time.perf_counter()
            flag.wait()
            opened = time.perf_counter()
            gate.open()
            runtime.stream_sync(s)
            end = time.perf_counter()
            if i >= 20:
                made.append(done - began), seen.append(at[0] - began), released.append(end - opened)
            time.sleep(pause)
        spread(f"gate() call, {pause * 1e3:.0f} ms apart", made)
        spread(f"gate() to on_reached, {pause * 1e3:.0f} ms apart", seen)
        spread(f"open to stream_sync returned, {pause * 1e3:.0f} ms apart", released)
    looked = []
    for _ in range(300):
        began = time.perf_counter()
        gate = runtime.gate(s, lambda: None)
        while not gate.look():
            pass
        looked.append(time.perf_counter() - began)
        gate.open()
        runtime.stream_sync(s)
    spread("gate() to a caller that looks", looked)
    began = time.perf_counter()
    many = [runtime.gate(s, lambda: None) for _ in range(200)]
    for gate in many:
        gate.open()
    runtime.stream_sync(s)
    print(f"200 gates on one stream, opened early: {(time.perf_counter() - began) * 1e6 / 200:.1f} us each")


def long(runtime: Any) -> None:
    """CPU that this process uses while a gate waits behind a kernel of 5 s, with and without the gate."""
    import torch

    clock = (
        torch.cuda.get_device_properties(0).clock_rate * 1000
        if hasattr(torch.cuda.get_device_properties(0), "clock_rate")
        else 1_980_000_000
    )
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    for gated in (False, True, True):
        s = runtime.stream_create(0)
        flag = threading.Event()

        with torch.cuda.stream(torch.cuda.ExternalStream(s)):
            end = torch.cuda.Event()
            torch.cuda._sleep(int(5 * clock))
            end.record()
        began, cpu = time.perf_counter(), time.process_time()
        if gated:
            gate = runtime.gate(s, flag.set)
            flag.wait()
        else:
            while not end.query():
                time.sleep(0.05)
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        if gated:
            gate.open()
            runtime.stream_sync(s)
        print(f"gate {gated}: {wall:.2f} s wall, {used:.4f} s CPU = {100 * used / wall:.2f} % of a core")
    for ms in (1, 10, 100):
        late = []
        for _ in range(10):
            flag = threading.Event()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(torch.cuda.ExternalStream(s)):
                a.record()
                torch.cuda._sleep(int(ms / 1000 * clock))
                b.record()
            began = time.perf_counter()
            gate = runtime.gate(s, flag.set)
            flag.wait()
            seen = time.perf_counter() - began
            gate.open()
            runtime.stream_sync(s)
            late.append(seen - a.elapsed_time(b) / 1000)
        spread(f"on_reached after a kernel of about {ms} ms, beyond the kernel", [max(x, 0) for x in late])


def first() -> None:
    code = """
import time; t=[time.perf_counter()]
def lap(what): t.append(time.perf_counter()); print(f"  {what} {(t[-1]-t[-2])*1e3:.1f} ms")
from nobounce.runtimes import registry
lap("import registry")
r = registry.get(%r); lap("load runtime")
r.device_info(0); lap("device_info")
if r._count == 1: r._on(0); r._adapter.stream_query(0)
lap("context")
a = r.alloc(0, 1 << 20); lap("alloc"); p = r.alloc_pinned(1 << 20); lap("alloc_pinned 1 MiB")
s = r.stream_create(0); lap("stream"); r.copy_async(a, p, 1 << 20, s); r.stream_sync(s); lap("copy")
import threading; f = threading.Event(); g = r.gate(s, f.set); f.wait(); g.open(); r.stream_sync(s); lap("first gate")
r.fill_async(a, 1, 4096, s, 4); r.stream_sync(s); lap("fill")
r.direct_io().facts(0); lap("direct facts")
"""
    for _ in range(2):
        print("first use:")
        subprocess.run([sys.executable, "-c", code % NAME], check=False, timeout=60)


def leaving() -> None:
    """A process ends although a gate is closed; a forked child is told."""
    code = """
import os, threading, sys
from nobounce.runtimes import registry
r = registry.get(%r); s = r.stream_create(0); f = threading.Event(); g = r.gate(s, f.set); f.wait()
a = r.alloc_pinned(4096)
pid = os.fork()
if not pid:
    try: r.alloc(0, 16)
    except Exception as e: print("child:", type(e).__name__, e)
    r.free_pinned(a); r.stream_destroy(s)
    sys.exit(0)
print("child exits", os.waitpid(pid, 0)[1])
"""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code % NAME], check=False, timeout=60)
    print(f"exit with a closed gate: code {done.returncode} after {time.perf_counter() - began:.2f} s")


NAME = sys.argv[1] if len(sys.argv) > 1 else "cuda"
WANTED = sys.argv[2:] or ["info", "gates", "long", "first", "exit"]


def main() -> None:
    print("cores", os.cpu_count(), sys.version.split()[0])
    if "first" in WANTED:
        first()
    if "exit" in WANTED:
        leaving()
    if {"info", "gates", "long"} & set(WANTED):
        from nobounce.runtimes import registry

        runtime = registry.get(NAME)
        for name, measure in (("info", info), ("gates", gates), ("long", long)):
            if name in WANTED:
                measure(runtime)


if __name__ == "__main__":
    main()
