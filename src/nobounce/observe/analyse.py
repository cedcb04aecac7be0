"""From a trace to the figures of the report: sums over every transfer, and the few that are shown one by one.

The records have been checked where they were read (`records`): what is there has its type, what is not
there counts as nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nobounce.observe.histogram import (
    latency_bucket,
    latency_floor,
    quantile,
    size_bucket,
    size_label,
)
from nobounce.observe.layout import LATENCY_BUCKETS, SIZE_BUCKETS
from nobounce.observe.roofline import roofs
from nobounce.observe.traceread import Trace

MOST_SLICES = 3000
"""Slices that the timeline shows; the longest of them all."""
MOST_SLOW = 20
BINS = 120


def analyse(trace: Trace, limits: Mapping[str, float]) -> dict[str, Any]:
    """The data of the report page, JSON-able; it says what the trace and the page leave out."""
    transfers = [e for e in trace.events if e.get("cat") == "transfer" and _whole(e)]
    chunks = [e for e in trace.events if e.get("cat") in ("chunk", "copy") and _whole(e)]
    names = {
        (e.get("pid"), e.get("tid")): e["args"].get("name", "")
        for e in trace.events
        if e.get("ph") == "M" and e.get("name") == "thread_name" and "args" in e
    }
    often = Counter(names.values())
    names = {key: name if often[name] == 1 else f"{name} {key[1]}" for key, name in names.items()}
    batches = [e for e in trace.events if e.get("cat") == "batch" and "args" in e]
    groups = [e for e in batches if _whole(e)]
    moves = [*transfers, *groups]
    begin = min((e["ts"] for e in [*moves, *chunks]), default=0.0)
    end = max((e["ts"] + e["dur"] for e in [*moves, *chunks]), default=begin)
    seconds = (end - begin) / 1e6
    moved = [e for e in transfers if _receipt(e)]  # not those that were refused or cancelled
    sums = _sums(transfers, batches)
    shown = heapq.nlargest(MOST_SLICES, [*moves, *chunks], key=lambda e: e["dur"])
    shown.sort(key=lambda e: e["ts"])
    slow = heapq.nlargest(MOST_SLOW, moves, key=lambda e: e["dur"])
    processes = list(dict.fromkeys(e.get("pid") for e in trace.events))
    many = len(processes) > 1
    return {
        "seconds": seconds,
        "processes": processes,
        "totals": sums,
        "throughput": _throughput(moves, begin, max(end - begin, 1.0)),
        "sizes": _sizes(moved),
        "latencies": _latencies(moved),
        "slices": [_slice(e, begin, names, many) for e in shown],
        "slowest": [_slice(e, begin, names, many) for e in slow],
        "limits": dict(limits),
        "roofs": [r.to_dict() for r in roofs(_rates(moves), limits)],
        "left_out": {
            "events_dropped": trace.dropped,
            "files_cut": trace.cut,
            "slices_not_shown": len(moves) + len(chunks) - len(shown),
            "limits_reached": sum(e.get("cat") == "limit" for e in trace.events),
            "batches_without_slice": len(batches) - len(groups),
        },
        "counters": _counted(trace),
    }


def _whole(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "X" and all(k in event for k in ("ts", "dur", "args"))


def _receipt(event: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = event["args"].get("receipt", {})
    return found


def _bytes(event: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by way: fastpath, fallback and the cached part of it taken out."""
    r = _receipt(event)
    cached = r.get("cached_bytes", 0)
    fallback = max(0, r.get("fallback_bytes", 0) - cached)
    return {"fastpath": r.get("fastpath_bytes", 0), "fallback": fallback, "cached": cached}


def _sums(transfers: list[dict[str, Any]], batches: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"transfers": len(transfers), "errors": 0, "retries": 0, "host_traffic_bytes": 0}
    out |= {"fastpath_bytes": 0, "fallback_bytes": 0, "cached_bytes": 0, "by_reason": [], "batch_requests": 0}
    reasons: dict[tuple[str, str], int] = {}
    refused: Counter[str] = Counter()
    for e in [*transfers, *batches]:
        r, args = _receipt(e), e["args"]
        for name in ("fastpath_bytes", "fallback_bytes", "cached_bytes", "host_traffic_bytes"):
            out[name] += r.get(name, 0)
        out["errors"] += "error" in args
        out["retries"] += len(r.get("retries", ()))
        out["batch_requests"] += args.get("requests", 0)
        refused.update(args.get("refused", ()))
        for code, nbytes in r.get("reasons", {}).items():
            backend = "fastpath" if code == "direct" else "fallback"
            if not r.get("fallback_bytes"):
                backend = "fastpath"
            elif not r.get("fastpath_bytes"):
                backend = "fallback"
            reasons[backend, code] = reasons.get((backend, code), 0) + nbytes
        statuses = args.get("statuses", {})
        out["errors"] += sum(statuses.get(s, 0) for s in ("failed", "timeout"))
    out["by_reason"] = [{"backend": b, "reason": c, "nbytes": n} for (b, c), n in sorted(reasons.items())]
    out["refused"] = dict(sorted(refused.items()))
    return out


