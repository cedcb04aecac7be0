"""Every Python block of README.md and docs/*.md runs, one after the other, in a fresh folder with the files that they name."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "```python" in p.read_text())
BEFORE = """
import os, numpy, nobounce
module = {"lm_head.weight": numpy.zeros((16000, 2), numpy.float32)}
fd = os.open("data.bin", os.O_RDONLY)
def work():
    with nobounce.open("data.bin") as f, nobounce.Device("sim:0").allocate(4096) as buf:
        f.read(buf, require="fallback")
"""
"""What the reader has at hand; `work` stands where a page writes `...`."""


ROWS = {"lm_head.weight": [16000, 2]}


def model(path: Path, *names: str) -> None:
    header, at = {}, 0
    for name in names:
        shape = ROWS.get(name, [2])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * math.prod(shape)]}
        at += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_its_blocks_run(page: Path, tmp_path: Path) -> None:
    need("o_direct", "numpy")
    (tmp_path / "data.bin").write_bytes(os.urandom(2 << 20))
    model(tmp_path / "model.safetensors", "a", "b")
    (tmp_path / "model").mkdir()
    shards = {
        "one.safetensors": ("a", "layers.0.w"),
        "two.safetensors": ("model.layers.0.w", "lm_head.weight"),
    }
    for name, tensors in shards.items():
        model(tmp_path / "model" / name, *tensors)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    data = (tmp_path / "data.bin").read_bytes()
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    code = "\n".join([BEFORE, *(re.sub(r"^( *)\.\.\.$", r"\1work()", b, flags=re.M) for b in blocks)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert (tmp_path / "data.bin").read_bytes() == data, "examples write what was read"
