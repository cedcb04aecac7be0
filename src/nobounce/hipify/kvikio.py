"""kvikio's files and futures as nobounce's: CuFile -> File, IOFuture -> Transfer.

kvikio's calls take any array and return counts; nobounce's take the same arrays and return receipts, whose
`nbytes` is the count. A `pread` runs beside its caller; its counterpart is ordered after the default stream's
work, which is what kvikio's users wait for by hand.
"""

from __future__ import annotations

import libcst as cst

from nobounce.hipify.edits import Edit
from nobounce.hipify.objects import Objects
from nobounce.hipify.proposal import Proposal, append, arguments, is_plain, is_statement, rename
from nobounce.hipify.slots import Slot, Use

FILE, FUTURE, STREAM_FUTURE = "kvikio.CuFile", "kvikio.IOFuture", "kvikio.IOFutureStream"

MAKES = {name: name for name in (FILE, FUTURE, STREAM_FUTURE)}
RESULTS = {
    (FILE, "pread"): FUTURE,
    (FILE, "pwrite"): FUTURE,
    (FILE, "raw_read_async"): STREAM_FUTURE,
    (FILE, "raw_write_async"): STREAM_FUTURE,
}
_CLASSES = {FILE: "File", FUTURE: "Transfer", STREAM_FUTURE: "Transfer"}

_THREADED = ("buf", "size", "file_offset", "task_size")
_RAW = ("buf", "size", "file_offset", "dev_offset")
_QUEUED = ("buf", "raw_stream", "size", "file_offset", "dev_offset")
_NEW = {
    "buf": "",
    "size": "nbytes",
    "file_offset": "file_offset",
    "dev_offset": "buffer_offset",
    "raw_stream": "stream",
}
_METHODS = {
    "read": ("read", _THREADED),
    "write": ("write", _THREADED),
    "pread": ("read_async", _THREADED),
    "pwrite": ("write_async", _THREADED),
    "raw_read": ("read", _RAW),
    "raw_write": ("write", _RAW),
    "raw_read_async": ("read_async", _QUEUED),
    "raw_write_async": ("write_async", _QUEUED),
}
_SHORT = "kvikio raises RuntimeError where the file ends first; nobounce returns a short count"
_CHUNKS = "task_size is dropped: nobounce chooses its chunks (NOBOUNCE_CHUNK_SIZE)"
_DEFAULTS = (
    "nobounce has no such call: it is a setting of the process's environment (NOBOUNCE_IO_THREADS, "
    "NOBOUNCE_CHUNK_SIZE, "
    "HIPFILE_FORCE_COMPAT_MODE; `nobounce config`)"
)
REASONS = {
    "kvikio.defaults": _DEFAULTS,
    "kvikio.CompatMode": _DEFAULTS,
    "kvikio.RemoteFile": "nobounce reads no remote files",
    "kvikio.remote_file": "nobounce reads no remote files",
    "kvikio.Mmap": "nobounce has no object for a mapped file; nobounce.open reads ranges of it",
    "kvikio.zarr": "nobounce has no zarr store yet",
    "kvikio.numpy": "nobounce has no fromfile: nobounce.open(path).read(array) reads into an array",
    "kvikio.stream_register": "nobounce.register_stream takes a Stream object, not a raw handle",
    "kvikio.stream_deregister": "nobounce.deregister_stream takes a Stream object, not a raw handle",
    "kvikio.get_page_cache_info": (
        "nobounce has no such call; a receipt says how much came from the page cache"
    ),
    "kvikio.nvcomp": "nobounce does not compress",
    "kvikio.nvcomp_codec": "nobounce does not compress",
    "kvikio": "nobounce has no counterpart",
}
NEEDLESS = frozenset(
    {
        "kvikio.memory_register",
        "kvikio.memory_deregister",
        "kvikio.buffer.memory_register",
        "kvikio.buffer.memory_deregister",
        "kvikio.cufile_driver.driver_open",
        "kvikio.cufile_driver.driver_close",
    }
)
"""Calls without a result that nobounce's files do without: they prepare memory and the driver themselves."""


