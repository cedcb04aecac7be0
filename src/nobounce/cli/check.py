"""nobounce check: will this file reach this GPU directly, and if not, what one change would fix it."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import typer

from nobounce.checks import capture as captures
from nobounce.checks.findings import Verdict, worst
from nobounce.checks.machine import Machine
from nobounce.checks.report import (
    Library,
    Survey,
    check_paths,
    libraries,
    survey,
    survey_data,
    verdict_data,
)
from nobounce.cli.options import Json
from nobounce.cli.output import complain, document, emit_json, run, say, table
from nobounce.config import settings
from nobounce.errors import ArgumentError, FileError, printable
from nobounce.facts.source import LiveSource, RecordingSource, Source

_DEVICE = re.compile(r"cpu|(sim|cuda|hip)(:\d+)?")

Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH ...]",
        help="Files or folders of files. None: the machine as a whole.",
        show_default=False,
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        "-d",
        metavar="D",
        help="cpu, sim:0, cuda:0, hip:0; may be given again. Default: every GPU, else cpu.",
    ),
]
Probe = Annotated[
    bool, typer.Option("--probe", help="Also make a small real transfer and report its receipt.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing: the exit code answers.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List the HIP and CUDA libraries found, too.")]
Capture = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.tar", help="Save the machine's answers, without addresses, serials and host names."
    ),
]
Replay = Annotated[
    str | None, typer.Option(metavar="FILE.tar", help="Judge a saved machine instead of this one.")
]


def command(
    paths: Paths = None,
    device: Devices = None,
    probe: Probe = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    capture: Capture = None,
    replay: Replay = None,
) -> None:
    """Say whether files reach devices directly, which layer decides it, and what one change would fix it."""

    def action() -> int:
        _refuse(bool(quiet and verbose), "--quiet and --verbose exclude each other")
        _refuse(bool(capture and replay), "--capture and --replay exclude each other")
        _refuse(bool(probe and replay), "--probe needs the machine itself, not a capture")
        _refuse(bool(probe and not paths), "--probe needs a file")
        source, asked, devices = _source(capture, replay, paths or [], device or [])
        for name in devices:
            _refuse(not _DEVICE.fullmatch(name), f"device {name!r}: choose cpu, sim:N, cuda:N or hip:N")
        machine = Machine(source, settings())
        machine.settings.check_contradiction()
        if asked:
            code = _files(machine, asked, devices, probe, as_json, quiet, verbose)
        else:
            code = _whole(machine, devices, as_json, quiet, verbose)
        if capture is not None and isinstance(source, RecordingSource):
            _save(capture, source, {"paths": asked, "devices": devices})
        return code

    raise typer.Exit(run("check", as_json and not quiet, action))


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise ArgumentError(why)


def _source(
    capture: str | None, replay: str | None, paths: list[str], devices: list[str]
) -> tuple[Source, list[str], list[str]]:
    """Whom to ask, and what about: a capture knows what it was made for."""
    if replay is not None:
        try:
            source, request = captures.restore(replay)
        except OSError as e:
            raise FileError.from_oserror(e, replay, "open") from e
        except (ValueError, UnicodeError) as e:
            raise ArgumentError(f"{printable(replay)}: {e}") from e
        return source, paths or _words(request, "paths"), devices or _words(request, "devices")
    full = [os.path.abspath(p) for p in paths]
    return (RecordingSource(LiveSource()) if capture is not None else LiveSource()), full, devices


def _words(request: dict[str, Any], name: str) -> list[str]:
    found = request.get(name)
    return [str(x) for x in found] if isinstance(found, list) else []


def _save(path: str, source: RecordingSource, request: dict[str, Any]) -> None:
    try:
        captures.save(path, source, request)
    except OSError as e:
        raise FileError.from_oserror(e, path, "write") from e
    complain(
        f"nobounce check: {printable(path)} holds this machine's answers: look through it before you share it"
    )


def _files(
    machine: Machine,
    paths: list[str],
    devices: list[str],
    probe: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    verdicts = check_paths(machine, paths, devices)
    probes: list[dict[str, Any] | None] = [None] * len(verdicts)
    if probe:
        from nobounce.cli.probe import settle, transfer

        probes = [transfer(v.path, v.device) for v in verdicts]
        verdicts = [settle(v, p) for v, p in zip(verdicts, probes, strict=True)]
    found = libraries(machine) if verbose else []
    if as_json and not quiet:
        data = [
            {**verdict_data(v), **({} if p is None else {"probe": p})}
            for v, p in zip(verdicts, probes, strict=True)
        ]
        extra = {"libraries": _libraries(found)} if verbose else {}
        emit_json(document("check", verdicts=data, exit_code=worst(verdicts), **extra))
    elif not quiet:
        if verbose:
            _print_libraries(found)
        for i, (verdict, tried) in enumerate(zip(verdicts, probes, strict=True)):
            say("\n" + verdict_text(verdict, tried) if i else verdict_text(verdict, tried))
    return worst(verdicts)


def verdict_text(verdict: Verdict, tried: dict[str, Any] | None = None) -> str:
    """A verdict as people read it: each layer's answer, the file that told, and the cure."""
    head = f"{printable(verdict.path)} on {verdict.device}: {verdict.verdict}"
    if verdict.verdict == "fastpath" and verdict.direct_to == "host":
        head += " (direct to host memory: no page cache and no relay, but not P2P)"
    lines = [head]
    for f in verdict.findings:
        mark = " - " if not f.decides and f.answer == "yes" else f.answer
        decided = " <- decides" if f in verdict.decided_by else ""
        code = f" [{f.code}]" if f.answer == "no" and f.code else ""
        lines.append(f"  {mark:<7}  {f.layer:<11}  {printable(f.sentence)}{code}{decided}")
        lines.append(f"  {'':<7}  {'':<11}    read from {printable(f.read_from)}")
    if tried is not None:
        lines.append(f"  probe: {printable(str(tried['says']))}")
    if verdict.cure is not None:
        lines.append(f"  cure: {printable(verdict.cure.sentence)}" + (":" if verdict.cure.command else ""))
        if verdict.cure.command:
            lines.append(f"    {printable(verdict.cure.command)}")
    return "\n".join(lines)


