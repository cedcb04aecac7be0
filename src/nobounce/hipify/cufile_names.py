"""The names of cuda.bindings.cufile, and theirs in nobounce.hipfile and in AMD's hipfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DESCR = "cuda.bindings.cufile.Descr"
ERROR_CLASS = "cuFileError"


@dataclass(frozen=True, slots=True)
class Call:
    """One function: its name in nobounce.hipfile and in AMD's, "" where there is none. `raises`:
    cuFile's raises, theirs do not."""

    nobounce: str
    hip: str
    raises: bool = True
    pointers: tuple[str, ...] = ()
    """Parameters that are addresses of numbers."""

    def keywords(self, target: str) -> Mapping[str, str]:
        """What parameters with another name are called."""
        if target == "hip":
            return _HIP_KEYWORDS
        return {**_KEYWORDS, **_OF_ONE_CALL.get(self.nobounce, {})}


_KEYWORDS = {
    "buf_ptr_base": "base",
    "buf_ptr_offset": "buffer_offset",
    "param": "parameter",
    "buf_ptr_offset_p": "buffer_offset",
    "size_p": "size",
    "file_offset_p": "file_offset",
    "bytes_read_p": "bytes_done",
    "bytes_written_p": "bytes_done",
    "max_pinned_size": "max_pinned_mem_size",
}
_OF_ONE_CALL = {
    "buf_register": {"buf_ptr_base": "ptr"},
    "buf_deregister": {"buf_ptr_base": "ptr"},
    "handle_deregister": {"fh": "handle"},
}
_HIP_KEYWORDS = {
    "buf_ptr_base": "buffer_base",
    "buf_ptr_offset": "buffer_offset",
    "buf_ptr_offset_p": "buffer_offset_p",
}

_IO = ("fh", "buf_ptr_base", "size", "file_offset", "buf_ptr_offset")
_QUEUED = ("size_p", "file_offset_p", "buf_ptr_offset_p")
PARAMETERS: dict[str, tuple[str, ...]] = {
    "driver_open": (),
    "driver_close": (),
    "use_count": (),
    "handle_register": ("descr",),
    "handle_deregister": ("fh",),
    "buf_register": ("buf_ptr_base", "length", "flags"),
    "buf_deregister": ("buf_ptr_base",),
    "read": _IO,
    "write": _IO,
    "read_async": ("fh", "buf_ptr_base", *_QUEUED, "bytes_read_p", "stream"),
    "write_async": ("fh", "buf_ptr_base", *_QUEUED, "bytes_written_p", "stream"),
    "stream_register": ("stream", "flags"),
    "stream_deregister": ("stream",),
    "driver_set_poll_mode": ("poll", "poll_threshold_size"),
    "driver_set_max_direct_io_size": ("max_direct_io_size",),
    "driver_set_max_cache_size": ("max_cache_size",),
    "driver_set_max_pinned_mem_size": ("max_pinned_size",),
    "get_parameter_size_t": ("param",),
    "get_parameter_bool": ("param",),
    "set_parameter_size_t": ("param", "value"),
    "set_parameter_bool": ("param", "value"),
}
CALLS: dict[str, Call] = {
    "driver_open": Call("driver_open", "hipFileDriverOpen"),
    "driver_close": Call("driver_close", "hipFileDriverClose"),
    "use_count": Call("use_count", "hipFileUseCount"),
    "handle_register": Call("handle_register", "hipFileHandleRegister"),
    "handle_deregister": Call("handle_deregister", "hipFileHandleDeregister", raises=False),
    "buf_register": Call("buf_register", "hipFileBufRegister"),
    "buf_deregister": Call("buf_deregister", "hipFileBufDeregister"),
    "read": Call("read", "hipFileRead"),
    "write": Call("write", "hipFileWrite"),
    "read_async": Call("read_async", "hipFileReadAsync", pointers=(*_QUEUED, "bytes_read_p")),
    "write_async": Call("write_async", "hipFileWriteAsync", pointers=(*_QUEUED, "bytes_written_p")),
    "stream_register": Call("stream_register", "hipFileStreamRegister"),
    "stream_deregister": Call("stream_deregister", "hipFileStreamDeregister"),
    "driver_set_poll_mode": Call("driver_set_poll_mode", "hipFileDriverSetPollMode"),
    "driver_set_max_direct_io_size": Call("driver_set_max_direct_io_size", "hipFileDriverSetMaxDirectIOSize"),
    "driver_set_max_cache_size": Call("driver_set_max_cache_size", "hipFileDriverSetMaxCacheSize"),
    "driver_set_max_pinned_mem_size": Call(
        "driver_set_max_pinned_mem_size", "hipFileDriverSetMaxPinnedMemSize"
    ),
    "get_parameter_size_t": Call("get_parameter_size_t", "hipFileGetParameterSizeT"),
    "get_parameter_bool": Call("get_parameter_bool", "hipFileGetParameterBool"),
    "set_parameter_size_t": Call("set_parameter_size_t", "hipFileSetParameterSizeT"),
    "set_parameter_bool": Call("set_parameter_bool", "hipFileSetParameterBool"),
}
INDEPENDENT = frozenset({"get_version", "get_bar_size_in_kb", "op_status_error"})
"""What may stay with cuFile when the rest goes."""

