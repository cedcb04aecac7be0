"""The load benchmark measures what it says, refuses what it cannot measure, and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from capabilities import need

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = ("common", "files", "races", "loaders", "verdicts", "load")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are scripts and no package."""
    import importlib

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in MODULES:
            del sys.modules[name]


def run_load(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "load.py"), "--dir", str(folder), "--quick", "--files", "small"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.serial
def test_quick_mode_races_everybody_and_writes_each_sample(tmp_path: Path) -> None:
    need("o_direct", "cachestat", "safetensors", "torch")
    out = tmp_path / "out.json"
    names = ["nobounce", "nobounce-avoid", "safetensors-numpy", "readinto", "readinto-bytearray"]
    names += ["odirect", "safetensors-lazy"]
    done = run_load(tmp_path / "files", "--runs", "2", "--only", ",".join(names), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"], result["mode"]) == ("nobounce.benchmarks.load", 1, "quick")
    assert result["machine"]["cores"]
    assert result["machine"]["versions"]["safetensors"]
    assert {s["loader"] for s in result["samples"]} == set(names)
    assert len(result["samples"]) == 2 * 2 * len(names)
    assert len({s["digest"] for s in result["samples"]}) == 1
    for s in result["samples"]:
        assert f"{s['seconds']:.4f}" in done.stdout
        buffered = s["loader"] in ("safetensors-numpy", "readinto", "readinto-bytearray")
        if s["state"] == "cold" and s["loader"] != "safetensors-lazy":
            assert s["disk_bytes"] >= 0.9 * s["nbytes"]
        if s["state"] == "cold" and buffered:
            assert s["cache_growth_bytes"] >= s["nbytes"]
        if s["state"] == "warm" and buffered:
            assert s["disk_bytes"] == s["cache_growth_bytes"] == 0
    assert done.stdout.startswith("machine ")
    assert "limit     " in done.stdout
    assert [p.name for p in (tmp_path / "files").iterdir()] == ["small-quick.safetensors"]
    assert str(tmp_path) not in out.read_text()


@pytest.mark.serial
def test_a_memory_file_system_is_refused_as_a_disk(tmp_path: Path) -> None:
    need("mount")
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True, timeout=60)
    try:
        done = run_load(tmp_path / "files", "--runs", "1", "--only", "readinto")
        assert done.returncode == 2
        assert "tmpfs" in done.stderr
        assert "refused" in done.stderr
        assert not list((tmp_path / "files").iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=60)


