"""Issue 20, kind 9: check, explain, inspect and load see one set of files of a model and say what is missing."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import nobounce as library
from nobounce import config, errors
from nobounce.cli.main import app
from nobounce.formats.index import INDEX_NAME

TENSOR = {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}


def nobounce(*arguments: str | Path) -> Result:
    config.override(None)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def shard(path: Path, tensor: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({tensor: TENSOR}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4096))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A snapshot of a download cache: links into blobs/, the second of which was never fetched."""
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    shard(root / "blobs" / "b1", "a")
    for number, name in ((1, "b1"), (2, "b2")):
        (snapshot / f"model-0000{number}-of-00002.safetensors").symlink_to(f"../../blobs/{name}")
    (snapshot / "config.json").write_text("{}")
    return snapshot


def with_index(folder: Path) -> Path:
    names = {t: f"model-0000{i}-of-00002.safetensors" for i, t in ((1, "a"), (2, "b"))}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("verb", ["load", "explain", "inspect"])
def test_every_verb_names_the_link_and_what_it_lacks(verb: str, index: bool, cache: Path) -> None:
    done = nobounce(verb, with_index(cache) if index else cache)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    words = ("1 of 2 shards missing", "model-00002-of-00002.safetensors", "../../blobs/b2", "download")
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("index", [True, False])
def test_check_gives_every_file_of_the_model_a_verdict(index: bool, cache: Path) -> None:
    done = nobounce("check", with_index(cache) if index else cache, "--device", "cpu", "--json")
    assert done.exit_code == 4
    found = {os.path.basename(v["path"]): v for v in json.loads(done.stdout)["verdicts"]}
    assert list(found) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    gone = found["model-00002-of-00002.safetensors"]
    assert (gone["verdict"], [f["code"] for f in gone["decided_by"]]) == ("impossible", ["no-file"])
    assert "../../blobs/b2" in gone["cure"]["sentence"]
    assert found["model-00001-of-00002.safetensors"]["verdict"] != "impossible"


def test_a_whole_model_is_one_set_of_files_for_all(cache: Path) -> None:
    shard(cache.parents[1] / "blobs" / "b2", "b")
    shard(cache / "consolidated.safetensors", "a")
    with_index(cache)
    checked = json.loads(nobounce("check", cache, "-d", "cpu", "--json").stdout)["verdicts"]
    named = [v["path"] for v in checked]
    for path in (cache, cache / INDEX_NAME):
        assert [r["path"] for r in json.loads(nobounce("explain", path, "--json").stdout)["routes"]] == named
        assert [f["path"] for f in json.loads(nobounce("inspect", path, "--json").stdout)["files"]] == named
    by_index = json.loads(nobounce("check", cache / INDEX_NAME, "-d", "cpu", "--json").stdout)["verdicts"]
    assert [v["path"] for v in by_index] == named
    assert sorted(library.load(cache, device="cpu")) == ["a", "b"]


def test_a_bad_index_is_no_verdict_on_its_folder(cache: Path) -> None:
    (cache / INDEX_NAME).write_text("{}")
    done = nobounce("check", cache, "--device", "cpu", "--json")
    assert done.exit_code == 4
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert [f["code"] for f in verdict["decided_by"]] == ["no-model"]
    assert "weight_map" in verdict["decided_by"][0]["sentence"]


def test_a_link_to_nowhere_in_any_folder_is_seen(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    (tmp_path / "gone").symlink_to("nowhere")
    done = nobounce("check", tmp_path, "--device", "cpu")
    assert done.exit_code == 4
    assert "it is a link to nowhere, which is not there" in done.stdout


def test_a_link_given_by_itself(cache: Path) -> None:
    gone = cache / "model-00002-of-00002.safetensors"
    for verb in ("load", "inspect", "explain"):
        done = nobounce(verb, gone)
        assert done.exit_code == 1
        assert "it is a link to ../../blobs/b2, which is not there" in done.stderr
    with pytest.raises(errors.FileMissingError, match=r"\.\./\.\./blobs/b2"):
        library.open(gone)


def test_a_capture_answers_as_its_machine_did(cache: Path, tmp_path: Path) -> None:
    capture = tmp_path / "c.tar"
    live = nobounce("check", with_index(cache), "-d", "cpu", "--json", "--capture", capture)
    (cache / INDEX_NAME).unlink()
    replayed = nobounce("check", "--replay", capture, "--json")
    assert replayed.exit_code == live.exit_code == 4
    assert json.loads(replayed.stdout)["verdicts"] == json.loads(live.stdout)["verdicts"]
    with tarfile.open(capture) as tar:
        assert tar.getnames() == ["capture.json", "request.json"]
