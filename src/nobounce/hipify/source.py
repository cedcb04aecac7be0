"""A parsed Python source: where its nodes are in the text, and what its names mean.

Names are resolved by scope, so that a variable which merely looks like a library's name is not taken for
it. A name that an `except ImportError` sets to None is still the library's; one that is bound to
anything else as well is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import libcst as cst
from libcst import metadata as meta

from nobounce.hipify.edits import Edit, Lines


class Binding(NamedTuple):
    """A name that imports bind: in a scope, by these imports, and set to None at these places."""

    name: str
    scope: meta.Scope
    imports: tuple[cst.Import | cst.ImportFrom, ...]
    nones: tuple[cst.Name, ...]


class Meaning(NamedTuple):
    """What an expression refers to: the full dotted name, through which binding; `rebound` says
    where it is bound to else."""

    dotted: str
    binding: Binding
    rebound: int


class Source:
    """Raises libcst.ParserSyntaxError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = Lines(text)
        self._wrapper = meta.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = self._wrapper.module
        self._positions = self._wrapper.resolve(meta.PositionProvider)
        self._scopes = self._wrapper.resolve(meta.ScopeProvider)
        self._parents = self._wrapper.resolve(meta.ParentNodeProvider)
        self._bindings: dict[tuple[int, str], Binding] = {}
        self.newline = "\r\n" if "\r\n" in text else "\n"

    # places

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Offsets of a node, without the blanks and comments around it."""
        found = self._positions[node]
        return (
            self.lines.offset(found.start.line, found.start.column),
            self.lines.offset(found.end.line, found.end.column),
        )

    def line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line)

    def code(self, node: cst.CSTNode) -> str:
        """The node as it is written."""
        start, end = self.span(node)
        return self.text[start:end]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """From the parent up."""
        at = self.parent(node)
        while at is not None:
            yield at
            at = self.parent(at)

    def indent(self, offset: int) -> str | None:
        """What stands before an offset in its line, if that is blanks alone."""
        before = self.text[self.lines.start(offset) : offset]
        return before if not before.strip(" \t\f") else None

    def whole_line(self, start: int, end: int) -> Edit:
        """Takes away the line that a span stands in, if nothing else does."""
        first = self.lines.start(start)
        rest = re.compile(r"[ \t]*(?:\r\n|\n|\r|$)").match(self.text, end)
        return Edit(first, rest.end(), "") if rest is not None else Edit(start, end, "pass")

    def block(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The block of statements that a node is in."""
        kinds = cst.IndentedBlock | cst.Module | cst.SimpleStatementSuite
        return next((a for a in self.ancestors(node) if isinstance(a, kinds)), None)

    def without(self, node: cst.CSTNode, which: int = 1) -> Edit:
        """Take a small statement away, the `which`-th of its block: with its line, if it is alone there and
        others stay in the block."""
        line = self.parent(node)
        start, end = self.span(node)
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        if alone and len(getattr(self.block(node), "body", ())) > which and self.indent(start) is not None:
            return self.whole_line(start, end)
        return Edit(start, end, "pass")

    def name_end(self, alias: cst.ImportAlias) -> int:
        """Where an imported name ends, without the comma behind it."""
        return self.span(alias.asname.name if alias.asname is not None else alias.name)[1]

    def top(self) -> int:
        """Where a new import may stand: behind the docstring and imports from __future__."""
        body = self.module.body
        for i, statement in enumerate(body):
            first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
            docstring = i == 0 and isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString)
            future = (
                isinstance(first, cst.ImportFrom)
                and first.module is not None
                and chain_of(first.module) == "__future__"
            )
            if not (docstring or future):
                return self.lines.start(self.span(statement)[0])
        return len(self.text)

    # names

    def scope(self, node: cst.CSTNode) -> meta.Scope | None:
        """The scope a node is in."""
        found = self._scopes.get(node)
        at: cst.CSTNode | None = node
        while found is None and at is not None:
            at = self.parent(at)
            found = self._scopes.get(at) if at is not None else None
        return found

    def assignments(self, name: cst.Name) -> list[Any]:
        """What binds the name where it stands."""
        scope = self.scope(name)
        return [] if scope is None else list(scope[name.value])

    def is_import_of(self, assignment: object, packages: tuple[str, ...]) -> bool:
        """Whether a name is bound by importing one of these packages, or from one."""
        node = getattr(assignment, "node", None)
        if isinstance(node, cst.ImportFrom):
            return (
                node.module is not None
                and not node.relative
                and chain_of(node.module).split(".")[0] in packages
            )
        return isinstance(node, cst.Import) and any(
            a.evaluated_name.split(".")[0] in packages for a in node.names
        )

    def meaning(self, node: cst.BaseExpression) -> Meaning | None:
        """What a name or a chain of attributes refers to, if an import binds it."""
        rest: list[str] = []
        at = node
        while isinstance(at, cst.Attribute):
            rest.append(at.attr.value)
            at = at.value
        if not isinstance(at, cst.Name):
            return None
        assignments = self.assignments(at)
        imports = [a for a in assignments if isinstance(a, meta.ImportAssignment)]
        if not imports:
            return None
        binding = self._binding(at.value, assignments, imports)
        others = [
            a
            for a in assignments
            if not isinstance(a, meta.ImportAssignment) and getattr(a, "node", None) not in binding.nones
        ]
        names = {canonical(_dotted(a, at.value, rest)) for a in imports}
        rebound = self.line(others[0].node) if others else 0
        if len(names) > 1:
            return Meaning(min(names), binding, rebound or self.line(imports[-1].node))
        return Meaning(names.pop(), binding, rebound)

    def _binding(self, name: str, assignments: list[Any], imports: list[Any]) -> Binding:
        key = id(imports[0].scope), name
        if key not in self._bindings:
            nodes = tuple(a.node for a in imports)
            nones = tuple(a.node for a in assignments if self._is_none_after(a, nodes))
            self._bindings[key] = Binding(name, imports[0].scope, nodes, nones)
        return self._bindings[key]

    def _is_none_after(self, assignment: Any, imports: tuple[cst.CSTNode, ...]) -> bool:
        """Whether it sets the name to None where one of the imports has failed, or
        before a try that imports it."""
        node = getattr(assignment, "node", None)
        if not isinstance(node, cst.Name):
            return False
        target = self.parent(node)
        statement = self.parent(target) if isinstance(target, cst.AssignTarget) else None
        if not (
            isinstance(statement, cst.Assign)
            and isinstance(statement.value, cst.Name)
            and statement.value.value == "None"
        ):
            return False
        handlers = [a for a in self.ancestors(statement) if isinstance(a, cst.ExceptHandler)]
        tries = [self.parent(h) for h in handlers]
        return any(a is t for t in tries for i in imports for a in self.ancestors(i))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


