"""The tensors of model files as sources that are read when their bytes are wanted, so that a model of any
size passes through little memory.

A tensor that lies in its file as safetensors wants it is read straight into the memory that it is written
from. One that does not, such as big-endian numbers and strided views, brings its whole file into memory once;
a quantised one that is to be float32 is made when it is its turn.
"""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from nobounce.buffer import Buffer
from nobounce.device import Device
from nobounce.dtypes import DTYPES
from nobounce.errors import ArgumentError, FileChangedError, clip, printable
from nobounce.formats.ggml import dequantize
from nobounce.formats.load import load
from nobounce.formats.opened import Opened, Paths, close_files, open_files
from nobounce.formats.sources import Source
from nobounce.formats.tensorinfo import Encoding, TensorInfo
from nobounce.io.file import File

ENCODINGS = "nobounce.encodings"
"""The metadata that keep what quantised bytes are: JSON, {name: {"name": ..., "shape":
..., "byteorder": ...}}."""


class ModelSource:
    """An open model. A context manager. `sources` by name, in the order of the files; `metadata`; `warnings`;
    `encodings` of what stays quantised bytes.

    Raises as `load` does, before anything is read but headers; ArgumentError, naming the tensor, for a type
    that safetensors lacks, and with `floats` for quantised bytes that nobounce cannot turn into float32.
    """

    def __init__(self, paths: Paths, *, floats: bool = False) -> None:
        self.sources: dict[str, Source] = {}
        self.metadata: dict[str, str] = {}
        self.encodings: dict[str, Encoding] = {}
        self._stack = ExitStack()
        files, self._opened = open_files(paths)
        self._stack.callback(close_files, self._opened)
        try:
            for one in self._opened:
                self._add(one, floats)
                self.metadata = {**one.header.metadata, **self.metadata}
        except BaseException:
            self._stack.close()
            raise
        self.warnings = (*files.warnings, *(w for o in self._opened for w in o.header.warnings))
        if self.encodings:
            told = {n: {**e._asdict(), "shape": list(e.shape)} for n, e in self.encodings.items()}
            self.metadata[ENCODINGS] = json.dumps(told, separators=(",", ":"))

    def check(self) -> None:
        """Raise FileChangedError where a file is not what it was when its header was read."""
        for one in self._opened:
            one._check()

    def __enter__(self) -> ModelSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _add(self, one: Opened, floats: bool) -> None:
        file = self._stack.enter_context(one.reading())
        header = one.header
        swapped = [(b.start, b.end) for b in header.blocks or () if b.swap > 1]
        whole = functools.cache(lambda: load(one.path, device="cpu", framework="numpy"))
        for name, info in header.tensors.items():
            if info.dtype.name not in DTYPES:
                raise ArgumentError(
                    f"tensor {printable(clip(name))!r} of {printable(one.path)}: safetensors has no element "
                    f"type for {info.dtype.name}"
                )
            detail = header.details.get(name)
            turned = any(start < info.end and info.start < end for start, end in swapped)
            encoding = None if detail is None else detail.encoding
            made: Callable[[], Any] | None = None
            dtype, shape, nbytes = info.dtype, info.shape, header.nbytes_of(info)
            if (detail is not None and detail.strides is not None) or turned:
                made = functools.partial(_bytes_of, whole, name)
            if encoding is not None and floats:
                made = functools.partial(_floats, file, header.data_offset, info, encoding)
                dtype, shape = DTYPES["F32"], encoding.shape
                nbytes = _count(encoding) * 4
                dequantize(_nothing(encoding), encoding.name)  # what has no reference is told now
            elif encoding is not None:
                self.encodings[name] = encoding
            source = Source(name, dtype, shape, nbytes, Device("cpu"), 0, 0)
            source.make = made
            if made is None:
                source.read = functools.partial(_read, file, header.data_offset + info.start)
            self.sources[name] = source


def _read(file: File, begin: int, target: Buffer, at: int, start: int, stop: int) -> None:
    """Bring bytes [start, stop) of a tensor that begins at `begin` of its file to `at`
    of a buffer of the host."""
    receipt = file.read(target, nbytes=stop - start, file_offset=begin + start, buffer_offset=at)
    if receipt.nbytes < stop - start:
        where = begin + start + receipt.nbytes
        raise FileChangedError(
            f"{printable(file.name)}: the file ended at offset {where} while it was read",
            errno.ESTALE,
            file.name,
        )


def _bytes_of(whole: Callable[[], Any], name: str) -> Any:
    """A tensor's bytes in C order and little-endian."""
    import numpy as np

    return np.ascontiguousarray(whole()[name]).reshape(-1).view(np.uint8)


def _floats(file: File, data_offset: int, info: TensorInfo, encoding: Encoding) -> Any:
    """A quantised tensor's elements as bytes of float32."""
    import numpy as np

    with Device("cpu").allocate(info.nbytes) as raw:
        _read(file, data_offset + info.start, raw, 0, 0, info.nbytes)
        blocks = np.frombuffer(raw.view(), np.uint8).reshape(info.shape)
        return dequantize(blocks, encoding.name).reshape(-1).view(np.uint8)


def _nothing(encoding: Encoding) -> Any:
    import numpy as np

    if encoding.byteorder != "little":
        raise ArgumentError(f"{encoding.name} blocks of a big-endian file are not turned into float32 here")
    return np.zeros((0, encoding.block_nbytes), np.uint8)


def _count(encoding: Encoding) -> int:
    number = 1
    for dim in encoding.shape:
        number *= dim
    return number
