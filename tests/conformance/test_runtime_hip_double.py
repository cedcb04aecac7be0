"""The conformance class on the HIP adapter over a double of AMD's bindings, so that each of its call paths executes."""

from __future__ import annotations

import dataclasses

import pytest

from doubles.hip_bindings import HipDouble
from nobounce.runtimes.gpu import hip
from nobounce.runtimes.gpu.gpu import GpuRuntime
from nobounce.runtimes.gpu.table import ROWS
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing import RuntimeTests


class TestHipDouble(RuntimeTests):
    capabilities = dataclasses.replace(SimRuntime.capabilities, dlpack_device_type=10)
    devices = 2

    @pytest.fixture
    def double(self) -> HipDouble:
        return HipDouble()

    @pytest.fixture
    def runtime(self, double: HipDouble) -> GpuRuntime:
        return hip.load(double)

    def test_the_capabilities_tested_are_the_runtimes(self, runtime: GpuRuntime) -> None:
        assert runtime.capabilities == self.capabilities


class TestHipDoubleWithHostGates(TestHipDouble):
    """A device that cannot wait for values: gates are host functions."""

    @pytest.fixture
    def double(self) -> HipDouble:
        return HipDouble(wait_value=False)


def test_every_hip_row_has_a_double() -> None:
    for row in ROWS.values():
        assert not row.hip or callable(getattr(HipDouble(devices=1), row.hip)), row.op
