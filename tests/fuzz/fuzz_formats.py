"""Long fuzzing of the readers of other formats than safetensors: python tests/fuzz/fuzz_formats.py [SECONDS] [SEED] [FORMAT ...].

Every input must end in a sound Header or in FormatError that names the file. A failure prints its input and the seed, and ends with
exit code 1.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import model_files as made
from nobounce import errors
from nobounce.formats.ggml import TYPES
from nobounce.formats.reader import InMemory, read_model
from nobounce.formats.tensorinfo import Header

Hurt = Callable[[bytes], bytes]

NUMBERS = [
    0,
    1,
    7,
    31,
    32,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
]
NAMES = ["t", "a.b", "é", "", "\n", "x" * 70]


def _gguf_value(rng: random.Random, depth: int = 0) -> made.GgufValue:
    kind = rng.choice(["u32", "i32", "f32", "bool", "str", "u64", "f64", "array", "u8", "i16"])
    if kind == "str":
        return kind, rng.choice(NAMES)
    if kind == "array":
        inner = rng.choice(["u32", "f32", "str", "bool"] + (["array"] if depth < 2 else []))
        count = rng.choice([0, 1, 3, 17, 700 if inner == "str" else 40]) if inner != "array" else 2
        items = [
            _gguf_value(rng, depth + 1)[1] if inner == "array" else _plain(inner, rng) for _ in range(count)
        ]
        if inner == "array":
            items = [("u8", [1, 2]), ("str", ["a"])][:count]
        return kind, (inner, items)
    return kind, _plain(kind, rng)


def _plain(kind: str, rng: random.Random) -> object:
    if kind == "str":
        return (
            rng.choice(["", "tok", "Ġthe", "\0\0\0\0\0\0\0\0\0", "y" * 300]) if rng.random() < 0.2 else "ab"
        )
    return {"bool": True, "f32": 0.5, "f64": 0.25, "u8": 200}.get(kind, 7)


def gguf(rng: random.Random, hurt: Hurt = bytes) -> bytes:
    """A right GGUF file."""
    order = rng.choice("<<<>")
    keys = {f"k{n}": _gguf_value(rng) for n in range(rng.choice([0, 1, 3, 8]))}
    if rng.random() < 0.1:
        keys |= {"split.no": ("u16", 0), "split.count": ("u16", 1), "split.tensors.count": ("i32", 1)}
    tensors = []
    for number in range(rng.choice([0, 1, 2, 5])):
        kind = rng.choice(list(TYPES))
        known = TYPES[kind]
        dims = [known.block * rng.randrange(3)] + [rng.randrange(4) for _ in range(rng.randrange(4))]
        count = 1
        for dim in dims:
            count *= dim
        tensors.append(
            (rng.choice(NAMES) + str(number), dims, kind, bytes(count // known.block * known.nbytes))
        )
    return made.gguf_file(
        keys, tensors, order=order, version=rng.choice([2, 3]), alignment=rng.choice([32, 32, 1, 8, 4096])
    )


def npy(rng: random.Random, hurt: Hurt = bytes) -> bytes:
    """A right .npy file."""
    kind, size = rng.choice([("f4", 4), ("i1", 1), ("u2", 2), ("f8", 8), ("c16", 16), ("b1", 1), ("c8", 8)])
    shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
    count = size
    for dim in shape:
        count *= dim
    text = "(" + "".join(f"{n}, " for n in shape) + ")"
    order, fortran = rng.choice("<>|="), rng.choice(["True", "False"])
    return made.npy_file(order + kind, text, bytes(count), fortran=fortran, version=rng.choice([1, 2, 3]))


def npz(rng: random.Random, hurt: Hurt = bytes) -> bytes:
    """A right .npz file."""
    members = [(f"{rng.choice(NAMES)}{n}.npy", hurt(npy(rng))) for n in range(1 + rng.randrange(4))]
    if rng.random() < 0.2:
        members.append(("notes.txt", b"x"))
    return made.zip_file(members)


def _nested(rng: random.Random, tensors: list[object], depth: int = 0) -> object:
    value = rng.choice([*tensors, 3, "text", None, 0.5, True])
    if depth > 2 or (depth and rng.random() < 0.5):
        return value
    if rng.random() < 0.3:
        return [_nested(rng, tensors, depth + 1) for _ in range(rng.randrange(4))]
    keys = [rng.choice(NAMES) + str(n) if rng.random() < 0.9 else n for n in range(rng.randrange(5))]
    return {key: _nested(rng, tensors, depth + 1) for key in keys}


def checkpoint(rng: random.Random, hurt: Hurt = bytes) -> bytes:
    """A right PyTorch checkpoint."""
    storages: dict[str, bytes] = {}
    tensors: list[object] = []
    for number in range(1 + rng.randrange(4)):
        kind, size = rng.choice(
            [("Float", 4), ("Half", 2), ("Byte", 1), ("ComplexDouble", 16), ("Bool", 1), ("Long", 8)]
        )
        count = rng.choice([0, 1, 6, 24])
        storages[str(number)] = bytes(count * size)
        kept = made.storage(kind, str(number), count, rng.choice(["cpu", "cuda:0"]))
        for _ in range(rng.randrange(3)):
            shape, strides, offset = rng.choice(
                [
                    ((count,), (1,), 0),
                    ((count // 2, 2), (2, 1), 0),
                    ((2, count // 2), (1, 2), 0),
                    ((3, 0), (1, 1), 0),
                ]
                + ([((), (), count - 1), ((5,), (0,), 0)] if count else [])
            )
            tensor = made.tensor(kept, offset, shape, strides)
            if rng.random() < 0.2:
                tensor = made.Call(
                    "torch._utils._rebuild_parameter", tensor, True, made.Call("collections.OrderedDict")
                )
            tensors.append(tensor)
    return made.checkpoint(
        hurt(made.pickled(_nested(rng, tensors))), storages, byteorder=rng.choice(["little", "little", "big"])
    )


MAKERS: dict[str, Callable[..., bytes]] = {
    "gguf": gguf,
    "npy": npy,
    "npz": npz,
    "checkpoint": checkpoint,
}
"""A maker of right files for each reader; `hurt` damages what lies inside an archive."""


def damage(raw: bytes, rng: random.Random) -> bytes:
    """`raw` with a few random edits: bytes, numbers of 1 to 8 bytes, pieces dropped, doubled and moved; or cut off."""
    out = bytearray(raw)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 8])):
        # Headers lie in the first bytes and, of archives, in the last ones.
        span = len(out) + 1 if rng.random() < 0.5 else min(len(out) + 1, 400)
        at = rng.randrange(span)
        if rng.random() < 0.3:
            at = len(out) - min(at, len(out))
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.choice([1, 2, 8, 50])]
        elif kind == 2:
            size = rng.choice([1, 2, 4, 8])
            number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
            out[at : at + size] = number.to_bytes(size, rng.choice(["little", "big"]))
        elif kind == 3:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[other : other + rng.choice([1, 8, 80])]
        elif kind == 4 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 5:
            out[at:at] = rng.randbytes(rng.choice([1, 4, 8]))
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def check_sound(header: Header, raw: bytes) -> None:
    """What a transfer relies on, stated again in other words than the readers'."""
    if not 0 <= header.data_offset <= header.data_end <= len(raw):
        raise AssertionError("the data section leaves the file")
    blocks = header.blocks
    if blocks is None:
        raise AssertionError("no blocks")
    at = 0
    for block in blocks:
        if not at <= block.start < block.end <= header.data_nbytes:
            raise AssertionError(f"unsound: {block} after {at}")
        at = block.end
    for name, info in header.tensors.items():
        detail = header.details.get(name)
        strides = detail.strides if detail is not None else None
        count = info.dtype.bits
        if strides is None:
            for dim in info.shape:
                count *= dim
        else:
            last = sum((n - 1) * s for n, s in zip(info.shape, strides, strict=True))
            if 0 in info.shape or min(strides, default=0) < 0:
                raise AssertionError(f"unsound strides: {info} {strides}")
            count *= last + 1
        if name != info.name or count != 8 * info.nbytes:
            raise AssertionError(f"unsound: {info}")
        if info.nbytes and not any(b.start <= info.start and info.end <= b.end for b in blocks):
            raise AssertionError(f"outside of every block: {info}")


