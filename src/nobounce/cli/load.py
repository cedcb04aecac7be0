"""nobounce load: load model files into device memory and say which way the bytes went."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from nobounce.cli.options import (
    Cache,
    CacheOption,
    DeviceName,
    FrameworkOption,
    Json,
    Paths,
    Require,
    RequireOption,
    one_or_many,
)
from nobounce.cli.output import DONE, document, emit_json, progress, run, say
from nobounce.errors import counted


def command(
    paths: Paths,
    device: DeviceName = None,
    framework: Annotated[FrameworkOption | None, typer.Option(help="Make arrays of this framework.")] = None,
    require: Require = RequireOption.auto,
    cache: Cache = CacheOption.auto,
    as_json: Json = False,
) -> None:
    """Load model files into memory of a device; print what went where, and why."""

    def action() -> int:
        from nobounce.formats.load import load

        expected = sum(os.path.getsize(p) for p in paths if os.path.isfile(p))
        begin = time.perf_counter()
        with progress(expected, "load") as advance:
            model = load(
                one_or_many(paths),
                device=device,
                framework=framework.value if framework is not None else None,
                require=require.value,
                cache=cache.value,
                progress=advance,
            )
        seconds = time.perf_counter() - begin
        receipt = model.receipt
        if as_json:
            emit_json(
                document(
                    "load",
                    device=model.device.name,
                    nbytes=receipt.nbytes,
                    seconds=seconds,
                    tensors=len(model),
                    warnings=list(model.warnings),
                    receipt=receipt.to_dict(),
                )
            )
            return DONE
        say(receipt.explain())
        for warning in model.warnings:
            say(f"  warning: {warning}")
        say(
            f"{counted(len(model), 'tensor')}, {receipt.nbytes / 2**30 / seconds:.2f} GiB/s with everything "
            f"({seconds:.3f} s)"
        )
        return DONE

    raise typer.Exit(run("load", as_json, action))