class Kvikio(Objects):
    """The rules of kvikio's classes."""

    makes = MAKES
    results = RESULTS

    def class_name(self, kind: str) -> str:
        return f"nobounce.{_CLASSES[kind]}"

    def make(self, out: Proposal, call: cst.Call, kind: str) -> None:
        if kind != FILE:
            return out.refuse(call, kind, "it is made by hand here, and not by a call of a file")
        found = arguments(call, ("file", "flags"))
        if found is None or "file" not in found:
            return out.refuse(call, kind, "its arguments are not those of kvikio.CuFile(file, flags)")
        flags = found["flags"].value if "flags" in found else None
        if isinstance(flags, cst.SimpleString) and str(flags.raw_value)[:1] == "a":
            return out.refuse(
                call, kind, "nobounce.open has no mode for appending, and kvikio refuses it too"
            )
        self.to(out, call.func, "nobounce", ".open")
        new = {"file": "path", "flags": "mode"}
        rename(out, call, found, {k: new[k] if a.keyword is not None else "" for k, a in found.items()})
        return None

    def use(self, out: Proposal, slot: Slot, kind: str, use: Use) -> None:
        if use.action == "method" and use.name == "__enter__" and kind == FILE:
            return None
        if use.action == "method" and isinstance(use.node, cst.Call):
            if kind == FILE:
                return self._method(out, use.node, use.name)
            return self._take(out, use.node, use.name, kind)
        if use.action == "attribute" and use.name == "closed" and kind == FILE:
            out.counts[f"{kind}.closed"] += 1
            return None
        known = use.name in _METHODS or use.name in ("get", "done", "check_bytes_done", "close", "fileno")
        if use.action == "attribute" and known:
            return out.refuse(use.node, f"{kind}.{use.name}", "the method is handed on, not called")
        if use.action == "store":
            return out.refuse(
                use.node, f"{kind}.{use.name}", "an attribute is set that nobounce's object has not"
            )
        return out.refuse(use.node, f"{kind}.{use.name}", f"nobounce.{_CLASSES[kind]} has no `{use.name}`")

    def _method(self, out: Proposal, call: cst.Call, name: str) -> None:
        if name in ("close", "fileno") and not call.args:
            out.counts[f"{FILE}.{name}"] += 1
            return None
        if name not in _METHODS or not isinstance(call.func, cst.Attribute):
            return out.refuse(call, f"{FILE}.{name}", f"nobounce.File has no `{name}`")
        new, names = _METHODS[name]
        found = arguments(call, names)
        if found is None or "buf" not in found or (names is _QUEUED and "raw_stream" not in found):
            return out.refuse(call, f"{FILE}.{name}", f"its arguments are not ({', '.join(names)})")
        dropped = found.get("task_size")
        if dropped is not None and not is_plain(dropped.value):
            return out.refuse(call, f"{FILE}.{name}", "task_size is computed here; nobounce takes none")
        if found["buf"].keyword is not None and next(iter(found)) != "buf":
            return out.refuse(call, f"{FILE}.{name}", "`buf=` is not the first argument")
        waited = self._waited(call) if names is _THREADED and new.endswith("_async") else None
        if waited is not None:
            new = new.removesuffix("_async")
            start, end = self.source.span(call)[1], self.source.span(waited)[1]
            out.edits.append(Edit(start, end, "" if is_statement(self.source, waited) else ".nbytes"))
            out.counts[f"{FUTURE}.get"] += 1
        if new != name:
            out.replace(call.func.attr, new)
        rename(out, call, found, _NEW)
        if names is _THREADED and new.endswith("_async"):
            append(out, call, f"stream={out.need('nobounce', call)}.LEGACY_DEFAULT_STREAM")
        if not new.endswith("_async") and waited is None and not is_statement(self.source, call):
            out.after(call, ".nbytes")
        if dropped is not None:
            out.note(call, _CHUNKS)
        if "read" in new:
            out.note(call, _SHORT)
        out.counts[f"{FILE}.{name}"] += 1
        return None

    def _waited(self, call: cst.Call) -> cst.Call | None:
        """The `.get()` that follows at once."""
        attribute = self.source.parent(call)
        outer = self.source.parent(attribute) if isinstance(attribute, cst.Attribute) else None
        if isinstance(outer, cst.Call) and isinstance(attribute, cst.Attribute) and outer.func is attribute:
            return outer if attribute.attr.value == "get" and not outer.args else None
        return None

    def _take(self, out: Proposal, call: cst.Call, name: str, kind: str) -> None:
        """What is done with a future."""
        if call.args or not isinstance(call.func, cst.Attribute):
            return out.refuse(call, f"{kind}.{name}", "it has arguments that kvikio's has not")
        if name == {FUTURE: "get", STREAM_FUTURE: "check_bytes_done"}[kind]:
            made = call.func.value
            if isinstance(made, cst.Call) and kind == FUTURE and self._waited(made) is call:
                return None  # written as one read, where it is made
            out.replace(call.func.attr, "result")
            if not is_statement(self.source, call):
                out.after(call, ".nbytes")
        elif name != "done" or kind != FUTURE:
            return out.refuse(call, f"{kind}.{name}", f"nobounce.Transfer has no `{name}`")
        out.counts[f"{kind}.{name}"] += 1
        return None
