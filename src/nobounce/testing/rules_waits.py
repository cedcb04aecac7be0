"""HIP rules 35-45: waits and host functions."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.testing.requirements import DeclaredTests, requires
from nobounce.testing.rig import PATIENCE, Rig, raises_status


class WaitRules(DeclaredTests):
    """Order between streams, and host work in a stream."""

    def test_rule_35_later_ops_wait_for_the_event(self, rig: Rig) -> None:
        """The host returns at once; ops before the wait do not wait."""
        s, t = rig.stream(), rig.stream()
        order: list[str] = []
        gate = rig.hold(s)
        rig.runtime.host_call(s, lambda: order.append("s"))
        event = rig.recorded(s)
        rig.runtime.host_call(t, lambda: order.append("before"))
        before = rig.recorded(t)
        rig.background(lambda: rig.runtime.stream_wait_event(t, event)).result()
        rig.runtime.host_call(t, lambda: order.append("after"))
        rig.background(lambda: rig.runtime.event_sync(before)).result()
        assert rig.background(lambda: rig.runtime.stream_sync(t)).is_waiting()
        assert order == ["before"]
        gate.open()
        rig.runtime.stream_sync(t)
        assert order == ["before", "s", "after"]

    def test_rule_36_a_wait_for_what_is_done_adds_nothing(self, rig: Rig) -> None:
        """For an event of the same stream, or a complete one."""
        s, t = rig.stream(), rig.stream()
        done = rig.recorded(t)
        rig.runtime.event_sync(done)
        rig.runtime.stream_wait_event(s, done)
        assert rig.runtime.stream_query(s)
        gate = rig.hold(s)
        rig.runtime.stream_wait_event(s, rig.recorded(s))
        gate.open()
        rig.background(lambda: rig.runtime.stream_sync(s)).result()

    @requires(devices=2)
    def test_rule_37_waits_work_across_devices(self, rig: Rig) -> None:
        s, t = rig.stream(0), rig.stream(1)
        ran = threading.Event()
        gate = rig.hold(s)
        rig.runtime.stream_wait_event(t, rig.recorded(s))
        rig.runtime.host_call(t, ran.set)
        assert rig.background(lambda: rig.runtime.stream_sync(t)).is_waiting()
        assert not ran.is_set()
        gate.open()
        rig.runtime.stream_sync(t)
        assert ran.is_set()

    def test_rule_38_wait_flags_are_default_or_external(self, rig: Rig) -> None:
        s, event = rig.stream(), rig.event()
        rig.runtime.stream_wait_event(s, event, 0)
        for flags in (2, -1, 1 << 20):
            with raises_status(RuntimeStatus.InvalidValue):
                rig.runtime.stream_wait_event(s, event, flags)

    def test_rule_39_a_host_function_has_its_place_in_the_stream(self, rig: Rig) -> None:
        """After all prior ops, before all later ones, once per call, on a runtime thread."""
        s = rig.stream()
        a, out = rig.device(), rig.pinned()
        threads: list[int] = []
        started, let_go = threading.Event(), threading.Event()

        def fn() -> None:
            threads.append(threading.get_ident())
            started.set()
            assert let_go.wait(PATIENCE)

        gate = rig.hold(s)
        rig.runtime.host_call(s, fn)
        rig.runtime.fill_async(a, 9, 4096, s)
        rig.runtime.copy_async(out, a, 4096, s)
        later = rig.recorded(s)
        assert not started.is_set()
        gate.open()
        assert started.wait(PATIENCE)
        assert not rig.runtime.event_query(later)
        let_go.set()
        rig.runtime.stream_sync(s)
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()

    def test_rule_40_a_host_function_must_be_callable(self, rig: Rig) -> None:
        with raises_status(RuntimeStatus.InvalidValue):
            rig.runtime.host_call(rig.stream(), None)  # type: ignore[arg-type]

    def test_rule_41_a_host_function_may_not_call_the_runtime(self, rig: Rig) -> None:
        """Detected, so that it is found here and not as a deadlock on a GPU."""
        s, t = rig.stream(), rig.stream()
        caught: list[DeviceError] = []

        def fn() -> None:
            for call in (lambda: rig.runtime.stream_sync(t), lambda: rig.runtime.alloc(0, 16)):
                try:
                    call()
                except DeviceError as e:
                    caught.append(e)

        rig.runtime.host_call(s, fn)
        rig.runtime.stream_sync(s)
        assert [e.status for e in caught] == [RuntimeStatus.NotPermitted] * 2
        rig.runtime.stream_sync(t)

    def test_rule_42_host_functions_of_two_streams_all_run(self, rig: Rig) -> None:
        """They may run at the same time, on any thread; a held stream does not stop the other's."""
        s, t = rig.stream(), rig.stream()
        rig.hold(s)
        late, ran = threading.Event(), threading.Event()
        rig.runtime.host_call(s, late.set)
        rig.runtime.host_call(t, ran.set)
        rig.background(lambda: rig.runtime.stream_sync(t)).result()
        assert ran.is_set()
        assert not late.is_set()

    def test_rule_43_a_host_function_that_raises(self, rig: Rig) -> None:
        """It becomes the stream's asynchronous error; later ops are still done, in order."""
        s, a = rig.stream(), rig.device()

        def fn() -> None:
            raise LookupError("no such thing")

        rig.runtime.host_call(s, fn)
        rig.runtime.fill_async(a, 4, 4096, s)
        with pytest.raises(DeviceError, match="LookupError: no such thing") as caught:
            rig.runtime.stream_sync(s)
        assert isinstance(caught.value.__cause__, LookupError)
        assert rig.get(a) == b"\x04" * 4096

    def test_rule_44_a_host_function_is_kept_until_it_ran(self, rig: Rig) -> None:
        """And let go afterwards."""
        s = rig.stream()
        ran = threading.Event()

        class Fn:
            def __call__(self) -> None:
                ran.set()

        fn = Fn()
        alive = weakref.ref(fn)
        gate = rig.hold(s)
        rig.runtime.host_call(s, fn)
        del fn
        gc.collect()
        assert alive() is not None
        gate.open()
        rig.runtime.stream_sync(s)
        rig.runtime.host_call(s, lambda: None)
        rig.runtime.stream_sync(s)
        gc.collect()
        assert ran.is_set()
        assert alive() is None

    def test_rule_45_blocking_calls_release_the_gil(self, rig: Rig) -> None:
        """A host function that needs another Python thread runs while this one synchronises."""
        s = rig.stream()
        asked, answered = threading.Event(), threading.Event()

        def answer() -> None:
            assert asked.wait(PATIENCE)
            answered.set()

        def fn() -> None:
            asked.set()
            assert answered.wait(PATIENCE)

        helper = rig.background(answer)
        rig.runtime.host_call(s, fn)
        rig.runtime.stream_sync(s)
        helper.result()
