"""nobounce report: a trace as one self-contained page."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Annotated, Any

import typer

from nobounce import outfile, scratch
from nobounce.cli.options import Json
from nobounce.cli.output import DONE, document, emit_json, run, say
from nobounce.errors import (
    ArgumentError,
    FileError,
    FormatError,
    NobounceError,
    counted,
    named_errors,
    printable,
)

TRIAL = 256 << 20
"""Bytes of the file that the disk is measured with."""


def command(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Files of `nobounce trace` or NOBOUNCE_TRACE.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = "report.html",
    limits: Annotated[
        str | None, typer.Option(metavar="FILE", help="Limits as `nobounce bench --json` found them.")
    ] = None,
    limits_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Measure what the disk can write, too, in a file made there and removed again.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure", help="Measure the limits now, reading the traced files where they are."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Bytes by backend and reason, timeline, throughput, latency, sizes, slowest
    transfers, and a roofline."""

    def action() -> int:
        from nobounce.observe.analyse import analyse
        from nobounce.observe.html import render
        from nobounce.observe.traceread import find, read

        if limits_dir is not None and (limits is not None or not measure):
            raise ArgumentError("--limits-dir measures: it goes with neither --limits nor --no-measure")
        if limits_dir is not None and not os.path.isdir(limits_dir):
            raise ArgumentError(f"--limits-dir: {printable(limits_dir)} is no folder")
        with outfile.create(output) as out:  # before the work: where it cannot be, that is said at once
            trace = read([p for t in traces for p in find(t)])
            if limits is not None:
                known = read_limits(limits)
            else:
                known = measure_limits(trace.events) if measure else {}
            if limits_dir is not None:
                known |= measure_writing(limits_dir)
            data = analyse(trace, known)
            page = render(data, ", ".join(os.path.basename(t) for t in traces))
            out.write(page.encode("utf-8", "backslashreplace"))
            out.commit()
        if as_json:
            shown = {k: v for k, v in data.items() if k not in ("slices", "throughput")}
            emit_json(document("report", output=output, **shown))
        else:
            t = data["totals"]
            say(
                f"{printable(output)}: fastpath {t['fastpath_bytes']} bytes, fallback {t['fallback_bytes']} "
                f"bytes in {counted(t['transfers'], 'transfer')}"
            )
            for roof in data["roofs"]:
                say(f"  {roof['way']}: {roof['sentence']}")
        return DONE

    raise typer.Exit(run("report", as_json, action))


def read_limits(path: str) -> dict[str, float]:
    """Limits in bytes per second from the JSON of `nobounce bench`. Raises ArgumentError,
    FileError and FormatError."""
    from nobounce.facts import regular
    from nobounce.observe import records

    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular.opener) as f:
            text = f.read()
    except OSError as e:
        raise FileError.from_oserror(e, path, "read") from e
    try:
        found = records.loads(text)
        wrong = records.limits_fault(found)
    except ValueError as e:
        wrong = f"{e!s:.200}"
    if wrong:
        raise FormatError(f"not the JSON of `nobounce bench`: {wrong}", filename=path)
    return {name: float(rate) for name, rate in found["limits"].items()}


def measure_writing(folder: str) -> dict[str, float]:
    """What the disk of this folder can write, in bytes per second, by a file of our own. Raises FileError."""
    from nobounce.observe import limits

    with named_errors(folder, "measure the disk in"):
        free = shutil.disk_usage(folder).free
        nbytes = min(TRIAL, free // 4) // limits.CHUNK * limits.CHUNK
        if not nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with scratch.unnamed(folder, nbytes) as (path, _):
            rate = limits.disk_write(path, nbytes)
    return {"disk write": rate} if rate else {}


def measure_limits(events: list[dict[str, Any]]) -> dict[str, float]:
    """Host memory, the disk of the largest traced file that is still there (read only), and the
    link of each traced device."""
    from nobounce.device import Device
    from nobounce.observe import limits

    found: dict[str, float] = {"host memory": limits.host_memory()}
    args = [e["args"] for e in events if e.get("cat") in ("transfer", "batch") and "args" in e]
    files = {a.get("filename", "") for a in args}
    there = sorted((p for p in files if os.path.isfile(p)), key=os.path.getsize)
    if there:
        found["disk read"] = limits.disk_read(there[-1])
    for name in sorted({a.get("device", "") for a in args}):
        try:
            to, back = limits.link(Device(name))
        except NobounceError:
            continue
        for key, rate in (("link to device", to), ("link from device", back)):
            found[key] = max(found.get(key, 0.0), rate)
    return {k: v for k, v in found.items() if v > 0}
