"""Public statistics in cuFile's shape (hipFile F-15 to F-17), filled from nobounce's own counters.

As published: sums over devices and backends; rates are bytes over operation time; 0 where the divisor is
0. Filled here and zero there (J-12): deregistrations, batches, operations per second, size histograms,
uuids. NOBOUNCE_PROFILE=hipfile-0.5 turns these back to zero. Times in microseconds, sizes in bytes,
rates in bytes per second.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from nobounce.device import Device
from nobounce.errors import ConfigError, NobounceError, OpError
from nobounce.hipfile.dispatch import public
from nobounce.hipfile.driver import STATE, published_profile
from nobounce.hipfile.status import SUCCESS, Error
from nobounce.io import hooks
from nobounce.observe import snapshot, start
from nobounce.observe.snapshot import Flow, Stats

MAX_GPUS = 16
HISTOGRAM = 32


@dataclass(slots=True)
class OpCounter:
    """How many calls or operations succeeded, and how many failed."""

    ok: int = 0
    err: int = 0


@dataclass(slots=True)
class StatsL1:
    """Sums over devices and backends."""

    read_ops: OpCounter = field(default_factory=OpCounter)
    write_ops: OpCounter = field(default_factory=OpCounter)
    hdl_register_ops: OpCounter = field(default_factory=OpCounter)
    hdl_deregister_ops: OpCounter = field(default_factory=OpCounter)
    buf_register_ops: OpCounter = field(default_factory=OpCounter)
    buf_deregister_ops: OpCounter = field(default_factory=OpCounter)
    read_bytes: int = 0
    write_bytes: int = 0
    read_bw_bytes_per_sec: int = 0
    write_bw_bytes_per_sec: int = 0
    read_lat_avg_us: int = 0
    write_lat_avg_us: int = 0
    read_ops_per_sec: int = 0
    write_ops_per_sec: int = 0
    read_lat_sum_us: int = 0
    write_lat_sum_us: int = 0
    batch_submit_ops: OpCounter = field(default_factory=OpCounter)
    batch_complete_ops: OpCounter = field(default_factory=OpCounter)
    batch_setup_ops: OpCounter = field(default_factory=OpCounter)
    batch_cancel_ops: OpCounter = field(default_factory=OpCounter)
    batch_destroy_ops: OpCounter = field(default_factory=OpCounter)
    batch_read_bytes: int = 0
    batch_write_bytes: int = 0
    last_batch_read_bytes: int = 0
    last_batch_write_bytes: int = 0


@dataclass(slots=True)
class StatsL2:
    """Level 1, and operations by size: bucket 0 below 4 KiB, each next one twice as
    large, the last used one open."""

    basic: StatsL1 = field(default_factory=StatsL1)
    read_size_kb_hist: list[int] = field(default_factory=lambda: [0] * HISTOGRAM)
    write_size_kb_hist: list[int] = field(default_factory=lambda: [0] * HISTOGRAM)


@dataclass(slots=True)
class PerGpuStats:
    """One device. `n_nvfs_*` are fastpath's operations, `n_posix_*` fallback's."""

    uuid: bytes = bytes(16)
    read_bytes: int = 0
    read_bw_bytes_per_sec: int = 0
    read_utilization: int = 0
    read_duration_us: int = 0
    n_total_reads: int = 0
    n_p2p_reads: int = 0
    n_nvfs_reads: int = 0
    n_posix_reads: int = 0
    n_unaligned_reads: int = 0
    n_dr_reads: int = 0
    n_sparse_regions: int = 0
    n_inline_regions: int = 0
    n_reads_err: int = 0
    writes_bytes: int = 0
    write_bw_bytes_per_sec: int = 0
    write_utilization: int = 0
    write_duration_us: int = 0
    n_total_writes: int = 0
    n_p2p_writes: int = 0
    n_nvfs_writes: int = 0
    n_posix_writes: int = 0
    n_unaligned_writes: int = 0
    n_dr_writes: int = 0
    n_writes_err: int = 0
    n_mmap: int = 0
    n_mmap_ok: int = 0
    n_mmap_err: int = 0
    n_mmap_free: int = 0
    reg_bytes: int = 0


@dataclass(slots=True)
class StatsL3:
    """Level 2, and each device in use, sixteen at most."""

    detailed: StatsL2 = field(default_factory=StatsL2)
    num_gpus: int = 0
    per_gpu_stats: list[PerGpuStats] = field(default_factory=lambda: [PerGpuStats() for _ in range(MAX_GPUS)])


T = TypeVar("T", StatsL1, StatsL2, StatsL3)


@public
def get_stats_l1(out: StatsL1 | None) -> Error:
    """Fill `out`. 5022 for None, 5030 where nothing is counted (HIPFILE_STATS_LEVEL=0)."""
    return _fill(out, _level_1)


@public
def get_stats_l2(out: StatsL2 | None) -> Error:
    """Fill `out`; statuses as `get_stats_l1`."""
    return _fill(out, _level_2)


@public
def get_stats_l3(out: StatsL3 | None) -> Error:
    """Fill `out`; statuses as `get_stats_l1`."""
    return _fill(out, _level_3)


def _fill(out: T | None, make: Any) -> Error:
    if out is None:
        return Error(OpError.INVALID_VALUE)
    try:
        hooks.start()
    except ConfigError:
        return Error(OpError.INTERNAL_ERROR)
    if start.counters() is None:
        return Error(OpError.INTERNAL_ERROR)
    made = make(snapshot.stats(), published_profile())
    for f in fields(made):
        setattr(out, f.name, getattr(made, f.name))
    return SUCCESS


def _level_1(s: Stats, published: bool) -> StatsL1:
    c = s.counters
    out = StatsL1()
    for op in ("read", "write"):
        f = s.flow(op=op)
        us = _microseconds(f)
        setattr(out, f"{op}_ops", OpCounter(f.operations, f.errors))
        setattr(out, f"{op}_bytes", f.nbytes)
        setattr(out, f"{op}_bw_bytes_per_sec", f.nbytes * 1_000_000 // us if us else 0)
        setattr(out, f"{op}_lat_sum_us", us)
        setattr(out, f"{op}_lat_avg_us", us // f.operations if f.operations else 0)
        if not published:
            setattr(out, f"{op}_ops_per_sec", int(f.operations / s.seconds) if s.seconds else 0)
            setattr(out, f"batch_{op}_bytes", c[f"batch_{op}_bytes"])
            setattr(out, f"last_batch_{op}_bytes", c[f"last_batch_{op}_bytes"])
    for name, short in (("handle", "hdl"), ("buf", "buf")):
        setattr(out, f"{short}_register_ops", _calls(c, f"{name}_register"))
        if not published:
            setattr(out, f"{short}_deregister_ops", _calls(c, f"{name}_deregister"))
    if not published:
        for name in ("submit", "setup", "cancel", "destroy"):
            setattr(out, f"batch_{name}_ops", _calls(c, f"batch_{name}"))
        out.batch_complete_ops = OpCounter(c["batch_requests_complete"], c["batch_requests_failed"])
    return out


def _level_2(s: Stats, published: bool) -> StatsL2:
    out = StatsL2(_level_1(s, published))
    if not published:
        for op in ("read", "write"):
            sizes = list(s.flow(op=op).operations_by_size)
            setattr(out, f"{op}_size_kb_hist", sizes + [0] * (HISTOGRAM - len(sizes)))
    return out


def _level_3(s: Stats, published: bool) -> StatsL3:
    out = StatsL3(_level_2(s, published))
    devices = s.devices[:MAX_GPUS]
    out.num_gpus = len(devices)
    for gpu, device in zip(out.per_gpu_stats, devices, strict=False):
        for op, letter in (("read", "read"), ("write", "writes")):
            direct = s.flow(device=device, backend="fastpath", op=op)
            relayed = s.flow(device=device, backend="fallback", op=op)
            us = _microseconds(direct) + _microseconds(relayed)
            nbytes = direct.nbytes + relayed.nbytes
            setattr(gpu, f"{letter}_bytes", nbytes)
            setattr(gpu, f"{op}_bw_bytes_per_sec", nbytes * 1_000_000 // us if us else 0)
            setattr(gpu, f"{op}_duration_us", us)
            setattr(gpu, f"n_total_{op}s", direct.operations + relayed.operations)
            setattr(gpu, f"n_nvfs_{op}s", direct.operations)
            setattr(gpu, f"n_posix_{op}s", relayed.operations)
            setattr(gpu, f"n_unaligned_{op}s", direct.unaligned + relayed.unaligned)
            setattr(gpu, f"n_{op}s_err", direct.errors + relayed.errors)
        with STATE.lock:
            gpu.reg_bytes = sum(b.nbytes for b in STATE.buffers.values() if b.device.name == device)
        if not published:
            gpu.uuid = _uuid(device)
    return out


def _calls(counters: dict[str, int], name: str) -> OpCounter:
    return OpCounter(counters[f"{name}_ok"], counters[f"{name}_err"])


def _microseconds(flow: Flow) -> int:
    return sum(flow.nanoseconds_by_size) // 1000


def _uuid(device: str) -> bytes:
    """The device's own where the runtime knows one; else one made from its name, the same each time."""
    try:
        known = Device(device).info.uuid
    except NobounceError:
        known = None
    if isinstance(known, str):
        with contextlib.suppress(ValueError):
            return uuid.UUID(known.removeprefix("GPU-")).bytes
    return uuid.uuid5(uuid.NAMESPACE_OID, f"nobounce:{device}").bytes
