"""K15, statistics: hipFile F-1 to F-17."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

import pytest

import hipfile_rig
from hipfile_rig import BLOCK, OK, Rig, fails, pattern
from nobounce import config, hipfile
from nobounce.errors import ArgumentError, FileError, FileMissingError
from nobounce.io import hooks
from nobounce.observe import export, start
from nobounce.observe.attach import attach
from nobounce.observe.report_text import report
from nobounce.observe.snapshot import Stats, stats

SPAN = 4 * BLOCK


@pytest.fixture(autouse=True)
def counting_afresh() -> Iterator[None]:
    start.reset()
    yield
    start.reset()


@pytest.fixture
def moved(rig: Rig) -> Rig:
    """Two reads and a write of 16 KiB, and a read that is not aligned; on fastpath but for the last."""
    handle, memory = rig.file(pattern(8 * SPAN)), rig.memory(8 * SPAN)
    for offset in (0, SPAN):
        assert hipfile.read(handle, memory.handle, SPAN, offset, 0) == SPAN
    assert hipfile.write(handle, memory.handle, SPAN, 0, 0) == SPAN
    assert hipfile.read(handle, memory.handle, 100, 1, 0) == 100
    return rig


def test_K191_operations_are_added_per_backend_and_direction(moved: Rig) -> None:
    s = stats()
    direct, relayed = s.flow(backend="fastpath", op="read"), s.flow(backend="fallback", op="read")
    assert (direct.operations, direct.nbytes, direct.unaligned) == (2, 2 * SPAN, 0)
    assert (relayed.operations, relayed.nbytes, relayed.unaligned) == (1, 100, 1)
    assert direct.operations_by_size[3] == 2
    assert relayed.operations_by_size[0] == 1
    assert s.flow(backend="fastpath", op="write").nbytes == SPAN
    assert s.flow(backend="fallback", op="write").operations == 0
    assert s.devices == (moved.device.name,)


def test_K191_level_0_counts_nothing_and_starts_nothing(rig: Rig) -> None:
    hipfile_rig.settings(stats_level=0)
    handle, memory = rig.file(pattern(SPAN)), rig.memory(SPAN)
    assert hipfile.read(handle, memory.handle, SPAN, 0, 0) == SPAN
    assert start.counters() is None
    assert hooks.observers == ()
    assert export.NAME not in " ".join(_links())
    assert stats() == Stats(level=0, pids=(os.getpid(),))


def test_K191_errors_count_by_the_bytes_asked_for(rig: Rig) -> None:
    handle, memory = rig.file(pattern(SPAN), os.O_RDONLY), rig.memory(SPAN)
    assert hipfile.write(handle, memory.handle, SPAN, 0, 0) < 0
    assert stats().flow(op="write").errors_by_size[3] == 1


def _links() -> dict[str, int]:
    """What this process has open, by name."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{fd}")] = fd
    return found


def test_K192_the_counters_can_be_seen_while_the_process_counts(moved: Rig) -> None:
    fd = _links()[f"/memfd:{export.NAME} (deleted)"]
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & export.SEALS == export.SEALS
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with attach(os.getpid()) as reader:
        assert reader.read().fastpath_bytes == 3 * SPAN
        start.reset()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert (
            reader.read().fastpath_bytes == 3 * SPAN
        )  # the reader's descriptor outlives the writer's (F-10)
    with pytest.raises(FileError, match="has no statistics"):
        attach(os.getpid())


def test_K193_the_report_contains_the_values(moved: Rig) -> None:
    text = report(stats())
    for line in (
        "Statistics level: 1",
        f"Total Fastpath read size (B): {2 * SPAN}",
        f"Total Fastpath write size (B): {SPAN}",
        "Total Fallback read size (B): 100",
        "Total Fallback read unaligned: 1",
        "Total Fallback write errors: 0",
        "Fastpath rejections: 1",
        "File registrations: 1",
        f"Device {moved.device.name}:",
        "Unaligned Fallback read: 1",
    ):
        assert line in text, line
    rows = [line.split() for line in text.splitlines() if line.startswith("16-32 ")]
    assert rows[0] == ["16-32", str(2 * SPAN), str(SPAN), "0", "0"]
    assert "65536-..." in text


def test_K194_attaching_refuses_what_is_no_process(moved: Rig) -> None:
    for pid in (0, -1):
        with pytest.raises(ArgumentError):
            attach(pid)
    with pytest.raises(FileMissingError):
        attach((1 << 22) + 1)
    with attach(os.getpid()) as reader:
        assert reader.read().pids == (os.getpid(),)


