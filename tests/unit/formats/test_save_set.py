"""nobounce.save with max_shard_nbytes: at any moment the index names one whole set, and nothing outside of the folder changes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from nobounce.errors import ArgumentError, BusyError, FileError
from nobounce.testing import faults

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-([0-9a-f]{8})-([0-9]{5})-of-([0-9]{5})\.safetensors")


def tensors(seed: int = 1) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)
    sizes = {"a": 900, "b": 100, "c": 5000, "d": 1, "e": 0, "f": 999}
    return {name: source.integers(0, 256, n, dtype=np.uint8) for name, n in sizes.items()}


def shards(folder: Path) -> list[str]:
    return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))


def same(folder: Path, want: dict[str, np.ndarray]) -> bool:
    back = nobounce.load(folder, device="cpu", framework="numpy")
    assert back.warnings == ()
    return back.keys() == want.keys() and all(np.array_equal(back[n], t) for n, t in want.items())


def test_a_set_is_cut_by_size_in_the_order_of_the_mapping(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    receipt = nobounce.save(tensors(), folder, max_shard_nbytes=1000, metadata={"format": "pt"})
    assert same(folder, tensors())
    names = shards(folder)
    assert sorted(os.listdir(folder)) == sorted([*names, INDEX])
    matches = [SHARD.fullmatch(n) for n in names]
    assert [m and (m[2], m[3]) for m in matches] == [
        ("00001", "00003"),
        ("00002", "00003"),
        ("00003", "00003"),
    ]
    assert len({m and m[1] for m in matches}) == 1
    held = [sorted(nobounce.load(folder / n, device="cpu")) for n in names]
    assert held == [["a", "b"], ["c"], ["d", "e", "f"]]
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == 7000
    assert nobounce.load(folder / names[0], device="cpu").metadata == {"format": "pt"}
    assert receipt.nbytes == sum((folder / n).stat().st_size for n in names)


def test_a_set_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    need("safetensors")
    import safetensors.numpy

    folder, outside = tmp_path / "m", tmp_path / "outside.safetensors"
    (folder / "below").mkdir(parents=True)
    safetensors.numpy.save_file({"x": np.ones(3)}, outside)
    for name in ("model-00001-of-00002.safetensors", "below/one.safetensors", "mine.safetensors"):
        safetensors.numpy.save_file({name: np.ones(3)}, folder / name)
    (folder / "config.json").write_text("{}")
    (folder / "linked.safetensors").symlink_to(outside)
    named = [
        "model-00001-of-00002.safetensors",
        "below/one.safetensors",
        "config.json",
        "linked.safetensors",
        "gone.safetensors",
    ]
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: n for n in named}}))
    (folder / INDEX).chmod(0o640)
    (folder / "model-0123abcd-00001-of-00002.safetensors").write_bytes(b"left by a save that was killed")
    for seed in (1, 2):
        nobounce.save(tensors(seed), folder, max_shard_nbytes=1 << 20, fsync=seed == 1)
        (name,) = shards(folder)
        assert sorted(os.listdir(folder)) == sorted([name, INDEX, "below", "config.json", "mine.safetensors"])
    back = nobounce.load(folder, device="cpu", framework="numpy")
    assert all(np.array_equal(back[n], t) for n, t in tensors(2).items())
    assert (folder / "below" / "one.safetensors").exists()
    assert outside.exists()
    assert (folder / INDEX).stat().st_mode & 0o777 == 0o640


def test_while_a_set_is_written_the_index_names_the_old_one(tmp_path: Path) -> None:
    nobounce.save(tensors(1), tmp_path, max_shard_nbytes=1000)
    seen = []

    def look(backend: str, nbytes: int) -> None:
        back = nobounce.load(tmp_path, device="cpu", framework="numpy")
        seen.append(all(np.array_equal(back[n], t) for n, t in tensors(1).items()))

    nobounce.save(tensors(2), tmp_path, max_shard_nbytes=1000, progress=look)
    assert len(seen) >= 3
    assert all(seen)
    assert same(tmp_path, tensors(2))


def test_a_set_is_saved_over_the_one_it_was_loaded_from(tmp_path: Path) -> None:
    nobounce.save(tensors(1), tmp_path, max_shard_nbytes=1000)
    model = nobounce.load(tmp_path, device="cpu")
    nobounce.save(model, tmp_path, max_shard_nbytes=3000)
    assert same(tmp_path, tensors(1))


@pytest.mark.parametrize("new", [False, True])
def test_a_set_that_fails_half_way_leaves_the_old_one(tmp_path: Path, new: bool) -> None:
    folder = tmp_path / "m"
    if not new:
        nobounce.save(tensors(1), folder, max_shard_nbytes=1000)
    before = sorted(os.listdir(folder)) if not new else []
    with faults.inject(op="pwrite", error=errno.ENOSPC, after=2), pytest.raises(FileError) as caught:
        nobounce.save(tensors(2), folder, max_shard_nbytes=1000)
    assert caught.value.errno == errno.ENOSPC
    if new:
        assert os.listdir(tmp_path) == []
    else:
        assert sorted(os.listdir(folder)) == before
        assert same(folder, tensors(1))


def test_an_index_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "blob").write_text("{}")
    (folder / INDEX).symlink_to(tmp_path / "blob")
    with pytest.raises(FileError, match="is a link"):
        nobounce.save(tensors(), folder, max_shard_nbytes=1000)
    assert (tmp_path / "blob").read_text() == "{}"
    assert os.listdir(folder) == [INDEX]


def test_one_process_saves_into_a_folder_at_a_time(tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process saves"):
            nobounce.save(tensors(), tmp_path, max_shard_nbytes=1000)
    finally:
        os.close(held)
    nobounce.save(tensors(), tmp_path, max_shard_nbytes=1000)


@pytest.mark.parametrize(
    ("most", "error"), [(0, ArgumentError), (-1, ArgumentError), (1.5, TypeError), (True, TypeError)]
)
def test_a_size_that_makes_no_sense_is_refused(tmp_path: Path, most: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_shard_nbytes"):
        nobounce.save(tensors(), tmp_path / "m", max_shard_nbytes=most)
    assert os.listdir(tmp_path) == []


def test_a_set_needs_a_tensor_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no tensors"):
        nobounce.save({}, tmp_path / "m", max_shard_nbytes=9)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="Not a directory"):
        nobounce.save(tensors(), tmp_path / "file", max_shard_nbytes=9)
    with pytest.raises(ArgumentError, match="share memory"):  # in two shards, too
        nobounce.save(
            {"x": tensors()["a"], "y": (one := np.ones(9)), "z": one}, tmp_path / "m", max_shard_nbytes=1
        )
    assert os.listdir(tmp_path) == ["file"]


def test_the_documentation_lists_every_code_of_verify() -> None:
    from nobounce.formats.integrity import CODES

    text = (Path(__file__).parents[3] / "docs" / "saving.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    assert listed == set(CODES)
