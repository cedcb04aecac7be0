"""Arrays of NumPy, alone and in archives: what numpy.load reads, bit for bit, and bad files named."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_files as made
import nobounce
from capabilities import need
from nobounce.errors import FormatError
from nobounce.formats.reader import InMemory, read_model

KINDS = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]


def some(kind: str, shape: tuple[int, ...], order: str = "<") -> Any:
    """An array of random bits, NaN payloads among them."""
    dtype = np.dtype(kind).newbyteorder(order)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(count).integers(0, 2 if kind == "?" else 256, count, np.uint8)
    return raw.view(dtype).reshape(shape)


def arrays() -> dict[str, Any]:
    """Every kind in either byte order, C and Fortran order, empty arrays and scalars."""
    found = {f"{k}{o}": some(k, (3, 5), o) for k in KINDS for o in "<>"}
    found |= {
        f"F {k}{o}": np.asfortranarray(some(k, (3, 1, 5), o)) for k in ("u1", "f4", "c16") for o in "<>"
    }
    return found | {
        "scalar": some("f8", ()),
        "none": some("f4", (0, 3)),
        "F none": np.empty((2, 0, 3), order="F"),
    }


def same(mine: Any, theirs: Any, framework: Any) -> None:
    if framework == "torch":
        assert mine.stride() == tuple(s // theirs.itemsize for s in theirs.strides) or not theirs.size
        mine = mine.cpu().numpy()
    elif framework == "numpy":
        assert mine.strides == theirs.strides or not theirs.size
    else:
        mine = mine.numpy()
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype.newbyteorder("=")
    assert mine.tobytes() == theirs.astype(theirs.dtype.newbyteorder("=")).tobytes()


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
def test_every_kind_is_what_numpy_reads(tmp_path: Path, device: str, framework: Any) -> None:
    need("torch")
    np.savez(tmp_path / "all.npz", **arrays())
    with np.load(tmp_path / "all.npz") as theirs:
        model = nobounce.load(tmp_path / "all.npz", device=device, framework=framework)
        assert list(model) == theirs.files
        for name, mine in model.items():
            same(mine, theirs[name], framework)
    for number, array in enumerate(arrays().values()):
        path = tmp_path / f"array.{number}.npy"
        np.save(path, array)
        model = nobounce.load(path, device=device, framework=framework)
        assert list(model) == [f"array.{number}"]
        same(model[f"array.{number}"], np.load(path), framework)


@pytest.mark.parametrize("align", [None, 4096])
def test_arrays_at_odd_places_are_moved(tmp_path: Path, align: int | None) -> None:
    given = {f"{'n' * n}{n}": some("f8", (n, 7)) for n in range(1, 20)}
    np.savez(tmp_path / "m.npz", **given)
    model = nobounce.load(tmp_path / "m.npz", device="cpu", align=align)
    for name, array in given.items():
        assert model[name].tobytes() == array.tobytes()
        assert model[name].address % (align or 8) == 0


def test_several_files_are_one_model(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.arange(4))
    assert list(nobounce.load([tmp_path / "a.npy", tmp_path / "b.npy"], device="cpu")) == ["a", "b"]


def test_members_that_are_no_arrays_are_ignored_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(made.zip_file([("a.npy", made.npy_file()), ("notes.txt", b"x")]))
    model = nobounce.load(path, device="cpu")
    assert list(model) == ["a"]
    assert model.warnings == ("members that are no arrays are ignored: notes.txt",)


def test_an_archive_of_nothing_is_an_empty_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz")
    assert dict(nobounce.load(tmp_path / "m.npz", device="cpu")) == {}


def saved(array: Any) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array, allow_pickle=True)
    return raw.getvalue()


def packed(method: int) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        archive.writestr("a.npy", made.npy_file())
    return raw.getvalue()


def directory(raw: bytes, at: int, new: bytes) -> bytes:
    """An archive of one member with bytes of its entry in the directory replaced."""
    start = raw.rfind(b"PK\1\2") + at
    return raw[:start] + new + raw[start + len(new) :]


ONE = made.zip_file([("a.npy", made.npy_file())])
BAD: dict[str, tuple[str, bytes, str]] = {
    "objects": ("npy", saved(np.array([{}], object)), "Python objects, which only unpickling"),
    "text": ("npy", saved(np.array(["a"])), "text: save arrays of numbers"),
    "bytes": ("npy", saved(np.array([b"a"])), "text: save arrays of numbers"),
    "dates": ("npy", saved(np.array(["2026-01-01"], "M8[D]")), "dates: save"),
    "fields": ("npy", saved(np.zeros(2, [("x", "f4")])), "structured dtype"),
    "records": ("npy", saved(np.zeros(2, "V2")), "raw records without a type"),
    "a long double": ("npy", saved(np.zeros(2, np.longdouble)), "is not read: save array.astype"),
    "version 9": ("npy", made.npy_file(version=9), "version 9.0"),
    "two arrays": ("npy", made.npy_file() * 2, "numpy.save was called more than once"),
    "cut in its data": ("npy", made.npy_file()[:-1], "truncated: its data ends at"),
    "cut in its header": ("npy", made.npy_file()[:20], "ends inside the header"),
    "a header over the limit": (
        "npy",
        b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 31),
        "over the limit of 65536",
    ),
    "code in the header": (
        "npy",
        made.npy_file(text="{'descr': __import__('os').system('x')}"),
        "numpy does not write",
    ),
    "a key twice": ("npy", made.npy_file(text="{'descr': '<f4', 'descr': '<f4'}"), "key 'descr' twice"),
    "a key too many": (
        "npy",
        made.npy_file(text="{'descr':'<f4','fortran_order':False,'shape':(2,),'x':True}"),
        "has the keys",
    ),
    "no dictionary": ("npy", made.npy_file(text="[]"), "not the dictionary"),
    "more than a dictionary": (
        "npy",
        made.npy_file(text="{'descr':'<f4','fortran_order':False,'shape':(2,)}+1"),
        "goes on behind",
    ),
    "a negative dimension": ("npy", made.npy_file(shape="(-1,)"), "shape that is no tuple"),
    "a number as shape": ("npy", made.npy_file(shape="(2)"), "shape that is no tuple"),
    "a size over 64 bits": ("npy", made.npy_file(shape=f"({1 << 62}, {1 << 62}, 0)"), "overflows 64 bits"),
    "65 dimensions": ("npy", made.npy_file(shape="(" + "1," * 65 + ")"), "up to 64"),
    "compressed": ("npz", packed(zipfile.ZIP_DEFLATED), r"is compressed \(deflate\).*numpy.savez\(NEW"),
    "no directory": ("npz", ONE[:-30], "directory at the end of the zip archive is missing"),
    "bytes in front": ("npz", ONE[:50] + b"x" + ONE[50:], "bytes were put in front"),
    "a member twice": (
        "npz",
        made.zip_file([("a.npy", made.npy_file())] * 2),
        "'a.npy': is in the archive twice",
    ),
    "encrypted": ("npz", directory(ONE, 8, b"\1"), "encrypted"),
    "another name in front of the bytes": (
        "npz",
        directory(ONE, 46, b"b"),
        "something else than the directory",
    ),
    "a member beyond the file": (
        "npz",
        directory(ONE, 42, b"\xf0\xff\xff\x7f"),
        "reaches into the directory",
    ),
    "two sizes": ("npz", directory(ONE, 24, b"\1"), "is stored, but"),
    "an array smaller than its member": (
        "npz",
        made.zip_file([("a.npy", made.npy_file() + b"x")]),
        "does not fill its member",
    ),
    "an array larger than its member": (
        "npz",
        made.zip_file([("a.npy", made.npy_file()[:-1])]),
        "does not fill",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(kind: str, tmp_path: Path, fd_guard: None) -> None:
    suffix, raw, word = BAD[kind]
    path = tmp_path / f"bad.{suffix}"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=word) as caught:
        nobounce.load(path, device="cpu")
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("name", ["npy", "npz"])
def test_a_file_cut_anywhere_is_refused(name: str) -> None:
    raw = made.npy_file() if name == "npy" else ONE
    for nbytes in range(8, len(raw)):
        with pytest.raises(FormatError):
            read_model(InMemory(raw[:nbytes]), path="m", file_nbytes=nbytes)


def test_a_large_archive_has_sizes_of_64_bits(tmp_path: Path) -> None:
    """A zip64 directory, as numpy writes it for members over 4 GiB: here the fields are there without need."""
    raw = made.npy_file()
    entry = ONE.rfind(b"PK\1\2")
    local = ONE[:entry]
    fields = struct.pack("<2H3Q", 1, 24, len(raw), len(raw), 0)
    full = b"\xff" * 4
    head = ONE[entry : entry + 46]
    head = head[:20] + full + full + head[28:30] + struct.pack("<H", len(fields)) + head[32:42] + full
    listed = head + b"a.npy" + fields
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(listed), len(local))
    where = struct.pack("<4sIQI", b"PK\6\7", 0, len(local) + len(listed), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path = tmp_path / "m.npz"
    path.write_bytes(local + listed + end64 + where + end)
    with np.load(path) as theirs:
        assert theirs["a"].tobytes() == bytes(8)
    assert nobounce.load(path, device="cpu")["a"].tobytes() == bytes(8)