def read(raw: bytes) -> Header:
    """The header of these bytes."""
    return read_model(InMemory(raw), path="fuzz", file_nbytes=len(raw))


def judge(raw: bytes) -> str | None:
    """What is wrong with the treatment of these bytes, or None."""
    try:
        check_sound(read(raw), raw)
    except errors.FormatError as error:
        if error.filename != "fuzz":
            return "the error does not name the file"
        if len(str(error)) > 1500:
            return "the error is longer than anyone reads"
    except Exception as error:  # noqa: BLE001 - finding those is what this is for
        return f"{type(error).__name__}: {error}"
    return None


def one(kind: str, rng: random.Random) -> tuple[bytes, str | None]:
    """One input of a format and what is wrong with its treatment, or None."""
    if kind in ("npz", "checkpoint") and rng.random() < 0.6:
        raw = MAKERS[kind](rng, lambda inner: damage(inner, rng))
    else:
        raw = damage(MAKERS[kind](rng), rng)
    if raw[8:9] == b"{" and int.from_bytes(raw[:8], "little") < len(raw):
        return raw, None  # safetensors by accident, which has a fuzzer of its own
    return raw, judge(raw)


def main(arguments: list[str]) -> int:
    """Fuzz for the seconds asked (default 60), the formats in turns; 1 if something was found."""
    seconds = float(arguments[0]) if arguments else 60.0
    seed = int(arguments[1]) if len(arguments) > 1 else int.from_bytes(os.urandom(4), "little")
    kinds = arguments[2:] or list(MAKERS)
    rng = random.Random(seed)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kind = kinds[count % len(kinds)]
        raw, wrong = one(kind, rng)
        count += 1
        if wrong:
            print(f"seed {seed}, input {count} ({kind}): {wrong}\n{raw!r}")
            return 1
    print(f"seed {seed}: {count} inputs of {', '.join(kinds)} in {seconds:g} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
