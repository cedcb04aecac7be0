"""pread and pwrite on plain addresses, and the faults that strike them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nobounce.errors import ArgumentError, DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.runtimes import rawio
from nobounce.testing import faults
from nobounce.testing.stepper import Stepper


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 16)
    made = os.open(path, os.O_RDWR)
    yield made
    os.close(made)


@pytest.fixture
def block() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(4096)


@pytest.mark.parametrize("flags", [0, rawio.RWF_NOWAIT])
def test_read_and_end_of_file(fd: int, block: ctypes.Array[ctypes.c_char], flags: int) -> None:
    address = ctypes.addressof(block)
    os.pread(fd, 4096, 0)
    assert rawio.pread_into(fd, address, 100, 56, flags) == 100
    assert block.raw[:101] == bytes(range(56, 156)) + b"\0"
    assert rawio.pread_into(fd, address, 4096, 4000, flags) == 96
    assert rawio.pread_into(fd, address, 10, 4096, flags) == 0


@pytest.mark.parametrize("flags", [0, 0x02])
def test_write(fd: int, block: ctypes.Array[ctypes.c_char], flags: int) -> None:
    """With and without a flag (RWF_DSYNC)."""
    block.raw = b"w" * 4096
    assert rawio.pwrite_from(fd, ctypes.addressof(block), 10, 4090, flags) == 10
    assert os.pread(fd, 100, 4088) == b"\xf8\xf9" + b"w" * 10


def test_offsets_past_4_gib(fd: int, block: ctypes.Array[ctypes.c_char]) -> None:
    address, far = ctypes.addressof(block), (5 << 30) + 1
    for flags in (0, 0x02):
        block.raw = b"f" * 4096
        assert rawio.pwrite_from(fd, address, 3, far, flags) == 3
        assert rawio.pread_into(fd, address, 4096, far - 1, 0) == 4
        assert block.raw[:4] == b"\0fff"


@pytest.mark.parametrize("flags", [0, rawio.RWF_NOWAIT])
def test_errors_carry_their_errno(fd: int, block: ctypes.Array[ctypes.c_char], flags: int) -> None:
    for call in (rawio.pread_into, rawio.pwrite_from):
        with pytest.raises(OSError) as caught:
            call(-1, ctypes.addressof(block), 10, 0, flags)
        assert caught.value.errno == errno.EBADF
        with pytest.raises(OSError) as caught:
            call(fd, 8, 10, 0, flags)
        assert caught.value.errno in (errno.EFAULT, errno.EOPNOTSUPP)


def test_interruption_is_an_error_and_not_hidden(fd: int, block: ctypes.Array[ctypes.c_char]) -> None:
    with faults.inject(op="pread", error=errno.EINTR, times=1), pytest.raises(InterruptedError):
        rawio.pread_into(fd, ctypes.addressof(block), 10, 0)


def test_faults_strike_reads_or_writes(fd: int, block: ctypes.Array[ctypes.c_char]) -> None:
    address = ctypes.addressof(block)
    with faults.inject(op="pwrite", error=errno.EIO):
        assert rawio.pread_into(fd, address, 10, 0) == 10
        with pytest.raises(OSError, match="Input/output error"):
            rawio.pwrite_from(fd, address, 10, 0)
        assert rawio.write_plain(fd, address, 10, 0) == 10
    with faults.inject(op="pread", short=7):
        assert rawio.pread_into(fd, address, 100, 0) == 7
    with faults.inject(op="pread", short=0.25):
        assert rawio.pread_into(fd, address, 100, 0) == 25
        assert rawio.pread_into(fd, address, 1, 0) == 1, "never 0, which would mean the end of the file"
    with faults.inject(op="pread", device="sim:0", error=errno.EIO):
        assert rawio.pread_into(fd, address, 100, 0) == 100, "a rule for a device spares plain reads"


def test_latency_passes_on_the_schedulers_clock(fd: int, block: ctypes.Array[ctypes.c_char]) -> None:
    def program(stepper: Stepper) -> float:
        with faults.inject(op="pread", latency=3600.0):
            rawio.pread_into(fd, ctypes.addressof(block), 10, 0, scheduler=stepper)
        return stepper.now()

    assert Stepper.run(program, seed=1) >= 3600


def test_which_calls_a_rule_strikes() -> None:
    def struck(n: int, **how: int) -> list[int]:
        with faults.inject(op="pread", **how) as rule:
            hits = [i for i in range(n) if rule.strikes()]
            assert (rule.calls, rule.hits) == (n, len(hits))
        return hits

    assert struck(4) == [0, 1, 2, 3]
    assert struck(4, times=2) == [0, 1]
    assert struck(6, after=2) == [2, 3, 4, 5]
    assert struck(8, after=1, every=3) == [1, 4, 7]
    assert struck(9, after=1, every=3, times=2) == [1, 4]


def test_rules_end_with_their_block_and_may_overlap(fd: int, block: ctypes.Array[ctypes.c_char]) -> None:
    address = ctypes.addressof(block)
    with faults.inject(op="pread", short=5):
        with faults.inject(op="pread", error=errno.EIO):
            assert rawio.pread_into(fd, address, 10, 0) == 5, "the first that strikes decides"
        with pytest.raises(ZeroDivisionError), faults.inject(op="pread", error=errno.EIO):
            _ = 1 // 0
        assert rawio.pread_into(fd, address, 10, 0) == 5
    assert rawio.pread_into(fd, address, 10, 0) == 10


@pytest.mark.parametrize(
    "how", [{"every": 0}, {"after": -1}, {"latency": -1.0}, {"short": 1.5}, {"op": "reed"}]
)
def test_rules_that_mean_nothing_are_refused(how: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        faults.rule(**{"op": "read", **how})


def test_a_status_becomes_the_error_it_means() -> None:
    from nobounce.runtimes.faults import fail

    with pytest.raises(DeviceError):
        fail(faults.rule("copy", error=RuntimeStatus.IllegalAddress), "copy")
    with pytest.raises(OutOfMemoryError):
        fail(faults.rule("alloc", error=RuntimeStatus.OutOfMemory), "alloc")
