"""Doubles of the libraries that hipify knows, over plain host memory: enough to run a program before it is rewritten.

`installed(name, ...)` puts them where `import` finds them. An "address" is one of this process, "device memory" is not apart from it.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


def _bytes_of(buffer: Any, size: int | None) -> np.ndarray:
    flat = np.asarray(buffer).reshape(-1).view(np.uint8)
    return flat if size is None else flat[:size]


def _at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class _Future:
    def __init__(self, count: int) -> None:
        self._count = count

    def get(self) -> int:
        return self._count

    def done(self) -> bool:
        return True

    def check_bytes_done(self) -> int:
        return self._count


class _CuFile:
    def __init__(self, file: Any, flags: str = "r") -> None:
        how = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}[flags[0]]
        if "+" in flags:
            how = how & ~os.O_WRONLY | os.O_RDWR
        self._fd = os.open(file, how, 0o644)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def open_flags(self) -> int:
        return 0

    def __enter__(self) -> _CuFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: Any = None) -> int:
        return os.preadv(self._fd, [_bytes_of(buf, size)], file_offset)

    def write(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: Any = None) -> int:
        return os.pwrite(self._fd, _bytes_of(buf, size).tobytes(), file_offset)

    def pread(self, *args: Any, **kwargs: Any) -> _Future:
        return _Future(self.read(*args, **kwargs))

    def pwrite(self, *args: Any, **kwargs: Any) -> _Future:
        return _Future(self.write(*args, **kwargs))

    def raw_read(self, buf: Any, size: int | None = None, file_offset: int = 0, dev_offset: int = 0) -> int:
        return self.read(_bytes_of(buf, None)[dev_offset:], size, file_offset)

    def raw_write(self, buf: Any, size: int | None = None, file_offset: int = 0, dev_offset: int = 0) -> int:
        return self.write(_bytes_of(buf, None)[dev_offset:], size, file_offset)

    def raw_read_async(self, buf: Any, raw_stream: int, *args: Any, **kwargs: Any) -> _Future:
        return _Future(self.raw_read(buf, *args, **kwargs))

    def raw_write_async(self, buf: Any, raw_stream: int, *args: Any, **kwargs: Any) -> _Future:
        return _Future(self.raw_write(buf, *args, **kwargs))


def kvikio() -> dict[str, ModuleType]:
    top, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")
    vars(top).update(CuFile=_CuFile, defaults=defaults, memory_register=lambda a: None)
    vars(top).update(memory_deregister=lambda a: None)
    vars(defaults).update(set=lambda *_: None)
    return {"kvikio": top, "kvikio.defaults": defaults}


class _Descr:
    def __init__(self) -> None:
        self.type, self.handle, self.fs_ops = 0, SimpleNamespace(fd=-1), None

    @property
    def ptr(self) -> _Descr:
        return self


class _CuFileError(Exception):
    pass


class _CudaError(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class _Kind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


def cuda() -> dict[str, ModuleType]:
    memory: dict[int, Any] = {}

    def moved(call: Any) -> Any:
        def checked(fh: int, base: int, size: int, file_offset: int, buf_ptr_offset: int) -> int:
            if fh < 0:
                raise _CuFileError("invalid handle")
            return call(fh, _at(base + buf_ptr_offset, size), file_offset)

        return checked

    def malloc(size: int) -> tuple[Any, int]:
        held = ctypes.create_string_buffer(size)
        memory[ctypes.addressof(held)] = held
        return _CudaError.cudaSuccess, ctypes.addressof(held)

    def copy(dst: Any, src: Any, count: int, kind: int) -> tuple[Any]:
        to, of = (_at(p, count) if isinstance(p, int) else _bytes_of(p, count) for p in (dst, src))
        to[:] = of
        return (_CudaError.cudaSuccess,)

    cufile, runtime = ModuleType("cuda.bindings.cufile"), ModuleType("cuda.bindings.runtime")
    vars(cufile).update(
        Descr=_Descr,
        FileHandleType=SimpleNamespace(OPAQUE_FD=1),
        cuFileError=_CuFileError,
        driver_open=lambda: None,
        driver_close=lambda: None,
        handle_register=lambda descr: descr.handle.fd,
        handle_deregister=lambda fh: None,
        buf_register=lambda buf_ptr_base, length, flags: None,
        buf_deregister=lambda buf_ptr_base: None,
        read=moved(lambda fd, memory, at: os.preadv(fd, [memory], at)),
        write=moved(lambda fd, memory, at: os.pwrite(fd, memory.tobytes(), at)),
    )
    vars(runtime).update(
        cudaError_t=_CudaError,
        cudaMemcpyKind=_Kind,
        cudaMalloc=malloc,
        cudaFree=lambda p: (
            _CudaError.cudaSuccess if memory.pop(p, None) else _CudaError.cudaErrorInvalidValue,
        ),
        cudaMemcpy=copy,
        cudaDeviceSynchronize=lambda: (_CudaError.cudaSuccess,),
        cudaGetDeviceCount=lambda: (_CudaError.cudaSuccess, 1),
    )
    top, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    vars(top).update(bindings=bindings, __path__=[])
    vars(bindings).update(cufile=cufile, runtime=runtime, __path__=[])
    return {m.__name__: m for m in (top, bindings, cufile, runtime)}


def hip() -> dict[str, ModuleType]:
    """AMD's `hip` package, over nobounce's modules with its conventions."""
    from nobounce import hip as runtime
    from nobounce import hipfile as ours

    files = ModuleType("hip.hipfile")

    def with_status(result: Any) -> tuple[Any, ...]:
        return (result,) if isinstance(result, ours.Error) or not isinstance(result, tuple) else result

    def moved(call: Any) -> Any:
        def taken(
            fh: int, buffer_base: int, size: int, file_offset: int, buffer_offset: int
        ) -> tuple[Any, ...]:
            return with_status(call(fh, buffer_base, size, file_offset, buffer_offset))

        return taken

    vars(files).update(
        hipFileDescr=_Descr,
        hipFileFileHandleType=SimpleNamespace(hipFileHandleTypeOpaqueFD=1),
        hipFileDriverOpen=lambda: with_status(ours.driver_open()),
        hipFileDriverClose=lambda: with_status(ours.driver_close()),
        hipFileHandleRegister=lambda d: with_status(ours.handle_register(d.handle.fd)),
        hipFileHandleDeregister=ours.handle_deregister,
        hipFileBufRegister=lambda *a: with_status(ours.buf_register(*a)),
        hipFileBufDeregister=lambda p: with_status(ours.buf_deregister(p)),
        hipFileRead=moved(ours.read),
        hipFileWrite=moved(ours.write),
    )
    top = ModuleType("hip")
    vars(top).update(hip=runtime, hipfile=files, __path__=[])
    return {"hip": top, "hip.hip": runtime, "hip.hipfile": files}


@contextmanager
def installed(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Have `import` find these, and put back what was there."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
