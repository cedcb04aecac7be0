"""A load makes what only looks at the memory while the bytes are on their way, and everything else when they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import nobounce
from capabilities import need
from doubles.hip_bindings import HipDouble
from nobounce.device import Device
from nobounce.formats import loading
from nobounce.formats.fresh import FreshRead
from nobounce.runtimes.gpu import hip
from nobounce.tensor import looks_on

Framework = Literal["numpy", "torch"]


@pytest.mark.parametrize(
    ("device", "framework", "looks"),
    [
        ("gpu", None, True),
        ("gpu", "torch", True),
        ("gpu", "numpy", False),
        ("sim:0", None, True),
        ("sim:0", "torch", False),
        ("cpu", "torch", True),
        ("cpu", "numpy", True),
    ],
)
def test_it_is_made_early_where_it_looks_at_the_memory_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    framework: Framework | None,
    looks: bool,
) -> None:
    need("safetensors")
    from safetensors.numpy import save_file

    save_file({"a": np.arange(1 << 18, dtype=np.float32)}, tmp_path / "m.safetensors")
    where = Device._of(hip.load(HipDouble(devices=1)), 0) if device == "gpu" else Device(device)
    with where.allocate(4096) as buffer:
        assert looks_on(buffer, framework) is looks
    order: list[str] = []

    class Reading(FreshRead):
        def begin(self) -> None:
            order.append("begin")
            super().begin()

        def finish(self, meanwhile: Any) -> Any:
            receipt = super().finish(meanwhile)
            order.append("end")
            return receipt

    def maker(buffer: nobounce.Buffer, framework: Framework | None = None, **_: Any) -> Any:
        order.append("make")
        return lambda offset, shape, dtype, nbytes: (offset, shape)

    monkeypatch.setattr(loading, "FreshRead", Reading)
    monkeypatch.setattr(nobounce.Tensor, "maker", maker)
    model = nobounce.load(tmp_path / "m.safetensors", device=where, framework=framework)
    assert order == (["begin", "make", "end"] if looks else ["begin", "end", "make"])
    assert [shape for _, shape in model.values()] == [(1 << 18,)]
