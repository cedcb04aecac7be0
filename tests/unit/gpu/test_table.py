"""Every row of the adapter table against the bindings that it names: function, arguments, returned tuple, enum values."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from capabilities import need
from doubles.hip_bindings import HipDouble
from nobounce.errors import RuntimeStatus
from nobounce.runtimes.base import CopyKind
from nobounce.runtimes.gpu import cuda, hip
from nobounce.runtimes.gpu import table as gpu_table
from nobounce.runtimes.gpu.adapter import ATTRIBUTES, NOT_READY
from nobounce.runtimes.gpu.table import ROWS, Row

HIP_ROWS = [row for row in ROWS.values() if row.hip]
CUDA_ROWS = [row for row in ROWS.values() if row.cuda]


@functools.cache
def _hip_signatures() -> dict[str, list[str]]:
    """Argument names by function, from the stubs that come with the bindings."""
    bindings = importlib.import_module("rocm.bindings.hip")
    tree = ast.parse(Path(str(bindings.__file__)).with_name("hip.pyi").read_text())
    return {f.name: [a.arg for a in f.args.args] for f in tree.body if isinstance(f, ast.FunctionDef)}


@functools.cache
def _hip_results() -> dict[str, int]:
    """How many values come back, the status included, from the source that comes with the bindings."""
    bindings = importlib.import_module("rocm.bindings.hip")
    source = Path(str(bindings.__file__)).with_name("hip.pyx").read_text()
    found: dict[str, int] = {}
    for match in re.finditer(r"^def (hip\w+)\(.*?^    return \((hipError_t.*?)\)$", source, re.M | re.S):
        text, depth, values = match[2], 0, 1
        text = text.removesuffix(",")
        for c in text:
            depth += (c in "([{") - (c in ")]}")
            values += c == "," and depth == 0
        found[match[1]] = values
    return found


def _cuda_function(row: Row) -> Any:
    module, _, name = row.cuda.partition(":")
    return getattr(importlib.import_module(f"cuda.bindings.{module}"), name)


@pytest.mark.parametrize("row", HIP_ROWS, ids=lambda row: row.op)
def test_a_hip_row_is_what_the_bindings_have(row: Row) -> None:
    need("rocm-bindings")
    bindings = importlib.import_module("rocm.bindings.hip")
    assert callable(getattr(bindings, row.hip))
    assert len(_hip_signatures()[row.hip]) == len(row.args) + len(row.hip_extra), _hip_signatures()[row.hip]
    assert _hip_results()[row.hip] == 1 + len(row.out)


@pytest.mark.parametrize("row", HIP_ROWS, ids=lambda row: row.op)
def test_the_double_takes_what_the_bindings_take(row: Row) -> None:
    need("rocm-bindings")
    taken = list(inspect.signature(HipDouble.__dict__[row.hip]).parameters)[1:]
    assert len(taken) == len(_hip_signatures()[row.hip])


@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row.op)
def test_a_cuda_row_is_what_the_bindings_have(row: Row) -> None:
    need("cuda-bindings")
    lines = (_cuda_function(row).__doc__ or "").strip().splitlines()
    signature = lines[0]
    arguments = signature[signature.index("(") + 1 : signature.rindex(")")]
    assert len([a for a in arguments.split(", ") if a]) == len(row.args), signature
    at = next(i for i, line in enumerate(lines) if line.strip() == "Returns")
    margin = len(lines[at]) - len(lines[at].lstrip())
    section = itertools.takewhile(lambda line: line.strip(), lines[at + 2 :])
    values = [line for line in section if not line[margin:].startswith(" ")]
    assert len(values) == 1 + len(row.out), values


def test_the_bindings_families_agree_on_what_goes_in_and_comes_out() -> None:
    assert {row.op for row in ROWS.values() if not row.hip} == {
        "context_retain",
        "context_state",
        "context_push",
        "context_pop",
        "context_get",
        "context_set",
        "context_device",
        "copy_batch",
        "module_load",
        "module_function",
        "launch",
    }
    assert {row.op for row in ROWS.values() if not row.cuda} == {
        "properties",
        "alloc_signal",
        "pointer",
        "symbol",
    }


@pytest.mark.parametrize("status", RuntimeStatus, ids=lambda s: s.name)
def test_statuses_mean_the_same_in_hip(status: RuntimeStatus) -> None:
    need("rocm-bindings")
    bindings = importlib.import_module("rocm.bindings.hip")
    theirs = {
        "Success": "hipSuccess",
        "NotInitialized": "hipErrorNotInitialized",
        "InvalidHandle": "hipErrorInvalidHandle",
    }
    name = theirs.get(status.name, f"hipError{status.name}")
    if (
        status is RuntimeStatus.NotPermitted
    ):  # CUDA's word, which HIP lacks; the runtime itself gives it (HIP rule 41)
        assert int(status) not in [int(s) for s in bindings.hipError_t]
        return
    assert int(getattr(bindings.hipError_t, name)) == int(status)


@pytest.mark.parametrize("status", RuntimeStatus, ids=lambda s: s.name)
def test_statuses_mean_the_same_in_cuda(status: RuntimeStatus) -> None:
    need("cuda-bindings")
    bindings = importlib.import_module("cuda.bindings.runtime")
    theirs = {
        "Success": "cudaSuccess",
        "OutOfMemory": "cudaErrorMemoryAllocation",
        "NotInitialized": "cudaErrorInitializationError",
        "Deinitialized": "cudaErrorCudartUnloading",
        "InvalidContext": "cudaErrorDeviceUninitialized",
        "InvalidHandle": "cudaErrorInvalidResourceHandle",
        "ContextIsDestroyed": "cudaErrorContextIsDestroyed",
    }
    name = theirs.get(status.name, f"cudaError{status.name}")
    assert int(getattr(bindings.cudaError_t, name)) == int(status)


def test_not_ready_is_600() -> None:
    assert NOT_READY == 600


def test_hip_enums_and_flags() -> None:
    need("rocm-bindings")
    bindings = importlib.import_module("rocm.bindings.hip")
    kinds = hip.HipAdapter(bindings).kinds()
    assert {int(k) for k in CopyKind} <= kinds.keys()
    assert kinds[4] is bindings.hipMemcpyKind.hipMemcpyDefault
    assert {n: int(getattr(bindings, n)) for n in _HIP_FLAGS} == _HIP_FLAGS
    types = bindings.hipMemoryType
    assert (
        types.hipMemoryTypeHost,
        types.hipMemoryTypeDevice,
        types.hipMemoryTypeManaged,
    ) == (hip._HOST, hip._DEVICE, hip._MANAGED)
    assert not hasattr(bindings, "hipHostRegisterReadOnly"), (
        "then register_flags can use it, and quirks lose a row"
    )
    for name in ATTRIBUTES:
        found = hip.HipAdapter(bindings).attribute_of(name)
        assert (found is None) == (name == "register_read_only"), name
    assert {"type", "device", "isManaged"} <= set(dir(bindings.hipPointerAttribute_t()))
    assert hasattr(bindings.hipUUID_t(), "bytes")
    assert hasattr(bindings.hipDeviceProp_t(), "gcnArchName")


_HIP_FLAGS = {
    "hipStreamDefault": gpu_table.STREAM_DEFAULT,
    "hipStreamNonBlocking": gpu_table.STREAM_NONBLOCKING,
    "hipEventBlockingSync": gpu_table.EVENT_BLOCKING_SYNC,
    "hipEventDisableTiming": gpu_table.EVENT_DISABLE_TIMING,
    "hipEventInterprocess": gpu_table.EVENT_INTERPROCESS,
    "hipHostMallocPortable": gpu_table.HOST_PORTABLE,
    "hipHostMallocMapped": gpu_table.HOST_MAPPED,
    "hipHostRegisterPortable": gpu_table.REGISTER_PORTABLE,
    "hipMemAttachGlobal": gpu_table.MEM_ATTACH_GLOBAL,
    "hipStreamWaitValueGte": gpu_table.WAIT_GEQ,
    "hipMallocSignalMemory": gpu_table.HIP_SIGNAL_MEMORY,
}


def test_cuda_enums_and_flags() -> None:
    need("cuda-bindings")
    driver = importlib.import_module("cuda.bindings.driver")
    runtime = importlib.import_module("cuda.bindings.runtime")
    adapter = cuda.CudaAdapter(driver, runtime)
    assert adapter.kinds()[4] is runtime.cudaMemcpyKind.cudaMemcpyDefault
    assert {n: int(getattr(runtime, n)) for n in _CUDA_FLAGS} == _CUDA_FLAGS
    assert int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) == gpu_table.WAIT_GEQ
    assert int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT) == gpu_table.WRITE_DEFAULT
    assert int(driver.CUmemorytype.CU_MEMORYTYPE_HOST) == cuda._HOST
    assert int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE) == cuda._DEVICE
    assert hasattr(driver.CUdevice_attribute, cuda._CAN_WAIT)
    for name in (*ATTRIBUTES, "major", "minor"):
        assert name == "wait_value" or adapter.attribute_of(name) is not None, name


_CUDA_FLAGS = {
    "cudaStreamDefault": gpu_table.STREAM_DEFAULT,
    "cudaStreamNonBlocking": gpu_table.STREAM_NONBLOCKING,
    "cudaEventBlockingSync": gpu_table.EVENT_BLOCKING_SYNC,
    "cudaEventDisableTiming": gpu_table.EVENT_DISABLE_TIMING,
    "cudaEventInterprocess": gpu_table.EVENT_INTERPROCESS,
    "cudaHostAllocPortable": gpu_table.HOST_PORTABLE,
    "cudaHostAllocMapped": gpu_table.HOST_MAPPED,
    "cudaHostRegisterPortable": gpu_table.REGISTER_PORTABLE,
    "cudaHostRegisterReadOnly": gpu_table.CUDA_REGISTER_READ_ONLY,
    "cudaMemAttachGlobal": gpu_table.MEM_ATTACH_GLOBAL,
}
