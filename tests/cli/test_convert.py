"""nobounce convert and diff: every format becomes safetensors of the same values, and what differs is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import nobounce
from capabilities import need
from model_files import gguf_file
from nobounce.cli.main import app
from nobounce.formats.header import read_header_of

INDEX = "model.safetensors.index.json"


def run(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, [*(str(a) for a in arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def convert(source: Path, dest: Path, *options: str) -> dict[str, Any]:
    code, document = run("convert", source, dest, *options)
    assert code == 0, document
    assert document["schema"] == "nobounce.convert/1"
    return document


def diff(a: Path, b: Path) -> list[dict[str, Any]]:
    code, document = run("diff", a, b)
    assert document["schema"] == "nobounce.diff/1"
    assert code == document["exit_code"] == (1 if document["differences"] else 0)
    text = CliRunner().invoke(app, ["diff", str(a), str(b)])
    assert text.exit_code == code
    return list(document["differences"])


def same(a: Path, b: Path) -> None:
    one, other = (nobounce.load(p, device="cpu", framework="numpy") for p in (a, b))
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape)
        assert np.ascontiguousarray(array).tobytes() == other[name].tobytes(), name
    assert diff(a, b) == diff(b, a) == []


def test_arrays_of_every_order_and_byte_order(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).standard_normal((300, 70, 50))
    arrays = {"plain": numbers, "Fortran": np.asfortranarray(numbers.astype(np.float32)), "one": np.int8(3)}
    arrays |= {"big": numbers.astype(">f8")[:3], "big Fortran": np.asfortranarray(numbers[:5].astype(">f4"))}
    np.savez(tmp_path / "in.npz", **arrays, empty=np.zeros((0, 2)))
    document = convert(tmp_path / "in.npz", tmp_path / "out.safetensors", "--checksums")
    same(tmp_path / "in.npz", tmp_path / "out.safetensors")
    assert document["tensors"] == 6
    assert read_header_of(tmp_path / "out.safetensors").data_offset % 4096 == 0
    need("xxhash")
    assert run("verify", tmp_path / "out.safetensors")[0] == 0


def test_a_checkpoint_with_views_and_tied_weights(tmp_path: Path) -> None:
    need("torch")
    import torch

    base = torch.randn(400, 300)
    tensors = {
        "w": base,
        "tied": base,
        "view": base[3:90, ::2],
        "t": base.to(torch.bfloat16).t(),
        "n": torch.tensor(7),
    }
    torch.save({**tensors, "epoch": 3}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    same(tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert nobounce.load(tmp_path / "out.safetensors", device="cpu").metadata == {"epoch": "3"}


@pytest.mark.parametrize("order", ["<", ">"])
def test_gguf_as_bytes_and_as_floats(tmp_path: Path, order: str) -> None:
    raw = np.random.default_rng(2).integers(0, 60, 2 * 34 * 3, dtype=np.uint8).tobytes()
    tensors = [("f", (5, 3), 0, os.urandom(60)), ("q", (64, 3), 8, raw)]
    (tmp_path / "in.gguf").write_bytes(gguf_file({"general.name": ("str", "x")}, tensors, order=order))
    document = convert(tmp_path / "in.gguf", tmp_path / "raw.safetensors")
    assert document["quantised"] == ["q"]
    model = nobounce.load(tmp_path / "in.gguf", device="cpu", framework="numpy")
    back = nobounce.load(tmp_path / "raw.safetensors", device="cpu", framework="numpy")
    assert back["q"].tobytes() == model["q"].tobytes()
    assert back["f"].tobytes() == model["f"].tobytes()
    told = json.loads(back.metadata["nobounce.encodings"])["q"]
    assert (told["name"], told["shape"]) == ("Q8_0", [3, 64])
    assert [d["kind"] for d in diff(tmp_path / "in.gguf", tmp_path / "raw.safetensors")] == ["dtype"]
    code, document = run("convert", tmp_path / "in.gguf", tmp_path / "floats.safetensors", "--dequantize")
    if order == ">":
        assert (code, document["error"]["type"]) == (2, "ArgumentError")
        assert not (tmp_path / "floats.safetensors").exists()
        return
    back = nobounce.load(tmp_path / "floats.safetensors", device="cpu", framework="numpy")
    assert np.array_equal(back["q"], nobounce.dequantize(model["q"], "Q8_0"))


def test_a_set_becomes_a_file_and_a_file_a_set(tmp_path: Path) -> None:
    source = np.random.default_rng(3)
    tensors = {f"t{i}": source.integers(0, 9, n, dtype=np.uint8) for i, n in enumerate((5, 9 << 20, 4097, 1))}
    nobounce.save(tensors, tmp_path / "set", max_shard_nbytes=1 << 20, metadata={"k": "v"})
    convert(tmp_path / "set", tmp_path / "one.safetensors")
    same(tmp_path / "set", tmp_path / "one.safetensors")
    convert(tmp_path / "one.safetensors", tmp_path / "other", "--max-shard", "4KiB")
    same(tmp_path / "one.safetensors", tmp_path / "other")
    before = set(os.listdir(tmp_path / "other"))
    convert(tmp_path / "other", tmp_path / "other", "--max-shard", "1GiB")  # over itself
    convert(tmp_path / "one.safetensors", tmp_path / "one.safetensors")
    same(tmp_path / "one.safetensors", tmp_path / "other")
    assert not before & set(os.listdir(tmp_path / "other")) - {INDEX}
    assert nobounce.load(tmp_path / "other", device="cpu").metadata == {"k": "v"}


def test_what_safetensors_lacks_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones(3, np.complex128))
    code, document = run("convert", tmp_path / "in.npy", tmp_path / "out")
    assert (code, document["error"]["type"]) == (2, "ArgumentError")
    assert "C128" in document["error"]["message"]
    assert run("convert", tmp_path / "gone", tmp_path / "out")[0] == 1
    np.save(tmp_path / "in.npy", np.ones(3))
    assert run("convert", tmp_path / "in.npy", tmp_path)[0] == 1  # a folder, without --max-shard
    assert os.listdir(tmp_path) == ["in.npy"]


def test_a_source_that_changes_meanwhile_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    from nobounce.formats.filewriter import Hooks
    from nobounce.formats.modelsource import ModelSource
    from nobounce.formats.save import save_sources

    nobounce.save({"w": np.zeros(9 << 20, np.uint8)}, tmp_path / "in")

    def write_to_it(backend: str, nbytes: int) -> None:
        with (tmp_path / "in").open("r+b") as f:
            f.seek(5000)
            f.write(b"x")

    with pytest.raises(nobounce.FileChangedError, match="changed"), ModelSource(tmp_path / "in") as model:
        found = list(model.sources.values())
        save_sources(
            found,
            str(tmp_path / "out"),
            {},
            None,
            sums=False,
            fsync=True,
            hooks=Hooks(progress=write_to_it, check=model.check),
        )
    assert os.listdir(tmp_path) == ["in"]


def test_every_kind_of_difference_is_named(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    far = base.copy()
    far[1, 2] += 0.5
    far[2, 0] -= 2
    nobounce.save(
        {
            "same": base.copy(),
            "a": base.copy(),
            "type": base.copy(),
            "shape": base.copy(),
            "values": base.copy(),
            "nan": np.float32([np.nan, 0.0]),
        },
        tmp_path / "a",
    )
    other = {
        "same": base.copy(),
        "b": base.copy(),
        "type": base.astype(np.float64),
        "shape": base.reshape(4, 3),
    }
    nobounce.save({**other, "values": far, "nan": np.float32([np.nan, -0.0])}, tmp_path / "b")
    found = {d.pop("name"): d for d in diff(tmp_path / "a", tmp_path / "b")}
    assert found == {
        "a": {"kind": "only in A", "a": "F32 [3, 4]", "b": None},
        "b": {"kind": "only in B", "a": None, "b": "F32 [3, 4]"},
        "type": {"kind": "dtype", "a": "F32", "b": "F64"},
        "shape": {"kind": "shape", "a": "[3, 4]", "b": "[4, 3]"},
        "values": {"kind": "values", "count": 2, "total": 12, "first": [1, 2], "most": 2.0},
        "nan": {"kind": "values", "count": 1, "total": 2, "first": [1], "most": 0.0},
    }


def test_values_far_into_a_large_tensor_are_found(tmp_path: Path) -> None:
    base = np.zeros((5000, 1100), np.float32)
    nobounce.save({"w": base}, tmp_path / "a")
    base[4999, 1099] = base[4200, 7] = np.inf
    nobounce.save({"w": base}, tmp_path / "b")
    (found,) = diff(tmp_path / "a", tmp_path / "b")
    assert (found["count"], found["first"], found["most"]) == (2, [4200, 7], None)


def test_a_model_that_cannot_be_read_is_no_difference(tmp_path: Path) -> None:
    nobounce.save({"w": np.ones(3)}, tmp_path / "a")
    (tmp_path / "b.safetensors").write_bytes(b"12")
    code, document = run("diff", tmp_path / "a", tmp_path / "b.safetensors")
    assert (code, document["error"]["type"]) == (3, "FormatError")
    assert run("diff", tmp_path / "a", tmp_path / "gone")[0] == 3
