"""Each rule of the HIP runtime that the host runtimes keep has a test with its number."""

from __future__ import annotations

import re

from conformance import test_runtime_cpu, test_runtime_sim

ELSEWHERE = {13, 23}  # stream capture, which comes with graphs
ELSEWHERE |= {61, 68}  # memcpyWithStream and virtual memory, which come with the HIP interface


def numbers(cls: type) -> set[int]:
    found = (re.match(r"test_rule_(\d+)_", name) for name in dir(cls) if callable(getattr(cls, name)))
    return {int(m[1]) for m in found if m}


def test_every_rule_has_a_test() -> None:
    rules = ({*range(1, 73)} | {*range(78, 82)}) - ELSEWHERE
    assert rules - numbers(test_runtime_sim.TestSim) == set()
    several_devices = {32, 37, 50, 70, 71}
    assert rules - several_devices - numbers(test_runtime_cpu.TestCpu) == set()


def test_no_test_of_an_undeclared_power_is_kept() -> None:
    assert test_runtime_cpu.TestCpu.test_rule_131_peer_access is None
    assert callable(test_runtime_sim.TestSim.test_rule_131_peer_access)
