"""The conformance class on real NVIDIA hardware, unchanged but for the rows of the quirks table."""

from __future__ import annotations

import contextlib

import pytest

from capabilities import has, need
from nobounce.errors import UnavailableError
from nobounce.runtimes import registry
from nobounce.runtimes.base import Capabilities, Runtime
from nobounce.runtimes.gpu.quirks import conformance_exceptions
from nobounce.testing import Rig, RuntimeTests

_CAPABILITIES = Capabilities(managed=True, priorities=True, host_register=True, stream_ordered_alloc=True)
_DEVICES = 1
if has("cuda") and has("cuda-bindings"):
    with contextlib.suppress(UnavailableError):
        _DEVICES = registry.get("cuda").device_count()
        _CAPABILITIES = registry.get("cuda").capabilities


class TestCuda(RuntimeTests):
    capabilities = _CAPABILITIES
    devices = _DEVICES

    @pytest.fixture
    def runtime(self) -> Runtime:
        need("cuda", "cuda-bindings")
        return registry.get("cuda")

    def test_memory_is_shared_with_torch(self, rig: Rig) -> None:
        """Both use the primary context."""
        need("torch")
        import torch

        rig.runtime.set_current_device(0)
        tensor = torch.zeros(1024, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        rig.runtime.fill(tensor.data_ptr(), 7, 1024)
        rig.runtime.device_sync(0)
        assert int(tensor.sum()) == 7 * 1024


for _name in conformance_exceptions("cuda"):
    setattr(TestCuda, _name, None)  # pytest collects no test from None