OP_ERRORS = {
    "SUCCESS": ("SUCCESS", "Success"),
    "DRIVER_NOT_INITIALIZED": ("DRIVER_NOT_INITIALIZED", "DriverNotInitialized"),
    "DRIVER_INVALID_PROPS": ("DRIVER_INVALID_PROPS", "DriverInvalidProps"),
    "DRIVER_UNSUPPORTED_LIMIT": ("DRIVER_UNSUPPORTED_LIMIT", "DriverUnsupportedLimit"),
    "DRIVER_VERSION_MISMATCH": ("DRIVER_VERSION_MISMATCH", "DriverVersionMismatch"),
    "DRIVER_VERSION_READ_ERROR": ("DRIVER_VERSION_READ_ERROR", "DriverVersionReadError"),
    "DRIVER_CLOSING": ("DRIVER_CLOSING", "DriverClosing"),
    "PLATFORM_NOT_SUPPORTED": ("PLATFORM_NOT_SUPPORTED", "PlatformNotSupported"),
    "IO_NOT_SUPPORTED": ("IO_NOT_SUPPORTED", "IONotSupported"),
    "DEVICE_NOT_SUPPORTED": ("DEVICE_NOT_SUPPORTED", "DeviceNotSupported"),
    "NVFS_DRIVER_ERROR": ("DRIVER_ERROR", "DriverError"),
    "CUDA_DRIVER_ERROR": ("HIP_DRIVER_ERROR", "HipDriverError"),
    "CUDA_POINTER_INVALID": ("HIP_POINTER_INVALID", "HipPointerInvalid"),
    "CUDA_MEMORY_TYPE_INVALID": ("HIP_MEMORY_TYPE_INVALID", "HipMemoryTypeInvalid"),
    "CUDA_POINTER_RANGE_ERROR": ("HIP_POINTER_RANGE_ERROR", "HipPointerRangeError"),
    "CUDA_CONTEXT_MISMATCH": ("HIP_CONTEXT_MISMATCH", "HipContextMismatch"),
    "INVALID_MAPPING_SIZE": ("INVALID_MAPPING_SIZE", "InvalidMappingSize"),
    "INVALID_MAPPING_RANGE": ("INVALID_MAPPING_RANGE", "InvalidMappingRange"),
    "INVALID_FILE_TYPE": ("INVALID_FILE_TYPE", "InvalidFileType"),
    "INVALID_FILE_OPEN_FLAG": ("INVALID_FILE_OPEN_FLAG", "InvalidFileOpenFlag"),
    "DIO_NOT_SET": ("DIO_NOT_SET", "DIONotSet"),
    "INVALID_VALUE": ("INVALID_VALUE", "InvalidValue"),
    "MEMORY_ALREADY_REGISTERED": ("MEMORY_ALREADY_REGISTERED", "MemoryAlreadyRegistered"),
    "MEMORY_NOT_REGISTERED": ("MEMORY_NOT_REGISTERED", "MemoryNotRegistered"),
    "PERMISSION_DENIED": ("PERMISSION_DENIED", "PermissionDenied"),
    "DRIVER_ALREADY_OPEN": ("DRIVER_ALREADY_OPEN", "DriverAlreadyOpen"),
    "HANDLE_NOT_REGISTERED": ("HANDLE_NOT_REGISTERED", "HandleNotRegistered"),
    "HANDLE_ALREADY_REGISTERED": ("HANDLE_ALREADY_REGISTERED", "HandleAlreadyRegistered"),
    "DEVICE_NOT_FOUND": ("DEVICE_NOT_FOUND", "DeviceNotFound"),
    "INTERNAL_ERROR": ("INTERNAL_ERROR", "InternalError"),
    "GETNEWFD_FAILED": ("GET_NEW_FD_FAILED", "GetNewFDFailed"),
    "NVFS_SETUP_ERROR": ("DRIVER_SETUP_ERROR", "DriverSetupError"),
    "IO_DISABLED": ("IO_DISABLED", "IODisabled"),
    "BATCH_SUBMIT_FAILED": ("BATCH_SUBMIT_FAILED", "BatchSubmitFailed"),
    "GPU_MEMORY_PINNING_FAILED": ("GPU_MEMORY_PINNING_FAILED", "GPUMemoryPinningFailed"),
    "BATCH_FULL": ("BATCH_FULL", "BatchFull"),
    "ASYNC_NOT_SUPPORTED": ("ASYNC_NOT_SUPPORTED", "AsyncNotSupported"),
    "IO_MAX_ERROR": ("IO_MAX_ERROR", "IOMaxError"),
}
SIZE_PARAMETERS = {
    "PROFILE_STATS": "hipFileParamProfileStats",
    "EXECUTION_MAX_IO_QUEUE_DEPTH": "hipFileParamExecutionMaxIOQueueDepth",
    "EXECUTION_MAX_IO_THREADS": "hipFileParamExecutionMaxIOThreads",
    "EXECUTION_MIN_IO_THRESHOLD_SIZE_KB": "hipFileParamExecutionMinIOThresholdSizeKB",
    "EXECUTION_MAX_REQUEST_PARALLELISM": "hipFileParamExecutionMaxRequestParallelism",
    "PROPERTIES_MAX_DIRECT_IO_SIZE_KB": "hipFileParamPropertiesMaxDirectIOSizeKB",
    "PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB": "hipFileParamPropertiesMaxDeviceCacheSizeKB",
    "PROPERTIES_PER_BUFFER_CACHE_SIZE_KB": "hipFileParamPropertiesPerBufferCacheSizeKB",
    "PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB": "hipFileParamPropertiesMaxDevicePinnedMemSizeKB",
    "PROPERTIES_IO_BATCHSIZE": "hipFileParamPropertiesIOBatchsize",
    "POLLTHRESHOLD_SIZE_KB": "hipFileParamPollthresholdSizeKB",
    "PROPERTIES_BATCH_IO_TIMEOUT_MS": "hipFileParamPropertiesBatchIOTimeoutMs",
}
BOOL_PARAMETERS = {
    "PROPERTIES_USE_POLL_MODE": "hipFileParamPropertiesUsePollMode",
    "PROPERTIES_ALLOW_COMPAT_MODE": "hipFileParamPropertiesAllowCompatMode",
    "FORCE_COMPAT_MODE": "hipFileParamForceCompatMode",
    "FS_MISC_API_CHECK_AGGRESSIVE": "hipFileParamFsMiscApiCheckAggressive",
    "EXECUTION_PARALLEL_IO": "hipFileParamExecutionParallelIO",
    "PROFILE_NVTX": "hipFileParamProfileNvtx",
    "PROPERTIES_ALLOW_SYSTEM_MEMORY": "hipFileParamPropertiesAllowSystemMemory",
    "USE_PCIP2PDMA": "hipFileParamUsePcip2pdma",
    "PREFER_IO_URING": "hipFileParamPreferIOUring",
    "FORCE_ODIRECT_MODE": "hipFileParamForceOdirectMode",
    "SKIP_TOPOLOGY_DETECTION": "hipFileParamSkipTopologyDetection",
    "STREAM_MEMOPS_BYPASS": "hipFileParamStreamMemopsBypass",
}

