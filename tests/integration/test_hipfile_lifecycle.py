"""The hipfile module in threads, in a forked child and at the end of the interpreter: usable or refused, never hung."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need
from hipfile_rig import BLOCK, OK, Rig, get, in_threads, pattern, settings
from nobounce import hipfile

SETUP = """
import faulthandler, os, signal, sys, threading
faulthandler.dump_traceback_later(50, exit=True)
from nobounce import hipfile, Device
from nobounce.config import Settings, override
from nobounce.testing.faults import inject
override(Settings(unsupported_file_systems=True))
device = Device(sys.argv[2])
data = bytes(range(256)) * 16
def opened(path=sys.argv[1]):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, data, 0)
    return fd
fd = opened()
_, handle = hipfile.handle_register(fd)
memory, stream = device.allocate(4096), device.create_stream()
hipfile.buf_register(memory.handle, 4096)
"""


def _child(code: str, folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    need("o_direct")
    done = subprocess.run(
        [sys.executable, "-c", SETUP + code, f"{folder}/file", device],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("device", ["sim:0", "cpu"])
def test_64_threads_register_read_and_close_at_once(tmp_path: Path, device: str) -> None:
    need("o_direct")
    settings()
    rig = Rig(device, tmp_path)
    hipfile.use(rig.device)
    data = pattern(BLOCK)
    shared = rig.fd(data)
    fds = [rig.fd(data) for _ in range(64)]
    memory = rig.memory(64 * BLOCK)

    def act(i: int) -> None:
        address = memory.handle + i * BLOCK
        for _ in range(4):
            hipfile.driver_open()
            _, handle = hipfile.handle_register(fds[i])
            assert hipfile.handle_register(shared)[0].err in (0, 5028)
            hipfile.buf_register(address, BLOCK)
            moved = hipfile.read(handle, address, BLOCK, 0, 0)
            # somebody may have closed the driver, and with it this file, in between
            assert moved in (BLOCK, -5027) or (moved == -1 and hipfile.last_errno() == 22), moved
            hipfile.buf_deregister(address)
            hipfile.handle_deregister(handle)
            hipfile.driver_close()

    _, first = hipfile.handle_register(shared)  # what is opened once for the process is open now
    hipfile.driver_close()
    before = len(os.listdir("/proc/self/fd"))
    assert first is not None
    assert in_threads(64, act) == []
    while hipfile.use_count():
        hipfile.driver_close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert hipfile.handle_register(shared)[0] == OK
    hipfile.driver_close()
    assert get(memory, 0, BLOCK) in (data, b"\xee" * BLOCK)
    rig.close()
    hipfile.use(None)


@pytest.mark.parametrize("device", ["sim:0", "cpu"])
def test_a_forked_child_starts_closed_and_works(tmp_path: Path, device: str) -> None:
    done = _child(
        """
def of_file():
    found = []
    for number in os.listdir("/proc/self/fd"):
        try: found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError: continue
    return found.count(os.path.realpath(sys.argv[1]))
assert of_file() == 2
child = os.fork()
if child == 0:
    status = 1
    try:
        memory = device.allocate(4096)  # a device's memory is its parent's
        assert hipfile.use_count() == 0
        assert hipfile.read(handle, memory.handle, 4096, 0, 0) == -1 and hipfile.last_errno() == 22
        assert of_file() == 1, "the parent's second descriptor is closed"
        error, mine = hipfile.handle_register(fd)
        assert not error
        assert not hipfile.buf_register(memory.handle, 4096)
        assert hipfile.read(mine, memory.handle, 4096, 0, 0) == 4096
        done = hipfile.Cell()
        own = device.create_stream()
        assert not hipfile.read_async(mine, memory.handle, 4096, 0, 0, done, own.handle)
        own.sync()
        assert done.value == 4096
        _, batch = hipfile.batch_io_setup(1)
        params = hipfile.IOParams(mine, 0, hipfile.Batch(memory.handle, 0, 0, 4096))
        assert not hipfile.batch_io_submit(batch, 1, [params])
        assert hipfile.batch_io_get_status(batch, 1, 1)[1][0].ret == 4096
        status = 0
    finally:
        if status: import traceback; traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
