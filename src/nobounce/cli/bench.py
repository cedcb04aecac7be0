"""nobounce bench: the limits of this machine, then load, read and write through each
backend, in fio's words."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import statistics
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce import outfile, scratch
from nobounce.cli.comparechild import drop
from nobounce.cli.options import DeviceName, Json, parse_size
from nobounce.cli.output import DONE, NOT_MET, complain, document, emit_json, run, say
from nobounce.errors import ArgumentError, FileError, RouteError, counted, named, named_errors, printable
from nobounce.facts.machine import own_cpus, this_machine

if TYPE_CHECKING:
    from nobounce.device import Device
    from nobounce.io.receipt import Receipt

MIB, PAGE = 1 << 20, 4096
LEAST, MOST = 64 * MIB, 1024 * MIB
TENSORS = 16


def command(
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="Where to make the test files; everything is removed again."),
    ],
    device: DeviceName = None,
    size: Annotated[
        str | None,
        typer.Option(help="Bytes of the test file. Default: by memory and free space, 64 MiB to 1 GiB."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Samples of each.")] = 3,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON there too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the disk, host memory and the link, then load, read and write through fastpath and fallback."""

    def action() -> int:
        from nobounce.device import Device, default_device

        target = Device(device) if device is not None else default_device()
        if not os.path.isdir(folder):
            raise ArgumentError(f"{named(folder)} is no folder")
        nbytes = parse_size("--size", size) // MIB * MIB if size is not None else choose_size(folder)
        if nbytes < MIB:
            raise ArgumentError("--size: at least 1MiB")
        if shutil.disk_usage(folder).free < 3 * nbytes:
            raise ArgumentError(
                f"{printable(folder)} has no room for {3 * nbytes} bytes: choose a smaller --size"
            )
        with contextlib.ExitStack() as stack:
            out = None if output is None else stack.enter_context(outfile.create(output))
            with (
                named_errors(folder, "measure in", outfile.CURES),
                scratch.unnamed(folder) as (model, _),
                scratch.unnamed(folder, nbytes) as (blank, _),
            ):
                data = measure(model, blank, target, nbytes, rounds, (lambda _: None) if as_json else say)
            made = document("bench", folder=folder, device=target.name, **data)
            code = DONE
            if out is not None:
                try:
                    out.write(json.dumps(made, indent=2).encode())
                    out.commit()
                except FileError as e:
                    complain(f"nobounce bench: {e}")
                    code = NOT_MET
        if as_json or code:  # what was measured is not lost with the file
            emit_json(made)
        return code

    raise typer.Exit(run("bench", as_json, action))


