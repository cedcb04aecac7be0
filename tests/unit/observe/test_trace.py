from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nobounce
from nobounce import config, outfile
from nobounce.config import Settings
from nobounce.errors import FileError, FormatError, NobounceError, RouteError
from nobounce.io import hooks
from nobounce.io.hooks import Operation
from nobounce.observe import start, traceread
from nobounce.observe.analyse import analyse
from nobounce.observe.batches import LANES
from nobounce.observe.html import render
from nobounce.observe.trace import Tracer, path_for
from nobounce.observe.traceread import Trace

MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 * MIB))
    return path


def traced(tmp_path: Path, act: Callable[[], None], limit: int = 100_000) -> Trace:
    config.override(Settings(trace=str(tmp_path / "t.json"), trace_events=limit))
    hooks.start()
    tracer = start._closers[0]
    assert isinstance(tracer, Tracer)
    act()
    tracer.close()
    return traceread.read(traceread.find(str(tmp_path / "t.json")))


def everything(data: Path) -> Callable[[], None]:
    def act() -> None:
        device = nobounce.Device("sim:0")
        with nobounce.open(data, "r+") as f, device.allocate(8 * MIB) as buffer:
            f.read(buffer, cache="avoid")
            f.read(buffer, require="fallback", cache="avoid")
            f.write(buffer, nbytes=5000, file_offset=1)
            streams = [device.create_stream() for _ in range(3)]
            moves = [
                f.read_async(
                    buffer,
                    stream=streams[i % 3],
                    nbytes=MIB,
                    file_offset=i * MIB,
                    buffer_offset=i * MIB,
                    cache="avoid",
                )
                for i in range(8)
            ]
            for m in moves:
                m.result()
            f.write_async(buffer, stream=streams[0], nbytes=MIB).result()
            with pytest.raises(NobounceError):
                f.read_async(buffer, stream=streams[0], file_offset=1, nbytes=5, require="fastpath")
            with nobounce.Batch() as batch:
                batch.read(f, buffer, file_offsets=[0, 8192, 65536], nbytes=[4096, 100, 9000], cache="avoid")
                batch.read(f, buffer, file_offsets=[0, 8192], nbytes=4096, cache="use")
            for s in streams:
                s.close()

    return act


@pytest.fixture
def trace(tmp_path: Path, data: Path) -> Trace:
    return traced(tmp_path, everything(data))


