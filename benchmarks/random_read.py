"""How fast many small direct reads come into memory of device `cpu`: nobounce.Batch, fio and a pool of threads, in turns.

    python benchmarks/random_read.py [--file FILE] [--count 10000] [--depth 128] [--runs 7] [--quick] [--json [OUT]]

Each contestant reads `count` random blocks of 4 KiB with O_DIRECT. What is made once stays outside everybody's clock: fio's file,
ring and buffers, the pool's threads, nobounce's Batch. Its clock covers handing in the offsets, the reads, and every status. CPU is user and system time per read. Afterwards every block is compared with what the file holds
there, and the page cache must be as it was. Exit code 0: every floor was met (quick mode has none); 1: one was missed; 2: usage, or
what was asked cannot be measured here.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import GIB, PAGE, Refused

SCHEMA, VERSION = "nobounce.benchmarks.random_read", 1
THREADS = 32
STEP = 16 << 20
# Storage that is throttled by credits (most virtual disks) serves whoever comes after a pause faster: everybody gets the same one.
REST_SECONDS = 0.5
FIO_FLOOR, POOL_FLOOR, CPU_CEILING = 0.9, 1.0, 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: reads per second, seconds, microseconds of CPU per read."""

    contestant: str
    run: int
    iops: float
    seconds: float
    user_us: float
    system_us: float

    @property
    def cpu_us(self) -> float:
        return self.user_us + self.system_us


