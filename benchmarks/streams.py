"""Whether stream order costs anything: File.read with big requests beside File.read_async on 1, 4 and 8 streams.

    python benchmarks/streams.py [--dir DIR] [--devices cpu,sim:0] [--runs 7] [--slice 64MiB] [--quick] [--json [OUT]]

The same bytes of the same file go into the same buffer, in turns: cold, straight from the disk with an empty page cache, and warm,
out of the page cache. Exit code 0: on `cpu` async reaches 0.95 of sync at each number of streams (quick mode has no floor); 1: it
does not; 2: usage, or what was asked cannot be measured here.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import common
import numpy as np
from common import GIB, Refused
from races import rounds
from random_read import make_file

SCHEMA, VERSION = "nobounce.benchmarks.streams", 1
STATES: tuple[common.State, ...] = ("cold", "warm")
STREAMS = (1, 4, 8)
FLOOR = 0.95
REST_SECONDS = 0.3
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One run; `streams` is 0 for the synchronous one. Seconds of wall and CPU."""

    device: str
    state: common.State
    streams: int
    run: int
    seconds: float
    cpu_seconds: float
    nbytes: int
    route: str

    @property
    def gibps(self) -> float:
        return self.nbytes / GIB / self.seconds


class Race:
    """One device's file, buffer and streams."""

    def __init__(self, path: Path, device: str, slice_nbytes: int) -> None:
        import nobounce

        self.path, self.slice, self.nbytes = path, slice_nbytes, path.stat().st_size
        self.device = nobounce.Device(device)
        self.file = nobounce.open(path)
        self.buffer = self.device.allocate(self.nbytes)
        self.streams = [self.device.create_stream() for _ in range(max(STREAMS))]
        self.slices = range(0, self.nbytes, slice_nbytes)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.buffer.close()
        self.file.close()

    def clear(self) -> None:
        """Other bytes in the buffer, and every page of it touched."""
        self.buffer.fill(0xEE, stream=self.streams[0])
        self.streams[0].sync()

    def run(self, state: common.State, streams: int, run: int) -> Sample:
        """Raises Refused for wrong bytes and for a cold run that did not go direct."""
        self.clear()
        if state == "cold":
            common.drop(self.path, everything=False)
        else:
            common.warm(self.path)
        cache: Literal["avoid", "use"] = "avoid" if state == "cold" else "use"
        time.sleep(REST_SECONDS)
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        if streams == 0:
            receipts = [
                self.file.read(
                    self.buffer, nbytes=self._size(at), file_offset=at, buffer_offset=at, cache=cache
                )
                for at in self.slices
            ]
        else:
            transfers = [
                self.file.read_async(
                    self.buffer,
                    stream=self.streams[i % streams],
                    nbytes=self._size(at),
                    file_offset=at,
                    buffer_offset=at,
                    cache=cache,
                )
                for i, at in enumerate(self.slices)
            ]
            receipts = [t.result() for t in transfers]
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        direct = sum(r.fastpath_bytes for r in receipts)
        if state == "cold" and direct != self.nbytes:
            raise Refused(f"only {direct:,} of {self.nbytes:,} bytes of a cold run went direct")
        self._check()
        return Sample(
            self.device.name,
            state,
            streams,
            run,
            seconds,
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            self.nbytes,
            f"direct {direct / self.nbytes:.0%} ({receipts[0].evidence})",
        )

    def _size(self, at: int) -> int:
        return min(self.slice, self.nbytes - at)

    def _check(self) -> None:
        blocks = self.nbytes // common.PAGE
        words = self.buffer.numpy().view(np.uint64).reshape(blocks, -1)
        numbers = np.arange(blocks, dtype=np.uint64)
        if not ((words[:, 0] == numbers) & (words[:, -1] == numbers)).all():
            raise Refused("a run brought other bytes than the file holds")


def median(samples: Sequence[Sample], device: str, state: str, streams: int) -> float | None:
    """GiB/s."""
    found = [s.gibps for s in samples if (s.device, s.state, s.streams) == (device, state, streams)]
    return statistics.median(found) if found else None


