"""nobounce cp: copy a file through device memory (hipFile I-1)."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce.cli.options import DeviceName, Json, Require, RequireOption
from nobounce.cli.output import DONE, document, emit_json, progress, run, say
from nobounce.errors import ArgumentError, FileChangedError, counted, named_errors, printable

if TYPE_CHECKING:
    from nobounce.device import Device
    from nobounce.io.file import File
    from nobounce.io.receipt import Receipt
    from nobounce.io.transfer import Transfer

SLICE = 16 << 20
STREAMS = 4


def copy(
    source: File, target: File, nbytes: int, device: Device, require: RequireOption, advance: object
) -> list[Receipt]:
    """Move `nbytes` bytes slice by slice, each read and written in the order of its
    stream; bounded memory."""
    receipts: list[Receipt] = []

    def settle(pair: tuple[Transfer, Transfer, int, int]) -> None:
        read, write, start, n = pair
        got, put = read.result(), write.result()
        if got.nbytes != n:
            raise FileChangedError(
                f"{printable(source.name)}: ended at {start + got.nbytes} while it was copied", 5, source.name
            )
        receipts.extend((got, put))
        if callable(advance):
            advance("fastpath" if put.fastpath_bytes else "fallback", n)

    with contextlib.ExitStack() as stack:
        lanes = []
        for _ in range(min(STREAMS, max(1, -(-nbytes // SLICE)))):
            stream = stack.enter_context(device.create_stream())
            lanes.append((stream, stack.enter_context(device.allocate(min(SLICE, max(nbytes, 1))))))
            stack.callback(stream.sync)
        waiting: list[tuple[Transfer, Transfer, int, int]] = []
        for number, start in enumerate(range(0, nbytes, SLICE)):
            stream, buffer = lanes[number % len(lanes)]
            if len(waiting) >= 2 * len(lanes):
                settle(waiting.pop(0))
            n = min(SLICE, nbytes - start)
            common: dict[str, Any] = {
                "stream": stream,
                "nbytes": n,
                "file_offset": start,
                "require": require.value,
            }
            waiting.append(
                (source.read_async(buffer, **common), target.write_async(buffer, **common), start, n)
            )
        for pair in waiting:
            settle(pair)
    return receipts


def copy_to_end(source: File, target: File, device: Device, require: RequireOption) -> list[Receipt]:
    """Move what there is, slice by slice, of a file that does not tell its size."""
    receipts: list[Receipt] = []
    start = 0
    with device.allocate(SLICE) as buffer:
        while True:
            got = source.read(buffer, file_offset=start, require=require.value)
            if not got.nbytes:
                return receipts
            put = target.write(buffer, nbytes=got.nbytes, file_offset=start, require=require.value)
            receipts += [got, put]
            start += got.nbytes


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The file to copy.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A file or a folder.")],
    device: DeviceName = None,
    require: Require = RequireOption.auto,
    as_json: Json = False,
) -> None:
    """Copy a file through device memory. DEST is the old file or the whole new one, whatever happens."""

    def action() -> int:
        from nobounce import outfile
        from nobounce.device import Device, default_device
        from nobounce.facts.regular import true_size
        from nobounce.io.file import File
        from nobounce.io.opening import open as open_file

        where = Device(device) if device is not None else default_device()
        final = os.path.join(dest, os.path.basename(source)) if os.path.isdir(dest) else dest
        begin = time.perf_counter()
        with open_file(source) as reading:
            if os.path.exists(final) and os.path.samefile(source, final):
                raise ArgumentError(f"{printable(source)} and {printable(final)} are the same file")
            with named_errors(source, "read"):
                mode = os.fstat(reading.fileno()).st_mode & 0o777
                nbytes = true_size(reading.fileno(), reading.nbytes)
            with outfile.create(final, mode=mode, whole=True) as out:
                with File(os.dup(out.fd), final) as writing:
                    if nbytes is None:
                        receipts = copy_to_end(reading, writing, where, require)
                        nbytes = writing.nbytes
                    else:
                        with progress(nbytes, "cp") as advance:
                            receipts = copy(reading, writing, nbytes, where, require, advance)
                    writing.sync()
                out.commit(durable=True)
        direct, bounced = sum(r.fastpath_bytes for r in receipts), sum(r.fallback_bytes for r in receipts)
        seconds = time.perf_counter() - begin
        if as_json:
            emit_json(
                document(
                    "cp",
                    device=where.name,
                    nbytes=nbytes,
                    seconds=seconds,
                    fastpath_bytes=direct,
                    fallback_bytes=bounced,
                )
            )
        else:
            say(f"{printable(final)}: {counted(nbytes, 'byte')} through {where.name} in {seconds:.3f} s")
            say(f"fastpath {direct} bytes, fallback {bounced} bytes, both directions")
        return DONE

    raise typer.Exit(run("cp", as_json, action))
