"""Programs are run before and after they are rewritten, and do the same."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from capabilities import need
from doubles import old_libraries
from nobounce import Device, config, hip, hipfile
from nobounce.hipify.convert import convert
from nobounce.hipify.report import Target

KVIKIO = """
import kvikio


class Loader:
    def __init__(self, path, count):
        self._file = kvikio.CuFile(path)
        self._futures = []
        self.count = count

    def begin(self, parts, nbytes):
        for i, part in enumerate(parts):
            self._futures.append(self._file.pread(part, size=nbytes, file_offset=i * nbytes))

    def end(self):
        moved = [future.get() for future in self._futures]
        self._file.close()
        return moved, self._file.closed


def main(path, whole, parts, copy):
    counts = []
    with kvikio.CuFile(path, "w") as f:
        kvikio.memory_register(whole)
        counts.append(f.write(whole, task_size=4096))
        counts.append(f.raw_write(whole, 100, file_offset=5000, dev_offset=10))
        f.pwrite(whole, 7, 9000).get()
    loader = Loader(path, len(parts))
    loader.begin(parts, 1000)
    counts.append(loader.end())
    with open(path, "rb") as f:
        counts.append(f.read())
    f = kvikio.CuFile(path, flags="r+")
    pending = {name: f.pread(copy, 50, at) for name, at in (("a", 0), ("b", 60))}
    counts.append(sum(p.get() for p in pending.values()))
    counts.append(f.raw_read_async(copy, 0, 30, 100, 3).check_bytes_done())
    counts.append(f.pread(copy, 20, 200).get() if f is not None else None)
    f.close()
    return counts
"""

CUFILE = """
import os

from cuda.bindings import cufile
from cuda.bindings import runtime as cudart


def check(result):
    error, *values = result
    if error != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(error.name)
    return values[0] if values else None


def register(fd):
    descr = cufile.Descr()
    descr.type = cufile.FileHandleType.OPAQUE_FD
    descr.handle.fd = fd
    return cufile.handle_register(descr.ptr), descr


def main(path, copy, size):
    memory = check(cudart.cudaMalloc(size))
    cufile.driver_open()
    source, target = os.open(path, os.O_RDONLY), os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    fh_source, _ = register(source)
    fh_target, _ = register(target)
    cufile.buf_register(memory, size, 0)
    moved = [cufile.read(fh_source, memory, size, 0, 0), cufile.write(fh_target, memory, size - 10, 0, buf_ptr_offset=10)]
    try:
        cufile.read(-5, memory, size, 0, 0)
    except cufile.cuFileError:
        moved.append("refused")
    back = bytearray(size)
    check(cudart.cudaMemcpy(back, memory, size, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost))
    for fh in (fh_source, fh_target):
        cufile.handle_deregister(fh)
    cufile.buf_deregister(memory)
    cufile.driver_close()
    for fd in (source, target):
        os.close(fd)
    check(cudart.cudaDeviceSynchronize())
    check(cudart.cudaFree(memory))
    (wrong,) = cudart.cudaFree(12345)
    with open(copy, "rb") as f:
        return moved, bytes(back), f.read(), wrong == cudart.cudaError_t.cudaSuccess, cudart.cudaGetDeviceCount()[1] > 0
