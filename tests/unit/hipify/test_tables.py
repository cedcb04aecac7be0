"""Every name that is written exists: in AMD's bindings, and in nobounce."""

from __future__ import annotations

import importlib
import inspect

import pytest

from capabilities import need
from nobounce import hip, hipfile
from nobounce.hipify import cufile_c, cufile_names, names


def test_the_names_of_hip_are_those_of_amds_bindings() -> None:
    need("rocm-bindings")
    vendor = importlib.import_module("rocm.bindings.hip")
    top = set(dir(vendor))
    members = {m for n in top for m in getattr(getattr(vendor, n), "__members__", ())}
    for table in (names.CALLS, names.TYPES, names.CONSTANTS):
        assert set(table.values()) <= top
    assert set(names.ERRORS.values()) <= set(vendor.hipError_t.__members__)
    assert set(names.KINDS.values()) <= set(vendor.hipMemcpyKind.__members__)
    macros = {"hipStreamLegacy", "hipStreamPerThread"}
    assert set(names.C_ONLY.values()) - macros <= members | top


def test_the_names_of_cuda_are_those_of_nvidias_bindings() -> None:
    need("cuda-bindings")
    vendor = importlib.import_module("cuda.bindings.runtime")
    only_c = {"cudaMemcpyToSymbol", "cudaMemcpyFromSymbol", "cudaLaunchKernel", "cudaLaunchCooperativeKernel"}
    only_c |= {"cudaOccupancyMaxPotentialBlockSize", "cudaLaunchParams"}
    for table in (names.CALLS, names.TYPES, names.CONSTANTS):
        assert set(table) - only_c <= set(dir(vendor))
    assert set(names.ERRORS) <= {e.name for e in vendor.cudaError_t}


def test_what_nobounce_hip_is_said_to_have_it_has() -> None:
    assert set(hip.__all__) - {"use"} == names.NOBOUNCE_HIP
    assert {e.name for e in hip.hipError_t} == names.NOBOUNCE_ERRORS
    assert {k.name for k in hip.hipMemcpyKind} == set(names.KINDS.values())


@pytest.mark.parametrize("name", sorted(cufile_names.CALLS))
def test_calls_of_cufile_are_those_of_hipfile_with_their_parameters(name: str) -> None:
    call, parameters = cufile_names.CALLS[name], cufile_names.PARAMETERS[name]
    renamed = [call.keywords("nobounce").get(p, p) for p in parameters]
    signature = inspect.signature(getattr(hipfile, call.nobounce))
    assert list(signature.parameters)[: len(renamed)] == renamed
    signature.bind(*renamed)


def test_calls_and_enums_of_cufile_are_nvidias() -> None:
    need("cuda-bindings")
    vendor = importlib.import_module("cuda.bindings.cufile")
    assert set(cufile_names.CALLS) <= set(dir(vendor))
    for dotted, (ours, _) in cufile_names.ENUMS.items():
        for home, path in ((vendor, dotted), (hipfile, ours)):
            for part in path.split("."):
                home = getattr(home, part)


def test_names_of_hipfile_are_amds() -> None:
    need("rocm-bindings-systems")
    vendor = importlib.import_module("rocm.bindings.hipfile")
    every = set(dir(vendor)) | {
        m for n in dir(vendor) for m in getattr(getattr(vendor, n), "__members__", ())
    }
    for table in (cufile_c.CALLS, cufile_c.TYPES, cufile_c.TAGS, cufile_c.CONSTANTS):
        assert {n for n in table.values() if n.startswith("hip")} <= every
    assert {c.hip for c in cufile_names.CALLS.values()} <= every
