"""Long fuzzing of the header and index readers: python tests/fuzz/fuzz_header.py [SECONDS] [SEED].

Every input must end in a checked header or in FormatError, and nothing may be accepted that safetensors
refuses. A failure prints its input and the seed, and ends with exit code 1.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import sys
import time
from typing import Any

from nobounce import errors
from nobounce.dtypes import DTYPES
from nobounce.formats.header import Header, read_header
from nobounce.formats.index import parse_index

try:
    safetensors: Any = importlib.import_module("safetensors")
except ImportError:
    safetensors = None

TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\\u0061",
    b"\\ud800",
    b"-0",
    b"0",
    b"1e9",
    b"NaN",
    b"null",
    b"true",
]
TOKENS += [
    b" ",
    b"\n",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"9" * 20,
    b"9" * 5000,
    b"[" * 3000,
    b'"a":',
    b'"dtype":"F4"',
    b'"shape":',
]
TOKENS += [
    b'"__metadata__":',
    b'"data_offsets":[0,0]',
    b'"weight_map":',
    b'"../x"',
    b"18446744073709551615",
    b"4611686018427387904",
]


def model(rng: random.Random) -> tuple[bytes, int]:
    """The JSON of a valid header, in one of several spellings, and the bytes of its data section."""
    at, tensors = 0, {}
    for number in range(rng.choice([0, 1, 2, 3, 5, 30])):
        dtype = rng.choice(list(DTYPES.values()))
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))] + ([8] if dtype.packed else [])
        count = 1
        for dim in shape:
            count *= dim
        nbytes = count * dtype.bits // 8
        name = rng.choice(["t", "a.b", "é", "]},", '"', "", "__metadata", "\n"]) + str(number)
        tensors[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    order = list(tensors)
    if rng.random() < 0.3:
        rng.shuffle(order)
    header: dict[str, Any] = {"__metadata__": {"k": "v"}} if rng.random() < 0.4 else {}
    header.update((name, tensors[name]) for name in order)
    separators = rng.choice([(",", ":"), (", ", ": "), (",", ": ")])
    text = json.dumps(
        header, separators=separators, sort_keys=rng.random() < 0.2, ensure_ascii=rng.random() < 0.5
    ).encode()
    return text + b" " * rng.choice([0, 0, 3]), at


def damage(raw: bytes, rng: random.Random) -> bytes:
    """`raw` with a few random edits."""
    out = bytearray(raw)
    for _ in range(rng.choice([0, 1, 1, 2, 3, 8])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.choice([1, 2, 10])]
        elif kind == 2:
            out[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[other : other + rng.choice([1, 10, 80])]
        else:
            out[at : at + 1] = rng.choice(TOKENS)
    return bytes(out)


def check_sound(header: Header, raw: bytes) -> None:
    """What a transfer relies on, stated again in other words than the reader's."""
    at = 0
    for name, info in header.tensors.items():
        bits = info.dtype.bits
        for dim in info.shape:
            bits *= dim
        if name != info.name or info.start != at or bits != 8 * info.nbytes:
            raise AssertionError(f"unsound: {info}")
        at = info.end
    if header.data_offset + at != len(raw):
        raise AssertionError("the tensors do not fill the file")


def one(rng: random.Random) -> tuple[bytes, str | None]:
    """One input and what is wrong with its treatment, or None."""
    text, data_nbytes = model(rng)
    text = damage(text, rng)
    data_nbytes += rng.choice([0, 0, 0, 0, 1, -1])
    raw = len(text).to_bytes(8, "little") + text + bytes(max(0, data_nbytes))
    if rng.random() < 0.05:
        raw = damage(raw, rng)
    try:
        header = read_header(io.BytesIO(raw), path="fuzz", file_nbytes=len(raw), strict=rng.random() < 0.8)
        check_sound(header, raw)
        if safetensors is not None and not any("__metadata__" in w for w in header.warnings):
            theirs = {name: view["shape"] for name, view in safetensors.deserialize(raw)}
            if theirs != {name: list(info.shape) for name, info in header.tensors.items()}:
                return raw, "safetensors reads other tensors"
    except errors.FormatError as error:
        if error.filename != "fuzz":
            return raw, "the error does not name the file"
    except Exception as error:  # noqa: BLE001 - finding those is what this is for
        return raw, f"{type(error).__name__}: {error}"
    try:
        parse_index(
            damage(b'{"metadata":{"total_size":1},"weight_map":{"a":"m1","b":"s/m2"}}', rng), path="fuzz"
        )
    except errors.FormatError:
        pass
    except Exception as error:  # noqa: BLE001 - finding those is what this is for
        return raw, f"index: {type(error).__name__}: {error}"
    return raw, None


def main(arguments: list[str]) -> int:
    """Fuzz for the seconds asked (default 60); 1 if something was found."""
    seconds = float(arguments[0]) if arguments else 60.0
    seed = int(arguments[1]) if len(arguments) > 1 else int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        raw, wrong = one(rng)
        count += 1
        if wrong:
            print(f"seed {seed}, input {count}: {wrong}\n{raw!r}")
            return 1
    print(f"seed {seed}: {count} inputs in {seconds:g} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
