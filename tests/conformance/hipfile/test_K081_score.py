"""K6: what the fastpath accepts. Pure: facts of a file and of memory in, a score out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nobounce.config import Settings
from nobounce.hipfile import whole
from nobounce.route.types import MemoryKind
from situations import EXT4, FILE, MEMORY, request

ALIGN = 4096
ALIGNED = replace(FILE, dio_mem_align=ALIGN, dio_offset_align=ALIGN)


def _fastpath(in_force: Settings | None = None, **changes: Any) -> tuple[int, list[str]]:
    changes.setdefault("file", {})
    if isinstance(changes["file"], dict):
        changes["file"] = replace(ALIGNED, **changes["file"])
    found = whole.score(whole.adapt(request(**changes), in_force or Settings())).fastpath
    return found.value, [r.code for r in found.refusals]


def _on(fstype: str, journal: str | None = None, **more: Any) -> dict[str, Any]:
    return {"filesystem": replace(EXT4, fstype=fstype, journal=journal), **more}


def test_K081_a_default_request_scores_100() -> None:
    assert _fastpath() == (100, [])


def test_K082_disabled() -> None:
    assert _fastpath(Settings(force_compat_mode=True)) == (-1, ["fastpath-disabled"])


def test_K083_no_direct_fd() -> None:
    assert _fastpath(file={"direct_fd": "refused", "direct_errno": 22}) == (-1, ["no-direct-descriptor"])


def test_K084_a_negative_file_offset_is_refused_though_aligned() -> None:
    assert _fastpath(file_offset=-ALIGN) == (-1, ["negative-offset"])


def test_K085_a_negative_buffer_offset_is_refused_though_aligned() -> None:
    assert _fastpath(buffer_offset=-ALIGN) == (-1, ["negative-offset"])


def test_K086_the_sum_of_address_and_offset_is_what_counts() -> None:
    odd = {"address": MEMORY.address + 512}
    assert _fastpath(memory=odd) == (-1, ["memory-align"])
    assert _fastpath(buffer_offset=512) == (-1, ["memory-align"])
    assert _fastpath(memory=odd, buffer_offset=ALIGN - 512) == (100, [])


@pytest.mark.parametrize(
    ("journal", "value"),
    [("ordered", 100), ("journal", -1), ("writeback", -1), ("none", -1), ("unknown", -1)],
)
def test_K087_ext4_ordered(journal: str, value: int) -> None:
    assert _fastpath(file=_on("ext4", journal))[0] == value


def test_K088_xfs() -> None:
    assert _fastpath(file=_on("xfs"))[0] == 100


@pytest.mark.parametrize("fstype", ["btrfs", "nfs4", "overlay", "unknown", "ext3"])
def test_K089_other_file_systems_are_refused(fstype: str) -> None:
    assert _fastpath(file=_on(fstype)) == (-1, ["file-system"])


@pytest.mark.parametrize("fstype", ["btrfs", "nfs4", "overlay"])
def test_K090_other_file_systems_with_the_variable_are_accepted(fstype: str) -> None:
    assert _fastpath(Settings(unsupported_file_systems=True), file=_on(fstype)) == (100, [])


def test_K091_a_block_device_is_accepted() -> None:
    assert _fastpath(file=_on("devtmpfs", kind="block")) == (100, [])


@pytest.mark.parametrize("kind", ["fifo", "char", "directory", "socket", "other"])
def test_K092_other_kinds_of_file_are_refused_whatever_the_variable(kind: str) -> None:
    for any_fs in (False, True):
        value, codes = _fastpath(Settings(unsupported_file_systems=any_fs), file={"kind": kind})
        assert value == -1
        assert "file-kind" in codes


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_K093_device_memory_alone(kind: MemoryKind) -> None:
    expected = (100, []) if kind is MemoryKind.DEVICE else (-1, ["memory-kind"])
    assert _fastpath(memory={"kind": kind}) == expected


@pytest.mark.parametrize("nbytes", [0, ALIGN, 2 * ALIGN])
def test_K094_aligned_sizes(nbytes: int) -> None:
    assert _fastpath(nbytes=nbytes)[0] == 100


@pytest.mark.parametrize("nbytes", [1, ALIGN // 2, ALIGN - 1, ALIGN + 1, 2 * ALIGN - 1])
def test_K094_unaligned_sizes(nbytes: int) -> None:
    assert _fastpath(nbytes=nbytes) == (-1, ["size-align"])


@pytest.mark.parametrize("offset", [0, ALIGN, 2 * ALIGN, 1 << 40])
def test_K095_aligned_file_offsets(offset: int) -> None:
    assert _fastpath(file_offset=offset)[0] == 100


@pytest.mark.parametrize("offset", [1, ALIGN // 2, ALIGN - 1, ALIGN + 1])
def test_K095_unaligned_file_offsets(offset: int) -> None:
    assert _fastpath(file_offset=offset) == (-1, ["offset-align"])


@pytest.mark.parametrize("offset", [0, ALIGN, 2 * ALIGN])
def test_K096_aligned_buffer_offsets(offset: int) -> None:
    assert _fastpath(buffer_offset=offset)[0] == 100


@pytest.mark.parametrize("offset", [1, ALIGN // 2, ALIGN - 1, ALIGN + 1])
def test_K096_unaligned_buffer_offsets(offset: int) -> None:
    assert _fastpath(buffer_offset=offset) == (-1, ["memory-align"])


def test_the_score_does_not_ask_for_virtual_functions_or_history() -> None:
    """C-12: these surface as errors of the driver."""
    assert _fastpath(direct={"virtual_function": "yes"}, earlier_failure=19) == (100, [])


def test_an_alignment_of_zero_refuses_everything() -> None:
    assert _fastpath(file={"dio_mem_align": 0, "dio_offset_align": 0})[0] == -1
