"""The files that are raced: safetensors of deterministic random bytes, made once and reused while size and header agree.

"large" is shaped like a llama of 2 billion parameters (4 GiB in 290 bf16 tensors), "small" is 1 GiB of 20,000 tensors
between 64 B and 600 KiB. Quick versions have the same shape at a sixteenth of the size. Bytes are random, so that no
file system, disk or host can make them smaller or recognise zeros.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK = 16 << 20
ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file to make; `nbytes` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class BenchFile:
    """A file that is there: sizes in bytes, `data_nbytes` without the header."""

    name: str
    path: Path
    nbytes: int
    data_nbytes: int
    tensors: int
    made: bool


def llama(*, hidden: int, kv: int, inner: int, vocab: int, layers: int) -> Iterator[Entry]:
    """Nine tensors a layer, the embedding (tied to the head) and the last norm, all bf16."""
    yield Entry("model.embed_tokens.weight", "BF16", (vocab, hidden))
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield Entry(f"{layer}.self_attn.q_proj.weight", "BF16", (hidden, hidden))
        yield Entry(f"{layer}.self_attn.k_proj.weight", "BF16", (kv, hidden))
        yield Entry(f"{layer}.self_attn.v_proj.weight", "BF16", (kv, hidden))
        yield Entry(f"{layer}.self_attn.o_proj.weight", "BF16", (hidden, hidden))
        yield Entry(f"{layer}.mlp.gate_proj.weight", "BF16", (inner, hidden))
        yield Entry(f"{layer}.mlp.up_proj.weight", "BF16", (inner, hidden))
        yield Entry(f"{layer}.mlp.down_proj.weight", "BF16", (hidden, inner))
        yield Entry(f"{layer}.input_layernorm.weight", "BF16", (hidden,))
        yield Entry(f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,))
    yield Entry("model.norm.weight", "BF16", (hidden,))


def many(
    count: int, *, smallest: int = 64, largest: int = 600 << 10, mean: float = (1 << 30) / 20_000
) -> Iterator[Entry]:
    """`count` tensors of mixed dtypes; sizes spread evenly over the logarithm, bent so that their mean is `mean` bytes."""
    steps = (np.arange(count) + 0.5) / count
    low, high = 0.2, 5.0
    for _ in range(60):
        bend = (low + high) / 2
        sizes = smallest * (largest / smallest) ** (steps**bend)
        low, high = (bend, high) if sizes.mean() > mean else (low, bend)
    order = np.random.default_rng(20_000).permutation(count)
    for i, size in enumerate(sizes[order].tolist()):
        dtype = ("BF16", "F32", "BF16", "F16", "I64", "U8", "BF16", "F32")[i % 8]
        items = max(smallest, int(size)) // ITEMSIZE[dtype]
        rows = 8 if i % 3 else 1
        shape = (rows, items // rows) if rows > 1 and items % rows == 0 else (items,)
        yield Entry(f"blocks.{i // 16}.part_{i % 16}.weight", dtype, shape)


SHAPES: dict[tuple[str, bool], Callable[[], Iterable[Entry]]] = {
    ("large", False): lambda: llama(hidden=2048, kv=512, inner=7872, vocab=128_256, layers=32),
    ("large", True): lambda: llama(hidden=512, kv=128, inner=1968, vocab=32_000, layers=32),
    ("small", False): lambda: many(20_000),
    ("small", True): lambda: many(1_250),
}
NAMES = ("large", "small")


def header_of(entries: Iterable[Entry]) -> tuple[bytes, int]:
    """(the file's first bytes: length and JSON padded to 8, bytes of data), in safetensors' own order: widest dtype first."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for e in sorted(entries, key=lambda e: (-ITEMSIZE[e.dtype], e.dtype, e.name)):
        table[e.name] = {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [position, position + e.nbytes],
        }
        position += e.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position


def ensure(directory: Path, name: str, *, quick: bool) -> BenchFile:
    """The file `name` ("large" or "small") in `directory`, made unless one of the right size and header is there.

    A file being made has another name until it is whole and on the disk; nothing is left of one that fails. Raises OSError.
    """
    entries = list(SHAPES[name, quick]())
    head, data_nbytes = header_of(entries)
    nbytes = len(head) + data_nbytes
    path = directory / f"{name}{'-quick' if quick else ''}.safetensors"
    found = _agrees(path, head, nbytes)
    if not found:
        _make(path, head, data_nbytes, seed=NAMES.index(name) + 1)
    return BenchFile(name, path, nbytes, data_nbytes, len(entries), made=not found)


def _agrees(path: Path, head: bytes, nbytes: int) -> bool:
    try:
        with path.open("rb") as f:
            return os.fstat(f.fileno()).st_size == nbytes and f.read(len(head)) == head
    except FileNotFoundError:
        return False


def _make(path: Path, head: bytes, data_nbytes: int, *, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    source = np.random.Generator(np.random.SFC64(seed))
    try:
        with part.open("wb", buffering=0) as f:
            os.posix_fallocate(f.fileno(), 0, len(head) + data_nbytes)
            _write_all(f.fileno(), memoryview(head))
            left = data_nbytes
            while left:
                take = min(left, CHUNK)
                words = source.integers(0, 1 << 64, -(-take // 8), dtype=np.uint64)
                _write_all(f.fileno(), memoryview(words.view(np.uint8))[:take])
                left -= take
            os.fsync(f.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def ensure_llama(path: Path, nbytes: int) -> int:
    """A bf16 file at `path` shaped like an 8B-parameter llama with as many layers as `nbytes` hold; returns its size.

    Made unless one of the right size and header is there. Raises OSError.
    """
    small = nbytes < 4 << 30
    shape = {"hidden": 512, "kv": 128, "inner": 1792, "vocab": 32_000}
    if not small:
        shape = {"hidden": 4096, "kv": 1024, "inner": 14_336, "vocab": 128_256}
    one = sum(e.nbytes for e in llama(**shape, layers=1)) - sum(e.nbytes for e in llama(**shape, layers=0))
    layers = max(1, (nbytes - sum(e.nbytes for e in llama(**shape, layers=0))) // one)
    head, data_nbytes = header_of(llama(**shape, layers=layers))
    if not _agrees(path, head, len(head) + data_nbytes):
        _make(path, head, data_nbytes, seed=7)
    return len(head) + data_nbytes
