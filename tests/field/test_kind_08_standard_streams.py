"""Closed, full and unread standard streams: the work is done; results that cannot be printed are one error; EPIPE is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_server import CLOSED, FULL, GONE, CommandServer

MIB = 1 << 20
WHY = {CLOSED: "Bad file descriptor (EBADF)", FULL: "No space left on device (ENOSPC)"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB))
    return path


@pytest.mark.parametrize("stream", [CLOSED, FULL])
def test_a_copy_is_made_and_its_lost_line_is_one_error(
    commands: CommandServer, data: Path, stream: str
) -> None:
    done = commands.run("cp", data, "new", "-d", "cpu", cwd=data.parent, stdout=stream)
    assert (done.code, done.stderr) == (1, f"nobounce cp: cannot write to stdout: {WHY[stream]}\n")
    assert (data.parent / "new").read_bytes() == data.read_bytes()


def test_a_reader_that_has_gone_is_no_error(commands: CommandServer, data: Path) -> None:
    done = commands.run("cp", data, "new", "-d", "cpu", cwd=data.parent, stdout=GONE, stderr=GONE)
    assert (done.code, done.stderr) == (0, "")
    assert (data.parent / "new").read_bytes() == data.read_bytes()


@pytest.mark.parametrize("stream", [CLOSED, FULL, GONE])
def test_without_stderr_the_work_and_the_results_are_the_same(
    commands: CommandServer, data: Path, stream: str
) -> None:
    done = commands.run("cp", data, "new", "-d", "cpu", "--json", cwd=data.parent, stderr=stream)
    assert done.code == 0
    assert json.loads(done.stdout)["nbytes"] == MIB
    assert (data.parent / "new").read_bytes() == data.read_bytes()


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["load", "--help"]])
def test_help_and_version_obey_too(commands: CommandServer, tmp_path: Path, arguments: list[str]) -> None:
    for stream, why in WHY.items():
        done = commands.run(*arguments, cwd=tmp_path, stdout=stream)
        assert (done.code, done.stderr) == (1, f"nobounce: cannot write to stdout: {why}\n")
    assert commands.run(*arguments, cwd=tmp_path, stdout=GONE).code == 0


@pytest.mark.parametrize("stream", [CLOSED, FULL])
def test_a_report_that_goes_to_stderr_and_is_lost_there_is_1(
    commands: CommandServer, tmp_path: Path, stream: str
) -> None:
    assert commands.run("stats", "--", "true", cwd=tmp_path, stderr=stream).code == 1
    assert commands.run("stats", "--", "true", cwd=tmp_path, stderr=GONE).code == 0
    assert commands.run("stats", "-o", "report", "--", "true", cwd=tmp_path, stderr=stream).code == 0
    assert (tmp_path / "report").read_text()


@pytest.mark.parametrize("stream", [CLOSED, FULL])
def test_wrong_usage_stays_2(commands: CommandServer, tmp_path: Path, stream: str) -> None:
    assert commands.run("load", "--bogus", cwd=tmp_path, stdout=stream).code == 2
    assert commands.run("load", "--bogus", cwd=tmp_path, stderr=stream).code == 2


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path, data: Path) -> None:
    """Whatever is written to descriptor 1 or 2, by a library or a child, would else end up in DEST."""
    code = """
import os, sys
from nobounce.cli import cp, main
copy = cp.copy
def watched(*arguments, **options):
    for fd in (0, 1, 2):
        assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/null", fd
    return copy(*arguments, **options)
cp.copy = watched
for fd in (0, 1, 2):
    os.close(fd)
sys.argv[1:] = ["cp", "data", "new", "-d", "cpu"]
try:
    main.main()
except SystemExit as e:
    open("code", "w").write(str(e.code))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=60)
    assert (tmp_path / "code").read_text() == "1", "the line on stdout was lost"
    assert (tmp_path / "new").read_bytes() == data.read_bytes()


def test_a_terminal_that_another_program_made_non_blocking_gets_everything(tmp_path: Path) -> None:
    code = "from nobounce.cli import streams; streams.prepare(); print('x' * 1_000_000)"
    read, write = os.pipe()
    os.set_blocking(write, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=write) as child:
        os.close(write)
        with open(read, "rb") as f:
            assert len(f.read()) == 1_000_001
        assert child.wait(60) == 0
