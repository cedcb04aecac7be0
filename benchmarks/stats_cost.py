"""What counting costs per transfer: the counters alone, and real 4 KiB reads with statistics at level 1 against level 0.

    python benchmarks/stats_cost.py [--json FILE]

The first figure is the time of the one call that counts a finished transfer. The second is the difference between reads of the same
page-cached 4 KiB with the counters told and not told (as at level 0), in turns of 200 in one process: all call sites included, and caches as a
real read leaves them; the median of neighbours' differences.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import nobounce
from nobounce.config import Settings
from nobounce.io import hooks
from nobounce.io.receipt import Receipt, Segment
from nobounce.observe import start
from nobounce.observe.counters import Counters
from nobounce.route.types import Reason

LIMIT_US = 3.0
CALLS, RUNS = 20_000, 7
TURNS, READS = 60, 200


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


def reading(path: str) -> dict[int, list[float]]:
    """Microseconds of one page-cached 4 KiB read, by statistics level, in turns."""
    samples: dict[int, list[float]] = {0: [], 1: []}
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(4096) as buffer:
        f.read(buffer, require="fallback", cache="use")
        observer = start.counters()
        if observer is None:
            raise SystemExit("HIPFILE_STATS_LEVEL is 0: there is nothing to measure")
        for turn in range(2 * TURNS):
            level = turn % 2
            hooks.remove(observer)
            if level:
                hooks.add(observer)
            begin = time.perf_counter()
            for _ in range(READS):
                f.read(buffer, require="fallback", cache="use")
            samples[level].append((time.perf_counter() - begin) / READS * 1e6)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    count = counting()
    print(f"counting a transfer: {statistics.median(count):.2f} us  (samples {_list(count)})")
    with tempfile.NamedTemporaryFile() as f:
        f.write(b"\0" * 4096)
        f.flush()
        levels = reading(f.name)
    for level, samples in levels.items():
        print(
            f"4 KiB read at level {level}: {statistics.median(samples):.2f} us  (fastest {min(samples):.2f}, slowest {max(samples):.2f} of {TURNS})"
        )
    difference = statistics.median(b - a for a, b in zip(levels[0], levels[1], strict=True))
    met = max(statistics.median(count), difference) < LIMIT_US
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
