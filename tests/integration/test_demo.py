"""The demo notices a byte that differs and a direct path not taken, and says why where there is none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need

SCRIPT = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The demo as a module, with a small model instead of the package's."""
    need("safetensors")
    from safetensors.numpy import save_file

    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    model = tmp_path / "model.safetensors"
    random = np.random.default_rng(1)
    save_file({f"layer.{i}": random.random((64, 1024 + i), dtype=np.float32) for i in range(12)}, model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "find_model", lambda: (str(model), "0"))
    yield module
    del sys.modules["demo"]


@pytest.mark.serial
def test_a_right_load_exits_0_within_100_columns(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    need("o_direct")
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert "fastpath" in out
    assert "All 12 tensors equal, bit for bit" in out
    assert max(map(len, out.splitlines())) <= 100
    for state in ("cold", "warm"):
        for loader in ("nobounce", "safetensors"):
            row = next(line for line in out.splitlines() if state in line and loader in line)
            assert len(row.split("│")[4].split()) == demo.RUNS


def test_a_differing_bit_exits_1(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = nobounce.load

    def wrong(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        if options.get("framework") == "numpy":
            model["layer.3"].view(np.uint8)[-1, -1] ^= 1
        return model

    monkeypatch.setattr(nobounce, "load", wrong)
    assert demo.main() == 1
    assert "FAILED: 1 of 12 tensors differ from what safetensors reads: layer.3" in capsys.readouterr().out


def test_a_direct_path_that_is_not_taken_exits_1(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("o_direct")
    load = nobounce.load

    def bouncing(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        segments = tuple(replace(s, backend="fallback") for s in model.receipt.segments)
        model.receipt = replace(model.receipt, segments=segments)
        return model

    monkeypatch.setattr(nobounce, "load", bouncing)
    assert demo.main() == 1
    assert "FAILED: the direct path was there" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["a byte", "a dtype", "a name"])
def test_every_kind_of_difference_is_named(demo: ModuleType, missing: str) -> None:
    ours = {"a": np.arange(4, dtype=np.int16), "b": np.zeros((), np.float32)}
    theirs = {name: array.copy() for name, array in ours.items()}
    assert demo.differing(ours, theirs) == []
    if missing == "a byte":
        theirs["a"][3] = 9
    elif missing == "a dtype":
        theirs["a"] = theirs["a"].view(np.uint16)
    else:
        theirs["c"] = theirs.pop("a")
    assert demo.differing(ours, theirs) == (["a", "c"] if missing == "a name" else ["a"])


@pytest.mark.serial
def test_without_a_direct_path_it_says_why_and_goes_on(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("mount")
    there = tmp_path / "memory"
    there.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(there)], check=True, timeout=60)
    try:
        (there / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
        monkeypatch.setattr(demo, "find_model", lambda: (str(there / "model.safetensors"), "0"))
        assert demo.main() == 0
        out = capsys.readouterr().out
        assert "No direct path here: " in out
        assert "tmpfs" in out
        assert "All 12 tensors equal" in out
        monkeypatch.chdir(tmp_path)
    finally:
        subprocess.run(["umount", str(there)], check=True, timeout=60)
