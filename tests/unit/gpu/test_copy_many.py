"""Several copies by one call of CUDA's, and one by one where the bindings or the driver know no such call."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from capabilities import need
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.runtimes.gpu import memory as gpu_memory
from nobounce.runtimes.gpu.cuda import CudaAdapter

COPIES = [(4096, 8192, 16), (5000, 9000, 32)]
SOME = 0x7F00


def adapter_of(call: Any) -> CudaAdapter:
    """NVIDIA's bindings, but for the call itself."""
    need("cuda-bindings")
    real = importlib.import_module("cuda.bindings.runtime")
    fake = SimpleNamespace(**{n: getattr(real, n) for n in dir(real) if not n.startswith("__")})
    fake.cudaMemcpyBatchAsync = call
    return CudaAdapter(importlib.import_module("cuda.bindings.driver"), fake)


def test_one_call_takes_them_all_in_the_order_of_their_sources_stream() -> None:
    calls: list[tuple[Any, ...]] = []

    def call(*args: Any) -> tuple[int]:
        calls.append(args)
        return (0,)

    many = adapter_of(call).copy_many()
    assert many is not None
    many(COPIES, SOME)
    ((dsts, srcs, sizes, count, attributes, firsts, kinds, stream),) = calls
    assert (dsts, srcs, sizes, count) == ([4096, 5000], [8192, 9000], [16, 32], 2)
    assert (firsts, kinds, stream) == ([0], 1, SOME)
    order = importlib.import_module("cuda.bindings.runtime").cudaMemcpySrcAccessOrder
    assert attributes[0].srcAccessOrder == order.cudaMemcpySrcAccessOrderStream


@pytest.mark.parametrize("missing", ["cudaMemcpyBatchAsync", "cudaMemcpyAttributes"])
def test_bindings_without_it_have_none(missing: str) -> None:
    adapter = adapter_of(lambda *a: (0,))
    delattr(adapter._runtime, missing)
    assert adapter.copy_many() is None


@pytest.mark.parametrize(
    "code",
    [36, 801, "symbol", 1],
    ids=["newer-driver", "not-supported", "no-symbol", "refuses-what-it-copies"],
)
def test_a_driver_without_it_is_asked_once(code: int | str) -> None:
    asked: list[int] = []
    plain: list[Any] = []

    def call(*args: Any) -> tuple[Any]:
        asked.append(1)
        if isinstance(code, str):
            raise RuntimeError("Function cudaMemcpyBatchAsync not found")
        return (importlib.import_module("cuda.bindings.runtime").cudaError_t(code),)

    adapter = adapter_of(call)
    adapter._runtime.cudaGetLastError = lambda: (0,)
    adapter._runtime.cudaGetErrorString = lambda status: (0, b"no such call")
    many = gpu_memory._at_once(adapter.copy_many(), lambda copies, stream: plain.append((copies, stream)))
    many(COPIES, SOME)
    many(COPIES, SOME)
    assert len(asked) == 1
    assert plain == [(COPIES, SOME)] * 2


def test_any_other_failure_is_raised_and_nothing_is_copied_twice() -> None:
    def failing(copies: Any, stream: int) -> None:
        raise DeviceError("cudaMemcpyBatchAsync", RuntimeStatus.IllegalAddress)

    plain: list[Any] = []
    many = gpu_memory._at_once(failing, lambda copies, stream: plain.append(copies))
    with pytest.raises(DeviceError, match="cudaMemcpyBatchAsync"):
        many(COPIES, SOME)
    assert not plain


def test_what_neither_call_takes_is_raised_and_says_nothing_of_the_driver() -> None:
    asked: list[str] = []

    def batch(copies: Any, stream: int) -> None:
        asked.append("batch")
        if copies is not COPIES:
            raise DeviceError("cudaMemcpyBatchAsync", RuntimeStatus.InvalidValue)

    def plain(copies: Any, stream: int) -> None:
        asked.append("plain")
        raise DeviceError("cudaMemcpyAsync", RuntimeStatus.InvalidValue)

    many = gpu_memory._at_once(batch, plain)
    with pytest.raises(DeviceError, match="cudaMemcpyAsync"):
        many([(0, 0, 16)], SOME)
    many(COPIES, SOME)
    assert asked == ["batch", "plain", "batch"]
