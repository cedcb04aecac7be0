"""GGUF: what the gguf package writes is read bit for bit as that package reads it, and bad files are named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_files as made
import nobounce
from capabilities import need
from nobounce.errors import ArgumentError, FormatError
from nobounce.formats.ggml import TYPES
from nobounce.formats.gguf import read_values
from nobounce.formats.reader import InMemory, read_model
from nobounce.formats.tensorinfo import Header
from scale import cases

PLAIN = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
DEQUANTIZED = ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"]


def parse(raw: bytes) -> Header:
    return read_model(InMemory(raw), path="m.gguf", file_nbytes=len(raw))


def every_type(path: Path, endian: Any) -> None:
    """A file with a tensor of every type that the gguf package knows."""
    import gguf

    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_float32("x.float", 1e-5)
    writer.add_array("x.list", [1, 2, 3])
    writer.add_string("x.text", "héllo")
    writer.add_token_list([f"token {n}" if n % 900 else "" for n in range(3000)])
    for kind in gguf.GGMLQuantizationType:
        nbytes = gguf.GGML_QUANT_SIZES[kind][1]
        if kind.name in PLAIN:
            data = rng.integers(0, 100, (3, 1, 5)).astype(PLAIN[kind.name])
            writer.add_tensor(f"t.{kind.name}", data)
        else:
            data = rng.integers(0, 256, (3, 2 * nbytes), dtype=np.uint8)
            writer.add_tensor(f"t.{kind.name}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("endian", ["LITTLE", "BIG"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
def test_every_type_is_what_the_gguf_package_reads(
    tmp_path: Path, endian: str, device: str, framework: Any
) -> None:
    need("gguf", *(["torch"] if framework == "torch" else []))
    import gguf

    path = tmp_path / "model.gguf"
    every_type(path, gguf.GGUFEndian[endian])
    model = nobounce.load(path, device=device, framework=framework)
    theirs = gguf.GGUFReader(path).tensors
    assert list(model) == [t.name for t in theirs]
    for tensor in theirs:
        expected = np.asarray(tensor.data)
        expected = expected.astype(expected.dtype.newbyteorder("="))
        mine = model[tensor.name]
        if tensor.tensor_type.name == "BF16":  # bytes there, and in a big-endian file bytes that are turned
            assert str(mine.dtype) in ("BF16", "bfloat16", "torch.bfloat16")
            expected = expected if endian == "LITTLE" else expected.view(np.uint16).byteswap().view(np.uint8)
            expected = expected.view(np.uint16)
        if framework == "torch":
            import torch

            mine = mine.view(torch.uint16) if mine.dtype == torch.bfloat16 else mine
        raw = mine.tobytes() if framework != "torch" else mine.cpu().numpy().tobytes()
        assert tuple(mine.shape) == expected.shape
        assert raw == expected.tobytes()
        encoding = model.encodings.get(tensor.name)
        assert (encoding is None) == (tensor.tensor_type.name in {*PLAIN, "BF16"})
        if encoding is not None:
            assert encoding.name == tensor.tensor_type.name
            assert encoding.shape == tuple(reversed(tensor.shape.tolist()))
            assert encoding.byteorder == endian.lower()


def test_every_type_of_the_gguf_package_has_its_size() -> None:
    need("gguf")
    import gguf

    theirs = {int(k): (k.name, *gguf.GGML_QUANT_SIZES[k]) for k in gguf.GGMLQuantizationType}
    assert {k: (t.name, t.block, t.nbytes) for k, t in TYPES.items() if k in theirs} == theirs


@pytest.mark.parametrize("name", DEQUANTIZED)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 40), (1500, 1)])
def test_dequantized_bits_are_those_of_the_gguf_package(name: str, shape: tuple[int, ...]) -> None:
    need("gguf")
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    # All bytes, so all scales: infinities, numbers below the normal ones and those that are none, too.
    raw = np.random.default_rng(1).integers(0, 256, (*shape[:-1], shape[-1] * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
    mine = nobounce.dequantize(raw, name)
    assert mine.dtype == np.float32
    assert mine.shape == expected.shape
    assert np.array_equal(mine.view(np.uint32), expected.view(np.uint32))


def test_no_rows_dequantize_to_no_rows() -> None:
    assert nobounce.dequantize(np.empty((0, 288), np.uint8), "Q4_K").shape == (0, 512)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_loaded_tensor_can_be_dequantized(tmp_path: Path, device: str) -> None:
    raw = struct.pack("<e32b", 0.5, *range(-16, 16))
    path = tmp_path / "q.gguf"
    path.write_bytes(made.gguf_file({}, [("w", [32, 1], 8, raw)]))
    model = nobounce.load(path, device=device)
    assert model.encodings["w"].name == "Q8_0"
    assert nobounce.dequantize(model["w"], "Q8_0").tolist() == [[n / 2 for n in range(-16, 16)]]


@pytest.mark.parametrize(
    ("data", "encoding", "word"),
    [
        (np.zeros(34, np.uint8), "IQ1_S", "gguf.dequantize"),
        (np.zeros(34, np.uint8), "\x1b", "no reference"),
        (np.zeros(34, np.int8), "Q8_0", "uint8"),
        (np.zeros(33, np.uint8), "Q8_0", "blocks of 34 bytes"),
        (np.uint8(3), "Q8_0", "blocks of 34 bytes"),
    ],
)
def test_what_cannot_be_dequantized_is_named(data: Any, encoding: str, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        nobounce.dequantize(data, encoding)


def test_metadata_is_short_text_and_values_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = ["", "a", "b" * 300, "\0" * 9, *(f"t{n}" for n in range(2000))]
    keys: dict[str, made.GgufValue] = {
        "u8": ("u8", 255),
        "i64": ("i64", -(1 << 63)),
        "f32": ("f32", 0.1),
        "yes": ("bool", True),
        "text": ("str", "é\x1b"),
        "bad text": ("str", b"\xff"),
        "long": ("str", "x" * (2 << 20)),
        "few": ("array", ("i16", [1, -2])),
        "many": ("array", ("f64", [0.5] * 100)),
        "tokens": ("array", ("str", tokens)),
        "nested": ("array", ("array", [("u8", [1]), ("u8", [2, 3])])),
    }
    for order in "<>":
        path.write_bytes(made.gguf_file(keys, [("t", [2], 24, b"ab")], order=order))
        model = nobounce.load(path, device="cpu")
        assert model["t"].tobytes() == b"ab"
        assert model.metadata == {
            "u8": "255",
            "i64": "-9223372036854775808",
            "f32": "0.1",
            "yes": "true",
            "text": "é\x1b",
            "bad text": "�",
            "long": f"a string of {2 << 20} bytes",
            "few": "[1, -2]",
            "many": "an array of 100 FLOAT64",
            "tokens": "an array of 2004 STRING",
            "nested": "an array of 2 ARRAY",
        }
        values = read_values(path)
        assert values["tokens"] == tokens
        assert values["many"].tolist() == [0.5] * 100
        assert [v.tolist() for v in values["nested"]] == [[1], [2, 3]]
        assert (values["i64"], values["yes"], values["long"]) == (-(1 << 63), True, "x" * (2 << 20))
        assert list(read_values(path, {"u8"})) == ["u8"]
        with pytest.raises(FormatError, match="limit of 1000 bytes"):
            read_values(path, {"tokens"}, limit=1000)


BIG = (1 << 64) - 1
ONE = [("t", [32], 8, bytes(34))]
BAD: dict[str, tuple[bytes, str]] = {
    "nothing behind the magic": (b"GGUF", "ends inside the magic and version"),
    "version 1": (made.gguf_file(version=1), "version 1; versions 2 and 3 are read; the version of 2023"),
    "version 4": (made.gguf_file(version=4), "version 4"),
    "counts that the file cannot hold": (made.gguf_file(counts=(BIG, 0)), "tensors are more"),
    "keys that the file cannot hold": (made.gguf_file(counts=(0, BIG)), "keys of metadata are more"),
    "a key that is no text": (made.gguf_file({"a": ("u8", 1)}).replace(b"a", b"\xff"), "not valid UTF-8"),
    "a key twice": (made.gguf_file({"ab": ("u8", 1), "ac": ("u8", 1)}).replace(b"ac", b"ab"), "'ab' is given twice"),
    "an unknown type of value": (made.gguf_file({"a": ("u8", 1)}).replace(b"a\0", b"a\x63"), "unknown type 99"),
    "an array beyond the file": (
        made.gguf_file({"a": ("array", ("u8", [1, 2]))}).replace(b"\2\0\0\0\0\0\0\0\1\2", b"\xff" * 8 + b"\1\2"),
        "reaches beyond the header",
    ),
    "a string beyond the file": (made.gguf_file({"a": ("str", "vwxyz")}).replace(b"\5" + bytes(7), b"\xff" * 8), "ends inside"),
    "strings beyond the file": (
        made.gguf_file({"a": ("array", ("str", ["vwxyz"] * 9))}).replace(b"\5" + bytes(7), b"\xff" * 8),
        "ends inside an array of strings",
    ),
    "an alignment of zero": (made.gguf_file({"general.alignment": ("u32", 0)}), "power of two"),
    "an alignment of 48": (made.gguf_file({"general.alignment": ("u32", 48)}), "power of two"),
    "an alignment of another type": (made.gguf_file({"general.alignment": ("str", "32")}), "UINT32"),
    "a tensor twice": (made.gguf_file({}, ONE + ONE), "'t' is given twice"),
    "a long name": (made.gguf_file({}, [("n" * 5000, [1], 24, b"x")]), "longer than 4096"),
    "many dimensions": (made.gguf_file({}, [("t", [1] * 9, 24, b"x")]), "9 dimensions"),
    "an unknown type": (made.gguf_file({}, [("t", [1], 99, b"x")]), "unknown ggml type 99"),
    "a removed type": (made.gguf_file({}, [("t", [32], 31, bytes(18))]), r"Q4_0_4_4 \(31\) was removed"),
    "a row of no whole blocks": (made.gguf_file({}, [("t", [33], 8, bytes(68))]), "whole blocks of 32"),
    "a scalar of a quantised type": (made.gguf_file({}, [("t", [], 8, bytes(34))]), "whole blocks of 32"),
    "a size over 64 bits": (made.gguf_file({}, [("t", [1 << 62, 8], 0, bytes(4))]), "overflows 64 bits"),
    "a size over 64 bits behind a zero": (made.gguf_file({}, [("t", [1 << 62, 1 << 62, 0], 0, b"")]), "overflows 64"),
    "an unaligned offset": (made.gguf_file({}, ONE, offsets=[16]), "no multiple of the alignment 32"),
    "an offset beyond the file": (made.gguf_file({}, ONE, offsets=[1 << 40]), "truncated: its data ends at"),
    "an offset of 64 bits": (made.gguf_file({}, ONE, offsets=[BIG - 31]), "truncated: its data ends at"),
    "data that is cut off": (made.gguf_file({}, ONE)[:-40], "truncated: its data ends at"),
    "tensors that overlap": (
        made.gguf_file({}, [("a", [64], 24, bytes(64)), ("b", [4], 24, bytes(4))], offsets=[0, 32]),
        r"overlaps \[\d+, \d+\) of tensor 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(kind: str, tmp_path: Path, fd_guard: None) -> None:
    raw, word = BAD[kind]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=word) as caught:
        nobounce.load(path, device="cpu")
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("nbytes", range(0, 400, 7))
def test_a_file_cut_anywhere_is_refused(nbytes: int) -> None:
    raw = made.gguf_file({"a": ("array", ("str", ["x"] * 20))}, [("t", [32], 8, bytes(34))])
    with pytest.raises(FormatError):
        parse(raw[: min(nbytes, len(raw) - 31)])


def test_tensors_may_lie_in_any_order_with_gaps() -> None:
    header = parse(made.gguf_file({}, [("a", [1], 24, bytes(96)), ("b", [1], 24, b"x")], offsets=[96, 0]))
    assert list(header.tensors) == ["a", "b"]
    assert (header.tensors["b"].start, header.tensors["a"].start) == (0, 96)


@settings(max_examples=cases(2000, 40))
@given(
    st.lists(
        st.binary(max_size=12) | st.integers(0, 600).map(lambda n: b"x" * n) | st.just(bytes(9)), max_size=20
    ),
    st.integers(1, 400),
    st.integers(0, 9),
    st.sampled_from("<>"),
)
def test_strings_are_passed_over_to_the_byte(texts: list[bytes], times: int, lead: int, order: str) -> None:
    """Whatever the strings are and wherever they begin, what follows them is found."""
    keys: dict[str, made.GgufValue] = {"k" * lead: ("array", ("str", texts * times)), "after": ("u32", 77)}
    header = parse(made.gguf_file(keys, [("t", [4], 24, b"abcd")], order=order))
    assert header.metadata["after"] == "77"
    assert header.tensors["t"].nbytes == 4


@pytest.mark.parametrize("lead", range(4))
@pytest.mark.parametrize("byte", [1, 3, 4, 5, 6, 7])
def test_a_length_is_all_of_its_eight_bytes(lead: int, byte: int) -> None:
    """Among many short strings one whose length has a high byte, which would be short without it."""
    raw = bytearray(made.gguf_file({"k" * lead: ("array", ("str", ["vwxyz"] * 3000))}))
    at = len(raw) // 13 // 2 * 13
    at = raw.index(b"\5" + bytes(7), at) + byte
    raw[at] = 0xFF
    with pytest.raises(FormatError, match="ends inside an array of strings"):
        parse(bytes(raw))


def test_a_file_without_tensors_is_an_empty_model(tmp_path: Path) -> None:
    (tmp_path / "vocab.gguf").write_bytes(made.gguf_file({"general.name": ("str", "v")}))
    model = nobounce.load(tmp_path / "vocab.gguf", device="cpu")
    assert (dict(model), model.receipt.nbytes, model.metadata) == ({}, 0, {"general.name": "v"})


def split(folder: Path, count: int = 3, **changed: int) -> list[Path]:
    """A model of `count` files; `changed` replaces what all of them say."""
    paths = []
    for number in range(count):
        said = {"no": number, "count": count, "tensors": count, **changed}
        keys: dict[str, made.GgufValue] = {
            "split.no": ("u16", said["no"]),
            "split.count": ("u16", said["count"]),
            "split.tensors.count": ("i32", said["tensors"]),
        }
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(made.gguf_file(keys, [(f"t{number}", [4], 24, bytes([number] * 4))]))
        paths.append(path)
    return paths


def test_the_first_file_of_a_split_and_its_folder_stand_for_all(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for named in (paths[0], tmp_path, paths):
        model = nobounce.load(named, device="cpu")
        assert {n: t.tobytes() for n, t in model.items()} == {f"t{n}": bytes([n] * 4) for n in range(3)}
        assert model.warnings == ()
    alone = nobounce.load(paths[1], device="cpu")
    assert list(alone) == ["t1"]
    assert "split 2 of 3" in alone.warnings[0]


def test_a_split_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    with pytest.raises(FormatError, match="split.count is 3, but 2 files"):
        nobounce.load(paths[:2], device="cpu")
    paths[2].unlink()
    for named in (paths[0], tmp_path):
        with pytest.raises(FormatError, match="1 of 3 shards missing: m-00003-of-00003.gguf"):
            nobounce.load(named, device="cpu")


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"no": 0}, "no file of the split has split.no 1"), ({"tensors": 9}, "split.tensors.count is 9")],
)
def test_a_split_whose_files_contradict_each_other_is_refused(
    tmp_path: Path, changed: dict[str, int], word: str
) -> None:
    with pytest.raises(FormatError, match=word):
        nobounce.load(split(tmp_path, **changed)[0], device="cpu")


def test_a_folder_of_several_models_names_them(tmp_path: Path) -> None:
    for name in ("m-Q4_K.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).write_bytes(made.gguf_file())
    with pytest.raises(ArgumentError, match=r"2 models; name one of .*m-Q4_K\.gguf, .*m-Q8_0\.gguf"):
        nobounce.load(tmp_path, device="cpu")
