"""K7: transfers on the direct path, read and write."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hipfile_rig import BLOCK, OK, Rig, content, get, only, pattern, put, settings
from nobounce import hipfile
from nobounce.errors import RuntimeStatus
from nobounce.hipfile.driver import STATE
from nobounce.hipfile.whole import Decider
from nobounce.route.types import MAX_RW_COUNT
from nobounce.testing.faults import inject


class Setting:
    """A file and memory with different content, and a transfer between them."""

    def __init__(self, rig: Rig, op: str, nbytes: int = 4 * BLOCK) -> None:
        self.rig, self.op, self.nbytes = rig, op, nbytes
        self.fd = rig.fd(pattern(nbytes, 1))
        self.handle = rig.file_of(self.fd)
        self.memory = rig.memory(nbytes, pattern(nbytes, 2))

    def move(self, nbytes: int | None = None, file_offset: int = 0, buffer_offset: int = 0) -> int:
        call = hipfile.read if self.op == "read" else hipfile.write
        size = self.nbytes if nbytes is None else nbytes
        return call(self.handle, self.memory.handle, size, file_offset, buffer_offset)

    def moved(self, nbytes: int) -> bool:
        """Whether exactly the first `nbytes` bytes moved."""
        source, target = (1, 2) if self.op == "read" else (2, 1)
        expected = pattern(self.nbytes, source)[:nbytes] + pattern(self.nbytes, target)[nbytes:]
        return (get(self.memory) if self.op == "read" else content(self.fd)) == expected

    def fault(self, **how: Any) -> Any:
        return inject(op=self.op, device="sim:0", **how)


@pytest.fixture
def setting(rig: Rig, op: str) -> Setting:
    return Setting(rig, op)


@contextmanager
def _seen(rig: Rig, monkeypatch: pytest.MonkeyPatch, op: str) -> Iterator[list[tuple[int, ...]]]:
    """(device, fd, address, nbytes, file_offset) of every direct call."""
    calls: list[tuple[int, ...]] = []
    direct = rig.runtime.direct_io()
    real = getattr(direct, op)

    def call(*args: int) -> int:
        calls.append(args)
        return int(real(*args))

    with monkeypatch.context() as m:
        m.setattr(direct, op, call)
        yield calls


def test_K097_disabled_is_5030(setting: Setting) -> None:
    settings(allow_compat_mode=False, force_compat_mode=True)
    assert setting.move() == -5030
    assert setting.moved(0)


def test_K098_negative_offsets(setting: Setting) -> None:
    only("fastpath")
    for where in ((-BLOCK, 0), (0, -BLOCK)):
        assert setting.move(BLOCK, *where) == -1
        assert hipfile.last_errno() == errno.EINVAL
    assert setting.moved(0)


def test_K099_buffer_offset_past_the_end(setting: Setting) -> None:
    only("fastpath")
    assert setting.move(BLOCK, 0, setting.nbytes) == -5022
    assert setting.move(BLOCK, 0, setting.nbytes + BLOCK) == -5022
    assert setting.move(0, 0, setting.nbytes) == -5022, "the offset must lie inside, even for nothing (A-36)"


def test_K100_size_past_the_end(setting: Setting) -> None:
    only("fastpath")
    assert setting.move(setting.nbytes + BLOCK) == -5022
    assert setting.moved(0)


def test_K101_region_overflow(setting: Setting) -> None:
    only("fastpath")
    assert setting.move(MAX_RW_COUNT, 0, BLOCK) == -5022
    assert setting.move(BLOCK, 0, (1 << 63) - BLOCK) == -5022
    assert setting.move(setting.nbytes, 0, BLOCK) == -5022


def test_K102_the_direct_fd_is_passed(setting: Setting, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with _seen(rig, monkeypatch, setting.op) as calls:
        assert setting.move() == setting.nbytes
    assert [c[1] for c in calls] == [STATE.files[setting.handle]._fds["direct"]]
    assert calls[0][1] != setting.fd


def test_K103_the_device_pointer_is_base_plus_offset(
    setting: Setting, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _seen(rig, monkeypatch, setting.op) as calls:
        assert setting.move(BLOCK, 0, 2 * BLOCK) == BLOCK
    assert [(c[0], c[2]) for c in calls] == [(0, setting.memory.handle + 2 * BLOCK)]


def test_K104_size_and_offset_go_through_in_one_call(
    rig: Rig, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 24 << 20
    setting = Setting(rig, op, nbytes)
    with _seen(rig, monkeypatch, op) as calls:
        assert setting.move(nbytes - BLOCK, BLOCK, 0) == nbytes - BLOCK
    assert [c[3:] for c in calls] == [(nbytes - BLOCK, BLOCK)]


def test_K105_full_count(setting: Setting) -> None:
    only("fastpath")
    assert setting.move() == setting.nbytes
    assert setting.moved(setting.nbytes)


def test_K106_a_short_count_is_returned_as_it_is(setting: Setting) -> None:
    with setting.fault(short=BLOCK) as rule:
        assert setting.move() == BLOCK
    assert rule.calls == 1, "the library does not go on where the driver stopped (C-19)"


def test_K107_a_hip_error_is_not_masked(setting: Setting) -> None:
    with setting.fault(error=RuntimeStatus.LaunchFailure):
        assert setting.move() == -719
    with setting.fault(error=RuntimeStatus.InvalidValue):
        assert setting.move() == -1, "the raw number, which looks like an OS error (J-9)"
    assert setting.moved(0)


def test_K108_an_os_error_is_not_masked(setting: Setting) -> None:
    with setting.fault(error=errno.ENOMEM):
        assert setting.move() == -1
        assert hipfile.last_errno() == errno.ENOMEM


def test_K109_a_request_is_capped(rig: Rig, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def call(self: Decider, request: Any) -> Any:
        asked.append(request.nbytes)
        raise OSError(errno.EIO, "seen")

    monkeypatch.setattr(Decider, "__call__", call)
    handle, memory = rig.file(), _huge(rig)
    act = hipfile.read if op == "read" else hipfile.write
    for size in (MAX_RW_COUNT, MAX_RW_COUNT + 1, 3 << 30):
        assert act(handle, memory, size, 0, 0) == -1
    assert asked == [MAX_RW_COUNT] * 3


def _huge(rig: Rig) -> int:
    """4 GiB of device memory of which nothing is touched."""
    address = rig.runtime.alloc(0, 4 << 30)
    rig._release.append(lambda: rig.runtime.free(address))
    return address


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.EINTR, errno.ESRCH])
def test_K110_an_ineligible_error_is_not_retried(setting: Setting, code: int) -> None:
    with setting.fault(error=code) as direct, inject(op="p" + setting.op) as fallback:
        assert setting.move() == -1
        assert hipfile.last_errno() == code
    assert (direct.calls, fallback.calls) == (1, 0)


def test_K111_a_hip_error_is_not_retried(setting: Setting) -> None:
    with setting.fault(error=RuntimeStatus.NotSupported) as direct, inject(op="p" + setting.op) as fallback:
        assert setting.move() == -801
    assert (direct.calls, fallback.calls) == (1, 0)


@pytest.mark.parametrize("times", [1, 2])
def test_K112_enodev_is_retried_on_fallback(setting: Setting, times: int) -> None:
    with setting.fault(error=errno.ENODEV) as direct, inject(op="p" + setting.op) as fallback:
        for _ in range(times):
            assert setting.move() == setting.nbytes
    assert direct.calls == times, "an earlier failure is not remembered"
    assert fallback.calls >= times
    assert setting.moved(setting.nbytes)


def test_K113_eremoteio_is_retried_on_fallback(setting: Setting) -> None:
    with setting.fault(error=errno.EREMOTEIO), inject(op="p" + setting.op) as fallback:
        assert setting.move() == setting.nbytes
    assert fallback.calls > 0
    assert setting.moved(setting.nbytes)


def test_K114_with_fallback_refusing_the_original_error_stays(setting: Setting) -> None:
    only("fastpath")
    with setting.fault(error=errno.ENODEV), inject(op="p" + setting.op) as fallback:
        assert setting.move() == -1
        assert hipfile.last_errno() == errno.ENODEV
    assert fallback.calls == 0


def test_K115_fallback_is_not_its_own_fallback(setting: Setting) -> None:
    only("fallback")
    with inject(op="p" + setting.op, error=errno.ENODEV) as fallback:
        assert setting.move() == -1
        assert hipfile.last_errno() == errno.ENODEV
    assert fallback.calls == 1


def test_K116_without_a_fallback_an_eligible_error_is_returned(setting: Setting) -> None:
    only("fastpath")
    for code in (errno.ENODEV, errno.EREMOTEIO):
        with setting.fault(error=code):
            assert setting.move() == -1
            assert hipfile.last_errno() == code
    assert setting.moved(0)


def test_a_failing_retry_gives_its_own_error(setting: Setting) -> None:
    with setting.fault(error=errno.ENODEV), inject(op="p" + setting.op, error=errno.EIO):
        assert setting.move() == -1
        assert hipfile.last_errno() == errno.EIO


def test_registration_is_not_needed_for_the_buffer(setting: Setting) -> None:
    assert hipfile.buf_register(setting.memory.handle, setting.nbytes) == OK
    put(setting.memory, pattern(setting.nbytes, 2))
    assert setting.move() == setting.nbytes
