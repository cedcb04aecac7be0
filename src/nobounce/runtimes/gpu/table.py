"""The adapter table: one row per operation, with the function of NVIDIA's and of AMD's
own bindings that does it.

Both families take the same arguments in the same order and return a tuple `(status, out...)`; where HIP wants
more arguments they stand in `hip_extra`. Pointers, streams and events go in as integers and come out as
objects with `__int__` (None for NULL). tests/unit/gpu checks every row against the installed bindings.
"""

from __future__ import annotations

from typing import Literal

from nobounce.records import record

Argument = Literal[
    "address",
    "nbytes",
    "stream",
    "event",
    "number",
    "kind",
    "attribute",
    "status",
    "function",
    "text",
    "list",
]
"""`kind` is the vendor's enum of copy directions, `attribute` its enum of device attributes,
`status` of its statuses."""

Result = Literal["address", "handle", "number", "seconds", "text", "object"]
"""What comes out: integers, a float, a C string, or something the adapter takes apart itself."""

U64 = (1 << 64) - 1


@record
class Row:
    """`cuda` is "module:function" in cuda.bindings, `hip` a function of
    rocm.bindings.hip; "" where there is none.

    `asks` marks a query: NotReady is an answer (False), not an error (HIP rules 5, 27).
    """

    op: str
    cuda: str
    hip: str
    args: tuple[Argument, ...] = ()
    out: tuple[Result, ...] = ()
    hip_extra: tuple[int, ...] = ()
    asks: bool = False


