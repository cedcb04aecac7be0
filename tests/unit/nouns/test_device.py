"""Devices: names, foreign devices, the default, what is there and what is not."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from capabilities import need
from nobounce import config
from nobounce.config import Settings
from nobounce.device import Device, default_device, devices, unavailable
from nobounce.errors import ArgumentError, UnavailableError
from nobounce.route.types import MemoryKind
from nobounce.runtimes import registry


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config.override(Settings(device="sim:1"))
    yield
    config.override(None)


@pytest.mark.parametrize(
    ("spec", "name", "ordinal"),
    [("cpu", "cpu", 0), ("cpu:0", "cpu", 0), ("sim", "sim:0", 0), ("sim:1", "sim:1", 1)],
)
def test_a_name_means_a_device(spec: str, name: str, ordinal: int) -> None:
    device = Device(spec)
    assert (device.name, device.ordinal, device.device_id, str(device)) == (name, ordinal, ordinal, name)
    assert Device(device) == device == Device(name)


@pytest.mark.parametrize("spec", ["", "gpu", "cpu:1", "sim:99", "sim:x", "cpu:", "SIM:0"])
def test_a_name_that_means_nothing_is_named(spec: str) -> None:
    with pytest.raises(ArgumentError, match="device"):
        Device(spec)


@pytest.mark.parametrize("spec", [1.0, True, b"cpu", object(), SimpleNamespace(type=3, index=0)])
def test_what_is_no_device_is_a_type_error(spec: object) -> None:
    with pytest.raises(TypeError, match="a device is a name"):
        Device(spec)


def test_an_ordinal_counts_on_the_default_runtime(chosen: None) -> None:
    assert Device(0).name == "sim:0"
    assert Device().name == default_device().name == "sim:1"
    with pytest.raises(ArgumentError, match=r"device 7: sim has 2 devices"):
        Device(7)


def test_the_default_is_cpu_where_no_gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "absent_because", lambda name: "" if name in ("cpu", "sim") else "not today"
    )
    assert default_device().name == "cpu"
    assert [d.name for d in devices()] == ["sim:0", "sim:1", "cpu"]
    assert unavailable() == {"hip": "not today", "cuda": "not today"}


def test_the_default_is_the_first_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = registry.get("sim")
    monkeypatch.setattr(registry, "absent_because", lambda name: "" if name != "hip" else "no card")
    monkeypatch.setattr(registry, "get", lambda name: sim)
    assert default_device()._runtime is sim


def test_equal_devices_are_one_key() -> None:
    assert {Device("sim:0"): 1}[Device("sim")] == 1
    assert Device("sim:0") != Device("sim:1")
    assert Device("cpu") != "cpu"
    assert pickle.loads(pickle.dumps(Device("sim:1"))) == Device("sim:1")


@pytest.mark.parametrize(("hip", "runtime"), [(None, "cuda"), ("6.4.1", "hip")])
def test_torchs_cuda_is_hip_where_torch_is_built_for_it(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, runtime: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=hip)))
    asked: list[str] = []

    def parse(text: str) -> None:
        asked.append(text)
        raise UnavailableError(text)

    monkeypatch.setattr(registry, "parse_device", parse)
    with pytest.raises(UnavailableError):
        Device(SimpleNamespace(type="cuda", index=1))
    assert asked == [f"{runtime}:1"]


def test_torchs_cpu_device_is_cpu() -> None:
    need("torch")
    import torch

    assert Device(torch.device("cpu")).name == Device(torch.device("cpu", 0)).name == "cpu"
    with pytest.raises(ArgumentError, match="device 'meta'"):
        Device(torch.device("meta"))


def test_facts_and_powers_come_from_the_runtime() -> None:
    assert Device("cpu").capabilities.host_addressable
    assert not Device("sim:0").capabilities.host_addressable
    assert Device("sim:0").info.name


@pytest.mark.parametrize("kind", ["device", "pinned", "managed", MemoryKind.PINNED])
def test_allocate_takes_a_kind(kind: str | MemoryKind) -> None:
    with Device("sim:1").allocate(100, kind=kind) as buffer:
        assert buffer.memory_kind is MemoryKind(kind)
        assert buffer.is_host_accessible == (MemoryKind(kind) is not MemoryKind.DEVICE)


@pytest.mark.parametrize("kind", ["pageable", "vram"])
def test_a_kind_that_cannot_be_allocated_is_named(kind: str) -> None:
    with pytest.raises(ArgumentError, match=kind):
        Device("cpu").allocate(1, kind=kind)


@pytest.mark.parametrize("nbytes", [-1, 1 << 63])
def test_a_size_that_can_never_work_is_named(nbytes: int) -> None:
    with pytest.raises(ArgumentError, match=str(nbytes)):
        Device("cpu").allocate(nbytes)


@pytest.mark.parametrize("nbytes", [1.0, True, "1", None])
def test_a_size_that_is_no_int_is_a_type_error(nbytes: object) -> None:
    with pytest.raises(TypeError, match="nbytes is an int"):
        Device("cpu").allocate(nbytes)  # type: ignore[arg-type]


def test_C98_the_current_device_is_restored() -> None:
    runtime = registry.get("sim")
    assert runtime.current_device() == 0
    device = Device("sim:1")
    with device.allocate(64) as buffer:
        buffer.fill(3, stream=None)
        device.default_stream.sync()
        assert bytes(buffer.numpy()) == b"\3" * 64
        with pytest.raises(RuntimeError), device._current():
            assert runtime.current_device() == 1
            raise RuntimeError
    assert runtime.current_device() == 0


def test_peers_are_of_one_runtime() -> None:
    assert Device("sim:0").can_access_peer("sim:1") == Device("sim:0")._runtime.can_access_peer(0, 1)
    assert not Device("sim:1").can_access_peer("cpu")