def make_file(path: Path, nbytes: int) -> None:
    """A file whose 4 KiB blocks begin and end with their own number, written past the page cache; kept if it is there already."""
    if path.exists() and path.stat().st_size == nbytes:
        return
    block = mmap.mmap(-1, STEP)
    view = np.frombuffer(block, np.uint64).reshape(-1, PAGE // 8)
    view[:] = np.random.default_rng(0).integers(0, 1 << 63, view.shape, np.uint64)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        for start in range(0, nbytes, STEP):
            numbers = np.arange(start // PAGE, (start + STEP) // PAGE, dtype=np.uint64)
            view[:, 0] = view[:, -1] = numbers
            os.pwrite(fd, block, start)
        os.fsync(fd)
    finally:
        os.close(fd)


class Race:
    """Everything that is the same for all contestants."""

    def __init__(self, path: Path, count: int, depth: int) -> None:
        import nobounce

        self.path, self.count, self.depth = path, count, depth
        self.blocks = path.stat().st_size // PAGE
        self.rng = np.random.default_rng(1)
        self.device = nobounce.Device("cpu")
        self.file = nobounce.open(path)
        self.buffer = self.device.allocate(count * PAGE)
        self.held = self.buffer.numpy().reshape(count, PAGE)
        self.held[:] = 1
        self.batch = nobounce.Batch(count, depth=depth)
        self.receipt = ""

    def numbers(self) -> np.ndarray[Any, Any]:
        return self.rng.integers(0, self.blocks, self.count)

    def timed(self, name: str, run: int, work: Callable[[np.ndarray[Any, Any]], None]) -> Sample:
        """Run it, then look at every block. Raises Refused for wrong bytes."""
        numbers = self.numbers()
        self.held[:, :8] = self.held[:, -8:] = 255
        offsets = numbers * PAGE
        usage = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        work(offsets)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        words = self.held.view(np.uint64)
        if not ((words[:, 0] == numbers) & (words[:, -1] == numbers)).all():
            raise Refused(f"{name} brought other bytes than the file holds")
        each = 1e6 / self.count
        user, system = after.ru_utime - usage.ru_utime, after.ru_stime - usage.ru_stime
        return Sample(name, run, self.count / seconds, seconds, user * each, system * each)

    def nobounce(self, run: int) -> Sample:
        batch = self.batch
        before = batch.receipt.fastpath_bytes

        def work(offsets: np.ndarray[Any, Any]) -> None:
            batch.read(self.file, self.buffer, file_offsets=offsets, nbytes=PAGE)
            batch.wait().check()

        sample = self.timed("nobounce", run, work)
        direct = (batch.receipt.fastpath_bytes - before) / self.count / PAGE
        self.receipt = f"{batch.method}, {direct:.0%} direct ({batch.receipt.evidence})"
        return sample

    def threads(self, run: int) -> Sample:
        """32 threads that are there already, each with its share of the blocks and one preadv a block."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        go = threading.Barrier(THREADS + 1)
        memory = memoryview(self.held.reshape(-1))  # type: ignore[arg-type]
        shared: list[list[int]] = []

        def serve(k: int) -> None:
            go.wait()
            preadv = os.preadv
            for i, offset in enumerate(shared[0][k::THREADS]):
                at = (k + i * THREADS) * PAGE
                preadv(fd, [memory[at : at + PAGE]], offset)

        pool = [threading.Thread(target=serve, args=(k,)) for k in range(THREADS)]
        for thread in pool:
            thread.start()

        def work(offsets: np.ndarray[Any, Any]) -> None:
            shared.append(offsets.tolist())
            go.wait()
            for thread in pool:
                thread.join()

        try:
            return self.timed("preadv-32", run, work)
        finally:
            os.close(fd)

    def fio(self, run: int, name: str = "fio", *more: str) -> Sample:
        command = [
            *("fio", "--name=random", f"--filename={self.path}", "--rw=randread", f"--bs={PAGE}"),
            *("--direct=1", "--readonly", "--ioengine=io_uring", f"--iodepth={self.depth}", "--thread"),
            *(
                f"--number_ios={self.count}",
                f"--size={self.blocks * PAGE}",
                "--randrepeat=0",
                "--norandommap=1",
            ),
            *("--output-format=json", *more),
        ]
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=common.CHILD_SECONDS,
            )
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        except (subprocess.SubprocessError, ValueError, LookupError) as e:
            raise Refused(f"fio failed: {getattr(e, 'stderr', '') or e}") from e
        seconds = job["read"]["runtime"] / 1e3
        count = job["read"]["total_ios"]
        share = seconds * 1e6 / 100 / count
        return Sample(name, run, count / seconds, seconds, job["usr_cpu"] * share, job["sys_cpu"] * share)

    def fio_tuned(self, run: int) -> Sample:
        """fio with its registered buffers and files and batched system calls, for information."""
        batches = (
            "--iodepth_batch_submit=32",
            "--iodepth_batch_complete_min=32",
            "--iodepth_batch_complete_max=128",
        )
        return self.fio(run, "fio-tuned", "--fixedbufs=1", "--registerfiles=1", *batches)


CONTESTANTS: dict[str, Callable[[Race, int], Sample]] = {
    "nobounce": Race.nobounce,
    "fio": Race.fio,
    "preadv-32": Race.threads,
    "fio-tuned": Race.fio_tuned,
}


def run(race: Race, names: Sequence[str], runs: int) -> list[Sample]:
    """Everybody in turns, the order rotating; one round before that does not count."""
    samples: list[Sample] = []
    before = common.resident_bytes(race.path)
    for i in range(-1, runs):
        for k in range(len(names)):
            name = names[(k + max(i, 0)) % len(names)]
            time.sleep(REST_SECONDS)
            sample = CONTESTANTS[name](race, i)
            if i >= 0:
                samples.append(sample)
            if common.resident_bytes(race.path) > before:
                raise Refused(
                    f"{name} left pages of the file in the page cache, so its reads were not direct"
                )
    return samples


def median(samples: Sequence[Sample], name: str, of: Callable[[Sample], float]) -> float | None:
    found = [of(s) for s in samples if s.contestant == name]
    return statistics.median(found) if found else None


def verdicts(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The floors by medians: met is None where one side is missing."""

    def ratio(
        what: str, other: str, floor: float, of: Callable[[Sample], float], *, at_most: bool = False
    ) -> dict[str, Any]:
        ours, theirs = median(samples, "nobounce", of), median(samples, other, of)
        if not ours or not theirs:
            return {"text": what, "floor": floor, "measured": None, "met": None}
        found = ours / theirs
        return {
            "text": what,
            "floor": floor,
            "measured": found,
            "met": found <= floor if at_most else found >= floor,
        }

    return [
        ratio("reads per second, of fio io_uring", "fio", FIO_FLOOR, lambda s: s.iops),
        ratio("reads per second, of 32 threads of preadv", "preadv-32", POOL_FLOOR, lambda s: s.iops),
        ratio(
            "CPU per read, of 32 threads of preadv (at most)",
            "preadv-32",
            CPU_CEILING,
            lambda s: s.cpu_us,
            at_most=True,
        ),
    ]


def report(samples: Sequence[Sample], race: Race, names: Sequence[str]) -> None:
    print(
        f"\n{race.count:,} random direct reads of {PAGE} bytes, depth {race.depth}, file of {race.blocks * PAGE / GIB:.2f} GiB"
    )
    print(
        f"  {'contestant':<12}{'IOPS':>9}{'min':>9}{'max':>9}{'CPU us':>8}{'user':>7}{'sys':>7}  every sample, IOPS"
    )
    for name in names:
        mine = [s for s in samples if s.contestant == name]
        rates = [s.iops for s in mine]
        cpu, user, system = (
            median(samples, name, f) or 0.0
            for f in (lambda s: s.cpu_us, lambda s: s.user_us, lambda s: s.system_us)
        )
        every = " ".join(f"{r:.0f}" for r in rates)
        print(
            f"  {name:<12}{statistics.median(rates):>9.0f}{min(rates):>9.0f}{max(rates):>9.0f}{cpu:>8.2f}{user:>7.2f}{system:>7.2f}  {every}"
        )
    print(f"  nobounce: {race.receipt}")


def measure(args: argparse.Namespace) -> int:
    folder = args.file.parent
    folder.mkdir(parents=True, exist_ok=True)
    common.refuse_memory(folder)
    facts = common.machine(folder, ("nobounce", "numpy"))
    common.print_machine(facts)
    make_file(args.file, args.nbytes)
    common.drop(args.file, everything=False)
    names = [n for n in CONTESTANTS if not n.startswith("fio") or shutil.which("fio")]
    if "fio" not in names:
        print("left out  fio: not installed, so its floor cannot be judged")
    race = Race(args.file, args.count, args.depth)
    samples = run(race, names, args.runs)
    report(samples, race, names)
    found = verdicts(samples)
    print("\nverdicts (medians)" + (", quick mode: too small to judge by" if args.quick else ""))
    words = {True: "met", False: "MISSED", None: "unknown"}
    for v in found:
        measured = "-" if v["measured"] is None else f"{v['measured']:.2f}"
        print(f"  {words[v['met']]:<8}{v['text']:<50}{v['floor']:>6}  {measured}")
    code = 1 if not args.quick and any(v["met"] is not True for v in found) else 0
    if args.json:
        result = {
            "schema": SCHEMA,
            "version": VERSION,
            "mode": "quick" if args.quick else "full",
            "machine": facts,
            "count": args.count,
            "depth": args.depth,
            "file_nbytes": race.blocks * PAGE,
            "route": race.receipt,
            "samples": [{**asdict(s), "cpu_us": s.cpu_us} for s in samples],
            "verdicts": found,
            "exit_code": code,
        }
        text = json.dumps(result, indent=1) + "\n"
        if args.json == "-":
            print(text, end="")
        else:
            Path(args.json).write_text(text)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Races nobounce.Batch against fio and a pool of threads.")
    parser.add_argument(
        "--file", type=Path, help="the file to read, made if need be (default: .bench/random.bin)"
    )
    parser.add_argument("--count", type=int, default=10_000, help="reads per run (default: 10000)")
    parser.add_argument("--depth", type=int, default=128, help="requests in flight (default: 128)")
    parser.add_argument("--runs", type=int, default=7, help="runs of each contestant (default: 7)")
    parser.add_argument(
        "--quick", action="store_true", help="256 MiB instead of 4 GiB, no floors: is it in order?"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="OUT", help="write every sample to OUT, or print it"
    )
    parser.add_argument("--clean", action="store_true", help="remove the file at the end")
    args = parser.parse_args(arguments)
    if args.count < 1 or args.depth < 1 or args.runs < 1:
        parser.error("--count, --depth and --runs take at least 1")
    args.nbytes = 256 << 20 if args.quick else 4 * GIB
    args.file = args.file or Path(".bench") / ("random-quick.bin" if args.quick else "random.bin")
    try:
        return measure(args)
    except (Refused, OSError) as e:
        print(f"refused: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if args.clean:
            args.file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
