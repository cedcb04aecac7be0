"""K17, K18: the bindings' classes, descriptors, version, stress, dispatch."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from typing import Any

import pytest

from doubles.hip_bindings import HipDouble, Pointer
from hipfile_rig import BLOCK, OK, Rig, fails, get, in_threads, pattern, settings
from nobounce import hipfile
from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.hipfile import bindings
from nobounce.hipfile.driver import STATE
from nobounce.runtimes.gpu import amdfile, hip
from nobounce.testing.faults import inject


class TestK210:
    """The classes of the published Python bindings (H-1 to H-8)."""

    def test_K210_driver(self) -> None:
        driver = hipfile.Driver()
        with driver:
            assert hipfile.Driver.use_count() == 1
        assert driver.use_count() == 0
        with pytest.raises(hipfile.HipFileException) as caught:
            driver.close()
        assert (caught.value.hipfile_err, caught.value.hip_err) == (5001, 0)
        assert str(caught.value).startswith("5001 - ")

    def test_K210_buffer(self, rig: Rig) -> None:
        memory = rig.memory(BLOCK)
        buffer = hipfile.Buffer(memory.handle, BLOCK, 0)
        buffer.deregister()
        with buffer:
            assert memory.handle in STATE.buffers
            with pytest.raises(hipfile.HipFileException, match="5023"):
                hipfile.Buffer(memory.handle, BLOCK).register()
        assert memory.handle not in STATE.buffers
        assert hipfile.Buffer.from_ctypes_void_p(ctypes.c_void_p(memory.handle), BLOCK).ptr == memory.handle
        with pytest.raises(ValueError, match="null"):
            hipfile.Buffer.from_ctypes_void_p(ctypes.c_void_p(None), BLOCK)

    def test_K210_file(self, rig: Rig) -> None:
        path = rig.path()
        path.write_bytes(pattern(BLOCK))
        memory = rig.memory(BLOCK)
        buffer = hipfile.Buffer(memory.handle, BLOCK)
        file = hipfile.FileHandle(path, os.O_RDWR)
        assert (file.path, file.flags, file.mode, file.handle) == (path, os.O_RDWR, 0o644, None)
        for call in (file.read, file.write):
            with pytest.raises(RuntimeError, match="not open"):
                call(buffer, BLOCK, 0, 0)
        with file:
            assert file.handle in STATE.files
            with pytest.raises(RuntimeError, match="is open"):
                file.open()
            with pytest.raises(RuntimeError, match="is open"):
                file.handle_type = hipfile.FileHandleType.USERSPACE_FS
            assert file.read(buffer, BLOCK, 0, 0) == BLOCK
            assert get(memory) == pattern(BLOCK)
            assert file.write(buffer, BLOCK, BLOCK, 0) == BLOCK
        assert path.read_bytes() == pattern(BLOCK) * 2
        file.close()
        assert file.handle is None

    def test_K210_oserror_or_hipfile_exception(self, rig: Rig) -> None:
        path = rig.path()
        path.write_bytes(pattern(BLOCK))
        memory = rig.memory(BLOCK)
        buffer = hipfile.Buffer(memory.handle, BLOCK)
        with hipfile.FileHandle(path, os.O_RDONLY) as file:
            with pytest.raises(OSError, match="Invalid argument") as os_error:
                file.read(buffer, BLOCK, -1, 0)
            assert os_error.value.errno == errno.EINVAL
            with pytest.raises(hipfile.HipFileException, match="5022"):
                file.read(buffer, BLOCK + 1, 0, 0)
            with pytest.raises(OSError, match="Bad file descriptor"):
                file.write(buffer, BLOCK, 0, 0)

    def test_K210_a_failed_registration_closes_the_fd(self, rig: Rig, fd_guard: None) -> None:
        path = rig.path()
        path.write_bytes(b"")
        file = hipfile.FileHandle(path, os.O_RDWR, handle_type=hipfile.FileHandleType.USERSPACE_FS)
        with pytest.raises(hipfile.HipFileException, match="5008"):
            file.open()
        with pytest.raises(FileNotFoundError):
            hipfile.FileHandle(rig.folder / "none", os.O_RDONLY).open()

    def test_K210_handle_types(self, rig: Rig) -> None:
        file = hipfile.FileHandle(rig.path(), os.O_RDWR)
        assert file.handle_type is hipfile.FileHandleType.OPAQUE_FD
        file.handle_type = 3
        assert file.handle_type is hipfile.FileHandleType.USERSPACE_FS
        with pytest.raises(ValueError, match="99"):
            file.handle_type = 99
        with pytest.raises(NotImplementedError):
            file.handle_type = hipfile.FileHandleType.OPAQUE_WIN32

    def test_K210_deleting_an_open_file_closes_it(self, rig: Rig, fd_guard: None) -> None:
        path = rig.path()
        path.write_bytes(b"")
        file = hipfile.FileHandle(path, os.O_RDWR)
        file.open()
        handle = file.handle
        del file
        gc.collect()
        assert handle not in STATE.files

    def test_K210_stream_and_async(self, rig: Rig) -> None:
        assert hipfile.supports_async()
        path = rig.path()
        path.write_bytes(pattern(2 * BLOCK))
        memory, handle = rig.memory(BLOCK), rig.stream()
        stream = hipfile.Stream(handle, 0)
        with stream, hipfile.FileHandle(path, os.O_RDWR) as file:
            assert stream.registered
            stream.register()
            with rig.held(handle):
                io = file.read_async(hipfile.Buffer(memory.handle, BLOCK), BLOCK, 0, 0, stream.handle)
                io.file_offset = BLOCK
            rig.sync(handle)
            assert (io.bytes_done, io.size, io.file_offset, io.buffer_offset) == (BLOCK, BLOCK, BLOCK, 0)
            with pytest.raises(hipfile.HipFileException, match="5022"):
                file.write_async(hipfile.Buffer(memory.handle, BLOCK), BLOCK + 1, 0, 0, stream.handle)
        assert not stream.registered
        stream.deregister()
        assert get(memory) == pattern(2 * BLOCK)[BLOCK:]

    def test_K210_enums_errors_and_properties(self) -> None:
        assert bindings.get_version() == (0, 5, 0)
        assert bindings.__version__ == "0.5.0"
        assert bindings.driver_get_properties().max_batch_io_count == 128
        settings(profile="hipfile-0.5")
        with pytest.raises(hipfile.HipFileException, match="5030"):
            bindings.driver_get_properties()
        assert "HIP error 2" in str(hipfile.HipFileException(5011, 2))
        assert hipfile.OpError.HANDLE_ALREADY_REGISTERED == 5028
        assert [int(t) for t in hipfile.FileHandleType] == [1, 2, 3]


def test_K211_descriptors_are_owned_by_one_and_closed_once(rig: Rig, fd_guard: None) -> None:
    paths = [rig.path() for _ in range(8)]
    for _ in range(20):
        fds = []
        for path in paths:
            path.write_bytes(b"")
            fds.append(os.open(path, os.O_RDWR))
        handles = [rig.file_of(fd) for fd in fds]
        for handle in handles[:4]:
            hipfile.handle_deregister(handle)
        hipfile.driver_close()
        for fd in fds:
            os.close(fd)  # EBADF here would mean that the library closed it


class TestK212:
    """hipAmdFileRead and hipAmdFileWrite, asked of a HIP runtime that answers as it is told; the simulated device is below."""

    class Runtime(HipDouble):
        answer: Any = None
        version: Any = (70_000_000,)

        def hipRuntimeGetVersion(self) -> Any:
            if isinstance(self.version, Exception):
                raise self.version
            return self.version

        def hipGetProcAddress(self, symbol: Any, version: int, flags: int) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    NEVER = ctypes.cast(amdfile.PROTOTYPE(lambda *_: pytest.fail("called")), ctypes.c_void_p).value
    REFUSED = DeviceError("hipGetProcAddress", RuntimeStatus.InvalidValue)

    @pytest.mark.parametrize(
        ("answer", "version"),
        [
            ((None, 0), (70_000_000,)),
            ((None, 1), (70_000_000,)),
            ((Pointer(NEVER or 0), 1), (70_000_000,)),
            ((Pointer(NEVER or 0), 2), (70_000_000,)),
            (REFUSED, (70_000_000,)),
            (RuntimeError("the library has no hipGetProcAddress"), (70_000_000,)),
            ((Pointer(NEVER or 0), 0), REFUSED),
        ],
        ids=["null", "not-found", "not-found-yet-an-address", "too-old", "error", "no-lookup", "no-version"],
    )
    def test_K212_a_failed_lookup_is_a_refusal_and_nothing_is_called(self, answer: Any, version: Any) -> None:
        library = self.Runtime()
        library.answer, library.version = answer, version
        direct = hip.load(library).direct_io()
        assert direct is not None
        facts = direct.facts(0)
        assert (facts.available, facts.code) == (False, "no-amd-file-calls")
        assert all(name in facts.because for name in amdfile.NAMES)
        for call in (direct.read, direct.write):
            with pytest.raises(OSError, match="no such function") as caught:
                call(0, 0, BLOCK, BLOCK, 0)
            assert caught.value.errno == errno.ENODEV

    def test_K212_a_successful_lookup_is_not(self) -> None:
        library = self.Runtime()
        library.answer = Pointer(self.NEVER or 0), 0
        direct = hip.load(library).direct_io()
        assert direct is not None
        assert direct.facts(0).available


def test_K213_version() -> None:
    assert hipfile.get_version() == (OK, (0, 5, 0))


def test_K214_ten_threads_on_the_state(rig: Rig) -> None:
    data = pattern(BLOCK)
    fds = [rig.fd(data) for _ in range(10)]
    memory = rig.memory(10 * BLOCK)
    hipfile.driver_open()

    def churn(i: int) -> None:
        address, stream = memory.handle + i * BLOCK, rig.stream()
        for n in range(30):
            error, handle = hipfile.handle_register(fds[i])
            assert error == OK
            assert hipfile.buf_register(address, BLOCK) == OK
            assert hipfile.stream_register(stream, n % 16) == OK
            if n % 3 == 0:
                assert hipfile.read(handle, address, BLOCK, 0, 0) == BLOCK
            if n % 5 == 0:
                done = hipfile.Cell()
                assert hipfile.read_async(handle, address, BLOCK, 0, 0, done, stream) == OK
                rig.sync(stream)
                assert done.value == BLOCK
            hipfile.driver_open()
            assert hipfile.stream_deregister(stream) == OK
            assert hipfile.buf_deregister(address) == OK
            hipfile.handle_deregister(handle)
            hipfile.driver_close()

    assert in_threads(10, churn) == []
    assert hipfile.use_count() == 1
    assert get(memory) == data * 10


def test_K215_the_dispatch_table(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hipfile.dispatch_table
    functions = {n for n in hipfile.__all__ if n in table}
    assert functions == set(table)
    assert {"read", "write_async", "batch_io_submit", "driver_open", "score"} <= functions
    seen: list[Any] = []
    real = table["driver_open"]
    monkeypatch.setitem(table, "driver_open", lambda *args: (seen.append(args), real(*args))[1])
    assert hipfile.driver_open() == OK
    assert seen == [()]


class TestStatus:
    """A-1 to A-3."""

    def test_every_code_has_a_text_and_unknown_ones_too(self) -> None:
        texts = {hipfile.op_error_string(code) for code in hipfile.OpError}
        assert len(texts) == len(hipfile.OpError) == 38
        assert hipfile.op_error_string(5021) == "unknown hipFile error 5021"
        assert hipfile.op_error_string(-1).startswith("unknown")
        assert hipfile.get_op_error_string is hipfile.op_error_string

    def test_macros(self) -> None:
        assert [hipfile.is_hipfile_err(x) for x in (0, -1, 5000, 5001, -5022)] == [
            False,
            False,
            False,
            True,
            True,
        ]
        assert hipfile.hipfile_errstr(-5022) == hipfile.op_error_string(5022)
        assert hipfile.is_hip_drv_err(fails(5011, 7))
        assert not hipfile.is_hip_drv_err(fails(5022))
        assert hipfile.hip_drv_err(fails(5011, 7)) == 7

    def test_an_error_is_true_and_success_is_not(self) -> None:
        assert not OK
        assert fails(5022)
        assert OK == (0, 0)
        assert str(fails(5011, 2)).endswith("(HIP error 2)")

    def test_errno_is_the_threads_own(self, rig: Rig) -> None:
        handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
        with inject(op="read", device="sim:0", error=errno.EIO):
            assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == -1
        others: list[int] = []
        assert in_threads(1, lambda i: others.append(hipfile.last_errno())) == []
        assert (hipfile.last_errno(), others) == (errno.EIO, [0])


def test_flags_and_enums_have_the_published_numbers() -> None:
    """A-6 to A-12."""
    assert [int(s) for s in hipfile.Status] == [1, 2, 4, 8, 16, 32, 64]
    assert (
        hipfile.STREAM_FLAGS_MASK
        == 15
        == sum(
            (
                hipfile.STREAM_FIXED_BUF_OFFSET,
                hipfile.STREAM_FIXED_FILE_OFFSET,
                hipfile.STREAM_FIXED_FILE_SIZE,
                hipfile.STREAM_PAGE_ALIGNED_INPUTS,
            )
        )
    )
    assert [int(f) for f in hipfile.DriverStatusFlags] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12]
    assert [len(e) for e in (hipfile.SizeTParameter, hipfile.BoolParameter, hipfile.StringParameter)] == [
        12,
        12,
        3,
    ]
    assert hipfile.MAX_RW_COUNT == 2_147_479_552
    assert hipfile.RDMAInfo(1, "abc").desc_len == 3


def test_a_pipe_is_registered_and_fails_when_used(rig: Rig) -> None:
    reader, writer = os.pipe()
    try:
        handle, memory = rig.file_of(reader), rig.memory(BLOCK)
        assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == -1
        assert hipfile.last_errno() == errno.ESPIPE
    finally:
        hipfile.driver_close()
        os.close(reader)
        os.close(writer)
