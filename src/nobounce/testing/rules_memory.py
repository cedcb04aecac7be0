"""HIP rules 113, 118 and 128-133: memory. And the gate, which every runtime has to supply."""

from __future__ import annotations

import threading

from nobounce.errors import RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.testing.requirements import DeclaredTests
from nobounce.testing.rig import PATIENCE, Rig, raises_status

INVALID = RuntimeStatus.InvalidValue


class MemoryRules(DeclaredTests):
    """Allocation, freeing, and what a pointer is."""

    def test_rule_118_free_synchronises_the_device(self, rig: Rig) -> None:
        s = rig.stream()
        a = rig.runtime.alloc(0, 4096)
        gate = rig.hold(s)
        freeing = rig.background(lambda: rig.runtime.free(a))
        assert freeing.is_waiting()
        gate.open()
        freeing.result()

    def test_rule_128_pinned_allocation_of_0_bytes(self, rig: Rig) -> None:
        assert rig.runtime.alloc_pinned(0) == 0
        assert rig.runtime.alloc(0, 0) == 0

    def test_rule_129_bad_frees_are_refused(self, rig: Rig) -> None:
        """An unknown pointer, a second free: InvalidValue; null is fine."""
        rig.runtime.free(0)
        rig.runtime.free_pinned(0)
        a, p = rig.runtime.alloc(0, 4096), rig.runtime.alloc_pinned(4096)
        with raises_status(INVALID):
            rig.runtime.free(a + 16)
        with raises_status(INVALID):
            rig.runtime.free(rig.pageable())
        with raises_status(INVALID):
            rig.runtime.free_pinned(rig.pageable())
        rig.runtime.free(a)
        rig.runtime.free_pinned(p)
        with raises_status(INVALID):
            rig.runtime.free(a)
        with raises_status(INVALID):
            rig.runtime.free_pinned(p)

    def test_rule_130_freeing_pinned_memory_synchronises(self, rig: Rig) -> None:
        s, p = rig.stream(), rig.runtime.alloc_pinned(4096)
        gate = rig.hold(s)
        freeing = rig.background(lambda: rig.runtime.free_pinned(p))
        assert freeing.is_waiting()
        gate.open()
        freeing.result()

    def test_rule_133_pointer_info(self, rig: Rig) -> None:
        a, p, host = rig.device(8192), rig.pinned(), rig.pageable()
        info = rig.runtime.pointer_info(a + 8191)
        assert (info.kind, info.device, info.base, info.nbytes) == (MemoryKind.DEVICE, 0, a, 8192)
        assert rig.runtime.pointer_info(p + 1).kind is MemoryKind.PINNED
        assert rig.runtime.pointer_info(p + 1).base == p
        assert rig.runtime.pointer_info(host).kind is MemoryKind.PAGEABLE

    def test_device_memory_is_aligned(self, rig: Rig) -> None:
        """To 256 bytes at least, and pinned memory to a page."""
        for nbytes in (1, 4096, 3 << 20):
            assert rig.device(nbytes) % 256 == 0
        assert rig.pinned(1) % 4096 == 0

    def test_C98_the_callers_current_device_is_kept(self, rig: Rig) -> None:  # noqa: N802 - a case's name
        """Copies and fills of memory on another device than the current one go there,
        and change nothing here."""
        last = rig.runtime.device_count() - 1
        a = rig.device(device=last)
        rig.runtime.set_current_device(0)
        rig.runtime.fill(a, 1, 4096)
        assert rig.get(a) == b"\x01" * 4096
        assert rig.runtime.current_device() == 0
        assert rig.background(rig.runtime.current_device).result() == 0

    # gates

    def test_a_gate_is_reached_when_all_before_is_done(self, rig: Rig) -> None:
        s = rig.stream()
        reached = threading.Event()
        first = rig.hold(s)
        second = rig.hold_later(s, reached.set)
        assert not reached.wait(0.03)
        first.open()
        assert reached.wait(PATIENCE)
        assert not rig.runtime.stream_query(s)
        second.open()
        second.open()
        rig.runtime.stream_sync(s)

    def test_a_gate_opened_early_holds_nothing(self, rig: Rig) -> None:
        s = rig.stream()
        reached = threading.Event()
        first = rig.hold(s)
        second = rig.hold_later(s, reached.set)
        second.open()
        assert not rig.runtime.stream_query(s)
        first.open()
        rig.background(lambda: rig.runtime.stream_sync(s)).result()
        assert reached.wait(PATIENCE)

    def test_a_gate_may_be_opened_from_any_thread(self, rig: Rig) -> None:
        s, t = rig.stream(), rig.stream()
        gate = rig.hold(s)
        rig.runtime.host_call(t, gate.open)
        rig.background(lambda: rig.runtime.stream_sync(s)).result()

    def test_many_gates_and_streams_at_once(self, rig: Rig) -> None:
        streams = [rig.stream() for _ in range(32)]
        gates = [rig.hold(s) for s in streams]
        a = rig.runtime
        for s in streams:
            assert not a.stream_query(s)
        for gate in gates:
            gate.open()
        a.device_sync(0)
