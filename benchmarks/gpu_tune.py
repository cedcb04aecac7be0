"""`gpu.py --sections tune`: how page-cached bytes are divided among ring threads, DMA from the page cache and a relay beside it."""

from __future__ import annotations

from typing import Any

import common
from gpu_ways import Bench, loaders


def tune_section(bench: Bench) -> None:
    """Ring threads x page-cache DMA threads, page-cached, one by one (a figure for the choice, not a race)."""
    from nobounce import config
    from nobounce.io import strategy

    common.warm(bench.path)
    ways = {}
    for ring, dma in (
        (1, 1),
        (1, 2),
        (2, 1),
        (4, 1),
        (6, 1),
        (8, 1),
        (4, 2),
        (8, 2),
        (8, 0),
        (12, 0),
        (16, 0),
    ):

        def one(ring: int = ring, dma: int = dma) -> Any:
            config.override(config.Settings(io_threads=ring, page_cache_dma=str(dma)))
            return loaders(bench)["nobounce"]()

        ways[f"ring {ring} + dma {dma}"] = one
    beside = strategy.BESIDE_SLOTS
    for dma, slots in ((1, beside), (2, beside), (1, 0), (2, 0), (4, 0)):

        def pinning(dma: int = dma, slots: int = slots) -> Any:
            config.override(config.Settings(page_cache_dma=str(dma)))
            strategy.BESIDE_SLOTS = slots
            try:
                return loaders(bench)["nobounce"]()
            finally:
                strategy.BESIDE_SLOTS = beside

        ways[f"dma {dma}, {slots} slots beside"] = pinning
    runs, bench.runs = bench.runs, 3
    bench.race("tune", ways, lambda: None)
    bench.runs = runs
    config.override(None)
