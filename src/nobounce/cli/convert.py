"""nobounce convert: any model that is read as safetensors whose data begins on a page."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from nobounce.cli.options import Json, parse_size
from nobounce.cli.output import DONE, document, emit_json, progress, run, say
from nobounce.errors import counted, printable


def command(
    source: Annotated[str, typer.Argument(metavar="IN", help="A file, a folder or an index.")],
    dest: Annotated[str, typer.Argument(metavar="OUT", help="A file, or a folder with --max-shard.")],
    max_shard: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Write a folder of files of at most so many bytes, such as 5GiB."),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Make float32 of quantised tensors of GGUF.")
    ] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Store checksums for `nobounce verify`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rewrite a model as aligned safetensors. OUT is the old model or the whole new one, whatever happens."""

    def action() -> int:
        from nobounce.formats.filewriter import Hooks
        from nobounce.formats.modelsource import ModelSource
        from nobounce.formats.save import save_sources

        most = None if max_shard is None else parse_size("--max-shard", max_shard)
        begin = time.perf_counter()
        with ModelSource(source, floats=dequantize) as model:
            found = list(model.sources.values())
            nbytes = sum(s.nbytes for s in found)
            with progress(nbytes, "convert") as advance:
                receipt = save_sources(
                    found,
                    dest,
                    model.metadata,
                    most,
                    sums=checksums,
                    fsync=True,
                    hooks=Hooks(progress=advance, check=model.check),
                )
            warnings, quantised = list(model.warnings), sorted(model.encodings)
        seconds = time.perf_counter() - begin
        if as_json:
            emit_json(
                document(
                    "convert",
                    tensors=len(found),
                    nbytes=nbytes,
                    seconds=seconds,
                    quantised=quantised,
                    warnings=warnings,
                    receipt=receipt.to_dict(),
                )
            )
            return DONE
        say(receipt.explain())
        for warning in warnings:
            say(f"  warning: {warning}")
        if quantised:
            say(f"  {counted(len(quantised), 'quantised tensor')} as bytes; --dequantize makes float32")
        say(f"{printable(dest)}: {counted(len(found), 'tensor')}, {nbytes:,} bytes in {seconds:.3f} s")
        return DONE

    raise typer.Exit(run("convert", as_json, action))
