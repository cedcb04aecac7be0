"""The conformance class on `sim`, and what holds there only."""

from __future__ import annotations

import pytest

from nobounce.runtimes.sim import SimRuntime
from nobounce.testing import RuntimeTests


class TestSim(RuntimeTests):
    capabilities = SimRuntime.capabilities
    devices = 2

    @pytest.fixture
    def runtime(self) -> SimRuntime:
        return SimRuntime(devices=2)
