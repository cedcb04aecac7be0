"""The import statements of a converted source: what is no longer used goes, what the new text
uses comes in its place.

A new import stands where an old one of the same use stood, so that it is tried where the old one was tried
and bound where it was bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
from libcst import metadata as meta

from nobounce.hipify.edits import Edit
from nobounce.hipify.proposal import Proposal
from nobounce.hipify.source import Binding, Meaning, Source, aliases_of, canonical, chain_of, within

STATEMENTS = {
    "nobounce": "import nobounce",
    "hipfile": "from nobounce import hipfile",
    "hip": "from nobounce import hip",
    "os": "import os",
    "torch": "import torch",
}
_OURS = frozenset({"nobounce", "hipfile", "hip"})
HIP_STATEMENTS = {"hipfile": "from hip import hipfile", "hip": "from hip import hip"}


def is_check(source: Source, node: cst.BaseExpression) -> bool:
    """Whether a bare name is only asked for its presence: `kvikio is None`, `if kvikio:`."""
    parent = source.parent(node)
    if not isinstance(node, cst.Name):
        return False
    if isinstance(parent, cst.Comparison):
        target = parent.comparisons[0]
        return isinstance(target.operator, cst.Is | cst.IsNot) and chain_of(target.comparator) == "None"
    return isinstance(parent, cst.If | cst.UnaryOperation | cst.BooleanOperation | cst.Assert | cst.IfExp)


@dataclass(eq=False)
class _Part:
    """A binding of which something goes: the new names that stand for it, what it still is used
    for, where it is asked for."""

    binding: Binding
    wanted: list[str]
    left: list[str]
    checks: list[cst.BaseExpression]
    dropped: int = 0
    """How many of its imports went."""


class Imports:
    """`references` are all of the source's to the old libraries, with their meanings; `gone`
    the ids of those rewritten."""

    def __init__(
        self,
        source: Source,
        prefixes: Sequence[str],
        references: list[tuple[cst.BaseExpression, Meaning]],
        out: Proposal,
        statements: dict[str, str],
    ) -> None:
        self._source, self._prefixes, self._references = source, prefixes, references
        self._out, self._statements = out, statements
        self._gone = {id(node) for node in out.claimed}
        self._placed: set[tuple[int, str]] = set()
        """Scopes, by id, and names that they have."""

    def rewrite(self) -> None:
        needs = list(self._out.needs)
        parts = [p for b in self._bindings() if (p := self._part(b, needs)) is not None]
        statements = {id(s): s for p in parts for s in p.binding.imports}
        for statement in sorted(statements.values(), key=self._source.span):
            self._statement(statement, [p for p in parts if statement in p.binding.imports])
        for part in parts:
            if part.dropped and not part.left:
                for node in [*part.checks, *part.binding.nones]:
                    self._out.replace(node, part.wanted[0] if part.wanted else "nobounce")
            self._placed |= {(id(part.binding.scope), name) for name in part.wanted}
        self._rest(needs)

    def _bindings(self) -> list[Binding]:
        return list({(id(m.binding.scope), m.binding.name): m.binding for _, m in self._references}.values())

    def _part(self, binding: Binding, needs: list[tuple[str, cst.CSTNode]]) -> _Part | None:
        """What a binding is still used for; None where nothing of it goes."""
        mine = [n for n, m in self._references if m.binding is binding]
        gone = [n for n in mine if id(n) in self._gone]
        if not gone:
            return None
        spans = [self._source.span(n) for n in gone]
        places = [(name, self._source.span(node)[0]) for name, node in needs if name in _OURS]
        wanted = {name for name, at in places if any(s <= at < e for s, e in spans)}
        kept = [(n, m) for n, m in self._references if m.binding is binding and id(n) not in self._gone]
        left = [m.dotted for n, m in kept if not is_check(self._source, n)]
        return _Part(binding, sorted(wanted), left, [n for n, _ in kept if is_check(self._source, n)])

    def _statement(self, node: cst.Import | cst.ImportFrom, parts: list[_Part]) -> None:
        """Put the new imports at one old one."""
        every = aliases_of(node)
        unused: list[cst.ImportAlias] = []
        wanted: set[str] = set()
        for part in parts:
            mine = [a for a in every if self._is_unused(node, a, part.binding, part.left)]
            part.dropped += len(mine)
            unused += mine
            if mine or node is part.binding.imports[-1]:
                wanted |= set(part.wanted)
        new = [self._statements[name] for name in sorted(wanted) if not self._has(node, name)]
        if unused or new:
            self._out.counts["import"] += max(len(unused), 1)
        start, end = self._source.span(node)
        if len(unused) == len(every) and every:
            text = self._joined(node, new)
            self._out.edits.append(Edit(start, end, text) if new else self._source.without(node))
            return
        self._out.edits += self._cut(every, unused)
        if new:
            self._out.insert(start, self._joined(node, [*new, ""]))

    def _is_unused(
        self, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, binding: Binding, left: list[str]
    ) -> bool:
        name = alias.evaluated_alias or alias.evaluated_name.split(".")[0]
        if name != binding.name:
            return False
        dotted = alias.evaluated_name
        if isinstance(node, cst.ImportFrom):
            dotted = f"{chain_of(node.module)}.{dotted}" if node.module is not None else dotted
        dotted = canonical(dotted)
        if not any(within(dotted, prefix) for prefix in self._prefixes):
            return False
        return not any(within(other, dotted) or within(dotted, other) for other in left)

    def _has(self, node: cst.CSTNode, name: str) -> bool:
        """Whether an import before this one in the same block has brought the name."""
        text = self._statements[name]
        block = self._source.block(node)
        key = (id(block), name)
        if key in self._placed:
            return True
        self._placed.add(key)
        for other in getattr(block, "body", ()):
            if isinstance(other, cst.SimpleStatementLine) and self._source.span(other) < self._source.span(
                node
            ):
                for small in other.body:
                    if isinstance(small, cst.Import | cst.ImportFrom) and self._brings(small, name, text):
                        return True
        return False

    def _brings(self, node: cst.Import | cst.ImportFrom, name: str, text: str) -> bool:
        code = self._source.code(node)
        if isinstance(node, cst.ImportFrom):
            head = text.rpartition(" import ")[0]
            return code.startswith(f"{head} ") and any(
                a.evaluated_name == name and a.asname is None for a in aliases_of(node)
            )
        return text.startswith("import ") and any(
            a.evaluated_name == name and a.asname is None for a in aliases_of(node)
        )

    def _joined(self, node: cst.CSTNode, texts: list[str]) -> str:
        """Statements one below the other, as they stand in the node's place."""
        line = self._source.parent(node)
        start, _ = self._source.span(node)
        indent = self._source.indent(start)
        alone = indent is not None and isinstance(line, cst.SimpleStatementLine) and line.body[0] is node
        return ("; " if not alone else self._source.newline + (indent or "")).join(texts)

    def _cut(self, every: list[cst.ImportAlias], unused: list[cst.ImportAlias]) -> list[Edit]:
        """Take names out of a statement that keeps others."""
        kept = [a for a in every if a not in unused]
        edits = []
        for alias in unused:
            index = every.index(alias)
            if index < every.index(kept[0]):  # up to the next name
                edits.append(Edit(self._source.span(alias)[0], self._source.span(every[index + 1])[0], ""))
            else:  # from the end of the name before
                edits.append(Edit(self._source.name_end(every[index - 1]), self._source.name_end(alias), ""))
        return edits

    def _rest(self, needs: list[tuple[str, cst.CSTNode]]) -> None:
        """Names that are used where no old import was: imported at the top."""
        missing = sorted({name for name, node in needs if not self._sees(node, name)})
        if missing:
            offset = self._source.top()
            text = "".join(f"{self._statements[name]}{self._source.newline}" for name in missing)
            self._out.insert(offset, text)

    def _sees(self, node: cst.CSTNode, name: str) -> bool:
        """Whether the name is bound where the node is: by what was placed, or by the source itself."""
        scope: meta.Scope | None = self._source.scope(node)
        seen: set[int] = set()
        while scope is not None and id(scope) not in seen:
            seen.add(id(scope))
            if (id(scope), name) in self._placed:
                return True
            if any(isinstance(a, meta.ImportAssignment) and self._is_import_of(a, name) for a in scope[name]):
                return True
            scope = getattr(scope, "parent", None)
        return False

    def _is_import_of(self, assignment: meta.ImportAssignment, name: str) -> bool:
        node = assignment.node
        return isinstance(node, cst.Import | cst.ImportFrom) and self._brings(
            node, name, self._statements[name]
        )
