"""A GPU runtime that is not there says why, in one sentence, and never at import (HIP rule 81, section 3.1)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capabilities import need
from doubles.hip_bindings import HipDouble
from nobounce.errors import UnavailableError
from nobounce.runtimes import registry
from nobounce.runtimes.gpu import cuda, hip
from nobounce.runtimes.gpu.quirks import QUIRKS, conformance_exceptions
from nobounce.testing import RuntimeTests

DLOPEN = (
    "failed to dlopen 'b'libamdhip64.so'': b'libamdhip64.so: cannot open shared object file: No such file'"
)


def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def _hip_says(count: Callable[[], Any], found: list[str] | None = None) -> str:
    with pytest.raises(UnavailableError) as caught:
        hip.load(SimpleNamespace(hipGetDeviceCount=count, hipMemcpyKind=()), lambda: found or [])
    text = str(caught.value)
    assert text.startswith("hip: unavailable, because ")
    return text


def test_hip_without_a_library() -> None:
    assert "there is no libamdhip64.so" in _hip_says(_raising(RuntimeError(DLOPEN)))


def test_hip_with_a_versioned_library_only() -> None:
    text = _hip_says(
        _raising(RuntimeError(DLOPEN)), ["/lib/libamdhip64.so.5", "/lib/libamdhip64.so.5.2.21153"]
    )
    assert "found, but only as libamdhip64.so.5, which the bindings do not open" in text
    assert "ROCM_PATH" in text


def test_hip_with_a_library_that_cannot_be_opened() -> None:
    text = _hip_says(_raising(RuntimeError("failed to dlopen 'x': libhsa-runtime64.so.1: version mismatch")))
    assert "version mismatch" in text


@pytest.mark.parametrize("code", [100, 101])
def test_hip_without_a_device(code: int) -> None:
    assert "there is no device" in _hip_says(lambda: (code, 0))


def test_hip_with_a_status_nobody_expects() -> None:
    assert "hipGetDeviceCount answers 3 (3)" in _hip_says(lambda: (3, 0))


def test_hip_with_no_device_at_all_but_success() -> None:
    assert "there is no device" in _hip_says(lambda: (0, 0))


_WHAT_A_USER_SEES = """
import nobounce
assert not [d for d in nobounce.devices() if d.name.startswith("hip:")]
print(nobounce.unavailable()["hip"])
try:
    nobounce.Device("hip:0")
except nobounce.UnavailableError as e:
    print(e)
