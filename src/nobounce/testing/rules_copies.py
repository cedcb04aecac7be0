"""HIP rules 46-60: which copies and fills block the host. The stream is held, so a call
that waits cannot return."""

from __future__ import annotations

from collections.abc import Callable

from nobounce.runtimes.base import NULL_STREAM
from nobounce.testing.requirements import DeclaredTests, requires
from nobounce.testing.rig import Rig

NBYTES = 4096
OLD, NEW = b"o" * NBYTES, b"n" * NBYTES


class CopyRules(DeclaredTests):
    """The table of who blocks the host."""

    def _blocks(
        self, rig: Rig, stream: int, call: Callable[[], None], dst: int, expected: bytes = NEW
    ) -> None:
        """The call waits for the held stream, and is complete when it returns."""
        gate = rig.hold(stream)
        waiting = rig.background(call)
        assert waiting.is_waiting()
        gate.open()
        waiting.result()
        assert rig.get(dst, NBYTES) == expected

    def _at_once(
        self, rig: Rig, stream: int, call: Callable[[], None], dst: int, expected: bytes = NEW
    ) -> None:
        """The call returns while its stream is held, and has its effect in stream order."""
        gate = rig.hold(stream)
        rig.background(call).result()
        assert not rig.runtime.stream_query(stream)
        gate.open()
        rig.runtime.stream_sync(stream)
        assert rig.get(dst, NBYTES) == expected

    def _loaded(self, rig: Rig, address: int) -> int:
        rig.put(address, NEW)
        return address

    # synchronous

    def test_rule_46_pageable_to_device_waits(self, rig: Rig) -> None:
        """Returns after prior stream work and after the source was consumed."""
        a, src = rig.device(), self._loaded(rig, rig.pageable())
        old = rig.pageable()
        rig.put(old, OLD)
        gate = rig.hold(NULL_STREAM)

        def copy_then_overwrite() -> None:
            rig.runtime.copy(a, src, NBYTES)
            rig.runtime.copy(src, old, NBYTES)

        waiting = rig.background(copy_then_overwrite)
        assert waiting.is_waiting()
        gate.open()
        waiting.result()
        assert rig.get(a) == NEW

    def test_rule_47_pinned_to_device_completes(self, rig: Rig) -> None:
        a, src = rig.device(), self._loaded(rig, rig.pinned())
        self._blocks(rig, NULL_STREAM, lambda: rig.runtime.copy(a, src, NBYTES), a)

    def test_rule_48_device_to_host_completes(self, rig: Rig) -> None:
        src = self._loaded(rig, rig.device())
        for dst in (rig.pageable(), rig.pinned()):
            self._blocks(rig, NULL_STREAM, lambda dst=dst: rig.runtime.copy(dst, src, NBYTES), dst)  # type: ignore[misc]

    def test_rule_49_device_to_device_returns_at_once(self, rig: Rig) -> None:
        a, src = rig.device(), self._loaded(rig, rig.device())
        self._at_once(rig, NULL_STREAM, lambda: rig.runtime.copy(a, src, NBYTES), a)

    @requires("peers", devices=2)
    def test_rule_50_peer_copies_return_at_once(self, rig: Rig) -> None:
        """The null stream is NotReady after the call returned."""
        a, src = rig.device(device=1), self._loaded(rig, rig.device(device=0))
        self._at_once(rig, NULL_STREAM, lambda: rig.runtime.copy(a, src, NBYTES), a)
        b = rig.device(device=1)
        self._at_once(rig, NULL_STREAM, lambda: rig.peers.copy_peer(b, 1, src, 0, NBYTES), b)
        c, s = rig.device(device=1), rig.stream(0)
        self._at_once(rig, s, lambda: rig.peers.copy_peer(c, 1, src, 0, NBYTES, s), c)

    def test_rule_51_host_to_host_drains_the_stream(self, rig: Rig) -> None:
        """Pinned memory included."""
        for make in (rig.pageable, rig.pinned):
            dst, src = make(), self._loaded(rig, make())
            self._blocks(rig, NULL_STREAM, lambda d=dst, s=src: rig.runtime.copy(d, s, NBYTES), dst)  # type: ignore[misc]

    # asynchronous

    def test_rule_52_a_pageable_source_is_consumed_before_return(self, rig: Rig) -> None:
        """Whether the call waits is the runtime's choice; the source may be
        overwritten when it has returned."""
        s, a = rig.stream(), rig.device()
        src, old = self._loaded(rig, rig.pageable()), rig.pageable()
        gate = rig.hold(s)
        call = rig.background(lambda: rig.runtime.copy_async(a, src, NBYTES, s))
        if call.is_waiting():
            gate.open()
        call.result()
        t = rig.stream()
        rig.runtime.copy_async(src, old, NBYTES, t)
        gate.open()
        rig.runtime.stream_sync(s)
        assert rig.get(a) == NEW

    def test_rule_53_pinned_copies_return_at_once(self, rig: Rig) -> None:
        s, a = rig.stream(), rig.device()
        src = self._loaded(rig, rig.pinned())
        self._at_once(rig, s, lambda: rig.runtime.copy_async(a, src, NBYTES, s), a)
        dst = rig.pinned()
        self._at_once(rig, s, lambda: rig.runtime.copy_async(dst, a, NBYTES, s), dst)

    def test_rule_54_device_to_pageable_completes(self, rig: Rig) -> None:
        s, src, dst = rig.stream(), self._loaded(rig, rig.device()), rig.pageable()
        self._blocks(rig, s, lambda: rig.runtime.copy_async(dst, src, NBYTES, s), dst)

    def test_rule_55_device_to_device_async_returns_at_once(self, rig: Rig) -> None:
        s, a, src = rig.stream(), rig.device(), self._loaded(rig, rig.device())
        self._at_once(rig, s, lambda: rig.runtime.copy_async(a, src, NBYTES, s), a)

    def test_rule_56_host_to_host_async_completes(self, rig: Rig) -> None:
        s, dst, src = rig.stream(), rig.pageable(), self._loaded(rig, rig.pageable())
        self._blocks(rig, s, lambda: rig.runtime.copy_async(dst, src, NBYTES, s), dst)

    @requires("managed")
    def test_rule_57_managed_copies_are_synchronous(self, rig: Rig) -> None:
        a, m = rig.device(), self._loaded(rig, rig.managed())
        self._blocks(rig, NULL_STREAM, lambda: rig.runtime.copy(a, m, NBYTES), a)
        m2 = rig.managed()
        self._blocks(rig, NULL_STREAM, lambda: rig.runtime.copy(m2, a, NBYTES), m2)

    # fills

    def test_rule_58_fill_of_device_memory_returns_at_once(self, rig: Rig) -> None:
        a = rig.device()
        self._at_once(rig, NULL_STREAM, lambda: rig.runtime.fill(a, ord("n"), NBYTES), a)

    @requires("pinned")
    def test_rule_59_fill_of_pinned_memory_completes(self, rig: Rig) -> None:
        a = rig.pinned()
        self._blocks(rig, NULL_STREAM, lambda: rig.runtime.fill(a, ord("n"), NBYTES), a)

    @requires("managed")
    def test_rule_59_fill_of_managed_memory_completes(self, rig: Rig) -> None:
        a = rig.managed()
        self._blocks(rig, NULL_STREAM, lambda: rig.runtime.fill(a, ord("n"), NBYTES), a)

    def test_rule_60_fill_async_returns_at_once(self, rig: Rig) -> None:
        s = rig.stream()
        for a in (rig.device(), rig.pinned()):
            self._at_once(rig, s, lambda a=a: rig.runtime.fill_async(a, ord("n"), NBYTES, s), a)  # type: ignore[misc]

    def test_rule_60_fills_of_1_2_and_4_bytes(self, rig: Rig) -> None:
        s, a = rig.stream(), rig.device(3 << 13)
        for width, value in ((1, 0xAB), (2, 0x1234), (4, 0xDEADBEEF)):
            rig.runtime.fill_async(a + 4, value, (3 << 13) - 4, s, width)
            rig.runtime.stream_sync(s)
            assert rig.get(a + 4, (3 << 13) - 4) == value.to_bytes(width, "little") * (
                ((3 << 13) - 4) // width
            )
        assert rig.get(a, 4) == bytes(4)
