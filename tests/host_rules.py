"""What both host runtimes keep beyond the shipped conformance class."""

from __future__ import annotations

import ctypes
import threading

from nobounce.testing import Rig, RuntimeTests


class HostRules(RuntimeTests):
    def test_rule_42_host_functions_of_two_streams_run_together(self, rig: Rig) -> None:
        both = threading.Barrier(2, timeout=30)
        for s in (rig.stream(), rig.stream()):
            rig.runtime.host_call(s, both.wait)
        rig.runtime.device_sync(0)
        assert not both.broken

    def test_rule_52_a_pageable_source_is_staged_while_the_stream_is_held(self, rig: Rig) -> None:
        s, a, src = rig.stream(), rig.device(), rig.pageable()
        rig.put(src, b"1" * 4096)
        gate = rig.hold(s)
        rig.background(lambda: rig.runtime.copy_async(a, src, 4096, s)).result()
        ctypes.memset(src, ord("2"), 4096)
        gate.open()
        rig.runtime.stream_sync(s)
        assert rig.get(a) == b"1" * 4096
