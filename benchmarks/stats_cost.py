"""What counting costs per transfer: every kind of transfer alone, and real 4 KiB reads with statistics at level 1 against level 0.

    python benchmarks/stats_cost.py [--json FILE]

The first rows are the time of the calls that a finished transfer makes to be counted (its refusals found, its end told), of one that
went one way, of one that the direct path refused, and of one that was split over both backends (unaligned edges); the
transfers are real ones, told again and again. The last figure is the difference between reads of the same page-cached 4 KiB with the
counters told and not told (as at level 0), in turns of 200 in one process: all call sites included, and caches as a real read leaves
them; the median of neighbours' differences. Any of them over the limit fails.
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
from typing import Any

import nobounce
from nobounce.io import hooks
from nobounce.io.job import Job
from nobounce.observe import start

LIMIT_US = 3.0
CALLS, RUNS = 10_000, 7
TURNS, READS = 60, 200
PAGE = 4096

KINDS: dict[str, dict[str, Any]] = {
    "one backend": {"nbytes": 2 * PAGE},
    "refused, whole": {"nbytes": 100},
    "split in two": {"nbytes": 2 * PAGE + 100},
    "split in three": {"nbytes": 2 * PAGE + 100, "file_offset": PAGE - 1, "buffer_offset": PAGE - 1},
}


class _Last(hooks.Observer):
    job: Job

    def ended(self, job: Job) -> None:
        self.job = job


def counting(path: str) -> dict[str, list[float]]:
    """Microseconds that counting one finished transfer takes, by kind, per run."""
    last = _Last()
    samples: dict[str, list[float]] = {}
    # On sim, because there fallback is relayed, which is one sum more.
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(4 * PAGE) as buffer:
        for kind, where in KINDS.items():
            hooks.add(last)
            f.read(buffer, **where, cache="avoid")  # the file is cached: whole and by one way otherwise
            hooks.remove(last)
            route, job = f.explain(buffer, **where, cache="avoid"), last.job
            samples[kind] = []
            for _ in range(RUNS):
                begin = time.perf_counter()
                for _ in range(CALLS):
                    hooks.refusals_of(route)
                    hooks.ended(job)
                samples[kind].append((time.perf_counter() - begin) / CALLS * 1e6)
    return samples


def reading(path: str) -> dict[int, list[float]]:
    """Microseconds of one page-cached 4 KiB read, by statistics level, in turns."""
    samples: dict[int, list[float]] = {0: [], 1: []}
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(PAGE) as buffer:
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
    with tempfile.NamedTemporaryFile() as f:
        f.write(b"\0" * 4 * PAGE)
        f.flush()
        levels = reading(f.name)
        count = counting(f.name)
    for kind, samples in count.items():
        print(f"counting a transfer, {kind}: {statistics.median(samples):.2f} us  (samples {_list(samples)})")
    for level, samples in levels.items():
        print(
            f"4 KiB read at level {level}: {statistics.median(samples):.2f} us  (fastest {min(samples):.2f}, slowest {max(samples):.2f} of {TURNS})"
        )
    difference = statistics.median(b - a for a, b in zip(levels[0], levels[1], strict=True))
    figures = {**{k: statistics.median(s) for k, s in count.items()}, "real read": difference}
    over = [kind for kind, us in figures.items() if us >= LIMIT_US]
    print(f"difference of a real read: {difference:.2f} us")
    print(f"limit {LIMIT_US} us: {'met by all' if not over else 'NOT MET by ' + ', '.join(over)}")
    if options.json is not None:
        report = {
            "limit_us": LIMIT_US,
            "counting_us": count,
            "level_0_us": levels[0],
            "level_1_us": levels[1],
            "difference_us": difference,
            "over": over,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if over else 0


def _list(samples: list[float]) -> str:
    return ", ".join(f"{s:.2f}" for s in samples)


if __name__ == "__main__":
    sys.exit(main())
