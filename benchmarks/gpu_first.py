"""`gpu.py --sections first`: what a process pays that uses a GPU for the first time, its context made and the loader imported.

Of nobounce that leaves out NVIDIA's bindings, which it imports when a device is first asked for: they are on its clock.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import common
import races
from gpu_ways import KVIKIO, Bench

READ = """
with nobounce.open(path) as f, nobounce.Device(device).allocate(64 << 20) as b:
    f.read(b, cache="use")
"""

NOBOUNCE = "import nobounce, nobounce.formats.load"

LOADS = {
    "nobounce": (NOBOUNCE, "held = nobounce.load(path, device=device, framework='torch')"),
    "kvikio": (
        "import os, cupy, kvikio, kvikio.defaults\n"
        "kvikio.defaults.set({{'num_threads': {threads}, 'task_size': {nbytes}, 'bounce_buffer_size': {nbytes}}})\n"
        "cupy.empty(1, cupy.uint8); size = os.path.getsize(path)",
        "held = cupy.empty(size, cupy.uint8)\n"
        "with kvikio.CuFile(path, 'r') as f: assert f.pread(held).get() == size",
    ),
    "safetensors device=": (
        "import safetensors.torch",
        "held = safetensors.torch.load_file(path, device=device)",
    ),
}
"""What is imported and made before the clock starts, and what is timed."""

CHILD = """
import resource, sys, time, torch
path, device = sys.argv[1:]
torch.zeros(1, device=device); torch.cuda.synchronize()
{before}
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
used, begin = cpu(), time.perf_counter()
{timed}
torch.cuda.synchronize()
print(time.perf_counter() - begin, cpu() - used)
"""


def first_section(bench: Bench) -> None:
    """A 64 MiB read, then the whole file by each loader, each time in a process that has done nothing before."""
    common.warm(bench.path)
    bench.notes["first_use_ms"] = found = [_child(bench, NOBOUNCE, READ)[0] * 1e3 for _ in range(3)]
    each = " ".join(f"{x:.0f}" for x in found)
    print(f"first use beyond the context, 64 MiB read included: {each} ms")
    threads, mib = KVIKIO[len(os.sched_getaffinity(0)) <= 4][0]
    names = {name: name for name in LOADS if importlib.util.find_spec(name.split()[0])}
    if "kvikio" in names:
        names["kvikio"] = f"kvikio {threads} x {mib} MiB"
    rows = bench.samples.setdefault("first load", {shown: [] for shown in names.values()})
    for _, name in races.rounds(list(names), 3):
        before, timed = LOADS[name]
        seconds, cpu = _child(bench, before.format(threads=threads, nbytes=mib << 20), timed)
        rows[names[name]].append({"seconds": seconds, "cpu": cpu})
    bench.show("first load")


def _child(bench: Bench, before: str, timed: str) -> tuple[float, float]:
    """Seconds and CPU seconds of what is timed, in a process of its own."""
    code = CHILD.format(before=before, timed=timed)
    command = [sys.executable, "-c", code, str(bench.path), bench.device]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seconds, cpu = done.stdout.split()[-2:]
    return float(seconds), float(cpu)
