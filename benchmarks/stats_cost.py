"""What counting costs per transfer: the counters alone, and real 4 KiB reads with statistics at level 1 against level 0.

    python benchmarks/stats_cost.py [--json FILE]

The first figure is the time of the one call that counts a finished transfer. The second is the difference between medians of
child processes that read the same page-cached 4 KiB, alternately without and with statistics; it holds the scatter of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from nobounce.config import Settings
from nobounce.io.receipt import Receipt, Segment
from nobounce.observe.counters import Counters
from nobounce.route.types import Reason

LIMIT_US = 3.0
CALLS, RUNS = 20_000, 7

CHILD = """
import sys, time, statistics, nobounce
buf = nobounce.Device("cpu").allocate(4096)
with nobounce.open(sys.argv[1]) as f:
    for _ in range(500): f.read(buf, require="fallback", cache="use")
    samples = []
    for _ in range(8):
        begin = time.perf_counter()
        for _ in range(500): f.read(buf, require="fallback", cache="use")
        samples.append((time.perf_counter() - begin) / 500)
print(min(samples) * 1e6)
"""


def counting() -> list[float]:
    """Microseconds that counting one finished transfer takes, per run."""
    counters = Counters(Settings())
    segment = Segment("fastpath", 0, 0, 1 << 20, Reason("direct", ""))
    receipt = Receipt("read", "f", "cpu", 1 << 20, 1 << 20, (segment,), started_at=1.0, ended_at=1.001)
    target = SimpleNamespace(op="read", device_name="cpu")
    job = SimpleNamespace(
        receipt=receipt, error=None, target=target, stream=None, requested=1 << 20, direct_nbytes=1
    )
    samples = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            counters.ended(job)  # type: ignore[arg-type]
        samples.append((time.perf_counter() - begin) / CALLS * 1e6)
    return samples


def reading(path: str, level: int) -> float:
    """Microseconds of one page-cached 4 KiB read in a child process."""
    env = {**os.environ, "HIPFILE_STATS_LEVEL": str(level)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, path], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    count = counting()
    print(f"counting a transfer: {statistics.median(count):.2f} us  (samples {_list(count)})")
    levels: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.NamedTemporaryFile() as f:
        f.write(b"\0" * 4096)
        f.flush()
        for _ in range(RUNS):
            for level, samples in levels.items():
                samples.append(reading(f.name, level))
    for level, samples in levels.items():
        print(f"4 KiB read at level {level}: {statistics.median(samples):.2f} us  (samples {_list(samples)})")
    difference = statistics.median(levels[1]) - statistics.median(levels[0])
    met = statistics.median(count) < LIMIT_US
    print(f"difference: {difference:.2f} us a transfer; limit {LIMIT_US} us: {'met' if met else 'NOT MET'}")
    if options.json is not None:
        report = {
            "counting_us": count,
            "level_0_us": levels[0],
            "level_1_us": levels[1],
            "difference_us": difference,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if met else 1


def _list(samples: list[float]) -> str:
    return ", ".join(f"{s:.2f}" for s in samples)


if __name__ == "__main__":
    sys.exit(main())
