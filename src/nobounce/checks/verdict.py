"""The verdict for one file and one device, from the judge that routes real requests.

The request is a plain read of the whole file, aligned. Where facts leave a question open that the judge would
act on, it is asked twice, with the best and the worst answer: if it decides the same way, the verdict stands;
if not, it is "unknown".
"""

from __future__ import annotations

from dataclasses import replace

from nobounce.checks.conditions import DeviceView, settle
from nobounce.checks.cures import Others, choose, nowhere
from nobounce.checks.files import LARGEST, Look
from nobounce.checks.findings import Finding, Layer, Verdict, VerdictName, by_layer
from nobounce.checks.machine import Machine
from nobounce.checks.pairs import block_findings, pair_findings
from nobounce.errors import RouteError
from nobounce.facts.extents import IndirectRange
from nobounce.facts.types import FileFacts
from nobounce.route.judge import judge
from nobounce.route.scores import UNREPORTED_ALIGN, hard_refusals, range_refusals, score_fallback
from nobounce.route.types import DirectFacts, MemoryFacts, MemoryKind, Refusal, Request

ADDRESS = 1 << 30
"""Where the imagined buffer lies: aligned for anything."""

LAYER_OF: dict[str, Layer] = {
    "block-stack": "block",
    "encoded-extent": "file",
    "ext4-journal": "file system",
    "fallback-disabled": "settings",
    "fastpath-disabled": "settings",
    "file-kind": "file",
    "file-system": "file system",
    "inline-extent": "file",
    "memory-file-system": "file system",
    "memory-kind": "device",
    "no-direct-descriptor": "file",
    "no-direct-io": "file",
    "direct-io-unproven": "file",
    "virtual-function": "pci",
}


def read_request(
    machine: Machine,
    facts: FileFacts,
    direct: DirectFacts,
    device: str,
    indirect: tuple[IndirectRange, ...] = (),
) -> Request:
    """The request that a check judges: the file from its start, of a size that is
    aligned, into aligned memory."""
    grain = max(facts.dio_offset_align or UNREPORTED_ALIGN, direct.min_offset_align)
    nbytes = max(1, min(facts.nbytes, LARGEST))
    nbytes = -(-nbytes // grain) * grain
    return Request(
        op="read",
        file=facts,
        memory=MemoryFacts(MemoryKind.DEVICE, ADDRESS, nbytes, device),
        direct=direct,
        settings=machine.settings,
        file_offset=0,
        nbytes=nbytes,
        indirect=indirect,
    )


def outcome(request: Request) -> VerdictName:
    """What the judge makes of a request: all of it direct, or through fallback, or not at all."""
    try:
        route = judge(request)
    except RouteError:
        return "impossible"
    return "fastpath" if route.nbytes("fallback") == 0 else "fallback"


def verdict_for(machine: Machine, seen: Look, view: DeviceView, others: Others = nowhere) -> Verdict:
    """Judge one file on one device. `others` are mount points where a file would
    fare better, nearest first."""
    findings = [*seen.findings, *view.findings]
    if view.absent:
        return _verdict(machine, seen, view, "impossible", findings, _absence(view.findings), others)
    if seen.facts is None or seen.without is not None:
        return _verdict(machine, seen, view, seen.without or "impossible", findings, seen.findings, others)
    facts = seen.facts
    best, worst_direct = view.best, view.worst
    worst_facts = facts
    if view.gpu is not None:
        way = machine.nvidia_storage.way(view.gpu.bdf) if view.gpu.runtime == "cuda" else ""
        block = block_findings(facts, view.gpu, way)
        between = pair_findings(machine, facts.block, view.gpu)
        findings += block + between
        if best.file_rule == "hipfile":  # the judge sees the stack itself
            if facts.block is not None and facts.block.peer == "unknown":
                worst_facts = replace(facts, block=replace(facts.block, peer="no"))
            unseen = block if facts.block is None else []
            best, worst_direct = _both(best, worst_direct, unseen + between)
        else:
            best, worst_direct = _both(best, worst_direct, block + between)
    at_best = read_request(machine, facts, best, view.name, seen.indirect)
    at_worst = read_request(machine, worst_facts, worst_direct, view.name, seen.indirect)
    name, low = outcome(at_best), outcome(at_worst)
    if name != low:
        doubts = tuple(f for f in findings if f.decides and f.answer == "unknown")
        return _verdict(machine, seen, view, "unknown", findings, doubts, others)
    refusals = [] if name == "fastpath" else hard_refusals(at_best) or range_refusals(at_best)
    if name == "impossible":
        refusals += score_fallback(at_best).refusals
    decided = _explain(refusals, findings, facts)
    findings += [f for f in decided if f not in findings]
    if name != "fastpath":  # the judge stops at the first obstacle of a device; a cure has to know them all
        decided += [f for f in findings if f.decides and f.answer == "no" and f not in decided]
    return _verdict(machine, seen, view, name, findings, tuple(decided), others)


def _both(best: DirectFacts, worst: DirectFacts, found: list[Finding]) -> tuple[DirectFacts, DirectFacts]:
    if not best.available:
        return best, worst
    at_best, doubtful = settle(best, found)
    if not at_best.available:
        return at_best, at_best
    return at_best, doubtful if worst.available and not _doubtful(worst) else worst


def _doubtful(worst: DirectFacts) -> bool:
    return worst.virtual_function == "yes"


def _absence(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What makes a device unusable: that it may not be opened, else whatever is missing."""
    closed = tuple(f for f in findings if f.code == "no-device")
    return closed or tuple(f for f in findings if f.decides and f.answer == "no")


def _explain(refusals: list[Refusal], findings: list[Finding], facts: FileFacts) -> list[Finding]:
    """A finding for every refusal of the judge: the one that led to it, or one made from its words."""
    found: list[Finding] = []
    for refusal in refusals:
        led = [f for f in findings if f.decides and f.answer == "no" and f.code == refusal.code]
        if led:
            found += led
        else:
            layer = LAYER_OF.get(refusal.code, "device")
            found.append(Finding(layer, "no", refusal.sentence, _read_from(layer, facts), refusal.code))
    return list(dict.fromkeys(found))


def _read_from(layer: Layer, facts: FileFacts) -> str:
    if layer == "settings":
        return "/proc/self/environ"
    if layer == "file system":
        return facts.filesystem.decided_by
    if layer == "block" and facts.block is not None:
        return facts.block.decided_by
    return f"statx({facts.path})"


def _verdict(
    machine: Machine,
    seen: Look,
    view: DeviceView,
    name: VerdictName,
    findings: list[Finding],
    decided_by: tuple[Finding, ...],
    others: Others,
) -> Verdict:
    return Verdict(
        seen.path,
        view.name,
        name,
        by_layer(findings),
        by_layer(list(decided_by)),
        choose(machine, seen, view, name, decided_by, others),
        "device" if view.gpu is not None else "host",
    )
