"""HIP rules 1-14: stream order."""

from __future__ import annotations

import threading

from nobounce.errors import RuntimeStatus
from nobounce.testing.requirements import DeclaredTests, requires
from nobounce.testing.rig import Rig, raises_status

BAD_HANDLE = RuntimeStatus.InvalidResourceHandle


class StreamRules(DeclaredTests):
    """One stream, and streams beside each other."""

    def test_rule_01_a_stream_is_a_fifo(self, rig: Rig) -> None:
        """Ops of one stream start in submission order, each after the one before."""
        s = rig.stream()
        a, b = rig.device(), rig.device()
        order: list[int] = []
        gate = rig.hold(s)
        for i in range(10):
            rig.runtime.fill_async(a, i, 4096, s)
            rig.runtime.host_call(s, lambda i=i: order.append(i))  # type: ignore[misc]
            rig.runtime.copy_async(b, a, 4096, s)
        assert order == []
        gate.open()
        rig.runtime.stream_sync(s)
        assert order == list(range(10))
        assert rig.get(b) == b"\x09" * 4096

    def test_rule_02_unrelated_streams_run_in_either_order(self, rig: Rig) -> None:
        """Ops of two streams with no relation may run in any order; holding one forces either."""
        s, t = rig.stream(), rig.stream()
        order: list[str] = []
        for held, free in ((s, t), (t, s)):
            gate = rig.hold(held)
            rig.runtime.host_call(held, lambda: order.append("held"))
            rig.runtime.host_call(free, lambda: order.append("free"))
            rig.background(lambda free=free: rig.runtime.stream_sync(free)).result()  # type: ignore[misc]
            assert order == ["free"]
            gate.open()
            rig.runtime.stream_sync(held)
            assert order == ["free", "held"]
            order.clear()

    def test_rule_03_submission_never_waits(self, rig: Rig) -> None:
        """Submission never waits for execution, save the cases of rules 46-60."""
        s, t = rig.stream(), rig.stream()
        a, b = rig.device(1 << 20), rig.device(1 << 20)
        event = rig.event()
        gate = rig.hold(s)

        def submit() -> None:
            for _ in range(50):
                rig.runtime.fill_async(a, 1, 1 << 20, s)
                rig.runtime.copy_async(b, a, 1 << 20, s)
                rig.runtime.host_call(s, lambda: None)
                rig.runtime.event_record(event, s)
                rig.runtime.stream_wait_event(t, event)
            rig.hold_later(t).open()

        rig.background(submit).result()
        assert not rig.runtime.stream_query(s)
        assert not rig.runtime.stream_query(t)
        gate.open()
        rig.runtime.stream_sync(t)

    def test_rule_04_threads_may_share_a_stream(self, rig: Rig) -> None:
        """Many host threads may submit to one stream; each call is atomic and each thread's order is kept."""
        s = rig.stream()
        seen: list[tuple[int, int]] = []
        start = threading.Barrier(8)

        def submit(thread: int) -> None:
            start.wait()
            for i in range(40):
                rig.runtime.host_call(s, lambda i=i: seen.append((thread, i)))  # type: ignore[misc]

        calls = [rig.background(lambda n=n: submit(n)) for n in range(8)]  # type: ignore[misc]
        for call in calls:
            call.result()
        rig.runtime.stream_sync(s)
        assert len(seen) == 320
        for n in range(8):
            assert [i for thread, i in seen if thread == n] == list(range(40))

    def test_rule_05_query_never_sets_last_error(self, rig: Rig) -> None:
        """Query succeeds if nothing is pending, else it is NotReady, which is a status and no error."""
        s = rig.stream()
        assert rig.runtime.stream_query(s)
        gate = rig.hold(s)
        assert not rig.runtime.stream_query(s)
        assert rig.last_errors.peek_last_error() == 0
        gate.open()
        rig.runtime.stream_sync(s)
        assert rig.runtime.stream_query(s)

    def test_rule_06_synchronize_waits_for_one_stream(self, rig: Rig) -> None:
        """Synchronising a stream waits for that stream only."""
        s, t = rig.stream(), rig.stream()
        gate = rig.hold(s)
        rig.runtime.host_call(t, lambda: None)
        rig.background(lambda: rig.runtime.stream_sync(t)).result()
        assert not rig.runtime.stream_query(s)
        waiting = rig.background(lambda: rig.runtime.stream_sync(s))
        assert waiting.is_waiting()
        gate.open()
        waiting.result()

    def test_rule_07_a_stream_keeps_its_device(self, rig: Rig) -> None:
        """An op runs on its stream's device, whatever the thread's current device is."""
        last = rig.runtime.device_count() - 1
        s = rig.stream(last)
        rig.runtime.set_current_device(0)
        assert rig.runtime.stream_device(s) == last
        a = rig.device(device=last)
        rig.runtime.fill_async(a, 3, 4096, s)
        rig.runtime.stream_sync(s)
        assert rig.get(a) == b"\x03" * 4096
        assert rig.runtime.current_device() == 0

    @requires(devices=2)
    def test_rule_07_work_on_device_1_does_not_wait_for_current_device_0(self, rig: Rig) -> None:
        """With device 0 current and its null stream held, a blocking stream of device 1 goes on."""
        s = rig.stream(1, nonblocking=False)
        rig.runtime.set_current_device(0)
        rig.hold(0)
        ran = threading.Event()
        rig.runtime.host_call(s, ran.set)
        rig.background(lambda: rig.runtime.stream_sync(s)).result()
        assert ran.is_set()
        assert not rig.runtime.stream_query(0)

    @requires("priorities")
    def test_rule_08_priorities_are_clamped(self, rig: Rig) -> None:
        """Lower is more urgent; a priority out of range is clamped; the default is normal."""
        least, greatest = rig.stream_traits.stream_priority_range(0)
        assert least >= greatest
        assert rig.stream_traits.stream_priority(rig.stream(priority=least + 100)) == least
        assert rig.stream_traits.stream_priority(rig.stream(priority=greatest - 100)) == greatest
        assert rig.stream_traits.stream_priority(rig.stream()) == 0

    @requires("priorities")
    def test_rule_08_every_priority_does_its_work(self, rig: Rig) -> None:
        least, greatest = rig.stream_traits.stream_priority_range(0)
        for value, priority in enumerate(range(greatest, least + 1), 1):
            s, a = rig.stream(priority=priority), rig.device()
            rig.runtime.fill_async(a, value, 4096, s)
            rig.runtime.stream_sync(s)
            assert rig.get(a) == bytes([value]) * 4096

    def test_rule_09_create_refuses_unknown_flags(self, rig: Rig) -> None:
        """An unknown flag is InvalidValue; a device that does not exist is InvalidDevice."""
        with raises_status(RuntimeStatus.InvalidValue):
            rig.runtime.stream_create(0, nonblocking=7)  # type: ignore[arg-type]
        with raises_status(RuntimeStatus.InvalidDevice):
            rig.runtime.stream_create(rig.runtime.device_count())

    def test_rule_10_destroy_with_pending_work(self, rig: Rig) -> None:
        """Destroy returns at once and the pending work still completes."""
        s = rig.runtime.stream_create(0)
        a = rig.device()
        gate = rig.hold(s)
        rig.runtime.fill_async(a, 5, 4096, s)
        rig.background(lambda: rig.runtime.stream_destroy(s)).result()
        gate.open()
        rig.runtime.device_sync(0)
        assert rig.get(a) == b"\x05" * 4096

    def test_rule_11_double_destroy_is_an_error(self, rig: Rig) -> None:
        s = rig.runtime.stream_create(0)
        rig.runtime.stream_destroy(s)
        with raises_status(BAD_HANDLE):
            rig.runtime.stream_destroy(s)

    def test_rule_12_default_streams_cannot_be_destroyed(self, rig: Rig) -> None:
        """Null, legacy and per-thread: InvalidResourceHandle."""
        for handle in (0, 1, 2):
            with raises_status(BAD_HANDLE):
                rig.runtime.stream_destroy(handle)

    def test_rule_14_a_destroyed_stream_is_always_refused(self, rig: Rig) -> None:
        """A destroyed or garbage handle raises InvalidResourceHandle in every call."""
        destroyed = rig.runtime.stream_create(0)
        rig.runtime.stream_destroy(destroyed)
        a, b, event, rt = rig.device(), rig.device(), rig.event(), rig.runtime
        for handle in (destroyed, 0x7EADBEEF):
            for use in (
                lambda h: rt.stream_query(h),
                lambda h: rt.stream_sync(h),
                lambda h: rt.stream_wait_event(h, event),
                lambda h: rt.stream_device(h),
                lambda h: rig.stream_traits.stream_priority(h),
                lambda h: rig.stream_traits.stream_is_nonblocking(h),
                lambda h: rt.host_call(h, lambda: None),
                lambda h: rt.gate(h, lambda: None),
                lambda h: rt.event_record(event, h),
                lambda h: rt.copy_async(a, b, 16, h),
                lambda h: rt.fill_async(a, 0, 16, h),
                lambda h: rt.copy_batch([(a, b, 16)], h),
            ):
                with raises_status(BAD_HANDLE):
                    use(handle)