def slices(trace: Trace) -> Iterator[tuple[tuple[int, int], float, float, dict[str, Any]]]:
    for e in trace.events:
        if e["ph"] == "X":
            yield (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e


def test_slices_of_a_track_nest_or_follow(trace: Trace) -> None:
    tracks: dict[Any, list[tuple[float, float, str]]] = {}
    for track, begin, end, e in slices(trace):
        if e["cat"] != "submit":
            tracks.setdefault(track, []).append((begin, end, e["cat"]))
    assert len(tracks) > 5
    slack = 0.002  # timestamps are rounded to a nanosecond
    for found in tracks.values():
        found.sort(key=lambda s: (s[0], -s[1]))
        opened: list[float] = []
        for begin, end, _ in found:
            while opened and opened[-1] <= begin + slack:
                opened.pop()
            assert not opened or end <= opened[-1] + slack
            opened.append(end)


def test_flows_pair_from_submission_to_the_slice_in_the_stream(trace: Trace) -> None:
    begun = {e["id"]: e for e in trace.events if e["ph"] == "s"}
    ended = {e["id"]: e for e in trace.events if e["ph"] == "f"}
    assert len(begun) == 11  # 9 transfers and 2 groups of a batch
    assert begun.keys() == ended.keys()
    places = {(track, begin) for track, begin, _, e in slices(trace) if e["cat"] in ("transfer", "submit")}
    for key, e in begun.items():
        assert ((e["pid"], e["tid"]), e["ts"]) in places
        assert ((e["pid"], ended[key]["tid"]), ended[key]["ts"]) in places
        assert e["ts"] <= ended[key]["ts"]


def test_sums_equal_the_counters(trace: Trace) -> None:
    data = analyse(trace, {})
    stats = trace.processes[0]["stats"]
    for name in ("fastpath_bytes", "fallback_bytes", "cached_bytes", "host_traffic_bytes"):
        assert data["totals"][name] == stats[name], name
    assert stats["fastpath_bytes"] > 16 * MIB
    assert (
        sum(r["nbytes"] for r in data["totals"]["by_reason"])
        == stats["fastpath_bytes"] + stats["fallback_bytes"]
    )
    chunks = sum(e["args"]["nbytes"] for _, _, _, e in slices(trace) if e["cat"] == "chunk")
    batched = sum(e["args"]["nbytes"] for _, _, _, e in slices(trace) if e["cat"] == "batch")
    assert batched == 4096 + 100 + 9000 + 8192
    assert chunks + batched == stats["fastpath_bytes"] + stats["fallback_bytes"]
    copied = sum(e["args"]["nbytes"] for _, _, _, e in slices(trace) if e["cat"] == "copy")
    assert 0 < 2 * copied <= stats["host_traffic_bytes"]


def test_backend_and_reason_stand_on_each_slice(trace: Trace) -> None:
    for _, _, _, e in slices(trace):
        if e["cat"] == "chunk":
            assert e["name"].split()[0] in ("fastpath", "fallback")
            assert e["args"]["reason"]
        if e["cat"] in ("transfer", "batch") and "error" not in e["args"]:
            assert e["args"]["backend"]
            assert e["args"]["receipt"]["reasons"]


def test_a_refused_request_stands_in_the_trace_with_its_reason(trace: Trace, data: Path) -> None:
    refused = [e for _, _, _, e in slices(trace) if "refused" in e["args"]]
    assert len(refused) == 1
    args = refused[0]["args"]
    assert (refused[0]["cat"], refused[0]["dur"], args["filename"]) == ("transfer", 0, str(data))
    assert (args["file_offset"], args["requested"]) == (1, 5)
    assert args["refused"] == ["offset-align", "size-align"]
    assert "RouteError" in args["error"]
    assert args["stream"].startswith("0x")
    totals = analyse(trace, {})["totals"]
    assert totals["refused"] == {"offset-align": 1, "size-align": 1}
    assert trace.processes[0]["stats"]["counters"]["refused"] == 1
    assert "offset-align 1" in render(analyse(trace, {}), "x")


@pytest.mark.parametrize("queued", [False, True])
def test_a_refusal_is_seen_by_subscribers_and_traced_sync_and_async(
    tmp_path: Path, data: Path, queued: bool
) -> None:
    heard: list[tuple[str, Operation]] = []

    def act() -> None:
        device = nobounce.Device("sim:0")
        with (
            nobounce.open(data) as f,
            device.allocate(8192) as buffer,
            device.create_stream() as stream,
            nobounce.subscribe(
                on_enter=lambda op: heard.append(("enter", op)),
                on_start=lambda op: heard.append(("start", op)),
                on_exit=lambda op: heard.append(("exit", op)),
            ),
            pytest.raises(RouteError),
        ):
            if queued:
                f.read_async(buffer, stream=stream, nbytes=5, require="fastpath")
            else:
                f.read(buffer, nbytes=5, require="fastpath")

    trace = traced(tmp_path, act)
    assert [what for what, _ in heard] == ["enter", "exit"]
    assert isinstance(heard[1][1].error, RouteError)
    assert [e["args"]["refused"] for _, _, _, e in slices(trace)] == [["size-align"]]


def test_a_group_of_a_batch_is_a_slice_from_submission_to_its_last_end(tmp_path: Path, data: Path) -> None:
    def act() -> None:
        device = nobounce.Device("sim:0")
        with nobounce.open(data) as f, device.allocate(MIB) as buffer, nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=[0, 4096, 8192], nbytes=[4096, 100, 9000], cache="avoid")
            batch.read(
                f, buffer, file_offsets=[0, 1, 2], nbytes=[4096, 5, 7], require="fastpath", cache="avoid"
            )
            batch.read(f, buffer, file_offsets=[4096], nbytes=4096, cache="avoid")
            batch.cancel(batch.read(f, buffer, file_offsets=[0], nbytes=4096, cache="avoid"))
            batch.wait()

    trace = traced(tmp_path, act)
    groups = [(track, begin, end, e["args"]) for track, begin, end, e in slices(trace) if e["cat"] == "batch"]
    assert sorted(a["requests"] for _, _, _, a in groups) == [1, 3, 3]
    by_size = {a["nbytes"]: (track, begin, end, a) for track, begin, end, a in groups}
    assert by_size.keys() == {4096 + 100 + 9000, 4096}
    assert len({track for track, *_ in groups}) == 3, "groups side by side have a track each"
    receipt = by_size[13196][3]["receipt"]
    assert (receipt["fastpath_bytes"], receipt["fallback_bytes"]) == (4096, 100 + 9000)
    assert sum(receipt["reasons"].values()) == 13196
    refused = next(a for _, _, _, a in groups if "refused" in a)
    assert refused["statuses"] == {"invalid": 2, "complete": 1}
    missed = {"offset-align": 2, "size-align": 2, "memory-align": 1}
    assert refused["refused"] == missed
    cancelled = [e for e in trace.events if e.get("cat") == "batch" and e["ph"] == "i"]
    assert [e["args"]["statuses"] for e in cancelled] == [{"cancelled": 1}]
    begun = {e["id"]: e for e in trace.events if e["ph"] == "s"}
    ended = {e["id"]: e for e in trace.events if e["ph"] == "f"}
    spans = sorted((begun[i]["ts"], ended[i]["ts"]) for i in begun)
    assert spans == [(b, pytest.approx(e, abs=0.01)) for b, e in sorted((b, e) for _, b, e, _ in groups)]
    stats = trace.processes[0]["stats"]
    assert stats["counters"]["batch_requests_invalid"] == stats["counters"]["refused"] == 2
    taken_whole = {"size-align": 1, "memory-align": 1}  # by fallback, for the last of their reasons
    assert stats["refusals"] == {code: n + taken_whole.get(code, 0) for code, n in missed.items()}
    data_ = analyse(trace, {})
    assert data_["totals"]["refused"] == missed
    assert sum(d["bytes_per_second"] for d in data_["throughput"]) > 0
    assert data_["left_out"]["batches_without_slice"] == 1


