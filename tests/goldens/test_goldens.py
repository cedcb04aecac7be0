"""Some 400 requests do what they did when they were recorded: the same bytes the same way, by the same calls and copies.

A change that is meant is recorded anew with `make goldens`, and its diff is part of the change.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from capabilities import need

RECORDER = Path(__file__).with_name("recorder.py")
SHOWN = 5


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_recorder", RECORDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"  {name}: {wanted[name]}\n    now: {found[name]}" for name in wanted if wanted[name] != found[name]
    ]


@pytest.mark.timeout(300)
def test_requests_do_what_they_did(recorder: ModuleType, tmp_path: Path) -> None:
    need("o_direct", "cachestat", "io_uring")
    wanted = [json.loads(line) for line in recorder.GOLDENS.read_text().splitlines()]
    found = json.loads(json.dumps(recorder.record_all(tmp_path)))
    assert [w["request"] for w in wanted] == [f["request"] for f in found], "other requests: make goldens"
    wrong = [(f["request"], differences(w, f)) for w, f in zip(wanted, found, strict=True) if w != f]
    text = "\n".join(f"{request}\n" + "\n".join(lines) for request, lines in wrong[:SHOWN])
    assert not wrong, f"{len(wrong)} of {len(wanted)} requests do something else:\n{text}"


def test_the_requests_reach_every_device_call_and_state(recorder: ModuleType) -> None:
    made = recorder.requests()
    assert len(made) == recorder.COUNT
    assert made == recorder.requests(), "the same ones each time"
    for name, values in {
        "device": {"cpu", "sim", "hip"},
        "op": {"read", "write"},
        "call": {"sync", "stream", "batch"},
        "pages": {"cold", "warm", "half"},
    }.items():
        assert {r[name] for r in made} == values
