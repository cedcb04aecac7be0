"""What is wanted of `gpu.py`'s figures."""

from __future__ import annotations

from gpu_ways import Bench


def floors(bench: Bench) -> list[tuple[str, float | None, str]]:
    """(what, measured, wanted) of the floors that were measured."""

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    rate, found = bench.rate, []
    kvikio, kvikio_two = bench.best("warm", "kvikio"), bench.best("two-cores", "kvikio")
    best = max(
        (r for r in (rate("warm", "safetensors .to"), rate("warm", "safetensors device=")) if r), default=None
    )
    found.append(
        (
            "warm, against kvikio at its best",
            ratio(rate("warm", "nobounce"), rate("warm", kvikio)),
            ">= 1.3",
        )
    )
    found.append(("warm, against safetensors", ratio(rate("warm", "nobounce"), best), ">= 10"))
    found.append(
        (
            "warm on 2 cores, against kvikio",
            ratio(rate("two-cores", "nobounce"), rate("two-cores", kvikio_two)),
            ">= 3",
        )
    )
    found.append(
        (
            "CPU per GiB, of kvikio's",
            ratio(bench.cpu("warm", "nobounce"), bench.cpu("warm", kvikio)),
            "<= 1",
        )
    )
    found.append(
        (
            "cold, of the plain O_DIRECT read",
            ratio(rate("cold", "nobounce"), rate("cold", "plain O_DIRECT")),
            ">= 0.95",
        )
    )
    for n in (1, 4, 8):
        found.append(
            (
                f"async on {n} streams, of sync",
                ratio(rate("async", f"{n} streams"), rate("async", "sync")),
                ">= 0.95",
            )
        )
    found.append(
        (
            "write + fsync, against safetensors",
            ratio(rate("write", "nobounce"), rate("write", "safetensors save + fsync")),
            ">= 1.5",
        )
    )
    first = bench.notes.get("first_use_ms")
    found.append(("first use, ms", min(first) if first else None, "<= 250"))
    ordered, plain = bench.notes.get("latency_in stream order_us"), bench.notes.get("latency_pread_us")
    found.append(
        (
            "4 KiB in stream order, us beyond pread",
            ordered[1] - plain[1] if ordered and plain else None,
            "<= 60",
        )
    )
    return found
