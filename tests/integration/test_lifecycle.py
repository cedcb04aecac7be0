"""Threads, forks, exits and kills: nothing hangs, nothing crashes, nothing is half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import nobounce

MIB = 1 << 20
DEVICES = ["cpu", "sim:0"]

PRELUDE = """
import os, sys, threading, time
import nobounce
path, device = sys.argv[1], nobounce.Device(sys.argv[2])
"""


def run(code: str, *arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter; a hang or a crash fails the test."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", PRELUDE + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(8 * MIB))
    return made


@pytest.mark.parametrize("device", DEVICES)
def test_exit_with_transfers_in_flight_neither_hangs_nor_crashes(path: Path, device: str) -> None:
    code = """
f = nobounce.open(path)
streams = [device.create_stream() for _ in range(4)]
buffers = [device.allocate(8 << 20) for _ in streams]
for _ in range(10):
    for s, b in zip(streams, buffers):
        f.read_async(b, stream=s)
print("leaving", flush=True)
"""
    for _ in range(3):
        done = run(code, path, device)
        assert "leaving" in done.stdout
        assert done.stderr == ""


@pytest.mark.parametrize("device", DEVICES)
def test_exit_with_a_sync_read_on_another_thread(path: Path, device: str) -> None:
    code = """
f = nobounce.open(path)
b = device.allocate(8 << 20)
def work():
    while True:
        f.read(b)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
print("leaving", flush=True)
"""
    assert run(code, path, device).stderr == ""


@pytest.mark.parametrize("device", DEVICES)
def test_dropping_a_transfer_loses_nothing(path: Path, device: str) -> None:
    """C77: the operation owns its file, buffer and parameters."""
    data = path.read_bytes()
    where = nobounce.Device(device)
    with where.create_stream() as stream, where.allocate(8 * MIB) as buffer:
        nobounce.open(path).read_async(buffer, stream=stream)
        stream.sync()
        assert buffer.numpy().tobytes() == data


@pytest.mark.parametrize("device", DEVICES)
def test_a_child_forked_in_the_middle_can_load_and_the_parent_goes_on(path: Path, device: str) -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork beside threads: that is the test
data = open(path, "rb").read()
f = nobounce.open(path)
b, s = device.allocate(8 << 20), device.create_stream()
for round in range(5):
    t = [f.read_async(b, stream=s) for _ in range(4)]
    child = os.fork()
    if child == 0:
        with nobounce.open(path) as g, device.allocate(8 << 20) as c:
            ok = g.read(c).nbytes == 8 << 20 and c.numpy().tobytes() == data
            with device.create_stream() as s2:
                ok = ok and g.read_async(c, stream=s2).result(20).nbytes == 8 << 20
        os._exit(0 if ok else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(x.result(20).nbytes == 8 << 20 for x in t)
assert b.numpy().tobytes() == data
print("ok")
"""
    assert "ok" in run(code, path, device).stdout


@pytest.mark.parametrize("device", DEVICES)
def test_64_threads_open_read_and_close_at_once(path: Path, device: str) -> None:
    data = path.read_bytes()
    where = nobounce.Device(device)
    start, wrong = threading.Barrier(64), []

    def work(n: int) -> None:
        try:
            start.wait()
            with where.allocate(64 * 1024) as buffer, where.create_stream() as stream:
                for k in range(5):
                    at = (n * 7919 + k * 65_536) % (7 * MIB)
                    with nobounce.open(path) as f:
                        f.read(buffer, file_offset=at)
                        t = f.read_async(buffer, stream=stream, file_offset=at)
                    t.result(60)
                    if buffer.numpy().tobytes() != data[at : at + 64 * 1024]:
                        wrong.append((n, k))
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_killed_copy_leaves_the_old_file_or_the_new_one_whole(tmp_path: Path) -> None:
    old, new = os.urandom(MIB), os.urandom(64 * MIB)
    source, dest = tmp_path / "s", tmp_path / "d"
    source.write_bytes(new)
    for delay in (0.0, 0.2, 0.35, 0.5):
        dest.write_bytes(old)
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from nobounce.cli.main import main; main()",
                "cp",
                source,
                dest,
                "--device",
                "sim:0",
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            child.wait(delay)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
        assert dest.read_bytes() in (old, new)


def test_an_interrupt_stops_a_read_and_the_next_one_works(path: Path) -> None:
    code = """
import signal
f = nobounce.open(path)
b = device.allocate(8 << 20)
main = threading.main_thread().ident
caught = 0
f.read(b)  # imports what it needs: the interpreter loses an interrupt that comes in a callback of its import lock
signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
for n in range(30):
    try:  # on a busy machine the signal comes before the next line
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0003 * n)
        while True:
            f.read(b)
    except KeyboardInterrupt:
        caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert f.read(b).nbytes == 8 << 20
assert b.numpy().tobytes() == open(path, "rb").read()
print("caught", caught)
"""
    assert "caught 30" in run(code, path, "cpu").stdout
