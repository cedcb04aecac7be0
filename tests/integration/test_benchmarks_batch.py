"""The benchmarks of small reads and of streams run, count what they say, and refuse what they cannot measure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from capabilities import has, need

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = ("common", "races", "random_read", "streams")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    import importlib

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in MODULES:
            sys.modules.pop(name, None)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.serial
def test_random_read_races_everybody_and_prints_each_sample(tmp_path: Path) -> None:
    need("o_direct", "cachestat", "io_uring")
    out, file = tmp_path / "out.json", tmp_path / "r.bin"
    done = run("random_read.py", "--file", str(file), "--runs", "2", "--count", "2000", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["mode"]) == ("nobounce.benchmarks.random_read", "quick")
    names = {"nobounce", "preadv-32"} | ({"fio", "fio-tuned"} if has("fio") else set())
    assert {s["contestant"] for s in result["samples"]} == names
    assert len(result["samples"]) == 2 * len(names)
    for s in result["samples"]:
        assert f"{s['iops']:.0f}" in done.stdout
        assert s["cpu_us"] == pytest.approx(s["user_us"] + s["system_us"])
    assert result["route"].startswith("io_uring, 100% direct")
    assert len(result["verdicts"]) == 3
    assert str(tmp_path) not in out.read_text()


@pytest.mark.serial
def test_streams_compares_sync_and_async_in_both_states(tmp_path: Path) -> None:
    need("o_direct", "cachestat")
    arguments = ("--dir", str(tmp_path), "--runs", "1", "--json", "--clean")
    done = run("streams.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout[done.stdout.index("\n{") :])
    seen = {(s["device"], s["state"], s["streams"]) for s in result["samples"]}
    assert seen == {(d, t, n) for d in ("cpu", "sim:0") for t in ("cold", "warm") for n in (0, 1, 4, 8)}
    for s in result["samples"]:
        assert s["route"].startswith("direct 100%" if s["state"] == "cold" else "direct 0%")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["random_read.py", "streams.py"])
def test_a_wrong_argument_is_usage(script: str) -> None:
    assert run(script, "--runs", "0").returncode == 2


def test_wrong_bytes_and_a_used_page_cache_are_refused(bench: SimpleNamespace, tmp_path: Path) -> None:
    need("o_direct", "cachestat")
    path = tmp_path / "r.bin"
    bench.random_read.make_file(path, 16 << 20)
    race = bench.random_read.Race(path, 100, 8)
    with pytest.raises(bench.common.Refused, match="other bytes"):
        race.timed("nobody", 0, lambda offsets: None)
    bench.random_read.CONTESTANTS["cheat"] = lambda race, run: path.read_bytes()
    with pytest.raises(bench.common.Refused, match="cheat left pages"):
        bench.random_read.run(race, ["cheat"], 1)


def test_a_floor_is_missed_met_or_unknown(bench: SimpleNamespace) -> None:
    def sample(name: str, iops: float, cpu: float) -> object:
        return bench.random_read.Sample(name, 0, iops, 1.0, cpu, 0.0)

    found = bench.random_read.verdicts([sample("nobounce", 90, 3.0), sample("preadv-32", 100, 5.0)])
    assert [v["met"] for v in found] == [None, False, False]
    more = [sample("nobounce", 90, 2.0), sample("fio", 100, 1), sample("preadv-32", 80, 5.0)]
    assert [v["met"] for v in bench.random_read.verdicts(more)] == [True, True, True]
