"""The conformance class on `sim`, and what holds there only: HIP at its strictest, and faults."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host_rules import HostRules
from nobounce.clock import Task, Threads
from nobounce.errors import DeviceError, OutOfMemoryError, RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes.host import streams as host_streams
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing import Rig, faults
from nobounce.testing.rig import raises_status
from nobounce.testing.stepper import Stepper


class TestSim(HostRules):
    capabilities = SimRuntime.capabilities
    devices = 2

    @pytest.fixture
    def runtime(self) -> SimRuntime:
        return SimRuntime(devices=2)

    # rule 113: stream-ordered memory

    def test_rule_113_use_in_another_stream_needs_an_event(self, rig: Rig) -> None:
        s, t, b = rig.stream(), rig.stream(), rig.device()
        a = rig.runtime.alloc_async(0, 4096, s)
        for use in (
            lambda: rig.runtime.fill_async(a, 1, 4096, t),
            lambda: rig.runtime.copy_async(b, a, 4096, t),
            lambda: rig.runtime.copy_batch([(b, a, 16)], t),
            lambda: rig.runtime.free_async(a, t),
            lambda: rig.runtime.fill(a, 1, 4096),
        ):
            with pytest.raises(DeviceError, match="UseBeforeAlloc"):
                use()
        rig.runtime.stream_wait_event(t, rig.recorded(s))
        rig.runtime.fill_async(a, 1, 4096, t)
        rig.runtime.free_async(a, t)

    def test_rule_113_the_order_carries_over_several_streams(self, rig: Rig) -> None:
        s, t, u = rig.stream(), rig.stream(), rig.stream()
        a = rig.runtime.alloc_async(0, 4096, s)
        rig.runtime.stream_wait_event(t, rig.recorded(s))
        rig.runtime.stream_wait_event(u, rig.recorded(t))
        rig.runtime.fill_async(a, 1, 4096, u)
        rig.runtime.free_async(a, u)

    @pytest.mark.parametrize("how", ["stream_sync", "stream_query", "event_sync", "device_sync", "host_call"])
    def test_rule_113_the_host_may_know_that_it_has_happened(self, rig: Rig, how: str) -> None:
        s, t = rig.stream(), rig.stream()
        a = rig.runtime.alloc_async(0, 4096, s)
        event = rig.recorded(s)
        if how == "host_call":
            told = threading.Event()
            rig.runtime.host_call(s, told.set)
            assert told.wait(30)
        else:
            getattr(rig.runtime, how)({"event_sync": event, "device_sync": 0}.get(how, s))
        rig.runtime.fill_async(a, 1, 4096, t)
        rig.runtime.free_async(a, t)

    def test_rule_113_the_null_stream_comes_after_blocking_streams(self, rig: Rig) -> None:
        s, t, u = rig.stream(nonblocking=False), rig.stream(nonblocking=False), rig.stream()
        a = rig.runtime.alloc_async(0, 4096, s)
        with pytest.raises(DeviceError, match="UseBeforeAlloc"):
            rig.runtime.fill_async(a, 1, 4096, t)
        rig.runtime.fill(a, 1, 4096)
        rig.runtime.fill_async(a, 1, 4096, t)
        with pytest.raises(DeviceError, match="UseBeforeAlloc"):
            rig.runtime.fill_async(a, 1, 4096, u)
        rig.runtime.free_async(a, t)

    def test_rule_113_memory_is_freed_after_its_uses(self, rig: Rig) -> None:
        """A free that another stream's use may still follow is refused; with the event it is fine."""
        s, t = rig.stream(), rig.stream()
        a = rig.runtime.alloc_async(0, 4096, s)
        rig.runtime.stream_wait_event(t, rig.recorded(s))
        rig.runtime.fill_async(a, 1, 4096, s)
        for _ in range(3):
            rig.runtime.fill_async(a, 1, 4096, t)
        with pytest.raises(DeviceError, match="FreeBeforeUse"):
            rig.runtime.free_async(a, s)
        assert rig.runtime.pointer_info(a).nbytes == 4096
        rig.runtime.stream_wait_event(s, rig.recorded(t))
        rig.runtime.free_async(a, s)

    def test_rule_113_freed_memory_cannot_be_used(self, rig: Rig) -> None:
        s, a = rig.stream(), rig.runtime.alloc(0, 4096)
        b = rig.runtime.alloc_async(0, 4096, s)
        gate = rig.hold(s)
        rig.runtime.free_async(b, s)
        with raises_status(RuntimeStatus.InvalidValue):
            rig.runtime.fill_async(b, 1, 16, s)
        with raises_status(RuntimeStatus.InvalidValue):
            rig.runtime.pointer_info(b)
        gate.open()
        rig.runtime.free(a)
        for use in (lambda: rig.runtime.copy(a, rig.pageable(), 16), lambda: rig.runtime.fill(a, 0, 16)):
            with raises_status(RuntimeStatus.InvalidValue):
                use()

    # memory is the device's alone

    @pytest.mark.parametrize("access", ["ctypes.string_at(a, 1)", "ctypes.memset(a, 0, 1)"])
    def test_the_host_cannot_touch_device_memory(self, access: str) -> None:
        program = (
            "import ctypes\nfrom nobounce.runtimes.host.sim import SimRuntime\n"
            "a = SimRuntime().alloc(0, 4096)\nprint('allocated', flush=True)\n" + access
        )
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60)
        assert child.stdout == b"allocated\n"
        assert child.returncode == -signal.SIGSEGV

    def test_C98_device_0_is_untouched_by_copies_of_device_1(self, rig: Rig) -> None:
        """With device 0 current and held, copies of memory on device 1 go on."""
        a, b = rig.device(device=1), rig.device(device=1)
        rig.runtime.set_current_device(0)
        rig.hold(0)

        def work() -> bytes:
            rig.put(a, b"1" * 4096)
            rig.runtime.copy(b, a, 4096)
            return rig.get(b)

        assert rig.background(work).result() == b"1" * 4096
        assert not rig.runtime.stream_query(0)

    def test_memory_of_a_device_is_limited(self) -> None:
        runtime = SimRuntime(devices=2, memory_nbytes=1 << 20)
        a = runtime.alloc(0, 1 << 20)
        with pytest.raises(OutOfMemoryError, match="0 of 1048576 free"):
            runtime.alloc(0, 1)
        assert runtime.last_error() == RuntimeStatus.OutOfMemory
        runtime.free(runtime.alloc(1, 1 << 20))
        runtime.free(a)
        runtime.free(runtime.alloc(0, 1 << 20))

    def test_rule_81_no_device_at_all(self) -> None:
        runtime = SimRuntime(devices=0)
        assert runtime.device_count() == 0
        for use in (runtime.current_device, lambda: runtime.alloc(0, 1), lambda: runtime.stream_sync(0)):
            with raises_status(RuntimeStatus.InvalidDevice):
                use()

    # order that a test can force

    def test_rule_02_a_seed_gives_either_order(self) -> None:
        def program(stepper: Stepper) -> str:
            runtime, order = SimRuntime(scheduler=stepper), []
            for name in "ab":
                runtime.host_call(runtime.stream_create(0), lambda name=name: order.append(name))
            runtime.device_sync(0)
            return "".join(order)

        seen = [Stepper.run(program, seed=seed) for seed in range(30)]
        assert set(seen) == {"ab", "ba"}
        assert seen == [Stepper.run(program, seed=seed) for seed in range(30)], "a seed gives one order"

    def test_rule_08_of_ready_ops_the_urgent_one_starts_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_streams, "_IDLE_SECONDS", 0.0)

        class OneAfterAnother(Threads):
            targets: list[Callable[[], None]] = []  # noqa: RUF012

            def spawn(self, target: Callable[[], None], *, name: str) -> Task:
                self.targets.append(target)
                return threading.current_thread()

        scheduler = OneAfterAnother()
        runtime = SimRuntime(scheduler=scheduler)
        source, event, order = runtime.stream_create(0), runtime.event_create(0), list[int]()
        gate = runtime.gate(source, lambda: None)
        scheduler.targets.pop()()
        runtime.event_record(event, source)
        for priority in (1, -1, 0, 1, -1):
            s = runtime.stream_create(0, priority=priority)
            runtime.stream_wait_event(s, event)
            runtime.host_call(s, lambda p=priority: order.append(p))
        gate.open()
        for target in scheduler.targets:
            target()
        assert order == [-1, -1, 0, 1, 1]

    def test_latency_overlaps_between_streams_in_virtual_time(self) -> None:
        def program(stepper: Stepper) -> float:
            runtime = SimRuntime(scheduler=stepper, faults=[faults.rule("fill", latency=1.0)])
            a = runtime.alloc(0, 4096)
            for _ in range(8):
                s = runtime.stream_create(0)
                for _ in range(4):
                    runtime.fill_async(a, 1, 4096, s)
            runtime.device_sync(0)
            return stepper.now()

        assert 4.0 <= Stepper.run(program, seed=1) < 4.5

    # faults

    @pytest.fixture
    def data(self, tmp_path: Path) -> Iterator[int]:
        path = tmp_path / "data"
        path.write_bytes(b"d" * 65536)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        yield fd
        os.close(fd)

    def test_direct_io_reaches_device_memory(self, rig: Rig, data: int, tmp_path: Path) -> None:
        direct, a = rig.runtime.direct_io(), rig.device(65536)
        assert direct is not None
        assert direct.facts(0).memory_kinds == {MemoryKind.DEVICE}
        assert direct.read(0, data, a, 65536, 0) == 65536
        assert rig.get(a, 65536) == b"d" * 65536
        rig.put(a, b"e" * 4096)
        assert direct.write(0, data, a, 4096, 8192) == 4096
        assert (tmp_path / "data").read_bytes()[8192:12288] == b"e" * 4096
        counters = direct.counters(0)
        assert counters is not None
        assert (counters[0], counters[1]) == (65536, 4096)
        for address, device in ((rig.pinned(), 0), (rig.pageable(), 0), (a, 1), (a + 4096, 0)):
            with raises_status(RuntimeStatus.InvalidValue):
                direct.read(device, data, address, 65536, 0)

    def test_direct_counters_and_rules_miss_no_thread(self, rig: Rig, data: int) -> None:
        direct, a = rig.runtime.direct_io(), rig.device(12288)
        assert direct is not None

        def read() -> None:
            for _ in range(100):
                direct.read(0, data, a, 12288, 0)

        with faults.inject(op="read", short=0.9, every=2) as fault:
            for call in [rig.background(read) for _ in range(8)]:
                call.result()
        assert (fault.calls, fault.hits) == (800, 400)
        counters = direct.counters(0)
        assert counters is not None
        assert counters[0] == 400 * 12288 + 400 * 8192

    def test_direct_io_needs_memory_that_is_there(self, rig: Rig, data: int) -> None:
        direct, s = rig.runtime.direct_io(), rig.stream()
        assert direct is not None
        a = rig.runtime.alloc_async(0, 4096, s)
        with pytest.raises(DeviceError, match="UseBeforeAlloc"):
            direct.read(0, data, a, 4096, 0)
        rig.hold(s).open()
        assert direct.read(0, data, a, 4096, 0) == 4096

    @pytest.mark.parametrize("code", [errno.ENODEV, errno.EREMOTEIO, errno.EIO])
    def test_fault_errno_on_one_device_once(self, rig: Rig, data: int, code: int) -> None:
        direct, a, b = rig.runtime.direct_io(), rig.device(), rig.device(device=1)
        assert direct is not None
        with faults.inject(device="sim:0", op="read", error=code, times=1) as fault:
            assert direct.read(1, data, b, 4096, 0) == 4096
            with pytest.raises(OSError) as caught:
                direct.read(0, data, a, 4096, 0)
            assert caught.value.errno == code
            assert direct.read(0, data, a, 4096, 0) == 4096
            assert (fault.calls, fault.hits) == (2, 1)
        assert direct.write(0, data, a, 4096, 0) == 4096

    def test_fault_interrupted_every_second_call(self, rig: Rig, data: int) -> None:
        direct, a = rig.runtime.direct_io(), rig.device()
        assert direct is not None
        outcome = []
        with faults.inject(device="sim", op="write", error=errno.EINTR, every=2):
            for _ in range(4):
                try:
                    outcome.append(direct.write(0, data, a, 4096, 0))
                except InterruptedError:
                    outcome.append(-1)
        assert outcome == [-1, 4096, -1, 4096]

    def test_fault_short_transfers(self, rig: Rig, data: int) -> None:
        direct, a = rig.runtime.direct_io(), rig.device(65536)
        assert direct is not None
        with faults.inject(op="read", short=8192, times=1):
            assert direct.read(0, data, a, 65536, 0) == 8192
        with faults.inject(op="read", short=0.5):
            assert direct.read(0, data, a, 65536, 0) == 32768

    def test_fault_no_p2p(self, rig: Rig) -> None:
        direct = rig.runtime.direct_io()
        assert direct is not None
        with faults.inject(op="direct", device="sim:1", because="IOMMU groups differ"):
            assert direct.facts(0).available
            assert not direct.facts(1).available
            assert direct.facts(1).because == "IOMMU groups differ"
        assert direct.facts(1).available

    def test_fault_no_peer_access(self, rig: Rig) -> None:
        with faults.inject(op="peer"):
            assert not rig.runtime.can_access_peer(0, 1)
            with raises_status(RuntimeStatus.InvalidDevice):
                rig.runtime.enable_peer_access(0, 1)
        assert rig.runtime.can_access_peer(0, 1)

    def test_fault_allocation_fails(self, rig: Rig) -> None:
        with faults.inject(op="alloc", times=1, after=1):
            a = rig.runtime.alloc(0, 16)
            with pytest.raises(OutOfMemoryError):
                rig.runtime.alloc(0, 16)
            rig.runtime.free(a)
        with faults.inject(op="alloc_pinned"), pytest.raises(OutOfMemoryError):
            rig.runtime.alloc_pinned(16)
        assert rig.runtime.last_error() == RuntimeStatus.OutOfMemory

    def test_rule_80_a_fault_in_a_stream_op_comes_back_as_an_error(self, rig: Rig) -> None:
        s, a, b = rig.stream(), rig.device(), rig.device()
        with faults.inject(op="copy", error=RuntimeStatus.IllegalAddress, times=1):
            rig.runtime.copy_async(b, a, 4096, s)
            with raises_status(RuntimeStatus.IllegalAddress):
                rig.runtime.stream_sync(s)
            with (
                raises_status(RuntimeStatus.IllegalAddress),
                faults.inject(op="copy", error=RuntimeStatus.IllegalAddress),
            ):
                rig.runtime.copy(b, rig.pageable(), 16)
        rig.runtime.device_sync(0)

    def test_rule_78_a_lost_device_stays_lost(self, runtime: SimRuntime, rig: Rig) -> None:
        """All calls fail until a reset; the other device is untouched, and nobody hangs."""
        s, t, a = rig.stream(0), rig.stream(1), rig.device()
        gate = rig.hold(s)
        with faults.inject(op="fill", device="sim:0", lost=True):
            rig.runtime.fill_async(a, 1, 4096, s)
            waiting = rig.background(lambda: rig.runtime.stream_sync(s))
            gate.open()
            with raises_status(RuntimeStatus.LaunchFailure):
                waiting.result()
        for use in (
            lambda: rig.runtime.stream_sync(s),
            lambda: rig.runtime.device_sync(0),
            lambda: rig.runtime.alloc(0, 16),
            lambda: rig.runtime.fill_async(a, 1, 16, s),
        ):
            with raises_status(RuntimeStatus.LaunchFailure):
                use()
        rig.runtime.stream_sync(t)
        runtime.revive(0)
        rig.runtime.fill_async(a, 2, 4096, s)
        rig.runtime.stream_sync(s)
        assert rig.get(a) == b"\x02" * 4096