def test_more_groups_at_once_than_tracks_are_summed_up(tmp_path: Path, data: Path) -> None:
    def act() -> None:
        with (
            nobounce.open(data) as f,
            nobounce.Device("cpu").allocate(MIB) as buffer,
            nobounce.Batch() as batch,
        ):
            for i in range(LANES + 10):
                batch.read(f, buffer, file_offsets=[4096 * i], nbytes=4096, cache="avoid")
            batch.wait().check()

    trace = traced(tmp_path, act)
    groups = [e for e in trace.events if e.get("cat") == "batch"]
    assert sum(e["ph"] == "X" for e in groups) == LANES
    assert sum(e["args"]["nbytes"] for e in groups) == 4096 * (LANES + 10)
    data_ = analyse(trace, {})
    assert data_["totals"]["fastpath_bytes"] == trace.processes[0]["stats"]["fastpath_bytes"]
    assert f"{10} groups of batches have no slice" in render(data_, "x")


def test_copies_straight_from_the_page_cache_have_a_copy_stream_too(tmp_path: Path, data: Path) -> None:
    heard: list[tuple[str, int, int]] = []

    class Copies(hooks.Watcher):
        def copied(self, device: str, stream: int, op: str, nbytes: int, began: float, ended: float) -> None:
            assert began <= ended
            heard.append((device, stream, nbytes))

    config.override(Settings(page_cache_dma="1"))
    data.write_bytes(os.urandom(96 * MIB))
    copies = Copies()
    with nobounce.open(data) as f, nobounce.Device("sim:0").allocate(96 * MIB) as buffer:
        hooks.add(copies)
        receipt = f.read(buffer, cache="use")
        hooks.remove(copies)
    assert receipt.host_traffic_bytes < 2 * receipt.nbytes, "some of it came without a relay"
    assert sum(n for _, _, n in heard) == receipt.nbytes
    assert {(d, s > 0) for d, s, _ in heard} == {("sim:0", True)}


def test_every_event_is_in_the_file_when_it_has_ended(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path / "t.json"), 2)
    operation = Operation("read", "f", "cpu", 0, 1, None, 1.0, threading.get_native_id(), 1.0, 1.1)
    for n in (1, 2):
        tracer.exited(operation)
        assert sum(e["ph"] == "X" for e in traceread.read([tracer.path]).events) == n
    for _ in range(2):
        tracer.exited(operation)
    cut = traceread.read([tracer.path])
    assert cut.cut == 1
    assert [e["args"]["limit"] for e in cut.events if e.get("cat") == "limit"] == [2]
    assert "more is missing" in render(analyse(cut, {}), "x")
    tracer.close()
    assert traceread.read([tracer.path]).dropped == 2


