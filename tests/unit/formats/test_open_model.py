"""Some of a model: tensors by name, boxes of them, into memory that the caller has."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import need
from doubles.hip_bindings import HipDouble
from nobounce.device import Device
from nobounce.errors import (
    ArgumentError,
    ClosedError,
    FileChangedError,
    RouteError,
    TransferError,
)
from nobounce.formats import boxes, opened, partial
from nobounce.formats.selection import GAP_NBYTES, runs
from nobounce.route.types import MemoryKind
from nobounce.runtimes import rawio
from nobounce.runtimes.gpu import hip

KIB, MIB = 1 << 10, 1 << 20
Arrays = dict[str, np.ndarray[Any, Any]]


def save(path: Path, tensors: Arrays, pad: int = 0) -> Path:
    """A safetensors file; with `pad` its data section begins that many bytes past a multiple of 8."""
    need("safetensors")
    from safetensors.numpy import save as to_bytes

    raw = to_bytes(tensors)
    if pad:
        header = int.from_bytes(raw[:8], "little")
        raw = (header + pad).to_bytes(8, "little") + raw[8 : 8 + header] + b" " * pad + raw[8 + header :]
    path.write_bytes(raw)
    return path


def arrays(seed: int = 0, prefix: str = "") -> Arrays:
    rng = np.random.default_rng(seed)
    made: Arrays = {
        f"{prefix}layers.{n}.w": rng.standard_normal((8, 100 + n)).astype(np.float32) for n in range(12)
    }
    made[f"{prefix}large"] = rng.integers(0, 1 << 16, (512, 300), np.uint16)
    made |= {f"{prefix}scalar": np.array(3.5), f"{prefix}none": np.zeros((0, 4), np.int8)}
    made[f"{prefix}odd"] = rng.integers(0, 256, 77, np.uint8)
    return made


def host(made: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = made if isinstance(made, np.ndarray) else made.numpy()
    return found


def same(made: Any, wanted: Arrays) -> None:
    assert list(made) == [n for n in made if n in wanted]
    assert set(made) == set(wanted)
    for name, array in wanted.items():
        assert host(made[name]).shape == array.shape, name
        assert np.array_equal(host(made[name]), array), name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "m.safetensors", arrays())


# names


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("cache", ["auto", "use", "avoid"])
@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_tensors_by_name(tmp_path: Path, device: str, framework: Any, cache: Any, pad: int) -> None:
    if framework == "torch":
        need("torch")
    path, all_of_it = save(tmp_path / "m.safetensors", arrays(), pad), arrays()
    how: dict[str, Any] = {"device": device, "framework": framework, "cache": cache}
    with nobounce.open_model(path) as m:
        for names, wanted in (
            ("layers.1?.w", ["layers.10.w", "layers.11.w"]),
            ("large", ["large"]),
            (["odd", "layers.3.w", "none", "scalar"], ["odd", "layers.3.w", "none", "scalar"]),
            (lambda n: n.endswith("2.w"), ["layers.2.w"]),
            (list(all_of_it)[::2], list(all_of_it)[::2]),
            (None, list(all_of_it)),
        ):
            got = m.load(names=names, **how)
            same(got, {n: all_of_it[n] for n in wanted})
            assert got.receipt.device == device
        assert not m.load(names=lambda _: False, **how)
    same(nobounce.load(path, names="large", **how), {"large": all_of_it["large"]})


def test_the_order_is_the_files(path: Path) -> None:
    order = list(nobounce.load(path, device="cpu"))
    some = ["layers.9.w", "large", "layers.1.w", "odd"]
    assert list(nobounce.load(path, device="cpu", names=some)) == [n for n in order if n in some]


def test_names_that_are_not_there_are_named(path: Path) -> None:
    for names, said in (
        (["large", "larger", "x\n"], r"2 of the names .* larger, x\\n"),
        ("l?", "'l\\?' matches none"),
    ):
        with pytest.raises(ArgumentError, match=said):
            nobounce.load(path, device="cpu", names=names)


def test_what_is_read_is_what_is_wanted_and_short_gaps(tmp_path: Path) -> None:
    tensors = {f"t{n:02}": np.full(300 * KIB, n, np.uint8) for n in range(20)}
    path = save(tmp_path / "m.safetensors", tensors)
    got = nobounce.load(path, device="cpu", names=["t03", "t10", "t11"], cache="use")
    same(got, {n: tensors[n] for n in ("t03", "t10", "t11")})
    receipt = got.receipt
    assert receipt.requested == 900 * KIB
    assert 900 * KIB <= receipt.nbytes <= 916 * KIB
    assert f"{receipt.nbytes - receipt.requested} bytes beside those asked for" in receipt.notes[-1]
    assert sum(s.nbytes for s in receipt.segments) == receipt.nbytes


def test_gaps_that_cost_less_than_a_request_are_read() -> None:
    def spans(*ranges: tuple[int, int]) -> list[tuple[int, int]]:
        return [(r.start, r.end) for r in runs(ranges, 4096)]

    assert spans((0, 100), (200, 300)) == [(0, 4096)]
    assert spans((0, 4096), (8192, 12288)) == [(0, 12288)]
    assert spans((0, 4096), (12289, 12300)) == [
        (0, 4096),
        (12288, 16384),
    ]  # the gap is longer than what follows
    assert spans((0, 200 * KIB), (300 * KIB, 500 * KIB)) == [(0, 500 * KIB)]
    far = 200 * KIB + GAP_NBYTES + 4096
    assert spans((0, 200 * KIB), (far, far + 200 * KIB)) == [(0, 200 * KIB), (far, far + 200 * KIB)]
    placed = runs([(5000, 6000), (1 << 20, (1 << 20) + 10)], 4096)
    assert [(r.start, r.end, r.offset) for r in placed] == [
        (4096, 8192, 0),
        (1 << 20, (1 << 20) + 4096, 4096),
    ]


def test_fastpath_reads_some_tensors_directly(tmp_path: Path) -> None:
    need("o_direct")
    tensors = {f"t{n:02}": np.full(300 * KIB + n, n, np.uint8) for n in range(20)}
    path = save(tmp_path / "m.safetensors", tensors)
    got = nobounce.load(path, device="cpu", names=["t03", "t10", "t19"], require="fastpath")
    same(got, {n: tensors[n] for n in ("t03", "t10", "t19")})
    assert got.receipt.fastpath_bytes == got.receipt.nbytes


def test_files_without_a_wanted_tensor_are_left_alone(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{n}.safetensors", arrays(n, f"{n}.")) for n in range(3)]
    with nobounce.open_model(paths) as m:
        paths[1].unlink()
        got = m.load(device="cpu", names=["0.large", "2.odd"])
        same(got, {"0.large": arrays(0, "0.")["0.large"], "2.odd": arrays(2, "2.")["2.odd"]})
        assert [Path(r.filename).stem for r in got.receipts] == ["0", "2"]


# the object


def test_an_open_model_tells_what_it_has(path: Path) -> None:
    with nobounce.open_model(path) as m:
        wanted = arrays()
        assert (set(m.keys()), len(m), "large" in m, "small" in m) == (set(wanted), len(wanted), True, False)
        assert list(m) == list(m.keys())
        info = m.info("large")
        assert (info.name, str(info.dtype), info.shape, info.nbytes) == ("large", "U16", (512, 300), 307200)
        raw = Path(info.path).read_bytes()[info.file_offset : info.file_offset + info.nbytes]
        assert raw == wanted["large"].tobytes()
        assert m.metadata == {}
        with pytest.raises(ArgumentError, match="no tensor 'small'"):
            m.info("small")
    with pytest.raises(ClosedError):
        m.load(device="cpu")
    with pytest.raises(TypeError, match="open_model"):
        nobounce.OpenModel()


def test_later_loads_parse_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobounce.open_model(path) as m:

        def parse(*_: Any, **__: Any) -> None:
            raise AssertionError("parsed again")

        monkeypatch.setattr(opened, "read_model", parse)
        same(m.load(device="cpu"), arrays())
        same(m.load(device="cpu", names="l*"), {n: a for n, a in arrays().items() if n[0] == "l"})


def test_a_file_that_is_another_by_then_is_noticed(path: Path) -> None:
    with nobounce.open_model(path) as m:
        m.load(device="cpu")
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))
        with pytest.raises(FileChangedError):
            m.load(device="cpu", names="odd")


# slices


def random_box(draw: random.Random, shape: tuple[int, ...]) -> tuple[tuple[int, int] | None, ...]:
    box: list[tuple[int, int] | None] = []
    for dim in shape[: draw.randint(0, len(shape))]:
        start = draw.randint(0, dim)
        box.append(None if draw.random() < 0.3 else (start, draw.randint(start, dim)))
    return tuple(box)


def cut(array: np.ndarray[Any, Any], box: tuple[tuple[int, int] | None, ...]) -> np.ndarray[Any, Any]:
    return array[tuple(slice(None) if one is None else slice(*one) for one in box)]


@pytest.mark.parametrize(
    "way",
    [
        "mapped",
        "mapped runs",
        "mapped small",
        "cached",
        "cached runs",
        "cached small",
        "blocks",
        "small blocks",
        "runs",
    ],
)
def test_boxes_of_any_dimensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    draw, rng = random.Random(way), np.random.default_rng(1)
    tensors: Arrays = {"vector": rng.integers(0, 99, 50, np.int16), "matrix": rng.standard_normal((40, 30))}
    tensors["experts"] = rng.integers(0, 1 << 30, (3, 20, 17), np.int32)
    tensors["deep"] = rng.integers(0, 256, (2, 3, 4, 5, 6), np.uint8)
    tensors["complex"] = (rng.standard_normal((9, 9)) + 1j).astype(np.complex64)
    path = save(tmp_path / "m.safetensors", tensors)
    path.read_bytes()
    if way.startswith("cached"):
        monkeypatch.setattr(boxes, "_leased", lambda fd: contextlib.nullcontext(-1))
    elif not way.startswith("mapped"):
        monkeypatch.setattr(boxes, "MOSTLY", 2)
    if "small" in way:
        monkeypatch.setattr(boxes, "BLOCK_NBYTES", 500)
        monkeypatch.setattr(boxes, "CACHED_NBYTES", 500)
    if "runs" in way:
        monkeypatch.setattr(boxes, "GAP_NBYTES", 0)
    with nobounce.open_model(path) as m:
        for _ in range(25):
            slices = {name: random_box(draw, array.shape) for name, array in tensors.items()}
            device = draw.choice(["cpu", "sim:0"])
            got = m.load(device=device, framework="numpy", slices=slices)
            assert got.receipt.device == device
            for name, array in tensors.items():
                assert np.array_equal(got[name], cut(array, slices[name])), (name, slices[name])
                assert got[name].dtype == array.dtype


def test_what_the_page_cache_holds_is_cut_under_a_lease(tmp_path: Path) -> None:
    need("cachestat")
    array = np.arange(1 << 18, dtype=np.int32).reshape(512, 512)
    path = save(tmp_path / "m.safetensors", {"w": array})
    path.read_bytes()
    with path.open("rb") as f, boxes._leased(f.fileno()) as leased:
        leases = leased >= 0
    got = nobounce.load(path, device="cpu", slices={"w": (None, (3, 70))})
    assert np.array_equal(host(got["w"]), array[:, 3:70])
    (segment,) = got.receipt.segments
    assert segment.reason.code == "strided-slice"
    assert got.receipt.requested == 512 * 67 * 4
    assert (got.receipt.nbytes == got.receipt.requested) is leases
    with path.open("r+b"):  # somebody may truncate it: no mapping then, whole rows are read
        got = nobounce.load(path, device="cpu", slices={"w": (None, (3, 70))})
        assert np.array_equal(host(got["w"]), array[:, 3:70])
        assert array.nbytes > got.receipt.nbytes > got.receipt.requested
        assert "beside those asked for" in got.receipt.notes[-1]


def test_a_box_that_cannot_be_read_is_an_error_and_names_what_is_undefined(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.read_bytes()
    into = {"large": np.zeros((512, 7), np.uint16)}
    with nobounce.open_model(path) as m:

        def broken(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(boxes, "_leased", lambda fd: contextlib.nullcontext(-1))
            patch.setattr(boxes.os, "preadv", broken)
            with pytest.raises(TransferError, match="pread of .* Input/output error") as caught:
                m.load(into=into, slices={"large": (None, (5, 12))})
            assert caught.value.__dict__["undefined"] == ("large",)
            patch.setattr(boxes.os, "preadv", lambda *_: 0)
            with pytest.raises(FileChangedError, match="ended while it was read"):
                m.load(device="cpu", slices={"large": (None, (5, 12))})
        m.load(into=into, slices={"large": (None, (5, 12))})
    assert np.array_equal(into["large"], arrays()["large"][:, 5:12])


def test_a_range_of_rows_is_read_alone_and_may_go_direct(tmp_path: Path) -> None:
    need("o_direct")
    array = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024)
    path = save(tmp_path / "m.safetensors", {"w": array})
    got = nobounce.load(path, device="cpu", slices={"w": ((100, 200),)}, require="fastpath")
    assert np.array_equal(host(got["w"]), array[100:200])
    assert got.receipt.nbytes < 420 * KIB
    with pytest.raises(RouteError, match="strided-slice"):
        nobounce.load(path, device="cpu", slices={"w": (None, (100, 200))}, require="fastpath")


def test_boxes_that_fit_nothing_are_named(path: Path) -> None:
    for slices, said in (
        ({"large": ((0, 513),)}, r"slices\['large'\]: \(0, 513\) is no part of dimension 0, which has 512"),
        ({"large": (None, (5, 4))}, "no part of dimension 1"),
        ({"large": (None, None, None)}, "3 dimensions, the tensor 2"),
        ({"larger": ()}, "larger"),
    ):
        with pytest.raises(ArgumentError, match=said):
            nobounce.load(path, device="cpu", slices=slices)


# into


@pytest.mark.parametrize("cache", ["auto", "avoid"])
@pytest.mark.parametrize(
    "kind", ["numpy", "numpy strided", "torch", "torch strided", "tensor", "sim", "bytes"]
)
def test_tensors_that_are_there_are_written_to(path: Path, kind: str, cache: Any) -> None:
    if kind.startswith("torch"):
        need("torch")
    wanted = arrays()
    into = {name: destination(kind, array) for name, array in wanted.items()}
    before = {name: address(obj) for name, obj in into.items()}
    with nobounce.open_model(path) as m:
        for _ in range(2):
            got = m.load(into=into, cache=cache)
            assert all(got[name] is into[name] for name in wanted)
            for name, array in wanted.items():
                raw = (
                    np.frombuffer(into[name], array.dtype).reshape(array.shape)
                    if kind == "bytes"
                    else host(into[name])
                )
                assert np.array_equal(raw, array), name
            assert before == {name: address(obj) for name, obj in into.items()}
            for obj in into.values():
                wipe(obj)
    assert got.receipt.device == ("sim:0" if kind == "sim" else "cpu")
    assert list(got) == list(nobounce.load(path, device="cpu"))


def destination(kind: str, array: np.ndarray[Any, Any]) -> Any:
    if kind.startswith("torch"):
        import torch

        made = torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype)
        strided = kind.endswith("strided") and array.ndim == 2
        return torch.zeros((*array.shape[::-1], 2), dtype=made.dtype)[..., 0].T if strided else made
    if kind.startswith("numpy"):
        strided = kind.endswith("strided") and array.ndim == 2
        return np.zeros((*array.shape[::-1], 2), array.dtype)[..., 0].T if strided else np.zeros_like(array)
    if kind == "bytes":
        return bytearray(array.nbytes)
    device = nobounce.Device("sim:0" if kind == "sim" else "cpu")
    names = {"float32": "F32", "float64": "F64", "uint16": "U16", "int8": "I8", "uint8": "U8"}
    return nobounce.Tensor(device.allocate(array.nbytes), array.shape, names[str(array.dtype)])


def address(obj: Any) -> int:
    if isinstance(obj, bytearray):
        return np.frombuffer(obj, np.uint8).ctypes.data
    if isinstance(obj, np.ndarray):
        return obj.ctypes.data
    return int(obj.address if isinstance(obj, nobounce.Tensor) else obj.data_ptr())


def wipe(obj: Any) -> None:
    if isinstance(obj, bytearray):
        obj[:] = bytes(len(obj))
    elif isinstance(obj, np.ndarray):
        obj[...] = 0
    elif isinstance(obj, nobounce.Tensor):
        if obj.nbytes:
            stream = obj.device.default_stream
            obj.buffer.fill(0, stream=stream)
            stream.sync()
    else:
        obj.zero_()


def test_a_large_tensor_comes_straight_into_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr(partial, "_copy", lambda device, copies: copied.extend(n for _, _, n in copies))
    into = {"large": np.zeros((512, 300), np.uint16)}
    nobounce.load(path, into=into)
    assert np.array_equal(into["large"], arrays()["large"])
    assert copied == []


def test_boxes_come_into_tensors_of_their_shape(path: Path) -> None:
    into = {"large": np.zeros((512, 7), np.uint16), "layers.4.w": np.zeros((104, 2), np.float32).T}
    slices = {"large": (None, (5, 12)), "layers.4.w": ((3, 5),)}
    nobounce.load(path, into=into, slices=slices)
    assert np.array_equal(into["large"], arrays()["large"][:, 5:12])
    assert np.array_equal(into["layers.4.w"], arrays()["layers.4.w"][3:5])


def test_what_does_not_fit_is_refused_before_anything_moves(path: Path) -> None:
    read_only = np.zeros((512, 300), np.uint16)
    read_only.flags.writeable = False
    for into, said in (
        ({"large": np.zeros((512, 300), np.int16)}, "is I16, the tensor U16"),
        ({"large": np.zeros((300, 512), np.uint16)}, r"has shape \[300, 512\], the tensor \[512, 300\]"),
        ({"large": bytearray(307199)}, "shape"),
        ({"large": np.zeros((512, 300), "datetime64[s]")}, "a type that no tensor has"),
        ({"large": read_only}, "read-only"),
        ({"larger": np.zeros(3)}, "1 destinations are not in the model: larger"),
    ):
        with pytest.raises(ArgumentError, match=said):
            nobounce.load(path, into=into)
    with pytest.raises(ArgumentError, match="15 tensors of the model have no destination"):
        nobounce.load(path, into={"large": np.zeros((512, 300), np.uint16)}, strict=True)
    with pytest.raises(TypeError, match="mapping"):
        nobounce.load(path, into=[1])  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="says sim:0"):
        nobounce.load(path, device="sim:0", into={"large": np.zeros((512, 300), np.uint16)})


def test_a_module_gets_its_parameters_and_buffers_tied_ones_once(tmp_path: Path) -> None:
    need("torch")
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            self.norm = torch.nn.BatchNorm1d(8)

    source, net = Net(), Net()
    state = {k: v.numpy() for k, v in source.state_dict().items() if k != "head.weight"}
    state["norm.running_mean"] = np.arange(8, dtype=np.float32)
    path = save(tmp_path / "m.safetensors", state)
    version = net.embed.weight._version
    nobounce.load(path, into=net, strict=True)
    assert torch.equal(net.head.weight, source.embed.weight)
    assert net.head.weight is net.embed.weight
    assert net.embed.weight.requires_grad
    assert net.embed.weight._version > version
    assert net.norm.running_mean.tolist() == list(range(8))
    loss = net.head(net.embed(torch.tensor([1]))).sum()
    nobounce.load(path, into=net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_failed_load_names_the_tensors_that_it_left_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{n}": np.ones(2 * MIB, np.uint8) for n in range(3)}
    paths = [save(tmp_path / f"{n}.safetensors", {f"t{n}": tensors[f"t{n}"]}) for n in range(3)]
    into = {name: np.zeros_like(array) for name, array in tensors.items()}
    real = rawio.read_plain

    def broken(fd: int, *rest: Any) -> int:
        if Path(f"/proc/self/fd/{fd}").resolve().stem == "1":
            raise OSError(5, "Input/output error")
        return int(real(fd, *rest))

    with nobounce.open_model(paths) as m, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rawio, "read_plain", broken)
        with pytest.raises(TransferError) as caught:
            m.load(into=into, cache="use")
    assert caught.value.__dict__["undefined"][0] == "t1"
    assert "t0" not in caught.value.__dict__["undefined"]
    assert any(note.startswith("undefined now: t1") for note in caught.value.__notes__)
    assert np.array_equal(into["t0"], tensors["t0"])


# other formats


def test_tensors_of_other_formats(tmp_path: Path) -> None:
    big = np.arange(20, dtype=">i4").reshape(4, 5)
    np.savez(tmp_path / "m.npz", big=big, little=np.arange(6.0).reshape(2, 3), other=np.zeros(3))
    got = nobounce.load(tmp_path / "m.npz", device="cpu", framework="numpy", names=["big", "little"])
    assert sorted(got) == ["big", "little"]
    assert got["big"].tolist() == big.tolist()
    assert got["little"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(
        ArgumentError, match="big-endian or strided tensors come with the whole file alone: big"
    ):
        nobounce.load(tmp_path / "m.npz", device="cpu", slices={"big": ((0, 1),)})
    row = nobounce.load(tmp_path / "m.npz", device="cpu", names="little", slices={"little": (None, (1, 2))})
    assert host(row["little"]).tolist() == [[1], [4]]


def test_views_of_a_checkpoint(tmp_path: Path) -> None:
    need("torch")
    import torch

    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"base": base, "tail": base[2:], "column": base[:, 1], "tied": base}, tmp_path / "m.pt")
    path = tmp_path / "m.pt"
    same(
        nobounce.load(path, device="cpu", framework="torch", names=["tail", "tied"]),
        {"tail": base[2:].numpy(), "tied": base.numpy()},
    )
    same(nobounce.load(path, device="cpu", framework="torch", names="column"), {"column": base[:, 1].numpy()})
    into = {"base": np.zeros((4, 6), np.float32), "tied": np.zeros((4, 6), np.float32)}
    nobounce.load(path, into=into)
    assert np.array_equal(into["tied"], base.numpy())
    assert np.array_equal(into["base"], base.numpy())


# pinned memory


@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
@pytest.mark.parametrize("name", ["cpu", "sim:0", "hip double"])
def test_a_load_into_pinned_memory(path: Path, name: str, framework: Any) -> None:
    if framework == "torch":
        need("torch")
    device: Any = Device._of(hip.load(HipDouble(devices=1)), 0) if name == "hip double" else name
    with nobounce.open_model(path) as m:
        for how in ({}, {"names": "l*"}, {"slices": {"large": (None, (3, 9))}}):
            got = m.load(device=device, framework=framework, pinned=True, **how)
            wanted = {n: a for n, a in arrays().items() if n in got}
            if "slices" in how:
                wanted["large"] = wanted["large"][:, 3:9]
            same(got, wanted)
            if framework is None:
                assert all(t.is_host_accessible for t in got.values())
                runtime = got.device._runtime
                assert runtime.pointer_info(got["large"].address).kind is MemoryKind.PINNED
    got = nobounce.load(path, device=device, framework=framework, pinned=True)
    same(got, arrays())
    with pytest.raises(ArgumentError, match="pinned"):
        nobounce.load(path, into={"odd": bytearray(77)}, pinned=True)  # type: ignore[call-overload]
