"""cuda.bindings.runtime as nobounce.hip or AMD's hip: other names, the same tuples `(status, ...)`.

Memory, streams and events belong to one runtime: either all calls of a source go over or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from nobounce.hipify.names import CALLS, CONSTANTS, ERRORS, KINDS, NOBOUNCE_ERRORS, NOBOUNCE_HIP, TYPES
from nobounce.hipify.proposal import Proposal
from nobounce.hipify.report import Target
from nobounce.hipify.source import Meaning, Source, walk

MODULE = "cuda.bindings.runtime"
REASONS = {MODULE: "it is not in the table", "cuda.bindings.driver": "the driver API is not in the table"}
INDEPENDENT = frozenset(
    {"cudaProfilerStart", "cudaProfilerStop", "cudaRuntimeGetVersion", "cudaDriverGetVersion"}
)
"""What may stay with CUDA when the rest goes."""
_ONE_MORE = frozenset({"cudaMallocHost"})
"""Functions whose counterpart takes flags."""


class Runtime:
    """One proposal for all calls of the module."""

    def __init__(self, source: Source, target: Target) -> None:
        self._source, self._target = source, target

    def proposal(self, references: Sequence[tuple[cst.BaseExpression, Meaning]]) -> Proposal:
        out = Proposal(self._source)
        for node, rest in out.within(MODULE, references):
            if rest not in INDEPENDENT:
                self._reference(out, node, f"{MODULE}.{rest}", rest)
        return out

    def _reference(self, out: Proposal, node: cst.BaseExpression, dotted: str, rest: str) -> None:
        head, _, tail = rest.partition(".")
        new = {**CALLS, **TYPES, **CONSTANTS}.get(head, "")
        member = {"cudaError_t": ERRORS, "cudaMemcpyKind": KINDS}.get(head, {}).get(
            tail.partition(".")[0], ""
        )
        parent = self._source.parent(node)
        if not new or (tail and not member):
            return out.refuse(node, dotted, REASONS[MODULE])
        if self._target == "nobounce" and new not in NOBOUNCE_HIP:
            return out.refuse(node, dotted, f"nobounce.hip has no {new}; --to hip has")
        if self._target == "nobounce" and head == "cudaError_t" and tail and member not in NOBOUNCE_ERRORS:
            return out.refuse(node, dotted, f"nobounce.hip's runtimes have no {member}")
        if head in CALLS and isinstance(parent, cst.Call) and parent.func is node:
            if any(arg.keyword is not None for arg in parent.args):
                return out.refuse(node, dotted, "HIP names its parameters otherwise: give them by position")
            if head in _ONE_MORE and len(parent.args) == 1:
                out.after(parent.args[-1], ", 0")
        elif head in CALLS and head in _ONE_MORE:
            return out.refuse(node, dotted, f"it is not called here, and {new} takes one argument more")
        whole = ".".join([new, member, *tail.split(".")[1:]] if member else [new])
        out.replace(node, f"{out.need('hip', node)}.{whole}")
        out.claimed.append(node)
        out.counts[dotted] += 1
        return None

    def pointers_by_method(self) -> cst.CSTNode | None:
        """A call of getPtr(), which objects of CUDA's bindings have and HIP's have not."""
        return next(
            (
                n
                for n in walk(self._source.module)
                if isinstance(n, cst.Attribute) and n.attr.value == "getPtr"
            ),
            None,
        )
