"""What holds of the readers of every format alike."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import model_files as made
import nobounce
from capabilities import need
from fuzz import fuzz_formats
from nobounce.cli.main import app
from nobounce.errors import FileError, FormatError
from nobounce.formats.reader import FORMATS, InMemory, format_of, read_model
from scale import cases

FLOATS = bytes(range(8))
KEPT = made.storage("Float", "0", 2)
FILES = {
    "gguf": made.gguf_file({"general.name": ("str", "n")}, [("w", [2], 0, FLOATS)]),
    "npy": made.npy_file(data=FLOATS),
    "npz": made.zip_file([("w.npy", made.npy_file(data=FLOATS))]),
    "pt": made.checkpoint({"w": made.tensor(KEPT), "epoch": 3}, {"0": FLOATS}),
}
NAMES = {"gguf": "GGUF", "npy": "npy", "npz": "npz", "pt": "PyTorch checkpoint"}


@pytest.fixture(params=FILES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"w.{request.param}"
    path.write_bytes(FILES[request.param])
    return path


def test_the_file_and_not_its_name_tells_the_format(model: Path) -> None:
    other = model.with_name("w.safetensors")
    other.write_bytes(model.read_bytes())
    assert nobounce.load(other, device="cpu")["w"].tobytes() == FLOATS


def test_a_safetensors_header_as_long_as_a_signature_spells_is_one() -> None:
    head = b"PK\3\4\0\0\0\0" + b'{"__metadata__":{"archive/data.pkl":""}'
    assert format_of(head) is None
    assert format_of(b"GGUF\3\0\0\0{" + bytes(503)) is FORMATS[0]


@pytest.mark.parametrize("verb", ["inspect", "explain", "check", "load"])
def test_every_verb_knows_it(model: Path, verb: str) -> None:
    where = ["--device", "cpu"] if verb != "inspect" else []
    done = CliRunner().invoke(app, [verb, str(model), *where])
    assert done.exit_code in ((0, 1) if verb == "check" else (0,)), done.output
    said = json.loads(CliRunner().invoke(app, [verb, str(model), *where, "--json"]).stdout)
    if verb == "inspect":
        assert f"{NAMES[model.suffix[1:]]}, {model.stat().st_size:,} bytes" in done.stdout
        (file,), (tensor,) = said["files"], said["tensors"]
        assert file["format"] == NAMES[model.suffix[1:]]
        assert (tensor["name"], tensor["dtype"], tensor["shape"], tensor["nbytes"]) == ("w", "F32", [2], 8)
        assert model.read_bytes()[tensor["offset"] :][:8] == FLOATS
    elif verb == "explain":
        assert "1 tensor, 8 bytes of data" in done.stdout
    elif verb == "load":
        assert "1 tensor" in done.stdout


def test_inspect_shows_encodings_and_strides(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(made.gguf_file({}, [("q", [64, 2], 8, bytes(136))]))
    done = CliRunner().invoke(app, ["inspect", str(path)])
    assert next(w for w in done.stdout.splitlines() if w.startswith("q ")).split()[:4] == [
        "q",
        "Q8_0",
        "2x64",
        "136",
    ]
    (tensor,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)["tensors"]
    encoding = {"name": "Q8_0", "shape": [2, 64], "block": 32, "block_nbytes": 34, "byteorder": "little"}
    assert (tensor["dtype"], tensor["shape"], tensor["encoding"]) == ("U8", [2, 68], encoding)
    path.write_bytes(made.npy_file(shape="(2, 3)", data=bytes(24), fortran="True"))
    assert "F32 (strided)" in CliRunner().invoke(app, ["inspect", str(path)]).stdout
    (tensor,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)["tensors"]
    assert (tensor["strides"], tensor["nbytes"]) == ([1, 2], 24)


def test_a_file_of_no_known_format_is_explained_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(made.zip_file([("notes.txt", b"x" * 100)]))
    done = CliRunner().invoke(app, ["explain", str(path), "--device", "cpu"])
    assert (done.exit_code, f"{path.stat().st_size:,} bytes" in done.stdout) == (0, True)


class Odd(InMemory):
    """Gives few bytes at a time, or an error; knows what was asked for."""

    def __init__(self, data: bytes, most: int = 3, fail_at: int | None = None) -> None:
        super().__init__(data)
        self.most, self.fail_at, self.furthest = most, fail_at, 0

    def pread(self, nbytes: int, offset: int, /) -> bytes:
        if self.fail_at is not None and self.fail_at <= offset:
            raise OSError(errno.EIO, "")
        found = super().pread(min(nbytes, self.most), offset)
        self.furthest = max(self.furthest, offset + len(found))
        return found


@pytest.mark.parametrize("kind", FILES)
def test_C4_short_reads_are_gone_on_with(kind: str) -> None:
    raw = FILES[kind]
    # The first look is one read: as many bytes as a signature needs.
    whole = read_model(InMemory(raw), path="m", file_nbytes=len(raw))
    short = read_model(Odd(raw, most=512), path="m", file_nbytes=len(raw))
    assert short == whole
    found = FORMATS[[f.name for f in FORMATS].index(NAMES[kind])].read(Odd(raw), "m", len(raw))
    assert found == whole


@pytest.mark.parametrize("kind", FILES)
def test_a_failing_read_is_a_named_error(kind: str) -> None:
    raw = FILES[kind]
    for at in (0, 20):
        source = Odd(raw, most=16, fail_at=at)
        with pytest.raises(FileError) as caught:
            FORMATS[[f.name for f in FORMATS].index(NAMES[kind])].read(source, "m", len(raw))
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, "m")


@pytest.mark.parametrize("kind", FILES)
def test_data_is_not_read_with_the_header(kind: str) -> None:
    data = bytes(8 << 20)
    big = {
        "gguf": lambda: made.gguf_file({}, [("w", [1 << 21], 0, data)]),
        "npy": lambda: made.npy_file(shape=f"({1 << 21},)", data=data),
        "npz": lambda: made.zip_file([("w.npy", made.npy_file(shape=f"({1 << 21},)", data=data))]),
        "pt": lambda: made.checkpoint({"w": made.tensor(made.storage("Float", "0", 1 << 21), 0, (1 << 21,))}, {"0": data}),
    }[kind]()  # fmt: skip

    class Counting(InMemory):
        count = 0

        def pread(self, nbytes: int, offset: int, /) -> bytes:
            found = super().pread(nbytes, offset)
            self.count += len(found)
            return found

    source = Counting(big)
    header = read_model(source, path="m", file_nbytes=len(big))
    assert header.tensors[next(iter(header.tensors))].nbytes == len(data)
    assert source.count < 300_000


@pytest.mark.parametrize("start", [b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", b"\x93NUMPY\1\0", b"PK\3\4", b"PK\5\6"])
@given(st.binary(max_size=600))
def test_any_bytes_behind_a_signature_are_judged(start: bytes, rest: bytes) -> None:
    assert fuzz_formats.judge(start + rest) is None


@pytest.mark.parametrize("kind", fuzz_formats.MAKERS)
@given(st.integers(0, 1 << 40), st.data())
def test_any_byte_of_a_right_file_may_be_any_other(kind: str, seed: int, data: st.DataObject) -> None:
    raw = bytearray(fuzz_formats.MAKERS[kind](random.Random(seed)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert fuzz_formats.judge(bytes(raw)) is None


@settings(max_examples=cases(2000, 30))
@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4),
    st.sampled_from(["Float", "Half", "Byte"]),
    st.sampled_from(["little", "big"]),
)
def test_views_are_what_torch_makes_of_them(
    tmp_path_factory: pytest.TempPathFactory,
    offset: int,
    dims: list[tuple[int, int]],
    kind: str,
    byteorder: str,
) -> None:
    need("torch")
    import torch

    shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    size = {"Float": 4, "Half": 2, "Byte": 1}[kind]
    kept = made.storage(kind, "0", 40)
    path = tmp_path_factory.getbasetemp() / "views.pt"
    path.write_bytes(
        made.checkpoint(
            {"w": made.tensor(kept, offset, shape, strides)},
            {"0": bytes(range(40 * size))},
            byteorder=byteorder,
        )
    )
    try:
        theirs: Any = torch.load(path, weights_only=True)["w"]
    except RuntimeError:
        with pytest.raises(FormatError):
            nobounce.load(path, device="cpu")
        return
    raw = theirs.numpy().tobytes()
    assert nobounce.load(path, device="cpu", framework="torch")["w"].numpy().tobytes() == raw
    if theirs.numel() <= 40:
        assert nobounce.load(path, device="cpu")["w"].tobytes() == raw


def test_a_name_of_a_file_with_control_characters_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "w\x1b[2J.npy"
    path.write_bytes(FILES["npy"][:-1])
    with pytest.raises(FormatError) as caught:
        nobounce.load(path, device="cpu")
    assert "\x1b" not in str(caught.value)
    assert os.path.basename(path) in str(caught.value.filename)
