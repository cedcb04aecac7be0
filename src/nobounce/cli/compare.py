"""nobounce compare: the same transfers by auto, direct required and fallback forced,
everything else held equal."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from nobounce import outfile, scratch
from nobounce.cli.children import OURS
from nobounce.cli.options import DeviceName, Json, parse_size
from nobounce.cli.output import DONE, NOT_MET, document, emit_json, run, say, table
from nobounce.errors import ArgumentError, InternalError, counted, named_errors, printable

MODES: dict[str, dict[str, str]] = {
    "auto": {"HIPFILE_ALLOW_COMPAT_MODE": "true", "HIPFILE_FORCE_COMPAT_MODE": "false"},
    "direct": {"HIPFILE_ALLOW_COMPAT_MODE": "false", "HIPFILE_FORCE_COMPAT_MODE": "false"},
    "fallback": {"HIPFILE_ALLOW_COMPAT_MODE": "true", "HIPFILE_FORCE_COMPAT_MODE": "true"},
}
GIB = 1 << 30
USUAL, MOST = 1 << 14, 1 << 20
"""Transfers of one run: as many as some seconds take where --size is not given; more
than the second are refused."""
NO_RELAY = (
    "on cpu, fallback is a read or write through the page cache and no relay: device memory is host memory. "
    "To see what a relay costs, compare on sim:0 (--device sim:0)"
)


def command(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="The file to read; with --write, its size is what is written."),
    ],
    device: DeviceName = None,
    streams: Annotated[
        int, typer.Option(min=1, max=64, help="Streams with transfers under way at once.")
    ] = 4,
    slice_: Annotated[str, typer.Option("--slice", help="Bytes of one transfer.")] = "4MiB",
    size: Annotated[
        str | None,
        typer.Option(
            help="At most this much of the file. Default: 1GiB, less where small slices make that "
            "too many transfers."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Runs of each mode, alternately.")] = 3,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write a file beside PATH, removed afterwards, instead of reading PATH."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Settle it: bytes per path and relayed bytes first, then throughput, where the
    path was the one named."""

    def action() -> int:
        from nobounce.device import Device, default_device
        from nobounce.io.opening import open as open_file

        target = Device(device) if device is not None else default_device()
        if not os.path.isfile(path):
            open_file(path).close()  # names what is missing, a folder or a pipe
            raise ArgumentError(f"{printable(path)} is no regular file: only such a file is compared")
        slice_nbytes = parse_size("--slice", slice_)
        limit = min(GIB, slice_nbytes * USUAL) if size is None else parse_size("--size", size)
        nbytes = min(limit, os.path.getsize(path))
        if nbytes < 4096:
            raise ArgumentError(f"{printable(path)} has {nbytes} bytes: too few to compare anything")
        if nbytes // slice_nbytes > MOST:
            raise ArgumentError(
                f"{nbytes} bytes in slices of {slice_nbytes} are over {MOST} transfers a run: "
                "choose a larger --slice or a smaller --size"
            )
        op = "write" if write else "read"
        with _subject(path, write, nbytes) as (subject, fd):
            arguments = json.dumps([subject, target.name, streams, slice_nbytes, op, limit])
            samples: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            for turn in range(rounds):
                order = list(MODES) if turn % 2 == 0 else list(reversed(MODES))
                for mode in order:
                    samples[mode].append(_child(mode, arguments, fd))
        results = [judge(mode, samples[mode]) for mode in MODES]
        note = NO_RELAY if target.name == "cpu" else ""
        equal = {
            "op": op,
            "nbytes": nbytes,
            "streams": streams,
            "slice": slice_nbytes,
            "cache": "cold",
            "rounds": rounds,
        }
        if as_json:
            emit_json(
                document("compare", path=path, device=target.name, held_equal=equal, note=note, modes=results)
            )
        else:
            _print(path, target.name, equal, results, note)
        return DONE if any(r["bytes_per_second"] is not None for r in results) else NOT_MET

    raise typer.Exit(run("compare", as_json, action))


