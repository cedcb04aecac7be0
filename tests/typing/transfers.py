"""Reads and writes as type checkers see them: which memory, streams and integers they take, and what they give."""

from __future__ import annotations

import array
import asyncio
import ctypes
import mmap
from typing import Any, assert_type

import numpy as np
import torch

import nobounce

device = nobounce.Device("cuda:0")
buffer = device.allocate(4096)
stream = device.create_stream()
file = nobounce.open("f", "r+")
assert_type(file, nobounce.File)
assert_type(buffer, nobounce.Buffer)
assert_type(stream, nobounce.Stream)

# Memory
assert_type(file.read(buffer), nobounce.Receipt)
file.read(nobounce.load("m")["w"])
file.read(bytearray(4))
file.read(memoryview(bytearray(4)))
file.read(mmap.mmap(-1, 4096))
file.read(array.array("d", [1.0]))
file.read((ctypes.c_char * 16)())
file.read(np.empty(4, np.float32))
file.read(np.empty(4, np.float32)[1:])
file.read(torch.empty(4))
file.write(b"bytes", fsync=True, cache="use")


class OnGpu:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


file.read(OnGpu(), nbytes=16, file_offset=4096, buffer_offset=0, require="fastpath", cache="avoid")
assert_type(file.explain(buffer), nobounce.Route)
assert_type(file.explain(device, nbytes=4096, op="write"), nobounce.Route)
assert_type(nobounce.as_buffer(torch.empty(4), write=True), nobounce.Buffer)
buffer.copy_from(np.empty(4096, np.uint8), stream=None)
assert_type(buffer.copy_to(stream=stream), nobounce.Buffer)

# Streams
assert_type(file.read_async(buffer, stream=stream), nobounce.Transfer)
file.read_async(buffer, stream=None)
file.read_async(buffer, stream=0x7F00)
file.read_async(buffer, stream=torch.cuda.current_stream())
file.read_async(buffer, stream=nobounce.LEGACY_DEFAULT_STREAM)


class OfCupy:
    ptr: int = 0


class OfCudaCore:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 1


file.write_async(buffer, stream=OfCupy())
file.write_async(buffer, stream=OfCudaCore(), fsync=True)

# Integers that are bound late
nbytes, done = nobounce.Cell(4096), ctypes.c_int64()
file.read_async(buffer, stream=stream, nbytes=nbytes, file_offset=ctypes.c_size_t(0), bytes_done=done)
file.read_async(buffer, stream=stream, nbytes=np.int64(4), buffer_offset=np.array(0), bytes_done=np.array(0))
file.read_async(buffer, stream=stream, file_offset=np.zeros((), np.int64), bytes_done=nobounce.Cell())


async def wait(transfer: nobounce.Transfer) -> None:
    assert_type(await transfer, nobounce.Receipt)
    assert_type(await asyncio.wait_for(transfer, 1.0), nobounce.Receipt)


assert_type(file.read_async(buffer, stream=stream).result(timeout=1.0), nobounce.Receipt)

# Many blocks
offsets = np.arange(8, dtype=np.int64) * 4096
assert_type(file.read_many(buffer, file_offsets=offsets, nbytes=512), nobounce.Receipt)
with nobounce.Batch(capacity=64) as batch:
    batch.read(file, buffer, file_offsets=[0, 4096], nbytes=512, cookies=["a", object()])
    batch.read([file, file], torch.empty(8), file_offsets=range(2), nbytes=(4, 4), file_index=[0, 1])
    ids = batch.write(file, b"8 bytes.", file_offsets=0, nbytes=8, timeout=1.0)
    assert_type(ids, np.ndarray[Any, Any])
    batch.cancel(ids)
    batch.cancel([1, 2])
    result = batch.wait(min_n=1).check()
    assert_type(result, nobounce.BatchResult)
    for event in result:
        assert_type(event, nobounce.BatchEvent)
        assert_type(event.error, Exception | None)

# Errors carry what had moved
try:
    file.read(buffer)
except nobounce.TransferError as error:
    assert_type(error.receipt, nobounce.Receipt | None)
    assert_type(error.nbytes, int)
except nobounce.RouteError as error:
    assert_type(error.refusals, tuple[nobounce.Refusal, ...])
    assert_type(error.receipt, nobounce.Receipt | None)


# A caller's own wrapper
def read_all(
    path: str, into: nobounce.BufferLike, on: nobounce.StreamLike, size: nobounce.IntLike
) -> nobounce.Transfer:
    with nobounce.open(path) as opened:
        return opened.read_async(into, stream=on, nbytes=size)


def gather(
    into: nobounce.BufferLike, offsets: nobounce.IntArrayLike, where: nobounce.DeviceLike
) -> nobounce.Device:
    file.read_many(into, file_offsets=offsets, nbytes=1)
    return nobounce.Device(where)


read_all("f", bytearray(1), None, 1)
gather(np.empty(1), [1], torch.device("cpu"))
gather(np.empty(1), np.array([1]), None)

# In stream order
assert_type(batch.submit(), int)
assert_type(batch.submit(stream=stream), nobounce.BatchTransfer)
assert_type(batch.submit(stream=torch.cuda.current_stream()).result(), nobounce.BatchResult)
assert_type(file.read_many(buffer, file_offsets=0, nbytes=1), nobounce.Receipt)
assert_type(file.read_many(buffer, file_offsets=0, nbytes=1, stream=stream), nobounce.Transfer)

# Devices
nobounce.Device(torch.device("cuda", 0))
nobounce.Device(0)
device.can_access_peer("cuda:1")
device.create_stream(torch.cuda.current_stream())
stream.wait(stream.record())
stream.wait(torch.cuda.current_stream())

file.read("text")  # wrong
file.read(None)  # wrong
file.read([1, 2])  # wrong
file.read(4096)  # wrong
file.write("text")  # wrong
file.read(buffer, cache="always")  # wrong
file.read(buffer, nbytes=1.5)  # wrong
file.read_async(buffer)  # wrong
file.read_async(buffer, stream="null")  # wrong
file.read_async(buffer, stream=device)  # wrong
file.read_async(buffer, stream=stream, nbytes=1.5)  # wrong
file.read_async(buffer, stream=stream, nbytes=ctypes.c_double())  # wrong
file.read_async(buffer, stream=stream, bytes_done=0)  # wrong
file.read_many(buffer, file_offsets=[0.5], nbytes=1)  # wrong
file.read_many(buffer, file_offsets="0", nbytes=1)  # wrong
file.read_many(buffer, file_offsets=np.array([0.5], np.float64), nbytes=1)  # wrong: pyright
batch.read(file, buffer, file_offsets=0, nbytes=None)  # wrong
batch.read(file, "text", file_offsets=0, nbytes=1)  # wrong
nobounce.as_buffer(7, write=False)  # wrong
nobounce.Device(b"cuda:0")  # wrong
nobounce.Device(stream)  # wrong
stream.wait("other")  # wrong
