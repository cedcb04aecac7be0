"""Statistics, traces, reports and comparisons of a device: on a card what a simulated one is held to everywhere."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capabilities import need

MIB = 1 << 20
SIZE = 24 * MIB

DEVICES = ["sim:0", "cuda:0"]

MOVES = """
import json, sys, nobounce
path, name = sys.argv[1:]
device = nobounce.Device(name)
moved = []
with nobounce.open(path, "r+") as f, device.allocate(24 << 20) as b, device.create_stream() as s:
    b.fill(0, stream=s)
    s.sync()
    before = nobounce.stats()
    moved.append(f.read(b))
    moved.append(f.read(b, require="fallback"))
    moved.append(f.read(b, nbytes=(5 << 20) + 100, file_offset=33))
    queued = [f.read_async(b, stream=s, nbytes=1 << 20, file_offset=i << 20, buffer_offset=i << 20) for i in range(8)]
    moved += [t.result(60) for t in queued]
    moved.append(f.read(b, cache="use"))
    moved.append(f.write(b, nbytes=3 << 20))
    try:
        f.read(b, nbytes=100, require="fastpath")
    except nobounce.RouteError as e:
        refused = [r.code for r in e.refusals]
    with nobounce.Batch() as batch:
        batch.read(f, b, file_offsets=[i << 16 for i in range(64)], nbytes=4096)
        batch.wait().check()
        moved.append(batch.receipt)
