"""nobounce hipify as a person and a script see it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from capabilities import as_nobody, need, open_up
from nobounce.cli.main import app

PROGRAM = "import kvikio\n\nf = kvikio.CuFile(p)\nn = f.read(a, 5)\ng = kvikio.CuFile(q)\nuse(g)\n"
DONE = "import nobounce\nimport kvikio\n\nf = nobounce.open(p)\nn = f.read(a, nbytes=5).nbytes\ng = kvikio.CuFile(q)\nuse(g)\n"
KERNEL = "#include <cuda_runtime.h>\nint main() { return cudaFree(0); }\n"


@pytest.fixture(autouse=True)
def _libcst() -> None:
    need("libcst")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    for hidden in (".git", "venv", "__pycache__"):
        (tmp_path / "src" / hidden).mkdir()
        (tmp_path / "src" / hidden / "a.py").write_text(PROGRAM)
    (tmp_path / "src" / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "src" / "a.py").write_text(PROGRAM)
    (tmp_path / "src" / "deep" / "k.cu").write_text(KERNEL)
    (tmp_path / "src" / "plain.py").write_text("x = 1\n")
    (tmp_path / "src" / "notes.txt").write_text("import kvikio\n")
    return tmp_path / "src"


def hipify(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["hipify", *(str(a) for a in arguments)], input=stdin)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_sources_of_a_folder_are_rewritten_and_the_report_says_what_was_left(tree: Path) -> None:
    before = contents(tree)
    done = hipify(tree)
    assert done.exit_code == 0, done.output
    after = contents(tree)
    assert {n for n in before if before[n] != after[n]} == {"a.py", "deep/k.cu"}
    assert after["a.py"].decode() == DONE
    assert after["deep/k.cu"] == b"#include <hip/hip_runtime.h>\nint main() { return hipFree(0); }\n"
    assert f"{tree}/a.py:6: left: kvikio.CuFile: `g` is handed to use()" in done.stdout
    assert f"{tree}/a.py:4: look: kvikio raises RuntimeError" in done.stdout
    assert "3 files: 2 changed, 5 places rewritten, 2 left" in done.stdout
    again = hipify(tree)
    assert again.exit_code == 0
    assert "3 files: 0 changed, 0 places rewritten, 2 left" in again.stdout
    assert contents(tree) == after


def test_check_says_by_its_code_whether_something_would_change(tree: Path) -> None:
    before = contents(tree)
    assert hipify("--check", tree).exit_code == 1
    assert contents(tree) == before
    hipify(tree)
    assert hipify("--check", tree).exit_code == 0
    (tree / "bad.py").write_text("x = (\n")
    assert hipify("--check", tree).exit_code == 3


def test_diff_is_one_that_patch_takes_and_changes_nothing(tree: Path, tmp_path: Path) -> None:
    (tree / "crlf.py").write_bytes(PROGRAM.replace("\n", "\r\n").encode().rstrip())
    before = contents(tree)
    patch = subprocess.run(
        [sys.executable, "-m", "nobounce", "hipify", "--diff", "src"],
        cwd=tree.parent,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert contents(tree) == before
    assert b"places rewritten" in patch.stderr
    assert b"places rewritten" not in patch.stdout
    assert b"-f = kvikio.CuFile(p)\n" in patch.stdout
    if shutil.which("patch") is not None:
        copy = tmp_path / "copy"
        shutil.copytree(tree, copy / "src")
        subprocess.run(
            ["patch", "-p0", "--binary", "-s"], cwd=copy, input=patch.stdout, check=True, timeout=60
        )
        hipify(tree)
        assert contents(copy / "src") == contents(tree)


def test_json_has_what_the_text_has(tree: Path) -> None:
    (tree / "bad.py").write_text("x = (\n")
    done = hipify("--json", "--diff", tree)
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert (data["schema"], data["to"], data["written"]) == ("nobounce.hipify/1", "nobounce", False)
    files = {Path(f["path"]).name: f for f in data["files"]}
    assert files["a.py"]["changed"]
    assert files["a.py"]["rewritten"] == {
        "import": 1,
        "kvikio.CuFile": 1,
        "kvikio.CuFile.read": 1,
    }
    assert [x["line"] for x in files["a.py"]["left"]] == [5, 6]
    assert files["a.py"]["look_at"][0]["line"] == 4
    assert "+f = nobounce.open(p)" in files["a.py"]["diff"]
    assert files["plain.py"]["diff"] == ""
    assert "syntax error" in files["bad.py"]["error"]["message"]
    assert data["kinds"] == {"CUDA runtime": 1, "import": 2, "kvikio": 2}
    assert (data["changed"], data["left"], data["errors"]) == (2, 2, 1)


def test_stdin_goes_to_stdout_and_the_report_to_stderr() -> None:
    done = hipify("-", stdin=PROGRAM)
    assert (done.exit_code, done.stdout) == (0, DONE)
    assert "1 file: 1 changed" in done.stderr
    assert hipify("-", "--language", "c", stdin=KERNEL).stdout.startswith("#include <hip/hip_runtime.h>")
    assert hipify("-", "--check", stdin=PROGRAM).exit_code == 1
    assert hipify("-", "x.py").exit_code == 2
    assert hipify("-", "--json").exit_code == 2


def test_a_file_that_cannot_be_read_is_one_line_and_the_rest_goes_on(tree: Path) -> None:
    os.mkfifo(tree / "pipe.py")
    (tree / "odd\n\x1b[2J.py").write_text("x = (\n")
    (tree / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tree / "none").write_text("x")
    done = hipify(tree, tree / "pipe.py", tree / "gone.py", tree / "none")
    assert done.exit_code == 1
    assert (tree / "a.py").read_text() == DONE
    lines = done.stderr.splitlines()
    assert len(lines) == 5, lines
    assert all(line.startswith("nobounce hipify: ") for line in lines)
    assert any(
        r"odd\n\x1b[2J.py: a syntax error in line 2" in line
        or r"odd\n\x1b[2J.py: a syntax error in line 1" in line
        for line in lines
    )
    assert any("pipe.py: is a pipe" in line for line in lines)
    assert any("gone.py" in line and "No such file" in line for line in lines)
    assert any("none: its suffix names no language" in line for line in lines)


def test_mode_and_owner_stay_and_a_link_stays_one(tree: Path) -> None:
    (tree / "a.py").chmod(0o750)
    (tree.parent / "link.py").symlink_to(tree / "a.py")
    assert hipify(tree.parent / "link.py").exit_code == 0
    assert (tree.parent / "link.py").is_symlink()
    assert (tree / "a.py").stat().st_mode & 0o777 == 0o750
    assert (tree / "a.py").read_text() == DONE


def test_a_file_that_may_not_be_written_is_said_and_stays(tree: Path) -> None:
    need("root")
    (tree / "a.py").chmod(0o444)
    (tree / "theirs.py").write_text(PROGRAM)
    os.chown(tree / "theirs.py", 65534, 65534)
    tree.chmod(0o777)
    open_up(tree / "a.py")
    done = as_nobody(
        "import sys\nfrom typer.testing import CliRunner\nfrom nobounce.cli.main import app, main\n"
        "import difflib, nobounce.outfile\n"
        "CliRunner().invoke(app, ['hipify', '--check', *sys.argv[1:]])  # imports everything\n"
        "drop()\nsys.argv = ['nobounce', 'hipify', *sys.argv[1:]]\nmain()\n",
        str(tree / "a.py"),
        str(tree / "theirs.py"),
    )
    assert done.returncode == 1, done.stderr[-900:]
    assert [str(tree / "a.py") in line for line in done.stderr.splitlines()] == [True], done.stderr[-900:]
    assert (tree / "a.py").read_text() == PROGRAM
    assert (tree / "theirs.py").read_text() == DONE


def test_hip_is_a_target_of_python(tree: Path) -> None:
    (tree / "r.py").write_text("from cuda.bindings import runtime as rt\nrt.cudaFree(0)\n")
    assert hipify("--to", "hip", tree / "r.py").exit_code == 0
    assert (tree / "r.py").read_text() == "from hip import hip\nhip.hipFree(0)\n"
    assert hipify("--to", "opencl", tree / "r.py").exit_code == 2
    assert hipify().exit_code == 2