def test_K195_l1_null_and_no_server() -> None:
    assert hipfile.get_stats_l1(None) == fails(5022)
    hipfile_rig.settings(stats_level=0)
    assert hipfile.get_stats_l1(hipfile.StatsL1()) == fails(5030)


def test_K195_l1_is_zero_before_any_io() -> None:
    out = hipfile.StatsL1(read_bytes=7)
    assert hipfile.get_stats_l1(out) == OK
    assert out == hipfile.StatsL1()


def test_K195_l1_adds_everything_up(moved: Rig) -> None:
    handle, memory = moved.file(pattern(SPAN), os.O_RDONLY), moved.registered(SPAN)
    assert hipfile.write(handle, memory.handle, SPAN, 0, 0) < 0
    assert hipfile.buf_deregister(memory.handle) == OK
    assert hipfile.buf_deregister(memory.handle) == fails(5024)
    out = hipfile.StatsL1()
    assert hipfile.get_stats_l1(out) == OK
    assert (out.read_ops, out.write_ops) == (hipfile.OpCounter(3, 0), hipfile.OpCounter(1, 1))
    assert (out.read_bytes, out.write_bytes) == (2 * SPAN + 100, SPAN)
    assert out.hdl_register_ops == hipfile.OpCounter(2, 0)
    assert out.buf_register_ops == hipfile.OpCounter(1, 0)
    assert out.buf_deregister_ops == hipfile.OpCounter(1, 1)
    assert out.read_lat_sum_us > 0
    assert out.read_lat_avg_us == out.read_lat_sum_us // 3
    assert out.read_bw_bytes_per_sec == out.read_bytes * 1_000_000 // out.read_lat_sum_us


def test_K195_l1_asynchronous_transfers_count_too(rig: Rig) -> None:
    handle, memory, done = rig.file(pattern(SPAN)), rig.memory(SPAN), hipfile.Cell()
    stream = rig.stream()
    assert hipfile.read_async(handle, memory.handle, SPAN, 0, 0, done, stream) == OK
    rig.sync(stream)
    out = hipfile.StatsL1()
    assert hipfile.get_stats_l1(out) == OK
    assert (out.read_ops.ok, out.read_bytes) == (1, SPAN)


def test_K196_l2_has_the_basic_figures_and_as_published_empty_histograms(moved: Rig) -> None:
    out, basic = hipfile.StatsL2(), hipfile.StatsL1()
    hipfile_rig.settings(profile=config.PUBLISHED)
    assert hipfile.get_stats_l2(out) == OK
    assert hipfile.get_stats_l1(basic) == OK
    assert out.basic == basic
    assert basic.read_ops_per_sec == 0
    assert basic.hdl_deregister_ops == hipfile.OpCounter()
    assert out.read_size_kb_hist == out.write_size_kb_hist == [0] * 32


def test_K196_l2_fills_what_hipfile_leaves_empty(moved: Rig) -> None:
    out = hipfile.StatsL2()
    assert hipfile.get_stats_l2(out) == OK
    assert (out.read_size_kb_hist[0], out.read_size_kb_hist[3]) == (1, 2)
    assert out.write_size_kb_hist[3] == 1
    assert len(out.read_size_kb_hist) == 32


def test_K196_l3_tells_devices_apart(moved: Rig) -> None:
    out = hipfile.StatsL3()
    assert hipfile.get_stats_l3(out) == OK
    assert (out.num_gpus, len(out.per_gpu_stats)) == (1, 16)
    gpu = out.per_gpu_stats[0]
    assert (gpu.read_bytes, gpu.writes_bytes) == (2 * SPAN + 100, SPAN)
    assert (gpu.n_total_reads, gpu.n_nvfs_reads, gpu.n_posix_reads) == (3, 2, 1)
    assert (gpu.n_unaligned_reads, gpu.n_reads_err, gpu.n_p2p_reads) == (1, 0, 0)
    assert gpu.uuid != bytes(16)
    assert out.per_gpu_stats[1] == hipfile.PerGpuStats()


def test_the_buffers_device_counts_not_the_threads(rig: Rig) -> None:
    """J-13: the published library takes the thread's current device."""
    from nobounce.device import Device

    other = Device("sim:1")
    handle, memory = rig.file(pattern(SPAN)), rig.memory(SPAN, device=other)
    with rig.device._current():
        assert hipfile.read(handle, memory.handle, SPAN, 0, 0) == SPAN
    assert stats().devices == ("sim:1",)
