"""Where tensors land in their slab, and how misaligned ones are moved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.dtypes import DTYPES
from nobounce.errors import ArgumentError
from nobounce.formats.header import Header, TensorInfo
from nobounce.formats.placement import Placement, check_align, place, rounds

NAMES = ["U8", "BF16", "F32", "F64", "C64", "F8_E4M3"]


def header(sizes: list[tuple[str, int]], data_offset: int = 4096) -> Header:
    tensors, at = {}, 0
    for number, (dtype, count) in enumerate(sizes):
        nbytes = count * DTYPES[dtype].bits // 8
        tensors[str(number)] = TensorInfo(str(number), DTYPES[dtype], (count,), at, at + nbytes)
        at += nbytes
    return Header("f", data_offset + at, data_offset - 8, data_offset, tensors, {})


def offsets(spot: Placement, header: Header) -> list[int]:
    """Where each tensor lies in the slab; those that stay where the file has them are not listed."""
    stay = [spot.lead + info.start for info in header.tensors.values()]
    return stay if spot.offsets is None else spot.offsets


def carried_out(spot: Placement, file: bytes, scratch: int) -> bytearray:
    """The slab after arrival and every move, done as the loader does it: groups out to a scratch and back."""
    slab = bytearray(spot.slab_nbytes)
    arrived = file[spot.file_offset : spot.file_offset + spot.nbytes]
    slab[: len(arrived)] = arrived
    for group in rounds(spot.moves, scratch):
        assert sum(m.nbytes for m in group) <= scratch
        held = [bytes(slab[m.src : m.src + m.nbytes]) for m in group]
        for m, data in zip(group, held, strict=True):
            slab[m.dst : m.dst + m.nbytes] = data
    return slab


def test_an_aligned_file_needs_no_move_and_one_request() -> None:
    file = header([("F32", 5), ("F32", 7)], data_offset=4104)
    spot = place(file)
    assert spot.moves == []
    assert spot.offsets is None
    assert (spot.file_offset, spot.nbytes) == (4096, 4096)
    assert offsets(spot, file) == [8, 28]
    assert spot.needed == 8 + 48


def test_C56_tensor_after_an_odd_one_is_moved_to_its_alignment() -> None:
    spot = place(header([("U8", 3), ("F32", 2)]))
    assert spot.offsets == [0, 4]
    assert [tuple(m) for m in spot.moves] == [(4, 3, 8)]


def test_C70_odd_header_length_moves_the_file_as_one_run() -> None:
    spot = place(header([("F32", 100), ("F32", 50)], data_offset=4097))
    assert [tuple(m) for m in spot.moves] == [(4, 1, 600)]


def test_zero_size_tensors_move_nothing_and_push_nothing() -> None:
    file = header([("U8", 3), ("F32", 0), ("U8", 5)])
    spot = place(file)
    assert spot.moves == []
    assert offsets(spot, file)[2] == 3


def test_a_file_without_bytes_asks_for_none() -> None:
    spot = place(header([("F32", 0)]))
    assert (spot.nbytes, spot.needed) == (0, 0)


@pytest.mark.parametrize("align", [0, 3, 8192, -1])
def test_align_must_be_a_power_of_two_up_to_a_page(align: int) -> None:
    with pytest.raises(ArgumentError, match="align"):
        check_align(align)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 40)), max_size=12),
    st.integers(9, 9000),
    st.sampled_from([1, 8, 64, 256, 4096]),
    st.sampled_from([4096, 65536]),
    st.integers(1, 500),
)
def test_every_tensor_arrives_whole_and_aligned(
    sizes: list[tuple[str, int]], data_offset: int, align: int, grain: int, scratch: int
) -> None:
    h = header(sizes, data_offset)
    spot = place(h, align=align, grain=grain)
    file = random.Random(1).randbytes(h.file_nbytes)
    slab = carried_out(spot, file, scratch)
    assert spot.file_offset % grain == 0
    assert spot.nbytes % grain == 0
    for info, offset in zip(h.tensors.values(), offsets(spot, h), strict=True):
        if info.nbytes:
            assert offset % max(align, info.dtype.alignment) == 0
            start = h.data_offset + info.start
            assert slab[offset : offset + info.nbytes] == file[start : start + info.nbytes]
