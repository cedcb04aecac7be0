"""The floors of the load path, judged by medians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import files
from races import Results, State

STATES: tuple[State, ...] = ("cold", "warm")
SAFETENSORS = ("safetensors-clone", "safetensors-pread", "safetensors-numpy")
READINTO = ("readinto", "readinto-bytearray")
MEMORY_LIMIT = 100_000_000
# Whoever asks for huge pages may make the kernel drop a few clean pages of any file; the yardstick shows it as well.
RECLAIM = 0.01
READINTO_FLOORS = {"large": 2.0, "small": 1.4}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One floor: what was asked and what was measured; `met` is None where it could not be told."""

    text: str
    floor: str
    measured: str
    met: bool | None


def verdicts(results: Results, done: Sequence[files.BenchFile]) -> list[Verdict]:
    """Every floor for the files that were raced."""
    lines: list[Verdict] = []
    for f in done:
        lines.append(_ratio(results, f, "cold", "nobounce", ("odirect",), 0.95))
        lines.append(_ratio(results, f, "warm", "nobounce", SAFETENSORS, 2.5))
        lines.append(_ratio(results, f, "warm", "nobounce", READINTO, READINTO_FLOORS[f.name]))
        good = results.of(f.name, "cold", "nobounce") + results.of(f.name, "warm", "nobounce")
        peak = max((s.peak_growth_bytes for s in good), default=None)
        lines.append(
            Verdict(
                f"{f.name}: growth of peak memory beyond the tensors",
                f"< {MEMORY_LIMIT // 1_000_000} MB",
                "not measured" if peak is None else f"{peak / 1e6:.1f} MB",
                None if peak is None else peak < MEMORY_LIMIT,
            )
        )
        for state, limit in zip(STATES, (0, int(RECLAIM * f.nbytes)), strict=True):
            kept = results.of(f.name, state, "nobounce-avoid")
            change = max((s.cache_growth_bytes for s in kept), key=abs, default=None)
            lines.append(
                Verdict(
                    f"{f.name}, {state}: change of the page cache with cache='avoid'",
                    f"<= {limit / 1e6:.0f} MB" if limit else "0 bytes",
                    "not measured" if change is None else f"{change:,} bytes",
                    None if change is None else abs(change) <= limit,
                )
            )
    return lines


def _ratio(
    results: Results, file: files.BenchFile, state: State, name: str, against: Sequence[str], floor: float
) -> Verdict:
    """`floor` can only be met against all of `against`: the fastest of two says nothing of the third."""
    ours = results.median(file.name, state, name)
    theirs = {n: m for n in against if (m := results.median(file.name, state, n)) is not None}
    text = f"{file.name}, {state}: {name} against "
    if ours is None or not theirs:
        return Verdict(
            text + ("safetensors" if against == SAFETENSORS else against[0]),
            f">= {floor:.2f}x",
            "not measured",
            None,
        )
    best = min(theirs, key=lambda n: theirs[n])
    ratio = theirs[best] / ours
    absent = [n for n in against if n not in theirs]
    measured = f"{ratio:.3f}x" + (f", without {', '.join(absent)}" if absent else "")
    return Verdict(
        text + best, f">= {floor:.2f}x", measured, None if absent and ratio >= floor else ratio >= floor
    )


def like_with_like(results: Results, done: Sequence[files.BenchFile]) -> list[str]:
    """Warm, framework by framework: numpy arrays beside numpy arrays, torch tensors beside torch tensors. No floors."""
    pairs = (("nobounce-numpy", ("safetensors-numpy", "readinto")), ("nobounce-torch", SAFETENSORS[:2]))
    lines = []
    for f in done:
        for name, against in pairs:
            found = [_ratio(results, f, "warm", name, (other,), 0.0) for other in against]
            lines += [f"{v.text}: {v.measured}" for v in found if v.met is not None]
    return lines
