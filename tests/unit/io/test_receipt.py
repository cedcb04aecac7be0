"""Receipts: totals, sums, and what a person reads."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from nobounce.io.receipt import Receipt, Retry, Segment, merge_segments, total
from nobounce.route.types import Reason

DIRECT = Reason("direct", "aligned")
CACHED = Reason("cached", "in the page cache")
EDGE = Reason("unaligned-edge", "the edge", "align it")


def receipt(*segments: Segment, **changes: Any) -> Receipt:
    nbytes = sum(s.nbytes for s in segments)
    fields: dict[str, Any] = {
        "op": "read",
        "filename": "f",
        "device": "cpu",
        "requested": nbytes,
        "nbytes": nbytes,
        "segments": segments,
        "evidence": "kernel",
    }
    return Receipt(**{**fields, **changes})


def test_totals_by_backend_and_reason() -> None:
    r = receipt(
        Segment("fastpath", 0, 0, 100, DIRECT),
        Segment("fallback", 100, 100, 20, CACHED),
        Segment("fallback", 120, 120, 3, EDGE, relayed=True),
    )
    assert (r.fastpath_bytes, r.fallback_bytes, r.cached_bytes) == (100, 23, 20)
    assert r.host_traffic_bytes == 6
    assert r.reasons == {"direct": 100, "cached": 20, "unaligned-edge": 3}


def test_to_dict_has_exactly_the_documented_fields() -> None:
    data = receipt(Segment("fastpath", 0, 0, 1, DIRECT)).to_dict()
    assert list(data) == [
        "fastpath_bytes",
        "fallback_bytes",
        "cached_bytes",
        "host_traffic_bytes",
        "reasons",
        "retries",
        "evidence",
        "hole_bytes",
    ]
    json.dumps(data)


def test_explain_says_where_each_byte_went_and_why() -> None:
    text = receipt(
        Segment("fastpath", 0, 0, 4096, DIRECT),
        Segment("fallback", 4096, 4096, 5, EDGE),
        retries=(Retry(0, 4096, errno.ENODEV),),
        requested=5000,
    ).explain()
    for word in ("fastpath", "4,096", "unaligned-edge", "cure: align it", "ENODEV", "short: 899"):
        assert word in text


def test_explain_escapes_names() -> None:
    assert "\x1b" not in receipt(Segment("fastpath", 0, 0, 1, DIRECT), filename="a\x1b[2J").explain()


def test_neighbours_of_one_way_are_one_segment() -> None:
    parts = [
        Segment("fastpath", 4, 4, 4, DIRECT),
        Segment("fastpath", 0, 0, 4, DIRECT),
        Segment("fallback", 8, 8, 1, EDGE),
    ]
    assert merge_segments(parts) == (Segment("fastpath", 0, 0, 8, DIRECT), Segment("fallback", 8, 8, 1, EDGE))


def test_a_sum_has_the_weakest_evidence_of_those_with_direct_bytes() -> None:
    strong = receipt(Segment("fastpath", 0, 0, 1, DIRECT))
    weak = receipt(Segment("fastpath", 0, 0, 1, DIRECT), evidence="reported")
    none = receipt(Segment("fallback", 0, 0, 1, EDGE), evidence="none")
    assert total([strong, none]).evidence == "kernel"
    assert total([strong, weak, none]).evidence == "reported"
    assert total([none]).evidence == "none"
    assert total([strong, weak]).nbytes == 2


def test_no_receipts_have_no_sum() -> None:
    with pytest.raises(ValueError, match="no receipts"):
        total([])