def verdicts(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Async over sync by medians; only `cpu` has a floor."""
    found: list[dict[str, Any]] = []
    for device in dict.fromkeys(s.device for s in samples):
        for state in STATES:
            sync = median(samples, device, state, 0)
            for streams in STREAMS:
                ours = median(samples, device, state, streams)
                ratio = ours / sync if ours and sync else None
                floor = FLOOR if device == "cpu" else None
                met = None if ratio is None or floor is None else ratio >= floor
                text = f"{device} {state}, async on {streams} streams over sync"
                found.append({"text": text, "floor": floor, "measured": ratio, "met": met})
    return found


def report(samples: Sequence[Sample], device: str, state: str) -> None:
    mine = [s for s in samples if (s.device, s.state) == (device, state)]
    print(f"\n{device}, {state}: {mine[0].nbytes / GIB:.2f} GiB, {mine[0].route}")
    print(f"  {'':<19}{'GiB/s':>5}{'min':>7}{'max':>7}{'CPU s':>8}  every sample, GiB/s")
    for streams in (0, *STREAMS):
        good = [s for s in mine if s.streams == streams]
        rates = [s.gibps for s in good]
        name = f"async, {streams} streams" if streams else "sync"
        cpu = statistics.median(s.cpu_seconds for s in good)
        every = " ".join(f"{r:.2f}" for r in rates)
        print(
            f"  {name:<19}{statistics.median(rates):>5.2f}{min(rates):>7.2f}{max(rates):>7.2f}{cpu:>8.3f}  {every}"
        )


def measure(args: argparse.Namespace) -> int:
    args.dir.mkdir(parents=True, exist_ok=True)
    common.refuse_memory(args.dir)
    facts = common.machine(args.dir, ("nobounce", "numpy"))
    common.print_machine(facts)
    path = args.dir / f"streams-{args.nbytes // MIB}.bin"
    make_file(path, args.nbytes)
    samples: list[Sample] = []
    try:
        for device in args.devices:
            race = Race(path, device, args.slice)
            try:
                for state in STATES:
                    race.run(state, STREAMS[-1], -1)  # starts threads and makes bounce slots
                    for run, streams in rounds([str(n) for n in (0, *STREAMS)], args.runs):
                        samples.append(race.run(state, int(streams), run))
                    report(samples, device, state)
            finally:
                race.close()
    finally:
        if args.clean:
            path.unlink(missing_ok=True)
    found = verdicts(samples)
    print("\nverdicts (medians)" + (", quick mode: too small to judge by" if args.quick else ""))
    words = {True: "met", False: "MISSED", None: "-"}
    for v in found:
        measured = "-" if v["measured"] is None else f"{v['measured']:.3f}"
        print(f"  {words[v['met']]:<8}{v['text']:<45}{v['floor'] or '':>6}  {measured}")
    code = 1 if not args.quick and any(v["met"] is False for v in found) else 0
    if args.json:
        result = {
            "schema": SCHEMA,
            "version": VERSION,
            "mode": "quick" if args.quick else "full",
            "machine": facts,
            "slice_nbytes": args.slice,
            "file_nbytes": args.nbytes,
            "samples": [{**asdict(s), "gibps": s.gibps} for s in samples],
            "verdicts": found,
            "exit_code": code,
        }
        text = json.dumps(result, indent=1) + "\n"
        if args.json == "-":
            print(text, end="")
        else:
            Path(args.json).write_text(text)
    return code


def _size(text: str) -> int:
    for suffix, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compares async reads on streams with sync reads.")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="where the file is made and kept")
    parser.add_argument("--devices", default="cpu,sim:0", help="by comma; only cpu is judged")
    parser.add_argument("--runs", type=int, default=7, help="runs of each (default: 7)")
    parser.add_argument("--slice", type=_size, default=64 * MIB, help="bytes of one request (default: 64MiB)")
    parser.add_argument("--quick", action="store_true", help="256 MiB instead of 2 GiB, no floors")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="OUT", help="write every sample to OUT, or print it"
    )
    parser.add_argument("--clean", action="store_true", help="remove the file at the end")
    args = parser.parse_args(arguments)
    if args.runs < 1 or args.slice < common.PAGE or args.slice % common.PAGE:
        parser.error(f"--runs takes at least 1, --slice a multiple of {common.PAGE}")
    args.nbytes = 256 * MIB if args.quick else 2 * GIB
    args.devices = [d.strip() for d in args.devices.split(",") if d.strip()]
    try:
        return measure(args)
    except (Refused, OSError) as e:
        print(f"refused: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
