"""Nothing lost, 5: the clock of a receipt starts when the framework is there, so it does not contain `import torch`."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need

LOAD = """
import sys
import nobounce
path, framework = sys.argv[1:]
nobounce.subscribe(on_enter=lambda operation: print(framework in sys.modules))
print(nobounce.load(path, device="cpu", framework=framework).receipt.nbytes)
"""
NBYTES = 4 << 20


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_framework_is_imported_before_a_transfer_begins(tmp_path: Path, framework: str) -> None:
    need("numpy", "torch")
    header = json.dumps({"a": {"dtype": "U8", "shape": [NBYTES], "data_offsets": [0, NBYTES]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(NBYTES))
    command = [sys.executable, "-c", LOAD, str(path), framework]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "True"
