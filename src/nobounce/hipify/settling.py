"""What method calls mean once all of a source has been read: calls of its own classes, of lists and dicts,
and of the objects looked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from nobounce.hipify.declared import Declarations
from nobounce.hipify.slots import Arguments, Slot, Use, hand_over
from nobounce.hipify.source import Source

_TAKING = frozenset({"append", "add", "appendleft", "insert"})
_GIVING = frozenset({"pop", "popleft", "get", "setdefault"})
_LOOKING = frozenset({"clear", "keys", "remove", "discard", "sort", "reverse", "index", "count"})


@dataclass(eq=False)
class Pending:
    """A method call whose object may turn out to be of a class of this source, or a list."""

    base: Slot
    name: str
    call: cst.Call
    args: Arguments
    result: Slot
    done: bool = False


class Settling:
    """`results`: the kind of object that a method of a kind returns."""

    def __init__(
        self,
        source: Source,
        declared: Declarations,
        pending: list[Pending],
        made: list[Slot],
        results: Mapping[tuple[str, str], str],
    ) -> None:
        self._source, self._declared, self._results = source, declared, results
        self._pending, self._made = pending, made

    def run(self) -> None:
        """Until nothing new comes out; then what is not understood is noted as out of sight."""
        changed = True
        while changed:
            changed = False
            for call in self._pending:
                if not call.done and self._call(call):
                    call.done = changed = True
            for slot in self.all():
                changed |= self._spread(slot)
        for call in self._pending:
            if not call.done:
                hand_over(call.args, f"{self._source.code(call.call.func)}()")
                if not call.base.kinds():
                    call.result.root().mixed.append((call.call, f"what {call.name}() returns"))
        self._parameters()
        for slot in self.all():
            self._contents(slot)
        self._reach()

    def all(self) -> list[Slot]:
        """Every slot that can be reached."""
        seen: dict[int, Slot] = {}
        declared = self._declared
        work = [*declared.variables.values(), *self._made, *(f.result for f in declared.functions.values())]
        work += [c.instance for c in declared.classes.values()]
        work += [p.result for p in self._pending]
        while work:
            slot = work.pop().root()
            if id(slot) not in seen:
                seen[id(slot)] = slot
                work += slot.fields.values()
        return list(seen.values())

    def _call(self, call: Pending) -> bool:
        base = call.base.root()
        if base.owner is not None:
            method = base.owner.methods.get(call.name)
            if method is None:
                return False
            method.take(call.args)
            call.result.join(method.result)
            return True
        if base.kinds() or not base.born:
            return False
        if call.name in _TAKING:
            if not call.args:
                return False
            arg, slot = call.args[-1]
            if slot is not None:
                base.part("elem").join(slot)
            else:
                base.part("elem").mixed.append((arg.value, "something else"))
        elif call.name == "extend" and call.args:
            slot = call.args[0][1]
            if slot is None:
                base.part("elem").mixed.append((call.args[0][0].value, "something else"))
            else:
                base.part("elem").join(slot.element())
        elif call.name in ("values", "copy"):
            call.result.join(base)
        elif call.name == "items":
            call.result.root().born = True
            call.result.part("elem").part("item:1").join(base.element())
        elif call.name in _GIVING:
            call.result.join(base.element())
        else:
            return call.name in _LOOKING
        return True

    def _spread(self, slot: Slot) -> bool:
        """Give the results of methods their kinds."""
        changed = False
        for kind in slot.kinds():
            for name, part in list(slot.fields.items()):
                made = self._results.get((kind, name.removeprefix("result:")))
                if made is not None and name.startswith("result:") and made not in part.kinds():
                    nodes = [u.node for u in slot.uses if u.action == "method" and f"result:{u.name}" == name]
                    part.root().made += [(made, n) for n in nodes]
                    changed = bool(nodes)
        return changed

    def _parameters(self) -> None:
        """A parameter that this source never fills may be anything, unless it is annotated."""
        for function in self._declared.functions.values():
            for name, slot in function.params:
                if not function.called and not any(u.action == "annotation" for u in slot.root().uses):
                    slot.root().mixed.append((function.node, f"what callers give as `{name}`"))

    def _contents(self, slot: Slot) -> None:
        """What may hold other things than this source puts in, and attributes of
        objects that it does not make."""
        if slot.kinds() or slot.owner is not None:
            return
        for name, part in slot.fields.items():
            if name.startswith("attr:"):
                stores = [u for u in slot.uses if u.action == "store" and f"attr:{u.name}" == name]
                part.root().uses += [Use("other", u.node, "an attribute of another object") for u in stores]
            elif name == "elem" and part.root().made and (slot.mixed or not slot.born):
                node = slot.mixed[0][0] if slot.mixed else part.root().made[0][1]
                part.root().mixed.append((node, "what else a list or iterator holds"))

    def _reach(self) -> None:
        """Who gets a list gets what is in it."""
        work = [s for s in self.all() if not s.made]
        told: set[tuple[int, int]] = set()
        while work:
            slot = work.pop().root()
            uses = [u for u in slot.uses if u.action in ("argument", "other", "return")]
            for name, part in slot.fields.items():
                if name != "elem" and not name.startswith("item:"):
                    continue
                new = [u for u in uses if (id(part.root()), id(u)) not in told and u not in part.root().uses]
                if new:
                    told |= {(id(part.root()), id(u)) for u in new}
                    part.root().uses += new
                    if not part.root().made:
                        work.append(part.root())
