"""Headers made to cost more than they are: memory is bounded by the header's length, and so is time; messages stay short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pace import TURNS, USUAL_SECONDS, turns
from scale import cases

BOMBS = {
    "entries": """tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "dimensions": """tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[1,1,1,1,1,1,1,1],"data_offsets":[{i},{i + 1}]}}')""",
    "another spelling": """tile(lambda i: f'\\n"{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "wide characters": """tile(lambda i: f'"{i:x}\U0001f600":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "escapes": """tile(lambda i: f'"\\\\n{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "extra fields": """tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}],"x":1}}')""",
    "distinct extra fields": """tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}],"x{i}":1}}')""",
    "escaped fields": """tile(lambda i: f'"{i:x}":{{"dtyp\\\\u0065":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "escaped pairs": """tile(lambda i: f'"{i:x}\\\\ud83d\\\\ude00":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "keys in another order": """tile(lambda i: f'"{i:x}":{{"shape":[],"data_offsets":[{i},{i + 1}],"dtype":"U8"}}')""",
    "white space everywhere": """tile(lambda i: f' "{i:x}" : {{ "dtype" : "U8" , "shape" : [ ] , "data_offsets" : [ {i} , {i + 1} ] }}')""",
    "distinct shapes": """tile(lambda i: f'"{i:x}":{{"shape":[0,{i}],"dtype":"U8","data_offsets":[0,0]}}')[0], 0""",
    "long shapes": """tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[{",".join(["1"] * 100)}],"data_offsets":[{i},{i + 1}]}}')""",
    "an odd last entry": """(lambda t: (t[0][:-2] + ',"x":[]}}', t[1]))(tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}'))""",
    "overlaps": """tile(lambda i: f'"{i:x}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')""",
    "repeats": """tile(lambda i: f'"a":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')""",
    "lists": """'{"a":[' + "[]," * (N // 3) + "[]]}", 0""",
    "objects": """'{"a":[' + "{}," * (N // 3) + "{}]}", 0""",
    "empty entries": """tile(lambda i: f'"{i:x}":{{}}')""",
    "a long shape": """'{"a":{"dtype":"U8","shape":[' + "0," * (N // 2) + '0],"data_offsets":[0,0]}}', 0""",
    "a long name": """'{"' + "x" * N + '":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}', 2""",
    "a wide name": """'{"' + "x" * N + '\U0001f600":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}}', 2""",
    "metadata keys": """'{"__metadata__":' + tile(lambda i: f'"{i:x}":""')[0] + "}", 0""",
    "metadata lists": """'{"__metadata__":{"a":[' + "[]," * (N // 3) + "[]]}}", 0""",
    "a long metadata value": """'{"__metadata__":{"a":"' + "x" * N + '"}}', 0""",
    "a wide metadata value": """'{"__metadata__":{"a":"' + "x" * N + '\U0001f600"}}', 0""",
    "depth": """'{"a":' + "[" * N, 0""",
    "digits": """'{"a":' + "9" * N + "}", 0""",
    "white space": """"{" + " " * N + "}", 0""",
}
"""Text and bytes of data, by the name of what there is too much of."""

CODE = """
import ctypes, json, os, sys, time
import numpy
from nobounce import errors
from nobounce.formats.header import read_header_of
N, path = int(sys.argv[1]), sys.argv[2]

def tile(entry):
    parts, size = [], 0
    while size < N - 200:
        parts.append(entry(len(parts)))
        size += len(parts[-1].encode()) + 1
    return "{" + ",".join(parts) + "}", len(parts)

if not os.fork():  # the maker's memory is not the reader's
    text, data = eval(sys.argv[3])
    raw = text.encode()
    with open(path, "wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + data)
    print(len(raw), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
before, begin = peak(), time.process_time()
try:
    read_header_of(path)
    said = ""
except errors.FormatError as e:
    said = str(e).removeprefix(path)
print(json.dumps([peak() - before, time.process_time() - begin, said]))
"""


def cost(nbytes: int, bomb: str, path: Path) -> tuple[float, float, str]:
    """(peak memory in header sizes, CPU seconds, the error without the path) of reading one header in a process of its own."""
    command = [sys.executable, "-c", CODE, str(nbytes), str(path), BOMBS[bomb]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    size, told = done.stdout.split("\n", 1)
    peak, seconds, said = json.loads(told)
    path.unlink()
    return peak / int(size), seconds, said


def many(usual: list[str]) -> list[Any]:
    return [pytest.param(b, id=b) for b in BOMBS if b in usual or cases(1, 0)]


@pytest.mark.parametrize(
    "bomb", many(["entries", "another spelling", "lists", "distinct extra fields", "a wide metadata value"])
)
def test_10_MB_cost_at_most_5_times_their_size(bomb: str, tmp_path: Path) -> None:
    times, seconds, said = cost(10_000_000, bomb, tmp_path / "m.safetensors")
    assert times < 5
    assert seconds < 5
    assert len(said) < 500


@pytest.mark.parametrize("bomb", many(["entries"]))
def test_100_MB_cost_at_most_3_times_their_size_and_5_s(bomb: str, tmp_path: Path) -> None:
    slowness = []
    for _ in range(3):
        slowness.append(turns() / USUAL_SECONDS)
        times, seconds, said = cost(99_900_000, bomb, tmp_path / "m.safetensors")
        slowness.append(turns() / USUAL_SECONDS)
        if seconds < 5 * max(1.0, min(slowness)):
            break
    assert times < 3
    assert len(said) < 500
    assert seconds < 5 * max(1.0, min(slowness)), (seconds, slowness, TURNS)
