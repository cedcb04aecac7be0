"""nobounce verify: every byte that is not what was saved is found, and said where it is."""

from __future__ import annotations

import json
import os
import random
import shutil
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

MIB = 1 << 20
BLOCK = 16 * MIB
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _xxhash() -> None:
    need("xxhash")


def verify(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["verify", *(str(a) for a in arguments), "--json"])
    document = json.loads(done.stdout)
    assert document["schema"] == "nobounce.verify/1"
    assert "error" in document or document["exit_code"] == done.exit_code
    text = CliRunner().invoke(app, ["verify", *(str(a) for a in arguments)])
    assert text.exit_code == done.exit_code
    for problem in document.get("problems", ()):
        assert problem["file"] in text.stdout
    return document


def tensors(*sizes: int) -> dict[str, np.ndarray]:
    source = np.random.default_rng(4)
    return {f"t{i}": source.integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)}


def change(path: Path, offset: int, nbytes: int = 1) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        old = f.read(nbytes)
        f.seek(offset)
        f.write(bytes(b ^ 0x20 for b in old))


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_changed_byte_is_found_in_its_block_and_tensors(tmp_path: Path, device: str) -> None:
    path = tmp_path / "m.safetensors"
    held = {}
    for name, array in tensors(9 * MIB, 9 * MIB, 20 * MIB + 1, 77, 0).items():
        held[name] = nobounce.Device(device).allocate(array.nbytes)
        held[name].copy_from(array, stream=None)
    nobounce.save(held, path, checksums=True)
    whole = verify(path)
    assert (whole["exit_code"], whole["problems"]) == (0, [])
    assert whole["files"][0] | {"path": ""} == {
        "path": "",
        "format": "safetensors",
        "nbytes": path.stat().st_size,
        "tensors": 5,
        "checksums": ["metadata"],
        "blocks": 3,
    }
    start = read_header_of(path).data_offset
    generator = random.Random(3)
    for offset in (start, BLOCK - 1, BLOCK, path.stat().st_size - 1, generator.randrange(start, 38 * MIB)):
        change(path, offset)
        found = verify(path)
        assert found["exit_code"] == 1
        (problem,) = found["problems"]
        assert problem["code"] == "block"
        assert problem["file"] == str(path)
        assert problem["offset"] <= offset < problem["offset"] + problem["nbytes"]
        assert problem["offset"] == max(start, offset // BLOCK * BLOCK)
        of_block = {
            name
            for name, info in read_header_of(path).tensors.items()
            if start + info.start < problem["offset"] + problem["nbytes"]
            and start + info.end > problem["offset"]
        }
        assert set(problem["tensors"]) == of_block
        change(path, offset)
    assert verify(path)["exit_code"] == 0


def test_a_changed_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    nobounce.save({"one": np.ones((2, 3))}, path, checksums=True, metadata={"k": "value"})
    raw = path.read_bytes()
    for old, new in ((b'"value"', b'"Value"'), (b"[2,3]", b"[3,2]"), (b'"one"', b'"two"'), (b"  ", b" \t")):
        path.write_bytes(raw.replace(old, new, 1))
        assert [p["code"] for p in verify(path)["problems"]] == ["header"]
    digits = raw.index(b"xxh3-64 16777216 ") + 17
    path.write_bytes(raw[:digits] + bytes([raw[digits] ^ 1]) + raw[digits + 1 :])
    assert [p["code"] for p in verify(path)["problems"]] == ["header"]
    sums = raw.index(b'blocks":"') + 9
    path.write_bytes(raw[:sums] + (b"1" if raw[sums : sums + 1] == b"0" else b"0") + raw[sums + 1 :])
    assert sorted(p["code"] for p in verify(path)["problems"]) == ["block", "header"]
    path.write_bytes(raw.replace(b"xxh3-64 16777216", b"sha2-64 16777216"))
    assert [p["code"] for p in verify(path)["problems"]] == ["checksums"]


def test_checksums_do_not_follow_metadata_into_another_file(tmp_path: Path) -> None:
    nobounce.save(tensors(5000), tmp_path / "a", checksums=True)
    model = nobounce.load(tmp_path / "a", device="cpu")
    nobounce.save({**model, **tensors(1, 2, 3)}, tmp_path / "b", metadata=model.metadata)
    assert verify(tmp_path / "b")["exit_code"] == 3
    nobounce.save(tensors(9), tmp_path / "c", metadata=model.metadata, checksums=True)
    assert verify(tmp_path / "c")["exit_code"] == 0


def test_a_file_that_another_program_rewrote_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    need("safetensors")
    import safetensors.numpy

    nobounce.save(tensors(20 * MIB), tmp_path / "a", checksums=True)
    model = nobounce.load(tmp_path / "a", device="cpu", framework="numpy")
    safetensors.numpy.save_file({"t0": model["t0"][:100]}, tmp_path / "b", metadata=model.metadata)
    (problem,) = verify(tmp_path / "b")["problems"]
    assert problem["code"] == "checksums"
    assert "rewritten" in problem["sentence"]


@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 300])
def test_every_number_of_blocks_has_its_place_in_the_header(tmp_path: Path, blocks: int) -> None:
    from nobounce.formats.checksums import count
    from nobounce.formats.layout import lay_out
    from nobounce.formats.sources import sources

    (source,) = sources({"w": np.zeros(1, np.uint8)})
    for extra in (-4097, -4096, -1, 0, 1, 4096):
        source.nbytes = max(0, blocks * BLOCK + extra)
        source.shape = (source.nbytes,)
        made = lay_out([source], {}, "m", sums=True)
        assert len(made.header) % 4096 == 0
        assert made.header.count(b"0" * 16 * count(made.data_offset, made.nbytes)) >= 1


