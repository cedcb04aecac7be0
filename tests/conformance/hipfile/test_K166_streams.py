"""K13: registered streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hipfile_rig import BLOCK, OK, Rig, fails, get, pattern
from nobounce import hipfile
from nobounce.errors import OpError
from nobounce.io.params import StreamFlags
from nobounce.io.streams import flags_of


@pytest.mark.parametrize("flags", range(16))
def test_K166_every_valid_set_of_flags(each: Rig, flags: int) -> None:
    stream = each.stream()
    assert hipfile.stream_register(stream, flags) == OK
    assert flags_of(each.runtime, stream) == StreamFlags(flags)
    assert hipfile.stream_deregister(stream) == OK


@pytest.mark.parametrize("flags", [16, 31, -1, 1 << 40])
def test_K167_invalid_flags_are_5022(rig: Rig, flags: int) -> None:
    stream = rig.stream()
    assert hipfile.stream_register(stream, flags) == fails(5022)
    assert hipfile.stream_deregister(stream) == fails(5022), "nothing was registered"


def test_K168_twice_is_5022(rig: Rig) -> None:
    stream = rig.stream(0)
    assert hipfile.stream_register(stream, 0) == fails(5022)
    assert hipfile.stream_register(stream, 15) == fails(5022)
    assert flags_of(rig.runtime, stream) == StreamFlags.NONE


def test_K169_deregister(rig: Rig) -> None:
    stream, other = rig.stream(0), rig.stream()
    assert hipfile.stream_deregister(other) == fails(5022)
    assert hipfile.stream_deregister(stream) == OK
    assert hipfile.stream_deregister(stream) == fails(5022)
    assert hipfile.stream_register(0xDEAD0, 0).err == OpError.HIP_DRIVER_ERROR


def test_K170_the_default_stream(each: Rig) -> None:
    data = pattern(BLOCK)
    handle, memory, done = each.file(data), each.memory(BLOCK), hipfile.Cell()
    assert hipfile.stream_register(None, 15) == OK
    try:
        assert hipfile.stream_register(0, 15) == fails(5022), "the null stream has one name in C"
        assert hipfile.read_async(handle, memory.handle, BLOCK, 0, 0, done) == OK
        each.device.sync()
        assert done.value == BLOCK
        assert get(memory) == data
    finally:
        assert hipfile.stream_deregister(None) == OK


def test_K171_an_unregistered_stream_works_with_no_flags(rig: Rig) -> None:
    data = pattern(2 * BLOCK)
    handle, memory, stream = rig.file(data), rig.memory(BLOCK), rig.stream()
    offset, done = hipfile.Cell(0), hipfile.Cell()
    with rig.held(stream):
        assert hipfile.read_async(handle, memory.handle, BLOCK, offset, 0, done, stream) == OK
        offset.value = BLOCK
    rig.sync(stream)
    assert done.value == BLOCK
    assert get(memory) == data[BLOCK:], "read again at the head of the stream"


def test_K172_a_process_that_ends_with_operations_in_flight_says_so(tmp_path: object) -> None:
    code = """
import logging, os, sys, threading
logging.basicConfig(stream=sys.stderr)
from nobounce import hipfile, Device
from nobounce.config import Settings, override
from nobounce.testing.faults import inject
override(Settings(unsupported_file_systems=True))
device = Device("sim:0")
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 4096)
_, handle = hipfile.handle_register(fd)
memory, stream = device.allocate(4096), device.create_stream()
hipfile.buf_register(memory.handle, 4096)
hipfile.stream_register(stream.handle, 0)
gate = device._runtime.gate(stream.handle, lambda: None)
slow = inject(op="read", device="sim:0", latency=1.0)  # the gate opens as the process ends
slow.__enter__()
assert not hipfile.read_async(handle, memory.handle, 4096, 0, 0, hipfile.Cell(), stream.handle)
print("submitted", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, f"{tmp_path}/file"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "submitted\n"), done.stderr
    assert "the process ends while 1 buffer(s) and 1 file(s) are in use" in done.stderr
