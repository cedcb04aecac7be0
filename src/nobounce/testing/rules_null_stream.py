"""HIP rules 15-22: the legacy null stream, per-thread streams, non-blocking streams."""

from __future__ import annotations

import threading

from nobounce.testing.requirements import DeclaredTests, requires
from nobounce.testing.rig import Rig

NULL, LEGACY, PER_THREAD = 0, 1, 2


class NullStreamRules(DeclaredTests):
    """Who waits for the null stream, and for whom it waits."""

    def test_rule_15_null_waits_for_blocking_streams(self, rig: Rig) -> None:
        """An op on the null stream waits for all prior ops of every blocking stream of that device."""
        s, t = rig.stream(nonblocking=False), rig.stream(nonblocking=False)
        order: list[str] = []
        first, second = rig.hold(s), rig.hold(t)
        rig.runtime.host_call(s, lambda: order.append("s"))
        rig.runtime.host_call(t, lambda: order.append("t"))
        rig.runtime.host_call(NULL, lambda: order.append("null"))
        done = rig.recorded(NULL)
        first.open()
        assert rig.background(lambda: rig.runtime.event_sync(done)).is_waiting()
        assert "null" not in order
        second.open()
        rig.runtime.event_sync(done)
        assert order[-1] == "null"
        assert sorted(order[:2]) == ["s", "t"]

    def test_rule_15_blocking_streams_wait_for_null(self, rig: Rig) -> None:
        """Every later op of a blocking stream waits for the null stream."""
        s = rig.stream(nonblocking=False)
        ran = threading.Event()
        gate = rig.hold(NULL)
        rig.runtime.host_call(s, ran.set)
        waiting = rig.background(lambda: rig.runtime.stream_sync(s))
        assert waiting.is_waiting()
        assert not ran.is_set()
        gate.open()
        waiting.result()
        assert ran.is_set()

    def test_rule_16_nonblocking_streams_are_excluded_both_ways(self, rig: Rig) -> None:
        s = rig.stream(nonblocking=True)
        assert rig.stream_traits.stream_is_nonblocking(s)
        gate = rig.hold(s)
        ran = threading.Event()
        rig.runtime.host_call(NULL, ran.set)
        rig.background(lambda: rig.runtime.stream_sync(NULL)).result()
        assert ran.is_set()
        gate.open()
        rig.runtime.stream_sync(s)
        gate = rig.hold(NULL)
        again = threading.Event()
        rig.runtime.host_call(s, again.set)
        rig.background(lambda: rig.runtime.stream_sync(s)).result()
        assert again.is_set()
        assert not rig.runtime.stream_query(NULL)

    def test_rule_17_synchronize_null_waits_for_blocking_streams(self, rig: Rig) -> None:
        """It waits for the null stream and all blocking streams of the current device,
        not for non-blocking ones."""
        blocking, other = rig.stream(nonblocking=False), rig.stream(nonblocking=True)
        rig.hold(other)
        rig.background(lambda: rig.runtime.stream_sync(NULL)).result()
        gate = rig.hold(blocking)
        waiting = rig.background(lambda: rig.runtime.stream_sync(NULL))
        assert waiting.is_waiting()
        gate.open()
        waiting.result()
        assert not rig.runtime.stream_query(other)

    @requires(devices=2)
    def test_rule_17_synchronize_null_is_for_the_current_device(self, rig: Rig) -> None:
        s = rig.stream(1, nonblocking=False)
        gate = rig.hold(s)
        rig.runtime.set_current_device(0)
        rig.background(lambda: rig.runtime.stream_sync(NULL)).result()

        def on_device_1() -> None:
            rig.runtime.set_current_device(1)
            rig.runtime.stream_sync(NULL)

        waiting = rig.background(on_device_1)
        assert waiting.is_waiting()
        gate.open()
        waiting.result()

    def test_rule_18_query_null_sees_blocking_streams(self, rig: Rig) -> None:
        """Query of the null stream is NotReady while a blocking stream has work."""
        s = rig.stream(nonblocking=False)
        assert rig.runtime.stream_query(NULL)
        gate = rig.hold(s)
        assert not rig.runtime.stream_query(NULL)
        gate.open()
        rig.runtime.stream_sync(s)
        assert rig.runtime.stream_query(NULL)

    def test_rule_19_each_thread_has_its_own_default_stream(self, rig: Rig) -> None:
        """One per host thread and device, blocking."""
        gate = rig.hold(PER_THREAD)
        assert not rig.runtime.stream_query(PER_THREAD)
        assert rig.background(lambda: rig.runtime.stream_query(PER_THREAD)).result()
        assert not rig.stream_traits.stream_is_nonblocking(PER_THREAD)
        assert not rig.runtime.stream_query(NULL)
        gate.open()
        rig.runtime.stream_sync(PER_THREAD)
        gate = rig.hold(NULL)
        rig.runtime.host_call(PER_THREAD, lambda: None)
        assert not rig.runtime.stream_query(PER_THREAD)

    def test_rule_20_device_synchronize_waits_for_all(self, rig: Rig) -> None:
        """For all streams of the device, non-blocking ones included."""
        for nonblocking in (True, False):
            s = rig.stream(nonblocking=nonblocking)
            gate = rig.hold(s)
            waiting = rig.background(lambda: rig.runtime.device_sync(0))
            assert waiting.is_waiting()
            gate.open()
            waiting.result()

    def test_rule_21_handles_0_1_2_are_accepted(self, rig: Rig) -> None:
        """0 is null, 1 legacy (the same stream), 2 per-thread."""
        a = rig.device()
        for value, handle in enumerate((NULL, LEGACY, PER_THREAD), 1):
            rig.runtime.fill_async(a, value, 4096, handle)
            rig.runtime.stream_sync(handle)
            assert rig.get(a) == bytes([value]) * 4096
            assert rig.runtime.stream_device(handle) == 0
        rig.hold(NULL)
        assert not rig.runtime.stream_query(LEGACY)

    def test_rule_22_wait_event_adds_no_null_dependency(self, rig: Rig) -> None:
        """A wait on a blocking stream waits for that event only."""
        s, source = rig.stream(nonblocking=False), rig.stream()
        gate = rig.hold(source)
        event = rig.recorded(source)
        rig.runtime.stream_wait_event(s, event)
        assert not rig.runtime.stream_query(s)
        gate.open()
        rig.runtime.stream_sync(s)
        gate = rig.hold(source)
        event = rig.recorded(source)
        rig.hold(NULL)
        rig.runtime.stream_wait_event(s, event)
        assert not rig.runtime.stream_query(s)
        gate.open()
        rig.background(lambda: rig.runtime.stream_sync(s)).result()
        assert not rig.runtime.event_query(rig.recorded(NULL))
