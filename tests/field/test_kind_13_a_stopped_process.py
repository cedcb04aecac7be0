"""Kind 13: a reason that is not the true one. Attaching to a stopped process said "does not show its statistics to this user"."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import as_nobody, need, nobody_command
from nobounce.errors import FileMissingError
from nobounce.observe.attach import attach
from watched import NBYTES, PROGRAM


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(os.urandom(NBYTES))
    return tmp_path / "data"


def start(data: Path, code: str = PROGRAM) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("read\n")
    child.stdin.flush()
    child.stdout.readline()
    return child


@pytest.mark.parametrize("form", ["--json", "--now"])
def test_a_stopped_process_shows_its_statistics_and_is_said_to_be_stopped(data: Path, form: str) -> None:
    with start(data) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        try:
            command = [sys.executable, "-m", "nobounce", "stats", "-p", str(child.pid), "--now", form]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        finally:
            child.kill()
    assert done.returncode == 0, done.stderr
    if form == "--json":
        assert json.loads(done.stderr)["total"]["fallback_bytes"] == NBYTES
    else:
        assert done.stderr.startswith(f"nobounce stats: process {child.pid} is stopped: ")
        assert f"Total Fallback read size (B): {NBYTES}\n" in done.stderr


def test_a_process_that_has_ended_is_said_to_be_gone(data: Path) -> None:
    with start(data) as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: it still has its number
        with pytest.raises(FileMissingError, match=f"there is no process {child.pid}"):
            attach(child.pid)


UNDUMPABLE = """
import ctypes, os, nobounce.observe.attach
drop()
PR_SET_DUMPABLE = 4  # which the kernel clears of a program that changes its user
libc = ctypes.CDLL(None)
libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
parent = os.getpid()
if os.fork() == 0:
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        nobounce.observe.attach.attach(parent)
    except Exception as e:
        print(type(e).__name__, e, flush=True)
    os._exit(0)
os.wait()
"""


def test_what_the_kernel_refuses_to_its_own_user_is_not_said_to_be_another_users() -> None:
    done = as_nobody(UNDUMPABLE)
    assert done.stdout.startswith("FilePermissionError the kernel does not let this user look into"), done


HIDDEN = """
import sys, nobounce.observe.attach
drop()
try:
    nobounce.observe.attach.attach(int(sys.argv[1]))
except Exception as e:
    print(type(e).__name__, e)
"""


def test_a_process_that_proc_hides_is_not_said_to_be_gone() -> None:
    need("mount")
    hide = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", hide, "sh", *nobody_command(HIDDEN, str(os.getpid()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith(f"FilePermissionError /proc hides process {os.getpid()} from this user"), (
        done
    )
