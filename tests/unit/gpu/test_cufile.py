"""cuFile through a double: when it is offered, how it is called, and which of its bytes are evidence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capabilities import need
from nobounce.errors import DeviceError
from nobounce.runtimes.base import DeviceInfo
from nobounce.runtimes.gpu.cufile import Carriers, CuFileDirect, carriers, nvidia_fs_operations

GPU = "0000:06:00.0"


class CuFileError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Double:
    """cuda.bindings.cufile, with one GPU."""

    BoolConfigParameter = SimpleNamespace(PROPERTIES_ALLOW_COMPAT_MODE=1, USE_PCIP2PDMA=7)
    FileHandleType = SimpleNamespace(OPAQUE_FD=1)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.files: dict[int, Any] = {}
        self.answer: Any = None
        self.gpu = SimpleNamespace(
            read_bytes=0, writes_bytes=0, n_posix_reads=0, n_posix_writes=0, n_nvfs_reads=0
        )
        self.open_error: Exception | None = None
        self.posix = 0
        """POSIX operations that a call makes."""
        self.carries: Any = lambda op: None
        """What nvidia-fs does in a call."""

    def OpError(self, code: int) -> Any:
        return SimpleNamespace(name=f"OP_{code}")

    def Descr(self) -> Any:
        made = SimpleNamespace(type=0, handle=SimpleNamespace(fd=-1))
        made.ptr = id(made)
        self.files[made.ptr] = made
        return made

    def StatsLevel3(self) -> Any:
        return SimpleNamespace(ptr=0, num_gpus=1, per_gpu_stats=[self.gpu])

    def driver_open(self) -> None:
        if self.open_error is not None:
            raise self.open_error

    def handle_register(self, descriptor: int) -> int:
        self.calls.append(("register", self.files[descriptor].handle.fd))
        return 1000 + int(self.files[descriptor].handle.fd)

    def read(self, handle: int, address: int, nbytes: int, file_offset: int, offset: int) -> int:
        self.calls.append(("read", handle, address, nbytes, file_offset, offset))
        return self._answer(nbytes, "read_bytes")

    def write(self, handle: int, address: int, nbytes: int, file_offset: int, offset: int) -> int:
        self.calls.append(("write", handle, address, nbytes, file_offset, offset))
        return self._answer(nbytes, "writes_bytes")

    def _answer(self, nbytes: int, counter: str) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return int(self.answer)
        setattr(self.gpu, counter, getattr(self.gpu, counter) + nbytes)
        self.gpu.n_posix_reads += self.posix
        self.carries(counter)
        return nbytes

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with nvidia-fs."""
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia_fs").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def direct(double: Double, root: Path) -> CuFileDirect:
    return CuFileDirect(
        lambda device: DeviceInfo("GPU", pci_bus_id=GPU), root=str(root), bindings=lambda: double
    )


def _p2p(root: Path, size: str) -> None:
    where = root / "sys/bus/pci/devices" / GPU / "p2pmem"
    where.mkdir(parents=True)
    (where / "size").write_text(size)


def test_carriers(tmp_path: Path, root: Path) -> None:
    assert carriers(GPU, str(root)) == Carriers(nvidia_fs=True, p2pdma=False)
    bare = tmp_path / "bare"
    assert not carriers(GPU, str(bare)).any
    (bare / "sys/module/nvidia_fs").mkdir(parents=True)
    assert not carriers(GPU, str(bare)).any, "the module alone, without its driver's files, carries nothing"
    _p2p(bare, "0\n")
    assert not carriers(GPU, str(bare)).any, "a provider of no memory"


def test_p2pdma_with_memory_carries(tmp_path: Path, double: Double) -> None:
    _p2p(tmp_path, "150323855360\n")
    direct = CuFileDirect(
        lambda device: DeviceInfo("GPU", pci_bus_id=GPU), root=str(tmp_path), bindings=lambda: double
    )
    facts = direct.facts(0)
    assert (facts.available, facts.p2p) == (True, "yes")
    assert ("set_parameter_bool", 7, True) in double.calls