def choose_size(folder: str) -> int:
    """A sixteenth of the memory that this process may use or an eighth of the free space, from 64 MiB to 1
    GiB, but no more than a quarter of that memory."""
    memory = this_machine().own_memory_nbytes
    wanted = max(LEAST, min(MOST, memory // 16, shutil.disk_usage(folder).free // 8))
    return min(wanted, memory // 4) // MIB * MIB


def measure(
    model: str, out: str, device: Device, nbytes: int, rounds: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Every figure. `model` is made into a model file; `out` has `nbytes` bytes to be written over."""
    from nobounce.observe import limits
    from nobounce.observe.roofline import roofs

    machine: dict[str, Any] = {
        "cpu": platform.machine(),
        "cores": own_cpus(),
        "kernel": platform.release(),
        "size": nbytes,
    }
    tell(
        f"machine: {machine['cpu']}, {counted(machine['cores'], 'core')}, Linux {machine['kernel']}; device "
        f"{device.name}; file of {nbytes // MIB} MiB"
    )
    make_model(model, nbytes)
    found = {
        "disk read": limits.disk_read(model),
        "disk write": limits.disk_write(out, nbytes),
        "host memory": limits.host_memory(),
    }
    found["link to device"], found["link from device"] = limits.link(device)
    known = {k: v for k, v in found.items() if v > 0}
    for name, rate in known.items():
        tell(f"limit {name}: BW={rate / MIB:.0f}MiB/s ({rate / 1e6:.0f}MB/s)")
    jobs = []
    for verb in ("load", "read", "write"):
        for backend in ("fastpath", "fallback"):
            job = _job(verb, backend, model, out, device, nbytes, rounds)
            tell(line(job))
            jobs.append(job)
    measured: dict[str, float] = {}
    for job in jobs:
        if job["bw_bytes"] and job["verb"] != "load":
            measured[f"{job['backend']} {job['verb']}"] = job["bw_bytes"]
    found_roofs = roofs(measured, known)
    for roof in found_roofs:
        tell(f"{roof.way}: {roof.sentence}")
    return {"machine": machine, "limits": known, "jobs": jobs, "roofs": [r.to_dict() for r in found_roofs]}


def make_model(path: str, nbytes: int) -> None:
    """A safetensors file of about `nbytes` bytes: bytes as they come, which no file
    system can compress away."""
    each = nbytes // TENSORS
    header = {
        f"t{i}": {"dtype": "U8", "shape": [each], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(TENSORS)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-(len(raw) + 8) % PAGE)
    block = os.urandom(MIB)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for start in range(0, each * TENSORS, MIB):
            f.write(block[: min(MIB, each * TENSORS - start)])
        f.flush()
        os.fsync(f.fileno())


def _job(
    verb: str, backend: Any, model: str, out: str, device: Device, nbytes: int, rounds: int
) -> dict[str, Any]:
    job: dict[str, Any] = {
        "verb": verb,
        "backend": backend,
        "io_bytes": 0,
        "bw_bytes": 0,
        "samples": [],
        "error": "",
    }
    try:
        for _ in range(rounds):
            receipt, seconds = _once(verb, backend, model, out, device, nbytes)
            job["io_bytes"] = receipt.nbytes
            job["samples"].append(seconds)
            other = receipt.fallback_bytes if backend == "fastpath" else receipt.fastpath_bytes
            if other:
                job["error"] = f"{counted(other, 'byte')} went the other way"
    except RouteError as e:
        job["error"] = f"refused: {'; '.join(r.code for r in e.refusals)}"
    if job["samples"] and not job["error"]:
        seconds = statistics.median(job["samples"])
        job |= {"runtime_ms": seconds * 1e3, "bw_bytes": job["io_bytes"] / seconds, "iops": 1 / seconds}
    return job


def _once(
    verb: str, backend: Any, model: str, out: str, device: Device, nbytes: int
) -> tuple[Receipt, float]:
    from nobounce.formats.load import load
    from nobounce.io.opening import open as open_file

    if verb == "load":
        drop(model)
        begin = time.perf_counter()
        loaded = load(model, device=device, require=backend, cache="avoid")
        return loaded.receipt, time.perf_counter() - begin
    path = model if verb == "read" else out
    with (
        open_file(path, "r" if verb == "read" else "r+") as f,
        device.allocate(nbytes) as buffer,
        device.create_stream() as stream,
    ):
        buffer.fill(1, stream=stream)
        stream.sync()
        drop(path)
        begin = time.perf_counter()
        if verb == "read":
            receipt = f.read(buffer, nbytes=nbytes, require=backend, cache="avoid")
        else:
            receipt = f.write(buffer, nbytes=nbytes, require=backend, fsync=True)
        return receipt, time.perf_counter() - begin


def line(job: dict[str, Any]) -> str:
    """The job as fio would say it."""
    name = f"{job['verb']} {job['backend']}"
    if job["error"]:
        return f"{name}: withheld: {job['error']}"
    samples = ", ".join(f"{s * 1e3:.0f}" for s in job["samples"])
    return (
        f"{name}: IOPS={job['iops']:.1f}, BW={job['bw_bytes'] / MIB:.0f}MiB/s "
        f"({job['bw_bytes'] / 1e6:.0f}MB/s)"
        f"({job['io_bytes'] // MIB}MiB/{job['runtime_ms']:.0f}msec); samples {samples} msec"
    )
