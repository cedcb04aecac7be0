"""File to device and back on four registered streams, with no host synchronisation between the read and the write.

    python examples/roundtrip_async_multi_stream_registered.py READ_FILE WRITE_FILE [GPUID]

The example of that name in hipFile, step by step on both APIs: `nobounce.hipfile`, which speaks hipFile's own names, and
nobounce's objects. READ_FILE is overwritten with a pattern, WRITE_FILE with what came back. GPUID is an ordinal, or a name
such as sim:1; without it, the default device. docs/walkthrough.md explains each step. Exit code 1: bytes are missing or wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

import nobounce
from nobounce import hipfile

STREAMS = 4
SLICE = 1 << 20
TOTAL = STREAMS * SLICE
ALL_FLAGS = hipfile.STREAM_FLAGS_MASK


class Failed(Exception):
    """A step did not do what it should."""


def seed(path: str, data: bytes) -> None:
    """Write the file by plain POSIX calls, and to the disk; it keeps its length where that is more."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def fnv1a(path: str, nbytes: int) -> int:
    """FNV-1a 64 of the first bytes of a file."""
    value = 14695981039346656037
    with open(path, "rb") as f:
        for byte in f.read(nbytes):
            value = ((value ^ byte) * 1099511628211) & 0xFFFF_FFFF_FFFF_FFFF
    return value


def check(error: hipfile.Error, doing: str) -> None:
    """Stop at a status that is not success; an Error is true when something went wrong."""
    if error:
        raise Failed(f"{doing}: {error}")


def with_hipfile(read_path: str, write_path: str, device: nobounce.Device) -> None:
    """The published steps by their published names. Whatever was set up is undone in reverse, also half-way."""
    with ExitStack() as undo:
        # 1. The files. Each descriptor is registered once and shared by all streams.
        source_fd = os.open(read_path, os.O_RDONLY)
        undo.callback(os.close, source_fd)
        target_fd = os.open(write_path, os.O_RDWR | os.O_CREAT, 0o644)
        undo.callback(os.close, target_fd)

        # 2. The driver, and which device's runtime plain handles and pointers belong to.
        hipfile.use(device)
        undo.callback(hipfile.use, None)
        check(hipfile.driver_open(), "driver_open")
        undo.callback(hipfile.driver_close)

        # 3. The descriptors.
        error, source = hipfile.handle_register(source_fd)
        check(error, f"handle_register {read_path}")
        undo.callback(hipfile.handle_deregister, source)
        error, target = hipfile.handle_register(target_fd)
        check(error, f"handle_register {write_path}")
        undo.callback(hipfile.handle_deregister, target)

        # 4. Memory and a stream for each slice, zeroed in stream order. The order of teardown is the published one: wait for
        #    the stream, deregister it, destroy it, deregister the buffer, free it.
        lanes = []
        for _ in range(STREAMS):
            memory = undo.enter_context(device.allocate(SLICE))
            check(hipfile.buf_register(memory.handle, SLICE), "buf_register")
            undo.callback(hipfile.buf_deregister, memory.handle)
            stream = undo.enter_context(device.create_stream())
            check(hipfile.stream_register(stream.handle, ALL_FLAGS), "stream_register")
            undo.callback(hipfile.stream_deregister, stream.handle)
            undo.callback(stream.sync)
            memory.fill(0, stream=stream)
            lanes.append((memory, stream))

        # 5. A read and a write on each stream. Nothing waits in between: the stream keeps them in order.
        counts = []
        for i, (memory, stream) in enumerate(lanes):
            size, offset, start = hipfile.Cell(SLICE), hipfile.Cell(i * SLICE), hipfile.Cell(0)
            read, written = hipfile.Cell(), hipfile.Cell()
            to_device = hipfile.read_async(source, memory.handle, size, offset, start, read, stream.handle)
            check(to_device, f"read_async of slice {i}")
            to_file = hipfile.write_async(target, memory.handle, size, offset, start, written, stream.handle)
            check(to_file, f"write_async of slice {i}")
            counts.append((read, written))

        # 6. The counts are valid once the stream has been waited for.
        for i, (_, stream) in enumerate(lanes):
            stream.sync()
            for what, count in zip(("read", "write"), counts[i], strict=True):
                if count.value != SLICE:
                    raise Failed(f"{what} of slice {i}: {count.value} of {SLICE} bytes")


def with_objects(read_path: str, write_path: str, device: nobounce.Device) -> None:
    """The same on nobounce's own objects: they own what they need, and an error is an exception with its receipt."""
    with ExitStack() as undo:
        # 1 to 3. Files are opened, not registered; both kinds of descriptor are found when they are needed.
        source = undo.enter_context(nobounce.open(read_path))
        target = undo.enter_context(nobounce.open(write_path, "r+"))

        # 4. Memory and streams. Registering a stream is the same promise as above; plain integers are fixed without it.
        lanes = []
        for _ in range(STREAMS):
            memory = undo.enter_context(device.allocate(SLICE))
            stream = undo.enter_context(device.create_stream())
            nobounce.register_stream(stream, nobounce.StreamFlags.ALL)
            undo.callback(nobounce.deregister_stream, stream)
            undo.callback(stream.sync)
            memory.fill(0, stream=stream)
            lanes.append((memory, stream))

        # 5. Each call gives a Transfer; dropping it would lose nothing.
        transfers = []
        for i, (memory, stream) in enumerate(lanes):
            transfers.append(source.read_async(memory, stream=stream, file_offset=i * SLICE))
            transfers.append(target.write_async(memory, stream=stream, file_offset=i * SLICE))

        # 6. A receipt says where the bytes went; a failed transfer raises here.
        for transfer in transfers:
            receipt = transfer.result()
            if receipt.nbytes != SLICE:
                raise Failed(f"{receipt.op} of {receipt.filename}: {receipt.nbytes} of {SLICE} bytes")


def roundtrip(
    api: Callable[[str, str, nobounce.Device], None], read_path: str, write_path: str, device: nobounce.Device
) -> str:
    """Run one of the two, compare the files, and give hipFile's line. Raises Failed and NobounceError."""
    seed(read_path, bytes(i & 0xFF for i in range(256)) * (TOTAL // 256))
    seed(write_path, bytes(TOTAL))
    api(read_path, write_path, device)
    there, back = fnv1a(read_path, TOTAL), fnv1a(write_path, TOTAL)
    if there != back:
        raise Failed(f"{read_path} and {write_path} differ: 0x{there:016x}, 0x{back:016x}")
    return f"OK  {read_path} == {write_path}  ({TOTAL} bytes across {STREAMS} registered streams, hash 0x{there:016x})"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(
            "usage: roundtrip_async_multi_stream_registered.py READ_FILE WRITE_FILE [GPUID]", file=sys.stderr
        )
        return 1
    read_path, write_path, *gpu = arguments
    try:
        device = nobounce.Device(int(gpu[0]) if gpu and gpu[0].isdigit() else gpu[0] if gpu else None)
        for api in (with_hipfile, with_objects):
            print(roundtrip(api, read_path, write_path, device))
    except (Failed, nobounce.NobounceError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
