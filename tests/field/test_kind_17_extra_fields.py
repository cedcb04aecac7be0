"""Issue 20, kind 17: safetensors ignores fields of a tensor that it does not know. So does every way of reading here, with a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from nobounce import errors
from nobounce.formats import columnscan, fastscan
from nobounce.formats.header import Header, parse_header

FIELDS: list[dict[str, Any]] = [
    {"stride": [1]},
    {"quantization": {"bits": 4, "bits2": None}, "note": "x"},
    {"a\n": -0.5},
]


def _text(extra: dict[str, Any], *, first: bool = False, spaced: bool = False, count: int = 3) -> str:
    tensors: dict[str, Any] = {}
    for i in range(count):
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
        more = extra if i == count - 1 else {}
        tensors[f"t{i}"] = {**more, **entry} if first else {**entry, **more}
    return json.dumps(tensors, separators=None if spaced else (",", ":"))


def _parse(text: str, data_nbytes: int) -> Header:
    raw = text.encode()
    return parse_header(raw, path="m", file_nbytes=8 + len(raw) + data_nbytes, data_offset=8 + len(raw))


@pytest.mark.parametrize("extra", FIELDS)
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("least", [0, 1 << 40])
def test_every_parser_ignores_them_with_one_warning(
    extra: dict[str, Any], spaced: bool, first: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnscan, "MIN_NBYTES", least)
    header = _parse(_text(extra, first=first, spaced=spaced), 24)
    plain = _parse(_text({}, spaced=spaced), 24)
    assert list(header.tensors.values()) == list(plain.tensors.values())
    assert len(header.warnings) == 1
    assert all(repr(field) in header.warnings[0] for field in extra)
    assert "'t2'" in header.warnings[0]


def test_the_fast_ways_leave_them_to_the_careful_one() -> None:
    text = _text({"stride": [1]}, count=4000)
    assert len(text) > columnscan.MIN_NBYTES
    assert fastscan.scan(text) is None
    assert columnscan.scan(text.encode(), 32_000) is None


def test_load_says_so_and_safetensors_agrees(tmp_path: Path) -> None:
    need("safetensors")
    from safetensors.numpy import load_file

    text = _text({"stride": [1]}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + np.arange(6, dtype=np.float32).tobytes())
    model = nobounce.load(path, device="cpu", framework="numpy")
    theirs = load_file(path)
    assert model.keys() == theirs.keys()
    assert all((model[name] == theirs[name]).all() for name in theirs)
    assert model.warnings == ("fields that are not known are ignored: 'stride' (tensor 't2')",)


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_an_extra_field_stands_for_none_that_is_missing(missing: str) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1}
    del entry[missing]
    with pytest.raises(errors.FormatError, match=f"the field {missing} is missing"):
        _parse(json.dumps({"a": entry}), 8)


def test_a_warning_stays_short() -> None:
    extra = {"f" * 1000 + str(i): i for i in range(50)}
    (warning,) = _parse(_text(extra), 24).warnings
    assert len(warning) < 2500
