"""Statistics across processes: attached, killed, forked, another user's, and forged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capabilities import as_nobody, need
from nobounce.errors import FileError, FormatError
from nobounce.observe import export
from nobounce.observe.attach import Attached, attach
from nobounce.observe.layout import NBYTES

KIB64 = 1 << 16

READER = """
import os, sys, nobounce
f = nobounce.open(sys.argv[1]); b = nobounce.Device("cpu").allocate(65536)
f.read(b, cache="avoid")
print("ready", flush=True)
for line in sys.stdin:
    f.read(b, cache="avoid")
    print("again", flush=True)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(KIB64))
    return tmp_path / "data"


@contextmanager
def program(data: Path, code: str = READER) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


def again(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("x\n")
    child.stdin.flush()
    assert child.stdout.readline() == "again\n"


def cli(*arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nobounce.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def test_a_running_process_is_read_as_it_goes(data: Path) -> None:
    with program(data) as child, attach(child.pid) as reader:
        before = reader.read()
        again(child)
        assert (reader.read() - before).fastpath_bytes == KIB64
        assert before.pids == (child.pid,)


def test_a_killed_program_leaves_its_last_snapshot_readable(data: Path) -> None:
    with program(data) as child, attach(child.pid) as reader:
        again(child)
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        last = reader.read()
    assert (last.fastpath_bytes, last.flow().operations) == (2 * KIB64, 2)


def test_stats_reports_a_program_that_was_killed(data: Path) -> None:
    code = "import os, sys, signal, nobounce\nwith nobounce.open(sys.argv[1]) as f: f.read(nobounce.Device('cpu').allocate(65536), cache='avoid')\n"
    done = cli(
        "stats", "--json", "--", sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGKILL)", data
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert json.loads(done.stderr)["total"]["fastpath_bytes"] == KIB64


def test_a_process_killed_in_the_middle_of_a_change_is_read_and_said_to_be(tmp_path: Path) -> None:
    from nobounce.config import Settings
    from nobounce.observe.counters import Counters
    from nobounce.observe.layout import Header

    memory, fd = export.make_memory()
    counters = Counters(Settings(), memory)
    counters.words[Header.SEQUENCE] += 1
    with Attached(os.dup(fd), os.getpid()) as reader:
        assert reader.read().torn
        counters.words[Header.SEQUENCE] += 1
        assert not reader.read().torn
    export.stop()


def test_two_forked_children_report_as_three_processes(data: Path) -> None:
    code = """
import os, sys, nobounce
def read():
    with nobounce.open(sys.argv[1]) as f: f.read(nobounce.Device("cpu").allocate(65536), cache="avoid")
read()
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        read(); read()
        os._exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
print(os.getpid(), *children)
"""
    done = cli("stats", "--json", "--", sys.executable, "-c", code, data)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stderr)
    assert sorted(p["pids"][0] for p in told["processes"]) == sorted(map(int, done.stdout.split()))
    assert sorted(p["fastpath_bytes"] for p in told["processes"]) == [KIB64, 2 * KIB64, 2 * KIB64]
    assert told["total"]["fastpath_bytes"] == 5 * KIB64


def test_forked_children_write_traces_of_their_own(data: Path, tmp_path: Path) -> None:
    code = """
import multiprocessing, sys, nobounce
def read():
    with nobounce.open(sys.argv[1]) as f: f.read(nobounce.Device("cpu").allocate(65536), cache="avoid")
read()
children = [multiprocessing.get_context("fork").Process(target=read) for _ in range(2)]
for c in children: c.start()
for c in children: c.join()
"""
    out = tmp_path / "t.json"
    done = cli("trace", "-o", out, "--", sys.executable, "-c", code, data)
    assert done.returncode == 0, done.stderr
    trace = json.loads(out.read_text())
    assert len({e["pid"] for e in trace["traceEvents"]}) == 3
    assert [p["stats"]["fastpath_bytes"] for p in trace["otherData"]["processes"]] == [KIB64] * 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".nobounce")] == []


LEAVING = """
import multiprocessing, os, sys, nobounce
def read(*_):
    with nobounce.open(sys.argv[1]) as f: f.read(nobounce.Device("cpu").allocate(65536), cache="avoid")
read()
if sys.argv[2] == "pool":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(read, range(6), chunksize=1)
        pool.close()
        pool.join()
elif sys.argv[2] == "terminated":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(read, range(6))  # leaving the block ends its process by a signal
else:
    pid = os.fork()
    if pid == 0:
        for _ in range(6): read()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize(("how", "cut"), [("pool", 0), ("terminated", 1), ("os._exit", 1)])
def test_a_forked_child_leaves_all_its_transfers_in_trace_and_statistics(
    data: Path, tmp_path: Path, how: str, cut: int
) -> None:
    out = tmp_path / "t.json"
    command = [sys.executable, "-c", LEAVING, data, how]
    done = cli("stats", "--json", "--", "nobounce", "trace", "-o", out, "--", *command)
    assert done.returncode == 0, done.stderr
    trace = json.loads(out.read_text())
    moved = [e["args"]["nbytes"] for e in trace["traceEvents"] if e.get("cat") == "transfer"]
    assert moved == [KIB64] * 7
    assert trace["otherData"]["cut"] == cut
    told = json.loads(done.stderr[done.stderr.index("{\n") :])
    assert told["total"]["fastpath_bytes"] == 7 * KIB64


def test_another_user_cannot_attach(data: Path) -> None:
    need("unprivileged")
    code = """
