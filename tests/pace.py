"""Limits in seconds on machines that others use too: scaled by how much slower than usual the interpreter runs in that moment."""

from __future__ import annotations

import time
from collections.abc import Callable

TURNS = 2000
USUAL_SECONDS = 0.13e-6 * TURNS
"""What `turns` takes on the machine that the limits were set on, an EPYC of 2 cores left alone."""


def turns() -> float:
    """Seconds for a fixed piece of what interpreters do all day: tuples, hashes, sums."""
    sums: dict[tuple[int, str], int] = {}
    begin = time.perf_counter()
    for i in range(TURNS):
        key = (i & 7, "x")
        sums[key] = sums.get(key, 0) + i
    return time.perf_counter() - begin


def assert_takes_under(limit: float, measure: Callable[[], float], *, tries: int) -> None:
    """The fastest of `tries` of `measure`, which gives seconds, is under `limit` seconds; a machine slower than usual has more.

    The yardstick is taken beside each try, and both count by their fastest, so that a limit is never looser than the machine is slow.
    """
    samples, yardsticks = [], []
    for _ in range(tries):
        yardsticks += [turns(), turns()]
        samples.append(measure())
        yardsticks.append(turns())
        slow = max(1.0, min(yardsticks) / USUAL_SECONDS)
        if min(samples) < limit * (slow if len(samples) >= 3 else 1.0):
            return
        time.sleep(0.1)
    slowness = min(yardsticks) / USUAL_SECONDS
    figures = ", ".join(f"{s:.3g}" for s in samples)
    raise AssertionError(
        f"no try took under {limit:.3g} s, times {max(1.0, slowness):.2f} for a slow machine: {figures}"
    )
