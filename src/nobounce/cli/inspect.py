"""nobounce inspect: what a model file holds and how it lies in the file. Reads headers only."""

from __future__ import annotations

from typing import Any

import typer

from nobounce.cli.options import Json, Paths, one_or_many
from nobounce.cli.output import DONE, document, emit_json, run, say, table
from nobounce.errors import counted, printable


def alignment_of(offset: int) -> int:
    """The largest power of two, up to 4096, that divides `offset`."""
    return min(offset & -offset, 4096) if offset else 4096


def command(paths: Paths, as_json: Json = False) -> None:
    """List the tensors of safetensors files: dtype, shape, bytes, offset in the file and its alignment."""

    def action() -> int:
        from nobounce.formats.load import close_model, open_model

        files, opened = open_model(one_or_many(paths))
        close_model(opened)
        tensors: list[dict[str, Any]] = []
        documents: list[dict[str, Any]] = []
        for one in opened:
            header = one.header
            documents.append(
                {
                    "path": one.path,
                    "nbytes": header.file_nbytes,
                    "header_nbytes": header.header_nbytes,
                    "data_offset": header.data_offset,
                    "metadata": header.metadata,
                }
            )
            for info in header.tensors.values():
                offset = header.data_offset + info.start
                tensors.append(
                    {
                        "name": info.name,
                        "dtype": info.dtype.name,
                        "shape": list(info.shape),
                        "nbytes": info.nbytes,
                        "offset": offset,
                        "alignment": alignment_of(offset),
                        "aligned_for_dtype": offset % info.dtype.alignment == 0,
                        "file": one.path,
                    }
                )
        warnings = [*files.warnings, *(w for o in opened for w in o.header.warnings)]
        nbytes = sum(t["nbytes"] for t in tensors)
        if as_json:
            emit_json(document("inspect", nbytes=nbytes, files=documents, tensors=tensors, warnings=warnings))
            return DONE
        for d in documents:
            say(f"{printable(str(d['path']))}: {d['nbytes']:,} bytes, data from offset {d['data_offset']}")
            for key, value in d["metadata"].items():
                say(f"  {printable(key)}: {printable(value)}")
        rows = [
            [
                printable(t["name"]),
                t["dtype"],
                "x".join(map(str, t["shape"])) or "scalar",
                f"{t['nbytes']:,}",
                str(t["offset"]),
                str(t["alignment"]) + ("" if t["aligned_for_dtype"] else " (moved on load)"),
            ]
            for t in tensors
        ]
        say(
            table(
                ["TENSOR", "DTYPE", "SHAPE", "BYTES", "OFFSET", "ALIGNED TO"], rows, right=frozenset({3, 4})
            )
        )
        say(f"{counted(len(tensors), 'tensor')}, {nbytes:,} bytes")
        for warning in warnings:
            say(f"warning: {warning}")
        return DONE

    raise typer.Exit(run("inspect", as_json, action))
