"""Names of runtimes and devices."""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import pytest

from nobounce import config
from nobounce.errors import ArgumentError, UnavailableError
from nobounce.runtimes import registry
from nobounce.runtimes.host.sim import SimRuntime


def test_there_is_one_of_each() -> None:
    assert registry.get("cpu") is registry.get("cpu")
    made = []
    threads = [threading.Thread(target=lambda: made.append(registry.get("sim"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(map(id, made))) == 1


@pytest.mark.parametrize(
    ("text", "name", "ordinal"),
    [("cpu", "cpu", 0), ("cpu:0", "cpu", 0), ("sim", "sim", 0), ("sim:1", "sim", 1)],
)
def test_device_names(text: str, name: str, ordinal: int) -> None:
    runtime, found = registry.parse_device(text)
    assert (runtime.name, found) == (name, ordinal)


@pytest.mark.parametrize("text", ["gpu", "", "sim:", "sim:x", "sim:-1", "sim:²", "cpu:0:1", "SIM:0", " cpu"])
def test_a_name_that_means_nothing_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"choose cpu, sim:0, sim:1"):
        registry.parse_device(text)


def test_a_number_too_high_is_refused_with_the_choices() -> None:
    with pytest.raises(ArgumentError, match=r"'sim:7': there is only sim:0, sim:1"):
        registry.parse_device("sim:7")
    with pytest.raises(ArgumentError, match=r"'cpu:1': there is only cpu$"):
        registry.parse_device("cpu:1")


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(ArgumentError, match="choose one of cpu, sim, cuda, hip"):
        registry.get("metal")


def test_sim_has_as_many_devices_as_the_setting_says() -> None:
    config.override(config.Settings(sim_devices=5))
    assert SimRuntime().device_count() == 5


class Absent:
    """A vendor's module whose library says no, in one of the ways of HIP rule 81."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, create: object) -> None:
        module = types.ModuleType("nobounce.runtimes.gpu.cuda")
        module.create = create  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nobounce.runtimes.gpu.cuda", module)
        monkeypatch.setattr(registry, "_instances", {})


def test_rule_81_absence_has_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> SimRuntime:
        raise UnavailableError("cuda: libcuda.so.1 cannot be opened")

    Absent(monkeypatch, no_library)
    assert registry.absent_because("cuda") == "cuda: libcuda.so.1 cannot be opened"
    with pytest.raises(UnavailableError, match="libcuda"):
        registry.parse_device("cuda:0")
    Absent(monkeypatch, lambda: SimRuntime(devices=0))
    assert registry.absent_because("cuda") == "cuda: no device"
    with pytest.raises(UnavailableError, match="no device"):
        registry.parse_device("cuda:0")
    assert registry.absent_because("sim") == ""


def test_a_runtime_whose_module_is_missing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_instances", {})
    monkeypatch.setitem(sys.modules, "nobounce.runtimes.gpu.hip", None)
    with pytest.raises(UnavailableError, match="hip"):
        registry.get("hip")


def test_the_host_runtimes_load_no_numpy() -> None:
    program = (
        "import sys; from nobounce.runtimes.registry import get; get('cpu'); get('sim');"
        "print([m for m in ('numpy', 'torch', 'rich', 'typer') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
