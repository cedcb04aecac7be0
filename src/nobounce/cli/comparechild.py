"""One run of `nobounce compare`, in a process of its own: the variables that force a backend
are read once per process."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from nobounce.errors import NobounceError, RouteError

PAGE = 4096


def measure(
    path: str, device_name: str, streams: int, slice_nbytes: int, op: str, limit: int
) -> dict[str, Any]:
    """Move the file's first `limit` bytes in slices, round the streams; seconds from the first
    submission to the last end."""
    from nobounce.device import Device
    from nobounce.io.opening import open as open_file
    from nobounce.observe.snapshot import stats

    device = Device(device_name)
    nbytes = min(os.path.getsize(path), limit)
    nbytes = -(-nbytes // PAGE) * PAGE if op == "read" else nbytes // PAGE * PAGE
    errors: list[str] = []
    with open_file(path, "r" if op == "read" else "r+") as f:
        lanes = [device.create_stream() for _ in range(streams)]
        buffers = [device.allocate(slice_nbytes) for _ in range(streams)]
        for buffer, lane in zip(buffers, lanes, strict=True):
            buffer.fill(1, stream=lane)
            lane.sync()
        drop(path)
        begin = time.perf_counter()
        transfers = []
        try:
            for i, start in enumerate(range(0, nbytes, slice_nbytes)):
                n = min(slice_nbytes, nbytes - start)
                call = f.read_async if op == "read" else f.write_async
                transfers.append(
                    call(buffers[i % streams], stream=lanes[i % streams], nbytes=n, file_offset=start)
                )
        except RouteError as e:
            errors.append(f"refused: {'; '.join(r.code for r in e.refusals)}")
        for transfer in transfers:
            try:
                transfer.result()
            except NobounceError as e:
                errors.append(str(e))
        if op == "write":
            f.sync()
        seconds = time.perf_counter() - begin
        for lane in lanes:
            lane.close()
        for buffer in buffers:
            buffer.close()
    return {"seconds": seconds, "errors": errors[:3], "stats": stats().to_dict()}


def drop(path: str) -> None:
    """Put the file on the disk and out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main() -> None:
    """Arguments as one JSON list; prints one JSON object."""
    try:
        result = measure(*json.loads(sys.argv[1]))
    except (NobounceError, OSError) as e:
        result = {"seconds": 0.0, "errors": [str(e)], "stats": None}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
