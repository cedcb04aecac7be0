"""ggml's tensor types, and what quantised bytes of the common ones mean, computed on the host.

Sizes and layouts are those of ggml (github.com/ggml-org/ggml: ggml.h, ggml-common.h, ggml-quants.c). A
quantised tensor's last dimension is cut into blocks of a few dozen elements; a block holds small integers and
the scales that make numbers of them. The functions here are a reference to judge faster ones by: float32 out,
the arithmetic of `gguf` (the package) operation by operation, so that both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from nobounce.dtypes import DTYPES, DType
from nobounce.errors import ArgumentError, printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    Floats = np.ndarray[Any, np.dtype[np.float32]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

K = 256
"""Elements of a block of the "K" types."""


class GgmlType(NamedTuple):
    """A type of tensors: `block` elements take `nbytes` bytes; `dtype` where these are plain numbers, None
    where they are quantised."""

    name: str
    block: int
    nbytes: int
    dtype: DType | None = None


def _plain(name: str) -> GgmlType:
    dtype = DTYPES[name]
    return GgmlType(name, 1, dtype.bits // 8, dtype)


TYPES: dict[int, GgmlType] = {
    0: _plain("F32"),
    1: _plain("F16"),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", K, 84),
    11: GgmlType("Q3_K", K, 110),
    12: GgmlType("Q4_K", K, 144),
    13: GgmlType("Q5_K", K, 176),
    14: GgmlType("Q6_K", K, 210),
    15: GgmlType("Q8_K", K, 292),
    16: GgmlType("IQ2_XXS", K, 66),
    17: GgmlType("IQ2_XS", K, 74),
    18: GgmlType("IQ3_XXS", K, 98),
    19: GgmlType("IQ1_S", K, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", K, 110),
    22: GgmlType("IQ2_S", K, 82),
    23: GgmlType("IQ4_XS", K, 136),
    24: _plain("I8"),
    25: _plain("I16"),
    26: _plain("I32"),
    27: _plain("I64"),
    28: _plain("F64"),
    29: GgmlType("IQ1_M", K, 56),
    30: _plain("BF16"),
    34: GgmlType("TQ1_0", K, 54),
    35: GgmlType("TQ2_0", K, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that files held once and ggml no longer reads."""

_BY_NAME = {t.name: t for t in TYPES.values()}


def dequantize(data: ArrayLike, encoding: str) -> Floats:
    """Quantised bytes as float32, on the host: an array of shape [..., blocks * block's bytes] becomes [...,
    blocks * block's elements].

    `data` is a tensor as `load` gives it, or any array of uint8; `encoding` is the name that
    `model.encodings[name].name` gives: Q8_0, Q4_0, Q4_K, Q5_K or Q6_K. Every bit is that of
    `gguf.dequantize`. ArgumentError for another encoding, for data that is not uint8, and for a last
    dimension that is not made of whole blocks.
    """
    import numpy as np

    known = _BY_NAME.get(encoding)
    rule = _RULES.get(encoding)
    if known is None or rule is None:
        raise ArgumentError(
            f"no reference for {printable(repr(encoding))}; there is one for {', '.join(_RULES)}. The gguf "
            "package "
            "knows more: gguf.dequantize"
        )
    raw = np.asarray(data)
    if raw.dtype != np.uint8:
        raise ArgumentError(f"quantised data is bytes (uint8), not {raw.dtype}")
    if not raw.ndim or raw.shape[-1] % known.nbytes:
        raise ArgumentError(
            f"shape {list(raw.shape)} is not made of whole {encoding} blocks of {known.nbytes} bytes"
        )
    shape = *raw.shape[:-1], raw.shape[-1] // known.nbytes * known.block
    blocks = np.ascontiguousarray(raw).reshape(-1, known.nbytes)
    out = np.empty((len(blocks), known.block), np.float32)
    # In pieces that stay in a cache: the steps make arrays several times as large as the blocks. Scales may
    # be infinite or no number.
    with np.errstate(all="ignore"):
        for at in range(0, len(blocks), _PIECE):
            out[at : at + _PIECE] = rule(blocks[at : at + _PIECE])
    return out.reshape(shape)


_PIECE = 1024


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column."""
    import numpy as np

    half: Floats = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    return half


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """Of each `group` bytes the lower halves, then the upper ones."""
    import numpy as np

    rows = packed.reshape(len(packed), -1, 1, group)
    return np.concatenate([rows & 15, rows >> 4], axis=2).reshape(len(packed), -1)


def _q8_0(blocks: Bytes) -> Floats:
    import numpy as np

    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    import numpy as np

    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).astype(np.int8) - np.int8(8)).astype(np.float32)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minimums of six bits each from twelve bytes
    (get_scale_min_k4 of ggml-quants.c)."""
    import numpy as np

    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minimums


def _scaled(blocks: Bytes, quants: Bytes) -> Floats:
    """d * scale * quant - dmin * minimum, for eight groups of 32 elements."""
    import numpy as np

    scales, minimums = _six_bits(blocks[:, 4:16])
    d = (_half(blocks, 0) * scales.astype(np.float32)).reshape(-1, 8, 1)
    dm = (_half(blocks, 2) * minimums.astype(np.float32)).reshape(-1, 8, 1)
    found: Floats = (d * quants.reshape(-1, 8, 32).astype(np.float32) - dm).reshape(-1, K)
    return found


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Floats:
    import numpy as np

    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (((blocks[:, None, 16:48] >> shifts) & 1) << 4).astype(np.uint8, copy=False).reshape(-1, K)
    return _scaled(blocks, np.bitwise_or(_nibbles(blocks[:, 48:], 32), fifth))


def _q6_k(blocks: Bytes) -> Floats:
    import numpy as np

    low = _nibbles(blocks[:, :128], 64)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    quants = ((low | high.reshape(-1, K)).astype(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    d = (_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)).reshape(-1, 16, 1)
    found: Floats = (d * quants.astype(np.float32)).reshape(-1, K)
    return found


_RULES: dict[str, Callable[[Bytes], Floats]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
