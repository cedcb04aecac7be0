"""The core of a runtime stays small; what not every runtime can do is a power of its own."""

from __future__ import annotations

import pytest

from nobounce import Device, UnavailableError
from nobounce.runtimes import powers
from nobounce.runtimes.base import Capabilities, Runtime


def test_the_core_has_less_than_30_calls() -> None:
    assert len(Runtime.__abstractmethods__) < 30


@pytest.mark.parametrize(
    ("power", "capability"),
    [
        ("ordered_memory", "stream_ordered_alloc"),
        ("managed_memory", "managed"),
        ("host_registration", "host_register"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_power_is_there_where_it_is_declared(
    monkeypatch: pytest.MonkeyPatch, device: str, power: str, capability: str
) -> None:
    runtime = Device(device)._runtime
    declared = getattr(runtime.capabilities, capability)
    assert (getattr(runtime, power) is not None) == declared
    monkeypatch.setattr(runtime, "capabilities", Capabilities())
    assert getattr(runtime, power) is None


def test_what_needs_a_power_says_who_has_it_not() -> None:
    with pytest.raises(UnavailableError, match="sim:0 has no managed memory"):
        powers.needed(None, Device("sim:0"), "managed memory")
