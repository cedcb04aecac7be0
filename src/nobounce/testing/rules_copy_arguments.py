"""HIP rules 62-72: arguments of copies, and copies between devices."""

from __future__ import annotations

import pytest

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.base import NULL_STREAM, CopyKind
from nobounce.testing.requirements import DeclaredTests
from nobounce.testing.rig import Rig, raises_status

INVALID = RuntimeStatus.InvalidValue


class CopyArgumentRules(DeclaredTests):
    """What is refused, and what has no effect."""

    def test_rule_62_size_0_succeeds_and_enqueues_nothing(self, rig: Rig) -> None:
        """Whatever the pointers are, and with the stream held."""
        s, a, b = rig.stream(), rig.device(), rig.device()
        rig.runtime.copy(0, 0, 0)
        rig.runtime.copy_async(a, b, 0, s)
        rig.runtime.copy_async(0, 0, 0, s)
        rig.runtime.fill(0, 0, 0)
        rig.runtime.fill_async(0, 0, 0, s)
        rig.runtime.copy_batch([(0, 0, 0)], s)
        rig.peers.copy_peer(0, 0, 0, 0, 0)
        rig.hold(NULL_STREAM)
        rig.background(lambda: rig.runtime.copy(0, 0, 0)).result()
        assert rig.runtime.stream_query(s)

    def test_rule_63_null_pointers_are_refused(self, rig: Rig) -> None:
        s, a = rig.stream(), rig.device()
        for dst, src in ((0, a), (a, 0)):
            with raises_status(INVALID):
                rig.runtime.copy(dst, src, 16)
            with raises_status(INVALID):
                rig.runtime.copy_async(dst, src, 16, s)
        with raises_status(INVALID):
            rig.runtime.fill(0, 1, 16)

    def test_rule_64_unknown_kinds_are_refused(self, rig: Rig) -> None:
        """Outside 0..4."""
        s, a, b = rig.stream(), rig.device(), rig.device()
        for kind in (-1, 5, 99):
            with raises_status(RuntimeStatus.InvalidMemcpyDirection):
                rig.runtime.copy(a, b, 16, kind)  # type: ignore[arg-type]
            with raises_status(RuntimeStatus.InvalidMemcpyDirection):
                rig.runtime.copy_async(a, b, 16, s, kind)  # type: ignore[arg-type]

    def test_rule_65_the_default_kind_infers(self, rig: Rig) -> None:
        host, a, b, out = rig.pageable(), rig.device(), rig.device(), rig.pageable()
        rig.put(host, b"d" * 4096)
        rig.runtime.copy(a, host, 4096)
        rig.runtime.copy(b, a, 4096)
        rig.runtime.copy(out, b, 4096)
        assert rig.get(out) == b"d" * 4096

    def test_rule_65_a_kind_that_contradicts_is_refused(self, rig: Rig) -> None:
        s, a, b, host, pinned = rig.stream(), rig.device(), rig.device(), rig.pageable(), rig.pinned()
        for dst, src, kind in (
            (a, b, CopyKind.HOST_TO_DEVICE),
            (a, host, CopyKind.DEVICE_TO_HOST),
            (host, a, CopyKind.HOST_TO_HOST),
            (a, pinned, CopyKind.DEVICE_TO_DEVICE),
            (pinned, host, CopyKind.HOST_TO_DEVICE),
        ):
            with raises_status(INVALID):
                rig.runtime.copy(dst, src, 16, kind)
            with raises_status(INVALID):
                rig.runtime.copy_async(dst, src, 16, s, kind)
        rig.runtime.copy(a, host, 16, CopyKind.HOST_TO_DEVICE)
        rig.runtime.copy(host, a, 16, CopyKind.DEVICE_TO_HOST)
        rig.runtime.copy(a, b, 16, CopyKind.DEVICE_TO_DEVICE)
        rig.runtime.copy(pinned, host, 16, CopyKind.HOST_TO_HOST)

    def test_rule_66_copies_past_an_allocation_are_refused(self, rig: Rig) -> None:
        s, a, b, pinned, host = rig.stream(), rig.device(), rig.device(), rig.pinned(), rig.pageable(8192)
        for dst, src, nbytes in ((a, host, 4097), (host, a, 4097), (pinned, host, 4097), (a + 4090, b, 7)):
            with raises_status(INVALID):
                rig.runtime.copy(dst, src, nbytes)
            with raises_status(INVALID):
                rig.runtime.copy_async(dst, src, nbytes, s)
        with raises_status(INVALID):
            rig.runtime.fill(a + 1, 0, 4096)
        rig.runtime.copy(a + 4090, b, 6)

    def test_rule_67_copying_onto_itself(self, rig: Rig) -> None:
        """A no-op with the default kind; any other overlap is refused."""
        a = rig.device(8192)
        rig.put(a, b"z" * 8192)
        rig.runtime.copy(a, a, 8192)
        assert rig.get(a, 8192) == b"z" * 8192
        for dst, src in ((a, a + 1), (a + 4095, a)):
            with raises_status(INVALID):
                rig.runtime.copy(dst, src, 4096)
        rig.runtime.copy(a + 4096, a, 4096)

    def test_rule_69_null_stream_copies_wait_for_blocking_streams(self, rig: Rig) -> None:
        """Synchronous copies follow rule 15 first."""
        s, a, out = rig.stream(nonblocking=False), rig.device(), rig.pageable()
        gate = rig.hold(s)
        rig.runtime.fill_async(a, 6, 4096, s)
        waiting = rig.background(lambda: rig.runtime.copy(out, a, 4096))
        assert waiting.is_waiting()
        gate.open()
        waiting.result()
        assert rig.get(out) == b"\x06" * 4096

    def test_rule_72_a_batch_is_validated_as_a_whole(self, rig: Rig) -> None:
        """The index of the failure is reported, nothing is copied; a good batch is one op in order."""
        s, a, b = rig.stream(), rig.device(), rig.device()
        rig.put(a, b"b" * 4096)
        bad = [(b, a, 1024), (b + 1024, a + 1024, 1024), (0, a, 16)]
        with pytest.raises(DeviceError, match="copy 2") as caught:
            rig.runtime.copy_batch(bad, s)
        assert caught.value.status is INVALID
        rig.runtime.stream_sync(s)
        assert rig.get(b) == bytes(4096)
        gate = rig.hold(s)
        rig.runtime.copy_batch([(b + i * 1024, a + i * 1024, 1024) for i in range(4)], s)
        done = rig.recorded(s)
        assert not rig.runtime.event_query(done)
        gate.open()
        rig.runtime.event_sync(done)
        assert rig.get(b) == b"b" * 4096

    def test_rule_72_a_relay_s_copies_of_one_call_are_ordered_as_one(self, rig: Rig) -> None:
        """What was queued before is over, and what is recorded behind them stands for all of them."""
        s, a, b = rig.stream(), rig.device(), rig.device()
        host = rig.pinned()
        rig.put(a, b"a" * 4096)
        rig.put(host, bytes(range(256)) * 16)
        places = [3, 0, 2, 1]
        gate = rig.hold(s)
        with rig.runtime.copy_calls(0) as calls:
            calls.copy_many([(a, host, 4096)], s)
            calls.copy_many([(b + i * 1024, host + i * 1024, 1024) for i in places], s)
            calls.copy_many([(a + i * 1024, b + i * 1024, 1024) for i in places], s)
        done = rig.recorded(s)
        assert not rig.runtime.event_query(done)
        gate.open()
        rig.runtime.event_sync(done)
        assert rig.get(a) == rig.get(b) == bytes(range(256)) * 16
