"""Issue 20, truth 3: cache="avoid" leaves no page, be the request's edges aligned or not."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

import nobounce
from filesystems import Machine
from pages import resident

MIB = 1 << 20
PLACES = [(1, 4096), (4095, 2), (100, 300_000), (8192, 65_537), (3 * MIB - 5, MIB), (512, 512)]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("name", ["ext4-ordered", "xfs", "btrfs", "overlay"])
def test_reads_with_unaligned_edges(disks: Machine, name: str, device: str) -> None:
    data = random.Random(3).randbytes(3 * MIB + 1000)
    path = disks.get(name) / "edges.bin"
    with path.open("wb") as f:
        f.write(data)
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    on = nobounce.Device(device)
    with nobounce.open(path) as file, on.allocate(4 * MIB) as buffer, on.create_stream() as stream:
        for at, nbytes in PLACES:
            for shift in (0, 1, 512):
                receipt = file.read(buffer, nbytes=nbytes, file_offset=at, buffer_offset=shift, cache="avoid")
                assert receipt.nbytes == min(nbytes, len(data) - at)
                assert resident(path) == 0, (at, nbytes, shift, receipt.explain())
            file.read_async(buffer, stream=stream, nbytes=nbytes, file_offset=at, cache="avoid").result()
            assert resident(path) == 0, (at, nbytes)
        offsets, sizes = np.array(PLACES).T
        # Apart from each other: where two direct reads write to one place, btrfs may find that neither fits its checksum.
        with on.allocate(int(sizes.sum())) as apart, nobounce.Batch() as batch:
            batch.read(file, apart, file_offsets=offsets, nbytes=sizes, cache="avoid")
            batch.wait().check()
        assert resident(path) == 0


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("nbytes", [4096, 65_536])
def test_batches_into_memory_that_nothing_has_touched(disks: Machine, device: str, nbytes: int) -> None:
    """btrfs serves such memory from the page cache, unless its pages are made first."""
    path = disks.get("btrfs") / "untouched.bin"
    path.write_bytes(random.Random(4).randbytes(2 * MIB))
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for gap in (1, 4):
        on = nobounce.Device(device).allocate(16 * nbytes)
        with nobounce.open(path) as file, on as buffer, nobounce.Batch() as batch:
            places = np.arange(4)
            batch.read(
                file,
                buffer,
                file_offsets=places * 3 * 131_072,
                nbytes=nbytes,
                buffer_offsets=places * gap * nbytes,
            )
            batch.wait().check()
            assert batch.receipt.fastpath_bytes == 4 * nbytes
        assert resident(path) == 0
