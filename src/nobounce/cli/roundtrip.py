"""nobounce roundtrip: the published multi-stream test of hipFile, on any device: file to device
and back, in stream order."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce import outfile
from nobounce.cli.options import DeviceName, Json, Require, RequireOption, parse_size
from nobounce.cli.output import DONE, NOT_MET, complain, document, emit_json, progress, run, say
from nobounce.errors import ArgumentError, NobounceError, counted, named_errors, printable

if TYPE_CHECKING:
    from nobounce.buffer import Buffer
    from nobounce.device import Device
    from nobounce.io.receipt import Receipt
    from nobounce.io.transfer import Transfer
    from nobounce.stream import Stream

PAGE = 4096
HASHED = 64 << 10
"""Bytes hashed at a time: the arrays stay in the processor's cache."""
SHOWN = 4 << 20
"""Bytes hashed between two steps of the progress bar."""
QUEUED = 16
"""Slices a stream may have waiting: a file of any size needs memory for these alone."""
FNV_OFFSET, FNV_PRIME, FNV_MASK = 14695981039346656037, 1099511628211, (1 << 64) - 1


def fnv1a(path: str, advance: Callable[[str, int], None] | None = None) -> tuple[int, int]:
    """(FNV-1a 64 of a file's bytes, its size). Raises FileError."""
    value, size, shown = FNV_OFFSET, 0, 0
    with named_errors(path, "read"), open(path, "rb") as f:
        while block := f.read(HASHED):
            size += len(block)
            value = fnv1a_block(value, block)
            if advance is not None and size - shown >= SHOWN:
                advance("", size - shown)
                shown = size
    if advance is not None:
        advance("", size - shown)
    return value, size


def fnv1a_block(value: int, block: bytes) -> int:
    """The hash after `block`, whole arrays at a time: four times as fast as a loop over bytes.

    x ^ b is x + d, where d depends on the lowest byte of x alone; so the hash is a sum of d times powers of
    the prime, once the lowest bytes are known. Of these, bit k after a byte is itself, the byte's bit and a
    carry out of the bits below it, all by exclusive or: eight running ones give all eight bits.
    """
    import numpy as np

    data = np.frombuffer(block, np.uint8)
    low, mixed = np.zeros_like(data), np.zeros_like(data)
    for k in range(8):
        bit = np.uint8(1 << k)
        flips = (data ^ mixed * np.uint8(FNV_PRIME & 0xFF)) & bit
        step = 1
        while step < len(flips):  # ufunc.accumulate goes byte by byte
            flips[step:] ^= flips[:-step]
            step *= 2
        low[0] |= np.uint8(value & (1 << k))
        low[1:] |= flips[:-1] ^ np.uint8(value & (1 << k))
        mixed |= (low ^ data) & bit
    steps = (mixed.astype(np.int64) - low).view(np.uint64)
    powers = _powers(len(data))
    return (value * int(powers[0]) + int((steps * powers).sum(dtype=np.uint64))) & FNV_MASK


@functools.lru_cache(2)
def _powers(count: int) -> Any:
    """The prime's powers from `count` down to 1, modulo 2^64."""
    import numpy as np

    return np.multiply.accumulate(np.full(count, FNV_PRIME, np.uint64))[::-1].copy()


def seed(path: str, nbytes: int) -> None:
    """Write the pattern: byte i is i & 0xFF."""
    block = bytes(range(256)) * 4096
    with outfile.create(path) as out:
        for start in range(0, nbytes, len(block)):
            out.write(block[: min(len(block), nbytes - start)])
        out.commit(durable=True)


def check_untouched(path: str, what: str) -> None:
    """Raise ArgumentError where the file exists and holds something."""
    if os.path.exists(path) and os.path.getsize(path):
        raise ArgumentError(
            f"{what} {printable(path)} exists and is not empty: --overwrite allows to replace it"
        )


def check_room(paths: Sequence[str], nbytes: int) -> None:
    """Raise ArgumentError where the disks of `paths` have no room for `nbytes` in each, beside what the files
    hold until they are replaced."""
    need: Counter[int] = Counter()
    for path in paths:
        folder = os.path.dirname(os.path.realpath(path))
        with named_errors(path, "write"):
            disk = os.stat(folder).st_dev
            need[disk] += nbytes
            if need[disk] > shutil.disk_usage(folder).free:
                raise ArgumentError(
                    f"{printable(folder)} has no room for {need[disk]} bytes: choose a smaller --slice or "
                    "fewer --streams"
                )


def _same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


class _Lane:
    """One registered stream and its buffer."""

    def __init__(self, stream: Stream, buffer: Buffer) -> None:
        self.stream, self.buffer = stream, buffer


@contextlib.contextmanager
def lanes(device: Device, count: int, nbytes: int, flags: int) -> Iterator[list[_Lane]]:
    """Streams with zeroed buffers; what was set up is torn down in reverse, also when
    the set-up fails half-way."""
    from nobounce.io.params import StreamFlags
    from nobounce.io.streams import deregister_stream, register_stream

    with contextlib.ExitStack() as undo:
        made = []
        for _ in range(count):
            stream = undo.enter_context(device.create_stream(nonblocking=True))
            register_stream(stream, StreamFlags(flags))
            undo.callback(deregister_stream, stream)
            buffer = undo.enter_context(device.allocate(nbytes))
            buffer.fill(0, stream=stream)
            undo.push(_synced(stream))
            made.append(_Lane(stream, buffer))
        yield made


