"""torch.cuda.gds as nobounce's files: GdsFile -> File.

A GdsFile moves whole storages. A storage has no array protocol of its own, so the new text makes a tensor of
bytes over the same memory. On ROCm torch.cuda.gds is hipFile already, which is why nothing is rewritten with
HIP's bindings as the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import libcst as cst

from nobounce.hipify.objects import Objects
from nobounce.hipify.proposal import Proposal, arguments, is_plain, is_statement
from nobounce.hipify.slots import Slot, Use

FILE = "torch.cuda.gds.GdsFile"
REASONS = {"torch.cuda.gds": "nobounce has no counterpart"}
HIP_REASONS = {"torch.cuda.gds": "in PyTorch for ROCm this is hipFile already"}
NEEDLESS = frozenset({"torch.cuda.gds.gds_register_buffer", "torch.cuda.gds.gds_deregister_buffer"})

_MODES = {"os.O_RDONLY": "r", "os.O_RDWR": "r+"}
_METHODS = {"load_storage": "read", "save_storage": "write"}


class Gds(Objects):
    """The rules of torch.cuda.gds."""

    makes: ClassVar[Mapping[str, str]] = {FILE: FILE}
    results: ClassVar[Mapping[tuple[str, str], str]] = {}

    def class_name(self, kind: str) -> str:
        return "nobounce.File"

    def make(self, out: Proposal, call: cst.Call, kind: str) -> None:
        found = arguments(call, ("filename", "flags"))
        if found is None or len(found) != 2:
            return out.refuse(call, kind, "its arguments are not those of GdsFile(filename, flags)")
        name, flags = (self.source.code(found[n].value) for n in ("filename", "flags"))
        if flags in _MODES:
            self.to(out, call.func, "nobounce", ".open")
            text = f'{name}, "{_MODES[flags]}"'
        elif is_plain(found["filename"].value):
            self.to(out, call.func, "nobounce", ".File")
            text = f"{out.need('os', call)}.open({name}, {flags}), {name}"
        else:
            return out.refuse(call, kind, "its file name is computed here; put it into a variable first")
        first, last = self.source.span(call.args[0])[0], self.source.span(call.args[-1])[1]
        out.span(first, last, text)
        return None

    def use(self, out: Proposal, slot: Slot, kind: str, use: Use) -> None:
        call = use.node
        name = f"{FILE}.{use.name}"
        if (
            use.action != "method"
            or not isinstance(call, cst.Call)
            or not isinstance(call.func, cst.Attribute)
        ):
            if use.action == "attribute" and use.name == "fd":
                out.replace(use.node.attr, "fileno()")
                out.counts[name] += 1
                return None
            return out.refuse(call, name, f"nobounce.File has no `{use.name}`")
        found = arguments(call, ("storage", "offset"))
        if use.name not in _METHODS or found is None or "storage" not in found:
            return out.refuse(call, name, f"nobounce.File has no `{use.name}`, or not with these arguments")
        if not is_statement(self.source, call):
            return out.refuse(call, name, "it returns None, nobounce a receipt, and its value is used")
        storage = found["storage"].value
        text = self._bytes_of(out, storage)
        if text is None:
            return out.refuse(call, name, "the storage is computed here; put it into a variable first")
        if "offset" in found:
            text += f", file_offset={self.source.code(found['offset'].value)}"
        out.replace(call.func.attr, _METHODS[use.name])
        first, last = self.source.span(call.args[0])[0], self.source.span(call.args[-1])[1]
        out.span(first, last, text)
        out.counts[name] += 1
        return None

    def _bytes_of(self, out: Proposal, storage: cst.BaseExpression) -> str | None:
        """A tensor of bytes over a storage."""
        owner = storage
        if (
            isinstance(storage, cst.Call)
            and not storage.args
            and isinstance(storage.func, cst.Attribute)
            and storage.func.attr.value == "untyped_storage"
        ):
            owner = storage.func.value
        if not is_plain(owner):
            return None
        torch = out.need("torch", storage)
        device = self.source.code(owner)
        return (
            f"{torch}.empty(0, dtype={torch}.uint8, device={device}.device).set_({self.source.code(storage)})"
        )
