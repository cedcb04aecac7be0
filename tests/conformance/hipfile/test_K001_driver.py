"""K1: the driver and its use count."""

from __future__ import annotations

import errno
import os

from hipfile_rig import BLOCK, OK, Rig, fails, in_threads, settings
from nobounce import hipfile


def test_K001_open_ten_times_counts_one_to_ten() -> None:
    for i in range(1, 11):
        assert hipfile.driver_open() == OK
        assert hipfile.use_count() == i


def test_K002_close_ten_times_counts_down() -> None:
    for _ in range(10):
        hipfile.driver_open()
    for i in range(9, -1, -1):
        assert hipfile.driver_close() == OK
        assert hipfile.use_count() == i


def test_K003_close_at_zero_is_5001() -> None:
    assert hipfile.driver_close() == fails(5001)
    assert hipfile.use_count() == 0


def test_K004_handle_register_opens_the_driver(rig: Rig) -> None:
    rig.file()
    assert hipfile.use_count() == 1
    rig.file()
    assert hipfile.use_count() == 1


def test_K005_null_descr_is_5022_and_opens_nothing() -> None:
    assert hipfile.handle_register(None) == (fails(5022), None)
    assert hipfile.use_count() == 0


def test_K006_null_handle_is_5022_and_opens_nothing(rig: Rig) -> None:
    assert hipfile.handle_register(rig.fd(), None) == (fails(5022), None)
    assert hipfile.use_count() == 0
    place = hipfile.Cell()
    error, handle = hipfile.handle_register(rig.fd(), place)
    assert (error, handle) == (OK, place.value)


def test_K007_open_after_register_counts_two(rig: Rig) -> None:
    rig.file()
    hipfile.driver_open()
    assert hipfile.use_count() == 2


def test_K008_64_threads_registering_files_count_one(rig: Rig) -> None:
    fds = [rig.fd() for _ in range(64)]
    handles: list[int | None] = []
    assert in_threads(64, lambda i: handles.append(hipfile.handle_register(fds[i])[1])) == []
    assert hipfile.use_count() == 1
    assert len(set(handles)) == 64
    assert None not in handles


def test_K009_64_threads_registering_buffers_count_one(rig: Rig) -> None:
    memory = rig.memory(64 * BLOCK)
    errors: list[hipfile.Error] = []
    register = lambda i: errors.append(hipfile.buf_register(memory.handle + i * BLOCK, BLOCK))  # noqa: E731
    assert in_threads(64, register) == []
    assert errors == [OK] * 64
    assert hipfile.use_count() == 1


def test_K010_close_deregisters_files(rig: Rig) -> None:
    fd = rig.fd()
    rig.file_of(fd)
    assert hipfile.handle_register(fd)[0] == fails(5028)
    hipfile.driver_close()
    assert hipfile.handle_register(fd)[0] == OK


def test_K011_close_deregisters_buffers(rig: Rig) -> None:
    memory = rig.registered(BLOCK)
    assert hipfile.buf_register(memory.handle, BLOCK) == fails(5023)
    hipfile.driver_close()
    assert hipfile.buf_register(memory.handle, BLOCK) == OK


def test_K012_buf_register_null_is_5022_and_opens_the_driver() -> None:
    assert hipfile.buf_register(None, BLOCK) == fails(5022)
    assert hipfile.use_count() == 1


def test_K013_read_async_all_null_is_5022_and_opens_the_driver() -> None:
    assert hipfile.read_async(None, None, None, None, None, None) == fails(5022)
    assert hipfile.use_count() == 1


def test_K014_write_async_all_null_is_5022_and_opens_the_driver(rig: Rig) -> None:
    assert hipfile.write_async(None, None, None, None, None, None) == fails(5022)
    assert hipfile.use_count() == 1
    hipfile.driver_close()
    memory = rig.memory(BLOCK)
    assert hipfile.write_async(1, memory.handle, BLOCK, 0, 0, hipfile.Cell()) == fails(5022)
    assert hipfile.use_count() == 1


def test_K015_read_and_write_uninitialised_are_einval(rig: Rig) -> None:
    memory = rig.memory(BLOCK)
    for call in (hipfile.read, hipfile.write):
        assert call(1, memory.handle, BLOCK, 0, 0) == -1
        assert hipfile.last_errno() == errno.EINVAL
    assert hipfile.use_count() == 0


def test_K016_buf_deregister_uninitialised_is_5006(rig: Rig) -> None:
    assert hipfile.buf_deregister(rig.memory(BLOCK).handle) == fails(5006)
    assert hipfile.use_count() == 0


def test_K017_handle_deregister_uninitialised_is_harmless() -> None:
    for handle in (None, 0, 12345):
        hipfile.handle_deregister(handle)
    assert hipfile.use_count() == 0


def test_K018_stream_calls_leave_the_count_at_zero(rig: Rig) -> None:
    stream = rig.stream(0)
    assert hipfile.stream_deregister(stream) == OK
    assert hipfile.use_count() == 0


def test_K019_batch_calls_leave_the_count_at_zero() -> None:
    error, batch = hipfile.batch_io_setup(4)
    assert error == OK
    assert hipfile.batch_io_submit(batch, 1, [hipfile.IOParams()]) == fails(5030)
    assert hipfile.batch_io_get_status(batch, 0, 1, 0) == (OK, [])
    assert hipfile.batch_io_cancel(batch) == OK
    hipfile.batch_io_destroy(batch)
    assert hipfile.use_count() == 0


def test_K020_get_version_needs_no_driver() -> None:
    error, version = hipfile.get_version()
    assert error == OK
    assert version == (0, 5, 0)
    assert hipfile.use_count() == 0


def _parameter_calls() -> list[hipfile.Error]:
    return [
        hipfile.driver_get_properties()[0],
        hipfile.driver_set_poll_mode(True, 4),
        hipfile.driver_set_max_direct_io_size(64),
        hipfile.driver_set_max_cache_size(4),
        hipfile.driver_set_max_pinned_mem_size(4),
        hipfile.get_parameter_size_t(hipfile.SizeTParameter.PROFILE_STATS)[0],
        hipfile.get_parameter_bool(hipfile.BoolParameter.PROFILE_NVTX)[0],
        hipfile.get_parameter_string(hipfile.StringParameter.LOG_DIR)[0],
        hipfile.set_parameter_size_t(hipfile.SizeTParameter.PROFILE_STATS, 1),
        hipfile.set_parameter_bool(hipfile.BoolParameter.PROFILE_NVTX, True),
        hipfile.set_parameter_string(hipfile.StringParameter.LOG_DIR, os.curdir),
    ]


def test_K021_parameter_and_property_calls_are_5030_in_the_published_profile() -> None:
    settings(profile="hipfile-0.5")
    assert _parameter_calls() == [fails(5030)] * 11
    settings()
    assert _parameter_calls() == [OK] * 11
    assert hipfile.use_count() == 0
