"""A size of 0 is no proof of emptiness: files of /proc claim it and hold something (dotnet/runtime#55358)."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nobounce.cli.main import app
from nobounce.facts.regular import true_size

KERNEL = "/proc/version"
"""Claims 0 bytes, and stays the same."""


def nobounce(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(w) for w in words])
    return done.exit_code, done.stderr


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_cp_copies_what_is_there(tmp_path: Path, device: str) -> None:
    (tmp_path / "dest").write_bytes(b"a good file")
    assert nobounce("cp", KERNEL, tmp_path / "dest", "--device", device) == (0, "")
    assert (tmp_path / "dest").read_bytes() == Path(KERNEL).read_bytes()


def test_cp_copies_a_file_of_sys_that_claims_a_page(tmp_path: Path) -> None:
    claims = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    assert claims.stat().st_size == 4096
    assert nobounce("cp", claims, tmp_path / "dest", "--device", "cpu") == (0, "")
    assert (tmp_path / "dest").read_bytes() == claims.read_bytes()


def test_cp_copies_an_empty_and_a_sparse_file(tmp_path: Path) -> None:
    for name, nbytes in (("empty", 0), ("sparse", 100_000)):
        with (tmp_path / name).open("wb") as f:
            f.truncate(nbytes)
        assert nobounce("cp", tmp_path / name, tmp_path / "dest", "--device", "cpu") == (0, "")
        assert (tmp_path / "dest").read_bytes() == bytes(nbytes)


def test_roundtrip_refuses_to_call_it_empty(tmp_path: Path) -> None:
    code, said = nobounce("roundtrip", KERNEL, tmp_path / "w", "--keep-input", "--device", "cpu")
    assert code == 2
    assert (
        said == f"nobounce roundtrip: {KERNEL} holds other than the 0 bytes that it claims: copy it first\n"
    )
    assert not (tmp_path / "w").exists()


def test_a_true_size_is_told_from_a_claimed_one(tmp_path: Path) -> None:
    with open(KERNEL, "rb") as f:
        assert true_size(f.fileno(), 0) is None
    (tmp_path / "f").write_bytes(b"12345")
    with (tmp_path / "f").open("rb") as f:
        assert true_size(f.fileno(), 5) == 5
