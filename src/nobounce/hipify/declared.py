"""The functions, classes and variables of a source, each with its slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from nobounce.hipify.slots import Arguments, Slot, Use, assign, use
from nobounce.hipify.source import Source, chain_of


@dataclass(eq=False)
class Function:
    node: cst.FunctionDef
    params: list[tuple[str, Slot]]
    result: Slot
    owner: Class | None = None
    method: bool = False
    called: bool = False
    """Whether this source calls it by its name."""

    def take(self, args: Arguments) -> None:
        """It is called with these."""
        byname = dict(self.params)
        self.called = True
        for i, (arg, slot) in enumerate(args):
            target = None
            if arg.keyword is not None:
                target = byname.get(arg.keyword.value)
            elif not arg.star and i < len(self.params):
                target = self.params[i][1]
            if target is not None:
                assign(target, slot, arg.value)
            else:
                use(slot, Use("argument", arg.value, f"{self.node.name.value}()"))


@dataclass(eq=False)
class Class:
    node: cst.ClassDef
    instance: Slot
    methods: dict[str, Function] = field(default_factory=dict)


class Declarations:
    """`functions` and `classes` by the id of their node, `variables` by scope, name and `with` block."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.variables: dict[tuple[int, str, int], Slot] = {}
        self.functions: dict[int, Function] = {}
        self.classes: dict[int, Class] = {}
        self._declare(source.module)

    def _declare(self, node: cst.CSTNode, owner: Class | None = None) -> None:
        for child in node.children:
            if isinstance(child, cst.ClassDef):
                made = self.classes[id(child)] = Class(child, Slot())
                made.instance.owner = made
                self._declare(child, made)
            elif isinstance(child, cst.FunctionDef):
                self.functions[id(child)] = self._function(child, owner)
                self._declare(child)
            elif not isinstance(child, cst.BaseExpression):
                self._declare(child, owner if not isinstance(child, cst.FunctionDef) else None)

    def _function(self, node: cst.FunctionDef, owner: Class | None) -> Function:
        decorators = {chain_of(d.decorator) for d in node.decorators}
        params = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
        made = Function(node, [], Slot(), owner, owner is not None and "staticmethod" not in decorators)
        for i, param in enumerate(params):
            slot = self.variable(param.name)
            if made.method and i == 0 and owner is not None:
                if "classmethod" not in decorators:
                    slot.join(owner.instance)
                continue
            made.params.append((param.name.value, slot))
        if owner is not None:
            owner.methods[node.name.value] = made
            if "property" in decorators or "cached_property" in decorators:
                owner.instance.part(f"attr:{node.name.value}").join(made.result)
        return made

    def variable(self, name: cst.Name) -> Slot:
        assignments = self._source.assignments(name)
        scope = assignments[0].scope if assignments else self._source.scope(name)
        block = self._block(name, name)
        if block is None and len(assignments) > 1:
            before = [a for a in assignments if isinstance(getattr(a, "node", None), cst.Name)]
            before = [a for a in before if self._source.span(a.node) <= self._source.span(name)]
            if before:  # after a `with`, its name still is what it was
                last = max((a.node for a in before), key=self._source.span)
                block = self._block(last, last)
        key = id(scope), name.value, id(block)
        if key not in self.variables:
            self.variables[key] = Slot()
        return self.variables[key].root()

    def _block(self, name: cst.Name, at: cst.CSTNode) -> cst.With | None:
        """The innermost `with` that binds the name and that it stands in. Another one may
        bind it to something else."""
        for node in self._source.ancestors(at):
            if isinstance(node, cst.With) and any(
                item.asname is not None
                and isinstance(item.asname.name, cst.Name)
                and item.asname.name.value == name.value
                and not any(a is item.item for a in (at, *self._source.ancestors(at)))
                for item in node.items
            ):
                return node
        return None

    def declared(self, node: cst.BaseExpression) -> Function | Class | None:
        """The function or class of this source that a name means, where it means nothing else."""
        if not isinstance(node, cst.Name):
            return None
        found = [getattr(a, "node", None) for a in self._source.assignments(node)]
        if len(found) != 1 or found[0] is None:
            return None
        return self.functions.get(id(found[0])) or self.classes.get(id(found[0]))