@pytest.mark.serial
def test_a_file_that_cannot_be_dropped_from_the_page_cache_is_refused(
    tmp_path: Path, bench: SimpleNamespace
) -> None:
    need("cachestat")
    file = bench.files.ensure(tmp_path, "small", quick=True)
    with file.path.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert sum(held[at] for at in range(0, file.nbytes, mmap.PAGESIZE))
        done = run_load(tmp_path, "--runs", "1", "--only", "readinto", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 2
    assert "stay in the page cache" in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.serial
def test_clean_removes_the_files(tmp_path: Path) -> None:
    need("cachestat")
    done = run_load(tmp_path, "--runs", "1", "--only", "readinto", "--clean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("--only", "nobody"), ("--runs", "0"), ("--files", "medium")])
def test_bad_arguments_are_usage_errors(tmp_path: Path, arguments: tuple[str, str]) -> None:
    done = run_load(tmp_path / "files", *arguments)
    assert done.returncode == 2
    assert not (tmp_path / "files").exists()


def test_a_cold_sample_that_no_disk_served_is_refused(
    tmp_path: Path, bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bench.files.ensure(tmp_path, "small", quick=True)
    run = bench.load.Bench(["readinto"], 1, quick=True)
    run.digests["small"] = "right"
    answer = {"seconds": 1.0, "peak_rise_bytes": 0, "digest": "right", "disk_bytes": file.nbytes // 2}
    monkeypatch.setattr(bench.races, "run_child", lambda command, get_ready: dict(answer))
    with pytest.raises(bench.common.Refused, match="some cache was measured"):
        run.race(file, "cold", ["readinto"], 1, bench.races.Pool(0))
    run.race(file, "warm", ["readinto"], 1, bench.races.Pool(0))


def test_other_bytes_than_the_file_holds_make_the_run_fail(
    tmp_path: Path,
    bench: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = bench.files.ensure(tmp_path, "small", quick=True)
    run = bench.load.Bench(["readinto"], 1, quick=True)
    run.digests["small"] = bench.loaders.reference(file.path)
    answer = {"seconds": 1.0, "peak_rise_bytes": 0, "digest": "0" * 16, "disk_bytes": file.nbytes}
    monkeypatch.setattr(bench.races, "run_child", lambda command, get_ready: dict(answer))
    run.race(file, "cold", ["readinto"], 1, bench.races.Pool(0))
    assert bench.load.report(run, [], []) == 1
    assert "failed: readinto" in capsys.readouterr().out


def test_the_digest_knows_names_and_bytes_but_no_order(bench: SimpleNamespace) -> None:
    a, b = np.arange(21, dtype=np.uint8), np.arange(100, 108, dtype=np.uint8)
    digest = bench.loaders.digest
    assert digest([("a", a), ("b", b)]) == digest([("b", b), ("a", a)])
    assert digest([("a", a), ("b", b)]) != digest([("a", b), ("b", a)])
    assert digest([("a", a)]) != digest([("a", a[:20])])
    assert digest([("a", np.zeros(8, np.uint8))]) != digest([("a", np.zeros(16, np.uint8))])
    changed = a.copy()
    changed[20] ^= 1
    assert digest([("a", a)]) != digest([("a", changed)])


def sample(bench: SimpleNamespace, loader: str, state: str, seconds: float, **more: int) -> object:
    return bench.races.Sample(loader, "large", state, 0, nbytes=1 << 30, seconds=seconds, **more)


def test_floors_decide_the_exit_code_in_full_mode_alone(bench: SimpleNamespace, tmp_path: Path) -> None:
    file = bench.files.BenchFile("large", tmp_path / "x", 1 << 30, 1 << 30, 1, made=False)

    def code(quick: bool, ours: float, peak: int = 0, growth: int = 0, other: float = 3.0) -> int:
        run = bench.load.Bench(["nobounce"], 1, quick=quick)
        run.samples = [
            sample(bench, "nobounce", "cold", ours, peak_growth_bytes=peak),
            sample(bench, "odirect", "cold", 0.95),
            sample(bench, "nobounce", "warm", ours),
            sample(bench, "readinto", "warm", 2.0),
            sample(bench, "readinto-bytearray", "warm", other),
            *(sample(bench, name, "warm", 2.5) for name in bench.verdicts.SAFETENSORS),
            sample(bench, "nobounce-avoid", "cold", ours, cache_growth_bytes=growth),
            sample(bench, "nobounce-avoid", "warm", ours),
        ]
        found = bench.verdicts.verdicts(run, [file])
        assert all(v.met is not None for v in found)
        return int(bench.load.report(run, found, []))

    assert code(quick=False, ours=1.0) == 0
    assert code(quick=False, ours=1.01) == 1
    assert code(quick=True, ours=1.01) == 0
    assert code(quick=False, ours=1.0, peak=100_000_000) == 1
    assert code(quick=False, ours=1.0, growth=4096) == 1
    assert code(quick=False, ours=1.0, other=1.9) == 1  # the faster way to write it counts


def test_a_floor_is_not_met_while_a_competitor_is_absent(bench: SimpleNamespace, tmp_path: Path) -> None:
    file = bench.files.BenchFile("large", tmp_path / "x", 1 << 30, 1 << 30, 1, made=False)
    run = bench.races.Results()
    run.samples = [sample(bench, "nobounce", "warm", 0.1), sample(bench, "safetensors-numpy", "warm", 9.0)]
    line = next(v for v in bench.verdicts.verdicts(run, [file]) if "against safetensors" in v.text)
    assert line.met is None
    assert "without safetensors-clone" in line.measured


def test_files_are_what_they_claim_and_are_made_once(tmp_path: Path, bench: SimpleNamespace) -> None:
    need("safetensors")
    import safetensors

    first = bench.files.ensure(tmp_path, "small", quick=True)
    stamp = first.path.stat().st_mtime_ns
    with safetensors.safe_open(first.path, framework="np") as f:
        assert len(f.keys()) == first.tensors == 1250
    assert first.path.stat().st_size == first.nbytes
    assert not bench.files.ensure(tmp_path, "small", quick=True).made
    assert first.path.stat().st_mtime_ns == stamp
    digest = bench.loaders.reference(first.path)
    with first.path.open("r+b") as f:
        f.truncate(first.nbytes - 1)
    assert bench.files.ensure(tmp_path, "small", quick=True).made
    assert bench.loaders.reference(first.path) == digest


def test_the_full_files_have_the_shape_that_is_promised(bench: SimpleNamespace) -> None:
    for name, nbytes, count in (("large", 4 << 30, 290), ("small", 1 << 30, 20_000)):
        entries = list(bench.files.SHAPES[name, False]())
        assert len({e.name for e in entries}) == len(entries) == count
        assert abs(sum(e.nbytes for e in entries) / nbytes - 1) < 0.01
    assert min(e.nbytes for e in entries) >= 64
    assert max(e.nbytes for e in entries) <= 600 << 10


def test_nothing_is_left_of_a_file_that_could_not_be_made(
    tmp_path: Path, bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.files, "_write_all", full)
    with pytest.raises(OSError, match="No space"):
        bench.files.ensure(tmp_path, "small", quick=True)
    assert not list(tmp_path.iterdir())


CHILD = """
import os, sys
answer, pid = int(sys.argv[2]), sys.argv[1]
open(pid, "w").write(str(os.getpid()))
os.write(answer, b"ready\\n")
sys.stdin.readline()
sys.exit("the last words")
"""


def test_a_child_does_not_outlive_an_interruption(tmp_path: Path, bench: SimpleNamespace) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.races.run_child(["-c", CHILD, str(tmp_path / "pid")], interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_child_that_dies_is_an_answer_with_its_last_words(tmp_path: Path, bench: SimpleNamespace) -> None:
    answer = bench.races.run_child(["-c", CHILD, str(tmp_path / "pid")], lambda: None)
    assert answer == {"error": "the last words"}


def test_competitors_alternate_and_nobody_always_follows_the_same(bench: SimpleNamespace) -> None:
    order = list(bench.races.rounds(["a", "b", "c"], 6))
    assert [run for run, _ in order] == [run for run in range(6) for _ in "abc"]
    names = [n for _, n in order]
    assert all(sorted(names[at : at + 3]) == ["a", "b", "c"] for at in range(0, 18, 3))
    assert len({(a, b) for a, b in itertools.pairwise(names) if b == "a" and a != "a"}) == 2
    assert order == list(bench.races.rounds(["a", "b", "c"], 6)), "a race can be run again"
