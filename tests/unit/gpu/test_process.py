"""The life of the process: interpreter exit with a closed gate, and fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]

_SETUP = f"""
import os, sys, threading, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(TESTS)!r})
from doubles.hip_bindings import HipDouble
from nobounce.errors import UnavailableError
from nobounce.runtimes.gpu import hip
rt = hip.load(HipDouble())
s, e, a, p = rt.stream_create(0), rt.event_create(0), rt.alloc(0, 4096), rt.alloc_pinned(4096)
reached = threading.Event()
gate = rt.gate(s, reached.set)
assert reached.wait(30)
"""


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", _SETUP + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_at_exit_gates_are_opened_and_host_functions_run() -> None:
    out = _run("rt.host_call(s, lambda: print('after the gate', flush=True))\nprint('leaving', flush=True)")
    assert out.split("\n")[:2] == ["leaving", "after the gate"]


def test_a_forked_child_is_told_and_may_give_things_back() -> None:
    out = _run(
        """
gate.open(); rt.stream_sync(s)
pid = os.fork()
if not pid:
    for call in (lambda: rt.alloc(0, 16), rt.device_count, lambda: rt.gate(s, print), lambda: rt.stream_query(s)):
        try:
            call()
            print("no error")
        except UnavailableError as error:
            print("forked" in str(error), "spawn" in str(error))
    rt.free(a); rt.free_pinned(p); rt.stream_destroy(s); rt.event_destroy(e); rt.free_async(a, s)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
rt.free(a)
print("parent goes on")
"""
    )
    assert out.splitlines() == ["True True"] * 4 + ["parent goes on"]


def test_a_forked_child_opens_no_gate_of_its_parent() -> None:
    """The words of a gate may be memory that both share; and a lock may have been held while the child was made."""
    out = _run(
        """
with rt._gates._changed.mutex:
    pid = os.fork()
if not pid:
    gate.open()
    print(rt._gates.closed(), gate._pair.go.value == gate._ticket, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
gate.open(); rt.stream_sync(s)
print(gate._pair.go.value == gate._ticket)
"""
    )
    assert out.splitlines() == ["[] False", "True"]
