"""Issue 20, kind 15: a file that is something else than its name says is named by its first bytes, with what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nobounce
from nobounce import config, errors
from nobounce.cli.main import app

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4976698672\n"


def _zip(name: str) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr(name, b"x" * 2000)
    return raw.getvalue()


def _tar() -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        info = tarfile.TarInfo("model.safetensors")
        info.size = 100
        archive.addfile(info, io.BytesIO(bytes(100)))
    return raw.getvalue()


WHOLE = b'{"a":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'
SAFE = len(WHOLE).to_bytes(8, "little") + WHOLE + bytes(4096)

FILES: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "a Git LFS pointer": (lambda: LFS, ("Git LFS pointer", "4,976,698,672 bytes", "git lfs pull")),
    "a web page": (lambda: b"\n <!DOCTYPE html><html><body>Log in</body></html>", ("web page", "download")),
    "an error of a store": (
        lambda: b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        ("error", "download"),
    ),
    "an error as JSON": (lambda: b'{"error":"Repository not found"}', ("JSON", "download")),
    "an error as text": (lambda: b"Entry not found", ("'Entry not found'", "download")),
    "a zip archive": (lambda: _zip("model.safetensors"), ("zip archive", "unpack")),
    "a pickle": (
        lambda: pickle.dumps({"a": [1] * 1000}, protocol=2),
        ("pickle", "torch.save(torch.load(OLD"),
    ),
    "a newer pickle": (
        lambda: pickle.dumps({"a": list(range(1000))}, protocol=4),
        ("pickle", "torch.save(torch.load(OLD"),
    ),
    "gzip": (lambda: gzip.compress(SAFE * 300, mtime=0), ("gzip", "unpack")),
    "bzip2": (lambda: bz2.compress(SAFE), ("bzip2", "unpack")),
    "xz": (lambda: lzma.compress(SAFE), ("xz", "unpack")),
    "tar": (_tar, ("tar archive", "unpack")),
    "a 7z archive": (lambda: b"7z\xbc\xaf\x27\x1c\0\4" + bytes(100), ("7z archive", "unpack")),
    "Parquet": (lambda: b"PAR1\x15\4\x15\x20" + bytes(100), ("Parquet", "safetensors")),
    "TensorFlow Lite": (lambda: b"\x1c\0\0\0TFL3" + bytes(100), ("TensorFlow Lite", "safetensors")),
    "text as UTF-16": (lambda: "Not found".encode("utf-16"), ("UTF-16", "download")),
    "nothing": (lambda: b"", ("empty", "download")),
    "zeros": (lambda: bytes(1 << 16), ("zeros", "unfinished download")),
    "a download cut in its header": (lambda: SAFE[:40], ("truncated", "download")),
    "a download cut in its data": (lambda: SAFE[:-1000], ("truncated: missing 1000 bytes", "download")),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_first_bytes_name_it(kind: str, tmp_path: Path) -> None:
    make, words = FILES[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(make())
    with pytest.raises(errors.FormatError) as caught:
        nobounce.load(path, device="cpu")
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert caught.value.filename == str(path)
    assert len(message) < len(str(path)) + 300
    for verb in ("load", "inspect", "explain"):
        config.override(None)
        done = CliRunner().invoke(app, [verb, str(path)])
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"nobounce {verb}: {message}\n"


def test_a_file_that_claims_to_be_empty_and_is_not() -> None:
    with pytest.raises(errors.FormatError, match="says that it has 0 bytes and holds more"):
        nobounce.load("/proc/cpuinfo", device="cpu")


def test_an_index_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for raw, word in ((LFS, "Git LFS pointer"), (b"", "empty"), (b"<html>", "web page")):
        path.write_bytes(raw)
        with pytest.raises(errors.FormatError, match=word):
            nobounce.load(tmp_path, device="cpu")


def test_bytes_that_tell_nothing_are_described_as_before(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xf0\x9f\x92\xa9\1\2\3\4" + bytes(range(200)))
    with pytest.raises(errors.FormatError, match="header too large: its declared length"):
        nobounce.load(path, device="cpu")


def test_a_right_file_is_never_taken_for_another(tmp_path: Path) -> None:
    """A header's length may spell any signature; what counts is that the header is there."""
    for start in (b"BZh", b"\x1f\x8b\x08", b"\x80\x02"):
        text = WHOLE + b" " * (int.from_bytes(start.ljust(8, b"\0"), "little") - len(WHOLE))
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4096))
        assert path.read_bytes().startswith(start)
        assert list(nobounce.load(path, device="cpu")) == ["a"]
