"""Checkpoints of PyTorch: what torch.load reads, bit for bit, and nothing of a stranger's pickle is executed."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import model_files as made
import nobounce
from capabilities import need
from nobounce.errors import FormatError
from nobounce.formats.reader import InMemory, read_model

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]
NOT_IN_NUMPY = {"complex32"}


def torch_module() -> Any:
    need("torch")
    import torch

    return torch


def some(torch: Any, name: str, shape: tuple[int, ...] = (3, 8)) -> Any:
    dtype = getattr(torch, name)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(count).integers(0, 2 if name == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def bits(tensor: Any) -> bytes:
    """The elements of a torch tensor in order, as bytes."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def load(path: Path, **options: Any) -> nobounce.Model:
    return nobounce.load(path, **{"device": "cpu", **options})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
def test_every_dtype_is_what_torch_reads(tmp_path: Path, device: str, framework: Any) -> None:
    torch = torch_module()
    names = [n for n in DTYPES if framework != "numpy" or n not in NOT_IN_NUMPY]
    path = tmp_path / "m.pt"
    torch.save({n: some(torch, n) for n in names}, path)
    theirs = torch.load(path, weights_only=True)
    model = load(path, device=device, framework=framework)
    assert list(model) == names
    for name, mine in model.items():
        if framework == "torch":
            assert (mine.dtype, mine.shape) == (theirs[name].dtype, theirs[name].shape)
            raw = bits(mine)
        else:
            raw = mine.tobytes()
            packed = framework is None and name.startswith(
                "float4"
            )  # a shape of elements, where torch counts bytes
            assert tuple(mine.shape) == ((3, 16) if packed else (3, 8))
        assert raw == bits(theirs[name])


def laid_out(torch: Any) -> dict[str, Any]:
    """Tensors that look at their storages in every way."""
    base = torch.arange(240, dtype=torch.float32)
    return {
        "whole": base,
        "tied": base,
        "part": base[7:19],
        "matrix": base[24:48].view(4, 6),
        "transposed": base[24:48].view(4, 6).t(),
        "every third": base[1::3],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3, dtype=torch.int16).expand(4, 3),
        "a window": torch.arange(100, dtype=torch.int64).as_strided((5, 4), (3, 1)),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "scalar of a storage": base[5],
        "none": torch.empty(0, 3),
        "none of a storage": base[3:3],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "buffer": torch.nn.Buffer(torch.randn(3)),
    }


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("align", [None, 4096])
def test_views_strides_and_shared_storages(
    tmp_path: Path, device: str, protocol: int, align: int | None
) -> None:
    torch = torch_module()
    path = tmp_path / "m.pt"
    given = laid_out(torch)
    torch.save(given, path, pickle_protocol=protocol)
    theirs = torch.load(path, weights_only=protocol == 2)  # torch's own careful reader knows protocol 2 alone
    model = load(path, device=device, framework="torch", align=align)
    assert list(model) == list(given)
    for name, mine in model.items():
        assert mine.stride() == theirs[name].stride() or not mine.numel()
        assert (mine.dtype, mine.shape, bits(mine)) == (
            theirs[name].dtype,
            theirs[name].shape,
            bits(theirs[name]),
        )
    if device == "cpu":
        assert model["tied"].data_ptr() == model["whole"].data_ptr() == model["part"].data_ptr() - 28
    arrays = load(path, device=device, framework="numpy", align=align)
    for name, array in arrays.items():
        assert np.array_equal(array, theirs[name].detach().numpy())
    tensors = load(path, device=device, align=align)
    for name, mine in tensors.items():
        assert (tuple(mine.shape), mine.tobytes()) == (tuple(theirs[name].shape), bits(theirs[name]))


def test_copies_of_strided_tensors_are_bounded_by_the_file(tmp_path: Path) -> None:
    """nobounce.Tensor is contiguous, so it would be a copy of as many elements as a stranger likes."""
    torch = torch_module()
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(FormatError, match='framework="torch"') as caught:
        load(path)
    assert caught.value.tensor == "w"
    assert load(path, framework="torch")["w"].shape == (1 << 40,)
    assert load(path, framework="numpy")["w"].strides == (0,)


