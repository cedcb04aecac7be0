"""Kind 5: memory, CPUs and threads are those of the control group, not of the machine: `bench` in 400 MiB is not killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need
from cgroups import entering, group

MIB = 1 << 20
LIMITS: dict[str, int | str] = {
    "memory.limit_in_bytes": 400 * MIB,
    "memory.max": 400 * MIB,
    "memory.swap.max": 0,
}


def nobounce(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*entering(folder), sys.executable, "-m", "nobounce", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_bench_in_a_small_group_picks_a_size_that_fits(tmp_path: Path) -> None:
    need("cgroup-memory")
    with group("memory", LIMITS) as folder:
        done = nobounce(folder, "bench", str(tmp_path), "--rounds", "1", "--json", "-d", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["size"] <= 100 * MIB
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_memory_that_the_group_does_not_have_is_refused_and_its_file_named(device: str) -> None:
    need("cgroup-memory")
    code = f"""
import nobounce
try:
    nobounce.Device({device!r}).allocate(1 << 30)
except nobounce.OutOfMemoryError as e:
    print(e)
"""
    with group("memory", LIMITS) as folder:
        command = [*entering(folder), sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert f"this process may have {400 * MIB} ({folder}/memory." in done.stdout, done.stderr


def test_threads_of_the_group_are_known_and_enough(tmp_path: Path) -> None:
    """pids.max 2 for real (vast-ai/base-image#214): kind 10 tries every verb."""
    need("cgroup-pids")
    code = """
import sys
from nobounce.facts.machine import this_machine
import nobounce
print(this_machine().tasks)
with nobounce.open(sys.argv[1]) as f, nobounce.Device("sim:0").allocate(f.nbytes) as b, b.device.create_stream() as s:
    print(f.read_async(b, stream=s).result().nbytes, f.read(b).nbytes)
"""
    path = tmp_path / "data"
    path.write_bytes(bytes(48 * MIB))
    with group("pids", {"pids.max": 2}) as folder:
        command = [*entering(folder), "env", "OPENBLAS_NUM_THREADS=1", sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["2", str(48 * MIB), str(48 * MIB)], done.stderr
