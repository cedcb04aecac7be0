"""The dtype table against the installed safetensors, numpy, ml_dtypes and torch (spec/cases.md C)."""

from __future__ import annotations

import re
import types

import numpy as np
import pytest
from formats_corpus import entry, file_bytes, parse

from nobounce.dtypes import DTYPES, array_shape, lookup, numpy_dtype, torch_dtype
from nobounce.errors import ArgumentError

PACKED = ("F4", "F6_E2M3", "F6_E3M2")


def test_the_table_is_that_of_the_installed_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(file_bytes({"a": entry("Q9", [1], 0, 1)}, 1))
    known = set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value).split("expected")[1]))
    assert known == set(DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_sizes_agree_with_safetensors(name: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    raw = file_bytes({"a": entry(name, [8], 0, DTYPES[name].bits)}, DTYPES[name].bits)
    assert len(safetensors.deserialize(raw)[0][1]["data"]) == DTYPES[name].bits
    assert (
        parse({"a": entry(name, [8], 0, DTYPES[name].bits)}, DTYPES[name].bits).tensors["a"].dtype
        is DTYPES[name]
    )


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - set(PACKED)))
def test_C36_C37_C42_every_unpacked_type_has_numpy_and_torch_types_of_its_size(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = DTYPES[name]
    assert numpy_dtype(dtype).itemsize * 8 == dtype.bits
    assert torch_dtype(dtype, torch).itemsize * 8 == dtype.bits
    assert array_shape(dtype, [3, 5]) == (3, 5)


def test_C36_F8_E4M3_is_the_OCP_type() -> None:
    assert float(np.array([0x38], np.uint8).view(numpy_dtype(DTYPES["F8_E4M3"]))[0]) == 1.0


def test_C37_F4_packs_two_elements_a_byte() -> None:
    torch = pytest.importorskip("torch")
    assert parse({"a": entry("F4", [2, 8], 0, 8)}, 8).tensors["a"].nbytes == 8
    assert array_shape(DTYPES["F4"], [2, 8]) == (2, 4)
    assert numpy_dtype(DTYPES["F4"]) == np.uint8
    assert torch_dtype(DTYPES["F4"], torch) is torch.float4_e2m1fn_x2


@pytest.mark.parametrize("shape", [[], [3], [2, 3]])
def test_C37_F4_that_packs_across_rows_is_raw_bytes_only(shape: list[int]) -> None:
    with pytest.raises(ArgumentError, match="raw bytes"):
        array_shape(DTYPES["F4"], shape)


@pytest.mark.parametrize("name", PACKED[1:])
def test_six_bit_types_are_raw_bytes_only(name: str) -> None:
    assert parse({"a": entry(name, [4], 0, 3)}, 3).tensors["a"].nbytes == 3
    for call in (lambda d: numpy_dtype(d), lambda d: torch_dtype(d, types), lambda d: array_shape(d, [4])):
        with pytest.raises(ArgumentError, match="raw bytes"):
            call(DTYPES[name])


def test_C37_E8M0_is_a_power_of_two() -> None:
    assert float(np.array([128], np.uint8).view(numpy_dtype(DTYPES["F8_E8M0"]))[0]) == 2.0


@pytest.mark.parametrize("pair", [("F8_E4M3", "F8_E4M3FNUZ"), ("F8_E5M2", "F8_E5M2FNUZ")])
def test_C40_FNUZ_types_are_kept_apart(pair: tuple[str, str]) -> None:
    torch = pytest.importorskip("torch")
    ocp, fnuz = (DTYPES[name] for name in pair)
    byte = np.array([0x80], np.uint8)
    assert float(byte.view(numpy_dtype(ocp))[0]) == 0.0
    assert np.isnan(float(byte.view(numpy_dtype(fnuz))[0]))
    assert torch_dtype(ocp, torch) is not torch_dtype(fnuz, torch)
    assert ocp.dlpack != fnuz.dlpack


def test_C40_a_torch_without_the_type_is_never_given_another() -> None:
    old = types.SimpleNamespace(__version__="2.0", float8_e4m3fnuz="fnuz", float8_e4m3fn=None)
    with pytest.raises(
        ArgumentError, match="torch 2.0 has no type for F8_E4M3, take the tensor as raw bytes"
    ):
        torch_dtype(DTYPES["F8_E4M3"], old)
    del old.float8_e4m3fn
    with pytest.raises(ArgumentError, match="F8_E4M3"):
        torch_dtype(DTYPES["F8_E4M3"], old)


def test_C41_complex64_is_complex64() -> None:
    assert numpy_dtype(DTYPES["C64"]) == np.complex64
    assert DTYPES["C64"].dlpack == (5, 64)


def test_C42_BF16_without_ml_dtypes_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float(np.array([0x3F80], np.uint16).view(numpy_dtype(DTYPES["BF16"]))[0]) == 1.0
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ArgumentError, match="install a newer ml-dtypes"):
        numpy_dtype(DTYPES["BF16"])


def test_dlpack_codes_agree_with_torch() -> None:
    """Numbers read from the capsules that torch makes: code and bits at bytes 20 and 21 of a DLTensor."""
    import ctypes

    torch = pytest.importorskip("torch")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    checked = 0
    for dtype in DTYPES.values():
        if dtype.torch is None:
            continue
        try:
            capsule = torch.empty(2, dtype=torch_dtype(dtype, torch)).__dlpack__()
        except (BufferError, RuntimeError):
            continue
        head = ctypes.string_at(pointer(capsule, b"dltensor"), 24)
        assert (head[20], head[21]) == dtype.dlpack, dtype
        checked += 1
    assert checked >= 14


def test_lookup_names_the_known_types() -> None:
    assert lookup("F32").name == str(lookup("F32")) == "F32"
    with pytest.raises(ArgumentError, match="'Q9'.*F8_E4M3FNUZ"):
        lookup("Q9")


def test_alignment_is_what_an_array_needs() -> None:
    assert {n: DTYPES[n].alignment for n in ("U8", "BF16", "F64", "C64", "F4", "F6_E2M3")} == {
        "U8": 1, "BF16": 2, "F64": 8, "C64": 4, "F4": 1, "F6_E2M3": 1,
    }  # fmt: skip
