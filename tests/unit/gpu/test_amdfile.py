"""hipAmdFileRead and hipAmdFileWrite through functions with AMD's signature (hipFile C-13 to C-16)."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.hip_bindings import HipDouble, Pointer
from nobounce.errors import DeviceError
from nobounce.route.types import MAX_RW_COUNT
from nobounce.runtimes.gpu import amdfile, hip
from nobounce.runtimes.gpu.gpu import GpuRuntime


class Library(HipDouble):
    """A HIP runtime with the calls: they move bytes with pread and pwrite through the simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int, int, int]] = []
        self.inits: list[int] = []
        self.status, self.code, self.names = 0, 0, list(amdfile.NAMES)
        self.current: list[int] = []
        self._functions = {
            b"hipAmdFileRead": amdfile.PROTOTYPE(lambda *a: self._move("read", *a)),
            b"hipAmdFileWrite": amdfile.PROTOTYPE(lambda *a: self._move("write", *a)),
        }

    def hipInit(self, flags: int) -> tuple[Any, ...]:
        self.inits.append(threading.get_ident())
        return ()

    def hipGetProcAddress(self, symbol: Any, version: int, flags: int) -> tuple[Any, ...]:
        if symbol.decode() not in self.names:
            return None, 1
        return Pointer(ctypes.cast(self._functions[symbol], ctypes.c_void_p).value or 0), 0

    def _move(
        self, op: str, file: Any, address: int, nbytes: int, offset: int, moved: Any, status: Any
    ) -> int:
        fd = file.of & 0xFFFFFFFF
        self.asked.append((op, fd, address, nbytes, offset))
        self.current.append(self.sim.current_device())
        status[0] = self.status
        if self.status or self.code:
            return self.code
        host = self.sim.alloc_pinned(nbytes)
        if op == "read":
            data = os.pread(fd, nbytes, offset)
            ctypes.memmove(host, data, len(data))
            self.sim.copy(address, host, len(data))
        else:
            self.sim.copy(host, address, nbytes)
            data = ctypes.string_at(host, nbytes)
            os.pwrite(fd, data, offset)
        moved[0] = len(data)
        return 0


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def runtime(library: Library) -> GpuRuntime:
    return hip.load(library)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def test_bytes_go_both_ways_with_the_buffers_device_current(
    library: Library, runtime: GpuRuntime, file: int
) -> None:
    direct, a = runtime.direct_io(), runtime.alloc(1, 16384)
    assert direct is not None
    assert direct.read(1, file, a, 8192, 4096) == 8192
    assert library.asked == [("read", file, a, 8192, 4096)]
    assert direct.write(1, file, a, 4096, 0) == 4096
    assert os.pread(file, 4096, 0) == bytes(range(256)) * 16
    assert direct.read(1, file, a, 8192, 12288) == 4096, "short at the end of the file"
    assert set(library.current) == {1}
    assert runtime.current_device() == 0


def test_C14_every_thread_initialises_once(library: Library, runtime: GpuRuntime, file: int) -> None:
    direct, a = runtime.direct_io(), runtime.alloc(0, 4096)
    assert direct is not None

    def twice() -> None:
        direct.read(0, file, a, 4096, 0)
        direct.read(0, file, a, 4096, 0)

    threads = [threading.Thread(target=twice) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(library.inits) == 3


def test_C13_requests_are_capped(library: Library, runtime: GpuRuntime, file: int) -> None:
    library.status = errno.ENODEV
    direct = runtime.direct_io()
    assert direct is not None
    with pytest.raises(OSError):
        direct.read(0, file, 4096, 1 << 33, 0)
    assert library.asked[0][3] == MAX_RW_COUNT


@pytest.mark.parametrize("status", [errno.ENODEV, -errno.EREMOTEIO, errno.EINVAL])
def test_C15_the_drivers_status_comes_first(
    library: Library, runtime: GpuRuntime, file: int, status: int
) -> None:
    direct = runtime.direct_io()
    assert direct is not None
    library.status, library.code = status, 1
    with pytest.raises(OSError) as caught:
        direct.read(0, file, 4096, 4096, 0)
    assert caught.value.errno == abs(status)


def test_C15_a_hip_error_is_a_device_error(library: Library, runtime: GpuRuntime, file: int) -> None:
    direct = runtime.direct_io()
    assert direct is not None
    library.code = 719
    with pytest.raises(DeviceError) as caught:
        direct.write(0, file, 4096, 4096, 0)
    assert (caught.value.call, caught.value.code) == ("hipAmdFileWrite", 719)


def test_facts(library: Library, runtime: GpuRuntime) -> None:
    direct = runtime.direct_io()
    assert direct is not None
    facts = direct.facts(0)
    assert facts.available
    assert (facts.file_rule, facts.min_mem_align, facts.min_offset_align) == ("hipfile", 4096, 4096)
    assert facts.virtual_function == "unknown"


def test_a_missing_symbol_is_named(library: Library) -> None:
    library.names = ["hipAmdFileRead"]
    runtime = hip.load(library)
    direct = runtime.direct_io()
    assert direct is not None
    facts = direct.facts(0)
    assert (facts.available, facts.code) == (False, "no-amd-file-calls")
    assert "no hipAmdFileWrite" in facts.because
    with pytest.raises(OSError) as caught:
        direct.write(0, 0, 4096, 4096, 0)
    assert caught.value.errno == errno.ENODEV
    assert "no hipAmdFileRead and no hipAmdFileWrite" in hip.load(HipDouble()).direct_io().facts(0).because  # type: ignore[union-attr]


def test_the_handle_is_8_bytes_with_the_descriptor_in_the_low_half() -> None:
    handle = amdfile._Handle(handle=0)
    handle.fd = 0x1234
    assert ctypes.sizeof(handle) == ctypes.sizeof(amdfile._File) == 8
    assert amdfile._File.from_buffer_copy(bytes(handle)).of == 0x1234


@pytest.mark.parametrize(
    ("mode", "known"), [("GUEST", "yes"), ("BAREMETAL", "no"), ("HOST", "no"), ("UNKNOWN", "unknown")]
)
def test_a_guest_knows_a_virtual_function_by_amdsmi(
    monkeypatch: pytest.MonkeyPatch, mode: str, known: str
) -> None:
    from types import SimpleNamespace

    amdsmi = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["other", "mine"],
        amdsmi_get_gpu_device_bdf=lambda h: "0000:01:00.0" if h == "mine" else "0000:02:00.0",
        amdsmi_get_gpu_virtualization_mode=lambda h: {"mode": SimpleNamespace(name=mode)},
    )
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", amdsmi)
    amdfile.virtual_function.cache_clear()
    assert amdfile.virtual_function("0000:01:00.0") == known
    amdfile.virtual_function.cache_clear()
