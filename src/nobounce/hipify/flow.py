"""Follows objects of the old libraries through a source: from the call that makes one to
everything that is done with it.

What cannot be followed is noted as such on the slot, so that a rule sees that an object gets out of sight.
Only this source is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import libcst as cst

from nobounce.hipify.declared import Class, Declarations, Function
from nobounce.hipify.settling import Pending, Settling
from nobounce.hipify.slots import Arguments, Slot, Use, assign, container, hand_over, use
from nobounce.hipify.source import Source, chain_of

_HARMLESS = frozenset({"print", "repr", "str", "bool", "id", "isinstance", "format"})
_PASSING = frozenset({"list", "tuple", "set", "sorted", "reversed", "iter", "deque"})
_CONTAINERS = frozenset({"list", "tuple", "set", "dict", "deque", "defaultdict", "OrderedDict"})


def _element(slot: Slot | None) -> Slot | None:
    return None if slot is None else slot.element()


class Flow:
    """`makes` gives the kind of object that a call of a dotted name makes, `results` what a method of a kind
    returns, `classes` the kind of a dotted name used as a class, in annotations and isinstance."""

    def __init__(
        self,
        source: Source,
        makes: Mapping[str, str],
        results: Mapping[tuple[str, str], str],
        dotted: Callable[[cst.BaseExpression], str],
    ) -> None:
        self._source, self._makes, self._results, self.dotted = source, makes, results, dotted
        self._declared = Declarations(source)
        self._inside: list[Function | Class] = []
        self._pending: list[Pending] = []
        self._made: list[Slot] = []
        self._statement(source.module)
        self._settling = Settling(source, self._declared, self._pending, self._made, results)
        self._settling.run()

    # statements

    def _statement(self, node: cst.CSTNode) -> None:
        match node:
            case cst.FunctionDef():
                self._enter_function(node)
            case cst.ClassDef():
                for base in node.bases:
                    use(self._value(base.value), Use("other", base.value, "a base class"))
                self._inside.append(self._declared.classes[id(node)])
                self._statement(node.body)
                self._inside.pop()
            case cst.Assign():
                value = self._value(node.value)
                for target in node.targets:
                    self._bind(target.target, value, node.value)
            case cst.AnnAssign():
                slot = self._value(node.value) if node.value is not None else None
                if node.value is not None:
                    self._bind(node.target, slot, node.value)
                self._annotate(self._target(node.target), node.annotation.annotation)
            case cst.AugAssign():
                value = self._value(node.value)
                changed = self._target(node.target)
                if value is not None and changed is not None:
                    changed.join(value)
            case cst.For():
                self._bind(node.target, _element(self._value(node.iter)), node.iter)
                self._statement(node.body)
                if node.orelse is not None:
                    self._statement(node.orelse)
            case cst.With():
                for item in node.items:
                    slot = self._value(item.item)
                    use(slot, Use("method", item.item, "__enter__"))
                    if item.asname is not None:
                        self._bind(item.asname.name, slot, item.item)
                self._statement(node.body)
            case cst.Return():
                if node.value is not None:
                    self._hand_out(node.value, node)
            case cst.Del() | cst.Import() | cst.ImportFrom():
                pass
            case cst.Match():
                use(self._value(node.subject), Use("other", node.subject, "a match statement"))
                for case in node.cases:
                    self._statement(case)
            case cst.ExceptHandler():
                if node.type is not None:
                    self._value(node.type)
                self._statement(node.body)
            case cst.BaseExpression():
                self._value(node)
            case _:
                for child in node.children:
                    self._statement(child)

    def _enter_function(self, node: cst.FunctionDef) -> None:
        function = self._declared.functions[id(node)]
        for decorator in node.decorators:
            self._value(decorator.decorator)
        params = node.params
        every = [*params.posonly_params, *params.params, *params.kwonly_params]
        for param in [*every, params.star_arg, params.star_kwarg]:
            if not isinstance(param, cst.Param):
                continue
            slot = self._declared.variable(param.name)
            if param.default is not None:
                assign(slot, self._value(param.default), param.default)
            if param.annotation is not None:
                self._annotate(slot, param.annotation.annotation)
        if node.returns is not None:
            self._annotate(function.result, node.returns.annotation)
        self._inside.append(function)
        self._statement(node.body)
        self._inside.pop()

    def _hand_out(self, value: cst.BaseExpression, node: cst.CSTNode) -> None:
        """The value of a return or a yield."""
        slot = self._value(value)
        function = next((f for f in reversed(self._inside) if isinstance(f, Function)), None)
        if function is None:
            return
        target = function.result.part("elem") if isinstance(node, cst.Yield) else function.result
        assign(target, slot, value)
        name = function.node.name.value
        if not name.startswith("_") and slot is not None:
            target.uses.append(Use("return", node, name))

    # binding

    def _target(self, node: cst.BaseExpression) -> Slot | None:
        """The slot that a target of an assignment means."""
        match node:
            case cst.Name():
                return self._declared.variable(node)
            case cst.Attribute():
                base = self._value(node.value)
                if base is None:
                    return None
                base.root().uses.append(Use("store", node, node.attr.value))
                return base.part(f"attr:{node.attr.value}")
            case cst.Subscript():
                base = self._value(node.value)
                for element in node.slice:
                    self._statement(element)
                return None if base is None else base.part("elem")
            case cst.StarredElement():
                return self._target(node.value)
        return None

    def _bind(self, target: cst.BaseExpression, slot: Slot | None, value: cst.BaseExpression) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            for i, element in enumerate(target.elements):
                part = None if slot is None else slot.root().fields.get(f"item:{i}")
                if part is None and slot is not None:
                    part = slot.part("elem") if "elem" in slot.root().fields else slot.part(f"item:{i}")
                self._bind(element.value, part, value)
            return
        bound = self._target(target)
        if bound is not None:
            assign(bound, slot, value)
        else:
            use(slot, Use("other", value, "a place that cannot be followed"))

    def _annotate(self, slot: Slot | None, annotation: cst.BaseExpression) -> None:
        """A class named alone, or beside None, says what the slot holds; one inside of
        list[...] what its elements are."""
        if isinstance(annotation, cst.BinaryOperation):
            self._annotate(slot, annotation.left)
            self._annotate(slot, annotation.right)
            return
        if isinstance(annotation, cst.Subscript):
            optional = chain_of(annotation.value).split(".")[-1] in (
                "Optional",
                "Union",
                "Annotated",
                "Final",
            )
            inner = slot if optional or slot is None else slot.part("elem")
            for element in annotation.slice:
                if isinstance(element.slice, cst.Index):
                    self._annotate(inner, element.slice.value)
            return
        kind = self._makes.get(self.dotted(annotation))
        if kind is not None and slot is not None:
            slot.root().made.append((kind, annotation))
            slot.root().uses.append(Use("annotation", annotation))

    # values

    def _container(self) -> Slot:
        made = container()
        self._made.append(made)
        return made

    def _value(self, node: cst.BaseExpression) -> Slot | None:
        """The slot of an expression's value; None for what cannot hold an object of ours."""
        match node:
            case cst.Name():
                if node.value in ("None", "True", "False") or self._declared.declared(node) is not None:
                    return None
                return self._declared.variable(node) if self._source.meaning(node) is None else None
            case cst.Attribute():
                return self._attribute(node)
            case cst.Call():
                return self._call(node)
            case cst.List() | cst.Set():
                made = self._container()
                for element in node.elements:
                    slot = self._value(element.value)
                    if isinstance(element, cst.StarredElement):
                        slot = _element(slot)
                    if slot is not None:
                        made.part("elem").join(slot)
                return made
            case cst.Tuple():
                made = self._container()
                for i, element in enumerate(node.elements):
                    slot = self._value(element.value)
                    if slot is not None and not isinstance(element, cst.StarredElement):
                        made.part(f"item:{i}").join(slot)
                    else:
                        use(slot, Use("other", element.value, "a starred element"))
                return made
            case cst.Dict():
                made = self._container()
                for pair in node.elements:
                    if isinstance(pair, cst.DictElement):
                        self._value(pair.key)
                    slot = self._value(pair.value)
                    if slot is not None:
                        made.part("elem").join(slot if isinstance(pair, cst.DictElement) else _element(slot))
                return made
            case cst.ListComp() | cst.SetComp() | cst.GeneratorExp() | cst.DictComp():
                return self._comprehension(node)
            case cst.Subscript():
                return self._subscript(node)
            case cst.IfExp():
                self._value(node.test)
                return self._either(node.body, node.orelse)
            case cst.BooleanOperation():
                return self._either(node.left, node.right)
            case cst.BinaryOperation():
                return self._either(node.left, node.right)  # lists that are joined or repeated
            case cst.NamedExpr():
                slot = self._value(node.value)
                self._bind(node.target, slot, node.value)
                return slot
            case cst.Yield():
                if isinstance(node.value, cst.BaseExpression):
                    self._hand_out(node.value, node)
                return None
            case cst.Lambda():
                use(self._value(node.body), Use("other", node, "the value of a lambda"))
                return None
            case cst.UnaryOperation() | cst.Comparison() | cst.FormattedString():
                for child in node.children:
                    self._statement(child)
                return None
        for child in node.children:
            if isinstance(child, cst.BaseExpression):
                use(self._value(child), Use("other", child, "an expression"))
            else:
                self._statement(child)
        return None

    def _either(self, left: cst.BaseExpression, right: cst.BaseExpression) -> Slot | None:
        slots = [s for s in (self._value(left), self._value(right)) if s is not None]
        for slot in slots[1:]:
            slots[0].join(slot)
        return slots[0] if slots else None

    def _attribute(self, node: cst.Attribute) -> Slot | None:
        if self.dotted(node):
            return None
        base = self._value(node.value)
        if base is None:
            return None
        use(base, Use("attribute", node, node.attr.value))
        return base.part(f"attr:{node.attr.value}")

    def _subscript(self, node: cst.Subscript) -> Slot | None:
        base = self._value(node.value)
        for element in node.slice:
            self._statement(element)
        if base is None:
            return None
        use(base, Use("method", node, "__getitem__"))
        index = node.slice[0].slice if len(node.slice) == 1 else None
        if isinstance(index, cst.Slice):
            return base
        if isinstance(index, cst.Index) and isinstance(index.value, cst.Integer):
            item = base.root().fields.get(f"item:{index.value.value}")
            if item is not None:
                return item.root()
        return _element(base)

    def _comprehension(self, node: Any) -> Slot:
        made = self._container()
        loop = node.for_in
        while loop is not None:
            self._bind(loop.target, _element(self._value(loop.iter)), loop.iter)
            for test in loop.ifs:
                self._value(test.test)
            loop = loop.inner_for_in
        if isinstance(node, cst.DictComp):
            self._value(node.key)
        slot = self._value(node.value if isinstance(node, cst.DictComp) else node.elt)
        if slot is not None:
            made.part("elem").join(slot)
        return made

    # calls

    def _call(self, node: cst.Call) -> Slot | None:
        args = [(arg, self._value(arg.value)) for arg in node.args]
        dotted = self.dotted(node.func)
        if dotted:
            kind = self._makes.get(dotted)
            hand_over(args, dotted)
            if kind is None:
                return None
            made = Slot()
            made.made.append((kind, node))
            self._made.append(made)
            return made
        declared = self._declared.declared(node.func)
        if declared is not None:
            return self._call_declared(declared, args)
        if isinstance(node.func, cst.Attribute):
            base = self._value(node.func.value)
            if base is None:
                hand_over(args, self._source.code(node.func))
                return None
            name = node.func.attr.value
            use(base, Use("method", node, name))
            result = base.part(f"result:{name}")
            self._pending.append(Pending(base, name, node, args, result))
            return result
        return self._call_name(node, args)

    def _call_name(self, node: cst.Call, args: Arguments) -> Slot | None:
        name = node.func.value if isinstance(node.func, cst.Name) else ""
        builtin = bool(name) and not [a for a in self._source.assignments(node.func) if hasattr(a, "node")]
        if builtin and name == "isinstance" and len(args) == 2:
            use(args[0][1], Use("isinstance", args[1][0].value))
            return None
        if builtin and name in ("enumerate", "zip"):
            made, row = self._container(), self._container()
            made.part("elem").join(row)
            for i, (_, slot) in enumerate(args):
                part = _element(slot)
                if part is not None:
                    row.part(f"item:{i + (name == 'enumerate')}").join(part)
            return made
        if (builtin or name == "deque") and name in _PASSING and len(args) == 1:
            return args[0][1]
        makes = builtin or name in ("deque", "defaultdict", "OrderedDict")
        if makes and name in _CONTAINERS and not any(slot is not None for _, slot in args):
            return self._container() if not args or name == "defaultdict" else None
        if builtin and name == "next" and args:
            return _element(args[0][1])
        if not name:
            use(self._value(node.func), Use("other", node.func, "a call"))
        if not (builtin and (name in _HARMLESS or name in ("len", "sum", "any", "all", "max", "min"))):
            hand_over(args, f"{name or self._source.code(node.func)}()")
        return None

    def _call_declared(self, what: Function | Class, args: Arguments) -> Slot | None:
        if isinstance(what, Class):
            init = what.methods.get("__init__")
            if init is not None:
                init.take(args)
            else:
                hand_over(args, f"{what.node.name.value}()")
            return what.instance.root()
        what.take(args)
        return what.result.root()

    # answers

    def found(self) -> list[Slot]:
        """The slots that hold objects of ours, and who made them."""
        return [s for s in self._settling.all() if s.made]

    def result_of(self, slot: Slot, method: str) -> Slot | None:
        """The slot of what a method of a slot returns, where it is called."""
        part = slot.root().fields.get(f"result:{method}")
        return None if part is None else part.root()
