"""What a rule would do to one group of objects or calls: everything, or nothing with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from nobounce.hipify.edits import Edit
from nobounce.hipify.report import Left, Note
from nobounce.hipify.source import Meaning, Source


@dataclass(slots=True)
class Proposal:
    """Edits, what they need and what they mean. With `problems`, none of it is done.

    `needs` are names that the new text uses ("nobounce", "hipfile", "hip", "os", "torch", "ctypes") and the
    nodes where; `claimed` are the references to the old library that are gone with it.
    """

    source: Source
    edits: list[Edit] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    needs: list[tuple[str, cst.CSTNode]] = field(default_factory=list)
    claimed: list[cst.CSTNode] = field(default_factory=list)
    problems: list[Left] = field(default_factory=list)

    def replace(self, node: cst.CSTNode, text: str) -> None:
        self.edits.append(Edit(*self.source.span(node), text))

    def span(self, start: int, end: int, text: str) -> None:
        """Replace what stands between two offsets."""
        self.edits.append(Edit(start, end, text))

    def insert(self, offset: int, text: str) -> None:
        self.edits.append(Edit(offset, offset, text))

    def after(self, node: cst.CSTNode, text: str) -> None:
        self.insert(self.source.span(node)[1], text)

    def need(self, name: str, node: cst.CSTNode) -> str:
        """The name, noted as needed where the node is."""
        self.needs.append((name, node))
        return name

    def refuse(self, node: cst.CSTNode, name: str, reason: str) -> None:
        self.problems.append(Left(self.source.line(node), name, reason))

    def within(
        self, module: str, references: Sequence[tuple[cst.BaseExpression, Meaning]]
    ) -> Iterator[tuple[cst.BaseExpression, str]]:
        """The references to something in `module`, and its name there; refuses what may mean more."""
        for node, meaning in references:
            rest = meaning.dotted.removeprefix(module).removeprefix(".")
            if meaning.rebound:
                self.refuse(
                    node, meaning.dotted, f"`{meaning.binding.name}` is bound to something else as well"
                )
            elif rest:
                yield node, rest

    def note(self, node: cst.CSTNode, text: str) -> None:
        self.notes.append(Note(self.source.line(node), text))

    def add(self, other: Proposal) -> None:
        self.edits += other.edits
        self.counts += other.counts
        self.notes += other.notes
        self.needs += other.needs
        self.claimed += other.claimed
        self.problems += other.problems


def arguments(call: cst.Call, names: Sequence[str]) -> dict[str, cst.Arg] | None:
    """The arguments by parameter name; None for * and **, too many, or an unknown keyword."""
    found: dict[str, cst.Arg] = {}
    for i, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and i >= len(names)):
            return None
        name = names[i] if arg.keyword is None else arg.keyword.value
        if name not in names or name in found:
            return None
        found[name] = arg
    return found


def rename(proposal: Proposal, call: cst.Call, found: dict[str, cst.Arg], new: dict[str, str]) -> None:
    """Give arguments new names, as keywords; one named "" stays positional and comes first, one
    that is not in `new` goes."""
    for old, arg in found.items():
        if old not in new:
            remove(proposal, call, arg)
        elif arg.keyword is not None:
            if new[old] == "":
                start = proposal.source.span(arg.keyword)[0]
                proposal.edits.append(Edit(start, proposal.source.span(arg.value)[0], ""))
            else:
                proposal.replace(arg.keyword, new[old])
        elif new[old]:
            proposal.insert(proposal.source.span(arg)[0], f"{new[old]}=")


def remove(proposal: Proposal, call: cst.Call, arg: cst.Arg) -> None:
    """Take an argument away, with the comma before it."""
    source, index = proposal.source, list(call.args).index(arg)
    start, end = source.span(arg)
    if index > 0:
        start = source.span(call.args[index - 1])[1]
    elif len(call.args) > 1:
        end = source.span(call.args[1])[0]
    proposal.edits.append(Edit(start, end, ""))


def append(proposal: Proposal, call: cst.Call, text: str) -> None:
    """One more argument at the end of a call that has some."""
    proposal.after(call.args[-1], f", {text}")


def is_statement(source: Source, node: cst.CSTNode) -> bool:
    """Whether the value of a call is dropped."""
    return isinstance(source.parent(node), cst.Expr)


def is_plain(node: cst.BaseExpression) -> bool:
    """Whether evaluating it twice, or not at all, is the same: names, attributes, numbers,
    strings and sums of them."""
    match node:
        case cst.Name() | cst.Integer() | cst.Float() | cst.SimpleString():
            return True
        case cst.Attribute():
            return is_plain(node.value)
        case cst.BinaryOperation():
            return is_plain(node.left) and is_plain(node.right)
        case cst.UnaryOperation():
            return is_plain(node.expression)
        case cst.Subscript():
            return is_plain(node.value) and all(
                isinstance(e.slice, cst.Index) and is_plain(e.slice.value) for e in node.slice
            )
    return False


def is_getter(node: cst.BaseExpression) -> bool:
    """`x.untyped_storage()` and its like: a call without arguments that only looks."""
    return (
        isinstance(node, cst.Call)
        and not node.args
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in ("untyped_storage", "data_ptr", "storage")
        and is_plain(node.func.value)
    )
