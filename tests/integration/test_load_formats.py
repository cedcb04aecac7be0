"""A load of every format goes the same ways, with the same evidence, as one of safetensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import model_files as made
import nobounce
from nobounce.errors import FileChangedError, RouteError
from pages import resident

NBYTES = 9 << 20
DATA = os.urandom(NBYTES)
KINDS = ["gguf", "npy", "npz", "pt"]


def write(path: Path) -> Path:
    """A file of one tensor "m", cold."""
    shape = f"({NBYTES},)"
    kept = made.storage("Byte", "0", NBYTES)
    raw = {
        ".gguf": lambda: made.gguf_file({}, [("m", [NBYTES // 34 * 32], 8, DATA[: NBYTES // 34 * 34])]),
        ".npy": lambda: made.npy_file("|u1", shape, DATA),
        ".npz": lambda: made.zip_file([("m.npy", made.npy_file("|u1", shape, DATA))]),
        ".pt": lambda: made.checkpoint({"m": made.tensor(kept, 0, (NBYTES,))}, {"0": DATA}),
    }[path.suffix]()
    with path.open("wb") as file:
        file.write(raw)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_cold_load_is_direct_proven_and_leaves_no_page(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"m.{kind}")
    assert resident(path) == 0
    model = nobounce.load(path, device="cpu", cache="avoid", require="fastpath")
    assert model["m"].tobytes() == DATA[: model["m"].nbytes]
    assert model.receipt.fallback_bytes == 0
    assert model.receipt.fastpath_bytes >= model["m"].nbytes
    assert model.receipt.requested <= model.receipt.nbytes
    assert model.receipt.evidence == "kernel"
    assert resident(path) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_load_comes_from_the_page_cache_by_choice(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"m.{kind}")
    path.read_bytes()
    receipt = nobounce.load(path, device="cpu").receipt
    assert receipt.cached_bytes == receipt.fallback_bytes == receipt.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_fastpath_is_refused_where_there_is_none(tmp_path: Path, kind: str) -> None:
    shm = Path("/dev/shm")
    path = write(shm / f"nobounce-test-{os.getpid()}.{kind}")
    try:
        with pytest.raises(RouteError):
            nobounce.load(path, device="cpu", require="fastpath")
    finally:
        path.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"m.{kind}")
    path.read_bytes()

    def shrink(backend: str, nbytes: int) -> None:
        os.truncate(path, 4096)

    with pytest.raises(FileChangedError, match="changed|ended"):
        nobounce.load(path, device="cpu", progress=shrink)
