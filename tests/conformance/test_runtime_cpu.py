"""The conformance class on `cpu`, and what holds there only."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from host_rules import HostRules
from nobounce.route.types import MemoryKind
from nobounce.runtimes.host.cpu import CpuRuntime
from nobounce.testing import Rig
from pace import assert_takes_under


class TestCpu(HostRules):
    capabilities = CpuRuntime.capabilities
    devices = 1

    @pytest.fixture
    def runtime(self) -> CpuRuntime:
        return CpuRuntime()

    def test_the_host_reads_and_writes_device_memory_in_place(self, rig: Rig) -> None:
        a = rig.device()
        ctypes.memset(a, 7, 4096)
        assert rig.get(a) == b"\x07" * 4096

    def test_large_memory_is_aligned_to_huge_pages(self, rig: Rig) -> None:
        for nbytes in (2 << 20, (2 << 20) + 1, 5 << 20):
            assert rig.device(nbytes) % (2 << 20) == 0
        assert rig.device(1) % 4096 == 0

    def test_direct_io_at_any_kind_of_memory(self, rig: Rig, tmp_path: Path) -> None:
        direct = rig.runtime.direct_io()
        assert direct is not None
        facts = direct.facts(0)
        assert facts.available
        assert facts.memory_kinds == frozenset(MemoryKind)
        path = tmp_path / "data"
        path.write_bytes(bytes(range(256)) * 32)
        a = rig.device(16384)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            assert direct.read(0, fd, a, 4096, 4096) == 4096
            assert rig.get(a) == bytes(range(256)) * 16
            assert direct.read(0, fd, a, 16384, 4096) == 4096, "a read past the end comes back short"
            rig.put(a, b"w" * 4096)
            assert direct.write(0, fd, a, 4096, 0) == 4096
            with pytest.raises(OSError) as caught:
                direct.read(0, fd, a + 1, 4095, 1)
            assert caught.value.errno == 22
        finally:
            os.close(fd)
        assert path.read_bytes() == b"w" * 4096 + bytes(range(256)) * 16

    @pytest.mark.serial
    def test_allocating_a_gibibyte_takes_under_a_millisecond(self, rig: Rig) -> None:
        def allocating() -> float:
            start = time.perf_counter()
            address = rig.runtime.alloc(0, 1 << 30)
            seconds = time.perf_counter() - start
            rig.runtime.free(address)
            return seconds

        assert_takes_under(1e-3, allocating, tries=20)

    @pytest.mark.serial
    def test_a_stream_op_costs_under_30_microseconds(self, rig: Rig) -> None:
        s, a, b = rig.stream(), rig.device(), rig.device()

        def copying() -> float:
            start = time.perf_counter()
            for _ in range(200):
                rig.runtime.copy_async(b, a, 4096, s)
            rig.runtime.stream_sync(s)
            return (time.perf_counter() - start) / 200

        assert_takes_under(30e-6, copying, tries=20)
