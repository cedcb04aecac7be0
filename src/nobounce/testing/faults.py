"""Faults of the `sim` runtime, and of plain pread and pwrite, on demand.

    with faults.inject(device="sim:0", op="read", error=errno.ENODEV, times=1) as fault:
        receipt = file.read(buffer)
    assert fault.hits == 1

`faults.rule(...)` makes the same rule for one runtime alone:
`SimRuntime(faults=[faults.rule("alloc", after=3)])`.
"""

from __future__ import annotations

from nobounce.runtimes.faults import OPS, Conditions, Rule, inject, rule

__all__ = ["OPS", "Conditions", "Rule", "inject", "rule"]