def _throughput(transfers: list[dict[str, Any]], begin: float, length: float) -> list[dict[str, Any]]:
    """Bytes per second in equal stretches of time, each transfer's bytes spread over its own time."""
    width = length / BINS
    bins = {way: [0.0] * BINS for way in ("fastpath", "fallback", "cached")}
    for e in transfers:
        first, span = e["ts"] - begin, max(e["dur"], 1e-3)
        a, b = int(first / width), min(BINS - 1, int((first + span) / width))
        for way, nbytes in _bytes(e).items():
            if nbytes:
                for k in range(min(a, BINS - 1), b + 1):
                    part = min(first + span, (k + 1) * width) - max(first, k * width)
                    bins[way][k] += nbytes * max(0.0, part) / span
    used = [way for way in bins if any(bins[way])]
    return [
        {"seconds": (k + 0.5) * width / 1e6, "way": way, "bytes_per_second": bins[way][k] / (width / 1e6)}
        for way in used
        for k in range(BINS)
    ]


def _sizes(transfers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts = [0] * SIZE_BUCKETS
    for e in transfers:
        counts[size_bucket(e["args"].get("nbytes", 0))] += 1
    return [{"bucket": k, "label": size_label(k), "count": n} for k, n in enumerate(counts) if n]


def _latencies(transfers: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [0] * LATENCY_BUCKETS
    for e in transfers:
        counts[latency_bucket(int(e["dur"] * 1000))] += 1
    return {
        "buckets": [
            {"from_us": latency_floor(k), "to_us": latency_floor(k + 1), "count": n}
            for k, n in enumerate(counts)
            if n
        ],
        **{name: quantile(counts, q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
    }


def _rates(transfers: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes per second by way while transfers of that way were under way: the union of their times."""
    spans: dict[str, list[tuple[float, float]]] = {}
    moved: dict[str, int] = {}
    for e in transfers:
        for way, nbytes in _bytes(e).items() if e.get("name") in ("read", "write") else ():
            if nbytes:
                key = f"{way} {e['name']}"
                spans.setdefault(key, []).append((e["ts"], e["ts"] + e["dur"]))
                moved[key] = moved.get(key, 0) + nbytes
    rates = {}
    for key, found in spans.items():
        busy, until = 0.0, float("-inf")
        for start, end in sorted(found):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        if busy > 0 and key != "cached write":
            rates[key] = moved[key] / (busy / 1e6)
    return rates


def _slice(e: dict[str, Any], begin: float, names: Mapping[Any, str], many: bool) -> dict[str, Any]:
    args = e["args"]
    track = names.get((e.get("pid"), e.get("tid"))) or f"thread {e.get('tid')}"
    ways = _bytes(e) if e["cat"] in ("transfer", "batch") else {}
    way = (
        "error"
        if "error" in args
        else "fallback"
        if ways.get("fallback") or ways.get("cached")
        else "fastpath"
    )
    if e["cat"] == "chunk":
        way = e.get("name", "").split(" ")[0]
    elif e["cat"] == "copy":
        way = "copy"
    return {
        "track": f"{e.get('pid')} {track}" if many else track,
        "from_ms": (e["ts"] - begin) / 1e3,
        "to_ms": (e["ts"] + e["dur"] - begin) / 1e3,
        "name": e.get("name", ""),
        "kind": e["cat"],
        "way": way if way in ("fastpath", "fallback", "copy", "error") else "fallback",
        "args": args,
    }


def _counted(trace: Trace) -> dict[str, Any] | None:
    """What the processes' own counters said at their ends; None where one was cut off."""
    stats = [p["stats"] for p in trace.processes if p.get("stats", {}).get("level")]
    if trace.cut or not stats or len(stats) != len(trace.processes):
        return None
    return {
        k: sum(s.get(k, 0) for s in stats)
        for k in ("fastpath_bytes", "fallback_bytes", "cached_bytes", "errors")
    }
