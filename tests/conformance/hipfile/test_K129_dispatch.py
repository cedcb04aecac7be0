"""K9: who gets the request, and what errors become."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from hipfile_rig import BLOCK, Rig, only, pattern, settings
from nobounce import hipfile
from nobounce.errors import DeviceError, OpError, OutOfMemoryError, RuntimeStatus
from nobounce.hipfile.status import (
    OffsetError,
    Refused,
    Rejected,
    async_result,
    batch_result,
    sync_result,
)
from nobounce.route.judge import best
from nobounce.route.types import Score
from nobounce.testing.faults import inject


def test_K129_without_backends_5030(rig: Rig) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    settings(allow_compat_mode=False, force_compat_mode=True)
    for call in (hipfile.read, hipfile.write):
        assert call(handle, memory.handle, BLOCK, 0, 0) == -5030


def test_K130_when_all_refuse_5030(rig: Rig) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    only("fastpath")
    for where in ((BLOCK - 1, 0, 0), (BLOCK // 2, 1, 0), (512, 0, 1)):
        assert hipfile.read(handle, memory.handle, *where) == -5030


def test_K131_the_highest_score_gets_the_io(rig: Rig) -> None:
    assert best((Score("fallback", 1), Score("fastpath", 100))) == Score("fastpath", 100)
    assert best((Score("fallback", 1), Score("fastpath", -1))) == Score("fallback", 1)
    assert best((Score("fallback", 1), Score("fastpath", 1))) == Score("fallback", 1), (
        "a tie keeps the earlier"
    )
    assert best((Score("fallback", -1), Score("fastpath", -1))) is None
    handle, memory = rig.file(pattern(2 * BLOCK)), rig.memory(2 * BLOCK)
    for size, direct, buffered in ((BLOCK, 1, 0), (BLOCK + 1, 0, 1)):
        with inject(op="read", device="sim:0") as fastpath, inject(op="pread") as fallback:
            assert hipfile.read(handle, memory.handle, size, 0, 0) == size
        assert (fastpath.calls, bool(fallback.calls)) == (direct, bool(buffered)), "no request is split"


def test_K132_a_pointer_attribute_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)

    def broken(address: int) -> Any:
        raise DeviceError("hipPointerGetAttributes", status)

    for status, result in (  # noqa: B007 - read by broken()
        (RuntimeStatus.InvalidValue, -5022),
        (RuntimeStatus.NotInitialized, -3),
    ):
        with monkeypatch.context() as m:
            m.setattr(rig.runtime, "pointer_info", broken)
            assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == result


def test_K133_a_bad_type_of_memory(rig: Rig) -> None:
    handle = rig.file(pattern(BLOCK))
    assert hipfile.read(handle, bytearray(BLOCK), BLOCK, 0, 0) == -5013
    assert hipfile.read(handle, None, BLOCK, 0, 0) == -5022
    assert hipfile.read(handle, "no memory", BLOCK, 0, 0) == -5022


def test_K134_a_bad_handle(rig: Rig) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    for bad in (None, 0, handle + 1, "1"):
        assert hipfile.read(bad, memory.handle, BLOCK, 0, 0) == -5027  # type: ignore[arg-type]
        assert hipfile.write(bad, memory.handle, BLOCK, 0, 0) == -5027  # type: ignore[arg-type]
    hipfile.handle_deregister(handle)
    assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == -5027


@pytest.mark.parametrize(
    ("failure", "sync", "queued", "batched"),
    [
        (OSError(errno.EIO, ""), -1, -5030, -errno.EIO),
        (DeviceError("f", RuntimeStatus.LaunchFailure), -719, -5011, -5011),
        (OutOfMemoryError("f"), -1, -5011, -5011),
        (Rejected("f"), -5022, -5022, -5022),
        (OffsetError("f"), -1, -5022, -errno.EINVAL),
        (Refused(OpError.INTERNAL_ERROR), -5030, -5030, -5030),
        (Refused(OpError.HIP_DRIVER_ERROR, 3), -3, -5011, -5011),
        (RuntimeError("f"), -5030, -5030, -5030),
    ],
)
def test_K135_mappings(failure: BaseException, sync: int, queued: int, batched: int) -> None:
    assert sync_result(failure) == sync
    assert async_result(failure) == queued
    assert batch_result(failure) == batched