ENUMS: dict[str, tuple[str, str]] = {
    "FileHandleType": ("FileHandleType", "hipFileFileHandleType"),
    "FileHandleType.OPAQUE_FD": (
        "FileHandleType.OPAQUE_FD",
        "hipFileFileHandleType.hipFileHandleTypeOpaqueFD",
    ),
    "FileHandleType.OPAQUE_WIN32": (
        "FileHandleType.OPAQUE_WIN32",
        "hipFileFileHandleType.hipFileHandleTypeOpaqueWin32",
    ),
    "FileHandleType.USERSPACE_FS": (
        "FileHandleType.USERSPACE_FS",
        "hipFileFileHandleType.hipFileHandleTypeUserspaceFS",
    ),
    "OpError": ("OpError", "hipFileOpError"),
    **{
        f"OpError.{name}": (f"OpError.{ours}", f"hipFileOpError.hipFile{hip}")
        for name, (ours, hip) in OP_ERRORS.items()
    },
    **{
        f"SizeTConfigParameter.{name}": (f"SizeTParameter.{name}", f"hipFileSizeTConfigParameter_t.{hip}")
        for name, hip in SIZE_PARAMETERS.items()
    },
    **{
        f"BoolConfigParameter.{name}": (f"BoolParameter.{name}", f"hipFileBoolConfigParameter_t.{hip}")
        for name, hip in BOOL_PARAMETERS.items()
    },
}
"""Enums and their members: ours, AMD's."""
