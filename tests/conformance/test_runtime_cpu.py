"""The conformance class on `cpu`, and what holds there only."""

from __future__ import annotations

import pytest

from nobounce.runtimes.cpu import CpuRuntime
from nobounce.testing import RuntimeTests


class TestCpu(RuntimeTests):
    capabilities = CpuRuntime.capabilities
    devices = 1

    @pytest.fixture
    def runtime(self) -> CpuRuntime:
        return CpuRuntime()
