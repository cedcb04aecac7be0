"""How fast a model file comes into memory of device `cpu`, beside everybody else, cold and warm.

    python benchmarks/load.py [--dir DIR] [--files large,small] [--runs 5] [--quick] [--json OUT] [--only NAMES] [--peers]

benchmarks/README.md says how to read it. Exit code 0: every floor was met (quick mode has none); 1: a floor was missed, a
loader failed or brought other bytes; 2: usage, or what was asked cannot be measured here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import files
import loaders
import races
from common import GIB, Refused
from races import Sample, State
from verdicts import STATES, Verdict, like_with_like, verdicts

CHILD = str(Path(loaders.__file__))
SCHEMA, VERSION = "nobounce.benchmarks.load", 1
PEERS = ("nobounce", "numpy", "ml_dtypes", "torch", "safetensors", "fastsafetensors", "runai-model-streamer")
SLACK = 2 << 30
"""Touched memory beyond a file's own: a host may take a gibibyte of free pages back in the middle of a load."""
REST = 30.0
"""Seconds of no I/O after the disk's limit was taken, which used up what a bursty disk had saved."""
TIE = 0.15
LAZY_RUNS = 2
# A cold sample that moved less than this share of the file from a block device was served by some cache.
FROM_DISK = 0.9


class Bench(races.Results):
    """The runs of one invocation, and what came of them."""

    def __init__(self, names: Sequence[str], runs: int, *, quick: bool) -> None:
        self.names, self.runs, self.quick = names, runs, quick
        super().__init__()
        self.digests: dict[str, str] = {}

    def race(
        self, file: files.BenchFile, state: State, names: Sequence[str], runs: int, pool: races.Pool
    ) -> None:
        """Everybody in `names`, `runs` times, in turns. Raises Refused if a cold sample did not come from the disk."""
        for run, name in races.rounds(names, runs):
            pool.fill()
            sample = self._one(file, state, name, run, pool)
            self.samples.append(sample)
            came, kind = sample.disk_bytes, loaders.LOADERS[name]
            judged = state == "cold" and not sample.error and not kind.lazy
            if judged and came is not None and came < FROM_DISK * file.nbytes:
                raise Refused(
                    f"{file.name}: {name} read {came:,} of {file.nbytes:,} bytes from a block device in a cold run, so"
                    " some cache was measured, not the disk"
                )
            _progress(f"{file.name} {state} {run + 1}/{runs} {name}")
        _progress("")

    def _one(self, file: files.BenchFile, state: State, name: str, run: int, pool: races.Pool) -> Sample:
        before = 0

        def get_ready() -> None:
            nonlocal before
            if state == "cold":
                common.drop(file.path, everything=not self.quick)
            else:
                common.warm(file.path)
            before = common.resident_bytes(file.path)
            pool.free()

        answer = races.run_child([CHILD, name, str(file.path)], get_ready)
        pool.free()
        after = common.resident_bytes(file.path)
        head = (name, file.name, state, run)
        if "error" in answer:
            return Sample(*head, error=str(answer["error"]))
        error = "" if answer["digest"] == self.digests[file.name] else "the bytes are not those of the file"
        rise = int(answer.pop("peak_rise_bytes")) - file.data_nbytes
        return Sample(
            *head,
            nbytes=file.nbytes,
            peak_growth_bytes=rise,
            cache_growth_bytes=after - before,
            error=error,
            **answer,
        )

    def present(self, file: str, state: State) -> list[str]:
        """Loaders with a good sample, fastest first; the lazy ones come last: theirs is another job."""
        seen = {n: m for n in self.names if (m := self.median(file, state, n)) is not None}
        return sorted(seen, key=lambda n: (loaders.LOADERS[n].lazy, seen[n]))


