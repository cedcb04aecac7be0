"""What libcuda says of a pointer, taken apart."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest

from capabilities import need
from nobounce.route.types import MemoryKind
from nobounce.runtimes.base import PointerInfo
from nobounce.runtimes.gpu.cuda import CudaAdapter

BASE = 0x7F12_3456_7000

ANSWERS: list[tuple[dict[int, int], int, PointerInfo]] = [
    ({2: 2, 9: 3, 8: 0, 11: BASE, 12: 8192}, 0, PointerInfo(MemoryKind.DEVICE, 3, BASE, 8192)),
    ({2: 2, 9: 1, 8: 1, 11: BASE, 12: 4096}, 0, PointerInfo(MemoryKind.MANAGED, 1, BASE, 4096)),
    ({2: 1, 9: 1, 8: 0, 11: BASE, 12: 4096}, 0, PointerInfo(MemoryKind.PINNED, None, BASE, 4096)),
    ({2: 0, 9: -2, 8: 0, 11: 0, 12: 0}, 0, PointerInfo(MemoryKind.PAGEABLE, None, 0, 0)),
    ({}, 1, PointerInfo(MemoryKind.PAGEABLE, None, 0, 0)),
]
"""By number of CUpointer_attribute: MEMORY_TYPE 2, IS_MANAGED 8, DEVICE_ORDINAL 9, RANGE_START_ADDR 11, RANGE_SIZE 12."""


@pytest.mark.parametrize(("answer", "status", "expected"), ANSWERS)
def test_pointer_info(answer: dict[int, int], status: int, expected: PointerInfo) -> None:
    need("cuda-bindings")
    driver = importlib.import_module("cuda.bindings.driver")
    runtime = importlib.import_module("cuda.bindings.runtime")
    adapter = CudaAdapter(driver, runtime)
    asked: list[int] = []

    def ask(count: int, wanted: Any, fields: Any, address: Any) -> int:
        asked.append(address.value)
        for attribute, field in zip(list(wanted)[:count], list(fields)[:count], strict=True):
            if attribute in answer:
                wide = ctypes.c_uint64 if attribute in (11, 12) else ctypes.c_int
                wide.from_address(field).value = answer[attribute]
        return status

    adapter._ask = ask
    adapter._query.answer.MEMORY_TYPE = 2  # left over from an earlier question
    assert adapter.pointer_info(BASE + 5) == expected
    assert asked == [BASE + 5]