_SAME = (
    ("cuda.cudart", "cuda.bindings.runtime"),
    ("cuda.cuda", "cuda.bindings.driver"),
    ("cuda.cufile", "cuda.bindings.cufile"),
    ("kvikio.cufile.CuFile", "kvikio.CuFile"),
    ("kvikio.cufile.IOFuture", "kvikio.IOFuture"),
    ("cufile.cufile.CuFile", "cufile.CuFile"),
)
"""Names that a library has twice: the older ones of cuda-python, and a module's beside its package's."""


def within(dotted: str, prefix: str) -> bool:
    """Whether a dotted name is that of a module or package, or of something in it."""
    return dotted == prefix or dotted.startswith(f"{prefix}.")


def canonical(dotted: str) -> str:
    """The one name of what has several."""
    for old, new in _SAME:
        if within(dotted, old):
            return new + dotted[len(old) :]
    return dotted


def _dotted(assignment: Any, name: str, rest: list[str]) -> str:
    """The full name behind `name` and the attributes after it (innermost last)."""
    tail = list(reversed(rest))
    node = assignment.node
    if isinstance(node, cst.ImportFrom):
        module = chain_of(node.module) if node.module is not None else ""
        module = "." * len(node.relative) + module
        found = next(
            (a for a in aliases_of(node) if (a.evaluated_alias or a.evaluated_name) == name),
            None,
        )
        own = found.evaluated_name if found is not None else name
        return ".".join([module, own, *tail])
    for alias in node.names:
        if alias.evaluated_alias == name:
            return ".".join([alias.evaluated_name, *tail])
    return ".".join([name, *tail])


def aliases_of(node: cst.Import | cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(node.names, cst.ImportStar) else list(node.names)


def chain_of(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Attribute):
        return f"{chain_of(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""
