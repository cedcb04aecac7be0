"""Graphs on real hardware: a capture in the default mode survives reads, and a default stream's small read ends at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import nobounce
from capabilities import need

PATIENCE = 60.0
NBYTES = 64 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data.bin"
    made.write_bytes(os.urandom(NBYTES))
    return made


@pytest.mark.parametrize("known", [False, True])
def test_a_graph_is_captured_while_others_read_and_by_who_reads(path: Path, *, known: bool) -> None:
    need("cuda", "cuda-bindings", "torch")
    import torch

    data = path.read_bytes()
    device = nobounce.Device("cuda:0")
    x = torch.ones(1024, device="cuda:0")
    little = torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
    large = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
    own, graph = device.create_stream(), torch.cuda.CUDAGraph()
    errors: list[BaseException] = []

    def read(f: nobounce.File) -> None:
        try:
            for n in range(10):
                f.read(little, file_offset=4096 * n, cache="use")
                for stream in (own, 0):
                    f.read_async(little, stream=stream, file_offset=4096 * n, cache="use").result(PATIENCE)
            f.read(large, cache="use")
            f.read_async(large, stream=own, cache="use").result(PATIENCE)
        except BaseException as e:
            errors.append(e)

    with nobounce.open(path) as f:
        if known:
            read(f)
        with torch.cuda.graph(graph):
            y = x * 2
            other = threading.Thread(target=read, args=(f,))
            other.start()
            other.join(PATIENCE)
            f.read(little, cache="use")
            f.read_async(little, stream=own, file_offset=4096, cache="use").result(PATIENCE)
            z = y + 1
    assert not errors
    graph.replay()
    torch.cuda.synchronize()
    assert bool((z == 3).all())
    assert little.cpu().numpy().tobytes() == data[4096:8192]
    assert large.cpu().numpy().tobytes() == data
    own.close()


def test_a_small_read_on_a_default_stream_ends_at_once_when_no_blocking_stream_works(path: Path) -> None:
    need("cuda", "cuda-bindings", "torch")
    import torch

    device = nobounce.Device("cuda:0")
    buffer = torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    blocking, free = device.create_stream(nonblocking=False), device.create_stream()

    def work(stream: nobounce.Stream) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
            torch.cuda._sleep(400_000_000)

    with nobounce.open(path) as f:
        f.read(buffer, cache="use")
        for stream in (torch.cuda.current_stream(), 1, 2, blocking):
            assert f.read_async(buffer, stream=stream, file_offset=4096, cache="use").done()
        work(free)
        assert f.read_async(buffer, stream=0, file_offset=8192, cache="use").done()
        torch.cuda.synchronize()
        work(blocking)
        moves = [f.read_async(buffer, stream=s, file_offset=12288, cache="use") for s in (0, blocking)]
        assert not any(m.done() for m in moves)
        for m in moves:
            assert m.result(PATIENCE).nbytes == 4096
    assert buffer.cpu().numpy().tobytes() == path.read_bytes()[12288:16384]
    for stream in (blocking, free):
        stream.close()