def _whole(machine: Machine, devices: list[str], as_json: bool, quiet: bool, verbose: bool) -> int:
    found = survey(machine, devices)
    for warning in found.warnings:
        complain(f"nobounce check: {printable(warning)}")
    if quiet:
        return found.exit_code
    listed = libraries(machine) if verbose else []
    if as_json:
        extra = {"libraries": _libraries(listed)} if verbose else {}
        emit_json(document("check", **survey_data(found), exit_code=found.exit_code, **extra))
    else:
        say("\n" + printable(" ".join(found.system)))
        if verbose:
            _print_libraries(listed)
        say(survey_text(found))
    return found.exit_code


_SHOWN = {"yes": "yes", "no": "no", "unknown": "unverified"}


def survey_text(found: Survey) -> str:
    """hipFile's report (G-2, G-8), with a column and a row for each device."""
    lines = []
    if found.volumes:
        names = [d.name for d in found.devices]
        rows = [
            [
                printable(v.mount_point),
                v.fstype,
                printable(v.device),
                printable(v.backing),
                _SHOWN[v.o_direct],
                _SHOWN[v.hipfile],
                *(v.verdicts.get(n, "") for n in names),
            ]
            for v in found.volumes
        ]
        headings = [
            "MOUNTPOINT",
            "FSTYPE",
            "DEVICE",
            "BACKING",
            "O_DIRECT",
            "HIPFILE",
            *(n.upper() for n in names),
        ]
        lines += ["Mounted volumes:", table(headings, rows)]
    else:
        lines.append("No block-backed volumes found.")
    width = max(len(c.name) for c in found.components)
    words = {"yes": "True", "no": "False", "unknown": "unknown"}
    lines += ["", "AIS support in:"]
    lines += [f"  {c.name:<{width}} : {words[c.answer]}" for c in found.components]
    lines += ["", "Devices:"]
    devices = [
        [d.name, printable(d.model) or "-", d.bdf or "-", d.direct, printable(d.why)] for d in found.devices
    ]
    lines.append(table(["DEVICE", "MODEL", "PCI", "DIRECT", "WHY"], devices))
    return "\n".join(lines)


def _libraries(found: list[Library]) -> list[dict[str, str]]:
    return [{"path": x.path, "note": x.note} for x in found]


def _print_libraries(found: list[Library]) -> None:
    say("HIP and CUDA libraries:")
    for one in found:
        say(f"  {printable(one.path)}" + (f" ({printable(one.note)})" if one.note else ""))
    if not found:
        say("  none found")
