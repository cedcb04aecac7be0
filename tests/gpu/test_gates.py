"""Gates on real hardware, behind kernels."""

from __future__ import annotations

import threading
import time

import pytest

from capabilities import need
from nobounce.runtimes import registry

KERNEL = 5.0
"""Seconds."""


@pytest.mark.serial
def test_a_gate_behind_a_long_kernel_costs_under_2_percent_of_a_core() -> None:
    need("cuda", "cuda-bindings", "torch")
    import torch

    rt = registry.get("cuda")
    s, reached = rt.stream_create(0), threading.Event()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.ExternalStream(s)):
        start.record()
        torch.cuda._sleep(int(KERNEL * 2e9))
        end.record()
    gate = rt.gate(s, reached.set)
    began, cpu = time.perf_counter(), time.process_time()
    assert reached.wait(60)
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    gate.open()
    rt.stream_sync(s)
    rt.stream_destroy(s)
    assert wall > KERNEL / 2, "the kernel was not long"
    assert used < 0.02 * wall, f"{used:.3f} s of CPU in {wall:.2f} s"
    assert wall - start.elapsed_time(end) / 1000 < 0.05


@pytest.mark.serial
def test_a_kernel_after_a_gate_sees_what_came_while_it_was_closed() -> None:
    need("cuda", "cuda-bindings", "torch")
    import torch

    rt = registry.get("cuda")
    s, copies, reached = rt.stream_create(0), rt.stream_create(0), threading.Event()
    source = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    with torch.cuda.stream(torch.cuda.ExternalStream(s)):
        target = torch.zeros(1 << 20, dtype=torch.int32, device="cuda:0")
        assert int(target.sum()) == 0
        gate = rt.gate(s, reached.set)
        total = target.sum(dtype=torch.int64)
    assert reached.wait(60)
    event = rt.event_create(0, timing=False)
    rt.copy_async(target.data_ptr(), source.data_ptr(), 4 << 20, copies)
    rt.event_record(event, copies)
    rt.event_sync(event)
    gate.open()
    rt.stream_sync(s)
    assert int(total) == sum(range(1 << 20))
    rt.event_destroy(event)
    for stream in (s, copies):
        rt.stream_destroy(stream)
