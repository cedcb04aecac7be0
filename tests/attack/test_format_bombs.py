"""Files of the other formats made to cost more than they are: memory and time stay within what docs/formats.md says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pace import USUAL_SECONDS, turns
from scale import cases

BOMBS = {
    "gguf keys": """made.gguf_file({f"{i:x}": ("u8", 1) for i in range(131072)})""",
    "gguf tensors": """made.gguf_file({}, [(f"{i:x}", [0], 8, b"") for i in range(262144)])""",
    "gguf strings": """made.gguf_file({"a": ("array", ("str", [""] * (N // 8)))})""",
    "gguf strings with zeros": """made.gguf_file({"a": ("array", ("str", [bytes(9)] * (N // 17)))})""",
    "gguf long strings": """made.gguf_file({f"{i:x}": ("str", "é" * 500000) for i in range(N // 1000000)})""",
    "gguf nested arrays": """made.gguf_file({"a": ("array", ("array", [("u8", [])] * (N // 12)))})""",
    "npz members": """made.zip_file([(f"{i:x}.npy", b"") for i in range(262144)])""",
    "npz arrays": """made.zip_file([(f"{i:x}.npy", made.npy_file(shape="(0,)", data=b"")) for i in range(100000)])""",
    "zip members": """made.zip_file([(f"a/data/{i:x}", b"") for i in range(500000)])""",
    "tensors": """made.checkpoint([made.tensor(made.storage("Byte", "0", 2))] * 100000, {"0": bytes(2)})""",
    "storages": """made.checkpoint([made.tensor(made.storage("Byte", str(i), 2)) for i in range(50000)], {str(i): bytes(2) for i in range(50000)})""",
    "long names": """made.checkpoint(b"\\x80\\x02}(" + b"".join(b"X\\1\\0\\0\\0" + bytes([65 + i]) + b"}(" for i in range(50)) + (b"X\\xff\\xff\\0\\0" + b"x" * 65535 + made.pickled(made.tensor(made.storage("Byte", "0", 2)))[2:-1]) + b"u" * 51 + b".", {"0": bytes(2)})""",
    **{
        f"pickle {op!r}": f"""made.checkpoint(b"\\x80\\x02" + {op!r} * (N // {len(op)}), {{}})"""
        for op in (b"]", b"}", b"(", b")", b"K\1", b"J\0\0\0\1", b"](K\1e", b"}K\1K\1s", b"N\x85", b"Nr\0\0\0\1", b"X\1\0\0\0x")
    },
}  # fmt: skip

CODE = """
import ctypes, json, os, sys, time
import numpy
sys.path.insert(0, sys.argv[4])
from nobounce import errors
from nobounce.formats import checkpoint, gguf, npz
from nobounce.formats.reader import Descriptor, read_model
N, path = int(sys.argv[1]), sys.argv[2]
if not os.fork():  # the maker's memory is not the reader's
    import model_files as made
    with open(path, "wb") as f:
        f.write(eval(sys.argv[3]))
    os._exit(0)
assert os.wait()[1] == 0
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
before, begin = peak(), time.process_time()
fd = os.open(path, os.O_RDONLY)
try:
    read_model(Descriptor(fd), path=path, file_nbytes=os.path.getsize(path))
    said = ""
except errors.FormatError as e:
    said = str(e).removeprefix(path)
print(json.dumps([peak() - before, time.process_time() - begin, said, os.path.getsize(path)]))
"""


USUAL = ("gguf keys", "gguf strings", "long names", "pickle b'}'")


@pytest.mark.parametrize("bomb", [b for b in BOMBS if b in USUAL or cases(1, 0)])
def test_memory_and_time_are_bounded(bomb: str, tmp_path: Path) -> None:
    nbytes = cases(80_000_000, 4_000_000)
    command = [
        sys.executable,
        "-c",
        CODE,
        str(nbytes),
        str(tmp_path / "m"),
        BOMBS[bomb],
        str(Path(__file__).parents[1]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    peak, seconds, said, size = json.loads(done.stdout)
    assert peak < max(560 << 20, 2 * size), (peak, said)
    assert seconds < 20 * max(1.0, turns() / USUAL_SECONDS), said
    assert len(said) < 1000
