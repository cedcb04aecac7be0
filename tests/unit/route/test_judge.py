"""The judge: which bytes go which way, and what it refuses."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.config import Settings
from nobounce.errors import ArgumentError, ConfigError, RouteError
from nobounce.facts.extents import IndirectRange
from nobounce.route.judge import PAGE, aligned_middle, best, judge
from nobounce.route.scores import score_fallback, score_fastpath
from nobounce.route.types import CachedRange, MemoryKind, Request, Require, Route, Score
from situations import DIRECT, FILE, MEMORY, on, request

FORCE = Settings(force_compat_mode=True)
FORBID = Settings(allow_compat_mode=False)


def ways(route: Route) -> list[tuple[str, int, int, str]]:
    return [(s.backend, s.file_offset, s.nbytes, s.reason.code) for s in route.segments]


def codes(subject: Score | RouteError) -> set[str]:
    return {r.code for r in subject.refusals}


def test_an_aligned_request_goes_direct_whole() -> None:
    assert ways(judge(request())) == [("fastpath", 1 << 20, 1 << 20, "direct")]
    assert score_fastpath(request()).value == 100
    assert score_fallback(request()).value == 1


def test_a_zero_size_request_has_no_segments() -> None:
    assert judge(request(nbytes=0)).segments == ()


def test_unaligned_edges_of_a_read_fall_back_and_the_middle_goes_direct() -> None:
    """hipFile J-18."""
    r = request(file_offset=100, buffer_offset=100, nbytes=10_000)
    assert ways(judge(r)) == [
        ("fallback", 100, 412, "unaligned-edge"),
        ("fastpath", 512, 9216, "direct"),
        ("fallback", 9728, 372, "unaligned-edge"),
    ]


def test_edges_of_a_write_are_whole_pages() -> None:
    """A page that holds buffered and direct bytes could be written back over the direct ones."""
    r = request(op="write", file_offset=100, buffer_offset=100, nbytes=20_000)
    assert ways(judge(r)) == [
        ("fallback", 100, 3996, "unaligned-edge"),
        ("fastpath", 4096, 12288, "direct"),
        ("fallback", 16384, 3716, "unaligned-edge"),
    ]


def test_memory_that_never_lines_up_with_the_file_falls_back_whole() -> None:
    route = judge(request(buffer_offset=1))
    assert ways(route) == [("fallback", 1 << 20, 1 << 20, "memory-align")]


def test_memory_alignment_larger_than_the_file_alignment_is_kept() -> None:
    r = request(file={"dio_mem_align": 4096}, file_offset=512, buffer_offset=0, nbytes=1 << 16)
    assert aligned_middle(r) == (512, 512 + (1 << 16))
    shifted = request(file={"dio_mem_align": 4096}, file_offset=512, buffer_offset=512, nbytes=1 << 16)
    first, last = aligned_middle(shifted) or (0, 0)
    assert (shifted.memory.address + shifted.buffer_offset + first - 512) % 4096 == 0
    assert first == 4096
    assert last == 512 + (1 << 16)


def test_require_fastpath_raises_with_the_misses_of_an_unaligned_request() -> None:
    with pytest.raises(RouteError) as caught:
        judge(request(require="fastpath", file_offset=3, nbytes=10_000))
    assert codes(caught.value) == {"offset-align", "size-align"}
    assert caught.value.errno == errno.EOPNOTSUPP
    assert "/data/model.bin" in str(caught.value)


def test_require_fallback_forces_the_bounce() -> None:
    assert ways(judge(request(require="fallback"))) == [("fallback", 1 << 20, 1 << 20, "required-fallback")]


def test_require_beats_cache() -> None:
    held = (CachedRange(1 << 20, 1 << 20, True),)
    assert ways(judge(request(require="fastpath", cache="auto", cached=held)))[0][0] == "fastpath"
    assert ways(judge(request(require="fallback", cache="avoid")))[0][0] == "fallback"


def test_force_compat_mode_sends_everything_through_fallback() -> None:
    assert ways(judge(request(settings=FORCE))) == [("fallback", 1 << 20, 1 << 20, "fastpath-disabled")]


def test_force_compat_mode_and_require_fastpath_name_the_variable() -> None:
    with pytest.raises(RouteError, match="HIPFILE_FORCE_COMPAT_MODE"):
        judge(request(settings=FORCE, require="fastpath"))


def test_without_compat_mode_an_unaligned_edge_is_refused() -> None:
    assert ways(judge(request(settings=FORBID)))[0][0] == "fastpath"
    with pytest.raises(RouteError, match="HIPFILE_ALLOW_COMPAT_MODE") as caught:
        judge(request(settings=FORBID, nbytes=1000))
    assert "size-align" in codes(caught.value)


def test_without_compat_mode_there_is_no_page_cache_route() -> None:
    held = (CachedRange(1 << 20, 1 << 20, True),)
    assert ways(judge(request(settings=FORBID, cache="auto", cached=held)))[0][0] == "fastpath"
    assert ways(judge(request(settings=FORBID, cache="use")))[0][0] == "fastpath"


def test_without_compat_mode_require_fallback_raises_and_names_it() -> None:
    with pytest.raises(RouteError, match="HIPFILE_ALLOW_COMPAT_MODE"):
        judge(request(settings=FORBID, require="fallback"))


def test_allow_false_with_force_true_raises_and_names_both() -> None:
    both = Settings(allow_compat_mode=False, force_compat_mode=True)
    with pytest.raises(ConfigError, match=r"HIPFILE_ALLOW_COMPAT_MODE.*HIPFILE_FORCE_COMPAT_MODE"):
        judge(request(settings=both))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"file": {"kind": "fifo"}}, "file-kind"),
        ({"file": on("tmpfs", memory=True)}, "memory-file-system"),
        ({"file": {"dio_offset_align": 0, "dio_mem_align": 0}}, "no-direct-io"),
        ({"file": {"direct_fd": "refused", "direct_errno": errno.EINVAL}}, "no-direct-descriptor"),
        ({"file": {"dio_offset_align": None, "dio_mem_align": None}}, "direct-io-unproven"),
        (
            {"file": {"dio_offset_align": None, "dio_mem_align": None, "direct_probe": "no"}},
            "direct-io-unproven",
        ),
        ({"direct": {"available": False, "because": "no P2P", "code": "no-p2p"}}, "no-p2p"),
        ({"direct": {"virtual_function": "yes"}}, "virtual-function"),
        (
            {
                "memory": {"kind": MemoryKind.MANAGED},
                "direct": {"memory_kinds": frozenset({MemoryKind.DEVICE})},
            },
            "memory-kind",
        ),
        ({"earlier_failure": errno.ENODEV}, "failed-before"),
        ({"file": on("btrfs"), "direct": {"file_rule": "hipfile"}}, "file-system"),
        ({"file": on("ext4", journal="writeback"), "direct": {"file_rule": "hipfile"}}, "ext4-journal"),
    ],
)
def test_each_refusal_has_its_code_and_sends_the_request_to_fallback(
    change: dict[str, object], code: str
) -> None:
    r = request(**change)
    score = score_fastpath(r)
    assert score.value == -1
    assert code in codes(score)
    if code != "file-kind":
        assert ways(judge(r)) == [("fallback", 1 << 20, 1 << 20, code)]
    with pytest.raises(RouteError) as caught:
        judge(replace(r, require="fastpath"))
    assert code in codes(caught.value)


@pytest.mark.parametrize("require", ["auto", "fastpath"])
def test_what_both_backends_refuse_for_is_told_once(require: Require) -> None:
    with pytest.raises(RouteError) as caught:
        judge(request(file={"kind": "char"}, require=require))
    assert [r.code for r in caught.value.refusals] == ["file-kind"]
    assert str(caught.value).count("no offsets") == 1
    assert "a character device has no offsets to read or write at" in str(caught.value)


def test_every_failed_condition_is_kept_not_only_the_first() -> None:
    r = request(settings=FORCE, file={"direct_fd": "refused", "direct_errno": errno.EINVAL}, nbytes=7)
    assert {"fastpath-disabled", "no-direct-descriptor", "size-align"} <= codes(score_fastpath(r))


def test_absent_dioalign_with_a_probe_that_moved_bytes_is_direct() -> None:
    r = request(file={"dio_offset_align": None, "dio_mem_align": None, "direct_probe": "yes"})
    assert ways(judge(r))[0][0] == "fastpath"


@pytest.mark.parametrize("system", [on("xfs"), on("ext4")])
def test_hipfile_rule_accepts_xfs_and_ordered_ext4(system: dict[str, object]) -> None:
    """hipFile C-9."""
    assert score_fastpath(request(file=system, direct={"file_rule": "hipfile"})).value == 100


def test_hipfile_rule_accepts_any_file_system_when_told_to() -> None:
    r = request(
        file=on("btrfs"), direct={"file_rule": "hipfile"}, settings=Settings(unsupported_file_systems=True)
    )
    assert score_fastpath(r).value == 100


def test_cached_ranges_come_from_the_page_cache_and_the_rest_goes_direct() -> None:
    held = (CachedRange(1 << 20, 1 << 18, False), CachedRange((1 << 20) + (1 << 18), 3 << 18, True))
    assert ways(judge(request(cache="auto", cached=held))) == [
        ("fastpath", 1 << 20, 1 << 18, "direct"),
        ("fallback", (1 << 20) + (1 << 18), 3 << 18, "cached"),
    ]


def test_what_follows_a_cached_range_suits_the_memory_too() -> None:
    r = request(
        file={"dio_mem_align": 2, "dio_offset_align": 1},
        file_offset=0,
        nbytes=8,
        cache="auto",
        cached=(CachedRange(0, 3, True),),
    )
    assert ways(judge(r)) == [("fallback", 0, 2, "cached"), ("fastpath", 2, 6, "direct")]


@pytest.mark.parametrize("resident", [None, False])
def test_unknown_residency_means_cold(resident: bool | None) -> None:
    held = (CachedRange(1 << 20, 1 << 20, resident),)
    assert ways(judge(request(cache="auto", cached=held)))[0][0] == "fastpath"


def test_cache_use_reads_through_the_page_cache() -> None:
    assert ways(judge(request(cache="use"))) == [("fallback", 1 << 20, 1 << 20, "cache-use")]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"nbytes": -1}, "nbytes"),
        ({"file_offset": -4096}, "file_offset"),
        ({"buffer_offset": -4096}, "buffer_offset"),
        ({"buffer_offset": (1 << 26) + 1, "nbytes": 0}, "buffer_offset"),
        ({"nbytes": (1 << 26) + 1}, "nbytes"),
        ({"file_offset": (1 << 63) - 10}, "file_offset"),
    ],
)
def test_a_bad_region_is_named(change: dict[str, int], word: str) -> None:
    """hipFile A-36, A-37."""
    with pytest.raises(ArgumentError, match=word):
        judge(request(**change))


def test_a_zero_size_request_at_the_end_of_the_buffer_is_fine() -> None:
    """hipFile J-25."""
    assert judge(request(nbytes=0, buffer_offset=1 << 26)).segments == ()


def test_the_highest_score_wins_and_a_tie_keeps_the_earlier() -> None:
    """hipFile C-2."""
    low, high, tie = Score("fallback", 1), Score("fastpath", 100), Score("fastpath", 1)
    assert best((low, high)) is high
    assert best((low, tie)) is low
    assert best((Score("fallback", -1),)) is None


powers = st.integers(0, 13).map(lambda n: 1 << n)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    nbytes = draw(st.integers(0, 1 << 17))
    buffer_offset = draw(st.integers(0, 1 << 14))
    file_offset = draw(st.integers(0, 1 << 16))
    if draw(st.booleans()):
        file_offset, buffer_offset = file_offset // 512 * 512, buffer_offset // 512 * 512
    pieces = draw(st.lists(st.tuples(st.integers(0, 1 << 17), st.booleans()), max_size=4))
    cached, at = [], file_offset
    for size, resident in pieces:
        cached.append(CachedRange(at, size, resident))
        at += size
    return request(
        op=draw(st.sampled_from(["read", "write"])),
        file=replace(FILE, dio_mem_align=draw(powers), dio_offset_align=draw(powers)),
        memory=replace(MEMORY, address=draw(st.integers(0, 1 << 14)), nbytes=1 << 20),
        direct=DIRECT,
        nbytes=nbytes,
        file_offset=file_offset,
        buffer_offset=buffer_offset,
        cache=draw(st.sampled_from(["auto", "avoid", "use"])),
        cached=tuple(cached),
    )


@given(requests())
def test_segments_cover_the_request_once_and_direct_ones_are_aligned(r: Request) -> None:
    route = judge(r)
    position = r.file_offset
    for s in route.segments:
        assert s.nbytes > 0
        assert s.file_offset == position
        assert s.buffer_offset - r.buffer_offset == s.file_offset - r.file_offset
        position += s.nbytes
        if s.backend == "fastpath":
            assert s.file_offset % r.file.dio_offset_align == 0
            assert s.nbytes % r.file.dio_offset_align == 0
            assert (r.memory.address + s.buffer_offset) % r.file.dio_mem_align == 0
    assert position == r.file_offset + r.nbytes


@given(requests())
def test_buffered_and_direct_bytes_of_a_write_never_share_a_page(r: Request) -> None:
    r = replace(r, op="write")
    pages: dict[int, set[str]] = {}
    for s in judge(r).segments:
        for page in {s.file_offset // PAGE, (s.file_offset + s.nbytes - 1) // PAGE}:
            pages.setdefault(page, set()).add(s.backend)
    assert all(len(backends) == 1 for backends in pages.values())


@given(requests())
def test_a_score_of_100_means_one_direct_segment_and_no_other(r: Request) -> None:
    r = replace(r, cache="avoid")
    route = judge(r)
    if r.nbytes and score_fastpath(r).value == 100:
        assert [s.backend for s in route.segments] == ["fastpath"]


MIXED = (
    IndirectRange((1 << 20) + 8192, 4096, "encoded-extent"),
    IndirectRange((1 << 20) + 65536, 1 << 30, "page-cache-served"),
)


def test_ranges_that_the_page_cache_reads_fall_back_and_the_others_go_direct() -> None:
    """Issue 20, truth 1: a btrfs file may answer differently from extent to extent."""
    assert ways(judge(request(indirect=MIXED))) == [
        ("fastpath", 1 << 20, 8192, "direct"),
        ("fallback", (1 << 20) + 8192, 4096, "encoded-extent"),
        ("fastpath", (1 << 20) + 12288, 53248, "direct"),
        ("fallback", (1 << 20) + 65536, (1 << 20) - 65536, "page-cache-served"),
    ]
    assert ways(judge(request(indirect=MIXED, nbytes=4096))) == [("fastpath", 1 << 20, 4096, "direct")]


def test_what_is_left_beside_an_indirect_range_stays_aligned() -> None:
    odd = (IndirectRange((1 << 20) + 5000, 100, "inline-extent"),)
    found = ways(judge(request(indirect=odd, file={"dio_offset_align": 4096, "dio_mem_align": 4096})))
    assert [(o - (1 << 20), n) for _, o, n, _ in found] == [(0, 4096), (4096, 4096), (8192, (1 << 20) - 8192)]


def test_cached_bytes_of_an_indirect_range_are_cached_bytes() -> None:
    held = (CachedRange(1 << 20, 65536, True),)
    found = ways(judge(request(indirect=MIXED, cache="auto", cached=held)))
    assert found[0] == ("fallback", 1 << 20, 65536, "cached")


def test_an_indirect_range_is_refused_where_all_must_go_direct() -> None:
    for more in ({"require": "fastpath"}, {"settings": FORBID}):
        with pytest.raises(RouteError, match="compressed or encrypted") as caught:
            judge(request(indirect=MIXED, **more))
        assert codes(caught.value) >= {"encoded-extent", "page-cache-served"}
    assert {r.code for r in score_fastpath(request(indirect=MIXED)).refusals} >= {"encoded-extent"}
    assert judge(request(indirect=MIXED, require="fastpath", nbytes=8192)).nbytes("fastpath") == 8192


def test_a_write_does_not_ask_how_the_old_bytes_are_kept() -> None:
    assert judge(request(op="write", indirect=MIXED)).nbytes("fallback") == 0


@given(
    ranges=st.lists(st.tuples(st.integers(0, 99_999), st.integers(1, 30_000)), max_size=5),
    start=st.integers(0, 60_000),
    nbytes=st.integers(0, 60_000),
    align=st.sampled_from([512, 4096]),
)
def test_no_indirect_byte_goes_direct_and_every_byte_goes_once(
    ranges: list[tuple[int, int]], start: int, nbytes: int, align: int
) -> None:
    apart, position = [], 0
    for gap, size in ranges:
        apart.append(IndirectRange(position + gap, size, "encoded-extent"))
        position += gap + size
    aligned = {"dio_offset_align": align, "dio_mem_align": 512}
    route = judge(
        request(file=aligned, file_offset=start, nbytes=nbytes, buffer_offset=start, indirect=tuple(apart))
    )
    position = start
    for s in route.segments:
        assert (s.file_offset, s.nbytes > 0) == (position, True)
        position += s.nbytes
        if s.backend == "fastpath":
            assert s.file_offset % align == s.nbytes % align == 0
            ends = s.file_offset + s.nbytes
            assert not any(r.file_offset < ends and s.file_offset < r.file_offset + r.nbytes for r in apart)
    assert position == start + nbytes
