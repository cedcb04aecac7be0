"""Random programs over several streams against a sequential model (programs.py), and schedules that mattered once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import nobounce
from nobounce.device import Device
from nobounce.errors import TransferError
from nobounce.io.engine import engine_for
from nobounce.runtimes import faults
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing.stepper import Stepper
from programs import BLOCK, quick_file, run

__all__ = ["quick_file"]

PROGRAMS = 10_000
SHARDS = 10


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_ten_thousand_seeded_programs_end_as_the_sequential_model_says(shard: int, quick_file: Path) -> None:
    run(range(shard * PROGRAMS // SHARDS, (shard + 1) * PROGRAMS // SHARDS), quick_file)


def test_a_fault_in_one_transfer_poisons_no_other(tmp_path: Path) -> None:
    """An EIO on one of many transfers: the others have their bytes, later work of its stream too."""
    path = tmp_path / "f"
    data = os.urandom(BLOCK * 8)
    path.write_bytes(data)

    def steps(stepper: Stepper) -> None:
        runtime = SimRuntime(
            scheduler=stepper, devices=1, faults=[faults.rule("read", error=errno.EIO, after=3, times=1)]
        )
        device = Device._of(runtime, 0)
        with nobounce.open(path) as f, device.create_stream() as stream, device.allocate(len(data)) as buffer:
            buffer.fill(0, stream=stream)
            moves = [
                f.read_async(
                    buffer,
                    stream=stream,
                    nbytes=BLOCK,
                    file_offset=k * BLOCK,
                    buffer_offset=k * BLOCK,
                    cache="avoid",
                )
                for k in range(8)
            ]
            with pytest.raises(TransferError):
                stream.sync()
            failed = [m for m in moves if m.exception() is not None]
            assert len(failed) == 1
            error = failed[0].exception()
            assert isinstance(error, TransferError)
            assert (error.errno, error.backend) == (errno.EIO, "fastpath")
            bad = moves.index(failed[0])
            expected = data[: bad * BLOCK] + bytes(BLOCK) + data[(bad + 1) * BLOCK :]
            assert buffer.numpy().tobytes() == expected
        engine_for(runtime).close()

    for seed in range(50):
        Stepper.run(steps, seed=seed)


def test_streams_do_not_queue_behind_each_other(tmp_path: Path) -> None:
    """8 streams of 4 transfers with a second of storage latency each take 4 seconds, not 32 (virtual time; hipFile J-20)."""
    path = tmp_path / "f"
    path.write_bytes(bytes(BLOCK))

    def steps(stepper: Stepper) -> None:
        runtime = SimRuntime(scheduler=stepper, devices=1, faults=[faults.rule("read", latency=1.0)])
        device = Device._of(runtime, 0)
        streams = [device.create_stream() for _ in range(8)]
        with nobounce.open(path) as f, device.allocate(BLOCK * 8) as buffer:
            begin = stepper.now()
            for _ in range(4):
                for n, stream in enumerate(streams):
                    f.read_async(buffer, stream=stream, nbytes=BLOCK, buffer_offset=n * BLOCK, cache="avoid")
            for stream in streams:
                stream.sync()
            assert stepper.now() - begin == pytest.approx(4.0)
        engine_for(runtime).close()

    Stepper.run(steps, seed=1)