@contextlib.contextmanager
def _subject(path: str, write: bool, nbytes: int) -> Iterator[tuple[str, int]]:
    """(path, descriptor to hand on or -1) of the file that the runs work on: PATH itself, or one of its
    size beside it to write."""
    if not write:
        yield path, -1
        return
    with contextlib.ExitStack() as stack:
        with named_errors(path, "make a file to write beside", outfile.CURES):
            made = stack.enter_context(scratch.unnamed(os.path.dirname(path) or ".", nbytes))
        yield made


def _child(mode: str, arguments: str, fd: int) -> dict[str, Any]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NOBOUNCE_TRACE", "NOBOUNCE_STATS_COLLECTOR", "NOBOUNCE_PROFILE")
    }
    env = {**kept, **MODES[mode], "HIPFILE_STATS_LEVEL": "1"}
    done = subprocess.run(
        [*OURS, "nobounce.cli.comparechild", arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=() if fd < 0 else (fd,),
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise InternalError(
            f"a run of {mode} ended with {done.returncode}: {(done.stderr.strip() or '?').splitlines()[-1]}"
        ) from None
    return found


def judge(mode: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A mode's figures; its throughput is withheld where the bytes did not go the way its name claims."""
    stats = [s["stats"] or {} for s in samples]
    direct, bounced = (sum(int(s.get(f"{b}_bytes", 0)) for s in stats) for b in ("fastpath", "fallback"))
    errors = list(dict.fromkeys(e for s in samples for e in s["errors"]))
    why = ""
    if errors:
        why = errors[0]
    elif not direct + bounced:
        why = "no byte moved"
    elif mode == "direct" and bounced:
        why = f"{counted(bounced, 'byte')} went through fallback"
    elif mode == "fallback" and direct:
        why = f"{counted(direct, 'byte')} went direct"
    rates = (
        []
        if why
        else [(s["stats"]["fastpath_bytes"] + s["stats"]["fallback_bytes"]) / s["seconds"] for s in samples]
    )
    reasons: dict[str, int] = {}
    for s in stats:
        for code, found in s.get("reasons", {}).items():
            reasons[code] = reasons.get(code, 0) + found["nbytes"]
    return {
        "mode": mode,
        "fastpath_bytes": direct,
        "fallback_bytes": bounced,
        "host_traffic_bytes": sum(int(s.get("host_traffic_bytes", 0)) for s in stats),
        "reasons": reasons,
        "bytes_per_second": statistics.median(rates) if rates else None,
        "samples": rates,
        "withheld": why,
    }


def _print(path: str, device: str, equal: dict[str, Any], results: list[dict[str, Any]], note: str) -> None:
    say(
        f"{equal['op']} of {equal['nbytes']} bytes, {printable(path)}, {device}: "
        f"{counted(equal['streams'], 'stream')}, "
        f"slices of {counted(equal['slice'], 'byte')}, cold page cache, statistics level 1, "
        f"{counted(equal['rounds'], 'run')} each, alternately"
    )
    if note:
        say(f"note: {note}")
    rows = []
    for r in results:
        rate = f"{r['bytes_per_second'] / GIB:.3f}" if r["bytes_per_second"] is not None else "withheld"
        rows.append(
            [
                r["mode"],
                *(str(r[k]) for k in ("fastpath_bytes", "fallback_bytes", "host_traffic_bytes")),
                rate,
            ]
        )
    say(
        table(
            ["mode", "fastpath bytes", "fallback bytes", "relayed host bytes", "GiB/s"],
            rows,
            right=frozenset({1, 2, 3, 4}),
        )
    )
    for r in results:
        if r["withheld"]:
            say(f"{r['mode']}: throughput withheld: {printable(r['withheld'])}")
        elif len(r["samples"]) > 1:
            say(f"{r['mode']}: samples {', '.join(f'{s / GIB:.3f}' for s in r['samples'])}")
