"""hipFile's enums, structures and limits with Python values (hipFile A-4 to A-13).

A C union becomes one structure with its used members; a pointer becomes an int, or an object that holds one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from nobounce.route.types import MAX_RW_COUNT as MAX_RW_COUNT

BASE_ERR = 5000
MAX_BATCH_IO = 128
"""Most operations a batch may hold (A-13)."""

STREAM_FIXED_BUF_OFFSET = 1
STREAM_FIXED_FILE_OFFSET = 2
STREAM_FIXED_FILE_SIZE = 4
STREAM_PAGE_ALIGNED_INPUTS = 8
STREAM_FLAGS_MASK = 0xF

RDMA_REGISTER = 1
RDMA_RELAXED_ORDERING = 2


class FileHandleType(enum.IntEnum):
    """What a descriptor holds; only OPAQUE_FD works here, as on AMD (A-4)."""

    OPAQUE_FD = 1
    OPAQUE_WIN32 = 2
    USERSPACE_FS = 3


class DriverStatusFlags(enum.IntEnum):
    """Bit numbers of `NvfsProps.driver_status_flags` (A-6)."""

    LUSTRE = 0
    WEKAFS = 1
    NFS = 2
    GPFS = 3
    NVME = 4
    NVMEOF = 5
    SCSI = 6
    SCALEFLUX_CSD = 7
    NVMESH = 8
    BEEGFS = 9
    NVME_P2P = 11
    SCATEFS = 12


class DriverControlFlags(enum.IntEnum):
    """Bit numbers of `NvfsProps.driver_control_flags` (A-7)."""

    USE_POLL_MODE = 0
    ALLOW_COMPAT_MODE = 1


class FeatureFlags(enum.IntEnum):
    """Bit numbers of `DriverProps.feature_flags` (A-7)."""

    DYN_ROUTING = 0
    BATCH_IO = 1
    STREAMS = 2
    PARALLEL_IO = 3


class Opcode(enum.IntEnum):
    """What one operation of a batch does (A-9)."""

    BATCH_READ = 0
    BATCH_WRITE = 1


class BatchMode(enum.IntEnum):
    """How `IOParams` are to be understood (A-9)."""

    BATCH = 1


class Status(enum.IntFlag):
    """State of one operation of a batch, as events show it (A-9)."""

    WAITING = 1
    PENDING = 2
    INVALID = 4
    CANCELED = 8
    COMPLETE = 16
    TIMEOUT = 32
    FAILED = 64


class SizeTParameter(enum.IntEnum):
    """Parameters of `get_parameter_size_t` and `set_parameter_size_t` (A-12); sizes in
    KiB where the name says KB."""

    PROFILE_STATS = 0
    EXECUTION_MAX_IO_QUEUE_DEPTH = 1
    EXECUTION_MAX_IO_THREADS = 2
    EXECUTION_MIN_IO_THRESHOLD_SIZE_KB = 3
    EXECUTION_MAX_REQUEST_PARALLELISM = 4
    PROPERTIES_MAX_DIRECT_IO_SIZE_KB = 5
    PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB = 6
    PROPERTIES_PER_BUFFER_CACHE_SIZE_KB = 7
    PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB = 8
    PROPERTIES_IO_BATCHSIZE = 9
    POLLTHRESHOLD_SIZE_KB = 10
    PROPERTIES_BATCH_IO_TIMEOUT_MS = 11


class BoolParameter(enum.IntEnum):
    """Parameters of `get_parameter_bool` and `set_parameter_bool` (A-12)."""

    PROPERTIES_USE_POLL_MODE = 0
    PROPERTIES_ALLOW_COMPAT_MODE = 1
    FORCE_COMPAT_MODE = 2
    FS_MISC_API_CHECK_AGGRESSIVE = 3
    EXECUTION_PARALLEL_IO = 4
    PROFILE_NVTX = 5
    PROPERTIES_ALLOW_SYSTEM_MEMORY = 6
    USE_PCIP2PDMA = 7
    PREFER_IO_URING = 8
    FORCE_ODIRECT_MODE = 9
    SKIP_TOPOLOGY_DETECTION = 10
    STREAM_MEMOPS_BYPASS = 11


class StringParameter(enum.IntEnum):
    """Parameters of `get_parameter_string` and `set_parameter_string` (A-12)."""

    LOGGING_LEVEL = 0
    ENV_LOGFILE_PATH = 1
    LOG_DIR = 2


@dataclass(slots=True)
class Descr:
    """hipFileDescr_t: a descriptor and what it is. `fs_ops` is kept and unused, as on AMD (A-4)."""

    fd: int = -1
    type: int = FileHandleType.OPAQUE_FD
    fs_ops: Any = None


@dataclass(slots=True)
class RDMAInfo:
    """hipFileRDMAInfo_t (A-5), unused on AMD."""

    version: int = 0
    desc_str: str = ""

    @property
    def desc_len(self) -> int:
        """Bytes of `desc_str`."""
        return len(self.desc_str.encode())


@dataclass(frozen=True, slots=True)
class NvfsProps:
    """The kernel driver's part of the properties; sizes in KiB, flags as bit fields (A-8)."""

    major_version: int
    minor_version: int
    poll_thresh_size: int
    max_direct_io_size: int
    driver_status_flags: int
    driver_control_flags: int


@dataclass(frozen=True, slots=True)
class DriverProps:
    """hipFileDriverProps_t (A-8); sizes in KiB, the timeout in milliseconds."""

    nvfs: NvfsProps
    feature_flags: int
    max_device_cache_size: int
    per_buffer_cache_size: int
    max_device_pinned_mem_size: int
    max_batch_io_count: int
    max_batch_io_timeout_msecs: int


@dataclass(slots=True)
class Batch:
    """`u.batch` of `IOParams`: memory, offsets and size of one operation, in bytes (A-10)."""

    dev_ptr_base: Any = None
    file_offset: int = 0
    dev_ptr_offset: int = 0
    size: int = 0


@dataclass(slots=True)
class IOParams:
    """hipFileIOParams_t: one operation of a batch. `cookie` comes back in its event (A-10)."""

    fh: int | None = None
    opcode: int = Opcode.BATCH_READ
    batch: Batch = field(default_factory=Batch)
    cookie: Any = None
    mode: int = BatchMode.BATCH


@dataclass(frozen=True, slots=True)
class IOEvents:
    """hipFileIOEvents_t: what became of one operation.

    `ret` is unsigned as in C (A-10): a negative result is stored in two's complement;
    `result` reads it as signed.
    """

    cookie: Any
    status: Status
    ret: int

    @property
    def result(self) -> int:
        """Bytes moved, or a negative errno or code (E-9)."""
        return self.ret - (1 << 64) if self.ret >> 63 else self.ret