stats = nobounce.stats() - before
print(json.dumps({
    "stats": stats.to_dict(),
    "fastpath": sum(r.fastpath_bytes for r in moved),
    "fallback": sum(r.fallback_bytes for r in moved),
    "host_traffic": sum(r.host_traffic_bytes for r in moved),
    "refused": refused,
}))
"""

LOAD = """
import json, sys, nobounce
model = nobounce.load(sys.argv[1], device=sys.argv[2])
r, s = model.receipt, nobounce.stats()
print(json.dumps({"stats": s.to_dict(), "fastpath": r.fastpath_bytes, "fallback": r.fallback_bytes}))
"""


def obtain(device: str) -> None:
    if device.startswith("cuda"):
        need("cuda", "cuda-bindings")
    need("o_direct", "numpy")


def child(code: str, *arguments: str | Path, **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cli(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    need("typer")
    return subprocess.run(
        [sys.executable, "-m", "nobounce.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with path.open("wb") as f:
        f.write(os.urandom(SIZE))
        os.fsync(f.fileno())
    return path


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_counted_on_the_buffers_device_as_the_receipts_say(data: Path, device: str) -> None:
    obtain(device)
    told = child(MOVES, data, device)
    stats = told["stats"]
    assert {f["device"] for f in stats["flows"]} == {device}
    assert (stats["fastpath_bytes"], stats["fallback_bytes"]) == (told["fastpath"], told["fallback"])
    assert stats["host_traffic_bytes"] == told["host_traffic"] > 0
    assert stats["errors"] == stats["counters"]["refused"] == 1
    assert all(stats["refusals"][code] >= 1 for code in told["refused"])
    assert stats["counters"]["async_submitted"] == 8
    assert stats["counters"]["batch_requests_complete"] == 64
    assert stats["counters"]["bounce_pinned_bytes"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_trace_has_tracks_of_streams_and_copy_streams_and_the_counters_sums(
    data: Path, tmp_path: Path, device: str
) -> None:
    obtain(device)
    child(MOVES, data, device, NOBOUNCE_TRACE=str(tmp_path / "t.json"))
    from nobounce.device import Device
    from nobounce.observe import limits, traceread
    from nobounce.observe.analyse import analyse
    from nobounce.observe.html import render

    trace = traceread.read(traceread.find(str(tmp_path / "t.json")))
    names = [e["args"]["name"] for e in trace.events if e.get("name") == "thread_name"]
    for pattern in (
        rf"stream 0x[0-9a-f]+ on {device}",
        rf"copy stream 0x[0-9a-f]+ on {device}",
        "nobounce-io.*",
        "batch 1",
    ):
        assert any(re.fullmatch(pattern, name) for name in names), (pattern, names)
    copies = [e for e in trace.events if e.get("cat") == "copy"]
    assert sum(e["args"]["nbytes"] for e in copies if e["args"]["direction"] == "host to device") >= SIZE
    by_track: dict[int, float] = {}
    for e in copies:
        assert e["ts"] >= by_track.get(e["tid"], 0) - 0.002, "copies of one stream follow each other"
        by_track[e["tid"]] = e["ts"] + e["dur"]
    begun, ended = ({e["id"] for e in trace.events if e["ph"] == ph} for ph in "sf")
    assert begun == ended
    assert len(begun) == 9

    if device.startswith("cuda"):
        # The link is measured in this process: nothing of it may start a driver before the children have run.
        to, back = limits.link(Device(device))
        assert to > 0
        assert back > 0
        known = {"link to device": to, "link from device": back}
    else:
        known = {"link to device": 1e10, "link from device": 1e10}
    found = analyse(trace, known)
    for name in ("fastpath_bytes", "fallback_bytes", "cached_bytes", "host_traffic_bytes"):
        assert found["totals"][name] == trace.processes[0]["stats"][name], name
    assert found["totals"]["refused"]
    assert any("link to device" in [n for n, _ in r["limits"]] for r in found["roofs"])
    page = render(found, "on a device")
    assert "The counters of the processes agree with the trace." in page
    (tmp_path / "page.html").write_text(page, encoding="utf-8")


@pytest.mark.parametrize("device", DEVICES)
def test_stats_around_a_load(tmp_path: Path, device: str) -> None:
    obtain(device)
    each = SIZE // 4
    header = {
        f"t{i}": {"dtype": "U8", "shape": [each], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(4)
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + os.urandom(SIZE))
    told = child(LOAD, path, device)
    assert told["fastpath"] + told["fallback"] >= SIZE
    stats = told["stats"]
    assert (stats["fastpath_bytes"], stats["fallback_bytes"]) == (told["fastpath"], told["fallback"])
    assert {f["device"] for f in stats["flows"]} == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_stats_trace_and_report_by_the_command(data: Path, tmp_path: Path, device: str) -> None:
    obtain(device)
    trace, page = tmp_path / "t.json", tmp_path / "r.html"
    program = [sys.executable, "-c", MOVES, data, device]
    done = cli("stats", "--json", "--", "nobounce", "trace", "-o", trace, "--", *program)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    counted = json.loads(done.stderr[done.stderr.index("{\n") :])["total"]
    assert counted["fastpath_bytes"] == told["fastpath"]
    assert counted["fallback_bytes"] == told["fallback"]
    done = cli("report", trace, "-o", page, "--limits-dir", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["totals"]["fastpath_bytes"] == told["fastpath"]
    wanted = {"disk read", "disk write", "host memory", "link to device", "link from device"}
    assert wanted <= report["limits"].keys()
    assert page.stat().st_size > 100_000


@pytest.mark.parametrize("device", DEVICES)
def test_compare_shows_what_each_way_moved(data: Path, device: str) -> None:
    obtain(device)
    done = cli("compare", data, "--device", device, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    modes = {m["mode"]: m for m in json.loads(done.stdout)["modes"]}
    assert (modes["fallback"]["fastpath_bytes"], modes["fallback"]["fallback_bytes"]) == (0, SIZE)
    assert modes["fallback"]["host_traffic_bytes"] == 2 * SIZE
    assert modes["fallback"]["bytes_per_second"] > 0
    direct = modes["direct"]
    if direct["withheld"]:
        assert direct["bytes_per_second"] is None
        assert "refused: " in direct["withheld"]
        assert direct["fastpath_bytes"] == 0
    else:
        assert (direct["fastpath_bytes"], direct["fallback_bytes"]) == (SIZE, 0)
    auto = modes["auto"]
    assert auto["fastpath_bytes"] + auto["fallback_bytes"] == SIZE
    assert bool(auto["fastpath_bytes"]) == (not direct["withheld"])
