from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from capabilities import need
from nobounce.config import Settings
from nobounce.errors import printable
from nobounce.observe import report_text
from nobounce.observe.analyse import analyse
from nobounce.observe.counters import Counters
from nobounce.observe.html import render
from nobounce.observe.roofline import roofs
from nobounce.observe.snapshot import Stats, parse
from nobounce.observe.traceread import Trace
from nobounce.observe.verify import ProcessIO, process_io, verify

GIB = 1 << 30
Maker = Callable[..., Any]


def stats(*jobs: Any) -> Stats:
    counters = Counters(Settings())
    for job in jobs:
        counters.ended(job)
    return parse(counters.block())


def test_prometheus_lines_are_well_formed(job: Maker) -> None:
    text = report_text.prometheus([stats(job(("direct", 4096), device='x"\\'))])
    line = re.compile(
        r'^[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\["\\n])*"(,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*\})? [0-9.e+-]+$'
    )
    for row in text.splitlines():
        assert row.startswith("# ") or line.match(row), row
    assert 'backend="fastpath",op="read"} 4096' in text


def test_prometheus_own_parser_reads_what_we_write(job: Maker) -> None:
    need("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    one = stats(job(("direct", 4096), ("no-p2p", 100), device='x"\\\n', refusals=("no-p2p",)))
    one = dataclasses.replace(one, command='run "a\\b"\nc')
    families = {
        f.name: f
        for f in text_string_to_metric_families(report_text.prometheus([one, stats(job(("direct", 1)))]))
    }
    assert all(f.type in ("counter", "gauge") and f.documentation for f in families.values())
    moved = {tuple(s.labels.values())[1:]: s.value for s in families["nobounce_bytes"].samples}
    assert moved[printable('x"\\\n'), "fastpath", "read"] == 4096
    assert moved["sim:0", "fastpath", "read"] == 1
    assert [s.value for s in families["nobounce_refusals"].samples] == [1]
    assert {s.labels["code"]: s.value for s in families["nobounce_reason_bytes"].samples[:2]} == {
        "direct": 4096,
        "no-p2p": 100,
    }
    info = families["nobounce_info"].samples[0].labels
    assert (info["command"], info["level"], info["force_compat_mode"]) == ('run "a\\b"\nc', "1", "false")
    assert list(text_string_to_metric_families(report_text.prometheus([]))) is not None


def test_csv_has_a_row_per_flow(job: Maker) -> None:
    rows = list(csv.DictReader(io.StringIO(report_text.csv_text([stats(job(("direct", 5), ("x", 3)))]))))
    assert [(r["backend"], r["nbytes"]) for r in rows] == [("fallback", "3"), ("fastpath", "5")]


def test_the_report_of_nothing_divides_by_nothing() -> None:
    text = report_text.report(Stats(level=1))
    assert "bandwidth (GiB/s): 0.000" in text


@pytest.mark.parametrize(
    ("rate", "said"),
    [(2.0, "the disk read holds it back"), (0.5, "none of the limits holds it back")],
)
def test_a_roof_names_what_holds_back_and_what_comes_next(rate: float, said: str) -> None:
    limits = {"disk read": 2.5 * GIB, "link to device": 50 * GIB, "host memory": 40 * GIB}
    found = roofs({"fallback read": rate * GIB}, limits)[0]
    assert said in found.sentence
    assert [name for name, _ in found.limits] == ["disk read", "host memory", "link to device"]
    if rate == 2.0:
        assert "without it the host memory would allow 20.00 GiB/s" in found.sentence


def test_a_roof_without_its_disk_is_not_called_unheld() -> None:
    found = roofs({"fastpath write": GIB, "fastpath read": GIB}, {"link from device": 50 * GIB})
    write, read = found
    assert (
        "which does not hold it back (disk write: not measured; nobounce report --limits-dir"
        in write.sentence
    )
    assert "none of the limits that it has on this machine is known (disk read: not measured" in read.sentence
    assert "none of the limits holds it back" not in write.sentence + read.sentence


def test_cached_bytes_need_no_disk() -> None:
    found = roofs({"cached read": GIB}, {"disk read": 2 * GIB, "host memory": 10 * GIB})[0]
    assert [name for name, _ in found.limits] == ["host memory"]


def test_the_kernel_agrees_when_it_counted_the_direct_bytes(job: Maker) -> None:
    s = stats(job(("direct", 1 << 20)), job(("cached", 4096)))
    assert verify(s, ProcessIO(1 << 20, 0), {}).agrees is True
    assert verify(s, ProcessIO(0, 0), {}).agrees is False
    assert verify(s, ProcessIO((1 << 20) + 8192, 0), {}).agrees is None, (
        "cached bytes may have come from the disk"
    )
    assert verify(s, None, {}).agrees is None


def test_the_kernels_counters_of_this_process_can_be_read() -> None:
    import os

    assert process_io(os.getpid()) is not None
    assert process_io(1 << 30) is None


EVIL = "</script><img src=x onerror=alert(1)>\u2028"


def test_names_are_escaped_in_the_page() -> None:
    event = {"ph": "X", "cat": "transfer", "name": "read", "ts": 1, "dur": 2, "pid": 1, "tid": 2}
    event["args"] = {"filename": EVIL, "nbytes": 1, "receipt": {"fastpath_bytes": 1, "reasons": {EVIL: 1}}}
    page = render(analyse(Trace([event], [], 0), {}), EVIL)
    assert "<img" not in page
    assert page.count("</script>") == 4
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    assert json.loads(held[1])["slices"][0]["args"]["filename"] == EVIL


def test_the_page_needs_nothing_from_outside() -> None:
    page = render(analyse(Trace(), {}), "x")
    assert not re.search(r'(?:src|href)\s*=\s*["\']?(?:https?:)?//', page)
    assert "default-src 'none'" in page


def test_events_that_make_no_sense_are_left_out() -> None:
    odd: list[dict[str, Any]] = [{"ph": "X", "cat": "transfer"}, {"ph": "B", "cat": "transfer", "ts": 1}, {}]
    assert analyse(Trace(odd, [], 0), {})["totals"]["transfers"] == 0
