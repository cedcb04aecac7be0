"""The last step fails (semantic-router#4027): what can be known is said before the work; the rest is one line, the old file stays."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from capabilities import need, tool
from filesystems import MIB, machine
from nobounce.cli.main import app


def nobounce(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


@contextmanager
def bound(dest: Path) -> Iterator[None]:
    need("mount")
    dest.write_bytes(b"old")
    subprocess.run([tool("mount"), "--bind", dest, dest], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run([tool("umount"), dest], check=True, timeout=60)


@contextmanager
def chattr(dest: Path, letter: str) -> Iterator[None]:
    need("root", "chattr")
    dest.write_bytes(b"old")
    done = subprocess.run([tool("chattr"), f"+{letter}", dest], check=False, timeout=60)
    assert done.returncode == 0
    try:
        yield
    finally:
        subprocess.run([tool("chattr"), f"-{letter}", dest], check=True, timeout=60)


CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "bound": (bound, "EBUSY", "is a mount point of its own (bound into a container, say)"),
    "immutable": (lambda p: chattr(p, "i"), "EPERM", "is immutable: `chattr -i` allows to replace it"),
    "append-only": (lambda p: chattr(p, "a"), "EPERM", "is append-only: `chattr -a` allows to replace it"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_known_is_said_before_a_byte_is_read(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, code, said = CASES[case]
    (tmp_path / "source").write_bytes(b"new")
    dest = tmp_path / "dest"
    monkeypatch.setattr("nobounce.cli.cp.copy", lambda *_: pytest.fail("copied first"))
    with make(dest):  # type: ignore[attr-defined]
        done = nobounce("cp", tmp_path / "source", dest, "--device", "cpu")
        assert done.exit_code == 1
        assert done.stderr.startswith(f"nobounce cp: {dest}: {said}")
        assert done.stderr.count("\n") == 1
        done = nobounce("cp", tmp_path / "source", dest, "--device", "cpu", "--json")
        assert done.exit_code == 1
        error = json.loads(done.stdout)["error"]
        assert (error["errno"], error["filename"]) == (code, str(dest))
        assert dest.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["dest", "source"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["rename", "fsync", "fchmod", "fchown", "link"])
def test_any_error_of_any_step_is_one_line_and_the_old_file_stays(
    tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"new")
    dest = tmp_path / "dest"
    dest.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    if call == "fchmod":
        dest.chmod(0o640)
    monkeypatch.setattr(os, call, fail)
    done = nobounce("cp", tmp_path / "source", dest, "--device", "cpu")
    monkeypatch.undo()
    if call == "fchown" and code == errno.EACCES:
        assert done.exit_code == 0  # the owner stays where this user may give it
        return
    assert done.exit_code == 1
    assert done.stderr.startswith(f"nobounce cp: {dest}: cannot replace: {os.strerror(code)} (")
    assert done.stderr.count("\n") == 1
    assert dest.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["dest", "source"]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB without a free byte."""
    need("mount")
    with machine(tmp_path) as made:
        point = made.mount("none", "full", "-t", "tmpfs", "-o", "size=2m")
        with (point / "filler").open("wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
            while True:
                f.write(bytes(4096))
        yield point


def test_a_report_that_a_full_disk_refuses_is_not_lost_and_leaves_no_empty_file(full: Path) -> None:
    for name in ("new", "old"):
        if name == "old":
            (full / "filler").write_bytes(bytes(4096))
            (full / name).write_bytes(b"old report")
            with (full / "filler").open("ab", buffering=0) as f, pytest.raises(OSError, match="No space"):
                while True:
                    f.write(bytes(4096))
        done = nobounce("stats", "-o", full / name, "--", "true")
        assert done.exit_code == 1
        assert "no process used nobounce" in done.stderr  # the report
        assert f"nobounce stats: {full / name}: cannot write: No space left on device (ENOSPC)" in done.stderr
        assert sorted(os.listdir(full)) == (["filler"] if name == "new" else ["filler", "old"])
    assert (full / "old").read_bytes() == b"old report"


def test_what_bench_measured_is_printed_where_its_file_cannot_be_written(full: Path, tmp_path: Path) -> None:
    done = nobounce("bench", tmp_path, "--size", "1MiB", "--rounds", "1", "--device", "cpu", "-o", full / "x")
    assert done.exit_code == 1
    assert json.loads(done.stdout[done.stdout.index("{") :])["schema"] == "nobounce.bench/1"
    assert done.stderr.startswith(f"nobounce bench: {full / 'x'}: cannot write: No space left")
    assert os.listdir(full) == ["filler"]


def test_a_page_that_a_full_disk_refuses_leaves_the_old_one(full: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    done = nobounce("report", tmp_path / "t.json", "--no-measure", "-o", full / "page.html")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"nobounce report: {full / 'page.html'}: cannot write: No space left")
    assert os.listdir(full) == ["filler"]


def test_cp_onto_a_full_disk_names_dest(full: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(MIB))
    done = nobounce("cp", tmp_path / "source", full / "dest", "--device", "cpu")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"nobounce cp: {full / 'dest'}: ")
    assert "ENOSPC" in done.stderr
    assert os.listdir(full) == ["filler"]
