from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.observe.histogram import (
    latency_bucket,
    latency_floor,
    quantile,
    size_bucket,
    size_floor,
    size_label,
)
from nobounce.observe.layout import LATENCY_BUCKETS, SIZE_BUCKETS


@pytest.mark.parametrize(
    ("nbytes", "bucket"),
    [
        (0, 0),
        (1, 0),
        (4095, 0),
        (4096, 1),
        (8191, 1),
        (8192, 2),
        (1 << 20, 9),
        ((1 << 26) - 1, 14),
        (1 << 26, 15),
        (1 << 40, 15),
    ],
)
def test_sizes_fall_into_hipfiles_buckets(nbytes: int, bucket: int) -> None:
    """hipFile F-4."""
    assert size_bucket(nbytes) == bucket


@given(st.integers(0, 1 << 45))
def test_a_size_lies_in_its_bucket(nbytes: int) -> None:
    k = size_bucket(nbytes)
    assert size_floor(k) <= nbytes
    assert k == SIZE_BUCKETS - 1 or nbytes < size_floor(k + 1)


def test_labels_are_those_of_ais_stats() -> None:
    assert [size_label(k) for k in (0, 1, 14, 15)] == ["0-4", "4-8", "32768-65536", "65536-..."]


@given(st.integers(0, 1 << 50))
def test_a_latency_lies_in_its_bucket(nanoseconds: int) -> None:
    k = latency_bucket(nanoseconds)
    assert 0 <= k < LATENCY_BUCKETS
    assert latency_floor(k) <= nanoseconds // 1000
    assert nanoseconds // 1000 < latency_floor(k + 1)


@given(st.lists(st.integers(1000, 10**10), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_right_to_a_buckets_width(samples: list[int], share: float) -> None:
    counts = [0] * LATENCY_BUCKETS
    for s in samples:
        counts[latency_bucket(s)] += 1
    rank = next(i for i in range(len(samples)) if (i + 1) >= share * len(samples))
    true = sorted(samples)[rank] / 1e9
    assert true / 1.3 - 1e-6 <= quantile(counts, share) <= true * 1.3 + 2e-6


def test_no_samples_have_no_quantile() -> None:
    assert quantile([0] * LATENCY_BUCKETS, 0.5) == 0