def test_every_track_has_a_name(trace: Trace) -> None:
    named = {e["tid"]: e["args"]["name"] for e in trace.events if e["ph"] == "M"}
    assert {e["tid"] for e in trace.events} <= named.keys()
    assert any(n.startswith("stream 0x") for n in named.values())
    assert any(n.startswith("copy stream") for n in named.values())
    assert any(n.startswith("nobounce-io") for n in named.values())


def test_the_file_is_json_as_chrome_reads_it(trace: Trace, tmp_path: Path) -> None:
    whole = json.loads(Path(path_for(str(tmp_path / "t.json"), os.getpid())).read_text())
    assert len(whole["traceEvents"]) == len(trace.events)
    assert whole["otherData"]["dropped"] == 0


def test_a_trace_cut_off_by_a_kill_is_good_up_to_there(trace: Trace, tmp_path: Path) -> None:
    path = Path(path_for(str(tmp_path / "t.json"), os.getpid()))
    raw = path.read_text()
    path.write_text(raw[: len(raw) // 2])
    cut = traceread.read([str(path)])
    assert (cut.cut, cut.processes) == (1, [])
    assert 0 < len(cut.events) < len(trace.events)
    assert analyse(cut, {})["counters"] is None


def test_what_is_over_the_limit_is_dropped_and_said(tmp_path: Path, data: Path) -> None:
    def act() -> None:
        with nobounce.open(data) as f, nobounce.Device("cpu").allocate(4096) as buffer:
            for _ in range(700):
                f.read(buffer)

    trace = traced(tmp_path, act, limit=1000)
    assert len([e for e in trace.events if e["ph"] != "M" and e["cat"] != "limit"]) == 1000
    assert trace.dropped == 400
    assert analyse(trace, {})["left_out"]["events_dropped"] == 400


@pytest.mark.thorough
def test_a_million_transfers_leave_a_bounded_trace(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path / "t.json"), 2000)
    operation = Operation("read", "f", "cpu", 0, 1, None, 1.0, threading.get_native_id(), 1.0, 1.1)
    for _ in range(5000):
        tracer.exited(operation)
    tracemalloc.start()
    try:
        for _ in range(995_000):
            tracer.exited(operation)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    tracer.close()
    assert grown < 10_000
    assert Path(tracer.path).stat().st_size < 2_000_000
    assert traceread.read([tracer.path]).dropped == 998_000


def test_traces_of_processes_merge(trace: Trace, tmp_path: Path) -> None:
    one = path_for(str(tmp_path / "t.json"), os.getpid())
    other = tmp_path / "t.1.json"
    other.write_text(Path(one).read_text())
    with outfile.create(str(tmp_path / "all.json")) as out:
        told = traceread.merge(traceread.find(str(tmp_path / "t.json")), out)
        out.commit()
    assert told["events"] == 2 * len(trace.events)
    assert len(json.loads((tmp_path / "all.json").read_text())["otherData"]["processes"]) == 2
    assert len(traceread.read([str(tmp_path / "all.json")]).processes) == 2


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1, 2]")
    with pytest.raises(FormatError):
        traceread.read([str(tmp_path / "x.json")])
    with pytest.raises(FileError):
        traceread.find(str(tmp_path / "none.json"))


def test_a_trace_written_by_another_tool_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(
        json.dumps([{"ph": "X", "ts": 1, "dur": 1, "cat": "transfer", "args": {}}])
    )
    assert len(traceread.read([str(tmp_path / "x.json")]).events) == 1


def test_copies_that_were_queued_together_follow_each_other(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path / "t.json"), 2000)
    for began, ended in ((1.0, 2.0), (1.5, 3.0), (2.9, 2.95)):
        tracer.copied("sim:0", 7, "read", 1, began, ended)
    tracer.close()
    spans = [
        (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for _, _, _, e in slices(traceread.read([tracer.path]))
    ]
    assert spans == [(1.0, 2.0), (2.0, 3.0), (3.0, 3.0)]


def test_an_operation_ends_once() -> None:
    heard: list[Operation] = []
    with nobounce.subscribe(on_exit=heard.append):
        operation = hooks.enter("read", "f", "cpu", 0, 1, None, 1.0)
        for _ in range(2):
            hooks.leave(operation, None, None, 2.0)
    assert heard == [operation]
