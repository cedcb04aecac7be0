from __future__ import annotations

import errno
import linecache
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nobounce
from made_up import made_up_job
from nobounce.config import Settings
from nobounce.errors import RouteError, TransferCancelledError, TransferError
from nobounce.io import hooks
from nobounce.observe.counters import Counters
from nobounce.observe.histogram import latency_bucket, size_bucket
from nobounce.observe.layout import MOST_FLOWS, MOST_ROWS
from nobounce.observe.snapshot import Stats, parse
from nobounce.route.types import Refusal
from pace import assert_takes_under

Maker = Callable[..., Any]


@pytest.fixture
def counters() -> Counters:
    return Counters(Settings())


def seen(counters: Counters) -> Stats:
    return parse(counters.block())


def test_a_transfer_both_ways_is_an_operation_of_each_and_its_time_is_split(
    counters: Counters, job: Maker
) -> None:
    counters.ended(job(("direct", 3 << 20), ("unaligned-edge", 1 << 20), seconds=0.004))
    s = seen(counters)
    direct, relayed = s.flow(backend="fastpath"), s.flow(backend="fallback")
    assert (direct.operations, direct.nbytes, relayed.operations, relayed.nbytes) == (1, 3 << 20, 1, 1 << 20)
    assert direct.seconds == pytest.approx(0.003, rel=0.01)
    assert relayed.seconds == pytest.approx(0.001, rel=0.01)
    assert (relayed.relayed_bytes, s.host_traffic_bytes) == (1 << 20, 2 << 20)
    assert s.reasons == {"direct": (1, 3 << 20), "unaligned-edge": (1, 1 << 20)}


def test_bytes_from_the_page_cache_are_fallback_and_cached(counters: Counters, job: Maker) -> None:
    counters.ended(job(("cached", 4096)))
    s = seen(counters)
    assert (s.fastpath_bytes, s.fallback_bytes, s.cached_bytes, s.host_traffic_bytes) == (0, 4096, 4096, 0)


def test_an_error_counts_by_the_bytes_asked_for_and_the_bytes_that_moved_count_too(
    counters: Counters, job: Maker
) -> None:
    error = TransferError(errno.EIO, filename="f", file_offset=0, nbytes=1, backend="fastpath", call="read")
    counters.ended(job(("direct", 4096), requested=1 << 20, error=error))
    flow = seen(counters).flow(backend="fastpath")
    assert (flow.errors_by_size[9], flow.nbytes, flow.errors) == (1, 4096, 1)


def test_an_empty_transfer_is_an_operation(counters: Counters, job: Maker) -> None:
    counters.ended(job())
    assert seen(counters).flow().operations == 1


def test_refusals_are_counted_by_reason(counters: Counters) -> None:
    refusals = Refusal("no-p2p", ""), Refusal("offset-align", "")
    counters.refused("read", "sim:0", refusals, routed=True)
    counters.refused("read", "sim:0", refusals[:1], routed=False)
    s = seen(counters)
    assert s.refusals == {"no-p2p": 2, "offset-align": 1}
    assert s.counters["fastpath_rejections"] == 2
    assert s.flow(op="read").unaligned == 1


def test_cancelled_is_no_error(counters: Counters) -> None:
    counters.unstarted("read", "cpu", 4096, 1, TransferCancelledError("x"))
    counters.unstarted("read", "cpu", 4096, 1, ValueError("x"))
    s = seen(counters)
    assert (s.counters["cancelled"], s.counters["refused"], s.errors) == (1, 1, 1)


def test_batches_count_each_request_in_its_bucket(counters: Counters) -> None:
    group: Any = SimpleNamespace(
        op="read",
        target=SimpleNamespace(device_name="cpu", ring=None),
        answer=SimpleNamespace(reason_list=[Refusal("edge", "")]),
    )
    done = np.array([4096, 4096, 100, 1 << 26])
    direct = np.array([4096, 4096, 0, 1 << 26])
    ways, reasons = np.array([1, 1, 2, 1], np.uint8), np.array([-1, -1, 0, -1], np.int8)
    ends = hooks.BatchEnds(done, done, direct, ways, reasons, np.zeros(4, bool))
    counters.batch_ended(group, ends, "complete", 0.5)
    counters.batch_ended(group, ends, "failed", 0.5)
    s = seen(counters)
    direct, relayed = s.flow(backend="fastpath"), s.flow(backend="fallback")
    assert (direct.operations_by_size[1], direct.operations_by_size[15], direct.nbytes) == (
        2,
        1,
        8192 + (1 << 26),
    )
    assert (relayed.operations, relayed.nbytes) == (1, 100)
    assert s.reasons == {"direct": (3, 8192 + (1 << 26)), "edge": (1, 100)}
    assert (s.counters["batch_requests_complete"], s.counters["batch_requests_failed"], s.errors) == (4, 4, 4)