"""


def run(text: str, *arguments: Any, modules: dict[str, ModuleType] | None = None) -> Any:
    names: dict[str, Any] = {"__name__": "program"}
    with old_libraries.installed(modules or {}):
        exec(compile(text, "program", "exec"), names)
        return names["main"](*arguments)


def rewritten(text: str, target: Target = "nobounce") -> str:
    source = convert(text.encode(), "python", target)
    assert source.converted.left == []
    assert source.changed
    again = convert(source.data, "python", target)
    assert not again.changed
    return source.data.decode()


@pytest.fixture(params=["cpu", "sim:0"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NOBOUNCE_DEVICE", request.param)
    config.override(None)
    hip.use(request.param)
    hipfile.use(request.param)
    yield Device(request.param)
    hip.use(None)
    hipfile.use(None)
    while hipfile.use_count():
        hipfile.driver_close()


def test_a_program_for_kvikio_does_the_same_with_nobounce(device: Device, tmp_path: Path) -> None:
    data = np.frombuffer(os.urandom(8192), np.uint8)
    arrays = data.copy(), [np.zeros(1000, np.uint8) for _ in range(3)], np.zeros(4096, np.uint8)
    expected = run(KVIKIO, tmp_path / "old", *arrays, modules=old_libraries.kvikio())

    def on_device(array: np.ndarray) -> Any:
        buffer = device.allocate(array.nbytes)
        buffer.copy_from(array, stream=device.default_stream)
        return buffer

    buffers = (
        on_device(data),
        [on_device(np.zeros(1000, np.uint8)) for _ in range(3)],
        on_device(np.zeros(4096, np.uint8)),
    )
    assert run(rewritten(KVIKIO), tmp_path / "new", *buffers) == expected
    device.sync()
    for buffer, array in zip([*buffers[1], buffers[2]], [*arrays[1], arrays[2]], strict=True):
        back = np.zeros(array.nbytes, np.uint8)
        buffer.copy_to(back, stream=device.default_stream)
        device.sync()
        assert (back == array).all()


def test_a_program_for_kvikio_takes_host_arrays_as_before(tmp_path: Path) -> None:
    def arrays() -> tuple[Any, ...]:
        return (
            np.arange(8192, dtype=np.uint8),
            [np.zeros(1000, np.uint8) for _ in range(3)],
            np.zeros(4096, np.uint8),
        )

    old, new = arrays(), arrays()
    expected = run(KVIKIO, tmp_path / "old", *old, modules=old_libraries.kvikio())
    assert run(rewritten(KVIKIO), tmp_path / "new", *new) == expected
    assert all((a == b).all() for a, b in zip([*old[1], old[2]], [*new[1], new[2]], strict=True))


@pytest.mark.parametrize("target", ["nobounce", "hip"])
def test_a_program_for_cufile_and_the_runtime_does_the_same(
    device: Device, tmp_path: Path, target: Target
) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8192))
    expected = run(CUFILE, path, tmp_path / "old", 8192, modules=old_libraries.cuda())
    modules = old_libraries.hip() if target == "hip" else {}
    assert run(rewritten(CUFILE, target), path, tmp_path / "new", 8192, modules=modules) == expected


def test_a_program_for_cufile_python_does_the_same(device: Device, tmp_path: Path) -> None:
    text = """
import ctypes

from cufile import CuFile


def main(path, address, nbytes):
    with CuFile(path, "r") as f:
        first = f.read(ctypes.c_void_p(address), nbytes, file_offset=5)
    g = CuFile(path)
    before = g.is_open
    g.open()
    return first, before, g.is_open, g.read(ctypes.c_void_p(address), nbytes, dev_offset=0), g.close()
"""
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    with device.allocate(4096) as buffer:
        assert run(rewritten(text), path, buffer.handle, 4096) == (4096, False, True, 4096, None)
        back = np.zeros(4096, np.uint8)
        buffer.copy_to(back, stream=device.default_stream)
        device.sync()
        assert back.tobytes() == path.read_bytes()[:4096]


def test_a_program_for_torch_gds_moves_whole_storages(tmp_path: Path) -> None:
    need("torch")
    torch = importlib.import_module("torch")
    text = """
import os
import torch
from torch.cuda.gds import GdsFile, gds_register_buffer


def main(path, tensor, back):
    storage = tensor.untyped_storage()
    gds_register_buffer(storage)
    f = GdsFile(path, os.O_CREAT | os.O_RDWR)
    f.save_storage(storage, offset=8)
    del f
    g = GdsFile(path, os.O_RDONLY)
    g.load_storage(back.untyped_storage(), 8)
    return os.path.getsize(path)
"""
    tensor = torch.arange(100, dtype=torch.float32)[10:20]  # a view: its storage is 400 bytes
    back = torch.zeros(100)
    assert run(rewritten(text), str(tmp_path / "data"), tensor, back) == 408
    assert torch.equal(back, torch.arange(100, dtype=torch.float32))
