"""What a conversion did to one source: its new text, what was rewritten, what was left and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Language = Literal["python", "c"]
Target = Literal["nobounce", "hip"]


LIBRARIES = (
    "kvikio",
    "cuda.bindings.cufile",
    "cuda.bindings.runtime",
    "cuda.bindings.driver",
    "cufile",
    "torch.cuda.gds",
)
"""What is looked for in Python, by the dotted names of the modules."""


def kind_of(name: str) -> str:
    """The kind that a rewritten name is counted under: its library, in C the API
    that it is of, or "import"."""
    for library in LIBRARIES:
        if name == library or name.startswith(f"{library}."):
            return library
    if name == "import" or name.startswith("#include "):
        return "import"
    return "CUDA runtime" if name.startswith("cuda") else "cuFile"


@dataclass(frozen=True, slots=True, order=True)
class Left:
    """A place that keeps its old API: 1-based line, the name as its library spells it,
    the reason as one sentence."""

    line: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True, order=True)
class Note:
    """A place that was rewritten and that its owner should look at, and why."""

    line: int
    text: str


@dataclass(slots=True)
class Converted:
    """The outcome for one source."""

    text: str
    counts: Counter[str] = field(default_factory=Counter)
    """How often each name of the old API was rewritten."""
    left: list[Left] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def kinds(self) -> Counter[str]:
        """The counts by kind."""
        found: Counter[str] = Counter()
        for name, count in self.counts.items():
            found[kind_of(name)] += count
        return found