def test_files_of_others_get_their_checksums_beside_them(tmp_path: Path) -> None:
    need("safetensors")
    import safetensors.numpy

    folder = tmp_path / "m"
    folder.mkdir()
    safetensors.numpy.save_file(tensors(18 * MIB, 3), folder / "a.safetensors")
    np.savez(folder / "z.npz", x=np.arange(9000))
    (folder / "g.gguf").write_bytes(gguf_file(tensors=[("w", (64,), 0, os.urandom(256))]))
    for name, blocks in (("a.safetensors", 2), ("z.npz", 1), ("g.gguf", 1)):
        path = folder / name
        assert verify(path)["exit_code"] == 3
        assert verify(path, "--record")["exit_code"] == 0
        done = verify(path)
        assert (done["exit_code"], done["files"][0]["checksums"], done["files"][0]["blocks"]) == (
            0,
            ["sidecar"],
            blocks,
        )
        change(path, path.stat().st_size // 2)
        codes = {p["code"] for p in verify(path)["problems"]}
        assert codes in ({"block"}, {"format"})
        change(path, path.stat().st_size // 2)
        beside = folder / f"{name}.checksums.json"
        text = beside.read_text()
        beside.write_text(text.replace('"blocks": "', '"blocks": "0', 1))
        assert [p["code"] for p in verify(path)["problems"]] == ["checksums"]
        beside.write_text("[")
        assert [p["code"] for p in verify(path)["problems"]] == ["checksums"]
        beside.write_text(text)
    change(folder / "a.safetensors", 18 * MIB + 100)
    with (folder / "a.safetensors").open("r+b") as f:
        f.truncate(18 * MIB)
    assert (
        verify(folder / "a.safetensors", "--record")["exit_code"] == 1
    )  # nothing is recorded of what is wrong


def test_a_set_is_compared_with_its_index(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    nobounce.save(tensors(5000, 5000, 5000), folder, max_shard_nbytes=5000, checksums=True)
    assert verify(folder)["exit_code"] == verify(folder / INDEX)["exit_code"] == 0
    index = json.loads((folder / INDEX).read_text())
    one, two, three = (index["weight_map"][n] for n in ("t0", "t1", "t2"))
    shutil.move(folder / one, tmp_path / "away")
    (problem,) = verify(folder)["problems"]
    assert (problem["code"], problem["file"], problem["tensors"]) == ("missing", str(folder / one), ["t0"])
    shutil.copy(folder / two, folder / one)
    codes = [p["code"] for p in verify(folder)["problems"]]
    assert codes == ["index"]  # t1 in two files
    shutil.move(tmp_path / "away", folder / one)
    index["weight_map"] |= {"t1": three, "ghost": two}
    (folder / INDEX).write_text(json.dumps(index))
    found = {(p["code"], *p["tensors"], Path(p["file"]).name) for p in verify(folder)["problems"]}
    assert found == {("index", "t1", three), ("index", "t1", two), ("index", "ghost", two)}
    (folder / INDEX).write_text("{")
    assert [p["code"] for p in verify(folder)["problems"]] == ["format"]


def test_everything_that_is_wrong_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    nobounce.save(tensors(40 * MIB, 5000, 5000), folder, max_shard_nbytes=5000, checksums=True)
    names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    change(folder / names[0], 5 * MIB)
    change(folder / names[0], 39 * MIB)
    with (folder / names[1]).open("r+b") as f:
        f.truncate(6000)
    (folder / names[2]).unlink()
    codes = sorted(p["code"] for p in verify(folder)["problems"])
    assert codes == ["block", "block", "format", "missing"]


def test_bytes_that_cannot_be_read_are_told_by_their_place(tmp_path: Path) -> None:
    import errno

    from nobounce.testing import faults

    nobounce.save(tensors(40 * MIB + 5), tmp_path / "m", checksums=True)
    with faults.inject(op="pread", error=errno.EIO):  # what is not aligned is read through the page cache
        found = verify(tmp_path / "m")
    (problem,) = found["problems"]
    assert (problem["code"], problem["offset"], problem["tensors"]) == ("read", 32 * MIB, ["t0"])
    assert "EIO" in problem["sentence"]


def test_paths_that_hold_no_model_are_errors(tmp_path: Path) -> None:
    assert verify(tmp_path / "gone")["error"]["errno"] == "ENOENT"
    assert verify(tmp_path)["error"]["type"] == "FileMissingError"
    (tmp_path / "short.safetensors").write_bytes(b"1234567")
    (problem,) = verify(tmp_path / "short.safetensors")["problems"]
    assert problem["code"] == "format"


def test_an_odd_name_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "m\n\x1b"
    nobounce.save({"t\n\x1b": np.ones(5000)}, path, checksums=True)
    change(path, 5000)
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "\x1b" not in done.stdout
    assert "t\\n\\x1b" in done.stdout
