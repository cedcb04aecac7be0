"""The graph of ops: threads, schedules, fork and exit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import pytest

from nobounce.errors import DeviceError
from nobounce.runtimes.host import streams as host_streams
from nobounce.runtimes.host.cpu import CpuRuntime
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing import Rig
from nobounce.testing.stepper import Stepper


def test_thousands_of_waiting_streams_hold_no_threads() -> None:
    runtime = CpuRuntime()
    rig = Rig(runtime)
    source = rig.stream()
    gate = rig.hold(source)
    event = rig.recorded(source)
    before, ran = threading.active_count(), []
    for i in range(2000):
        s = rig.stream()
        runtime.stream_wait_event(s, event)
        runtime.host_call(s, lambda i=i: ran.append(i))
    assert threading.active_count() <= before
    gate.open()
    runtime.device_sync(0)
    assert sorted(ran) == list(range(2000))
    rig.close()


def test_idle_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_streams, "_IDLE_SECONDS", 0.01)
    runtime = CpuRuntime()
    before = set(threading.enumerate())
    for _ in range(3):
        runtime.host_call(runtime.stream_create(0), lambda: None)
    runtime.device_sync(0)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    runtime.host_call(0, lambda: None)
    runtime.device_sync(0)


def test_a_long_chain_of_markers_ends_without_recursion() -> None:
    runtime = CpuRuntime()
    rig = Rig(runtime)
    s, event = rig.stream(), rig.event()
    gate = rig.hold(s)
    for _ in range(20_000):
        runtime.event_record(event, s)
    gate.open()
    runtime.stream_sync(s)
    assert runtime.event_query(event)
    rig.close()


def test_an_interrupt_in_a_stream_is_an_error_of_the_stream() -> None:
    runtime = CpuRuntime()

    def interrupted() -> None:
        raise KeyboardInterrupt

    runtime.host_call(0, interrupted)
    with pytest.raises(DeviceError, match="KeyboardInterrupt"):
        runtime.stream_sync(0)


def program_of(seed: int, runtime: SimRuntime) -> None:
    """Random ops on three buffers by four streams, each op ordered after the last user of its buffers by an event."""
    rng = random.Random(seed)
    nbytes = 64
    streams = [runtime.stream_create(d % 2, nonblocking=rng.random() < 0.5) for d in range(4)]
    buffers = [runtime.alloc(i % 2, nbytes) for i in range(3)]
    model = [bytes(nbytes)] * 3
    last: list[tuple[int, int] | None] = [None] * 3
    log: list[int] = []
    expected: list[int] = []
    for step in range(25):
        s = rng.choice(streams)
        i, j = rng.sample(range(3), 2)
        for k in (i, j):
            user = last[k]
            if user is not None:
                runtime.stream_wait_event(s, user[1])
        kind = rng.choice(["fill", "copy", "host", "gate"])
        if kind == "fill":
            runtime.fill_async(buffers[i], step, nbytes, s)
            model[i] = bytes([step]) * nbytes
        elif kind == "copy":
            runtime.copy_async(buffers[i], buffers[j], nbytes, s)
            model[i] = model[j]
        elif kind == "host":
            runtime.host_call(s, lambda n=step: log.append(n))
            expected.append(step)
        else:
            gate = runtime.gate(s, lambda: None)
            runtime.scheduler.spawn(gate.open, name="opener")
        event = runtime.event_create(runtime.stream_device(s))
        runtime.event_record(event, s)
        last[i] = last[j] = (s, event)
        if rng.random() < 0.1:
            runtime.stream_sync(rng.choice(streams))
    for device in (0, 1):
        runtime.device_sync(device)
    assert sorted(log) == expected
    rig = Rig(runtime)
    assert [rig.get(b, nbytes) for b in buffers] == model
    for b in buffers:
        runtime.free(b)


@pytest.mark.parametrize("seeds", [range(n, n + 25) for n in (0, 25)], ids=str)
def test_any_schedule_gives_what_a_sequential_model_gives(seeds: range) -> None:
    for seed in seeds:
        Stepper.run(
            lambda stepper, seed=seed: program_of(seed, SimRuntime(scheduler=stepper, devices=2)), seed=seed
        )


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


PRELUDE = """
import os, sys, threading
from nobounce.errors import DeviceError
from nobounce.runtimes.host.cpu import CpuRuntime
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing.rig import Rig
"""


@pytest.mark.parametrize("kind", ["CpuRuntime", "SimRuntime"])
def test_a_forked_child_can_go_on_and_is_told_what_was_pending(kind: str) -> None:
    out = run(
        PRELUDE
        + f"""
