"""Limits that are measured, and what an interrupt leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nobounce.clock import THREADS
from nobounce.observe import limits


def test_an_interrupt_while_the_disk_is_measured_is_that_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * limits.CHUNK))
    before = threading.active_count()
    main, real, calls = threading.main_thread().ident, os.preadv, itertools.count()

    def read(*arguments: object) -> int:
        if next(calls) == 0:  # one signal: a second would hit whatever runs behind the test
            signal.pthread_kill(main or 0, signal.SIGINT)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(limits.os, "preadv", read)
    with pytest.raises(KeyboardInterrupt):
        limits.disk_read(str(path), seconds=30.0)
    deadline = THREADS.now() + 30
    while threading.active_count() > before:  # each ends with its chunk
        assert THREADS.now() < deadline
        THREADS.sleep(0.001)


INTERRUPTED = """
import ctypes, os, signal, threading, sys
from nobounce.observe import limits

plain, reached, go, written = ctypes.memmove, threading.Event(), threading.Event(), threading.Semaphore(0)

def memmove(to, source, nbytes):
    reached.set()
    go.wait()
    plain(to, source, nbytes)
    written.release()

def preadv(fd, buffers, offset):
    reached.set()
    go.wait()
    assert os.path.samestat(os.fstat(fd), os.stat(sys.argv[2]))
    written.release()
    return plain_preadv(fd, buffers, offset)

plain_preadv, os.preadv, ctypes.memmove = os.preadv, preadv, memmove
threading.Thread(target=lambda: (reached.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    limits.host_memory(32 << 20) if sys.argv[1] == "memory" else limits.disk_read(sys.argv[2])
except KeyboardInterrupt:
    pass
else:
    sys.exit("no interrupt")
go.set()
assert written.acquire(timeout=30)
"""


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_what_threads_use_stays_theirs_when_measuring_is_interrupted(tmp_path: Path, what: str) -> None:
    """The memory that a thread copied to was unmapped under it."""
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * limits.CHUNK))
    command = [sys.executable, "-c", INTERRUPTED, what, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
