#!/usr/bin/env python3
"""Compares two versions of this library, in turns: python benchmarks/ab.py engine-0 HEAD

Each version is checked out into a worktree of its own and runs its own benchmark scripts on the same files, one run at a time,
alternately (A B, B A, A B, ...), so that what the machine does meanwhile strikes both. A version is a commit, a branch, or a name
of baselines.toml. Of each row the ratio of every pair is taken, and the median of these ratios is the verdict: 1.0 is as fast,
below the floor (0.97) is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SCHEMA, VERSION = "nobounce.benchmarks.ab", 1
FLOOR = 0.97
ALTERNATIONS = 9
RUN_SECONDS = 1200

Rates = dict[str, float]
"""Row -> how fast: larger is better."""


@dataclass(frozen=True, slots=True)
class Script:
    """A benchmark script: how one run of it is started, and the rows of its JSON."""

    name: str
    arguments: Callable[[Path, bool], list[str]]
    rates: Callable[[dict[str, Any]], Rates]


@dataclass(frozen=True, slots=True)
class Version:
    """One side: what was asked for, its commit, and where it is checked out."""

    name: str
    commit: str
    folder: Path


def _medians(samples: Iterator[tuple[str, float]]) -> Rates:
    """Rows that occur several times in one run, as their medians."""
    found: dict[str, list[float]] = {}
    for row, rate in samples:
        found.setdefault(row, []).append(rate)
    return {row: statistics.median(rates) for row, rates in found.items()}


def _load(result: dict[str, Any]) -> Rates:
    good = (s for s in result["samples"] if not s["error"] and s["seconds"])
    return _medians((f"{s['file']}, {s['state']}, {s['loader']}", s["nbytes"] / s["seconds"]) for s in good)


def _streams(result: dict[str, Any]) -> Rates:
    return _medians(
        (f"{s['device']}, {s['state']}, {s['streams'] or 'no'} streams", s["gibps"])
        for s in result["samples"]
    )


def _random(result: dict[str, Any]) -> Rates:
    return _medians((s["contestant"], s["iops"]) for s in result["samples"] if s["contestant"] == "nobounce")


def _stats(result: dict[str, Any]) -> Rates:
    rates = {f"counting, {kind}": 1 / statistics.median(us) for kind, us in result["counting_us"].items()}
    return rates | {f"4 KiB read, level {n}": 1 / statistics.median(result[f"level_{n}_us"]) for n in (0, 1)}


def _quick(quick: bool) -> list[str]:
    return ["--quick"] if quick else []


SCRIPTS = (
    Script(
        "load",
        lambda d, q: ["--dir", str(d), "--runs", "1", "--only", "nobounce,nobounce-avoid", *_quick(q)],
        _load,
    ),
    Script("streams", lambda d, q: ["--dir", str(d), "--runs", "1", *_quick(q)], _streams),
    Script("random_read", lambda d, q: ["--file", str(d / "random.bin"), "--runs", "3", *_quick(q)], _random),
    Script("stats_cost", lambda d, q: [], _stats),
)


def commit_of(name: str) -> str:
    """The commit of a name: of baselines.toml, or git's. Raises SystemExit."""
    known = tomllib.loads((HERE / "baselines.toml").read_text())
    wanted = known[name]["commit"] if name in known else name
    done = _git("rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}")
    if done.returncode:
        raise SystemExit(f"{name}: no commit, and none of {', '.join(known)} in baselines.toml")
    return done.stdout.strip()


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@contextmanager
def checked_out(name: str, into: Path) -> Iterator[Version]:
    """A worktree of a version, removed again."""
    commit = commit_of(name)
    done = _git("worktree", "add", "--detach", "--force", str(into), commit)
    if done.returncode:
        raise SystemExit(f"git worktree add: {done.stderr.strip()}")
    try:
        yield Version(name, commit, into)
    finally:
        _git("worktree", "remove", "--force", str(into))


def run(script: Script, version: Version, files: Path, quick: bool) -> Rates:
    """One run of a version's own script. A missed floor is the script's verdict, not ours; no JSON is an error."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        path = version.folder / "benchmarks" / f"{script.name}.py"
        command = [sys.executable, str(path), *script.arguments(files, quick), "--json", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(version.folder / "src")}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=RUN_SECONDS
        )
        if not out.exists():
            raise SystemExit(
                f"{script.name} of {version.name} ends with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        return script.rates(json.loads(out.read_text()))


def compare(samples: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Of each row the median of the ratios of its pairs (A, B), and whether B keeps the floor."""
    rows = []
    for row, pairs in samples.items():
        ratios = sorted(b / a for a, b in pairs)
        median = statistics.median(ratios)
        rows.append(
            {
                "row": row,
                "ratio": median,
                "least": ratios[0],
                "most": ratios[-1],
                "met": median >= FLOOR,
                "pairs": pairs,
            }
        )
    return rows


def measure(sides: Sequence[Version], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Alternate, and say what each pair gave as it comes."""
    samples: dict[str, list[tuple[float, float]]] = {}
    for turn in range(args.alternations):
        for script in (s for s in SCRIPTS if s.name in args.only):
            order = sides if turn % 2 == 0 else sides[::-1]
            found = {side.folder: run(script, side, args.dir, args.quick) for side in order}
            a, b = (found[side.folder] for side in sides)
            for row in a.keys() & b.keys():
                samples.setdefault(f"{script.name}: {row}", []).append((a[row], b[row]))
            print(
                f"turn {turn + 1} of {args.alternations}, {script.name}: {len(a.keys() & b.keys())} rows",
                flush=True,
            )
    return compare(dict(sorted(samples.items())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where every row keeps the floor, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="what is compared with: a name of baselines.toml, or a commit")
    parser.add_argument("b", nargs="?", default="HEAD", help="what is compared (default: HEAD)")
    parser.add_argument(
        "--alternations", type=int, default=ALTERNATIONS, help="pairs of each row (default: 9)"
    )
    parser.add_argument("--only", default=",".join(s.name for s in SCRIPTS), help="scripts, by comma")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="where files are made and kept")
    parser.add_argument("--quick", action="store_true", help="small files: is it in order?")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every sample to OUT")
    args = parser.parse_args(arguments)
    args.only = [n.strip() for n in args.only.split(",") if n.strip()]
    if not args.only or set(args.only) - {s.name for s in SCRIPTS} or args.alternations < 1:
        parser.error(f"--only takes {', '.join(s.name for s in SCRIPTS)}, --alternations at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worktrees are removed then, too
    args.dir.mkdir(parents=True, exist_ok=True)
    args.dir = args.dir.resolve()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        sides = [
            stack.enter_context(checked_out(name, Path(scratch) / side))
            for side, name in (("a", args.a), ("b", args.b))
        ]
        rows = measure(sides, args)
    width = max(len(r["row"]) for r in rows)
    print(f"\n{args.b} over {args.a}: medians of {args.alternations} paired ratios, floor {FLOOR}")
    for r in rows:
        word = "met" if r["met"] else "SLOWER"
        print(f"  {word:<7}{r['row']:<{width}}  {r['ratio']:.3f}  ({r['least']:.3f} to {r['most']:.3f})")
    if args.json is not None:
        result = {
            "schema": SCHEMA,
            "version": VERSION,
            "mode": "quick" if args.quick else "full",
            "a": {"name": sides[0].name, "commit": sides[0].commit},
            "b": {"name": sides[1].name, "commit": sides[1].commit},
            "floor": FLOOR,
            "alternations": args.alternations,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(r["met"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
