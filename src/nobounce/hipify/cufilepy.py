"""cufile-python's CuFile as hipfile.FileHandle, which is opened as it is and takes addresses as it does.

Where libcufile fails, cufile-python's reads return its negative code as a huge number; FileHandle raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import libcst as cst

from nobounce.hipify.objects import Objects
from nobounce.hipify.proposal import Proposal, arguments, is_plain
from nobounce.hipify.slots import Slot, Use

FILE = "cufile.CuFile"
REASONS = {
    "cufile.CuFileDriver": "nobounce.hipfile opens its driver with the first file",
    "cufile.bindings": (
        "nobounce.hipfile has these functions by other names and conventions (docs/hipfile.md)"
    ),
    "cufile": "nobounce has no counterpart",
}
HIP_REASONS = {"cufile": "HIP's bindings have no class of this kind"}

_FLAGS = {
    "r": "os.O_RDONLY",
    "r+": "os.O_RDWR",
    "w": "os.O_CREAT | os.O_WRONLY | os.O_TRUNC",
    "w+": "os.O_CREAT | os.O_RDWR | os.O_TRUNC",
    "a": "os.O_CREAT | os.O_WRONLY | os.O_APPEND",
    "a+": "os.O_CREAT | os.O_RDWR | os.O_APPEND",
}


class CufilePython(Objects):
    """The rules of cufile-python's class."""

    makes: ClassVar[Mapping[str, str]] = {FILE: FILE}
    results: ClassVar[Mapping[tuple[str, str], str]] = {}

    def class_name(self, kind: str) -> str:
        return "hipfile.FileHandle"

    def make(self, out: Proposal, call: cst.Call, kind: str) -> None:
        found = arguments(call, ("path", "mode", "use_direct_io"))
        if found is None or "path" not in found:
            return out.refuse(call, kind, "its arguments are not those of CuFile(path, mode, use_direct_io)")
        mode = found["mode"].value if "mode" in found else None
        text = "r" if mode is None else str(mode.raw_value) if isinstance(mode, cst.SimpleString) else ""
        direct = self.source.code(found["use_direct_io"].value) if "use_direct_io" in found else "False"
        if text not in _FLAGS:
            return out.refuse(call, kind, "FileHandle takes flags of os.open, and the mode is no literal")
        if direct not in ("True", "False"):
            return out.refuse(
                call, kind, "FileHandle takes flags of os.open, and use_direct_io is no literal"
            )
        flags = _FLAGS[text] + (" | os.O_DIRECT" if direct == "True" else "")
        out.need("os", call)
        self.to(out, call.func, "hipfile", ".FileHandle")
        first, last = self.source.span(call.args[0])[0], self.source.span(call.args[-1])[1]
        out.span(first, last, f"{self.source.code(found['path'].value)}, {flags}, 0o777")
        return None

    def use(self, out: Proposal, slot: Slot, kind: str, use: Use) -> None:
        call, name = use.node, f"{FILE}.{use.name}"
        if use.action == "method" and use.name == "__enter__":
            return None
        if use.action == "attribute" and use.name == "is_open":
            out.replace(use.node, f"({self.source.code(use.node.value)}.handle is not None)")
            out.counts[name] += 1
            return None
        if use.action != "method" or not isinstance(call, cst.Call):
            return out.refuse(call, name, f"FileHandle has no `{use.name}`")
        if use.name in ("open", "close") and not call.args:
            out.counts[name] += 1
            return None
        memory = "dest" if use.name == "read" else "src"
        found = arguments(call, (memory, "size", "file_offset", "dev_offset"))
        if use.name not in ("read", "write") or found is None or not {memory, "size"} <= set(found):
            return out.refuse(call, name, f"FileHandle has no `{use.name}`, or not with these arguments")
        if not is_plain(found["size"].value):
            return out.refuse(call, name, "the size is computed here; put it into a variable first")
        address, size = (self.source.code(found[n].value) for n in (memory, "size"))
        offsets = [
            self.source.code(found[n].value) if n in found else "0" for n in ("file_offset", "dev_offset")
        ]
        buffer = f"{out.need('hipfile', call)}.Buffer({address}, {size})"
        first, last = self.source.span(call.args[0])[0], self.source.span(call.args[-1])[1]
        out.span(first, last, ", ".join([buffer, size, *offsets]))
        out.note(call, "a failed transfer raises; cufile-python returned libcufile's code as a huge number")
        out.counts[name] += 1
        return None