EDGES = st.lists(
    st.tuples(st.sampled_from(["direct", "unaligned-edge", "cached", "no-p2p"]), st.integers(1, 1 << 36)),
    max_size=4,
)


@given(st.lists(st.tuples(EDGES, st.sets(st.sampled_from(["offset-align", "no-p2p", "x"]))), max_size=30))
def test_however_it_is_counted_the_sums_are_those_of_the_receipts(
    transfers: list[tuple[list[tuple[str, int]], set[str]]],
) -> None:
    """Alike transfers share a row, odd ones count word by word: a reader sees no difference."""
    counters, odd = Counters(Settings()), Counters(Settings())
    for ways, refusals in transfers:
        one = made_up_job(*ways, refusals=tuple(sorted(refusals)), stream=7)
        counters.ended(one)
        odd._ended_oddly(one)
    s, t = seen(counters), seen(odd)
    assert s.flows == t.flows
    assert (s.counters, s.refusals, s.reasons) == (t.counters, t.refusals, t.reasons)
    for code in ("direct", "unaligned-edge", "cached", "no-p2p"):
        assert s.reasons.get(code, (0, 0))[1] == sum(n for ways, _ in transfers for c, n in ways if c == code)


def test_more_kinds_of_transfers_than_rows_are_added_up(counters: Counters, job: Maker) -> None:
    kinds = [
        (f"code-{k}", 1 << bits, refusals)
        for k in range(30)
        for bits in range(20)
        for refusals in ((), ("offset-align", "no-p2p"))
    ]
    assert len(kinds) > 2 * MOST_ROWS
    for _ in range(2):
        for code, nbytes, refusals in kinds:
            counters.ended(job((code, nbytes), refusals=refusals))
    s = seen(counters)
    assert s.flow().operations == 2 * len(kinds)
    assert s.fallback_bytes == 2 * sum(n for _, n, _ in kinds)
    assert s.refusals == {"offset-align": len(kinds), "no-p2p": len(kinds)}
    assert s.flow().unaligned == len(kinds)


def test_a_refusal_for_more_reasons_than_a_row_holds_is_counted(counters: Counters, job: Maker) -> None:
    counters.ended(job(("direct", 5), ("edge", 5), ("direct", 7), refusals=tuple(f"r{i}" for i in range(40))))
    s = seen(counters)
    assert (s.counters["fastpath_rejections"], s.fastpath_bytes, s.refusals["r0"]) == (1, 12, 1)


def test_refusals_of_a_transfer_are_counted_with_it_or_with_its_end(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 16))
    device = nobounce.Device("sim:0")
    hooks.start()
    with (
        nobounce.open(tmp_path / "data") as f,
        device.allocate(1 << 16) as buffer,
        device.create_stream() as stream,
    ):
        before = nobounce.stats()
        f.read(buffer, nbytes=100, cache="avoid")
        one = nobounce.stats() - before
        gate = device._runtime.gate(stream.handle, lambda: None)
        assert f.read_async(buffer, stream=stream, nbytes=100, cache="avoid").cancel()
        gate.open()
        stream.sync()
        two = nobounce.stats() - before
        with pytest.raises(RouteError):
            f.read(buffer, nbytes=100, require="fastpath")
        with pytest.raises(RouteError):
            f.read_async(buffer, stream=stream, nbytes=100, require="fastpath")
        four = nobounce.stats() - before
    assert one.refusals == {"size-align": 1}
    assert (two.refusals, two.counters["cancelled"]) == ({"size-align": 2}, 1)
    assert (four.refusals, four.counters["refused"]) == ({"size-align": 4}, 2)
    assert four.counters["fastpath_rejections"] == 4
    assert four.flow(backend="fallback").unaligned == 2


def test_more_devices_than_there_is_room_for_go_into_one_and_are_said(counters: Counters, job: Maker) -> None:
    for i in range(3 * MOST_FLOWS):
        counters.ended(job(("direct", 4096), device=f"sim:{i}"))
    s = seen(counters)
    assert s.flow().nbytes == 3 * MOST_FLOWS * 4096
    assert "(others)" in s.devices
    assert s.counters["dropped_flows"] > 0


def test_more_codes_than_there_is_room_for_go_into_one_and_are_said(counters: Counters, job: Maker) -> None:
    for i in range(300):
        counters.ended(job((f"code-{i}", 1)))
    s = seen(counters)
    assert sum(n for _, n in s.reasons.values()) == 300
    assert s.counters["dropped_codes"] > 0


def test_nothing_is_lost_between_threads(counters: Counters, job: Maker) -> None:
    start = threading.Barrier(8)
    one = job(("direct", 4096))

    def count() -> None:
        start.wait(30)
        for _ in range(2000):
            counters.ended(one)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert seen(counters).flow(backend="fastpath").operations == 16000


