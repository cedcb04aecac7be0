"""The judge's answer to many requests at once is the judge's answer to each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.config import Settings
from nobounce.errors import ArgumentError, ConfigError, RouteError
from nobounce.facts.extents import IndirectRange
from nobounce.route import many
from nobounce.route.judge import judge
from nobounce.route.scores import INDIRECT, indirect_ranges
from nobounce.route.types import CachedRange
from situations import request

TOP = (1 << 63) - 1
SIZE = 1 << 20
offsets = st.one_of(
    st.integers(0, 40).map(lambda n: n * 512),
    st.integers(0, 9).map(lambda n: n * 4096),
    st.integers(-3, 30_000),
    st.sampled_from([TOP, TOP - 4096, TOP - 511, SIZE, SIZE - 1, SIZE + 1, -1, -TOP - 1]),
)
situations = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["read", "write"]),
        "require": st.sampled_from(["auto", "auto", "fastpath", "fallback"]),
        "cache": st.sampled_from(["avoid", "use", "auto"]),
        "settings": st.sampled_from(
            [Settings(), Settings(), Settings(force_compat_mode=True), Settings(allow_compat_mode=False)]
        ),
        "earlier_failure": st.sampled_from([None, None, None, 19]),
        "indirect": st.sampled_from(
            [
                (),
                (),
                (IndirectRange(4096, 8192, "encoded-extent"), IndirectRange(16384, 5000, "inline-extent")),
                (IndirectRange(0, SIZE, "page-cache-served"),),
            ]
        ),
        "file": st.fixed_dictionaries(
            {
                "dio_mem_align": st.sampled_from([0, 4, 512, 4096, 16384, None]),
                "dio_offset_align": st.sampled_from([0, 512, 4096, 16384, None]),
                "direct_probe": st.sampled_from(["yes", "no", "unknown"]),
                "kind": st.sampled_from(["regular", "regular", "regular", "block", "fifo"]),
            }
        ),
        "memory": st.fixed_dictionaries(
            {"address": st.sampled_from([1 << 21, (1 << 21) + 512, (1 << 21) + 4, 0x7FFF_FFFF_F001])},
        ).map(lambda m: {**m, "nbytes": SIZE}),
    }
)


def kind_by_judge(one: Any) -> tuple[int, str]:
    """What `judge_many` should say of the request, and the reason's code of a whole fallback."""
    try:
        route = judge(one)
    except ArgumentError:
        return many.INVALID, ""
    except RouteError:
        return many.REFUSED, ""
    if not route.segments:
        return many.EMPTY, ""
    only = route.segments[0]
    if len(route.segments) > 1 or only.reason.code == "cached":
        return many.SPLIT, ""
    if only.reason.code in INDIRECT:
        ends = only.file_offset + only.nbytes
        ranges = indirect_ranges(one)
        inside = any(r.file_offset <= only.file_offset and ends <= r.file_offset + r.nbytes for r in ranges)
        if not inside:  # a direct read of its aligned part would reach into the range
            return many.SPLIT, ""
    return (many.DIRECT, "") if only.backend == "fastpath" else (many.WHOLE, only.reason.code)


@given(situation=situations, places=st.lists(st.tuples(offsets, offsets, offsets), min_size=1, max_size=30))
def test_vectorised_routing_equals_the_judge(
    situation: dict[str, Any], places: list[tuple[int, int, int]]
) -> None:
    template = request(**situation)
    columns = [np.array(c, np.int64) for c in zip(*places, strict=True)]
    answer = many.judge_many(template, *columns)
    for (file_offset, nbytes, buffer_offset), kind, reason in zip(
        places, answer.kinds, answer.reasons, strict=True
    ):
        wanted, code = kind_by_judge(many.place(template, file_offset, nbytes, buffer_offset))
        assert kind == wanted
        assert (answer.reason_list[reason].code if kind == many.WHOLE else "") == code
        if kind != many.WHOLE:
            assert reason == -1
    if answer.hopeless:
        assert set(answer.kinds) <= {many.EMPTY, many.INVALID, many.REFUSED}


def test_what_the_page_cache_holds_all_of_falls_back_by_choice_and_a_part_is_judged_alone() -> None:
    at = np.array([0, 4096, 8192, 12288, 20000], np.int64)
    nbytes = np.array([4096, 4096, 4096, 0, 100], np.int64)
    template = request(cache="auto", memory={"nbytes": SIZE})
    held = np.array([many.NONE, many.SOME, many.ALL, many.ALL, many.ALL], np.uint8)
    answer = many.judge_many(template, at, nbytes, at, cached=held)
    assert answer.kinds.tolist() == [many.DIRECT, many.SPLIT, many.WHOLE, many.EMPTY, many.WHOLE]
    assert [answer.reason_list[r].code for r in answer.reasons.tolist() if r >= 0] == ["cached", "cached"]
    for i in (2, 4):  # its edges too, whatever their alignment
        place = int(at[i]), int(nbytes[i]), int(at[i])
        alone = many.place(template, *place, (CachedRange(*place[:2], True),))
        assert [s.reason.code for s in judge(alone).segments] == ["cached"]
    assert answer.cold_kinds is not None
    cold = many.judge_many(template, at, nbytes, at)
    assert answer.cold_kinds.tolist() == cold.kinds.tolist()
    for only in (
        {"require": "fastpath"},
        {"settings": Settings(allow_compat_mode=False)},
        {"cache": "avoid"},
    ):
        plain = request(**{"cache": "auto", "memory": {"nbytes": SIZE}, **only})
        asked = many.judge_many(plain, at, nbytes, at, cached=held)
        assert asked.kinds.tolist() == many.judge_many(plain, at, nbytes, at).kinds.tolist()


def test_contradicting_variables_refuse_them_all() -> None:
    one = np.zeros(1, np.int64)
    bad = request(settings=Settings(allow_compat_mode=False, force_compat_mode=True))
    with pytest.raises(ConfigError, match="HIPFILE_ALLOW_COMPAT_MODE"):
        many.judge_many(bad, one, one, one)


def test_the_error_of_one_request_is_the_judges() -> None:
    bad = replace(request(), file_offset=-1)
    assert "file_offset is -1" in str(many.error_of(bad))
    assert many.error_of(request()) is None
