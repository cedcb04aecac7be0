"""cuda.bindings.cufile as nobounce.hipfile, or as AMD's hipfile: the same functions by other names.

cuFile's bindings raise where hipFile's return a status, so each call is wrapped: in `hipfile.check` here, in
a small function that is put into the source there. Handles and registrations belong to one library: either
all calls of a source go over or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from nobounce.hipify.cufile_names import (
    CALLS,
    DESCR,
    ENUMS,
    ERROR_CLASS,
    INDEPENDENT,
    PARAMETERS,
    Call,
)
from nobounce.hipify.flow import Flow
from nobounce.hipify.proposal import Proposal, arguments
from nobounce.hipify.report import Target
from nobounce.hipify.slots import Slot, Use
from nobounce.hipify.source import Meaning, Source

MODULE = "cuda.bindings.cufile"
REASONS = {
    f"{MODULE}.descr_dtype": "descriptors laid out by hand are not followed; cufile.Descr() is",
    f"{MODULE}.get_version": "its number is cuFile's; nobounce.hipfile.get_version() tells hipFile's",
    f"{MODULE}.batch": "batches are C structures there and Python objects in nobounce.hipfile",
    MODULE: "it is not in the table",
}
HELPER = '''def _hipfile_value(result):
    """What a call of hipfile returns without its status; raises where cuFile's bindings would have."""
    status, *values = result if isinstance(result, tuple) else (result,)
    if not hasattr(status, "err"):
        values = [status, *values]
    elif int(status.err):
        raise RuntimeError(f"hipFile error {int(status.err)}, HIP error {int(status.hip_drv_err)}")
    if values and isinstance(values[0], int) and values[0] < 0:
        raise RuntimeError(f"hipFile error {values[0]}")
    return values[0] if len(values) == 1 else tuple(values) or None
'''


class Cufile:
    """One proposal for all calls of the module."""

    def __init__(self, source: Source, flow: Flow, target: Target) -> None:
        self._source, self._flow, self._target = source, flow, target

    def proposal(self, references: Sequence[tuple[cst.BaseExpression, Meaning]]) -> Proposal:
        out = Proposal(self._source)
        for node, rest in out.within(MODULE, references):
            if rest not in INDEPENDENT:
                self._reference(out, node, rest)
        for slot in self._flow.found():
            if DESCR in slot.kinds():
                self._descriptor(out, slot)
        return out

    def _name(self, out: Proposal, node: cst.CSTNode, rest: str) -> str:
        return f"{out.need('hipfile', node)}.{rest}"

    def _reference(self, out: Proposal, node: cst.BaseExpression, rest: str) -> None:
        dotted = f"{MODULE}.{rest}"
        parent = self._source.parent(node)
        if rest == ERROR_CLASS:
            self._error_class(out, node)
        elif rest in CALLS and isinstance(parent, cst.Call) and parent.func is node:
            if not self._call(out, parent, rest, CALLS[rest]):
                return
        elif rest == DESCR.rpartition(".")[2] and isinstance(parent, cst.Call) and not parent.args:
            out.replace(
                node, self._name(out, node, "Descr" if self._target == "nobounce" else "hipFileDescr")
            )
        elif rest in ENUMS and ENUMS[rest][self._target == "hip"]:
            out.replace(node, self._name(out, node, ENUMS[rest][self._target == "hip"]))
        else:
            reason = next((r for n, r in REASONS.items() if dotted.startswith(n)), REASONS[MODULE])
            return out.refuse(node, dotted, reason)
        out.claimed.append(node)
        out.counts[dotted] += 1
        return None

    def _error_class(self, out: Proposal, node: cst.BaseExpression) -> None:
        if self._target == "hip":
            out.replace(node, "RuntimeError")
            out.need("hipfile", node)
            return
        text = f"{self._name(out, node, 'HipFileException')}, OSError"
        out.replace(node, text if isinstance(self._source.parent(node), cst.Element) else f"({text})")

    def _call(self, out: Proposal, call: cst.Call, rest: str, how: Call) -> bool:
        dotted, before = f"{MODULE}.{rest}", len(out.problems)
        found = arguments(call, PARAMETERS[rest])
        if found is None or any(p not in found for p in PARAMETERS[rest]):
            out.refuse(call, dotted, f"its arguments are not ({', '.join(PARAMETERS[rest])})")
            return False
        new = how.nobounce if self._target == "nobounce" else how.hip
        if not new:
            out.refuse(call, dotted, "hipFile has no call for it")
            return False
        names = how.keywords(self._target)
        for name, arg in found.items():
            if arg.keyword is not None:
                out.replace(arg.keyword, names.get(name, name))
        for name in how.pointers:
            self._pointed(out, found[name].value, dotted)
        if rest == "handle_register":
            self._described(out, found["descr"].value)
        out.replace(call.func, self._name(out, call, new))
        if how.raises:
            check = self._name(out, call, "check") if self._target == "nobounce" else "_hipfile_value"
            out.insert(self._source.span(call)[0], f"{check}(")
            out.after(call, ")")
            if self._target == "hip":
                out.need("helper", call)
        return len(out.problems) == before

    def _pointed(self, out: Proposal, value: cst.BaseExpression, dotted: str) -> None:
        """`ctypes.addressof(x)`: hipfile takes x itself."""
        if self._target == "hip":
            return
        is_address = (
            isinstance(value, cst.Call) and self._source.code(value.func).split(".")[-1] == "addressof"
        )
        if isinstance(value, cst.Call) and is_address and len(value.args) == 1:
            out.replace(value, self._source.code(value.args[0].value))
            return
        out.refuse(
            value, dotted, "it takes addresses of numbers; only ctypes.addressof(x) is known to be one"
        )

    def _described(self, out: Proposal, value: cst.BaseExpression) -> None:
        """`descr.ptr` of a descriptor that this source makes."""
        if isinstance(value, cst.Attribute) and value.attr.value == "ptr" and id(value) in self._pointers():
            out.replace(value, self._source.code(value.value))
            return
        out.refuse(
            value,
            f"{MODULE}.handle_register",
            "its descriptor is no cufile.Descr() that is made in this file",
        )

    def _pointers(self) -> set[int]:
        return {
            id(u.node)
            for s in self._flow.found()
            if s.kinds() == {DESCR} and not s.mixed
            for u in s.uses
            if u.action == "attribute" and u.name == "ptr"
        }

    def _descriptor(self, out: Proposal, slot: Slot) -> None:
        for node, what in slot.mixed:
            out.refuse(node, DESCR, f"the name that holds it is bound to {what} as well")
        for use in slot.uses:
            self._described_use(out, use)

    def _described_use(self, out: Proposal, use: Use) -> None:
        parent = self._source.parent(use.node)
        if use.action == "attribute" and use.name == "handle" and isinstance(parent, cst.Attribute):
            if parent.attr.value == "fd":
                if self._target == "nobounce" and isinstance(use.node, cst.Attribute):
                    out.replace(use.node, self._source.code(use.node.value))
                return
        elif use.action == "attribute" and use.name == "ptr":
            call = self._source.parent(parent) if isinstance(parent, cst.Arg) else None
            if isinstance(call, cst.Call) and self._flow.dotted(call.func) == f"{MODULE}.handle_register":
                return
        elif (
            use.action in ("store", "attribute") and use.name in ("type", "fs_ops")
        ) or use.action == "return":
            return
        out.refuse(use.node, DESCR, "a descriptor is used in a way that cannot be followed")
