"""Which variables, attributes and list elements hold the same objects: a small unification,
without running anything.

Every place that can hold a value is a Slot. Assigning one to another makes them one slot (as in Steensgaard's
analysis), and so are then their elements and attributes. A slot knows where its objects were made, what else
it may hold, and all that is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import libcst as cst

Action = Literal["method", "attribute", "store", "annotation", "isinstance", "argument", "return", "other"]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Something done with what a slot holds. `name`: the method's, the attribute's,
    or whom it is handed to."""

    action: Action
    node: cst.CSTNode
    name: str = ""


@dataclass(slots=True, eq=False)
class Slot:
    """One place, or several that hold the same."""

    joined: Slot | None = None
    fields: dict[str, Slot] = field(default_factory=dict)
    """Slots of what belongs to it: "elem", "item:0", "attr:x", "result:method"."""
    made: list[tuple[str, cst.CSTNode]] = field(default_factory=list)
    """The kinds of objects it holds and where each is made."""
    mixed: list[tuple[cst.CSTNode, str]] = field(default_factory=list)
    """What else it holds or may hold, and in what words."""
    uses: list[Use] = field(default_factory=list)
    owner: Any = None
    """The class that it is an instance of, where that is one of this source."""
    born: bool = False
    """Whether it is a list, tuple, set or dict that this source makes."""

    def root(self) -> Slot:
        at = self
        while at.joined is not None:
            at = at.joined
        return at

    def part(self, name: str) -> Slot:
        """The slot of a field."""
        root = self.root()
        found = root.fields.get(name)
        if found is None:
            found = root.fields[name] = Slot()
        return found.root()

    def join(self, other: Slot | None) -> None:
        """Make both one."""
        work = [(self, other)]
        while work:
            left, right = work.pop()
            if right is None:
                continue
            a, b = left.root(), right.root()
            if a is b:
                continue
            b.joined = a
            a.made += b.made
            a.mixed += b.mixed
            a.uses += b.uses
            a.owner = a.owner or b.owner
            a.born = a.born or b.born
            for name, slot in b.fields.items():
                if name in a.fields:
                    work.append((a.fields[name], slot))
                else:
                    a.fields[name] = slot

    def element(self) -> Slot:
        """The slot of any of its elements."""
        root = self.root()
        for name in [name for name in root.fields if name.startswith("item:")]:
            root.part("elem").join(root.part(name))
        return root.part("elem")

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.root().made}


def container() -> Slot:
    """The slot of a list, tuple, set or dict that is made."""
    return Slot(born=True)


def use(slot: Slot | None, what: Use) -> None:
    """Note a use."""
    if slot is not None:
        slot.root().uses.append(what)


def assign(target: Slot, slot: Slot | None, value: cst.BaseExpression) -> None:
    """What `value` is, and `slot` holds, gets into a target."""
    if slot is not None:
        target.join(slot)
    elif not (isinstance(value, cst.Name) and value.value == "None"):
        target.root().mixed.append((value, "something else"))


Arguments = list[tuple[cst.Arg, Slot | None]]


def hand_over(args: Arguments, whom: str) -> None:
    """The arguments get to what cannot be followed."""
    for arg, slot in args:
        use(slot, Use("argument", arg.value, whom))
