"""What a check can learn of one path: the facts that the judge takes, and the findings that explain them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nobounce.checks.findings import Finding, VerdictName
from nobounce.checks.machine import Machine
from nobounce.errors import errno_name
from nobounce.facts.block import BlockNode, legs, queue_limits, stacks_of, summary
from nobounce.facts.extents import IndirectRange, indirect_in
from nobounce.facts.file import examine
from nobounce.facts.mountstats import NFS
from nobounce.facts.probe import probe_direct
from nobounce.facts.source import MOUNTINFO, Source
from nobounce.facts.sysfs import text
from nobounce.facts.types import FileFacts, FileSystemFacts

LARGEST = 1 << 30
"""Bytes of a file, from its start, that a check judges."""
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "beegfs", "9p", "afs"})


ModelAt = Callable[[str], tuple[str, list[str]]]
"""What is wrong with the model at a path, as a sentence, or "", and its files: none
where there is no model."""


@dataclass(frozen=True, slots=True)
class Look:
    """One path looked at: `facts` for the judge, or, where there can be none, the verdict and
    the finding that says why."""

    path: str
    facts: FileFacts | None
    findings: tuple[Finding, ...] = ()
    stacks: tuple[BlockNode, ...] = ()
    indirect: tuple[IndirectRange, ...] = ()
    """Of the first LARGEST bytes, those that the file system reads through the page cache."""
    without: VerdictName | None = None


def look(machine: Machine, path: str) -> Look:
    """Examine a path as an opened file would be; nothing is written and no pipe or device is waited for."""
    source = machine.source
    try:
        mode = source.mode(path)
    except OSError as e:
        return _unopened(source, path, e, "look at")
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        return Look(path, _stranger(path, mode))
    try:
        with source.opened(path) as fd:
            facts = examine(source, fd, path=path, trial=True)
            if facts.dio_offset_align is None and facts.direct_fd == "ok" and not facts.filesystem.memory:
                facts = dataclasses.replace(facts, direct_probe=_probe(source, fd, facts))
            indirect = _indirect(source, fd, facts) if facts.direct_probe == "yes" else ()
    except OSError as e:
        return _unopened(source, path, e, "open")
    stacks = stacks_of(source, facts)
    facts = dataclasses.replace(facts, block=summary(stacks))
    return Look(path, facts, tuple(_findings(source, facts, stacks)), tuple(stacks), indirect)


def _indirect(source: Source, fd: int, facts: FileFacts) -> tuple[IndirectRange, ...]:
    nbytes = min(facts.nbytes, LARGEST)
    try:
        found = source.probe("indirect", (facts.path,), lambda: [list(r) for r in indirect_in(fd, 0, nbytes)])
    except OSError:
        return ()
    return tuple(IndirectRange(*each) for each in found)


def _probe(source: Source, fd: int, facts: FileFacts) -> Any:
    def live() -> str:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            nfs = facts.filesystem.mount_point if facts.filesystem.fstype in NFS else None
            return probe_direct(direct, nfs)
        finally:
            os.close(direct)

    try:
        found = source.probe("direct_read", (facts.path,), live)
    except OSError:
        return "unknown"
    return found if found in ("yes", "no", "uncounted") else "unknown"


def _unopened(source: Source, path: str, error: OSError, doing: str) -> Look:
    code = error.errno or errno.EIO
    if code in (errno.EACCES, errno.EPERM) and source.effective_uid() != 0:
        sentence = f"this user may not {doing} the file ({errno_name(code)})"
        finding = Finding("file", "unknown", sentence, path, "no-permission", needs_root=True)
        return Look(path, None, (finding,), without="unknown")
    missing = "there is no such file" if code in (errno.ENOENT, errno.ENOTDIR) else None
    sentence = missing or f"the file cannot be opened ({errno_name(code)})"
    return Look(path, None, (Finding("file", "no", sentence, path, "no-file"),), without="impossible")


def _stranger(path: str, mode: int) -> FileFacts:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "fifo", stat.S_IFCHR: "char", stat.S_IFSOCK: "socket"}
    kind: Any = kinds.get(stat.S_IFMT(mode), "other")
    system = FileSystemFacts("unknown", "", "", (), None, MOUNTINFO, False, False)
    none = (0, 0)
    return FileFacts(path, kind, 0, 0, none, none, None, 0, 0, None, None, None, "r", "unknown", None, system)


def _findings(source: Source, facts: FileFacts, stacks: list[BlockNode]) -> list[Finding]:
    """What is worth saying of the file whatever the device; the judge's refusals are added to it later."""
    found = []
    system = facts.filesystem
    label = f"statx({facts.path})"
    if facts.kind == "block":
        found.append(Finding("file", "yes", "a block device", label, decides=False))
    elif not system.memory:
        found.append(Finding("file system", "yes", _system(system), system.decided_by, decides=False))
    if facts.dio_offset_align:
        sentence = (
            f"direct I/O at multiples of {facts.dio_offset_align} bytes in the file and "
            f"{facts.dio_mem_align} in memory"
        )
        found.append(Finding("file", "yes", sentence, label, decides=False))
    elif facts.dio_offset_align is None and facts.direct_probe == "yes":
        found.append(
            Finding("file", "yes", "an aligned probe read went past the page cache", label, decides=False)
        )
    if system.read_only:
        sentence = f"{system.mount_point} is mounted read-only: reads alone"
        found.append(Finding("file system", "yes", sentence, MOUNTINFO, decides=False))
    if not facts.nbytes and facts.kind == "regular":
        found.append(
            Finding("file", "unknown", "the file is empty: there is nothing to read", label, decides=False)
        )
    for one in dict.fromkeys(c for node in stacks for leg in legs(node) for c in leg.controllers):
        facts_of = [text(source, f"{one.path}/{name}") for name in ("model", "firmware_rev", "state")]
        said = ", ".join(x for x in (*facts_of, one.transport, one.bdf) if x)
        found.append(Finding("nvme", "yes", f"{one.name}: {said}", f"{one.path}/model", decides=False))
    for node in stacks:
        found.append(Finding("block", "yes", f"on {describe(node)}", node.path, decides=False))
        limits = queue_limits(source, node.disk)
        if limits.logical_block_nbytes:
            sentence = f"{node.disk.name} takes blocks of {limits.logical_block_nbytes} bytes"
            if limits.max_nbytes:
                sentence += f", at most {limits.max_nbytes // 1024} KiB a request"
            if limits.dma_alignment:
                sentence += f", memory aligned to {limits.dma_alignment}"
            path = f"{node.disk.path}/queue/logical_block_size"
            found.append(Finding("block", "yes", sentence, path, decides=False))
    return found


