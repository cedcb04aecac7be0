"""nobounce inspect: what a model file holds and how it lies in the file. Reads headers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from nobounce.cli.options import Json, Paths, one_or_many
from nobounce.cli.output import DONE, document, emit_json, run, say, table
from nobounce.errors import clip, counted, printable

if TYPE_CHECKING:
    from nobounce.formats.tensorinfo import Header, TensorInfo


def alignment_of(offset: int) -> int:
    """The largest power of two, up to 4096, that divides `offset`."""
    return min(offset & -offset, 4096) if offset else 4096


def _described(header: Header, info: TensorInfo, path: str) -> dict[str, Any]:
    """A tensor as --json shows it."""
    offset = header.data_offset + info.start
    detail = header.details.get(info.name)
    encoding = None if detail is None or detail.encoding is None else detail.encoding
    return {
        "name": info.name,
        "dtype": info.dtype.name,
        "shape": list(info.shape),
        "strides": None if detail is None or detail.strides is None else list(detail.strides),
        "encoding": None if encoding is None else {**encoding._asdict(), "shape": list(encoding.shape)},
        "nbytes": header.nbytes_of(info),
        "offset": offset,
        "alignment": alignment_of(offset),
        "aligned_for_dtype": offset % info.dtype.alignment == 0,
        "file": path,
    }


def _type(tensor: dict[str, Any]) -> str:
    """What its elements are: the dtype, or what the bytes encode."""
    encoding = tensor["encoding"]
    name = tensor["dtype"] if encoding is None else encoding["name"]
    return f"{name} (strided)" if tensor["strides"] is not None else str(name)


def command(paths: Paths, as_json: Json = False) -> None:
    """List the tensors of model files: dtype, shape, bytes, offset in the file and its alignment."""

    def action() -> int:
        from nobounce.formats.opened import close_files, open_files

        files, opened = open_files(one_or_many(paths))
        close_files(opened)
        tensors: list[dict[str, Any]] = []
        documents: list[dict[str, Any]] = []
        for one in opened:
            header = one.header
            documents.append(
                {
                    "path": one.path,
                    "format": header.format,
                    "nbytes": header.file_nbytes,
                    "header_nbytes": header.header_nbytes,
                    "data_offset": header.data_offset,
                    "metadata": header.metadata,
                }
            )
            tensors += [_described(header, info, one.path) for info in header.tensors.values()]
        warnings = [*files.warnings, *(w for o in opened for w in o.header.warnings)]
        nbytes = sum(t["nbytes"] for t in tensors)
        if as_json:
            emit_json(document("inspect", nbytes=nbytes, files=documents, tensors=tensors, warnings=warnings))
            return DONE
        for d in documents:
            path = printable(str(d["path"]))
            say(f"{path}: {d['format']}, {d['nbytes']:,} bytes, data from offset {d['data_offset']}")
            for key, value in d["metadata"].items():
                say(f"  {printable(clip(key))}: {printable(clip(value))}")
        rows = [
            [
                printable(t["name"]),
                _type(t),
                "x".join(map(str, t["encoding"]["shape"] if t["encoding"] else t["shape"])) or "scalar",
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
