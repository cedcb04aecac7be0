"""The end of the program: a thread that waits at a gate holds the process up only while somebody can still open it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]

CPU = "from nobounce.runtimes.host.cpu import CpuRuntime; rt = CpuRuntime()"
SIM = "from nobounce.runtimes.host.sim import SimRuntime; rt = SimRuntime()"
GPU = (
    f"import sys; sys.path.insert(0, {str(TESTS)!r}); from doubles.hip_bindings import HipDouble; "
    "from nobounce.runtimes.gpu import hip; rt = hip.load(HipDouble())"
)
RUNTIMES = pytest.mark.parametrize("runtime", [CPU, SIM, GPU], ids=["cpu", "sim", "hip"])


def run(program: str) -> list[str]:
    """What a child prints; one that does not end in time fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@RUNTIMES
def test_a_thread_at_a_gate_that_nobody_is_left_to_open_does_not_hold_the_process(runtime: str) -> None:
    out = run(f"""
import os, threading
{runtime}
s = rt.stream_create(0)
gate = rt.gate(s, lambda: None)
def wait():
    rt.stream_sync(s)
    os.write(1, b"released\\n")
for _ in range(2):
    threading.Thread(target=wait).start()
print("ended", flush=True)
""")
    assert out == ["ended", "released", "released"]


@RUNTIMES
def test_a_gate_stays_closed_while_another_thread_may_open_it(runtime: str) -> None:
    out = run(f"""
import threading, time
{runtime}
s = rt.stream_create(0)
gate = rt.gate(s, lambda: None)
order = []
def wait():
    rt.stream_sync(s)
    order.append("released")
def later():
    time.sleep(1.5)
    order.append("opened")
    gate.open()
    waiting.join()
    print(*order)
waiting = threading.Thread(target=wait)
waiting.start()
threading.Thread(target=later).start()
""")
    assert out == ["opened", "released"]


def test_a_transfer_in_flight_is_waited_for_and_its_gate_opens_when_the_bytes_are_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8192)
    out = run(f"""
import threading
import nobounce
from nobounce.testing import faults
device = nobounce.Device("sim:0")
f, buffer, back = nobounce.open({str(path)!r}), device.allocate(8192), bytearray(8192)
stream = device.create_stream()
slow = faults.inject(op="pread", latency=1.5)
slow.__enter__()
transfer = f.read_async(buffer, stream=stream, require="fallback")
def wait():
    stream.sync()
    done = transfer.done()
    buffer.copy_to(back, stream=stream)
    print(done, back == b"x" * 8192, flush=True)
threading.Thread(target=wait).start()
print("ended", flush=True)
""")
    assert out == ["ended", "True", "True"]
