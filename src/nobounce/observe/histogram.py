"""Buckets: sixteen by size, as hipFile has them, and a quarter of a power of two each by latency."""

from __future__ import annotations

from collections.abc import Sequence

from nobounce.observe.layout import LATENCY_BUCKETS, SIZE_BUCKETS


def size_bucket(nbytes: int) -> int:
    """hipFile F-4: 0 below 4 KiB, k for [2^(k+11), 2^(k+12)) bytes, 15 from 64 MiB on."""
    k = nbytes.bit_length() - 12
    return 0 if k < 0 else SIZE_BUCKETS - 1 if k >= SIZE_BUCKETS else k


def size_label(bucket: int) -> str:
    """The bucket's range in KiB, as ais-stats writes it: "0-4", "4-8", ..., "65536-..."."""
    low = size_floor(bucket) >> 10
    return f"{low}-..." if bucket == SIZE_BUCKETS - 1 else f"{low}-{size_floor(bucket + 1) >> 10}"


def size_floor(bucket: int) -> int:
    """The least size of a bucket, in bytes."""
    return 0 if bucket == 0 else 1 << (bucket + 11)


def latency_bucket(nanoseconds: int) -> int:
    """Four buckets a power of two, from a microsecond on; exact below 4 us."""
    us = nanoseconds // 1000
    bits = us.bit_length()
    if bits <= 2:
        return us
    bucket = (bits - 2) * 4 + ((us >> (bits - 3)) & 3)
    return bucket if bucket < LATENCY_BUCKETS else LATENCY_BUCKETS - 1


def latency_floor(bucket: int) -> int:
    """The least latency of a bucket, in microseconds."""
    return bucket if bucket < 4 else (4 + bucket % 4) << (bucket // 4 - 1)


def quantile(counts: Sequence[int], share: float) -> float:
    """The latency, in seconds, that `share` of the samples do not exceed: within a bucket's width
    (19 % at most). 0 for none."""
    total = sum(counts)
    if total == 0:
        return 0.0
    wanted, seen = share * total, 0
    for bucket, count in enumerate(counts):
        if count and seen + count >= wanted:
            low, high = latency_floor(bucket), latency_floor(bucket + 1)
            return (low + (high - low) * (wanted - seen) / count) / 1e6
        seen += count
    return latency_floor(len(counts)) / 1e6