def test_a_state_dict_of_a_module(tmp_path: Path) -> None:
    torch = torch_module()
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path = tmp_path / "m.pt"
    torch.save(module.state_dict(), path)
    model = load(path, framework="torch")
    assert list(model) == list(module.state_dict())
    module.load_state_dict(model)


def test_nested_checkpoints_have_names_with_dots_and_plain_values_are_metadata(tmp_path: Path) -> None:
    torch = torch_module()
    one = torch.tensor([1.0])
    optimizer = {"state": {0: {"step": one, "exp_avg": one}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    given = {
        "state_dict": OrderedDict({"a.weight": one, "b": one}),
        "optimizer": optimizer,
        "list": [one, (one, one)],
        "epoch": 3,
        "best": None,
        "on": True,
        "note": "n\x1b",
        "shape": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cuda:1"),
        "raw": b"abc",
        "tags": {"x"},
        "many": list(range(100)),
    }
    path = tmp_path / "m.ckpt"
    torch.save(given, path)
    model = load(path)
    assert list(model) == [
        "state_dict.a.weight",
        "state_dict.b",
        "optimizer.state.0.step",
        "optimizer.state.0.exp_avg",
        "list.0",
        "list.1.0",
        "list.1.1",
    ]
    assert model.metadata == {
        "optimizer.param_groups.0.lr": "0.1",
        "optimizer.param_groups.0.params": "[0, 1]",
        "epoch": "3",
        "best": "null",
        "on": "true",
        "note": "n\x1b",
        "shape": "[1, 2]",
        "dtype": "torch.float16",
        "device": "cuda:1",
        "raw": "3 bytes",
        "tags": "[x]",
        "many": "100 values",
    }


def test_a_tensor_alone_is_named_as_the_file(tmp_path: Path) -> None:
    torch = torch_module()
    torch.save(torch.arange(3), tmp_path / "ids.pt")
    assert load(tmp_path / "ids.pt")["ids"].tobytes() == bits(torch.arange(3))


def test_attributes_of_tensors_are_left_out(tmp_path: Path) -> None:
    torch = torch_module()
    tensor, parameter = torch.arange(3), torch.nn.Parameter(torch.zeros(2))
    tensor.note = parameter.note = "x"
    torch.save({"t": tensor, "p": parameter}, tmp_path / "m.pt")
    assert list(load(tmp_path / "m.pt")) == ["t", "p"]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_big_endian_numbers_arrive_as_torch_turns_them(tmp_path: Path, device: str) -> None:
    torch = torch_module()
    written = tmp_path / "little.pt"
    kinds = [n for n in DTYPES if n not in {"complex32"} and not n.startswith(("float4", "float8", "uint"))]
    torch.save({n: some(torch, n) for n in kinds} | {"tied": some(torch, "int32")}, written)
    members = []
    with zipfile.ZipFile(written) as archive:
        for name in archive.namelist():
            raw = archive.read(name)
            members.append((name, b"big" if name.endswith("byteorder") else raw))
    path = tmp_path / "big.pt"
    path.write_bytes(made.zip_file(members, align=64))
    theirs = torch.load(path, weights_only=True)
    for name, mine in load(path, device=device).items():
        assert mine.tobytes() == bits(theirs[name]), name
    assert bits(theirs["int32"]) != bits(some(torch, "int32"))


def test_C120_a_checkpoint_saved_on_a_GPU_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    kept = made.storage("Float", "0", 2, "cuda:0")
    path.write_bytes(made.checkpoint({"w": made.tensor(kept)}, {"0": struct.pack("<2f", 1, 2)}))
    assert load(path)["w"].numpy().tolist() == [1, 2]


def test_a_folder_with_an_index_of_checkpoints(tmp_path: Path) -> None:
    torch = torch_module()
    for number in (1, 2):
        torch.save(
            {f"w{number}": torch.tensor([number])}, tmp_path / f"pytorch_model-{number:05d}-of-00002.bin"
        )
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    index = (
        '{"weight_map": {"w1": "pytorch_model-00001-of-00002.bin", "w2": "pytorch_model-00002-of-00002.bin"}}'
    )
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert sorted(load(tmp_path)) == ["w1", "w2"]
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    (tmp_path / "training_args.bin").unlink()
    assert sorted(load(tmp_path)) == ["w1", "w2"]
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FormatError, match="1 of 2 shards missing: pytorch_model-00002-of-00002.bin"):
        load(tmp_path)


# what is refused


def written(make: Any) -> bytes:
    raw = io.BytesIO()
    make(raw)
    return raw.getvalue()


class Evil:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/nobounce-was-here",)


def of_torch(torch: Any) -> dict[str, tuple[Any, str]]:
    """What torch writes and is not read: a maker, and words of the refusal."""
    linear = torch.nn.Linear(2, 2)
    sparse = torch.zeros(2, 2).to_sparse()
    conjugated = torch.zeros(2, dtype=torch.complex64).conj()
    return {
        "a module": (
            lambda f: torch.save(linear, f),
            r"'torch.nn.modules.linear.Linear'.*state_dict\(\), NEW",
        ),
        "a program": (lambda f: torch.save({"a": Evil()}, f), "'posix.system'"),
        "a numpy scalar": (lambda f: torch.save({"a": np.float64(1)}, f), r"'numpy\.\S*multiarray.scalar'"),
        "a sparse tensor": (lambda f: torch.save(sparse, f), "'torch._utils._rebuild_sparse_tensor'"),
        "a conjugated tensor": (lambda f: torch.save(conjugated, f), r"resolve_conj\(\)"),
        "a meta tensor": (
            lambda f: torch.save(torch.zeros(2, device="meta"), f),
            "_rebuild_meta_tensor_no_storage",
        ),
        "TorchScript": (
            lambda f: torch.jit.save(torch.jit.script(linear), f),
            r"TorchScript.*torch.jit.load\(OLD\)",
        ),
        "the format before 1.6": (
            lambda f: torch.save({"a": torch.zeros(2)}, f, _use_new_zipfile_serialization=False),
            r"pickle, as older PyTorch checkpoints are.*torch.save\(torch.load\(OLD, weights_only=True",
        ),
        "no tensors": (lambda f: torch.save("text", f), "holds no tensors, but text"),
        "a tuple as key": (
            lambda f: torch.save({"x": {(1, 2): torch.zeros(2)}}, f),
            "neither text nor a whole number",
        ),
        "one name twice": (
            lambda f: torch.save({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, f),
            r"two tensors that would be named 'a\.b'",
        ),
        "a key as number and text": (
            lambda f: torch.save({0: torch.zeros(1), "0": torch.zeros(1)}, f),
            "named '0'",
        ),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_torch_writes_beside_tensors_is_refused_by_name(tmp_path: Path) -> None:
    torch = torch_module()
    for kind, (make, word) in of_torch(torch).items():
        path = tmp_path / "m.pt"
        path.write_bytes(written(make))
        with pytest.raises(FormatError, match=word) as caught:
            load(path)
        assert caught.value.filename == str(path), kind
    assert not os.path.exists("/tmp/nobounce-was-here")


FLOATS = made.storage("Float", "0", 2)
TWO = {"0": bytes(8)}


def bad(value: Any, storages: dict[str, bytes] = TWO, **options: Any) -> bytes:
    return made.checkpoint(value if isinstance(value, bytes) else {"w": value}, storages, **options)


def laughs() -> bytes:
    """Lists of ten times the list before: few bytes, 10^30 values."""
    out = b"\x80\x02](" + b"K\1" * 10 + b"eq\0"
    for number in range(1, 30):
        out += b"](" + bytes([ord("h"), number - 1]) * 10 + b"eq" + bytes([number])
    return out + b"."


BAD: dict[str, tuple[bytes, str]] = {
    "a tensor behind its storage": (bad(made.tensor(FLOATS, 1)), "reaches behind its storage of 8 bytes"),
    "strides behind the storage": (bad(made.tensor(FLOATS, 0, (2,), (2,))), "reaches behind its storage"),
    "a negative offset": (bad(made.tensor(FLOATS, -1)), "a negative size"),
    "a negative stride": (bad(made.tensor(FLOATS, 1, (2,), (-1,))), "a negative size"),
    "an offset over 64 bits": (bad(made.tensor(FLOATS, 1 << 100)), "more than 63 bits"),
    "a size over 64 bits": (bad(made.tensor(FLOATS, 0, (1 << 62, 1 << 62, 0), (0, 0, 0))), "overflows 64 bits"),
    "sizes without strides": (bad(made.tensor(FLOATS, 0, (2, 1))), "sizes and strides torch does not write"),
    "sizes that are text": (bad(made.tensor(FLOATS, 0, ("2",), (1,))), "sizes and strides torch does not write"),
    "a truth as size": (bad(made.tensor(FLOATS, 0, (True,), (1,))), "sizes and strides torch does not write"),
    "65 dimensions": (bad(made.tensor(FLOATS, 0, (1,) * 65, (1,) * 65)), "sizes and strides torch does not write"),
    "a storage that is missing": (bad(made.tensor(made.storage("Float", "7", 2))), "storage '7' is missing"),
    "a storage that is short": (bad(made.tensor(FLOATS), {"0": bytes(4)}), "holds 4 bytes, its storage needs 8"),
    "a storage of two sizes": (
        bad([made.tensor(FLOATS), made.tensor(made.storage("Float", "0", 3))]),
        "storage '0' has 8 bytes and 12",
    ),
    "a storage of another class": (bad(made.tensor(made.storage("QInt8", "0", 8))), "'torch.QInt8Storage'"),
    "no storage": (bad(made.tensor(3)), "a tensor that torch does not write"),
    "a call of a value": (bad(made.Call("torch.FloatStorage", 3)), "calls 'torch.FloatStorage'"),
    "an attribute of a tensor": (bad(b"\x80\x02}X\1\0\0\0wK\1}b."), "sets attributes of something"),
    "nothing": (bad(b""), "damaged or cut off"),
    "an opcode of protocol 0": (bad(b"\x80\x02I1\n."), r"opcode b'I'"),
    "protocol 9": (bad(b"\x80\x09N."), "of protocol 9"),
    "an extension": (bad(b"\x80\x02\x82\1."), "opcode"),
    "a value never made": (bad(b"\x80\x02h\7."), "refers to a value that it has not made"),
    "text beyond the pickle": (bad(b"\x80\x02X\xff\xff\xff\x7fa."), "damaged or cut off"),
    "text that is none": (bad(b"\x80\x02X\1\0\0\0\xff."), "text that is none"),
    "a name that does not end": (bad(b"\x80\x02cos"), "text that is none, or that does not end"),
    "an integer of a gigabyte": (bad(b"\x80\x02\x8b\0\0\0\x40"), "an integer of 1073741824 bytes"),
    "a list that holds itself": (bad(b"\x80\x02]q\0(h\0e."), "or holds itself"),
    "lists in lists": (bad(b"\x80\x02" + b"](" * 500 + b"]" + b"e" * 500 + b"."), "nested more than 64 deep"),
    "few bytes for many values": (bad(laughs()), "too many values|more than 64 deep"),
    "a pickle that is compressed": (
        made.zip_file([("archive/data.pkl", made.pickled({}))], method=8),
        r"data.pkl': is compressed \(deflate\)",
    ),
    "no pickle": (made.zip_file([("archive/version", b"3\n")]), "without data.pkl"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(kind: str, tmp_path: Path, fd_guard: None) -> None:
    raw, word = BAD[kind]
    path = tmp_path / "bad.pt"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=word) as caught:
        load(path)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("op", [b"]", b"}", b"("])
def test_the_memory_of_values_is_bounded(op: bytes) -> None:
    """So many of the cheapest opcodes would make hundreds of megabytes of objects; a hundred times as many fit a checkpoint."""
    raw = bad(b"\x80\x02" + op * 1_000_000)
    with pytest.raises(FormatError, match="more memory than a file"):
        read_model(InMemory(raw), path="m", file_nbytes=len(raw))


def test_checkpoints_of_many_small_tensors_fit_the_bound(tmp_path: Path) -> None:
    torch = torch_module()
    base = torch.zeros(10)
    for protocol in (2, 4):
        given = {"m": {str(n): base[:1] for n in range(3000)}, "o": [{"a": n, "b": {}} for n in range(3000)]}
        torch.save(given, tmp_path / "m.pt", pickle_protocol=protocol)
        assert len(load(tmp_path / "m.pt")) == 3000
