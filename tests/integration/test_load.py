"""nobounce.load: right values, right receipts, and nothing half-done when a file is bad."""

from __future__ import annotations

import json
import os
import resource
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nobounce
from capabilities import as_nobody, need
from filesystems import Machine
from nobounce import config, reaper
from nobounce.errors import FileChangedError, FileError, FormatError, RouteError, TransferError
from nobounce.formats import load, opened
from nobounce.runtimes import faults, rawio
from pages import resident

MIB = 1 << 20
DEVICES = ["cpu", "sim:0"]


def model_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 0) -> Path:
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode() + b" " * pad
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw + b"".join(t[2] for t in tensors.values()))
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def some(seed: int = 0, count: int = 12) -> dict[str, tuple[str, list[int], bytes]]:
    rng = np.random.default_rng(seed)
    kinds = [("F32", 4), ("BF16", 2), ("U8", 1), ("F64", 8), ("I64", 8), ("F8_E4M3", 1), ("BOOL", 1)]
    made: dict[str, tuple[str, list[int], bytes]] = {}
    for n in range(count):
        dtype, size = kinds[n % len(kinds)]
        shape = [int(x) for x in rng.integers(1, 300, 2)]
        raw = rng.integers(0, 2, shape[0] * shape[1] * size, dtype=np.uint8)
        made[f"t{n}"] = (dtype, shape, raw.tobytes())
    made["scalar"] = ("F32", [], struct.pack("<f", 2.5))
    made["empty"] = ("F32", [0, 4], b"")
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", range(9))
@pytest.mark.parametrize("require", ["auto", "fallback"])
def test_C56_values_are_right_at_any_alignment(tmp_path: Path, device: str, pad: int, require: str) -> None:
    tensors = some(pad)
    path = model_file(tmp_path / "m.safetensors", tensors, pad)
    model = nobounce.load(path, device=device, require=require)  # type: ignore[arg-type]
    assert list(model) == list(tensors)
    for name, (dtype, shape, data) in tensors.items():
        tensor = model[name]
        assert (str(tensor.dtype), list(tensor.shape)) == (dtype, shape)
        assert tensor.tobytes() == data
        assert tensor.address % tensor.dtype.alignment == 0
    assert model.device.name == device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("align", [256, 4096])
def test_align_is_kept_for_every_tensor(tmp_path: Path, device: str, align: int) -> None:
    tensors = some(3, 40)
    model = nobounce.load(model_file(tmp_path / "m.safetensors", tensors, 3), device=device, align=align)
    for name, (_, _, data) in tensors.items():
        assert model[name].tobytes() == data
        assert model[name].address % align == 0


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("device", DEVICES)
def test_arrays_own_their_memory_and_hold_what_safetensors_reads(
    tmp_path: Path, framework: str, device: str
) -> None:
    """C72, C73, C75: nothing dangles when the model is gone and memory is used again."""
    need("safetensors", "torch")
    import safetensors.torch
    import torch

    path = tmp_path / "m.safetensors"
    tensors = {
        f"w{n}": torch.randn(n + 1, 129).to(torch.bfloat16 if n % 2 else torch.float32) for n in range(8)
    }
    safetensors.torch.save_file(tensors, path)
    model = nobounce.load(path, device=device, framework=framework)  # type: ignore[arg-type]
    arrays = dict(model)
    del model
    with nobounce.Device("cpu").allocate(16 * MIB) as noise, nobounce.Device("cpu").create_stream() as stream:
        noise.fill(0xFF, stream=stream)
        stream.sync()
    for name, expected in tensors.items():
        got = arrays[name] if framework == "torch" else torch.from_numpy(arrays[name].view(np.uint8).copy())
        if framework == "torch":
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        else:
            assert torch.equal(got.flatten(), expected.view(torch.uint8).flatten())


def test_a_cold_load_is_direct_proven_and_leaves_no_page(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [9 * MIB], os.urandom(9 * MIB))})
    assert resident(path) == 0
    model = nobounce.load(path, device="cpu", cache="avoid", require="fastpath")
    assert model.receipt.fallback_bytes == 0
    assert model.receipt.fastpath_bytes >= 9 * MIB
    assert model.receipt.evidence == "kernel"
    assert resident(path) == 0


