"""HIP rules 73-81: errors."""

from __future__ import annotations

import pytest

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.testing.requirements import DeclaredTests
from nobounce.testing.rig import Rig, raises_status


def _raise() -> None:
    raise ArithmeticError("in a stream")


class ErrorRules(DeclaredTests):
    """Who hears of an error, and how often."""

    def test_rule_74_success_does_not_clear_the_last_error(self, rig: Rig) -> None:
        """It is the last failed call of this thread, until it is asked for."""
        with raises_status(RuntimeStatus.InvalidDevice):
            rig.runtime.set_current_device(999)
        rig.runtime.device_sync(0)
        assert rig.last_errors.peek_last_error() == RuntimeStatus.InvalidDevice
        assert rig.last_errors.last_error() == RuntimeStatus.InvalidDevice
        assert rig.last_errors.last_error() == 0

    def test_rule_76_another_threads_error_is_invisible(self, rig: Rig) -> None:
        with raises_status(RuntimeStatus.InvalidDevice):
            rig.background(lambda: rig.runtime.set_current_device(999)).result()
        assert rig.last_errors.peek_last_error() == 0

    def test_rule_78_an_asynchronous_error_is_delivered_once(self, rig: Rig) -> None:
        """By the next synchronising call on that stream, that device, or an event after it."""
        s, t = rig.stream(), rig.stream()
        event = rig.event()
        for sync, what in (
            (rig.runtime.stream_sync, s),
            (rig.runtime.device_sync, 0),
            (rig.runtime.event_sync, event),
        ):
            rig.runtime.host_call(s, _raise)
            rig.runtime.event_record(event, s)
            rig.runtime.stream_sync(t)
            with pytest.raises(DeviceError, match="ArithmeticError"):
                sync(what)
            sync(what)
            rig.runtime.stream_sync(s)
            rig.runtime.device_sync(0)

    def test_rule_78_an_event_before_the_failure_delivers_nothing(self, rig: Rig) -> None:
        s = rig.stream()
        before = rig.recorded(s)
        rig.runtime.host_call(s, _raise)
        after = rig.recorded(s)
        while not rig.runtime.event_query(after):
            rig.runtime.scheduler.checkpoint()
        rig.runtime.event_sync(before)
        with pytest.raises(DeviceError):
            rig.runtime.event_sync(after)

    def test_rule_79_not_ready_and_probes_set_no_error(self, rig: Rig) -> None:
        s = rig.stream()
        start = rig.recorded(s)
        gate = rig.hold(s)
        event = rig.recorded(s)
        assert not rig.runtime.stream_query(s)
        assert not rig.runtime.event_query(event)
        with raises_status(RuntimeStatus.NotReady):
            rig.timing.event_elapsed(start, event)
        rig.peers.can_access_peer(0, 0)
        rig.runtime.device_info(0)
        rig.runtime.pointer_info(rig.pageable())
        direct = rig.runtime.direct_io()
        if direct is not None:
            direct.facts(0)
        assert rig.last_errors.peek_last_error() == 0
        gate.open()

    def test_rule_80_a_failure_in_a_stream_is_an_error_and_no_abort(self, rig: Rig) -> None:
        """The process goes on, and so does the stream."""
        s, a = rig.stream(), rig.device()
        rig.runtime.host_call(s, _raise)
        with pytest.raises(DeviceError):
            rig.runtime.stream_sync(s)
        rig.runtime.fill_async(a, 8, 4096, s)
        rig.runtime.stream_sync(s)
        assert rig.get(a) == b"\x08" * 4096

    def test_rule_81_a_device_that_is_not_there_is_invalid(self, rig: Rig) -> None:
        for ordinal in (-1, rig.runtime.device_count()):
            for use in (
                rig.runtime.set_current_device,
                rig.runtime.device_info,
                rig.runtime.device_sync,
                rig.runtime.stream_create,
                lambda o: rig.runtime.alloc(o, 16),
            ):
                with raises_status(RuntimeStatus.InvalidDevice):
                    use(ordinal)
