"""Statistics as text, CSV and Prometheus lines: all that ais-stats prints (hipFile F-13), and wall-clock
rates (F-14 is per operation)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from nobounce.observe.histogram import size_label
from nobounce.observe.layout import BACKENDS, OPS, SIZE_BUCKETS
from nobounce.observe.snapshot import Flow, Stats

GIB = 1 << 30
REPORT_VERSION = 1
LABEL, COLUMN = 16, 34
WAYS = tuple((backend, op) for backend in BACKENDS for op in OPS)


def gibs(nbytes_per_second: float) -> str:
    return f"{nbytes_per_second / GIB:.3f}"


def report(total: Stats, parts: Sequence[Stats] = ()) -> str:
    """The report of a process or of several: the sum first, then a line per process,
    then a block per device."""
    lines = [f"nobounce stats, report version {REPORT_VERSION}", f"Statistics level: {total.level}"]
    if total.command:
        lines.append(f"Command: {total.command}")
    lines += _settings(total)
    lines.append(
        f"Processes: {len(total.pids)} ({', '.join(str(p) for p in total.pids)})"
        if total.pids
        else "Processes: none"
    )
    lines.append(f"Wall time since first I/O: {total.seconds:.3f} s")
    if total.torn:
        lines.append(
            "A process was killed in the middle of a change: figures may be off by one transfer, very "
            "rarely by more"
        )
    c = total.counters
    lines += [
        f"File registrations: {c.get('handle_register_ok', 0)}, deregistrations: "
        f"{c.get('handle_deregister_ok', 0)}",
        f"Buffer registrations: {c.get('buf_register_ok', 0)}, deregistrations: "
        f"{c.get('buf_deregister_ok', 0)}",
        f"Stream registrations: {c.get('stream_register_ok', 0)}, deregistrations: "
        f"{c.get('stream_deregister_ok', 0)}",
        f"Fastpath rejections: {c.get('fastpath_rejections', 0)}{_codes(total)}",
        f"Asynchronous transfers: {c.get('async_submitted', 0)}, cancelled: {c.get('cancelled', 0)}",
        f"Requests refused before a byte moved: {c.get('refused', 0)}",
        *([f"Errors never retrieved: {c['unretrieved_errors']}"] if c.get("unretrieved_errors") else []),
        "Batch requests: "
        + ", ".join(
            f"{k} {c.get(f'batch_requests_{k}', 0)}"
            for k in ("complete", "failed", "cancelled", "timeout", "invalid")
        ),
        f"Bounce memory pinned: {c.get('bounce_pinned_bytes', 0)} B, host traffic of relaying: "
        f"{total.host_traffic_bytes} B",
        f"Bytes from the page cache by choice: {total.cached_bytes} B",
        "",
    ]
    for backend, op in WAYS:
        lines += _way(total.flow(backend=backend, op=op), f"{backend.capitalize()} {op}", total.seconds)
    if total.reasons:
        lines += ["Bytes by reason:"]
        lines += [
            f"  {code:<24}{n:>16} B  in {count} pieces" for code, (count, n) in sorted(total.reasons.items())
        ]
        lines.append("")
    if len(parts) > 1:
        lines += ["By process:"]
        lines += [
            f"  {p.pids[0] if p.pids else '?':>8}  fastpath {p.fastpath_bytes} B, fallback "
            f"{p.fallback_bytes} B, "
            f"errors {p.errors}  {p.command}"
            for p in parts
        ]
        lines.append("")
    for device in total.devices:
        lines += _device(total, device)
    dropped = c.get("dropped_flows", 0), c.get("dropped_codes", 0)
    if any(dropped):
        lines.append(
            f"Not kept apart for want of room: {dropped[0]} transfers by device, {dropped[1]} by reason"
        )
    return "\n".join(lines).rstrip() + "\n"


def _settings(total: Stats) -> list[str]:
    def word(on: bool) -> str:
        return "true" if on else "false"

    return [
        f"Compatibility mode: allowed {word(total.allow_compat_mode)}, forced {word(total.force_compat_mode)}"
    ]


def _codes(total: Stats) -> str:
    found = sorted(total.refusals.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{code} {n}' for code, n in found)})" if found else ""


def _way(flow: Flow, name: str, seconds: float) -> list[str]:
    rate = flow.nbytes / seconds if seconds else 0.0
    latency = (
        ", ".join(f"p{int(q * 100)} {flow.latency(q) * 1e6:.0f}" for q in (0.5, 0.9, 0.99))
        if flow.operations
        else ""
    )
    return [
        f"Total {name} size (B): {flow.nbytes}",
        f"Average {name} bandwidth (GiB/s): {gibs(flow.bandwidth)}  (of operation time; {gibs(rate)} of "
        "wall time)",
        f"Average {name} latency (us): {flow.mean_latency * 1e6:.0f}" + (f"  ({latency})" if latency else ""),
        f"Total {name} errors: {flow.errors}  (operations {flow.operations}, retries {flow.retries}, short "
        f"{flow.short})",
        f"Total {name} unaligned: {flow.unaligned}",
        "",
    ]


def _device(total: Stats, device: str) -> list[str]:
    flows = [total.flow(device=device, backend=b, op=o) for b, o in WAYS]
    lines = [f"Device {device}:"]
    tables: tuple[tuple[str, Callable[[Flow, int], str]], ...] = (
        ("Size (B)", lambda f, k: str(f.nbytes_by_size[k])),
        (
            "Bandwidth (GiB/s)",
            lambda f, k: _over(f.nbytes_by_size[k] * 1e9 / GIB, f.nanoseconds_by_size[k], 3),
        ),
        ("Latency (us)", lambda f, k: _over(f.nanoseconds_by_size[k] / 1e3, f.operations_by_size[k], 0)),
        ("Errors", lambda f, k: str(f.errors_by_size[k])),
    )
    for title, cell in tables:
        head = [f"{title} {b.capitalize()} {o}" for b, o in WAYS]
        lines.append(f"{'KiB':<{LABEL}}" + "".join(f"{h:>{COLUMN}}" for h in head))
        lines += [
            f"{size_label(k):<{LABEL}}" + "".join(f"{cell(f, k):>{COLUMN}}" for f in flows)
            for k in range(SIZE_BUCKETS)
        ]
    lines += [f"Unaligned {b.capitalize()} {o}: {f.unaligned}" for (b, o), f in zip(WAYS, flows, strict=True)]
    lines.append("")
    return lines


def _over(value: float, count: int, digits: int) -> str:
    return f"{value / count:.{digits}f}" if count else "0"


def rates(interval: Stats) -> str:
    """One line for an interval: bytes and operations per second of wall time, each way."""
    seconds = interval.seconds or 1.0
    cells = []
    for backend, op in WAYS:
        f = interval.flow(backend=backend, op=op)
        cells.append(f"{backend} {op} {f.nbytes / seconds / GIB:6.3f} GiB/s {f.operations / seconds:7.0f}/s")
    return f"{interval.seconds:5.2f} s  " + "  ".join(cells) + f"  errors {interval.errors}"


CSV_FIELDS = (
    *("pids", "device", "backend", "op", "operations", "nbytes", "seconds", "errors", "retries", "unaligned"),
    *(
        "async_operations",
        "relayed_bytes",
        "cached_bytes",
        "latency_mean",
        "latency_p50",
        "latency_p90",
        "latency_p99",
    ),
)


def csv_text(parts: Sequence[Stats]) -> str:
    """A row per process, device, backend and direction; seconds and bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for part in parts:
        for f in part.flows:
            writer.writerow(
                [
                    *(
                        " ".join(map(str, part.pids)),
                        f.device,
                        f.backend,
                        f.op,
                        f.operations,
                        f.nbytes,
                        f.seconds,
                    ),
                    *(f.errors, f.retries, f.unaligned, f.async_operations, f.relayed_bytes, f.cached_bytes),
                    *(f.mean_latency, f.latency(0.5), f.latency(0.9), f.latency(0.99)),
                ]
            )
    return out.getvalue()