def test_the_proof_fails_when_the_fastpath_secretly_reads_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [9 * MIB], os.urandom(9 * MIB))})
    plain = os.open(path, os.O_RDONLY)
    honest = rawio.read_plain

    def secret(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
        return honest(plain, address, nbytes, offset, flags)

    monkeypatch.setattr(rawio, "read_plain", secret)
    model = nobounce.load(path, device="cpu", cache="avoid")
    monkeypatch.undo()
    os.close(plain)
    assert model.receipt.evidence != "kernel"
    assert resident(path) > 0


def test_a_warm_load_comes_from_the_page_cache_by_choice(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [5 * MIB], os.urandom(5 * MIB))})
    path.read_bytes()
    receipt = nobounce.load(path, device="cpu").receipt
    assert receipt.cached_bytes == receipt.fallback_bytes == receipt.nbytes
    assert receipt.host_traffic_bytes == 0
    assert nobounce.load(path, device="cpu", cache="avoid").receipt.fallback_bytes == 0
    assert nobounce.load(path, device="sim:0").receipt.host_traffic_bytes == 2 * receipt.nbytes


@pytest.mark.parametrize("name", ["ext4-ordered", "ext4-journal", "xfs", "btrfs", "overlay", "tmpfs"])
def test_a_model_loads_from_every_file_system(disks: Machine, name: str) -> None:
    tensors = some(5)
    path = model_file(disks.get(name) / "m.safetensors", tensors)
    model = nobounce.load(path, device="cpu")
    assert all(model[k].tobytes() == v[2] for k, v in tensors.items())
    if name == "tmpfs":
        with pytest.raises(RouteError, match="memory already"):
            nobounce.load(path, device="cpu", require="fastpath")


def sharded(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = some(9, 20)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:8], "model-2.safetensors": names[8:]}
    folder.mkdir()
    for shard, held in parts.items():
        model_file(folder / shard, {k: tensors[k] for k in held})
    weight_map = {k: shard for shard, held in parts.items() for k in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_a_folder_with_an_index_is_one_model(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "model")
    model = nobounce.load(tmp_path / "model", device="cpu", framework="numpy")
    assert {k: v.tobytes() for k, v in model.items()} == {k: v[2] for k, v in tensors.items()}
    assert len(model.receipts) == 2
    assert model.receipt.nbytes == sum(r.nbytes for r in model.receipts)


def test_a_symlinked_download_cache_is_fine(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for blob in (tmp_path / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    assert nobounce.load(snapshot, device="cpu").keys() == tensors.keys()


def test_C89_a_missing_shard_is_refused_before_anything_moves(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    (tmp_path / "model" / "model-2.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-2\.safetensors"):
        nobounce.load(tmp_path / "model", device="cpu")


def test_C106_many_shards_fit_a_small_descriptor_table(tmp_path: Path) -> None:
    for n in range(100):
        model_file(tmp_path / f"s{n:03}.safetensors", {f"t{n}": ("U8", [5000], os.urandom(5000))})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64 + len(os.listdir("/proc/self/fd")), hard))
    try:
        assert len(nobounce.load(tmp_path, device="cpu")) == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_descriptor_table_is_a_named_error_and_later_loads_work(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors", some())
    nobounce.load(path, device="cpu")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        while True:
            try:
                held.append(os.open(path, os.O_RDONLY))
            except OSError:
                break
        with pytest.raises(FileError, match="EMFILE"):
            nobounce.load(path, device="cpu")
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert nobounce.load(path, device="cpu")


def test_bad_files_leak_no_descriptor_in_a_thousand_tries(tmp_path: Path, fd_guard: None) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(struct.pack("<Q", 1000) + b"{" * 52)
    short = model_file(tmp_path / "short.safetensors", some())
    os.truncate(short, os.path.getsize(short) - 4)
    for _ in range(500):
        for path in (bad, short):
            with pytest.raises(FormatError):
                nobounce.load(path, device="cpu")


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors", some())
    os.truncate(path, os.path.getsize(path) - 4)
    with pytest.raises(FormatError, match="missing 4 bytes") as caught:
        nobounce.load(path, device="cpu")
    assert caught.value.filename == str(path)


def test_a_directory_a_pipe_and_nothing_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("pipe", "pipe"), ("gone", "ENOENT")):
        with pytest.raises(FileError, match=kind):
            nobounce.load(tmp_path / name, device="cpu")
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        nobounce.load(tmp_path, device="cpu")


def test_no_permission_is_named_for_an_unprivileged_user() -> None:
    need("unprivileged")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        _try_as_nobody(model_file(Path(folder) / "m.safetensors", some()))


def _try_as_nobody(path: Path) -> None:
    path.chmod(0o600)
    code = """
import sys, nobounce, nobounce.formats.load, nobounce.runtimes.host.cpu
drop()
try:
    nobounce.load(sys.argv[1], device="cpu")
except PermissionError as e:
    print(type(e).__name__, e)
"""
    done = as_nobody(code, str(path))
    assert "FilePermissionError" in done.stdout, done.stderr
    assert "EACCES" in done.stdout
    path.chmod(0o644)
    done = as_nobody(code.replace("except", "    print('loaded')\nexcept", 1), str(path))
    assert "loaded" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("require", ["fastpath", "fallback"])
def test_C68_a_file_that_shrinks_while_it_is_read_is_an_error(
    tmp_path: Path, device: str, require: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [20 * MIB], os.urandom(20 * MIB))})
    cut = False

    def progress(backend: str, nbytes: int) -> None:
        nonlocal cut
        if not cut:
            cut = True
            os.truncate(path, 5 * MIB)

    monkeypatch.setenv("NOBOUNCE_IO_THREADS", "1")
    with pytest.raises(FileChangedError, match=str(path)):
        nobounce.load(path, device=device, require=require, progress=progress)  # type: ignore[arg-type]
    os.truncate(path, 0)
    good = model_file(tmp_path / "good.safetensors", some())
    assert nobounce.load(good, device=device)


