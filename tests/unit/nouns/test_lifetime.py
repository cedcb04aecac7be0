"""The end: interpreter exit with memory still held everywhere, and fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

from capabilities import need

PRELUDE = """
import builtins, gc, sys, threading
import numpy as np
from nobounce.device import Device
from nobounce.tensor import Tensor
def made(name="cpu"):
    buffer = Device(name).allocate(4096)
    buffer.fill(7, stream=None)
    return Tensor(buffer, (2048,), "U16")
"""


def run(code: str) -> None:
    """A child that must end by itself, with exit code 0 and nothing to say."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["cpu", "sim:1"])
def test_exit_with_everything_still_held(name: str) -> None:
    run(f"""
t = made({name!r})
stream = t.device.create_stream()
builtins.kept = [t, t.numpy(), t.buffer, stream, stream.record(), t.device.allocate(64, stream=stream)]
class Cycle: pass
cycle = Cycle(); cycle.self = cycle; cycle.held = [made({name!r}), t.device.create_event()]
del cycle
""")


def test_exit_with_consumers_still_holding() -> None:
    run("""
t = made()
builtins.kept = [np.from_dlpack(t), t.__dlpack__(), t.__dlpack__(max_version=(1, 0)), Tensor.from_dlpack(np.from_dlpack(t))]
class Late:
    def __init__(self, held): self.held = held
    def __del__(self): self.held.clear()
sys.late = Late([made(), np.from_dlpack(made()), made().__dlpack__(), Tensor.from_dlpack(np.zeros(3))])
""")


def test_exit_with_torch_still_holding() -> None:
    need("torch")
    run("""
import torch
t = made()
builtins.kept = [t.torch(), Tensor.maker(t.buffer, "torch"), Tensor.from_dlpack(torch.zeros(4))]
torch.kept = made().torch()
sys.kept = made().torch()
""")


def test_exit_while_a_stream_is_held() -> None:
    run("""
t = made()
stream = t.device.create_stream()
gate = t.device._runtime.gate(stream.handle, lambda: None)
t.buffer.fill(1, stream=stream)
dropped = t.device.allocate(64)
dropped.fill(1, stream=stream)
del dropped
builtins.kept = [t, stream]
""")


def test_a_fork_child_can_use_and_drop_what_it_inherited() -> None:
    run("""
import os, warnings
t = made()
stream = t.device.create_stream()
array, dropped, event = t.numpy(), made(), stream.record()
made(); gc.collect()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
if child == 0:
    code = 1
    try:
        assert array[0] == 0x0707
        array[0] = 1
        del dropped
        event.close(); stream.close()
        t.buffer.close()
        gc.collect()
        mine = made()
        assert mine.numpy()[5] == 0x0707
        mine.buffer.close()
        address = mine.address
        del mine
        from nobounce import reaper
        reaper.drain()
        assert Device("cpu")._runtime.pointer_info(address).nbytes == 0
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert array[0] == 0x0707
""")


def test_collection_inside_the_runtime_does_not_stop_the_program() -> None:
    run("""
gc.set_threshold(1)
class Cycle: pass
device = Device("sim:0")
with device.create_stream() as stream:
    for _ in range(200):
        cycle = Cycle(); cycle.self = cycle
        cycle.held = [device.allocate(64), device.create_event(), device.create_stream()]
        cycle.held[0].fill(1, stream=stream)
        del cycle
    stream.sync()
""")
