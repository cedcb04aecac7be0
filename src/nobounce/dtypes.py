"""Every element type a safetensors file may hold, two that other formats have beside them, and what
they are called elsewhere.

The names are those of the safetensors format (the list is that of safetensors 0.8). Types that share a size
are kept apart even where a framework confuses them: F8_E4M3 is the OCP type ("e4m3fn"), F8_E4M3FNUZ is AMD's,
and the same byte means another number, or a NaN, under each (case C40).

Packed types. A shape counts elements, `bits` is the size of one, and a tensor's elements are packed without
gaps, so F4 [2, 8] is 8 bytes and F6_E2M3 [4] is 3. Arrays have no half bytes: an F4 tensor becomes an array
whose last dimension is halved (`array_shape`), of uint8 in numpy and of float4_e2m1fn_x2 in torch: [2, 8]
arrives as [2, 4]. This needs an even last dimension; a tensor such as F4 [2, 3] is a valid file and can be
had as raw bytes only. The six-bit types are raw bytes everywhere: no framework has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nobounce.errors import ArgumentError
from nobounce.records import record

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np


@record
class DType:
    """One element type.

    Attributes: `name` (safetensors' spelling), `bits` of one element, `numpy` (a numpy or ml_dtypes name),
    `torch` (a name in the torch module) and `dlpack` (type code, bits of one lane); None where there is no
    such type.
    """

    name: str
    bits: int
    numpy: str | None
    torch: str | None
    dlpack: tuple[int, int] | None

    @property
    def packed(self) -> bool:
        """Whether an element is smaller than a byte."""
        return self.bits < 8

    @property
    def alignment(self) -> int:
        """Alignment in bytes that an array of this type wants: the size of an element (of
        complex ones: of its half)."""
        return self.bits // 16 if self.name in _COMPLEX_NAMES else max(1, self.bits // 8)

    def __str__(self) -> str:
        return self.name


_COMPLEX_NAMES = frozenset({"C32", "C64", "C128"})
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLDataTypeCode of dlpack.h 1.1

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("BOOL", 8, "bool", "bool", (_BOOL, 8)),
        DType("U8", 8, "uint8", "uint8", (_UINT, 8)),
        DType("I8", 8, "int8", "int8", (_INT, 8)),
        DType("U16", 16, "uint16", "uint16", (_UINT, 16)),
        DType("I16", 16, "int16", "int16", (_INT, 16)),
        DType("U32", 32, "uint32", "uint32", (_UINT, 32)),
        DType("I32", 32, "int32", "int32", (_INT, 32)),
        DType("U64", 64, "uint64", "uint64", (_UINT, 64)),
        DType("I64", 64, "int64", "int64", (_INT, 64)),
        DType("F16", 16, "float16", "float16", (_FLOAT, 16)),
        DType("BF16", 16, "bfloat16", "bfloat16", (_BFLOAT, 16)),
        DType("F32", 32, "float32", "float32", (_FLOAT, 32)),
        DType("F64", 64, "float64", "float64", (_FLOAT, 64)),
        DType("C64", 64, "complex64", "complex64", (_COMPLEX, 64)),
        DType("F8_E4M3", 8, "float8_e4m3fn", "float8_e4m3fn", (10, 8)),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", "float8_e4m3fnuz", (11, 8)),
        DType("F8_E5M2", 8, "float8_e5m2", "float8_e5m2", (12, 8)),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", "float8_e5m2fnuz", (13, 8)),
        DType("F8_E8M0", 8, "float8_e8m0fnu", "float8_e8m0fnu", (14, 8)),
        DType("F6_E2M3", 6, None, None, (15, 6)),
        DType("F6_E3M2", 6, None, None, (16, 6)),
        DType("F4", 4, "uint8", "float4_e2m1fn_x2", (17, 4)),
    )
}
C128 = DType("C128", 128, "complex128", "complex128", (_COMPLEX, 128))
C32 = DType("C32", 32, None, "complex32", (_COMPLEX, 32))
"""Types that other formats hold and safetensors cannot: no name that a safetensors file could give."""

_ML_DTYPES = frozenset(
    n for n in (d.numpy for d in DTYPES.values()) if n and ("float8" in n or n == "bfloat16")
)


def lookup(name: str) -> DType:
    """The type with this safetensors name; ArgumentError names the known ones."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ArgumentError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return dtype


def array_shape(dtype: DType, shape: Iterable[int]) -> tuple[int, ...]:
    """The shape of an array over a tensor's bytes: `shape`, but with the last dimension of F4 halved.

    ArgumentError for F4 with an odd last dimension or no dimension, and for the six-bit types.
    """
    dims = tuple(shape)
    if not dtype.packed:
        return dims
    if dtype.bits != 4:
        raise ArgumentError(f"no array type holds {dtype.name}, {_raw_view()}")
    if not dims or dims[-1] % 2:
        raise ArgumentError(
            f"{dtype.name} {list(dims)} packs two elements a byte across its rows, {_raw_view()}"
        )
    return (*dims[:-1], dims[-1] // 2)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a C-contiguous array."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy type of `dtype`, from ml_dtypes where numpy has none; F4 is uint8 (two elements each).

    ArgumentError where there is none or where ml_dtypes is too old or absent.
    """
    import numpy as np

    if dtype.numpy is None:
        raise ArgumentError(f"numpy has no type for {dtype.name}, {_raw_view()}")
    if dtype.numpy not in _ML_DTYPES:
        return np.dtype(dtype.numpy)
    try:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
        return found
    except (ImportError, AttributeError) as error:
        message = f"numpy has no type for {dtype.name} and ml_dtypes could not help ({error})"
        raise ArgumentError(f"{message}; install a newer ml-dtypes, or {_raw_view()}") from error


def torch_dtype(dtype: DType, torch_module: Any) -> Any:
    """The type of `dtype` in the torch module that the caller has; ArgumentError where it has none."""
    found = getattr(torch_module, dtype.torch, None) if dtype.torch is not None else None
    if found is None:
        version = getattr(torch_module, "__version__", "of this version")
        raise ArgumentError(f"torch {version} has no type for {dtype.name}, {_raw_view()}")
    return found


def _raw_view() -> str:
    return "take the tensor as raw bytes (a uint8 view)"
