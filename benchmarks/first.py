#!/usr/bin/env python3
"""What a process pays that loads once: every sample is a fresh process, and the clock runs from the loader's import on.

    python benchmarks/first.py                                # on the CPU: imports, then models of 90 MB in 1, 4 and 200 files
    python benchmarks/first.py --device sim:0
    python benchmarks/first.py --device cuda:0 --dir /data    # 6 GiB in one and four files, 21,000 tensors, 400 small files
    python benchmarks/first.py --against ../old/src           # in turns with another checkout of this library

Interpreter, torch and the GPU's context are there before the clock starts; it stops when the address of every tensor was asked for and the
device is done. The files are in the page cache and byte code is compiled. Contestants take turns, in another order each round; every
sample is printed. Beside the first load stand the later ones of the same process.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
import races

SCHEMA, VERSION = "nobounce.benchmarks.first", 1
SOURCE = Path(__file__).parent.parent / "src"
LATER = 3
BLOCK = 64 << 20

CHILD = """
import json, sys, time
folder, device, later = sys.argv[1], sys.argv[2], int(sys.argv[3])
clock = time.perf_counter
if device.startswith("cuda"):
    import torch
    torch.cuda.init(); torch.empty(1, device=device); done = torch.cuda.synchronize
else:
    done = lambda: None
import glob
paths = sorted(glob.glob(folder + "/*.safetensors"))
{before}
begin = clock()
{imports}
imported = clock()
def load():
    {load}
    done()
    return held
held = load(); times = [clock() - begin]
count = len(held)
for _ in range(later):
    held = None
    again = clock(); held = load(); times.append(clock() - again)
