"""From plain use: where outputs land, what is said where they cannot, and that tracing never costs the program its work."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need
from filesystems import machine

READS = """
import sys, nobounce
device = nobounce.Device("cpu")
with nobounce.open(sys.argv[1]) as f, device.allocate(4096) as buffer:
    for _ in range(int(sys.argv[2])):
        assert f.read(buffer).nbytes == 4096
print("all read")
"""


def run(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "nobounce", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, **options)  # type: ignore[call-overload,no-any-return]


def traced(data: Path, count: int, trace: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NOBOUNCE_TRACE": str(trace)}
    command = [sys.executable, "-c", READS, str(data), str(count)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(4096))
    return tmp_path / "data"


@pytest.mark.parametrize("verb", [["trace", "--output"], ["stats", "--output"]])
def test_an_output_in_proc_or_a_removed_folder_is_one_line_before_the_program_runs(
    tmp_path: Path, verb: list[str]
) -> None:
    name, option = verb
    (tmp_path / "gone").mkdir()
    code = (
        f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())\n"
        "import sys; from nobounce.cli.main import main; main()"
    )
    words = [name, option, "t.json", "--", "echo", "the program ran"]
    removed = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=100
    )
    for done, path in ((run(name, option, "/proc/t.json", *words[3:]), "/proc/t.json"), (removed, "t.json")):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"nobounce {name}: {path}: cannot write: No such file or directory (ENOENT). "
            "Its folder is not there, or takes no new files: name another\n"
        )


def test_a_folder_as_a_trace_gets_the_trace_inside(tmp_path: Path, data: Path) -> None:
    (tmp_path / "traces").mkdir()
    done = traced(data, 1, tmp_path / "traces")
    assert (done.returncode, done.stderr) == (0, "")
    (name,) = os.listdir(tmp_path / "traces")
    assert name.startswith("trace.")
    assert sorted(os.listdir(tmp_path)) == ["data", "traces"]
    done = run("report", tmp_path / "traces", "--no-measure", "-o", tmp_path / "page.html", "--json")
    assert json.loads(done.stdout)["totals"]["transfers"] == 1


def test_a_disk_that_is_full_or_fills_ends_the_trace_and_not_the_program(tmp_path: Path, data: Path) -> None:
    need("mount")
    with machine(tmp_path) as made:
        small = made.mount("none", "small", "-t", "tmpfs", "-o", "size=64k")
        for left in (0, 32768):
            with (small / "filler").open("wb") as f:
                f.write(bytes(65536 - left))
            done = traced(data, 300, small / "t.json")
            assert (done.returncode, done.stdout) == (0, "all read\n")
            assert len(done.stderr.splitlines()) == 1
            assert "No space left on device (ENOSPC)" in done.stderr
            assert done.stderr.endswith("the program goes on\n")
            assert len(os.listdir(small)) == (2 if left else 1)
        read = run("report", small / "t.json", "--no-measure", "-o", tmp_path / "page.html")
        assert read.returncode == 0, read.stderr


def test_cp_names_dest_where_a_file_may_not_grow(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(4 << 20))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = run("cp", tmp_path / "source", tmp_path / "dest", "-d", "cpu", preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr.startswith(f"nobounce cp: {tmp_path / 'dest'}: ")
    assert "EFBIG" in done.stderr
    assert ".nobounce" not in done.stderr
    assert os.listdir(tmp_path) == ["source"]