import sys
import nobounce.observe.attach as a, nobounce.observe.snapshot, nobounce.errors
drop()
try:
    a.attach(int(sys.argv[1]))
except nobounce.errors.FilePermissionError as e:
    print("refused:", e)
"""
    with program(data) as child:
        done = as_nobody(code, str(child.pid))
        assert done.stdout.startswith("refused:"), done.stderr
        assert "belongs to another user" in done.stdout
        again(child)  # and the program goes on
        with attach(child.pid) as reader:
            assert reader.read().fastpath_bytes == 2 * KIB64


def test_a_process_without_statistics_is_named(data: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        with pytest.raises(FileError, match=f"process {child.pid} has no statistics"):
            attach(child.pid)
        child.kill()


@pytest.mark.parametrize("what", ["pipe", "unsealed", "small", "garbage"])
def test_a_hostile_descriptor_neither_crashes_nor_misleads(what: str) -> None:
    import fcntl

    if what == "pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 100 if what == "small" else NBYTES)
        os.pwrite(fd, os.urandom(100), 0)
        if what != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, export.SEALS)
    with pytest.raises(FormatError):
        Attached(fd, os.getpid()).read()
    if what != "garbage":
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    else:
        os.close(fd)


def test_attaching_waits_for_the_first_io(data: Path) -> None:
    found: list[int] = []
    code = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n" + READER.replace(
        'print("ready", flush=True)\n', ""
    )
    with program(data, code) as child:

        def wait() -> None:
            with attach(child.pid, wait=30) as reader:
                found.append(reader.pid)

        thread = threading.Thread(target=wait)
        thread.start()
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        thread.join(30)
    assert found == [child.pid]


def test_stats_p_now_gives_one_snapshot(data: Path) -> None:
    with program(data) as child:
        done = cli("stats", "-p", str(child.pid), "--now", "--json")
        assert child.poll() is None
    assert done.returncode == 0
    assert json.loads(done.stderr)["total"]["fastpath_bytes"] == KIB64


def test_stats_p_ends_with_the_process_also_where_pidfd_open_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from nobounce.cli.main import app

    with program(data) as child:

        def refused(pid: int) -> int:
            child.kill()
            raise PermissionError(1, "a container's filter")

        monkeypatch.setattr(os, "pidfd_open", refused)
        done = CliRunner().invoke(app, ["stats", "-p", str(child.pid), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stderr)["total"]["fastpath_bytes"] == KIB64


def test_stats_p_watches_until_the_end_and_adds_processes_up(data: Path) -> None:
    with (
        program(data) as one,
        program(data) as two,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nobounce.cli.main",
                "stats",
                "-p",
                str(one.pid),
                "-p",
                str(two.pid),
                "--watch",
                "50ms",
            ],
            stderr=subprocess.PIPE,
            text=True,
        ) as watching,
    ):
        assert watching.stderr is not None
        first = watching.stderr.readline()
        again(one)
        one.kill()
        two.kill()
        one.wait(30)
        two.wait(30)
        rest = watching.stderr.read()
        assert watching.wait(30) == 0
    assert "GiB/s" in first
    assert f"Total Fastpath read size (B): {3 * KIB64}" in rest
    assert f"Processes: 2 ({one.pid}, {two.pid})" in rest


def test_verify_compares_with_the_kernel(data: Path) -> None:
    with (
        program(data, READER) as child,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nobounce.cli.main",
                "stats",
                "-p",
                str(child.pid),
                "--verify",
                "--json",
                "--watch",
                "50ms",
            ],
            stderr=subprocess.PIPE,
            text=True,
        ) as watching,
    ):
        assert watching.stderr is not None
        watching.stderr.readline()
        again(child)
        watching.stderr.readline()
        watching.stderr.readline()
        child.kill()
        child.wait(30)
        rest = watching.stderr.read()
        assert watching.wait(30) == 0, rest
    told = json.loads(rest[rest.index("{\n") :])
    assert told["verify"]["agrees"] is True
    assert told["verify"]["direct_read_bytes"] == KIB64
    assert told["verify"]["kernel_read_bytes"] >= KIB64