@pytest.mark.thorough
def test_a_million_transfers_take_no_memory(counters: Counters, job: Maker) -> None:
    jobs = [job(("direct", 1 << k), seconds=1e-6 * k) for k in range(10, 30)]
    for one in jobs:
        counters.ended(one)
    block = len(counters.block())
    for i in range(1_000_000 - len(jobs) - 20_000):
        counters.ended(jobs[i % 20])
    tracemalloc.start()
    try:
        for i in range(20_000):
            counters.ended(jobs[i % 20])
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 10_000
    assert len(counters.block()) == block
    assert seen(counters).flow().operations == 1_000_000


def test_the_level_and_the_settings_stand_in_the_block() -> None:
    s = seen(Counters(Settings(stats_level=2, allow_compat_mode=False, force_compat_mode=True)))
    assert (s.level, s.allow_compat_mode, s.force_compat_mode) == (2, False, True)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_real_batch_counts_as_its_receipt_says(tmp_path: Path, device: str) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 16))
    chosen = nobounce.Device(device)
    hooks.start()
    before = nobounce.stats()
    with nobounce.open(tmp_path / "data") as f, chosen.allocate(1 << 16) as buffer, nobounce.Batch() as batch:
        batch.read(f, buffer, file_offsets=[0, 4096, 8192], nbytes=[4096, 4096, 100], cache="avoid")
        batch.read(f, buffer, file_offsets=[4096], nbytes=4096 + 500, cache="avoid")
        batch.read(f, buffer, file_offsets=[0, 16384], nbytes=4096, require="fallback", cache="avoid")
        batch.wait().check()
        receipt = batch.receipt
    s = nobounce.stats() - before
    assert (s.fastpath_bytes, s.fallback_bytes) == (receipt.fastpath_bytes, receipt.fallback_bytes)
    assert s.host_traffic_bytes == receipt.host_traffic_bytes
    assert {code: nbytes for code, (_, nbytes) in s.reasons.items() if nbytes} == receipt.reasons
    assert s.flow().operations == 7  # the split one is an operation of each backend


@given(st.integers(0, 1 << 50), st.floats(0, 1e7), st.sampled_from([None, 5]))
def test_the_common_case_uses_the_documented_buckets(nbytes: int, seconds: float, stream: int | None) -> None:
    counters = Counters(Settings())
    one = made_up_job(("direct", nbytes), seconds=seconds, stream=stream)
    counters.ended(one)
    flow = seen(counters).flow()
    nanoseconds = int((one.receipt.ended_at - one.receipt.started_at) * 1e9)
    assert (flow.operations_by_size[size_bucket(nbytes)], flow.operations) == (1, 1)
    assert flow.nbytes_by_size[size_bucket(nbytes)] == nbytes
    assert flow.nanoseconds_by_size[size_bucket(nbytes)] == nanoseconds
    assert flow.latencies[latency_bucket(nanoseconds)] == 1
    assert flow.async_operations == seen(counters).counters["async_submitted"] == (stream is not None)


@pytest.mark.serial
def test_counting_costs_less_than_3_us_whatever_the_kind(job: Maker) -> None:
    kinds = {
        "one": job(("direct", 8192), stream=5),
        "refused": job(("no-p2p", 8192), refusals=("no-p2p", "virtual-function")),
        "split": job(
            ("unaligned-edge", 100),
            ("direct", 8192),
            ("unaligned-edge", 100),
            refusals=("offset-align", "size-align", "memory-align"),
        ),
    }
    hooks.start()

    def counting(kind: str) -> float:
        one = kinds[kind]
        begin = time.perf_counter()
        for _ in range(2000):
            hooks.ended(one)
        return (time.perf_counter() - begin) / 2000

    for kind in kinds:
        assert_takes_under(3e-6, lambda kind=kind: counting(kind), tries=30)


def test_an_interrupt_at_any_line_leaves_no_lock_behind(counters: Counters, job: Maker) -> None:
    """Else Ctrl-C at the end of one transfer would hold up the ends of all others."""
    error = TransferError(errno.EIO, filename="f", file_offset=0, nbytes=1, backend="fastpath", call="read")
    moved, nth = job(("direct", 4096), ("cached", 4096), error=error), 0
    counters.ended(moved)
    while nth >= 0:
        nth += 1
        left = nth

        def interrupt(frame: Any, event: str, _: object) -> Any:
            nonlocal left
            left -= event == "line"
            if left == 0 and not linecache.getline(
                frame.f_code.co_filename, frame.f_lineno
            ).lstrip().startswith(("with ", "try:")):
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            counters.ended(moved)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert not counters._lock.locked()
        if left > 0:
            break
    counters.ended(moved)
    assert counters.words[7] % 2 == 0, "the next change puts the sequence right"
    assert nth > 10
