"""How routes are cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.io.strategy import TAIL_NBYTES, Strategy
from nobounce.io.target import PAGE, cut
from nobounce.route.types import Reason, Route, RouteSegment

COLD = Reason("no-direct-path", "there is none")


def route(file_offset: int, nbytes: int) -> Route:
    return Route((RouteSegment("fallback", file_offset, 0, nbytes, COLD),), ())


def pieces(nbytes: int, **fields: int) -> Strategy:
    return Strategy(4, nbytes, nbytes)._replace(**fields)


def test_a_relay_is_cut_at_page_boundaries_so_that_no_page_is_read_twice() -> None:
    chunks, _ = cut(route(16_392, 64 << 20), "read", pieces(8 << 20), PAGE)
    assert all(c.direct for c in chunks)
    assert [c.file_offset % PAGE for c in chunks] == [16_392 % PAGE] + [0] * (len(chunks) - 1)


@pytest.mark.parametrize("relay_align", [0, 512, 4096, 65536])
@given(
    file_offset=st.integers(0, 1 << 40),
    nbytes=st.integers(1, 1 << 20),
    chunk_nbytes=st.sampled_from([4096, 8192, 65536, 1 << 20]),
)
def test_chunks_cover_the_route_without_gap_and_keep_to_their_size(
    relay_align: int, file_offset: int, nbytes: int, chunk_nbytes: int
) -> None:
    chunks, epilogue = cut(route(file_offset, nbytes), "read", pieces(chunk_nbytes), relay_align)
    assert not epilogue
    position = file_offset
    for c in chunks:
        assert (c.file_offset, c.buffer_offset) == (position, position - file_offset)
        assert 0 < c.nbytes <= chunk_nbytes
        position += c.nbytes
    assert position == file_offset + nbytes


def test_the_last_pieces_alone_are_cut_fine() -> None:
    mib = 1 << 20
    chunks, _ = cut(route(0, 41 * mib), "read", pieces(8 * mib, tail=2))
    assert [c.nbytes for c in chunks] == [8 * mib] * 4 + [TAIL_NBYTES] * 2 + [mib]
    assert sum(c.nbytes for c in chunks) == 41 * mib
    assert [c.file_offset for c in chunks[1:]] == [c.file_offset + c.nbytes for c in chunks[:-1]]


def test_direct_bytes_and_those_that_fall_back_have_pieces_of_their_own() -> None:
    mib = 1 << 20
    direct = RouteSegment("fastpath", 0, 0, 32 * mib, COLD)
    rest = RouteSegment("fallback", 32 * mib, 32 * mib, 16 * mib, COLD)
    chunks, _ = cut(Route((direct, rest), ()), "read", pieces(8 * mib, direct_nbytes=16 * mib))
    assert [(c.backend, c.nbytes) for c in chunks] == [("fastpath", 16 * mib)] * 2 + [
        ("fallback", 8 * mib)
    ] * 2