def prometheus(parts: Sequence[Stats]) -> str:
    """The text exposition format; counters end in _total, times are seconds."""
    metrics: list[tuple[str, str, str]] = [
        ("nobounce_bytes_total", "nbytes", "Bytes moved"),
        ("nobounce_operations_total", "operations", "Transfers"),
        ("nobounce_operation_seconds_total", "seconds", "Sum of the transfers' own times"),
        ("nobounce_errors_total", "errors", "Failed transfers"),
        ("nobounce_retries_total", "retries", "Direct tries that fallback repeated"),
        ("nobounce_unaligned_total", "unaligned", "Requests that missed the alignment of direct I/O"),
        ("nobounce_relayed_bytes_total", "relayed_bytes", "Bytes through a bounce buffer"),
        ("nobounce_cached_bytes_total", "cached_bytes", "Bytes from the page cache by choice"),
    ]
    lines: list[str] = []
    for name, attribute, text in metrics:
        lines += [f"# HELP {name} {text}.", f"# TYPE {name} counter"]
        for part in parts:
            pid = _pid(part)
            for f in part.flows:
                labels = f'pid="{pid}",device="{_label(f.device)}",backend="{f.backend}",op="{f.op}"'
                lines.append(f"{name}{{{labels}}} {getattr(f, attribute)}")
    lines += [
        "# HELP nobounce_refusals_total Refusals of the direct path by code.",
        "# TYPE nobounce_refusals_total counter",
    ]
    for part in parts:
        pid = _pid(part)
        lines += [
            f'nobounce_refusals_total{{pid="{pid}",code="{_label(k)}"}} {n}'
            for k, n in sorted(part.refusals.items())
        ]
    lines += [
        "# HELP nobounce_reason_bytes_total Bytes by the reason for their way.",
        "# TYPE nobounce_reason_bytes_total counter",
    ]
    for part in parts:
        lines += [
            f'nobounce_reason_bytes_total{{pid="{_pid(part)}",code="{_label(k)}"}} {n}'
            for k, (_, n) in sorted(part.reasons.items())
        ]
    lines += ["# HELP nobounce_info What is in force in the process.", "# TYPE nobounce_info gauge"]
    for part in parts:
        facts = {
            "pid": str(_pid(part)),
            "command": part.command,
            "level": str(part.level),
            "allow_compat_mode": str(part.allow_compat_mode).lower(),
            "force_compat_mode": str(part.force_compat_mode).lower(),
        }
        shown = ",".join(f'{k}="{_label(v)}"' for k, v in facts.items())
        lines.append(f"nobounce_info{{{shown}}} 1")
    return "\n".join(lines) + "\n"


def _pid(part: Stats) -> int:
    return part.pids[0] if len(part.pids) == 1 else 0


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