def _synced(stream: Stream) -> Callable[..., None]:
    """Wait for the stream at the end. What transfers ended with that an interrupt has
    cancelled is not its to raise."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        try:
            stream.sync()
        except NobounceError:
            if kind is None:
                raise

    return leave


def transfer_all(
    read_path: str, write_path: str, device: Device, streams: int, slice_nbytes: int, require: RequireOption
) -> tuple[list[str], list[Receipt]]:
    """Read each slice on its stream, write it back on the same one; returns what was
    wrong and every receipt."""
    from nobounce.io.file import File
    from nobounce.io.opening import open as open_file

    nbytes = os.path.getsize(read_path)
    flags = 15 if nbytes % PAGE == 0 and slice_nbytes % PAGE == 0 else 7
    wrong: list[str] = []
    receipts: list[Receipt] = []
    with (
        open_file(read_path) as source,
        outfile.create(write_path) as out,
        File(os.dup(out.fd), write_path) as target,
        lanes(device, streams, slice_nbytes, flags) as made,
        contextlib.ExitStack() as undone,
        progress(2 * nbytes, "roundtrip") as advance,
    ):
        target.truncate(0)
        moves: deque[tuple[Transfer, Transfer, int, int]] = deque()
        # After an interrupt. The newest first: a stream goes on behind a cancelled read, and would begin the
        # write of bytes that the read did not bring.
        undone.callback(lambda: [t.cancel() for pair in reversed(moves) for t in (pair[1], pair[0])])

        def settle() -> None:
            read, write, start, n = moves[0]
            for verb, transfer in (("read", read), ("write", write)):
                try:
                    receipt = transfer.result()
                except NobounceError as e:
                    wrong.append(f"{verb} at {start}: {e}")
                    continue
                receipts.append(receipt)
                if receipt.nbytes != n:
                    wrong.append(f"{verb} at {start}: short count, {receipt.nbytes} of {counted(n, 'byte')}")
                elif advance is not None:
                    advance("fastpath" if receipt.fastpath_bytes else "fallback", n)
            moves.popleft()

        for number, start in enumerate(range(0, nbytes, slice_nbytes)):
            lane = made[number % streams]
            n = min(slice_nbytes, nbytes - start)
            common: dict[str, Any] = {
                "stream": lane.stream,
                "nbytes": n,
                "file_offset": start,
                "require": require.value,
            }
            read = source.read_async(lane.buffer, cache="avoid", **common)
            moves.append((read, target.write_async(lane.buffer, **common), start, n))
            if len(moves) > QUEUED * streams:
                settle()
        while moves:
            settle()
        for lane in made:
            lane.stream.sync()
        out.commit()
    return wrong, receipts


def command(
    read: Annotated[str, typer.Argument(metavar="READ", help="The file read; seeded with a pattern.")],
    write: Annotated[str, typer.Argument(metavar="WRITE", help="The file written.")],
    device: DeviceName = None,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Registered streams.")] = 4,
    slice_: Annotated[str, typer.Option("--slice", help="Bytes of one transfer, such as 1MiB.")] = "1MiB",
    require: Require = RequireOption.auto,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace READ and WRITE if they hold data.")
    ] = False,
    keep_input: Annotated[
        bool, typer.Option("--keep-input", help="Copy READ as it is, without seeding it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Send a file through device memory on several streams and compare what comes back."""

    def action() -> int:
        from nobounce.device import Device, default_device
        from nobounce.facts.regular import true_size
        from nobounce.io.opening import open as open_file

        nbytes = parse_size("--slice", slice_)
        target = Device(device) if device is not None else default_device()
        if os.path.realpath(read) == os.path.realpath(write) or _same(read, write):
            raise ArgumentError("READ and WRITE are the same file")
        if not overwrite:
            check_untouched(write, "WRITE")
            if not keep_input:
                check_untouched(read, "READ")
        for path in (write, read):  # a pipe, a folder, no permission: named before anything is touched
            if os.path.exists(path):
                open_file(path, "r" if path == read and keep_input else "r+").close()
        if keep_input:
            with open_file(read) as whole, named_errors(read, "read"):
                if true_size(whole.fileno(), whole.nbytes) is None:
                    raise ArgumentError(
                        f"{printable(read)} holds other than the {whole.nbytes} bytes that it claims: copy "
                        "it first"
                    )
        else:
            check_room((read, write), streams * nbytes)
            seed(read, streams * nbytes)
        wrong, receipts = transfer_all(read, write, target, streams, nbytes, require)
        with named_errors(read, "read"):
            hashed = os.path.getsize(read) + os.path.getsize(write)
        with progress(hashed, "compare") as advance:
            (left, size), (right, copied) = fnv1a(read, advance), fnv1a(write, advance)
        if (left, size) != (right, copied):
            wrong.append(
                f"hash mismatch: READ {size} bytes 0x{left:016x}, WRITE {copied} bytes 0x{right:016x}"
            )
        direct = sum(r.fastpath_bytes for r in receipts)
        bounced = sum(r.fallback_bytes for r in receipts)
        if as_json:
            emit_json(
                document(
                    "roundtrip",
                    device=target.name,
                    nbytes=size,
                    streams=streams,
                    hash=f"0x{left:016x}",
                    ok=not wrong,
                    wrong=wrong,
                    fastpath_bytes=direct,
                    fallback_bytes=bounced,
                    retries=sum(len(r.retries) for r in receipts),
                )
            )
        for line in wrong:
            complain(f"nobounce roundtrip: {line}")
        if wrong:
            return NOT_MET
        if not as_json:
            say(
                f"OK  {printable(read)} == {printable(write)}  ({counted(size, 'byte')} across "
                f"{counted(streams, 'registered stream')}, hash 0x{left:016x})"
            )
            say(f"fastpath {direct} bytes, fallback {bounced} bytes, both directions, on {target.name}")
        return DONE

    raise typer.Exit(run("roundtrip", as_json, action))