def print_table(bench: Bench, file: files.BenchFile, state: State) -> None:
    """A row a loader with every sample; then who is as fast as the fastest, and who failed."""
    how = (
        "page cache of the file dropped"
        if state == "cold"
        else "file read through the page cache just before"
    )
    print(f"\n{file.name}, {state}: {file.nbytes / GIB:.2f} GiB in {file.tensors:,} tensors, {how}")
    print(
        f"  {'loader':<27}{'GiB/s':>7}{'median s':>10}{'min':>8}{'max':>8}{'user s':>8}{'sys s':>8}"
        f"{'peak + MB':>11}{'cache + MB':>12}  {'route':<30}every sample, s"
    )
    real = [n for n in bench.present(file.name, state) if not loaders.LOADERS[n].lazy]
    for name in bench.present(file.name, state):
        kind, good = loaders.LOADERS[name], bench.of(file.name, state, name)
        middle, low, high = races.spread([s.seconds for s in good])
        user, system, cache = (
            races.spread([float(getattr(s, key)) for s in good])[0]
            for key in ("user_seconds", "system_seconds", "cache_growth_bytes")
        )
        peak = max(s.peak_growth_bytes for s in good)
        shown = "-" if kind.lazy or name == "odirect" else f"{peak / 1e6:.1f}"
        rate = "lazy" if kind.lazy else f"{file.nbytes / GIB / middle:.2f}"
        every = " ".join(f"{s.seconds:.4f}" for s in good)
        print(
            f"  {kind.title:<27}{rate:>7}{middle:>10.4f}{low:>8.4f}{high:>8.4f}{user:>8.3f}{system:>8.3f}"
            f"{shown:>11}{cache / 1e6:>12.1f}  {route_of(good[-1]):<30}{every}"
        )
        if late := sorted({module for s in good for module in s.imported}):
            print(f"    imported under the clock: {', '.join(late)}")
    if len(real) > 1 and state == "cold":
        best = bench.median(file.name, state, real[0]) or 0.0
        near = [n for n in real if (bench.median(file.name, state, n) or 0.0) * (1 - TIE) <= best]
        print(f"  within {TIE:.0%} on a shared disk is a tie: {', '.join(near)}")
    for name in bench.names:
        for error in sorted(
            {s.error for s in bench.samples if (s.file, s.state, s.loader) == (file.name, state, name)} - {""}
        ):
            print(f"  FAILED {name}: {error}")


def route_of(sample: Sample) -> str:
    """The route mix of the receipt, for those who hand one out."""
    r = sample.receipt
    if not r:
        return ""
    parts = {
        "direct": r["fastpath_bytes"],
        "cached": r["cached_bytes"],
        "fallback": r["fallback_bytes"] - r["cached_bytes"],
    }
    whole = sum(parts.values()) or 1
    return ", ".join(f"{k} {v / whole:.0%}" for k, v in parts.items() if v) + f" ({r['evidence']})"


def report(bench: Bench, found: Sequence[Verdict], alike: Sequence[str]) -> int:
    """Print the verdicts; the exit code."""
    words = {True: "met", False: "MISSED", None: "unknown"}
    print(
        "\nverdicts (medians)" + (", quick mode: the files are too small to judge by" if bench.quick else "")
    )
    for v in found:
        print(f"  {words[v.met]:<8}{v.text:<75}{v.floor:>10}  {v.measured}")
    if alike:
        print("like with like, no floor")
        for line in alike:
            print(f"  {line}")
    failed = sorted({s.loader for s in bench.samples if s.error})
    if failed:
        print(f"failed: {', '.join(failed)}")
    missed = not bench.quick and any(v.met is False for v in found)
    # A peer that was raced by choice and cannot run here is its own affair.
    return 1 if missed or any(not loaders.LOADERS[n].peer for n in failed) else 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def choose(only: str | None, peers: bool) -> list[str]:
    """The loaders that run. Raises ValueError for a name that is none."""
    if only:
        names = [n.strip() for n in only.split(",") if n.strip()]
        unknown = [n for n in names if n not in loaders.LOADERS]
        if unknown or not names:
            raise ValueError(
                f"no loader is called {', '.join(unknown) or repr(only)}; there are {', '.join(loaders.LOADERS)}"
            )
        return names
    return [n for n, kind in loaders.LOADERS.items() if peers or not kind.peer]


def missing_modules(name: str) -> list[str]:
    """Top-level modules that a loader needs and that are not installed."""
    tops = dict.fromkeys(m.split(".")[0] for m in loaders.LOADERS[name].modules)
    return [m for m in tops if importlib.util.find_spec(m) is None]