print(json.dumps([imported - begin, times, count]))
"""

TENSORS = (
    "held = nobounce.load(folder, device=device, framework={framework!r}, **{options!r})\n"
    "    for t in held.values(): t.{address}"
)
EACH = (
    "held = [nobounce.load(p, device=device, framework={framework!r}) for p in paths]\n"
    "    for m in held:\n        for t in m.values(): t.{address}"
)
THREADS = (
    "held = list(pool.map(lambda p: nobounce.load(p, device=device, framework={framework!r}), paths))\n"
    "    for m in held:\n        for t in m.values(): t.{address}"
)
POOL = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(8); list(pool.map(abs, range(64)))"
KVIKIO = (
    "os.environ['KVIKIO_NTHREADS'] = '16'; os.environ['KVIKIO_TASK_SIZE'] = str(8 << 20)\nimport kvikio",
    "held = []\n"
    "    for p in paths:\n"
    "        t = torch.empty(os.path.getsize(p), dtype=torch.uint8, device=device); held.append(t)\n"
    "        with kvikio.CuFile(p, 'r') as f: f.read(t)\n"
    "    for t in held: t.data_ptr()",
)
PREFETCH = (
    "from safetensors import safe_open",
    "held = dict()\n"
    "    files = [safe_open(p, framework='pt', device=device) for p in paths]\n"
    "    for ahead in [f.prefetch(threads={threads}) for f in files]:\n"
    "        for k, t in ahead: held[k] = t\n"
    "    for t in held.values(): t.data_ptr()",
)
LOAD_FILE = (
    "from safetensors.torch import load_file",
    "held = dict()\n"
    "    for p in paths: held.update(load_file(p, device=device))\n"
    "    for t in held.values(): t.data_ptr()",
)


class Way(NamedTuple):
    """One contestant: what it imports and does under the clock, what is made before it, and the sources it is imported from."""

    imports: str
    load: str
    before: str = ""
    source: Path | None = None


class Section(NamedTuple):
    """One kind of model: how its folder is made, and who loads it."""

    title: str
    files: int
    tensors: int
    nbytes: int
    ways: dict[str, Way]


def make(folder: Path, files: int, tensors: int, nbytes: int) -> None:
    """`files` safetensors of together `tensors` bf16 tensors and `nbytes` bytes of data, unless they are there already."""
    marker = folder / f"made-{files}-{tensors}-{nbytes}"
    if marker.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    each = max(2, nbytes // tensors // 2 * 2)
    block = os.urandom(min(BLOCK, nbytes))
    for number in range(files):
        names = range(number * tensors // files, (number + 1) * tensors // files)
        header = {
            f"model.layers.{name}.weight": {
                "dtype": "BF16",
                "shape": [each // 2],
                "data_offsets": [n * each, (n + 1) * each],
            }
            for n, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"model-{number:05}.safetensors").open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            left = len(names) * each
            while left:
                left -= f.write(block[: min(left, len(block))])
    marker.touch()


def nobounce_ways(
    device: str, against: Path | None, load: str, before: str = "", **options: Any
) -> Iterator[tuple[str, Way]]:
    """This checkout, and the other one."""
    torch = device.startswith("cuda")
    code = load.replace("{framework!r}", repr("torch" if torch else None))
    code = code.replace("{options!r}", repr(options)).replace(
        "{address}", "data_ptr()" if torch else "address"
    )
    yield "nobounce", Way("import nobounce", code, before, SOURCE)
    if against is not None:
        yield "nobounce, other", Way("import nobounce", code, before, against)


def peers(device: str) -> Iterator[tuple[str, Way]]:
    """Who else can be imported here."""
    if not device.startswith("cuda"):
        return
    if importlib.util.find_spec("kvikio"):
        yield "kvikio", Way(*KVIKIO, before="import os")
    if importlib.util.find_spec("safetensors"):
        from safetensors import safe_open

        if hasattr(safe_open, "prefetch"):
            for threads in (8, 16):
                load = PREFETCH[1].replace("{threads}", str(threads))
                yield f"safetensors prefetch {threads}", Way(PREFETCH[0], load)
        else:
            yield "safetensors load_file", Way(*LOAD_FILE)


def sections(device: str, gib: float, against: Path | None) -> dict[str, Section]:
    """What is raced on this kind of device."""
    gpu = device.startswith("cuda")
    nbytes = int(gib * common.GIB)
    many = min(nbytes, common.GIB)
    whole = lambda **options: dict(nobounce_ways(device, against, TENSORS, **options))  # noqa: E731
    small = dict(nobounce_ways(device, against, EACH))
    small |= {f"{k}, one call": w for k, w in nobounce_ways(device, against, TENSORS)}
    small |= {f"{k}, 8 threads": w for k, w in nobounce_ways(device, against, THREADS, POOL)}
    shared = {f"{k}, shared": w for k, w in whole(shared_storage=True).items()} if gpu else {}
    others = dict(peers(device))
    found = {
        "one": Section("one file", 1, 100, nbytes, whole() | others),
        "four": Section("four files", 4, 100, nbytes, whole() | others),
        "many": Section("21,000 tensors", 1, 21_000, many, whole() | shared | others),
        "small": Section("400 files of 200 KB", 400, 800, 400 * 200_000, small | others),
    }
    if not gpu:
        found["shards"] = Section("200 files", 200, 1000, nbytes, whole())
    return found


def child(way: Way, folder: Path, device: str, later: int) -> tuple[float, list[float], int]:
    """(seconds of the import, seconds of the first and the later loads, how much was loaded)."""
    code = CHILD
    for name in ("before", "imports", "load"):
        code = code.replace("{" + name + "}", getattr(way, name))
    environment = dict(os.environ)
    if way.source is not None:
        environment["PYTHONPATH"] = str(way.source)
    command = [sys.executable, "-c", code, str(folder), device, str(later)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=common.CHILD_SECONDS, env=environment
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["?"])[-1][:300])
    imported, times, count = json.loads(done.stdout.strip().splitlines()[-1])
    return float(imported), [float(t) for t in times], int(count)


def race(section: Section, folder: Path, device: str, rounds: int) -> list[dict[str, Any]]:
    """Every sample of one section."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.safetensors")):
        common.warm(path)
    for run, name in races.rounds(list(section.ways), rounds):
        row: dict[str, Any] = {"section": section.title, "loader": name, "run": run}
        try:
            row["import"], row["seconds"], row["count"] = child(section.ways[name], folder, device, LATER)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            row["error"] = str(e)
        rows.append(row)
    return rows


