"""nobounce check: will this file reach this GPU directly, and if not, what one change would fix it."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce import misnamed
from nobounce.cli.options import Json
from nobounce.cli.output import complain, document, emit_json, run, say
from nobounce.config import Settings, settings
from nobounce.errors import ArgumentError, ConfigError, FileError, FormatError, printable
from nobounce.facts.source import LiveSource, RecordingSource, Source

if TYPE_CHECKING:
    from nobounce.checks.machine import Machine
    from nobounce.checks.report import Library

_SETTINGS = ("allow_compat_mode", "force_compat_mode", "unsupported_file_systems", "device")
"""What of the settings a verdict depends on: a capture keeps it."""
UNKNOWN = 3
"""The exit code of an unknown verdict, and of a check that an error kept from one: 1 would
say that fallback works."""
_DEVICE = re.compile(r"cpu|(sim|cuda|hip)(:[0-9]{1,9})?")
_CHOICES = "cpu, sim:N, cuda:N or hip:N"

Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH...",
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
        from nobounce.checks.machine import Machine

        _refuse(bool(quiet and verbose), "--quiet and --verbose exclude each other")
        _refuse(bool(capture and replay), "--capture and --replay exclude each other")
        _refuse(bool(probe and replay), "--probe needs the machine itself, not a capture")
        _refuse(bool(probe and not paths), "--probe needs a file")
        source, asked, devices, in_force = _source(capture, replay, paths or [], device or [])
        in_force.check_contradiction()
        for name in devices:
            _refuse(not _DEVICE.fullmatch(name), f"device {name!r}: choose {_CHOICES}")
        if in_force.device and not _DEVICE.fullmatch(in_force.device):
            raise ConfigError(f"NOBOUNCE_DEVICE: device {in_force.device!r}: choose {_CHOICES}")
        machine = Machine(source, in_force)
        if replay is None and source.effective_uid() == 0:
            _say_what_root_follows(source)
        if asked:
            code = _files(machine, asked, devices, probe, as_json, quiet, verbose)
        else:
            code = _whole(machine, devices, as_json, quiet, verbose)
        if capture is not None and isinstance(source, RecordingSource):
            kept = {name: getattr(in_force, name) for name in _SETTINGS}
            _save(capture, source, {"paths": asked, "devices": devices, "settings": kept})
        return code

    raise typer.Exit(run("check", as_json and not quiet, action, failed=UNKNOWN))


def _say_what_root_follows(source: Source) -> None:
    """A HIP library is loaded to know what it can: before root does so, root is told who chose the folder."""
    from nobounce.facts.access import variables
    from nobounce.facts.libraries import FOLLOWED

    chosen = ", ".join(f"{k}={v}" for k, v in variables(source, FOLLOWED).items())
    if chosen:
        complain(
            "nobounce check: GPU libraries are also looked for, and loaded as root, where "
            f"{printable(chosen)} says: "
            "unset what you do not trust"
        )


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise ArgumentError(why)


def _source(
    capture: str | None, replay: str | None, paths: list[str], devices: list[str]
) -> tuple[Source, list[str], list[str], Settings]:
    """Whom to ask, what about and under which settings: a capture knows what it was made for."""
    if replay is not None:
        from nobounce.checks.capture import restore

        try:
            source, request = restore(replay)
        except OSError as e:
            raise FileError.from_oserror(e, replay, "open") from e
        except ArgumentError:
            raise
        except (ValueError, UnicodeError) as e:
            raise ArgumentError(f"{printable(replay)}: {e}") from e
        kept = request.get("settings", {})
        in_force = dataclasses.replace(Settings(), **{name: kept[name] for name in _SETTINGS if name in kept})
        return source, paths or request.get("paths", []), devices or request.get("devices", []), in_force
    # A URL or a hub's name stays as it was given: the answer says what to write instead.
    full = [p if misnamed.cure(p) and not os.path.lexists(p) else os.path.abspath(p) for p in paths]
    live = LiveSource()
    return (live if capture is None else RecordingSource(live)), full, devices, settings()


def _save(path: str, source: RecordingSource, request: dict[str, Any]) -> None:
    from nobounce.checks.capture import save

    save(path, source, request)
    complain(
        f"nobounce check: {printable(path)} holds this machine's answers: look through it before you share it"
    )


def _model(path: str) -> tuple[str, list[str]]:
    """What `load` would take at this path, for `checks.files.looks`."""
    from nobounce.formats.index import find, holds_choice, holds_model

    if os.path.isdir(path) and (holds_choice(path) or not holds_model(path)):
        return "", []
    try:
        return "", [shard.path for shard in find(path).shards]
    except FileError as e:
        return (str(e) if os.path.isdir(path) else ""), []
    except (ArgumentError, FormatError) as e:
        return str(e), []


def _files(
    machine: Machine,
    paths: list[str],
    devices: list[str],
    probe: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    from nobounce.checks.findings import worst
    from nobounce.checks.report import check_paths, libraries, verdict_data
    from nobounce.cli.check_text import libraries_text, verdict_text

    verdicts = check_paths(machine, paths, devices, _model)
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
            say(libraries_text(found))
        for i, (verdict, tried) in enumerate(zip(verdicts, probes, strict=True)):
            say("\n" + verdict_text(verdict, tried) if i else verdict_text(verdict, tried))
    return worst(verdicts)


def _whole(machine: Machine, devices: list[str], as_json: bool, quiet: bool, verbose: bool) -> int:
    from nobounce.checks.report import libraries, survey, survey_data
    from nobounce.cli.check_text import libraries_text, survey_text

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
            say(libraries_text(listed))
        say(survey_text(found))
    return found.exit_code


def _libraries(found: list[Library]) -> list[dict[str, str]]:
    return [{"path": x.path, "note": x.note} for x in found]