def test_a_file_written_to_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [9 * MIB], bytes(9 * MIB))})

    def progress(backend: str, nbytes: int) -> None:
        with path.open("r+b") as f:
            f.seek(MIB)
            f.write(b"x")

    with pytest.raises(FileChangedError, match="written"):
        nobounce.load(path, device="cpu", progress=progress)


@pytest.mark.parametrize("require", ["auto", "fallback"])
def test_an_io_error_in_the_middle_is_named_and_later_loads_work(tmp_path: Path, require: str) -> None:
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [20 * MIB], os.urandom(20 * MIB))})
    op = "read" if require == "auto" else "pread"
    config.override(config.Settings(io_threads=1, chunk_nbytes=MIB))
    with faults.inject(op=op, error=5, after=2, times=1), pytest.raises(TransferError) as caught:
        nobounce.load(path, device="sim:0", require=require)  # type: ignore[arg-type]
    assert (caught.value.errno, caught.value.filename) == (5, str(path))
    assert caught.value.file_offset > 0
    assert nobounce.load(path, device="sim:0")["a"].nbytes == 20 * MIB


def mapped(nbytes: int) -> bool:
    """Whether this process has an anonymous mapping of exactly so many bytes, once what nobody holds is freed."""
    reaper.drain()
    with open("/proc/self/maps") as maps:
        ranges = [line.split() for line in maps]
    return any(
        len(r) == 5 and int(r[0].split("-")[1], 16) - int(r[0].split("-")[0], 16) == nbytes for r in ranges
    )


