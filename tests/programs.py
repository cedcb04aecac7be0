"""Seeded random programs of reads, writes, copies, events and faults over several streams, against a sequential model.

Every program is free of races by construction: before an operation touches a buffer or a part of the file, its stream waits
for whoever touched it last. Whatever schedule the stepper picks, the end must therefore be that of running the operations
one after the other in the order they were submitted.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import nobounce
from nobounce.device import Device
from nobounce.errors import TransferCancelledError
from nobounce.facts.types import FileFacts
from nobounce.io import file as file_module
from nobounce.io.engine import engine_for
from nobounce.runtimes import faults
from nobounce.runtimes.host.sim import SimRuntime
from nobounce.testing.stepper import Stepper

BLOCK = 4096
BLOCKS = 4
PARTS = 4
STREAMS = 3
OPS = 10


def run(seeds: Iterable[int], path: Path) -> None:
    """Run the programs of these seeds; an error names its own."""
    for seed in seeds:
        try:
            Stepper.run(lambda s, seed=seed: program(s, random.Random(seed), path), seed=seed)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise
        if seed % 100 == 0:
            gc.collect()  # a runtime holds a range of addresses, and is part of a cycle


@dataclass
class World:
    """What the streams did last to each resource, and what the sequential model says it holds."""

    streams: list[nobounce.Stream]
    buffers: list[nobounce.Buffer]
    contents: list[bytearray]
    file: bytearray
    last: dict[str, nobounce.Event] = field(default_factory=dict)
    transfers: list[tuple[nobounce.Transfer, str, int]] = field(default_factory=list)

    def order(self, stream: nobounce.Stream, *resources: str) -> None:
        for name in resources:
            if name in self.last:
                stream.wait(self.last[name])

    def done(self, stream: nobounce.Stream, *resources: str) -> None:
        event = stream.record()
        for name in resources:
            self.last[name] = event


def program(stepper: Stepper, rng: random.Random, path: Path) -> None:
    rules = [
        faults.rule("read", latency=rng.choice([0.0, 0.5]), every=rng.randint(1, 3)),
        faults.rule("read", error=errno.ENODEV, after=rng.randint(0, 4), times=rng.randint(0, 2)),
        faults.rule("write", error=errno.EREMOTEIO, after=rng.randint(0, 4), times=rng.randint(0, 1)),
        faults.rule("copy", latency=rng.choice([0.0, 0.25])),
    ]
    runtime = SimRuntime(scheduler=stepper, devices=1, faults=rules)
    device = Device._of(runtime, 0)
    start = rng.randbytes(BLOCK * PARTS)
    path.write_bytes(start)
    size = BLOCK * BLOCKS
    with nobounce.open(path, "r+") as f:
        world = World(
            [device.create_stream(nonblocking=rng.random() < 0.7) for _ in range(STREAMS)],
            [device.allocate(size) for _ in range(3)],
            [bytearray(size) for _ in range(3)],
            bytearray(start),
        )
        for n, buffer in enumerate(world.buffers):
            buffer.fill(0, stream=world.streams[0])
            world.done(world.streams[0], f"b{n}")
        for _ in range(OPS):
            step(world, f, rng)
        for stream in world.streams:
            stream.sync()
        for transfer, op, nbytes in world.transfers:
            assert transfer.done(), "a synchronised stream holds no unfinished transfer"
            receipt = transfer.result()
            assert receipt.nbytes == nbytes, (op, receipt)
        for buffer, expected in zip(world.buffers, world.contents, strict=True):
            assert buffer.numpy().tobytes() == bytes(expected)
        for stream in world.streams:
            stream.close()
        for buffer in world.buffers:
            buffer.close()
    assert path.read_bytes() == bytes(world.file)
    engine_for(runtime).close()


def step(world: World, f: nobounce.File, rng: random.Random) -> None:
    stream = rng.choice(world.streams)
    b = rng.randrange(len(world.buffers))
    at, part = rng.randrange(BLOCKS) * BLOCK, rng.randrange(PARTS) * BLOCK
    nbytes = rng.choice([BLOCK, BLOCK, 100, BLOCK // 2])
    held, buffer = world.contents[b], world.buffers[b]
    kind = rng.choice(["read", "read", "write", "write", "copy", "fill", "cancel"])
    if kind == "copy":
        other = (b + 1) % len(world.buffers)
        world.order(stream, f"b{b}", f"b{other}")
        world.buffers[other].copy_from(buffer, stream=stream)
        world.contents[other][:] = held
        world.done(stream, f"b{b}", f"b{other}")
        return
    if kind == "fill":
        value = rng.randrange(256)
        world.order(stream, f"b{b}")
        buffer.fill(value, stream=stream)
        held[:] = bytes([value]) * len(held)
        world.done(stream, f"b{b}")
        return
    resources = f"b{b}", f"f{part}"
    world.order(stream, *resources)
    require = rng.choice(["auto", "auto", "fallback"])
    size: object = nobounce.Cell(nbytes) if rng.random() < 0.3 else nbytes
    where = {"stream": stream, "nbytes": size, "file_offset": part, "buffer_offset": at, "require": require}
    if kind == "cancel":
        cancel(world, f, buffer, where)
    elif kind == "read":
        world.transfers.append((f.read_async(buffer, **where), kind, nbytes))
        held[at : at + nbytes] = world.file[part : part + nbytes]
    else:
        world.transfers.append((f.write_async(buffer, **where), kind, nbytes))
        world.file[part : part + nbytes] = held[at : at + nbytes]
    world.done(stream, *resources)


def cancel(world: World, f: nobounce.File, buffer: nobounce.Buffer, where: dict[str, object]) -> None:
    """A write cancelled behind a read: it moves nothing, or (too late to cancel) everything; made harmless either way."""
    transfer = f.read_async(buffer, **{**where, "nbytes": 0})
    if transfer.cancel():
        with pytest.raises(TransferCancelledError):
            transfer.result()
    else:
        world.transfers.append((transfer, "read", 0))


@pytest.fixture
def quick_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A file in memory that passes for one on a disk: the schedules are under test here, not the disk."""
    real = file_module.examine

    def on_a_disk(*given: Any, **more: Any) -> FileFacts:
        found = real(*given, **more)
        system = replace(found.filesystem, fstype="ext4", memory=False)
        return replace(found, filesystem=system, dio_mem_align=512, dio_offset_align=512)

    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.NamedTemporaryFile(dir=folder) as made:
        monkeypatch.setattr(file_module, "examine", on_a_disk)
        yield Path(made.name)
