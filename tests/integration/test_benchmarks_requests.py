"""benchmarks/blocks.py, sizes.py, save.py and kv.py: their quick modes run every contestant that can run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("state", ["cached", "cold"])
def test_blocks_are_raced_by_everybody_and_each_sample_is_written(tmp_path: Path, state: str) -> None:
    need("o_direct", "cachestat")
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "blocks.py"), "--quick", "--scattered", "--state", state]
    command += ["--file", str(tmp_path / "blocks.bin"), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.blocks", 1)
    assert {r["contestant"] for r in result["rows"]} == {"nobounce-auto", "nobounce-use", "numpy"}
    for row in result["rows"]:
        assert row["blocks_per_second"] == pytest.approx(row["count"] / sorted(row["seconds"])[0])
        assert f"{row['seconds'][0] * 1e3:.2f}" in done.stdout
    assert str(tmp_path) not in out.read_text()


def test_sizes_are_read_in_both_states_and_each_sample_is_written(tmp_path: Path) -> None:
    need("o_direct", "cachestat")
    out, file = tmp_path / "out.json", tmp_path / "sizes.bin"
    file.write_bytes(bytes(range(256)) * (1 << 16))
    command = [sys.executable, str(FOLDER / "sizes.py"), "--quick", "--file", str(file), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.sizes", 1)
    for states in result["samples"].values():
        assert states["cached"].keys() == {"auto", "use", "preadv"}
        assert states["cold"].keys() == {"auto", "avoid", "preadv", "O_DIRECT"}
        assert all(len(times) >= 5 for samples in states.values() for times in samples.values())
    assert str(tmp_path) not in out.read_text()


@pytest.mark.parametrize("shape", ["large", "small", "straight"])
def test_saves_are_raced_and_each_sample_is_written(tmp_path: Path, shape: str) -> None:
    need("o_direct", "safetensors")
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "save.py"), "--quick", "--shape", shape]
    command += ["--dir", str(tmp_path), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.save", 1)
    assert result["seconds"].keys() == {"nobounce", "plain", "safetensors"}
    assert all(len(times) == 2 for times in result["seconds"].values())
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_stored_blocks_are_timed_in_every_way_and_each_sample_is_written(tmp_path: Path) -> None:
    need("o_direct", "xxhash")
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "kv.py"), "--quick", "--dir", str(tmp_path), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.kv", 1)
    calls = {"put", "put durable", "put in stream", "get", "get in stream"}
    assert result["seconds"].keys() == calls | {f"{c} checked" for c in calls} | {"written"}
    assert all(len(times) == 2 for times in result["seconds"].values())
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_first_loads_are_raced_in_fresh_processes_and_each_sample_is_written(tmp_path: Path) -> None:
    need("cachestat")
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "first.py"), "--sections", "imports,one", "--gib", "0.001"]
    command += ["--rounds", "2", "--dir", str(tmp_path / "files"), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.first", 1)
    loads = [row for row in result["samples"] if row["section"] == "one file"]
    assert [(row["loader"], row["count"], len(row["seconds"])) for row in loads] == [("nobounce", 100, 4)] * 2
    for row in loads:
        assert row["import"] < row["seconds"][0]
        assert f"{row['seconds'][0] * 1e3:.1f}" in done.stdout
    assert str(tmp_path) not in out.read_text()


def test_parts_are_raced_and_each_sample_is_written(tmp_path: Path) -> None:
    need("cachestat", "safetensors")
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "parts.py"), "--mib", "1", "--rounds", "2"]
    command += ["--dir", str(tmp_path / "files"), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.parts", 1)
    assert {"all", "every second tensor", "nobounce", "safetensors numpy"} <= {
        row["contestant"] for row in result["rows"]
    }
    for row in result["rows"]:
        assert len(row["seconds"]) == 2
        assert f"{row['seconds'][0] * 1e3:.2f}" in done.stdout