rig = Rig({kind}())
rt = rig.runtime
s, t, a, b = rig.stream(), rig.stream(), rig.device(), rig.device()
rig.put(a, b"x" * 4096)
gate = rig.hold(s)
rt.fill_async(a, 1, 4096, s)
event = rig.recorded(s)
pid = os.fork()
if pid == 0:
    assert rig.get(a) == b"x" * 4096
    try:
        rt.stream_sync(s)
    except DeviceError as e:
        print("told:", "fork" in str(e))
    rt.event_sync(event)
    gate.open()
    for stream in (s, t, 0, 2):
        ran = threading.Event()
        rt.host_call(stream, ran.set)
        rt.fill_async(b, 3, 4096, stream)
        rt.stream_sync(stream)
        assert ran.is_set()
    assert rig.get(b) == b"\\3" * 4096
    rt.free(rt.alloc(0, 1 << 20))
    print("child done", flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
gate.open()
rt.stream_sync(s)
assert rig.get(a) == b"\\1" * 4096
print("parent done")
rig.close()
"""
    )
    assert out.splitlines() == ["told: True", "child done", "parent done"]


def test_forks_while_many_threads_submit_never_hang() -> None:
    out = run(
        PRELUDE
        + """
rt = CpuRuntime()
stop = threading.Event()
def churn():
    s = rt.stream_create(0)
    while not stop.is_set():
        rt.host_call(s, lambda: None)
        rt.free(rt.alloc(0, 4096))
threads = [threading.Thread(target=churn) for _ in range(4)]
for t in threads: t.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        s = rt.stream_create(0)
        rt.host_call(s, lambda: None)
        rt.stream_sync(s)
        rt.free(rt.alloc(0, 4096))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for t in threads: t.join()
print("done")
"""
    )
    assert out == "done\n"


@pytest.mark.parametrize("kind", ["CpuRuntime", "SimRuntime"])
def test_exit_with_a_closed_gate_and_work_behind_it(kind: str) -> None:
    out = run(
        PRELUDE
        + f"""
rig = Rig({kind}())
s, a = rig.stream(), rig.device(1 << 20)
gate = rig.hold(s)
rig.runtime.host_call(s, lambda: os.write(1, b"after the gate\\n"))
waiting = rig.background(lambda: rig.runtime.stream_sync(s))
class Late:
    def __del__(self):
        rig.runtime.free(a)
late = Late()
print("end of program", flush=True)
"""
    )
    assert out.startswith("end of program")


def test_exit_opens_gates() -> None:
    """Hooks run in reverse: the one registered before the runtime was imported sees what its hook has done."""
    out = run(
        """
import atexit
@atexit.register
def last():
    rt.stream_sync(s)
    print("opened")
"""
        + PRELUDE
        + """
rt = CpuRuntime()
s = rt.stream_create(0)
gate = Rig(rt).hold(s)
"""
    )
    assert out == "opened\n"


def test_workers_survive_a_fork_inside_a_host_function() -> None:
    runtime, status = CpuRuntime(), []

    def fn() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    runtime.host_call(0, fn)
    runtime.stream_sync(0)
    assert status == [7]
