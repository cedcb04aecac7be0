"""Another user swaps every name that a verb of root makes in a shared folder: nothing of root's is touched, and DEST is right."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capabilities import need, nobody_command, open_up
from scale import cases

MIB = 1 << 20
SECRET = b"secret of root" * 1000
SWAP = """
import os, sys
drop()
folder, victim, trap = sys.argv[1:]
os.chdir(folder)
print("watching", flush=True)
number = 0
while True:
    for entry in os.scandir("."):
        if not entry.name.startswith(".nobounce"):
            continue
        try:
            goal = trap if entry.is_dir(follow_symlinks=False) else victim
            if not entry.is_symlink():
                number += 1
                os.rename(entry.name, f"taken-{number}")
                os.symlink(goal, entry.name)
        except OSError:
            pass
"""
WITHOUT_TMPFILE = """
import os
plain = os.open
def without(path, flags, *arguments, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(95, "no O_TMPFILE")
    return plain(path, flags, *arguments, **options)
os.open = without
"""
MAIN = "import sys; sys.argv[0] = 'nobounce'; from nobounce.cli.main import main; main()"


@contextmanager
def attacked(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a folder that everyone may write to, with an attacker at work in it; root's secret file)."""
    need("unprivileged")
    open_up(tmp_path)
    tmp_path.chmod(0o755)
    shared, victim, vault = tmp_path / "shared", tmp_path / "victim", tmp_path / "vault"
    shared.mkdir()
    shared.chmod(0o777)
    victim.write_bytes(SECRET)
    victim.chmod(0o600)
    vault.mkdir(0o700)
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("model.safetensors", "out.bin", "trace.json"):
        (trap / name).symlink_to(victim)
    command = nobody_command(SWAP, str(shared), str(victim), str(trap))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == "watching\n"
            yield shared, victim
        finally:
            attacker.kill()
    assert os.listdir(vault) == []
    assert sorted(os.listdir(trap)) == ["model.safetensors", "out.bin", "trace.json"]


def run(way: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    code = (WITHOUT_TMPFILE if way == "named" else "") + MAIN
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def untouched(victim: Path) -> bool:
    return victim.read_bytes() == SECRET and stat.S_IMODE(victim.stat().st_mode) == 0o600


@pytest.mark.parametrize("way", ["O_TMPFILE", "named"])
@pytest.mark.parametrize("there", ["new", "old"])
def test_cp(tmp_path: Path, way: str, there: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(MIB))
    with attacked(tmp_path) as (shared, victim):
        for number in range(cases(12, 1)):
            dest = shared / f"dest-{number}"
            if there == "old":
                dest.write_bytes(b"old")
            done = run(way, "cp", source, dest, "--device", "cpu")
            assert untouched(victim), number
            if done.returncode == 0:
                assert not dest.is_symlink()
                assert dest.read_bytes() == source.read_bytes()
            else:
                assert done.returncode == 1
                assert len(done.stderr.splitlines()) == 1
                assert not dest.exists() if there == "new" else dest.read_bytes() == b"old"
            if way == "O_TMPFILE" and there == "new":
                assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["compare", "bench", "report", "trace"])
def test_verbs_that_make_files_for_a_while(tmp_path: Path, verb: str) -> None:
    model = tmp_path / "data"
    model.write_bytes(os.urandom(MIB))
    trace = tmp_path / "t.json"
    trace.write_text('{"traceEvents": []}')
    with attacked(tmp_path) as (shared, victim):
        beside = shared / "data"
        beside.write_bytes(model.read_bytes())
        words: list[str | Path] = {
            "compare": ["compare", "--write", beside, "--rounds", "1", "--device", "cpu"],
            "bench": ["bench", shared, "--size", "1MiB", "--rounds", "1", "--device", "cpu"],
            "report": ["report", trace, "--limits-dir", shared, "-o", tmp_path / "page.html"],
            "trace": ["trace", "-o", shared / "t.json", "--", "nobounce", "cp", model, tmp_path / "copy"],
        }[verb]
        for number in range(cases(4, 1)):
            done = run("O_TMPFILE", *words)
            assert untouched(victim), number
            assert done.returncode == 0, done.stderr
        if verb == "trace":
            assert '"nobounce' in (shared / "t.json").read_text()
            assert stat.S_IMODE((shared / "t.json").stat().st_mode) == 0o600


def test_links_at_every_name_that_can_be_guessed(tmp_path: Path) -> None:
    with attacked(tmp_path) as (shared, victim):
        trace = tmp_path / "t.json"
        trace.write_text('{"traceEvents": []}')
        outputs: dict[str, list[str | Path]] = {
            "report.html": ["report", trace, "--no-measure", "-o"],
            "trace.json": ["trace", "--", "-o"],
            "stats.txt": ["stats", "-o"],
            "topology.svg": ["topology", "--svg"],
            "capture.tar": ["check", "--capture"],
            "seeded.bin": ["roundtrip", shared / "written", "--overwrite", "--device", "cpu"],
            "written.bin": ["roundtrip", shared / "seeded", "--overwrite", "--device", "cpu"],
        }
        for name, words in outputs.items():
            link = shared / name
            link.symlink_to(victim)
            os.chown(link, 65534, 65534, follow_symlinks=False)
            if words[0] in ("stats", "trace"):
                words = [words[0], "-o", link, "--", sys.executable, "-c", "0"]
            elif name == "seeded.bin":
                words = [words[0], link, *words[1:]]
            else:
                words = [*words, link]
            done = run("O_TMPFILE", *words)
            # check answers 1 for a verdict (docs/check.md): an error of its own is 3
            assert done.returncode == (3 if words[0] == "check" else 1), (name, done.stderr)
            assert done.stderr.splitlines()[-1].endswith(
                f"{link}: is a link of another user (uid 65534): name a file of your own"
            )
            assert untouched(victim), name
            assert link.is_symlink()
            link.unlink()
            for made in ("seeded", "written"):
                (shared / made).unlink(missing_ok=True)
        for kind in ("symbolic", "hard"):
            (shared / "NAME.1.json").unlink(missing_ok=True)
            if kind == "hard":
                os.link(victim, shared / "NAME.1.json")
            else:
                (shared / "NAME.1.json").symlink_to(victim)
                os.chown(shared / "NAME.1.json", 65534, 65534, follow_symlinks=False)
            code = (
                "import os; os.getpid = lambda: 1\n"
                "from nobounce.observe import trace; from nobounce import errors, hipfile\n"
                f"try: trace.Tracer({str(shared / 'NAME.json')!r}, 1000)\n"
                "except errors.FileError as e: print(e)\n"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
            )
            assert done.stderr == ""
            assert ("another user" in done.stdout) == (kind == "symbolic")
            assert untouched(victim)
