"""The strategy of a routed request, case by case: who moves it, how wide, in which pieces."""

from __future__ import annotations

from typing import Any

import pytest

from nobounce import config
from nobounce.io import strategy
from nobounce.io.strategy import HOST, Destination, Gathering, Machine, Strategy, choose, gathering
from nobounce.route.types import Reason, Route, RouteSegment
from situations import request as situation

MIB = 1 << 20
FAR = Destination(relayed=True)
DMA = Destination(relayed=True, page_cache_dma=True)
TWO, MANY, OLD = Machine(2, True), Machine(16, True), Machine(16, False)
COLD, WARM, DIRECT = (Reason(code, "") for code in ("no-direct-path", "cached", "direct"))


def chosen(
    nbytes: int,
    to: Destination = FAR,
    machine: Machine = MANY,
    call: Any = "now",
    reason: Reason = WARM,
    op: Any = "read",
    **settings: Any,
) -> Strategy:
    request = situation(op=op, nbytes=nbytes, settings=config.Settings(**settings))
    backend = "fastpath" if reason is DIRECT else "fallback"
    route = Route((RouteSegment(backend, 0, 0, nbytes, reason),), ())
    return choose(request, route, to, machine, call)


def case(**fields: Any) -> dict[str, Any]:
    return fields


THREADS_12 = Strategy(12, 8 * MIB, 8 * MIB)
THREADS_4 = Strategy(4, 8 * MIB, 8 * MIB)
KERNEL = Strategy(1, 256 * MIB, 8 * MIB, kernel_slots=24)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # Memory of the host.
        (case(nbytes=1024 * MIB, to=HOST), THREADS_12),
        (case(nbytes=1024 * MIB, to=HOST, machine=TWO), THREADS_4),
        (case(nbytes=1024 * MIB, to=HOST, io_threads=3), Strategy(3, 8 * MIB, 8 * MIB)),
        (case(nbytes=1024 * MIB, to=HOST, call="stream"), THREADS_12),
        # Fresh memory of the host: more and larger direct reads, one copy a core, a fine end.
        (
            case(nbytes=1024 * MIB, to=HOST, machine=TWO, call="fresh", reason=DIRECT),
            Strategy(8, 8 * MIB, 16 * MIB, tail=4, fresh=True),
        ),
        (
            case(nbytes=1024 * MIB, to=HOST, machine=TWO, call="fresh"),
            Strategy(2, 8 * MIB, 16 * MIB, tail=1, fresh=True),
        ),
        (
            case(nbytes=1024 * MIB, to=HOST, call="fresh", reason=DIRECT, io_threads=2),
            Strategy(2, 8 * MIB, 8 * MIB, tail=1, fresh=True),
        ),
        (
            case(nbytes=1024 * MIB, to=HOST, machine=TWO, call="fresh", reason=DIRECT, chunk_nbytes=MIB),
            Strategy(8, MIB, MIB, tail=4, fresh=True),
        ),
        # A relay on many cores: io_uring's workers from 16 MiB on, for reads alone, where they are allowed.
        (case(nbytes=1024 * MIB), KERNEL),
        (case(nbytes=1024 * MIB, reason=COLD), KERNEL._replace(chunk_nbytes=64 * MIB)),
        (case(nbytes=1024 * MIB, call="fresh"), KERNEL),
        (case(nbytes=17 * MIB), KERNEL._replace(kernel_slots=5)),
        (case(nbytes=16 * MIB - 1), THREADS_12),
        (case(nbytes=1024 * MIB, op="write", reason=COLD), THREADS_12),
        (case(nbytes=1024 * MIB, machine=OLD), THREADS_12),
        (case(nbytes=1024 * MIB, relay="threads"), THREADS_12),
        (case(nbytes=1024 * MIB, io_threads=6), Strategy(6, 8 * MIB, 8 * MIB)),
        (case(nbytes=MIB, machine=TWO, relay="io_uring"), KERNEL._replace(kernel_slots=1)),
        (case(nbytes=1024 * MIB, reason=DIRECT), THREADS_12),
        # DMA from the page cache on few cores, a small relay beside it.
        (
            case(nbytes=1024 * MIB, to=DMA, machine=TWO),
            Strategy(2, 8 * MIB, 8 * MIB, dma_workers=1, kernel_slots=4),
        ),
        (
            case(nbytes=1024 * MIB, to=DMA, machine=TWO._replace(kernel_reads=False)),
            Strategy(2, 8 * MIB, 8 * MIB, dma_workers=1),
        ),
        (case(nbytes=32 * MIB - 1, to=DMA, machine=TWO), THREADS_4),
        (case(nbytes=1024 * MIB, to=DMA, machine=TWO, page_cache_dma="0"), THREADS_4),
        (
            case(nbytes=1024 * MIB, to=DMA, page_cache_dma="2"),
            Strategy(3, 8 * MIB, 8 * MIB, dma_workers=2, kernel_slots=4),
        ),
        (case(nbytes=1024 * MIB, to=DMA), KERNEL),
        # What is not cached goes on by threads while one worker stands ready for what is.
        (case(nbytes=1024 * MIB, to=DMA, machine=TWO, reason=COLD), THREADS_4._replace(dma_workers=1)),
        # In stream order: no DMA, and no more of the ring than a stream's share.
        (case(nbytes=1024 * MIB, to=DMA, machine=TWO, call="stream"), THREADS_4),
        (case(nbytes=1024 * MIB, call="stream"), KERNEL),
        (
            case(nbytes=1024 * MIB, call="stream", async_buffer_nbytes=8 * MIB),
            KERNEL._replace(kernel_slots=2),
        ),
        (
            case(nbytes=1024 * MIB, machine=OLD, call="stream", async_buffer_nbytes=8 * MIB),
            Strategy(1, 8 * MIB, 8 * MIB),
        ),
        (
            case(nbytes=1024 * MIB, machine=OLD, call="stream", async_buffer_nbytes=MIB),
            Strategy(1, MIB, MIB, slots=1),
        ),
        (case(nbytes=MIB, machine=OLD, call="stream"), Strategy(1, 4 * MIB, 4 * MIB, slots=1)),
    ],
)
def test_what_is_chosen(given: dict[str, Any], wanted: Strategy) -> None:
    assert chosen(**given) == wanted