def measure(args: argparse.Namespace, names: list[str], write: Callable[[dict[str, Any]], None]) -> int:
    """Everything after the arguments are known. Raises Refused and OSError."""
    args.dir.mkdir(parents=True, exist_ok=True)
    common.refuse_memory(args.dir)
    facts = common.machine(args.dir, PEERS)
    common.print_machine(facts)
    absent = {n: m for n in names if (m := missing_modules(n))}
    for name, modules in absent.items():
        print(f"left out  {name}: {', '.join(modules)} not installed")
    names = [n for n in names if n not in absent]
    bench = Bench(names, args.runs, quick=args.quick)
    done: list[files.BenchFile] = []
    limit: dict[str, Any] = {}
    for which in args.files:
        file = files.ensure(args.dir, which, quick=args.quick)
        done.append(file)
        if not limit:
            limit = common.fio_limit(file.path)
            print("limit     " + describe_limit(limit))
            if not args.quick and "missing" not in limit:
                time.sleep(REST)
        bench.digests[which] = loaders.reference(file.path)
        pool = races.Pool(file.nbytes + SLACK)
        if pool.nbytes < file.nbytes:
            print(
                f"note      memory allows a pool of {pool.nbytes / GIB:.2f} GiB only: figures may be low and uneven"
            )
        racing = [n for n in names if not loaders.LOADERS[n].lazy and n != "nobounce-avoid"]
        aside = [n for n in names if n not in racing]
        for state in STATES:
            bench.race(file, state, racing, args.runs, pool)
            bench.race(file, state, aside, min(LAZY_RUNS, args.runs), pool)
            print_table(bench, file, state)
    found = verdicts(bench, done)
    alike = like_with_like(bench, done)
    code = report(bench, found, alike)
    write(
        {
            "schema": SCHEMA,
            "version": VERSION,
            "mode": "quick" if args.quick else "full",
            "runs": args.runs,
            "machine": facts,
            "disk_limit": limit,
            "files": [
                {"name": f.name, "nbytes": f.nbytes, "data_nbytes": f.data_nbytes, "tensors": f.tensors}
                for f in done
            ],
            "left_out": absent,
            "samples": [s.to_dict() for s in bench.samples],
            "verdicts": [
                {"text": v.text, "floor": v.floor, "measured": v.measured, "met": v.met} for v in found
            ],
            "like_with_like": alike,
            "exit_code": code,
        }
    )
    return code


def describe_limit(limit: dict[str, Any]) -> str:
    """The disk's limit in a line."""
    if "missing" in limit:
        return f"unknown: {limit['missing']}"
    tries = ", ".join(f"depth {t['depth']}: {t['gibps']:.2f}" for t in limit["tries"])
    return f"fio {limit['engine']}, direct, 4 MiB, {limit['memory']}: {limit['gibps']:.2f} GiB/s ({tries})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, clean up; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Races nobounce.load against other loaders of safetensors on device cpu."
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(".bench"), help="where the files are made and kept (default: .bench)"
    )
    parser.add_argument("--files", default="large,small", help="large, small or both (default)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each loader in each state (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="256 and 64 MiB, no drop_caches, no floors: is it in order?"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every sample here as well")
    parser.add_argument("--only", metavar="NAMES", help="loaders, by comma: " + ", ".join(loaders.LOADERS))
    parser.add_argument("--peers", action="store_true", help="race optional peers that are installed, too")
    parser.add_argument("--clean", action="store_true", help="remove the files at the end")
    args = parser.parse_args(arguments)
    try:
        names = choose(args.only, args.peers)
    except ValueError as e:
        parser.error(str(e))
    args.files = [f.strip() for f in args.files.split(",") if f.strip()]
    if not args.files or set(args.files) - set(files.NAMES) or args.runs < 1:
        parser.error("--files takes large, small or both, --runs at least 1")

    def write(result: dict[str, Any]) -> None:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    # A terminated benchmark cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return measure(args, names, write)
    except Refused as e:
        print(f"refused: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"load.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if args.clean:
            for which in args.files:
                (args.dir / f"{which}{'-quick' if args.quick else ''}.safetensors").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