_ROWS = (
    # devices
    Row("init", "driver:cuInit", "hipInit", ("number",)),
    Row("device_count", "runtime:cudaGetDeviceCount", "hipGetDeviceCount", (), ("number",)),
    Row("get_device", "runtime:cudaGetDevice", "hipGetDevice", (), ("number",)),
    Row("set_device", "runtime:cudaSetDevice", "hipSetDevice", ("number",)),
    Row("device_sync", "runtime:cudaDeviceSynchronize", "hipDeviceSynchronize"),
    Row(
        "attribute",
        "runtime:cudaDeviceGetAttribute",
        "hipDeviceGetAttribute",
        ("attribute", "number"),
        ("number",),
    ),
    Row("device_name", "driver:cuDeviceGetName", "hipDeviceGetName", ("number", "number"), ("text",)),
    Row("device_nbytes", "driver:cuDeviceTotalMem", "hipDeviceTotalMem", ("number",), ("number",)),
    Row("device_uuid", "driver:cuDeviceGetUuid", "hipDeviceGetUuid", ("number",), ("object",)),
    Row(
        "pci_bus_id",
        "runtime:cudaDeviceGetPCIBusId",
        "hipDeviceGetPCIBusId",
        ("number", "number"),
        ("text",),
    ),
    Row("properties", "", "hipGetDeviceProperties", ("number",), ("object",)),
    Row("runtime_version", "runtime:cudaRuntimeGetVersion", "hipRuntimeGetVersion", (), ("number",)),
    Row("driver_version", "runtime:cudaDriverGetVersion", "hipDriverGetVersion", (), ("number",)),
    # contexts: CUDA's push and pop keep a device untouched that the caller never used (case C98)
    Row("module_load", "driver:cuModuleLoadData", "", ("text",), ("object",)),
    Row("module_function", "driver:cuModuleGetFunction", "", ("address", "text"), ("handle",)),
    Row(
        "launch",
        "driver:cuLaunchKernel",
        "",
        ("address", *("number",) * 7, "stream", "list", "number"),
    ),
    Row("context_retain", "driver:cuDevicePrimaryCtxRetain", "", ("number",), ("object",)),
    Row("context_state", "driver:cuDevicePrimaryCtxGetState", "", ("number",), ("number", "number")),
    Row("context_push", "driver:cuCtxPushCurrent", "", ("address",)),
    Row("context_pop", "driver:cuCtxPopCurrent", "", (), ("object",)),
    Row("context_get", "driver:cuCtxGetCurrent", "", (), ("handle",)),
    Row("context_set", "driver:cuCtxSetCurrent", "", ("address",)),
    Row("context_device", "driver:cuCtxGetDevice", "", (), ("number",)),
    # memory
    Row("alloc", "runtime:cudaMalloc", "hipMalloc", ("nbytes",), ("address",)),
    Row("free", "runtime:cudaFree", "hipFree", ("address",)),
    Row("alloc_async", "runtime:cudaMallocAsync", "hipMallocAsync", ("nbytes", "stream"), ("address",)),
    Row("free_async", "runtime:cudaFreeAsync", "hipFreeAsync", ("address", "stream")),
    Row(
        "default_pool",
        "runtime:cudaDeviceGetDefaultMemPool",
        "hipDeviceGetDefaultMemPool",
        ("number",),
        ("object",),
    ),
    Row(
        "alloc_from_pool",
        "runtime:cudaMallocFromPoolAsync",
        "hipMallocFromPoolAsync",
        ("nbytes", "address", "stream"),
        ("address",),
    ),
    Row("alloc_pinned", "runtime:cudaHostAlloc", "hipHostMalloc", ("nbytes", "number"), ("address",)),
    Row("free_pinned", "runtime:cudaFreeHost", "hipHostFree", ("address",)),
    Row("alloc_managed", "runtime:cudaMallocManaged", "hipMallocManaged", ("nbytes", "number"), ("address",)),
    Row("alloc_signal", "", "hipExtMallocWithFlags", ("nbytes", "number"), ("address",)),
    Row("register_host", "runtime:cudaHostRegister", "hipHostRegister", ("address", "nbytes", "number")),
    Row("unregister_host", "runtime:cudaHostUnregister", "hipHostUnregister", ("address",)),
    Row("pointer", "", "hipPointerGetAttributes", ("address",), ("object",)),
    Row(
        "address_range",
        "driver:cuMemGetAddressRange",
        "hipMemGetAddressRange",
        ("address",),
        ("address", "number"),
    ),
    # copies and fills
    Row("copy", "runtime:cudaMemcpy", "hipMemcpy", ("address", "address", "nbytes", "kind")),
    Row(
        "copy_async",
        "runtime:cudaMemcpyAsync",
        "hipMemcpyAsync",
        ("address", "address", "nbytes", "kind", "stream"),
    ),
    # AMD's bindings have no way to hand hipMemcpyBatchAsync its destinations
    Row(
        "copy_batch",
        "runtime:cudaMemcpyBatchAsync",
        "",
        ("list", "list", "list", "number", "list", "list", "number", "stream"),
    ),
    Row(
        "copy_peer",
        "runtime:cudaMemcpyPeer",
        "hipMemcpyPeer",
        ("address", "number", "address", "number", "nbytes"),
    ),
    Row(
        "copy_peer_async",
        "runtime:cudaMemcpyPeerAsync",
        "hipMemcpyPeerAsync",
        ("address", "number", "address", "number", "nbytes", "stream"),
    ),
    Row("fill", "runtime:cudaMemset", "hipMemset", ("address", "number", "nbytes")),
    Row(
        "fill_async_1", "runtime:cudaMemsetAsync", "hipMemsetAsync", ("address", "number", "nbytes", "stream")
    ),
    Row(
        "fill_async_2",
        "driver:cuMemsetD16Async",
        "hipMemsetD16Async",
        ("address", "number", "number", "stream"),
    ),
    Row(
        "fill_async_4",
        "driver:cuMemsetD32Async",
        "hipMemsetD32Async",
        ("address", "number", "number", "stream"),
    ),
    # streams
    Row(
        "stream_create",
        "runtime:cudaStreamCreateWithPriority",
        "hipStreamCreateWithPriority",
        ("number", "number"),
        ("handle",),
    ),
    Row("stream_destroy", "runtime:cudaStreamDestroy", "hipStreamDestroy", ("stream",)),
    Row("stream_query", "runtime:cudaStreamQuery", "hipStreamQuery", ("stream",), asks=True),
    Row("stream_capture", "runtime:cudaStreamIsCapturing", "hipStreamIsCapturing", ("stream",), ("number",)),
    Row("stream_sync", "runtime:cudaStreamSynchronize", "hipStreamSynchronize", ("stream",)),
    Row(
        "stream_wait_event",
        "runtime:cudaStreamWaitEvent",
        "hipStreamWaitEvent",
        ("stream", "event", "number"),
    ),
    Row("stream_device", "runtime:cudaStreamGetDevice", "hipStreamGetDevice", ("stream",), ("number",)),
    Row(
        "priority_range",
        "runtime:cudaDeviceGetStreamPriorityRange",
        "hipDeviceGetStreamPriorityRange",
        (),
        ("number", "number"),
    ),
    Row("stream_priority", "runtime:cudaStreamGetPriority", "hipStreamGetPriority", ("stream",), ("number",)),
    Row("stream_flags", "runtime:cudaStreamGetFlags", "hipStreamGetFlags", ("stream",), ("number",)),
    Row("host_call", "runtime:cudaLaunchHostFunc", "hipLaunchHostFunc", ("stream", "function", "address")),
    Row(
        "write_value",
        "driver:cuStreamWriteValue64",
        "hipStreamWriteValue64",
        ("stream", "address", "number", "number"),
    ),
    Row(
        "wait_value",
        "driver:cuStreamWaitValue64",
        "hipStreamWaitValue64",
        ("stream", "address", "number", "number"),
        hip_extra=(U64,),
    ),
    # events
    Row(
        "event_create",
        "runtime:cudaEventCreateWithFlags",
        "hipEventCreateWithFlags",
        ("number",),
        ("handle",),
    ),
    Row("event_destroy", "runtime:cudaEventDestroy", "hipEventDestroy", ("event",)),
    Row("event_record", "runtime:cudaEventRecord", "hipEventRecord", ("event", "stream")),
    Row("event_query", "runtime:cudaEventQuery", "hipEventQuery", ("event",), asks=True),
    Row("event_sync", "runtime:cudaEventSynchronize", "hipEventSynchronize", ("event",)),
    Row(
        "event_elapsed",
        "runtime:cudaEventElapsedTime",
        "hipEventElapsedTime",
        ("event", "event"),
        ("seconds",),
    ),
    # peers, errors, symbols
    Row(
        "can_access_peer",
        "runtime:cudaDeviceCanAccessPeer",
        "hipDeviceCanAccessPeer",
        ("number", "number"),
        ("number",),
    ),
    Row(
        "enable_peer", "runtime:cudaDeviceEnablePeerAccess", "hipDeviceEnablePeerAccess", ("number", "number")
    ),
    Row("disable_peer", "runtime:cudaDeviceDisablePeerAccess", "hipDeviceDisablePeerAccess", ("number",)),
    Row("error_text", "runtime:cudaGetErrorString", "hipGetErrorString", ("status",), ("text",)),
    Row("take_last_error", "runtime:cudaGetLastError", "hipGetLastError"),
    Row("symbol", "", "hipGetProcAddress", ("text", "number", "number"), ("address", "object")),
)

ROWS: dict[str, Row] = {row.op: row for row in _ROWS}

# Flags with the same value in both families; the table test compares them with the bindings.
STREAM_DEFAULT = 0
STREAM_NONBLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
EVENT_INTERPROCESS = 4
HOST_PORTABLE = 1
HOST_MAPPED = 2
REGISTER_PORTABLE = 1
CUDA_REGISTER_READ_ONLY = 8
MEM_ATTACH_GLOBAL = 1
WAIT_GEQ = 0
WRITE_DEFAULT = 0
HIP_SIGNAL_MEMORY = 2