def show(section: Section, rows: list[dict[str, Any]]) -> None:
    """Medians, least and every sample of the first loads in ms; the later ones beside."""
    nbytes = section.nbytes
    print(f"\n{section.title}: {nbytes / common.GIB:.2f} GiB")
    firsts: dict[str, list[float]] = {}
    for name in section.ways:
        mine = [r for r in rows if r["loader"] == name]
        good = [r for r in mine if "error" not in r]
        if not good:
            print(f"  {name:28s} FAILED: {mine[0]['error']}")
            continue
        firsts[name] = first = [r["seconds"][0] for r in good]
        later = [t for r in good for t in r["seconds"][1:]]
        median, after = statistics.median(first), statistics.median(later)
        print(
            f"  {name:28s} first {median * 1e3:8.1f} ms {nbytes / common.GIB / median:6.2f} GiB/s"
            f" (import {statistics.median(r['import'] for r in good) * 1e3:5.1f})"
            f"   later {after * 1e3:8.1f} ms {nbytes / common.GIB / after:6.2f} GiB/s"
            f"   first less later {1e3 * (median - after):6.1f}   first, ms: {[round(t * 1e3, 1) for t in first]}"
        )
    for name in firsts:
        if (other := firsts.get(name.replace("nobounce", "nobounce, other", 1))) and name.startswith(
            "nobounce"
        ):
            pairs = [a / b for a, b in zip(other, firsts[name], strict=False)]
            print(f"  {name}: {statistics.median(pairs):.3f} times as fast as the other checkout, first load")


STATEMENTS = ("pass", "import nobounce", "import nobounce; nobounce.load")


def imports(sources: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Whole processes that only import, less an interpreter that does nothing."""
    rows: list[dict[str, Any]] = []
    names = [(name, what) for name in sources for what in STATEMENTS]
    labels = {f"{name}: {what}": (name, what) for name, what in names}
    for run, label in races.rounds(list(labels), rounds * 2):
        name, what = labels[label]
        environment = {**os.environ, "PYTHONPATH": str(sources[name])}
        code = f"import time; begin = time.perf_counter(); {what}\nprint(time.perf_counter() - begin)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        rows.append(
            {
                "section": "imports",
                "loader": name,
                "statement": what,
                "run": run,
                "seconds": [float(done.stdout)],
            }
        )
    print("\nimports, ms in the process: median, least, all")
    for name, what in names:
        took = [r["seconds"][0] * 1e3 for r in rows if (r["loader"], r["statement"]) == (name, what)]
        print(
            f"  {name:18s} {what:32s} {statistics.median(took):6.1f} {min(took):6.1f}  {[round(t, 1) for t in took]}"
        )
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dir", type=Path, default=Path(".bench/first"), help="where the models are made and kept"
    )
    parser.add_argument("--gib", type=float, help="size of the models (6 on a GPU, else 0.084: 90 MB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sections", help="which of imports, one, four, many, small, shards; all by default")
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another checkout")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def main(argv: list[str] | None = None, say: Callable[..., None] = print) -> int:
    options = arguments().parse_args(argv)
    gpu = options.device.startswith("cuda")
    gib = options.gib if options.gib is not None else (6.0 if gpu else 0.0838)
    against = options.against.resolve() if options.against else None
    found = sections(options.device, gib, against)
    chosen = options.sections.split(",") if options.sections else ["imports", *found]
    if unknown := [name for name in chosen if name not in ("imports", *found)]:
        say(f"no section {', '.join(unknown)}: there are imports, {', '.join(found)}", file=sys.stderr)
        return 2
    sources = {"nobounce": SOURCE} | ({"nobounce, other": against} if against else {})
    for source in sources.values():
        compileall.compile_dir(source, quiet=1)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = common.machine(options.dir, ["nobounce", "torch", "kvikio-cu13", "safetensors"])
    common.print_machine(facts)
    rows = imports(sources, options.rounds) if "imports" in chosen else []
    for name in chosen:
        if name in found:
            section = found[name]
            folder = options.dir / f"{name}-{section.nbytes >> 20}"
            make(folder, section.files, section.tensors, section.nbytes)
            more = race(section, folder.resolve(), options.device, options.rounds)
            show(section, more)
            rows += more
            if options.json:  # after each section: what has been measured is kept if a later one is cut off
                result = {
                    "schema": SCHEMA,
                    "version": VERSION,
                    "machine": facts,
                    "device": options.device,
                    "samples": rows,
                }
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
