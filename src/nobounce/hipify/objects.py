"""What the rules for a library's classes have in common: an object is converted with all that is
done with it, or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import libcst as cst

from nobounce.hipify.flow import Flow
from nobounce.hipify.proposal import Proposal
from nobounce.hipify.slots import Slot, Use
from nobounce.hipify.source import Source


class Objects(ABC):
    """The rules of one library. `makes` and `results` are Flow's."""

    makes: ClassVar[Mapping[str, str]]
    results: ClassVar[Mapping[tuple[str, str], str]]

    def __init__(self, source: Source, flow: Flow) -> None:
        self.source, self.flow = source, flow

    @abstractmethod
    def class_name(self, kind: str) -> str:
        """The class that stands for a kind in annotations and isinstance: "module.Name"."""

    @abstractmethod
    def make(self, out: Proposal, call: cst.Call, kind: str) -> None:
        """Rewrite the call that makes an object."""

    @abstractmethod
    def use(self, out: Proposal, slot: Slot, kind: str, use: Use) -> None:
        """Rewrite a use that is a method call or an attribute."""

    def to(self, out: Proposal, node: cst.BaseExpression, module: str, rest: str) -> None:
        """Put a name of ours where a reference to the library stands."""
        out.replace(node, out.need(module, node) + rest)
        out.claimed.append(node)

    def proposals(self) -> list[Proposal]:
        """One for each group of objects whose fates hang together."""
        slots = [s for s in self.flow.found() if s.kinds() & set(self.makes.values())]
        groups: dict[int, list[Slot]] = {id(s): [s] for s in slots}
        for slot in slots:
            for kind, method in self.results:
                made = self.flow.result_of(slot, method) if kind in slot.kinds() else None
                if made is not None and id(made) in groups and groups[id(made)] is not groups[id(slot)]:
                    merged = groups[id(slot)] + groups[id(made)]
                    for member in merged:
                        groups[id(member)] = merged
        distinct = {id(group): group for group in groups.values()}
        return [self._propose(group) for group in distinct.values()]

    def _propose(self, group: list[Slot]) -> Proposal:
        out = Proposal(self.source)
        for slot in group:
            kinds = slot.kinds()
            kind = min(kinds)
            places = [node for _, node in slot.made]
            if len(kinds) > 1:
                out.refuse(places[0], kind, f"the same name holds a {' and a '.join(sorted(kinds))}")
                continue
            for node, what in slot.mixed:
                out.refuse(node, kind, f"the name that holds it is bound to {what} as well")
            for made in places:
                if isinstance(made, cst.Call) and (kind, made) in slot.made and self._is_made(made, kind):
                    before = len(out.problems)
                    self.make(out, made, kind)
                    if len(out.problems) == before:
                        out.counts[kind] += 1
            for use in slot.uses:
                self._one(out, slot, kind, use)
        return out

    def _is_made(self, call: cst.Call, kind: str) -> bool:
        """Whether the call makes the object itself, and is no method of another one."""
        return self.makes.get(self.flow.dotted(call.func)) == kind

    def _one(self, out: Proposal, slot: Slot, kind: str, use: Use) -> None:
        match use.action:
            case "annotation" | "isinstance":
                if use.action == "isinstance" and self.makes.get(self.flow.dotted(use.node)) != kind:
                    return out.refuse(use.node, kind, "it is compared with other classes")
                module, _, name = self.class_name(kind).partition(".")
                self.to(out, use.node, module, f".{name}")
                out.counts[kind] += 1
            case "argument":
                code = self.source.code(use.node)
                out.refuse(
                    use.node, kind, f"`{code}` is handed to {use.name}, of which is not known what it does"
                )
            case "return":
                where = f"{use.name}() hands out a {self.class_name(kind)}: look at its callers elsewhere"
                out.note(use.node, where)
            case "other":
                out.refuse(use.node, kind, f"it gets into {use.name}")
            case _:
                self.use(out, slot, kind, use)
        return None