def test_without_a_carrier_cufile_is_not_even_loaded(tmp_path: Path) -> None:
    loaded: list[int] = []
    direct = CuFileDirect(
        lambda device: DeviceInfo("GPU", pci_bus_id=GPU),
        root=str(tmp_path),
        bindings=lambda: loaded.append(1),
    )
    facts = direct.facts(0)
    assert (facts.available, facts.code, facts.p2p) == (False, "no-nvidia-fs", "no")
    assert "nvidia-fs" in facts.cure
    assert not loaded
    with pytest.raises(OSError) as caught:
        direct.read(0, 3, 4096, 4096, 0)
    assert caught.value.errno == errno.ENODEV


def test_with_a_carrier_silence_is_forbidden_first(direct: CuFileDirect, double: Double) -> None:
    assert direct.facts(0).available
    assert double.calls[0] == ("set_parameter_bool", 1, False)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("no libcufile.so.0"), "no-cufile-library"), (CuFileError(5011), "no-cufile-driver")],
)
def test_a_cufile_that_does_not_open(
    direct: CuFileDirect, double: Double, error: Exception, code: str
) -> None:
    double.open_error = error
    facts = direct.facts(0)
    assert (facts.available, facts.code) == (False, code)
    assert str(error) in facts.because


def test_bindings_that_are_not_there(root: Path) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'numpy'")

    direct = CuFileDirect(lambda device: DeviceInfo("GPU", pci_bus_id=GPU), root=str(root), bindings=missing)
    assert direct.facts(0).code == "no-cufile-bindings"
    assert "numpy" in direct.facts(0).because


def test_a_file_and_a_buffer_are_registered_once(direct: CuFileDirect, double: Double) -> None:
    direct.facts(0)
    double.calls.clear()
    direct.register_buffer(0x10000, 1 << 20)
    direct.register_buffer(0x10000, 1 << 20)
    assert direct.read(0, 5, 0x10000, 8192, 4096) == 8192
    direct.write(0, 5, 0x10000, 4096, 0)
    direct.deregister_file(5)
    direct.deregister_file(5)
    direct.deregister_buffer(0x10000)
    direct.deregister_buffer(0x10000)
    assert [call for call in double.calls if call[0] != "get_stats_l3"] == [
        ("buf_register", 0x10000, 1 << 20, 0),
        ("register", 5),
        ("read", 1005, 0x10000, 8192, 4096, 0),
        ("write", 1005, 0x10000, 4096, 0, 0),
        ("handle_deregister", 1005),
        ("buf_deregister", 0x10000),
    ]