"""


@pytest.mark.serial
def test_debians_runtime_is_found_but_not_opened() -> None:
    need("rocm-bindings", "versioned-hip-library")
    code = _WHAT_A_USER_SEES
    env = {k: v for k, v in os.environ.items() if k not in ("ROCM_PATH", "ROCM_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    sentence = "found, but only as libamdhip64.so.5, which the bindings do not open"
    assert done.stdout.count(sentence) == 2


@pytest.mark.serial
def test_debians_runtime_behind_rocm_path_has_no_device(tmp_path: Path) -> None:
    need("rocm-bindings", "versioned-hip-library")
    library = hip.versioned_libraries()[0]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamdhip64.so").symlink_to(library)
    code = _WHAT_A_USER_SEES + "from nobounce.runtimes.gpu import hip; print(hip.mapped_libraries())"
    env = {**os.environ, "ROCM_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    assert done.stdout.count("there is no device") == 2
    assert os.path.realpath(library) in done.stdout


@pytest.mark.serial
def test_a_mapped_hip_runtime_is_the_one_that_is_opened() -> None:
    """As PyTorch on ROCm brings it: without ROCM_PATH the bindings would look elsewhere, and find none."""
    need("rocm-bindings", "versioned-hip-library")
    code = (
        "import ctypes; from nobounce.runtimes import registry; from nobounce.runtimes.gpu import hip; "
        f"ctypes.CDLL({hip.versioned_libraries()[0]!r}); "
        "print(registry.absent_because('hip')); print(len(hip.mapped_libraries()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "no device" in done.stdout
    assert done.stdout.split()[-1] == "1"


def test_two_hip_runtimes_in_a_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need("rocm-bindings")
    monkeypatch.setattr(hip, "mapped_libraries", lambda: ["/a/libamdhip64.so", "/b/libamdhip64.so"])
    with pytest.raises(UnavailableError, match=r"two HIP runtimes already: /a/libamdhip64.so and /b/"):
        hip.create()


def test_mapped_libraries_reads_the_maps(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 08:01 123    "
    maps.write_text(
        f"{line}/opt/my torch/lib/libamdhip64.so\n{line}/opt/my torch/lib/libamdhip64.so\n{line}/lib/libc.so.6\n"
        f"{line}/tmp/notlibamdhip64.so\n7f02-7f03 rw-p 00000000 00:00 0\n"
    )
    assert hip.mapped_libraries(str(maps)) == ["/opt/my torch/lib/libamdhip64.so"]
    assert hip.mapped_libraries(str(tmp_path / "none")) == []


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for create, package, module in (
        (hip.create, "nobounce[rocm]", "rocm.bindings.hip"),
        (cuda.create, "nobounce[cuda]", "cuda.bindings.driver"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UnavailableError, match=r"pip install nobounce\[(rocm|cuda)\]") as caught:
            create()
        assert package in str(caught.value)


class _Status(int):
    name = "CUDA_ERROR_X"


def _cuda_says(init: Callable[[int], Any], count: tuple[Any, ...] = (0, 0)) -> str:
    driver = SimpleNamespace(
        cuInit=init,
        CUpointer_attribute=SimpleNamespace(
            **{f"CU_POINTER_ATTRIBUTE_{n}": 1 for n in cuda.POINTER_ATTRIBUTES}
        ),
        cuDriverGetVersion=lambda: (0, 12040),
    )
    runtime = SimpleNamespace(
        cudaGetDeviceCount=lambda: count,
        cudaGetErrorString=lambda status: (0, b"the text"),
        cudaGetLastError=lambda: (0,),
        getLocalRuntimeVersion=lambda: (0, 13010),
        cudaError_t=_Status,
    )
    with pytest.raises(UnavailableError) as caught:
        cuda.load(driver, runtime)
    assert str(caught.value).startswith("cuda: unavailable, because ")
    return str(caught.value)


def test_cuda_without_a_driver() -> None:
    assert "libcuda.so.1 cannot be loaded" in _cuda_says(lambda _: _raising(RuntimeError("not found"))())


def test_cuda_without_a_device() -> None:
    assert "there is no device" in _cuda_says(lambda _: (_Status(100),))
    assert "there is no device" in _cuda_says(lambda _: (_Status(0),), (_Status(100), None))


def test_cuda_with_a_driver_that_is_too_old() -> None:
    text = _cuda_says(lambda _: (_Status(0),), (_Status(35), None))
    assert "the driver supports CUDA 12.4 and the installed cuda-bindings need 13.1" in text


def test_cuda_with_a_broken_driver() -> None:
    assert "cuInit answers CUDA_ERROR_X (999): the text" in _cuda_says(lambda _: (_Status(999),))


def test_importing_loads_no_library() -> None:
    code = (
        "import sys; import nobounce.runtimes.gpu.cuda, nobounce.runtimes.gpu.hip; "
        "print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'rocm', 'numpy', 'torch', 'amdsmi')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_interop_package_is_never_imported() -> None:
    sources = (Path(hip.__file__).parent / f"{name}.py" for name in ("hip", "cuda", "cufile", "amdfile"))
    for source in sources:
        assert 'import_module("hip' not in source.read_text()
        assert "rocm.bindings.hipfile" not in source.read_text()


def test_quirks_name_tests_that_exist() -> None:
    for quirk in QUIRKS:
        assert quirk.runtime in registry.NAMES
        for test in quirk.tests:
            assert callable(getattr(RuntimeTests, test)), test
    assert conformance_exceptions("hip") == frozenset(), "the double keeps every rule"


def test_an_old_library_lacks_a_symbol_only_when_it_is_called() -> None:
    double = HipDouble()
    runtime = hip.load(double)

    class Old:
        def __getattr__(self, name: str) -> Any:
            if name == "hipLaunchHostFunc":
                return lambda *args: _raising(RuntimeError("failed to dlsym 'hipLaunchHostFunc'"))()
            return getattr(double, name)

    runtime = hip.load(Old())
    s = runtime.stream_create(0)
    with pytest.raises(Exception, match="failed to dlsym 'hipLaunchHostFunc'") as caught:
        runtime.host_call(s, lambda: None)
    assert caught.value.status.name == "NotSupported"  # type: ignore[attr-defined]
    runtime.stream_sync(s)
