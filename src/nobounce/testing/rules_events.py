"""HIP rules 24-34: events."""

from __future__ import annotations

from nobounce.errors import RuntimeStatus
from nobounce.testing.requirements import DeclaredTests, requires
from nobounce.testing.rig import Rig, raises_status

BAD_HANDLE = RuntimeStatus.InvalidResourceHandle


class EventRules(DeclaredTests):
    """Snapshots, waiting and time."""

    def test_rule_24_an_event_never_recorded_is_complete(self, rig: Rig) -> None:
        """Query and synchronise succeed at once; a wait for it is a no-op."""
        event, s = rig.event(), rig.stream()
        assert rig.runtime.event_query(event)
        rig.runtime.event_sync(event)
        rig.runtime.stream_wait_event(s, event)
        assert rig.runtime.stream_query(s)

    def test_rule_25_record_snapshots_the_tail(self, rig: Rig) -> None:
        """Complete when the ops before the record have finished; later ops do not matter."""
        s = rig.stream()
        first = rig.hold(s)
        event = rig.recorded(s)
        assert not rig.runtime.event_query(event)
        second = rig.hold_later(s)
        first.open()
        rig.background(lambda: rig.runtime.event_sync(event)).result()
        assert rig.runtime.event_query(event)
        assert not rig.runtime.stream_query(s)
        second.open()

    def test_rule_26_a_second_record_replaces_the_snapshot(self, rig: Rig) -> None:
        """A wait issued before the second record keeps waiting for the first."""
        s, t = rig.stream(), rig.stream()
        first = rig.hold(s)
        event = rig.recorded(s)
        rig.runtime.stream_wait_event(t, event)
        second = rig.hold_later(s)
        rig.runtime.event_record(event, s)
        first.open()
        rig.background(lambda: rig.runtime.stream_sync(t)).result()
        assert not rig.runtime.event_query(event)
        second.open()
        rig.runtime.event_sync(event)

    def test_rule_27_event_synchronize_blocks_one_thread(self, rig: Rig) -> None:
        """Query tells success or NotReady; synchronise blocks only the calling host thread."""
        s, t = rig.stream(), rig.stream()
        gate = rig.hold(s)
        event = rig.recorded(s)
        waiting = rig.background(lambda: rig.runtime.event_sync(event))
        assert waiting.is_waiting()
        rig.runtime.host_call(t, lambda: None)
        rig.runtime.stream_sync(t)
        assert not rig.runtime.event_query(event)
        gate.open()
        waiting.result()
        assert rig.runtime.event_query(event)

    def test_rule_28_elapsed_in_milliseconds_may_be_negative(self, rig: Rig) -> None:
        s = rig.stream()
        a = rig.recorded(s)
        rig.runtime.host_call(s, lambda: rig.runtime.scheduler.sleep(0.003))
        b = rig.recorded(s)
        rig.runtime.stream_sync(s)
        assert 2.5 <= rig.timing.event_elapsed(a, b) < 30_000
        assert rig.timing.event_elapsed(b, a) == -rig.timing.event_elapsed(a, b)
        assert rig.timing.event_elapsed(a, a) == 0.0

    def test_rule_28_elapsed_needs_recorded_and_timed_events(self, rig: Rig) -> None:
        """Not recorded, or made without timing: InvalidHandle."""
        s = rig.stream()
        a, untimed = rig.recorded(s), rig.event(timing=False)
        rig.runtime.event_record(untimed, s)
        rig.runtime.stream_sync(s)
        for pair in ((a, rig.event()), (rig.event(), a), (a, untimed), (untimed, a)):
            with raises_status(RuntimeStatus.InvalidHandle):
                rig.timing.event_elapsed(*pair)

    def test_rule_28_elapsed_of_a_pending_event_is_not_ready(self, rig: Rig) -> None:
        s = rig.stream()
        a = rig.recorded(s)
        gate = rig.hold(s)
        b = rig.recorded(s)
        with raises_status(RuntimeStatus.NotReady):
            rig.timing.event_elapsed(a, b)
        assert rig.last_errors.peek_last_error() == 0
        gate.open()

    @requires(devices=2)
    def test_rule_28_elapsed_refuses_events_of_two_devices(self, rig: Rig) -> None:
        a = rig.recorded(rig.stream(0))
        b = rig.recorded(rig.stream(1), device=1)
        rig.runtime.event_sync(a)
        rig.runtime.event_sync(b)
        with raises_status(BAD_HANDLE):
            rig.timing.event_elapsed(a, b)

    def test_rule_29_time_is_taken_when_the_marker_is_reached(self, rig: Rig) -> None:
        """Not at the call: both records here are submitted before the stream is let go."""
        s = rig.stream()
        a = rig.recorded(s)
        gate = rig.hold(s)
        b = rig.recorded(s)
        rig.runtime.scheduler.sleep(0.004)
        gate.open()
        rig.runtime.event_sync(b)
        assert rig.timing.event_elapsed(a, b) >= 3.5

    def test_rule_30_interprocess_needs_timing_off(self, rig: Rig) -> None:
        with raises_status(RuntimeStatus.InvalidValue):
            rig.runtime.event_create(0, timing=True, interprocess=True)
        with raises_status(RuntimeStatus.InvalidDevice):
            rig.runtime.event_create(rig.runtime.device_count())

    def test_rule_31_destroy_of_a_pending_event(self, rig: Rig) -> None:
        """It returns at once, and streams that wait for the event are released properly."""
        s, t = rig.stream(), rig.stream()
        gate = rig.hold(s)
        event = rig.runtime.event_create(0)
        rig.runtime.event_record(event, s)
        rig.runtime.stream_wait_event(t, event)
        rig.background(lambda: rig.runtime.event_destroy(event)).result()
        assert not rig.runtime.stream_query(t)
        gate.open()
        rig.background(lambda: rig.runtime.stream_sync(t)).result()
        with raises_status(BAD_HANDLE):
            rig.runtime.event_query(event)

    @requires(devices=2)
    def test_rule_32_record_on_another_device_is_refused(self, rig: Rig) -> None:
        with raises_status(BAD_HANDLE):
            rig.runtime.event_record(rig.event(0), rig.stream(1))

    def test_rule_33_a_null_event_is_refused(self, rig: Rig) -> None:
        s = rig.stream()
        with raises_status(BAD_HANDLE):
            rig.runtime.event_record(0, s)
        with raises_status(BAD_HANDLE):
            rig.runtime.stream_wait_event(s, 0)

    def test_rule_34_interprocess_events_carry_no_timing(self, rig: Rig) -> None:
        s = rig.stream()
        a, b = rig.recorded(s), rig.event(timing=False, interprocess=True)
        rig.runtime.event_record(b, s)
        rig.runtime.event_sync(b)
        with raises_status(RuntimeStatus.InvalidHandle):
            rig.timing.event_elapsed(a, b)