assert hipfile.use_count() == 1
assert hipfile.read(handle, memory.handle, 4096, 0, 0) == 4096
print("parent and child work")
""",
        tmp_path,
        device,
    )
    assert done.stdout == "parent and child work\n"


@pytest.mark.parametrize("device", ["sim:0", "cpu"])
def test_forks_while_threads_read_leave_no_child_hung(tmp_path: Path, device: str) -> None:
    done = _child(
        """
stop = threading.Event()
def busy(i):
    own = opened(f"{sys.argv[1]}{i}")
    while not stop.is_set():
        _, h = hipfile.handle_register(own)
        hipfile.read(h, memory.handle, 4096, 0, 0)
        hipfile.read_async(h, memory.handle, 4096, 0, 0, hipfile.Cell(), stream.handle)
        stream.sync()
        hipfile.handle_deregister(h)
threads = [threading.Thread(target=busy, args=(i,)) for i in range(4)]
for t in threads: t.start()
for n in range(15):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # faulthandler's own thread does not live here, and asking for another waits for it
        status = 1
        try:
            assert hipfile.use_count() == 0
            own = opened(f"{sys.argv[1]}child")
            _, h = hipfile.handle_register(own)
            fresh = device.allocate(4096)
            assert hipfile.read(h, fresh.handle, 4096, 0, 0) == 4096
            status = 0
        finally:
            if status: import traceback; traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, n
stop.set()
for t in threads: t.join()
print("done")
""",
        tmp_path,
        device,
    )
    assert done.stdout == "done\n"


@pytest.mark.parametrize("device", ["sim:0", "cpu"])
@pytest.mark.parametrize("how", ["held", "slow", "batch"])
def test_the_interpreter_ends_with_transfers_in_flight(tmp_path: Path, device: str, how: str) -> None:
    code = {
        "held": """
gate = device._runtime.gate(stream.handle, lambda: None)
for _ in range(8):
    assert not hipfile.read_async(handle, memory.handle, 4096, 0, 0, hipfile.Cell(), stream.handle)
""",
        "slow": """
reached = threading.Event()
fault = inject(op="pread", latency=0.5); fault.__enter__()
override(Settings(force_compat_mode=True))
assert not hipfile.read_async(handle, memory.handle, 4096, 0, 0, hipfile.Cell(), stream.handle)
device._runtime.host_call(device.create_stream().handle, reached.set); reached.wait(30)
""",
        "batch": """
fault = inject(op="pread", latency=0.5); fault.__enter__()
override(Settings(force_compat_mode=True))
_, batch = hipfile.batch_io_setup(64)
params = [hipfile.IOParams(handle, 0, hipfile.Batch(memory.handle, 0, 0, 4096))] * 64
assert not hipfile.batch_io_submit(batch, 64, params)
""",
    }[how]
    done = _child(
        code + 'print("in flight:", hipfile.outstanding() > 0 or "batch", flush=True)\n', tmp_path, device
    )
    assert done.stdout.startswith("in flight:")
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


def test_a_child_does_not_wait_for_locks_that_threads_of_its_parent_held(tmp_path: Path) -> None:
    done = _child(
        """
from nobounce.hipfile import batch
from nobounce.hipfile.driver import STATE
from nobounce.io.file import _SOURCE
held, go = threading.Event(), threading.Event()
def holder():
    with STATE.lock, STATE.files[handle]._lock, batch._lock, _SOURCE._mounts._lock:
        held.set(); go.wait()
thread = threading.Thread(target=holder); thread.start(); held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    status = 1
    try:
        _, h = hipfile.handle_register(opened(f"{sys.argv[1]}child"))
        fresh = device.allocate(4096)
        assert hipfile.read(h, fresh.handle, 4096, 0, 0) == 4096
        _, b = hipfile.batch_io_setup(1)
        hipfile.batch_io_destroy(b)
        status = 0
    finally:
        os._exit(status)
ended = os.waitpid(child, 0)[1]
go.set(); thread.join()
print("child:", ended)
""",
        tmp_path,
        "sim:0",
    )
    assert done.stdout == "child: 0\n"
