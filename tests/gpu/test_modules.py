"""Kernels as text: the one that scatters blocks, on a real card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from nobounce.errors import DeviceError
from nobounce.io.engine import engine_for
from nobounce.io.movers import scatter


@pytest.fixture
def device() -> nobounce.Device:
    need("cuda")
    return nobounce.Device("cuda:0")


def test_text_that_is_none_is_refused_by_the_driver(device: nobounce.Device) -> None:
    modules = device._runtime.modules
    assert modules is not None
    with pytest.raises(DeviceError):
        modules.load_kernel(0, b"nothing of the kind", "nothing")
    with pytest.raises(DeviceError):
        modules.load_kernel(0, scatter.TEXT.encode(), "another_name")


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_any_size_and_alignment_land_where_they_belong(device: nobounce.Device, seed: int) -> None:
    runtime = device._runtime
    ring = engine_for(runtime).rings.get(runtime, 0)
    rng = np.random.default_rng(seed)
    count = 500
    grain = 16 if seed % 2 else 1
    sizes = rng.integers(0, 8000 if seed < 4 else 70000, count) // grain * grain
    sizes = sizes[np.cumsum(sizes) < ring.slot_nbytes - scatter.TABLE_NBYTES]
    count = len(sizes)
    of = np.cumsum(sizes) - sizes
    order = rng.permutation(count)
    to = np.zeros(count, np.int64)
    to[order] = np.cumsum(sizes[order] + 32) - sizes[order] - 32
    room = int((to + sizes).max()) + 64
    stream = ring.copy_stream()
    slot = ring.acquire(wait=True)
    assert slot is not None
    try:
        with device.allocate(room) as buffer, runtime.copy_calls(0) as calls:
            buffer.fill(0x5A, stream=None)
            kernel = scatter.scatter_of(ring, slot[0], calls, stream)
            assert kernel is not None
            source = np.frombuffer(ring.view(slot[0]), np.uint8)
            source[: ring.slot_nbytes - scatter.TABLE_NBYTES] = rng.integers(
                0, 256, ring.slot_nbytes - scatter.TABLE_NBYTES, np.uint8
            )
            rows: Any = scatter.table(ring, slot[0], count)
            rows[:, 0], rows[:, 1], rows[:, 2] = to + buffer.handle, of + slot[0], sizes
            table = slot[0] + ring.slot_nbytes - scatter.TABLE_NBYTES
            kernel.launch(table, count, int(sizes.max()), stream)
            calls.finish(stream)
            got = buffer.numpy()
            wanted = np.full(room, 0x5A, np.uint8)
            for t, o, n in zip(to.tolist(), of.tolist(), sizes.tolist(), strict=True):
                wanted[t : t + n] = source[o : o + n]
            assert (got == wanted).all()
    finally:
        ring.give_back(stream, slot)
