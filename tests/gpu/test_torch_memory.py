"""A GPU's memory for torch's tensors comes from torch."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce.formats import loading

MIB = 1 << 20


def torch_on_a_gpu() -> Any:
    need("cuda", "cuda-bindings", "torch", "safetensors")
    import torch

    torch.empty(1, device="cuda:0")
    return torch


def model(torch: Any, path: Path, *mib: int) -> dict[str, Any]:
    from safetensors.torch import save_file

    tensors = {f"t{n}": torch.randint(0, 255, (m * MIB,), dtype=torch.uint8) for n, m in enumerate(mib)}
    save_file(tensors, path)
    return tensors


@pytest.mark.parametrize("shared", [False, True])
def test_torch_counts_what_is_loaded_and_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    torch = torch_on_a_gpu()
    monkeypatch.setattr(loading, "GROUP_NBYTES", 16 * MIB)
    wanted = model(torch, tmp_path / "m.safetensors", 5, 5, 5, 5, 40, 1)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    got = nobounce.load(tmp_path / "m.safetensors", device="cuda:0", framework="torch", shared_storage=shared)
    assert 61 * MIB <= torch.cuda.memory_allocated() - before < 64 * MIB
    for name, tensor in wanted.items():
        assert got[name].device == torch.device("cuda", 0)
        assert torch.equal(got[name].cpu(), tensor)
        assert got[name].untyped_storage().nbytes() == tensor.numel() or shared
    kept = got["t4"]
    del got
    gc.collect()
    assert 40 * MIB <= torch.cuda.memory_allocated() - before < 42 * MIB
    assert torch.equal(kept.cpu(), wanted["t4"])
    del kept
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    reserved = torch.cuda.memory_reserved()
    got = nobounce.load(tmp_path / "m.safetensors", device="cuda:0", framework="torch")
    assert torch.cuda.memory_reserved() == reserved  # its cache is used again
    del got
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        got = nobounce.load(tmp_path / "m.safetensors", device="cuda:0", framework="torch")
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    assert sum(s["total_size"] for s in segments) >= 61 * MIB
    del got


def test_memory_that_is_still_in_use_by_torchs_stream_is_waited_for(tmp_path: Path) -> None:
    torch = torch_on_a_gpu()
    wanted = model(torch, tmp_path / "m.safetensors", 32)
    path = tmp_path / "m.safetensors"
    nobounce.load(path, device="cuda:0", framework="torch")  # everything is made
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    old = torch.zeros(32 * MIB + 8192, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(int(2e8))
    old.fill_(7)  # behind the kernel above, into memory that the load is about to get
    del old
    got = nobounce.load(path, device="cuda:0", framework="torch")
    torch.cuda.synchronize()
    assert torch.equal(got["t0"].cpu(), wanted["t0"])


def test_torchs_cache_is_emptied_before_memory_is_short(tmp_path: Path) -> None:
    torch = torch_on_a_gpu()
    free, _ = torch.cuda.mem_get_info()
    model(torch, tmp_path / "m.safetensors", 1024)
    held = torch.empty(free - 512 * MIB, dtype=torch.uint8, device="cuda:0")
    del held
    assert torch.cuda.mem_get_info()[0] < 1024 * MIB
    got = nobounce.load(tmp_path / "m.safetensors", device="cuda:0")
    assert got["t0"].nbytes == 1024 * MIB


def test_a_graph_under_capture_is_not_ended_by_a_load(tmp_path: Path) -> None:
    torch = torch_on_a_gpu()
    wanted = model(torch, tmp_path / "m.safetensors", 4)
    path = tmp_path / "m.safetensors"
    nobounce.load(path, device="cuda:0", framework="torch")
    x, graph = torch.ones(16, device="cuda:0"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.add_(1)
        got = nobounce.load(path, device="cuda:0", framework="torch")
    graph.replay()
    torch.cuda.synchronize()
    assert x[0] == 2
    assert torch.equal(got["t0"].cpu(), wanted["t0"])


def test_some_of_a_model_comes_where_it_is_wanted(tmp_path: Path) -> None:
    torch = torch_on_a_gpu()
    from safetensors.torch import save_file

    wanted = {f"w{n}": torch.randn(256, 1024 + n) for n in range(20)} | {"small": torch.arange(7)}
    save_file(wanted, tmp_path / "m.safetensors")
    with nobounce.open_model(tmp_path / "m.safetensors") as m:
        some = m.load(device="cuda:0", framework="torch", names=["w3", "w11", "small"])
        assert all(torch.equal(some[n].cpu(), wanted[n]) for n in ("w3", "w11", "small"))
        cut = m.load(device="cuda:0", framework="torch", names="w3", slices={"w3": (None, (5, 70))})
        assert torch.equal(cut["w3"].cpu(), wanted["w3"][:, 5:70])
        into = {n: torch.zeros_like(t, device="cuda:0") for n, t in wanted.items()}
        into["w5"] = torch.zeros(1029, 256, device="cuda:0").T
        into["w6"] = torch.zeros(256, 1030)
        graph, x = torch.cuda.CUDAGraph(), into["w2"]
        y = x * 2
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = x * 2
        for _ in range(2):
            m.load(into=into)
            assert all(torch.equal(into[n].cpu(), wanted[n]) for n in wanted)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y.cpu(), wanted["w2"] * 2)
            x.zero_()


def test_pinned_memory_is_what_torch_copies_from(tmp_path: Path) -> None:
    torch = torch_on_a_gpu()
    wanted = model(torch, tmp_path / "m.safetensors", 3, 5)
    got = nobounce.load(tmp_path / "m.safetensors", device="cuda:0", framework="torch", pinned=True)
    for name, tensor in wanted.items():
        assert got[name].is_pinned()
        assert torch.equal(got[name].to("cuda:0", non_blocking=True).cpu(), tensor)
