"""nobounce explain: the route of each range of a file before any I/O, with refusals and cures."""

from __future__ import annotations

import os
from typing import Any

import typer

from nobounce.cli.options import (
    Cache,
    CacheOption,
    DeviceName,
    Json,
    Paths,
    Require,
    RequireOption,
    one_or_many,
)
from nobounce.cli.output import DONE, document, emit_json, run, say
from nobounce.errors import counted, printable
from nobounce.route.types import Refusal, Route


def _refusal(r: Refusal) -> dict[str, str]:
    return {"code": r.code, "sentence": r.sentence, "cure": r.cure}


def _as_data(path: str, what: str, route: Route) -> dict[str, Any]:
    return {
        "path": path,
        "what": what,
        "segments": [
            {
                "backend": s.backend,
                "file_offset": s.file_offset,
                "nbytes": s.nbytes,
                "reason": s.reason.code,
                "sentence": s.reason.sentence,
                "cure": s.reason.cure,
            }
            for s in route.segments
        ],
        "scores": [
            {"backend": s.backend, "score": s.value, "refusals": [_refusal(r) for r in s.refusals]}
            for s in route.scores
        ],
    }


def _print(data: dict[str, Any], device: str) -> None:
    say(f"{printable(data['path'])} on {device}: {data['what']}")
    for s in data["segments"]:
        say(
            f"  {s['backend']:<8} {s['nbytes']:>15,} bytes at {s['file_offset']}: {s['reason']}: "
            f"{s['sentence']}"
        )
        if s["cure"]:
            say(f"  {'':<8} cure: {s['cure']}")
    if not data["segments"]:
        say("  no bytes to move")
    for score in data["scores"]:
        say(f"  score of {score['backend']}: {score['score']}")
        for r in score["refusals"]:
            say(f"    refused: {r['sentence']} [{r['code']}]" + (f"; cure: {r['cure']}" if r["cure"] else ""))


def command(
    paths: Paths,
    device: DeviceName = None,
    require: Require = RequireOption.auto,
    cache: Cache = CacheOption.auto,
    as_json: Json = False,
) -> None:
    """Show which way each range of a file would go, and why, without moving a byte of data."""

    def action() -> int:
        from nobounce.device import Device, default_device
        from nobounce.formats.opened import close_files, grain_of, open_files
        from nobounce.formats.placement import place
        from nobounce.formats.reader import has_signature
        from nobounce.io.opening import open as open_file

        target = Device(device) if device is not None else default_device()
        routes: list[dict[str, Any]] = []
        if (
            len(paths) == 1
            and os.path.isfile(paths[0])
            and not paths[0].endswith((".safetensors", ".index.json"))
            and not has_signature(paths[0])
        ):
            with open_file(paths[0]) as file:
                route = file.explain(target, require=require.value, cache=cache.value)
                routes.append(_as_data(paths[0], f"{file.nbytes:,} bytes", route))
        else:
            _, opened = open_files(one_or_many(paths))
            try:
                for one in opened:
                    with one.reading() as file:
                        spot = place(one.header, grain=grain_of(file))
                        route = file.explain(
                            target,
                            nbytes=spot.nbytes,
                            file_offset=spot.file_offset,
                            require=require.value,
                            cache=cache.value,
                        )
                    what = (
                        f"{counted(len(one.header.tensors), 'tensor')}, {one.header.data_nbytes:,} bytes of "
                        "data"
                    )
                    routes.append(_as_data(one.path, what, route))
            finally:
                close_files(opened)
        if as_json:
            emit_json(document("explain", device=target.name, routes=routes))
        else:
            for data in routes:
                _print(data, target.name)
        return DONE

    raise typer.Exit(run("explain", as_json, action))