def test_a_share_is_what_was_set_and_0_means_the_default() -> None:
    def slots(text: str | None) -> int:
        environment = {} if text is None else {"HIPFILE_ASYNC_BUFFER_SIZE": text}
        request = situation(nbytes=1024 * MIB, settings=config.Settings.from_environment(environment))
        route = Route((RouteSegment("fallback", 0, 0, 1024 * MIB, WARM),), ())
        return choose(request, route, FAR, MANY, "stream", 20 * MIB).kernel_slots

    assert [slots(t) for t in (None, "", "0", "00", "16777216", "4096")] == [5, 5, 5, 5, 4, 1]


def test_it_depends_on_nothing_but_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a strategy asks nobody")

    monkeypatch.setattr("os.sched_getaffinity", refuse)
    monkeypatch.setattr("nobounce.config.settings", refuse)
    assert chosen(1024 * MIB) == KERNEL
    assert strategy.threads_ahead(config.Settings(), 1 << 30) == strategy.FRESH_DIRECT_WIDTH


@pytest.mark.parametrize(
    ("cores", "count", "nbytes", "direct", "found"),
    [
        (2, 32768, 128 * MIB, False, Gathering(2, 1024, 4 * MIB)),
        (16, 64, 256 << 10, False, Gathering(1, 64, MIB)),  # a few blocks: one thread
        (16, 1024, 4 * MIB, False, Gathering(4, 256, MIB)),
        (16, 4096, 16 * MIB, False, Gathering(1, 170, 16 * MIB // 24, 12)),
        (16, 32768, 128 * MIB, False, Gathering(1, 1024, 4 * MIB, 12)),
        (16, 1024, 2048 * MIB, False, Gathering(1, 128, 4 * MIB, 12)),
        (16, 32768, 128 * MIB, True, Gathering(4, 1024, 4 * MIB)),  # storage is asked by a few rings
    ],
)
def test_how_blocks_are_gathered(cores: int, count: int, nbytes: int, direct: bool, found: Gathering) -> None:
    assert gathering(config.Settings(), Machine(cores, True), count, nbytes, direct=direct) == found
