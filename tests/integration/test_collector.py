"""Strangers at the collector of `nobounce stats`: they neither falsify nor delay nor lose anything."""

from __future__ import annotations

import array
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import as_nobody, need, nobody_command
from nobounce.errors import FileError
from nobounce.observe import collect, export
from nobounce.observe.collect import MOST_WAITING, Collector
from watched import NBYTES, watched

FORGE = """
import array, mmap, os, socket, sys
from nobounce.config import Settings
from nobounce.observe import export, layout
from nobounce.observe.counters import Counters
from nobounce.observe.layout import BACKENDS
if "nobody" in sys.argv: drop()
memory, fd = export.make_memory()
counters = Counters(Settings(), memory)
counters.words[counters._flow("cpu", "fastpath", "read") + 16] += 1 << 40
for said in (b"N", b"", b"0" * 32, os.environb.get(b"NOBOUNCE_STATS_COLLECTOR", b"")):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\\0" + sys.argv[1])
        s.sendmsg([said or b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        s.settimeout(10)
        try:
            s.recv(1)
        except ConnectionResetError:
            pass
"""

SILENT = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
drop()
held = []
for _ in range(int(sys.argv[2])):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(10)
    s.connect("\\0" + sys.argv[1])
    held.append(s)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(NBYTES))
    return tmp_path / "data"


def test_forged_counters_of_another_user_count_for_nothing(data: Path) -> None:
    with watched(data, "--expect", "fastpath") as program:
        done = as_nobody(FORGE, program.collector(), "nobody")
        assert done.returncode == 0, done.stderr
        program.read()
    assert program.code == 1, "what was forged is fastpath, what the program did is fallback"
    assert program.told["total"]["fallback_bytes"] == NBYTES
    assert program.told["total"]["fastpath_bytes"] == 0
    assert len(program.told["processes"]) == 1
    assert program.told["left_out"] == 0


def test_forged_counters_of_the_same_user_need_the_secret_too(data: Path) -> None:
    """Not that a process of the same user could not read it; but nothing is believed by the user's number alone."""
    with watched(data) as program:
        subprocess.run([sys.executable, "-c", FORGE, program.collector()], check=True, timeout=60)
        program.read()
    assert program.told["total"]["fastpath_bytes"] == 0
    assert len(program.told["processes"]) == 1


@pytest.mark.parametrize("count", [5, 1000])
def test_silent_connections_of_another_user_delay_and_lose_nothing(data: Path, count: int) -> None:
    with watched(data) as program:
        before = program.descriptors()
        command = nobody_command(SILENT, program.collector(), str(count))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as silent:
            assert silent.stdout is not None
            assert silent.stdout.readline() == "connected\n"
            seconds = program.read()
            assert program.descriptors() <= before + MOST_WAITING + 2
            silent.kill()
    assert program.told["total"]["fallback_bytes"] == NBYTES
    assert seconds < 4.5, "it waits 5 s where peers are heard one after the other"


def test_a_process_that_ends_at_once_is_counted(data: Path) -> None:
    code = "import os, sys, nobounce\nprint('ready', flush=True)\nsys.stdin.readline()\n"
    code += "nobounce.open(sys.argv[1]).read(nobounce.Device('cpu').allocate(65536), require='fallback')\n"
    with watched(data, program=code + "os._exit(0)") as program:
        pass
    assert program.told["total"]["fallback_bytes"] == NBYTES


def test_a_stopped_collector_delays_nothing(data: Path) -> None:
    with watched(data) as program:
        program.stats.send_signal(19)
        try:
            assert program.read() < 4.5, "it waits 5 s for an answer"
        finally:
            program.stats.send_signal(18)
    assert program.told["total"]["fallback_bytes"] == NBYTES


def hand_over(collector: Collector, fd: int) -> None:
    name, _, secret = collector.address.partition(":")
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\0" + name)
        s.sendmsg([secret.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def test_what_proves_itself_but_makes_no_sense_is_left_out_and_counted() -> None:
    with Collector() as collector:
        read, write = os.pipe()
        hand_over(collector, read)
        memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, 100)
        hand_over(collector, memory)
        for fd in (read, write, memory):
            os.close(fd)
        collector.finish()
        assert collector.read() == []
        assert collector.missed == 2


DROPPING = """
import os, sys
from nobounce.config import Settings
from nobounce.observe import export
from nobounce.observe.counters import Counters
print("ready", flush=True)
sys.stdin.readline()
os.setuid(65534)
memory, fd = export.make_memory()
Counters(Settings(), memory)
export.introduce(fd, os.environ["NOBOUNCE_STATS_COLLECTOR"])
"""


def test_a_program_that_gives_up_root_is_counted(data: Path) -> None:
    need("root")
    with watched(data, program=DROPPING) as program:
        pass
    assert len(program.told["processes"]) == 1


NONSENSE = """
import os, sys
from nobounce.observe import export
fd = os.memfd_create("x")
print("ready", flush=True)
sys.stdin.readline()
export.introduce(fd, os.environ["NOBOUNCE_STATS_COLLECTOR"])
"""


def test_a_process_that_was_left_out_is_told_and_fails_what_was_expected(data: Path) -> None:
    with watched(data, "--expect", "fastpath", program=NONSENSE) as program:
        pass
    assert program.code == 1
    assert program.told["left_out"] == 1
    assert "the statistics of 1 process could not be read" in program.errors


def test_of_many_processes_that_have_ended_no_descriptor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MOST_OPEN", 16)
    code = """
import os, sys
from nobounce.config import Settings
from nobounce.observe import export
from nobounce.observe.counters import Counters
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        memory, fd = export.make_memory()
        Counters(Settings(), memory)
        export.introduce(fd, sys.argv[1])
        os._exit(0)
    os.waitpid(pid, 0)
"""
    count = 50
    own = _blocks()  # of this process, where an earlier test has done I/O
    with Collector() as collector:
        subprocess.run([sys.executable, "-c", code, collector.address, str(count)], check=True, timeout=100)
        collector.finish()
        blocks = _blocks() - own
        assert len(collector.read()) == count
        assert collector.missed == 0
        assert 0 < len(blocks) <= 16


def _blocks() -> set[str]:
    """Open descriptors of counters."""
    return {fd for fd in os.listdir("/proc/self/fd") if export.NAME in _link(fd)}


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_without_a_thread_the_collector_takes_in_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    fd = os.memfd_create("x")
    with Collector() as collector:
        hand_over(collector, fd)
        os.close(fd)
        collector.finish()
        assert collector.missed == 1


def test_a_collector_that_gets_no_socket_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "none left")

    monkeypatch.setattr(socket, "socketpair", none_left)
    with pytest.raises(
        FileError, match="the socket of the collector, NOBOUNCESTATS-.*: cannot listen: .*EMFILE"
    ):
        Collector()
