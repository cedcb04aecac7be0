"""The optional powers of a runtime (runtimes/powers.py): a class of tests for each, left out
where it is not declared."""

from __future__ import annotations

import ctypes

from nobounce.errors import RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import NULL_STREAM
from nobounce.testing.requirements import DeclaredTests, requires
from nobounce.testing.rig import Rig, raises_status

INVALID = RuntimeStatus.InvalidValue


class OrderedMemoryRules(DeclaredTests):
    """Memory allocated and freed in stream order."""

    @requires("stream_ordered_alloc")
    def test_rule_113_stream_ordered_memory_is_used_in_order(self, rig: Rig) -> None:
        """The address is there at once, for ops ordered after the allocation;
        another stream needs an event."""
        s, t, out = rig.stream(), rig.stream(), rig.pinned()
        gate = rig.hold(s)
        a = rig.background(lambda: rig.ordered_memory.alloc_async(0, 4096, s)).result()
        rig.runtime.fill_async(a, 2, 4096, s)
        rig.runtime.stream_wait_event(t, rig.recorded(s))
        rig.runtime.copy_async(out, a, 4096, t)
        rig.ordered_memory.free_async(a, t)
        gate.open()
        rig.runtime.stream_sync(t)
        assert rig.get(out) == b"\x02" * 4096

    @requires("stream_ordered_alloc")
    def test_rule_118_free_async_waits_for_nobody(self, rig: Rig) -> None:
        s = rig.stream()
        a = rig.ordered_memory.alloc_async(0, 4096, s)
        b = rig.ordered_memory.alloc_async(0, 4096, s)
        gate = rig.hold(s)
        rig.background(lambda: rig.ordered_memory.free_async(a, s)).result()
        rig.background(lambda: rig.runtime.free(b)).result()
        rig.ordered_memory.free_async(0, s)
        gate.open()
        rig.runtime.stream_sync(s)


class ManagedMemoryRules(DeclaredTests):
    """Memory that host and devices reach."""

    @requires("managed")
    def test_managed_memory_is_the_hosts_too(self, rig: Rig) -> None:
        m, s = rig.managed(), rig.stream()
        assert rig.runtime.pointer_info(m).kind is MemoryKind.MANAGED
        rig.runtime.fill_async(m, 1, 4096, s)
        rig.runtime.stream_sync(s)
        assert ctypes.string_at(m, 4096) == b"\x01" * 4096


class HostRegistrationRules(DeclaredTests):
    """Pinning of memory that is there."""

    @requires("host_register")
    def test_rule_128_registered_memory_is_pinned(self, rig: Rig) -> None:
        host = rig.pageable(16384)
        page = -(-host // 4096) * 4096
        rig.host_registration.register_host(page, 4096)
        assert rig.runtime.pointer_info(page + 100).kind is MemoryKind.PINNED
        with raises_status(RuntimeStatus.HostMemoryAlreadyRegistered):
            rig.host_registration.register_host(page, 4096)
        with raises_status(INVALID):
            rig.runtime.free_pinned(page)
        rig.host_registration.unregister_host(page)
        assert rig.runtime.pointer_info(page).kind is MemoryKind.PAGEABLE
        with raises_status(RuntimeStatus.HostMemoryNotRegistered):
            rig.host_registration.unregister_host(page)


class PeerRules(DeclaredTests):
    """Devices that reach each other's memory."""

    @requires("peers", devices=2)
    def test_rule_131_peer_access(self, rig: Rig) -> None:
        assert not rig.peers.can_access_peer(0, 0)
        assert rig.peers.can_access_peer(0, 1)
        with raises_status(RuntimeStatus.InvalidDevice):
            rig.peers.can_access_peer(0, 999)
        with raises_status(RuntimeStatus.PeerAccessNotEnabled):
            rig.peers.disable_peer_access(0, 1)
        with raises_status(INVALID):
            rig.peers.enable_peer_access(0, 1, flags=1)
        rig.peers.enable_peer_access(0, 1)
        with raises_status(RuntimeStatus.PeerAccessAlreadyEnabled):
            rig.peers.enable_peer_access(0, 1)
        with raises_status(RuntimeStatus.PeerAccessNotEnabled):
            rig.peers.disable_peer_access(1, 0)
        rig.peers.disable_peer_access(0, 1)

    @requires("peers", devices=2)
    def test_rule_70_peer_copies_need_no_peer_access(self, rig: Rig) -> None:
        """The result is the same with and without."""
        src = rig.device(device=0)
        rig.put(src, b"p" * 4096)
        for enable in (False, True):
            dst = rig.device(device=1)
            if enable:
                rig.peers.enable_peer_access(0, 1)
            rig.peers.copy_peer(dst, 1, src, 0, 4096)
            assert rig.get(dst) == b"p" * 4096
        rig.peers.disable_peer_access(0, 1)

    @requires("peers", devices=2)
    def test_rule_71_peer_copies_are_ordered_on_the_destination(self, rig: Rig) -> None:
        """Later null-stream work of the destination device sees the data."""
        src, dst, out = rig.device(device=0), rig.device(device=1), rig.pageable()
        rig.put(src, b"q" * 4096)
        gate = rig.hold(NULL_STREAM)
        rig.background(lambda: rig.peers.copy_peer(dst, 1, src, 0, 4096)).result()

        def read_on_1() -> None:
            rig.runtime.set_current_device(1)
            rig.runtime.copy(out, dst, 4096)

        reading = rig.background(read_on_1)
        assert reading.is_waiting()
        gate.open()
        reading.result()
        assert rig.get(out) == b"q" * 4096