def _system(system: FileSystemFacts) -> str:
    """The file system in words, with what its options say of the way to it."""
    said = f"{system.fstype} at {system.mount_point}"
    if system.fstype == "ext4":
        said += ", without a journal" if system.journal == "none" else f", data={system.journal}"
    if system.fstype in NETWORK:
        proto = next((o[6:] for o in system.options if o.startswith("proto=")), "")
        said += " over the network" + (f" ({proto})" if proto else "")
    if system.fstype.startswith("fuse"):
        said += ", whose reads are served by a process"
    return said


def describe(node: BlockNode) -> str:
    """A stack in words: dm-0 (lvm vg-lv) over nvme0n1p1 over nvme0n1 (nvme, pcie)."""
    bits: list[str] = []
    if node.kind in ("nvme", "nvme-multipath"):
        ways = ", ".join(dict.fromkeys(c.transport or "?" for c in node.controllers))
        bits = [node.kind, ways]
    elif node.kind != "partition":
        bits = [node.kind if node.kind != "other" else "", node.detail]
    inside = ", ".join(b for b in bits if b)
    said = f"{node.name} ({inside})" if inside else node.name
    if not node.below:
        return said
    parts = [describe(b) for b in node.below]
    return f"{said} over {parts[0] if len(parts) == 1 else '[' + '; '.join(parts) + ']'}"


def looks(machine: Machine, path: str, model: ModelAt | None = None) -> list[Look]:
    """Every file that a path stands for, looked at: those of the model there, missing ones
    too, else as `expand` says."""
    wrong, files = "", []
    if model is not None:
        with contextlib.suppress(OSError):  # a capture of a version that did not ask
            wrong, files = machine.source.probe("model_files", (path,), lambda: list(model(path)))
    if wrong:
        return [Look(path, None, (Finding("file", "no", wrong, path, "no-model"),), without="impossible")]
    return [look(machine, one) for one in files or expand(machine, path)]


def expand(machine: Machine, path: str) -> list[str]:
    """The files that a path stands for: a folder's files (not its subfolders') and its links that lead
    nowhere, else the path itself.
    """
    source = machine.source
    try:
        if not stat.S_ISDIR(source.mode(path)):
            return [path]
        found = [os.path.join(path, n) for n in source.listdir(path) if not n.startswith(".")]
    except OSError:
        return [path]
    kept = []
    for one in found:
        try:
            if stat.S_ISREG(source.mode(one)):
                kept.append(one)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ELOOP):
                kept.append(one)
    return kept or [path]
