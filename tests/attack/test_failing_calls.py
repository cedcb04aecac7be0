"""Every verb with every call to the system failing: one line, a documented exit code, nothing left behind, JSON where asked.

A case is a verb, a kind of call, which of them fails and with which errno. What a verb calls is counted first, so that
each kind that it makes is tried. The call fails where Python makes it; the kernel's own failures are for other tests.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_server import CommandServer, Done, serving
from scale import cases

SEED = 13
ERRNOS = (
    *(
        errno.EACCES,
        errno.EBUSY,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EINVAL,
        errno.EIO,
        errno.EMFILE,
        errno.ENOENT,
    ),
    *(errno.ENOMEM, errno.ENOSPC, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EROFS, errno.ESTALE),
)
OWN = {"waitpid": (errno.ECHILD,), "pipe": (errno.EMFILE, errno.ENFILE), "fork": (errno.EAGAIN, errno.ENOMEM)}
"""Calls that fail in their own ways only."""
REMOVING = {"unlink", "remove", "rmdir", "scandir", "listdir", "lstat", "open", "stat", "fstat", "close"}
"""Calls without which a temporary folder cannot be removed: what they leave behind is theirs."""
NOTES = (
    "nobounce trace: ",
    "nobounce check: ",
    "nobounce topology: wrote ",
    "nobounce stats: no process used nobounce",
    "note: ",
)
"""Lines on stderr that are no error, beside the one that is."""


@dataclass(frozen=True)
class Verb:
    arguments: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """Files that the verb makes or replaces; every other name must be as before."""
    codes: tuple[int, ...] = (0, 1)
    json: str = ""
    """Where its JSON goes."""


VERBS = {
    "load": Verb(("load", "m.safetensors", "-d", "cpu")),
    "load json": Verb(("load", "m.safetensors", "-d", "sim:0", "--json"), json="stdout"),
    "load folder": Verb(("load", "model", "-d", "cpu", "--cache", "avoid", "--json"), json="stdout"),
    "explain": Verb(("explain", "m.safetensors", "-d", "cpu", "--json"), json="stdout"),
    "inspect": Verb(("inspect", "model", "--json"), json="stdout"),
    "cp": Verb(("cp", "data", "new", "-d", "cpu"), ("new",)),
    "cp over": Verb(("cp", "data", "old", "-d", "sim:0", "--json"), ("old",), json="stdout"),
    "roundtrip": Verb(
        ("roundtrip", "r", "w", "-d", "cpu", "--slice", "64KiB", "--json"), ("r", "w"), json="stdout"
    ),
    "check": Verb(("check", "data", "-d", "cpu", "--json"), codes=(0, 1, 3, 4), json="stdout"),
    "check machine": Verb(("check", "--json"), codes=(0, 1, 3, 4), json="stdout"),
    "check probe": Verb(
        ("check", "data", "-d", "sim:0", "--probe", "--json"), codes=(0, 1, 3, 4), json="stdout"
    ),
    "check capture": Verb(
        ("check", "data", "-d", "cpu", "--capture", "c.tar"), ("c.tar",), codes=(0, 1, 3, 4)
    ),
    "check replay": Verb(("check", "--replay", "saved.tar", "--json"), codes=(0, 1, 3, 4), json="stdout"),
    "topology": Verb(("topology", "--svg", "t.svg", "--json"), ("t.svg",), json="stdout"),
    "config": Verb(("config", "--json"), json="stdout"),
    "report": Verb(
        ("report", "t.json", "-o", "p.html", "--json", "--no-measure"), ("p.html",), json="stdout"
    ),
    "report measured": Verb(
        ("report", "t.json", "-o", "p.html", "--limits-dir", "."), ("p.html",), codes=(0, 1)
    ),
    "bench": Verb(
        ("bench", ".", "--size", "1MiB", "--rounds", "1", "-d", "cpu", "-o", "b.json", "--json"),
        ("b.json",),
        json="stdout",
    ),
    "stats": Verb(("stats", "-o", "s.txt", "--verify", "--", "true"), ("s.txt",)),
    "stats json": Verb(("stats", "--json", "--", "true"), json="stderr"),
    "trace": Verb(("trace", "-o", "out.json", "--json", "--", "true"), ("out.json",), json="stderr"),
    "hipify": Verb(("hipify", "old.py", "old.cu", "--json"), ("old.py", "old.cu"), json="stdout"),
    "compare": Verb(("compare", "data", "--rounds", "1", "-d", "cpu", "--json"), json="stdout"),
    "compare writing": Verb(("compare", "data", "--rounds", "1", "-d", "cpu", "--write"), ()),
    "convert": Verb(("convert", "model", "out.safetensors", "--json"), ("out.safetensors",), json="stdout"),
    "convert set": Verb(("convert", "m.safetensors", "set", "--max-shard", "1KiB"), ("set",)),
    "diff": Verb(("diff", "m.safetensors", "model", "--json"), codes=(0, 1, 3), json="stdout"),
    "verify": Verb(("verify", "model", "--json"), codes=(0, 1, 3), json="stdout"),
    "verify record": Verb(
        ("verify", "m.safetensors", "--record", "--json"), ("m.safetensors.checksums.json",), json="stdout"
    ),
}
SLOW = {"compare", "compare writing", "bench", "report measured"}
"""Verbs that start children or measure: fewer of their cases in a usual run."""


def make_folder(folder: Path, server: CommandServer) -> None:
    """Everything that the verbs want to find."""
    header = {"a": {"dtype": "U8", "shape": [300_000], "data_offsets": [0, 300_000]}}
    raw = json.dumps(header).encode()
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + os.urandom(300_000))
    (folder / "model").mkdir()
    for name in ("1.safetensors", "2.safetensors"):
        other = raw.replace(b'"a"', f'"{name}"'.encode())
        (folder / "model" / name).write_bytes(struct.pack("<Q", len(other)) + other + bytes(300_000))
    (folder / "data").write_bytes(os.urandom(200_001))
    (folder / "old").write_bytes(b"old")
    (folder / "old.py").write_text("import kvikio\n\nwith kvikio.CuFile('a') as f:\n    f.read(b)\n")
    (folder / "old.cu").write_text('#include "cufile.h"\nint main() { return cudaFree(0); }\n')
    read = "import nobounce; f = nobounce.open('data'); b = nobounce.Device('cpu').allocate(4096); f.read(b); f.close()"
    subprocess.run(
        [sys.executable, "-c", read],
        cwd=folder,
        check=True,
        env={**os.environ, "NOBOUNCE_TRACE": "t.json"},
        timeout=60,
    )
    (made,) = folder.glob("t.*.json")
    made.rename(folder / "t.json")
    done = server.run("check", "data", "-d", "cpu", "--capture", "saved.tar", cwd=folder)
    assert (folder / "saved.tar").exists(), done


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def template(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    make_folder(folder, server)
    return folder


def wrong(verb: Verb, kind: str, done: Done, folder: Path, template: Path) -> list[str]:
    """What is wrong with a run."""
    found = []
    if done.code not in verb.codes and not (
        done.code == 2 and kind in ("stat", "access", "file.open", "open")
    ):
        found.append(f"exit code {done.code}")
    for word in ("Traceback", "Exception ignored", "Error in sys", "ResourceWarning"):
        if word in done.stderr + done.stdout:
            found.append(word)
    lines = [] if verb.json == "stderr" else [x for x in done.stderr.splitlines() if not x.startswith(NOTES)]
    if len(lines) > 1:
        found.append(f"{len(lines)} lines on stderr")
    if verb.json:
        try:
            told = json.loads(done.stdout if verb.json == "stdout" else done.stderr)
            assert "schema" in told
        except (ValueError, AssertionError):
            if not (done.code and ("cannot write to" in done.stderr or kind == "write")):
                found.append("no JSON")
    elif done.code and not done.stderr.strip():
        found.append("not a word")
    before, after = set(os.listdir(template)), set(os.listdir(folder))
    if (left := after - before - set(verb.outputs)) and kind not in REMOVING:
        found.append(f"left behind: {sorted(left)}")
    if gone := before - after:
        found.append(f"gone: {sorted(gone)}")
    for name in before & after:
        path = folder / name
        if (
            path.is_file()
            and name not in verb.outputs
            and path.read_bytes() != (template / name).read_bytes()
        ):
            found.append(f"{name} changed")
    if verb.arguments[0] == "cp":
        new = (folder / verb.outputs[0]).read_bytes() if (folder / verb.outputs[0]).exists() else None
        whole = (folder / "data").read_bytes()
        allowed = [whole] if done.code == 0 else [whole, b"old" if verb.outputs[0] == "old" else None]
        if new not in allowed:
            found.append("DEST is neither old nor new")
    return found


def one(
    server: CommandServer, template: Path, name: str, kind: str, number: int, code: int
) -> tuple[bool, str]:
    """Run one case: whether the call was reached, and what is wrong."""
    verb = VERBS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "f"
        shutil.copytree(template, folder)
        done = server.run(*verb.arguments, cwd=folder, fail=(kind, number, code))
        found = wrong(verb, kind, done, folder, template)
        if not found:
            return done.failed, ""
        what = f"{name}: {kind} number {number} fails with {errno.errorcode[code]}"
        return (
            done.failed,
            f"{what}: {'; '.join(found)}\n  {done.code} {done.stdout[-300:]!r} {done.stderr[-1500:]}",
        )


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_with_failing_calls(server: CommandServer, template: Path, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    shutil.copytree(template, folder)
    plain = server.run(*VERBS[name].arguments, cwd=folder)
    assert wrong(VERBS[name], "", plain, folder, template) == [], plain
    rng = random.Random(f"{SEED} {name}")
    every = [
        (kind, n, rng.choice(OWN.get(kind, ERRNOS)))
        for kind, most in sorted(plain.calls.items())
        for n in range(1, most + 1)
    ]
    chosen = rng.sample(every, min(len(every), cases(2000, 1 if name in SLOW else 2)))
    reached, told = zip(*(one(server, template, name, *case) for case in chosen), strict=True)
    assert [t for t in told if t] == []
    if not any(
        reached
    ):  # how many calls a measurement makes differs from run to run; the first of a kind is always there
        kind, _, code = chosen[0]
        assert one(server, template, name, kind, 1, code) == (True, "")
