"""benchmarks/blocks.py: its quick mode runs every contestant that can run here and checks what they brought."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "blocks.py"


@pytest.mark.parametrize("state", ["cached", "cold"])
def test_quick_mode_races_everybody_and_writes_each_sample(tmp_path: Path, state: str) -> None:
    need("o_direct", "cachestat")
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--scattered", "--state", state]
    command += ["--file", str(tmp_path / "blocks.bin"), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["schema"], result["version"]) == ("nobounce.benchmarks.blocks", 1)
    assert {r["contestant"] for r in result["rows"]} == {"nobounce-auto", "nobounce-use", "numpy"}
    for row in result["rows"]:
        assert row["blocks_per_second"] == pytest.approx(row["count"] / sorted(row["seconds"])[0])
        assert f"{row['seconds'][0] * 1e3:.2f}" in done.stdout
    assert str(tmp_path) not in out.read_text()
