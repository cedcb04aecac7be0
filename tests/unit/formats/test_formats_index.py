"""Sets of files: spec/cases.md G, and names that try to leave the folder."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from formats_corpus import entry, file_bytes

from nobounce import errors
from nobounce.formats.header import Header, read_header_of
from nobounce.formats.index import (
    INDEX_NAME,
    Index,
    ModelFiles,
    Shard,
    parse_index,
    read_index,
    resolve,
    verify_index,
)

if TYPE_CHECKING:
    from pathlib import Path


def shard(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_bytes({n: entry("U8", [1], i, i + 1) for i, n in enumerate(names)}, len(names)))


def index(folder: Path, weight_map: Any, name: str = INDEX_NAME, **more: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 2}, "weight_map": weight_map, **more}))
    return path


def headers(files: ModelFiles) -> dict[str, Header]:
    return {s.name: read_header_of(s.path) for s in files.shards}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shard(tmp_path / "m1.safetensors", "a")
    shard(tmp_path / "m2.safetensors", "b")
    index(tmp_path, {"a": "m1.safetensors", "b": "m2.safetensors"})
    return tmp_path


def refused(raw: bytes | str) -> errors.FormatError:
    with pytest.raises(errors.FormatError) as caught:
        parse_index(raw.encode() if isinstance(raw, str) else raw, path="i.json")
    assert caught.value.filename == "i.json"
    return caught.value


def test_a_folder_with_an_index(model: Path) -> None:
    files = resolve(model)
    assert [s.name for s in files.shards] == ["m1.safetensors", "m2.safetensors"]
    assert [s.path for s in files.shards] == [str(model / "m1.safetensors"), str(model / "m2.safetensors")]
    assert files.warnings == ()
    report = verify_index(files.index, headers(files))
    assert (report.absent, report.unlisted, report.warnings) == ((), (), ())
    assert resolve(model / INDEX_NAME).shards == files.shards
    assert resolve(str(model)) == files


def test_an_index_of_another_name(tmp_path: Path) -> None:
    shard(tmp_path / "d.safetensors", "a")
    index(tmp_path, {"a": "d.safetensors"}, "diffusion_pytorch_model.safetensors.index.json")
    assert resolve(tmp_path).index is not None
    index(tmp_path, {"a": "d.safetensors"}, "other.safetensors.index.json")
    with pytest.raises(errors.ArgumentError, match="several indexes"):
        resolve(tmp_path)
    index(tmp_path, {"a": "d.safetensors"})
    assert resolve(tmp_path).index is not None


def test_C89_every_missing_shard_is_listed(model: Path) -> None:
    index(
        model,
        {"a": "m1.safetensors", "b": "gone1.safetensors", "c": "gone2.safetensors", "d": "m1.safetensors/x"},
    )
    with pytest.raises(errors.FormatError) as caught:
        resolve(model)
    assert "3 of 4 shards missing: gone1.safetensors, gone2.safetensors, m1.safetensors/x" in str(
        caught.value
    )


def test_C89_without_an_index_numbered_names_tell_what_is_missing(tmp_path: Path) -> None:
    shard(tmp_path / "model-00001-of-00003.safetensors", "a")
    with pytest.raises(
        errors.FormatError, match="model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"
    ):
        resolve(tmp_path)
    shard(tmp_path / "model-00002-of-00003.safetensors", "b")
    shard(tmp_path / "model-00003-of-00003.safetensors", "c")
    assert len(resolve(tmp_path).shards) == 3


def test_C91_a_mapped_tensor_that_its_shard_lacks(model: Path) -> None:
    index(model, {"a": "m1.safetensors", "b": "m2.safetensors", "c": "m2.safetensors"})
    files = resolve(model)
    with pytest.raises(errors.FormatError, match=r"lack them: c \(m2.safetensors\)") as caught:
        verify_index(files.index, headers(files))
    assert caught.value.tensor == "c"
    report = verify_index(files.index, headers(files), strict=False)
    assert (report.absent, report.unlisted) == ((("c", "m2.safetensors"),), ())


def test_C91_a_tensor_that_the_index_does_not_name(model: Path) -> None:
    shard(model / "m2.safetensors", "b", "extra")
    files = resolve(model)
    with pytest.raises(errors.FormatError, match=r"not so in the index: extra \(m2.safetensors\)"):
        verify_index(files.index, headers(files))
    report = verify_index(files.index, headers(files), strict=False)
    assert (report.absent, report.unlisted) == ((), (("extra", "m2.safetensors"),))


def test_C91_a_tensor_in_another_shard_than_mapped(model: Path) -> None:
    index(model, {"a": "m2.safetensors", "b": "m1.safetensors"})
    files = resolve(model)
    report = verify_index(files.index, headers(files), strict=False)
    assert set(report.absent) == {("a", "m2.safetensors"), ("b", "m1.safetensors")}
    assert set(report.unlisted) == {("a", "m1.safetensors"), ("b", "m2.safetensors")}


def test_C94_only_the_headers_given_are_judged(model: Path) -> None:
    files = resolve(model)
    assert verify_index(files.index, {"m1.safetensors": headers(files)["m1.safetensors"]}).absent == ()


def test_C92_the_index_wins_over_a_consolidated_copy(model: Path) -> None:
    shard(model / "consolidated.safetensors", "a", "b")
    files = resolve(model)
    assert [s.name for s in files.shards] == ["m1.safetensors", "m2.safetensors"]
    assert files.warnings == ("not in the index, ignored: consolidated.safetensors",)


def test_a_tensor_in_two_files_names_both(tmp_path: Path) -> None:
    shard(tmp_path / "x.safetensors", "a")
    shard(tmp_path / "y.safetensors", "b", "a")
    files = resolve([tmp_path / "x.safetensors", tmp_path / "y.safetensors"])
    for strict in (True, False):
        with pytest.raises(errors.FormatError, match=r"x\.safetensors and .*y\.safetensors") as caught:
            verify_index(None, headers(files), strict=strict)
        assert caught.value.tensor == "a"


def test_a_wrong_total_size_is_a_warning(model: Path) -> None:
    index(model, {"a": "m1.safetensors", "b": "m2.safetensors"}, metadata={"total_size": 7})
    files = resolve(model)
    assert verify_index(files.index, headers(files)).warnings == (
        "the index says 7 bytes in all, its shards hold 2",
    )


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/../../x",
        "..",
        ".",
        "",
        "a//b",
        "./a.safetensors",
        "sub/",
        "a\0b",
        "sub/..",
    ],
)
def test_a_shard_name_that_leaves_the_folder_or_is_no_file_name(name: str) -> None:
    caught = refused(json.dumps({"weight_map": {"ok": "m.safetensors", "t": name}}))
    assert caught.tensor == "t"
    assert ("absolute" in str(caught)) is name.startswith("/")


def test_a_shard_in_a_subfolder(tmp_path: Path) -> None:
    shard(tmp_path / "sub" / "m.safetensors", "a")
    index(tmp_path, {"a": "sub/m.safetensors"})
    assert resolve(tmp_path).shards == (Shard("sub/m.safetensors", str(tmp_path / "sub/m.safetensors")),)


def test_the_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    shard(tmp_path / "blobs" / "0123", "a")
    os.symlink("../../blobs/0123", snapshot / "m.safetensors")
    index(tmp_path / "blobs", {"a": "m.safetensors"}, "4567")
    os.symlink("../../blobs/4567", snapshot / INDEX_NAME)
    files = resolve(snapshot)
    assert verify_index(files.index, headers(files)).absent == ()
    os.unlink(tmp_path / "blobs" / "0123")
    gone = re.escape("1 of 1 shards missing: m.safetensors (a link to ../../blobs/0123, which is not there)")
    with pytest.raises(errors.FormatError, match=gone):
        resolve(snapshot)
    os.unlink(snapshot / INDEX_NAME)
    with pytest.raises(errors.FormatError, match=gone):
        resolve(snapshot)


@pytest.mark.parametrize(
    "raw",
    [
        "", "[]", "null", "{}", '{"weight_map":null}', '{"weight_map":[]}', '{"weight_map":{}}',
        '{"weight_map":{"a":1}}',
        '{"weight_map":{"a":null}}', '{"weight_map":{"a":["m"]}}', '{"weight_map":{"a":{}}}', "{", "NaN",
        '{"weight_map":{"a":"m","a":"n"}}', '{"weight_map":{"a":"m"},"weight_map":{"a":"m"}}',
        '{"weight_map":{"a":"m"},"metadata":[]}', '{"weight_map":{"a":"m"},"metadata":{"k":1,"k":2}}',
        '{"weight_map":{"a":{"b":1,"b":2}}}', '{"weight_map":{"\\ud800":"m"}}',
        '{"weight_map":{"a":"\\udc80"}}',
        "[" * 200_000, '{"weight_map":{"a":"m"},"x":' + "9" * 5000 + "}]", '{"weight_map":{"a":"m"},"x":NaN}',
    ],
)  # fmt: skip
def test_an_index_that_is_none(raw: str) -> None:
    refused(raw)


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf{}", b"\xff", b'{"weight_map":{"\xff":"m"}}', b"\0" * 9])
def test_an_index_that_is_no_text(raw: bytes) -> None:
    refused(raw)


def test_metadata_of_an_index_may_be_anything() -> None:
    found = parse_index(b'{"weight_map":{"a":"m"},"metadata":{"total_size":1e9,"x":[1]},"more":0}', path="i")
    assert found == Index("i", {"a": "m"}, {"total_size": 1e9, "x": [1]})
    assert parse_index(b'{"weight_map":{"a":"m"},"metadata":null}', path="i").metadata == {}


def test_an_index_over_the_limit(model: Path) -> None:
    with pytest.raises(errors.FormatError, match="limit of 20"):
        read_index(model / INDEX_NAME, limit=20)


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        resolve(tmp_path)
    shard(tmp_path / "b.safetensors", "b")
    shard(tmp_path / "a.safetensors", "a")
    (tmp_path / ".part.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "dir.safetensors").mkdir()
    assert [os.path.basename(s.path) for s in resolve(tmp_path).shards] == ["a.safetensors", "b.safetensors"]


def test_one_file_and_several(model: Path) -> None:
    one = model / "m1.safetensors"
    assert resolve(one) == ModelFiles((Shard(str(one), str(one)),))
    several = [model / "m2.safetensors", one]
    assert [s.path for s in resolve(several).shards] == [str(p) for p in several]  # the caller's order
    assert several == [model / "m2.safetensors", one]
    assert len(resolve(iter(several)).shards) == 2


def test_paths_that_cannot_be_a_model(model: Path) -> None:
    one = model / "m1.safetensors"
    with pytest.raises(FileNotFoundError):
        resolve(model / "absent")
    with pytest.raises(FileNotFoundError):
        resolve([one, model / "absent"])
    with pytest.raises(IsADirectoryError):
        resolve([one, model])
    os.link(one, model / "again.safetensors")
    with pytest.raises(errors.ArgumentError, match="the same file"):
        resolve([one, model / "again.safetensors"])
    with pytest.raises(errors.ArgumentError, match="no path"):
        resolve([])
    with pytest.raises(errors.ArgumentError, match="NUL"):
        resolve("a\0b")


def test_no_permission_is_a_named_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(errors.FilePermissionError, match=INDEX_NAME):
            resolve(model)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", denied)
        with pytest.raises(errors.FilePermissionError, match="list the folder"):
            resolve(model)


def test_no_descriptor_leaks_in_1000_failing_tries(model: Path) -> None:
    index(model, {"a": "../m1.safetensors"})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        with pytest.raises(errors.FormatError):
            resolve(model)
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_are_escaped_in_messages(model: Path) -> None:
    index(model, {"a\x1b[0m": "m\x1b[1m.safetensors"})
    with pytest.raises(errors.FormatError) as caught:
        resolve(model)
    assert "\x1b" not in str(caught.value)


def test_the_index_and_the_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_NAME)
    with pytest.raises(errors.FileError, match="is a pipe"):
        resolve(tmp_path)