def test_a_buffer_that_cufile_refuses_is_used_as_it_is(
    direct: CuFileDirect, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        double.calls.append(("buf_register",))
        raise CuFileError(5037)

    direct.facts(0)
    double.calls.clear()
    monkeypatch.setattr(double, "buf_register", refuse, raising=False)
    direct.register_buffer(0x10000, 1 << 40)
    direct.register_buffer(0x10000, 1 << 40)
    direct.deregister_buffer(0x10000)
    assert double.calls == [("buf_register",)]


def test_errors(direct: CuFileDirect, double: Double) -> None:
    direct.facts(0)
    double.answer = -1
    with pytest.raises(OSError) as caught:
        direct.read(0, 5, 0x10000, 4096, 0)
    assert caught.value.errno == errno.EIO
    for answer in (-5011, CuFileError(5011)):
        double.answer = answer
        with pytest.raises(DeviceError) as device:
            direct.read(0, 5, 0x10000, 4096, 0)
        assert (device.value.call, device.value.code, device.value.name) == ("cuFileRead", 5011, "OP_5011")
    double.answer = CuFileError(errno.ENODEV)
    with pytest.raises(OSError) as caught:
        direct.write(0, 5, 0x10000, 4096, 0)
    assert caught.value.errno == errno.ENODEV


STATS = """GDS Version: 1.13.1.3
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.24.3)
Mellanox PeerDirect Supported: False
IO stats: {}, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 0
Active Process: 0
Reads                           : n={} ok={} err=0 readMiB=0 io_state_err=0
Sparse Reads                    : n=0 io=0 holes=0 pages=0
Writes                          : n=7 ok={} err=0 writeMiB=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Mmap                            : n=0 ok=0 err=0 munmap=0
"""


def _nvidia_fs(root: Path, reads: int, writes: int, state: str = "Enabled") -> None:
    (root / "proc/driver/nvidia-fs/stats").write_text(STATS.format(state, reads, reads, writes))


def test_C96_a_call_that_went_through_posix_is_no_direct_call(direct: CuFileDirect, double: Double) -> None:
    direct.facts(0)
    double.posix = 1
    for call in (direct.read, direct.write):
        with pytest.raises(OSError, match="POSIX") as caught:
            call(0, 5, 0x10000, 4096, 0)
        assert caught.value.errno == errno.EREMOTEIO
    double.posix = 0
    assert direct.read(0, 5, 0x10000, 4096, 0) == 4096


def test_nvidia_fs_is_the_independent_witness(direct: CuFileDirect, double: Double, root: Path) -> None:
    direct.facts(0)
    assert nvidia_fs_operations(str(root)) is None
    _nvidia_fs(root, 3, 4, "Disabled")
    assert nvidia_fs_operations(str(root)) is None, "it does not count"
    assert direct.read(0, 5, 0x10000, 4096, 0) == 4096
    _nvidia_fs(root, 3, 4)
    assert nvidia_fs_operations(str(root)) == (3, 4)
    with pytest.raises(OSError, match="nvidia-fs") as caught:
        direct.read(0, 5, 0x10000, 4096, 0)
    assert caught.value.errno == errno.EREMOTEIO
    double.carries = lambda op: _nvidia_fs(root, 3 + (op == "read_bytes"), 4 + (op != "read_bytes"))
    assert direct.read(0, 5, 0x10000, 4096, 0) == 4096
    _nvidia_fs(root, 3, 4)
    assert direct.write(0, 5, 0x10000, 4096, 0) == 4096
    assert nvidia_fs_operations(str(root)) == (3, 5)


def test_a_cufile_that_may_bounce_and_counts_nothing_is_not_offered(
    direct: CuFileDirect, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another library has opened the driver with its compatibility mode on, and this cuFile is too old to count."""

    def refuse(*_: object) -> None:
        raise CuFileError(5026)

    monkeypatch.setattr(double, "set_parameter_bool", refuse, raising=False)
    monkeypatch.setattr(double, "get_stats_l3", refuse, raising=False)
    monkeypatch.setattr(double, "get_parameter_bool", lambda _: True, raising=False)
    assert (direct.facts(0).available, direct.facts(0).code) == (False, "cufile-compat-mode")
    assert "allow_compat_mode" in direct.facts(0).cure


def test_the_double_has_what_the_bindings_have() -> None:
    need("cuda-bindings", "numpy")
    from cuda.bindings import cufile

    descriptor = cufile.Descr()
    descriptor.type, descriptor.handle.fd = int(cufile.FileHandleType.OPAQUE_FD), os.getpid()
    assert int(cufile.FileHandleType.OPAQUE_FD) == Double.FileHandleType.OPAQUE_FD
    assert descriptor.handle.fd == os.getpid()
    assert descriptor.ptr
    names = cufile.BoolConfigParameter
    assert int(names.PROPERTIES_ALLOW_COMPAT_MODE) == Double.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
    assert int(names.USE_PCIP2PDMA) == Double.BoolConfigParameter.USE_PCIP2PDMA
    stats = cufile.StatsLevel3()
    assert int(stats.num_gpus) == 0
    gpu = stats.per_gpu_stats[0]
    for counter in ("read_bytes", "writes_bytes", "n_posix_reads", "n_posix_writes"):
        assert int(getattr(gpu, counter)) == 0
    assert cufile.OpError(5011).name
    for call in ("driver_open", "handle_register", "handle_deregister", "read", "write", "buf_register"):
        assert callable(getattr(cufile, call))
    error = cufile.cuFileError(5011)
    assert int(getattr(error, "status", 0)) == 5011