ODD = 83 * MIB + 12288
"""A size that no other mapping of the process has by chance."""


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("fault", ["error", "handing out", "shrunk"])
def test_a_failed_load_gives_its_memory_back_while_the_error_is_held(
    tmp_path: Path, fault: str, cold: bool
) -> None:
    halves = {name: ("U8", [ODD // 2 - 2048], bytes(ODD // 2 - 2048)) for name in ("a", "b")}
    path = model_file(tmp_path / "m.safetensors", halves)
    slab = -(-os.path.getsize(path) // 4096) * 4096
    if not cold:
        path.read_bytes()
    good = nobounce.load(path, device="cpu")
    assert mapped(slab)  # the test can see it
    del good
    assert not mapped(slab)
    raised: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault == "handing out":
            patch.setattr(nobounce.Tensor, "maker", lambda *_, **__: lambda *_: 1 // 0)
        elif fault == "error":
            patch.setattr(rawio, "read_plain", _broken(rawio.read_plain))
        else:
            patch.setattr(rawio, "read_plain", _cutting(path, rawio.read_plain))
        try:
            nobounce.load(path, device="cpu", cache="avoid" if cold else "auto")
        except (TransferError, FileChangedError, ZeroDivisionError) as error:
            raised.append(error)
    assert raised
    assert not mapped(slab)
    again = model_file(tmp_path / "again.safetensors", some())
    assert nobounce.load(again, device="cpu")


def _broken(read: Any) -> Any:
    def call(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
        if offset >= 40 * MIB:
            raise OSError(5, "Input/output error")
        return int(read(fd, address, nbytes, offset, flags))

    return call


def _cutting(path: Path, read: Any) -> Any:
    def call(fd: int, address: int, nbytes: int, offset: int, flags: int = 0) -> int:
        os.truncate(path, MIB)
        return int(read(fd, address, nbytes, offset, flags))

    return call


def test_a_model_of_many_tensors_is_handed_out_while_it_is_read(tmp_path: Path) -> None:
    """And in a long header every tensor has the bytes that the plainest reader gives it."""
    rng = np.random.default_rng(7)
    kinds = [("I64", 8), ("F32", 4), ("BF16", 2), ("U8", 1)]
    tensors = {
        f"blocks.{n}.weight": (kinds[n // 1000][0], [n % 7 + 1], rng.bytes((n % 7 + 1) * kinds[n // 1000][1]))
        for n in range(4000)
    }
    for pad in (0, 1):
        path = model_file(tmp_path / f"m{pad}.safetensors", tensors)
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        spaces = -length % 8 + pad
        padded = (length + spaces).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * spaces
        path.write_bytes(padded + raw[8 + length :])
        for framework in (None, "numpy"):
            model = nobounce.load(path, device="cpu", framework=framework)  # type: ignore[arg-type]
            assert list(model) == list(tensors)
            assert all(model[name].tobytes() == data for name, (_, _, data) in tensors.items())


@pytest.mark.parametrize(
    ("pad", "mib", "cold", "told"),
    [(1 << 20, 64, True, [64 * MIB]), (0, 64, True, []), (1 << 20, 1, True, []), (1 << 20, 64, False, [])],
    ids=["long", "short header", "little data", "cached"],
)
def test_threads_are_started_while_the_disk_brings_a_long_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pad: int, mib: int, cold: bool, told: list[int]
) -> None:
    path = model_file(tmp_path / "m.safetensors", {"x": ("U8", [mib * MIB], os.urandom(MIB) * mib)}, pad=pad)
    for look in ("counted", "residency"):
        monkeypatch.setattr(opened, look, lambda fd, at, n: SimpleNamespace(resident_bytes=0 if cold else n))
    calls = []
    monkeypatch.setattr(load, "get_ready", lambda runtime, nbytes, *how: calls.append(nbytes))
    model = nobounce.load(path, device="cpu")
    assert calls == told
    assert model["x"].tobytes()[-4:] == path.read_bytes()[-4:]


def test_peak_memory_grows_by_the_tensors_and_little_more(tmp_path: Path) -> None:
    need("safetensors")
    path = model_file(tmp_path / "m.safetensors", {"a": ("U8", [300 * MIB], bytes(300 * MIB))}, pad=1)
    code = f"""
import resource, nobounce, nobounce.formats.load, nobounce.runtimes.host.cpu
def peak(): return int([l for l in open('/proc/self/status') if 'VmHWM' in l][0].split()[1]) << 10
before = peak()
model = nobounce.load({str(path)!r}, device="cpu")
print((peak() - before - 300 * 2**20) / 2**20)
"""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(done.stdout) < 100


def test_bad_arguments_are_named_before_anything_moves(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.safetensors", some())
    for bad in ({"framework": "jax"}, {"align": 3}, {"require": "x"}, {"cache": "x"}, {"device": "gpu"}):
        with pytest.raises(nobounce.ArgumentError):
            nobounce.load(path, **{"device": "cpu", **bad})  # type: ignore[arg-type]
